// Learned ranges on tiny nets.
#include "compress/omniquant.h"

#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "compress/made.h"
#include "compress/walk.h"
#include "core/error.h"
#include "core/rng.h"
#include "solver/project.h"
#include "test_support.h"

namespace lacuna::compress {
namespace {

at::Tensor random_matrix(int64_t N, int64_t K, uint64_t seed) {
  Rng rng(seed);
  at::Tensor W = at::empty({N, K}, at::kFloat);
  for (int64_t i = 0; i < W.numel(); ++i) W.data_ptr<float>()[i] = float(0.1 * rng.normal());
  return W;
}

at::Tensor rounded(const at::Tensor& W, const solver::Grid& grid) {
  return solver::decode(solver::round_to_grid(W, grid, solver::fit_grid(W, grid)), grid);
}

TEST(LearnedRanges, WhatIsTrainedIsWhatIsStoredToTheLastBit) {
  for (const bool symmetric : {false, true})
    for (const int bits : {2, 3, 4, 8})
      for (const int64_t group : {16, 128}) {
        const at::Tensor W = random_matrix(6, 72, uint64_t(bits));
        const LearnedRanges ranges(W, {bits, group, symmetric});
        const c10::NoGradGuard no_grad;
        ranges.parameters()[0].copy_(4 + 10 * random_matrix(6, (72 + group - 1) / group, 9).unsqueeze(2));
        const solver::Solution solution = ranges.solution();
        EXPECT_TRUE(ranges.weight().equal(solution.weight)) << bits;
        EXPECT_TRUE(solution.zero.equal(solution.zero.round())) << bits;
        EXPECT_GE(solution.zero.min().item<float>(), 0) << bits;
        EXPECT_LT(solution.zero.max().item<float>(), float(1 << bits)) << bits;
        // The clamped weights span the same grids.
        const solver::Grid grid{bits, group, symmetric};
        EXPECT_TRUE(solver::fit_grid(solution.unrounded, grid).scale.equal(solution.scale)) << bits;
      }
}

TEST(LearnedRanges, BeginNearRounding) {
  // A range is 0.982 of the group's, so that a step is 1.8% smaller: no weight moves by more than half a step and what
  // the ends lose.
  const at::Tensor W = random_matrix(8, 128, 1);
  const solver::Grid grid{4, 32};
  const at::Tensor begun = LearnedRanges(W, grid).solution().weight, plain = rounded(W, grid);
  EXPECT_FALSE(begun.equal(plain));
  const at::Tensor largest = solver::grouped(W, 32).abs().amax({2}, true);
  const at::Tensor error = (solver::grouped(begun - W, 32).abs() / largest).amax();
  EXPECT_LT(error.item<float>(), 0.02 + 1.0 / 15);
}

TEST(LearnedRanges, ReachedInFullTheyAreRounding) {
  const at::Tensor W = random_matrix(8, 128, 1);
  const LearnedRanges ranges(W, {3, 32});
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& strength : ranges.parameters()) at::Tensor(strength).fill_(50);  // sigmoid: 1
  EXPECT_TRUE(ranges.solution().weight.equal(rounded(W, {3, 32})));
}

/// sum of G (code - zero) s in double, with what rounding adds to the scale, the zero point and each place frozen as it
/// is at the strengths `at`, and what is outside of the codes staying there: the function whose slope straight-through
/// rounding takes.
double frozen(const at::Tensor& W, const at::Tensor& G, const solver::Grid& grid, const std::vector<at::Tensor>& at,
              const std::vector<at::Tensor>& now) {
  const at::Tensor w = solver::grouped(W, grid.group(W.size(1)));
  const double codes = double((1 << grid.bits) - 1), half = double(1 << (grid.bits - 1));
  const at::Tensor bottom = w.amin({2}, true).clamp_max(0), top = w.amax({2}, true).clamp_min(0);
  const auto scale_of = [&](const std::vector<at::Tensor>& strength) {
    const at::Tensor high = top * strength[0].sigmoid(), low = bottom * strength[1].sigmoid();
    return grid.symmetric ? at::maximum(high / (half - 1), low / -half) : (high - low) / codes;
  };
  const at::Tensor scale_then = scale_of(at), stored = scale_then.to(at::kHalf).to(at::kDouble);
  const at::Tensor scale = scale_of(now) + (stored - scale_then);
  const auto zero_of = [&](const std::vector<at::Tensor>& strength, const at::Tensor& s) {
    return -bottom * strength[1].sigmoid() / s;
  };
  at::Tensor zero = at::full_like(scale, half);
  if (!grid.symmetric) {
    const at::Tensor then = zero_of(at, stored);
    zero = zero_of(now, scale) + (then.round() - then);  // within the codes
  }
  const at::Tensor then = w / stored, place = w / scale + (then.round() - then) + zero;
  const at::Tensor code_then = then.round() + zero.round();
  const at::Tensor inside = (code_then >= 0).logical_and(code_then <= codes);
  const at::Tensor code = at::where(inside, place, code_then.clamp(0, codes));
  return (solver::ungrouped((code - zero) * scale, W.size(1)) * G).sum().item<double>();
}

TEST(LearnedRanges, GradientsAreTheSlopesOfStraightThroughRounding) {
  const c10::AutoGradMode gradients(true);
  for (const bool symmetric : {false, true})
    for (const int bits : {2, 3, 4, 8}) {
      const solver::Grid grid{bits, 16, symmetric};
      const at::Tensor W = random_matrix(3, 40, uint64_t(bits)).to(at::kDouble),
                       G = random_matrix(3, 40, 7).to(at::kDouble);
      const LearnedRanges ranges(W, grid);
      const std::vector<at::Tensor> parameters = ranges.parameters();
      {
        const c10::NoGradGuard no_grad;
        for (const at::Tensor& strength : parameters) at::Tensor(strength).fill_(1.3);  // a slope that is not small
      }
      (ranges.weight() * G).sum().backward();
      const c10::NoGradGuard no_grad;
      const std::vector<at::Tensor> here = {parameters[0].detach().clone(), parameters[1].detach().clone()};
      for (size_t end = 0; end < 2; ++end)
        for (int64_t n = 0; n < 3; ++n)
          for (int64_t g = 0; g < 3; ++g) {
            constexpr double kStep = 1e-6;
            std::vector<at::Tensor> up = {here[0].clone(), here[1].clone()}, down = {here[0].clone(), here[1].clone()};
            up[end][n][g] += kStep;
            down[end][n][g] -= kStep;
            const double slope = (frozen(W, G, grid, here, up) - frozen(W, G, grid, here, down)) / (2 * kStep);
            const double gradient = parameters[end].grad()[n][g].item<double>();
            EXPECT_NEAR(gradient, slope, 1e-6 * (1 + std::abs(slope))) << bits << ' ' << symmetric << ' ' << end;
          }
    }
}

WalkOptions options_for(const test::TempDir& folder, const std::string& method, int bits, int64_t epochs) {
  WalkOptions options;
  options.method = method;
  options.grid = {bits, 32};
  options.work_folder = folder.file("work");
  options.progress = false;
  options.omniquant = {.epochs = epochs, .lr = 5e-2, .batch = 2};
  return options;
}

/// Error of the first layer's result after rounding to nearest, in the same unit: training begins from it.
double rtn_loss(const io::Checkpoint& checkpoint, int bits) {
  const test::TempDir folder;
  WalkOptions options = options_for(folder, "rtn", bits, 0);
  options.bqpo = {.epochs = 1, .lr = 1e-12, .batch = 8};
  return make(checkpoint, options, folder.file("out.gguf")).report.layers.front().training.before;
}

TEST(Omniquant, LosesLessThanRoundingInEveryFamily) {
  for (const char* model : {"hf/llama_mha", "hf/llama_odd_heads", "hf/qwen2", "hf/qwen3", "hf/mistral", "hf/opt",
                            "hf/opt_post_norm_projected"}) {
    const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture(model));
    const test::TempDir folder;
    const Made made = make(checkpoint, options_for(folder, "omniquant", 2, 20), folder.file("out.gguf"));
    ASSERT_EQ(int64_t(made.report.layers.size()), model::read_config(checkpoint).n_layers) << model;
    for (const LayerReport& layer : made.report.layers) {
      EXPECT_EQ(layer.stage, "omniquant");
      EXPECT_TRUE(layer.training.kept) << model;
      EXPECT_LT(layer.training.after, 0.95 * layer.training.before) << model << " layer " << layer.layer;
      EXPECT_EQ(layer.training.epochs.size(), 20u);
    }
    EXPECT_LT(made.report.layers.front().training.after, 0.95 * rtn_loss(checkpoint, 2)) << model;
    for (const MatrixReport& matrix : made.report.matrices) EXPECT_EQ(matrix.layout, "gq2");
  }
}

