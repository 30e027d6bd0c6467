// Block optimisation on tiny nets.
#include "compress/bqpo.h"

#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/models.h"
#include "compress/made.h"
#include "compress/walk.h"
#include "core/error.h"
#include "core/rng.h"
#include "solver/project.h"
#include "test_support.h"

namespace lacuna::compress {
namespace {

using testing::HasSubstr;

at::Tensor random_matrix(int64_t N, int64_t K, uint64_t seed) {
  Rng rng(seed);
  at::Tensor W = at::empty({N, K}, at::kFloat);
  for (int64_t i = 0; i < W.numel(); ++i) W.data_ptr<float>()[i] = float(0.1 * rng.normal());
  return W;
}

/// Every other group of 16, and a whole row, dropped.
at::Tensor some_groups(int64_t N, int64_t K) {
  at::Tensor keep = at::ones({N, K}, at::kBool);
  for (int64_t n = 0; n < N; ++n)
    for (int64_t k = 0; k < K; ++k) keep[n][k] = n != 1 && (n + k / 16) % 2 == 0;
  return keep;
}

TEST(FakeQuantize, IsWhatIsStoredToTheLastBit) {
  for (const bool symmetric : {false, true})
    for (const int bits : {2, 3, 4, 8}) {
      const at::Tensor W = random_matrix(6, 72, uint64_t(bits)), keep = some_groups(6, 72);
      const solver::Grid grid{bits, 16, symmetric};
      const at::Tensor kept = solver::masked(W, keep);
      const auto rounded = solver::round_to_grid(kept, grid, solver::fit_grid(kept, grid));
      EXPECT_TRUE(fake_quantize(W, keep, grid).equal(solver::stored(rounded, grid, keep).weight)) << bits;
    }
}

TEST(FakeQuantize, PassesGradientsToWhatIsKeptAndNothingElse) {
  const c10::AutoGradMode gradients(true);
  at::Tensor W = random_matrix(6, 64, 1).set_requires_grad(true);
  const at::Tensor keep = some_groups(6, 64), weights = random_matrix(6, 64, 2);
  (fake_quantize(W, keep, {4, 16}) * weights).sum().backward();
  const at::Tensor gradient = W.grad();
  EXPECT_TRUE(gradient.masked_select(keep.logical_not()).equal(at::zeros({keep.logical_not().sum().item<int64_t>()})));
  // Inside a group's range rounding counts as the identity: all but the two weights that span the grid.
  const at::Tensor same = (gradient - weights).abs() < 1e-5;
  EXPECT_GE(same.logical_and(keep).sum().item<int64_t>(), keep.sum().item<int64_t>() * 13 / 16);
}

TEST(FakeQuantize, GradientOfTheScaleIsTheSlopeOfStretching) {
  // W grown by a factor: codes stay, so that values grow by it too, and the gradients along W add up to that.
  const c10::AutoGradMode gradients(true);
  at::Tensor W = random_matrix(2, 32, 3).set_requires_grad(true);
  const at::Tensor weights = random_matrix(2, 32, 4), keep = at::ones({2, 32}, at::kBool);
  const at::Tensor value = fake_quantize(W, keep, {4, 16});
  (value * weights).sum().backward();
  const double along = (W.grad() * W.detach()).sum().item<double>(), slope = (value * weights).sum().item<double>();
  EXPECT_NEAR(along, slope, 0.02 * (value * weights).abs().sum().item<double>());
}

TEST(FakeQuantize, SurvivesZeroGroupsWithGradients) {
  const c10::AutoGradMode gradients(true);
  at::Tensor W = at::zeros({3, 32}, at::kFloat).set_requires_grad(true);
  (fake_quantize(W, {}, {4, 16}) * 2).sum().backward();
  EXPECT_TRUE(W.grad().isfinite().all().item<bool>());
}

WalkOptions options_for(const test::TempDir& folder, const std::string& method, int64_t epochs) {
  WalkOptions options;
  options.method = method;
  options.grid = {4, 16};
  options.pattern = {solver::Pattern::Kind::groups, 0.5, 0, 0, 16};
  options.work_folder = folder.file("work");
  options.progress = false;
  options.bqpo = {.epochs = epochs, .lr = 3e-3, .batch = 3};
  return options;
}

TEST(Bqpo, BringsEveryLayersResultNearerInEveryFamily) {
  for (const char* model : {"hf/llama_mha", "hf/llama_odd_heads", "hf/qwen2", "hf/qwen3", "hf/mistral", "hf/opt",
                            "hf/opt_post_norm_projected"}) {
    if (!std::filesystem::exists(test::fixture(model))) ADD_FAILURE() << model;
    const test::TempDir folder;
    const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture(model));
    WalkOptions options = options_for(folder, "gqsa", 15);
    options.bqpo.lr = 1e-2;
    const Made made = make(checkpoint, options, folder.file("out.gguf"));
    ASSERT_EQ(int64_t(made.report.layers.size()), model::read_config(checkpoint).n_layers) << model;
    for (const LayerReport& layer : made.report.layers) {
      EXPECT_TRUE(layer.training.kept) << model;
      EXPECT_LT(layer.training.after, 0.85 * layer.training.before) << model << " layer " << layer.layer;
      EXPECT_EQ(layer.training.epochs.size(), 15u);
      EXPECT_LT(layer.training.epochs.back(), layer.training.epochs.front()) << model;
    }
  }
}

TEST(Bqpo, LeavesTheMaskAsTheSolverChoseIt) {
  const test::TempDir folder;
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  make(checkpoint, options_for(folder, "gqsa", 0), folder.file("plain.gguf"));
  std::filesystem::remove_all(folder.file("work"));
  make(checkpoint, options_for(folder, "gqsa", 3), folder.file("trained.gguf"));
  const auto first = "blk.0.ffn_up.weight";  // of the first layer: later ones see other inputs
  const auto decoded = [&](const char* file) {
    const io::Checkpoint made = io::Checkpoint::open(folder.file(file));
    const io::Tensor& tensor = made.require(first);
    at::Tensor out = at::empty({tensor.shape.N, tensor.shape.K}, at::kFloat);
    layout::decode_rows(*tensor.layout, tensor.shape, tensor.bytes, 0, tensor.shape.N, out.data_ptr<float>(),
                        tensor.params);
    return out;
  };
  const at::Tensor plain = decoded("plain.gguf"), trained = decoded("trained.gguf");
  EXPECT_FALSE(plain.equal(trained));
  const auto dropped = [](const at::Tensor& w) { return (solver::grouped(w, 16).abs().amax({2}) == 0); };
  EXPECT_TRUE(dropped(plain).equal(dropped(trained)));
}

TEST(Bqpo, StartsFromTheSolversValuesBeforeRounding) {
  const test::TempDir folder;
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  const Made awp = make(checkpoint, options_for(folder, "awp+", 3), folder.file("out.gguf"));
  for (const LayerReport& layer : awp.report.layers) EXPECT_LE(layer.training.after, layer.training.before);
}

TEST(Bqpo, GoesOnWhereItStoppedWithTheSameBytes) {
  const test::TempDir folder;
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  WalkOptions options = options_for(folder, "gqsa", 2);
  const Made whole = make(checkpoint, options, folder.file("whole.gguf"));
  const int64_t layers = model::read_config(checkpoint).n_layers;
  ASSERT_GE(layers, 2);
  std::filesystem::remove(layer_path(options.work_folder, layers - 1));
  options.hidden_on_disk = true;  // must not matter
  const Made again = make(checkpoint, options, folder.file("again.gguf"));
  EXPECT_EQ(again.report.resumed_layers, layers - 1);
  EXPECT_EQ(again.report.layers.size(), whole.report.layers.size());
  EXPECT_TRUE(again.bytes == whole.bytes);
  options.bqpo.lr *= 2;
  EXPECT_THROW(make(checkpoint, options, folder.file("other.gguf")), Error);  // another run's folder
}

TEST(Bqpo, KeepsTheSolversLayerWhereTrainingMakesItWorse) {
  const test::TempDir folder;
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  WalkOptions options = options_for(folder, "gqsa", 1);
  options.bqpo.lr = 0.5;
  const Made made = make(checkpoint, options, folder.file("out.gguf"));
  WalkOptions plain = options_for(folder, "gqsa", 0);
  plain.work_folder = folder.file("plain-work");
  const Made without = make(checkpoint, plain, folder.file("plain.gguf"));
  EXPECT_FALSE(made.report.layers[0].training.kept);
  EXPECT_GE(made.report.layers[0].training.after, made.report.layers[0].training.before);
  EXPECT_EQ(made.report.matrices[0].loss, without.report.matrices[0].loss);
}

}  // namespace
}  // namespace lacuna::compress