TEST(Omniquant, EveryWidthOfBits) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  for (const int bits : {2, 3, 4, 8}) {
    const test::TempDir folder;
    const Made made = make(checkpoint, options_for(folder, "omniquant", bits, 3), folder.file("out.gguf"));
    EXPECT_EQ(made.report.matrices.front().layout, fmt::format("gq{}", bits));
    for (const LayerReport& layer : made.report.layers)
      EXPECT_TRUE(layer.training.after <= layer.training.before || !layer.training.kept);
  }
}

TEST(Omniquant, GoesOnWhereItStoppedWithTheSameBytes) {
  for (const Inputs inputs : {Inputs::compressed, Inputs::dense}) {
    const test::TempDir folder;
    const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
    WalkOptions options = options_for(folder, "omniquant", 3, 3);
    options.inputs = inputs;
    const Made whole = make(checkpoint, options, folder.file("whole.gguf"));
    const int64_t layers = model::read_config(checkpoint).n_layers;
    ASSERT_GE(layers, 2);
    std::filesystem::remove(layer_path(options.work_folder, layers - 1));
    options.hidden_on_disk = true;  // must not matter
    const Made again = make(checkpoint, options, folder.file("again.gguf"));
    EXPECT_EQ(again.report.resumed_layers, layers - 1);
    ASSERT_EQ(again.report.layers.size(), whole.report.layers.size());
    EXPECT_EQ(again.report.layers.front().stage, "omniquant");
    EXPECT_EQ(again.report.layers.front().training.epochs, whole.report.layers.front().training.epochs);
    EXPECT_TRUE(again.bytes == whole.bytes);
    options.omniquant.lr *= 2;
    EXPECT_THROW(make(checkpoint, options, folder.file("other.gguf")), Error);  // another run's folder
  }
}

TEST(Omniquant, DenseInputsAreTheLayersOwn) {
  // The first layer's inputs are the embeddings either way.
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  std::vector<double> before;
  for (const Inputs inputs : {Inputs::compressed, Inputs::dense}) {
    const test::TempDir folder;
    WalkOptions options = options_for(folder, "omniquant", 3, 1);
    options.inputs = inputs;
    const Made made = make(checkpoint, options, folder.file("out.gguf"));
    before.push_back(made.report.layers.front().training.before);
    // On dense inputs a layer is wrong by its own rounding alone.
    if (inputs == Inputs::dense) {
      EXPECT_LT(made.report.layers.back().training.before, 4 * made.report.layers.front().training.before);
    }
  }
  EXPECT_EQ(before[0], before[1]);
}

TEST(Omniquant, WeightsCanBeTrainedFromItsRanges) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  const test::TempDir folder;
  WalkOptions options = options_for(folder, "omniquant", 2, 10);
  options.bqpo = {.epochs = 10, .lr = 1e-3, .batch = 2};
  const Made made = make(checkpoint, options, folder.file("out.gguf"));
  ASSERT_EQ(made.report.layers.size(), 2u * size_t(model::read_config(checkpoint).n_layers));
  EXPECT_EQ(made.report.layers[0].stage, "omniquant");
  EXPECT_EQ(made.report.layers[1].stage, "bqpo");
  EXPECT_EQ(made.report.layers[1].training.before, made.report.layers[0].training.after);
  EXPECT_LT(made.report.layers[1].training.after, made.report.layers[1].training.before);
}

TEST(Omniquant, DropsNothing) {
  const test::TempDir folder;
  WalkOptions options = options_for(folder, "omniquant", 4, 1);
  options.pattern = {solver::Pattern::Kind::row, 0.5};
  EXPECT_THROW(check(options), Error);
}

}  // namespace
}  // namespace lacuna::compress
