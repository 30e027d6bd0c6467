// End-to-end optimisation of scales and zero points on tiny nets.
#include "compress/e2e.h"

#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <stdexcept>

#include "core/error.h"
#include "core/rng.h"
#include "solver/project.h"
#include "solver/solve.h"
#include "test_support.h"

namespace lacuna::compress {
namespace {

constexpr int64_t kWindow = 32, kWindows = 6;

at::Tensor random_matrix(int64_t N, int64_t K, uint64_t seed) {
  Rng rng(seed);
  at::Tensor W = at::empty({N, K}, at::kFloat);
  for (int64_t i = 0; i < W.numel(); ++i) W.data_ptr<float>()[i] = float(0.1 * rng.normal());
  return W;
}

/// keep: 0 all, 1 half of the groups and no weight of row 1, 2 single weights too.
solver::Solution some_solution(const solver::Grid& grid, int keep_kind) {
  const at::Tensor W = random_matrix(6, 72, 5);
  at::Tensor keep;
  if (keep_kind > 0) {
    keep = at::ones({6, 72}, at::kBool);
    for (int64_t n = 0; n < 6; ++n)
      for (int64_t k = 0; k < 72; ++k)
        keep[n][k] = n != 1 && (n + k / 16) % 2 == 0 && (keep_kind == 1 || (n + k) % 3 != 0);
  }
  const at::Tensor kept = solver::masked(W, keep);
  return solver::stored(solver::round_to_grid(kept, grid, solver::fit_grid(kept, grid)), grid, keep);
}

TEST(TrainedMatrix, IsTheSolutionUntilItIsTrained) {
  for (const bool symmetric : {false, true})
    for (const int bits : {2, 4, 8})
      for (const int keep : {0, 1, 2}) {
        const solver::Grid grid{bits, 16, symmetric};
        const solver::Solution from = some_solution(grid, keep);
        const TrainedMatrix matrix(from, grid, at::kCPU);
        EXPECT_TRUE(matrix.weight().equal(from.weight)) << bits << ' ' << keep;
        EXPECT_TRUE(matrix.solution(from).weight.equal(from.weight)) << bits << ' ' << keep;
        EXPECT_EQ(matrix.parameters().size(), symmetric ? 1u : 2u);
      }
}

TEST(TrainedMatrix, GradientsAreThoseOfScalesAndZeroPoints) {
  const c10::AutoGradMode gradients(true);
  const solver::Grid grid{4, 16};
  const solver::Solution from = some_solution(grid, 2);
  const TrainedMatrix matrix(from, grid, at::kCPU);
  const at::Tensor weights = random_matrix(6, 72, 6);
  (matrix.weight() * weights).sum().backward();
  // In double, group by group: d/ds = sum of (code - zero) w, d/doffset = -s / s_first sum of w, over what is kept.
  const at::Tensor keep = solver::grouped(from.keep.to(at::kDouble), 16),
                   w = solver::grouped(weights.to(at::kDouble), 16);
  const at::Tensor steps = solver::grouped(from.code.to(at::kDouble), 16) - from.zero.to(at::kDouble).unsqueeze(2);
  const at::Tensor live = keep.sum(2).flatten().gt(0).logical_and(from.scale.flatten() > 0).nonzero().flatten();
  const auto near = [&](const at::Tensor& got, const at::Tensor& all) {
    return at::allclose(got.to(at::kDouble), all.flatten().index_select(0, live), 1e-4, 1e-6);
  };
  EXPECT_TRUE(near(matrix.parameters()[0].grad(), (steps * w * keep).sum(2)));
  EXPECT_TRUE(near(matrix.parameters()[1].grad(), -(w * keep).sum(2)));
}

/// Scales and zero points that are past what is stored, below it, between two codes, and as they were.
void move_parameters(const TrainedMatrix& matrix, const at::Tensor& first_zero) {
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> parameters = matrix.parameters();
  const int64_t n = parameters[0].size(0);
  const at::Tensor unit = parameters[0].clone();
  for (int64_t i = 0; i < n; ++i) {
    if (i % 5 == 1) parameters[0][i] = 1e-9F;  // below the least f16
    if (i % 5 == 2) parameters[0][i] *= 1.3717F;
    if (i % 5 == 3) parameters[0][i] = 70000;
    if (parameters.size() == 1) continue;
    if (i % 4 == 1) parameters[1][i] = -2.6F * unit[i];
    if (i % 4 == 2) parameters[1][i] = 300 * unit[i];
    if (i % 4 == 3) parameters[1][i] = (first_zero[i] + 0.3F) * unit[i];
  }
}

TEST(TrainedMatrix, ProductsHaveTheGradientsOfStraightThroughRoundingWhereverParametersAre) {
  const c10::AutoGradMode gradients(true);
  for (const bool symmetric : {false, true})
    for (const int bits : {2, 3, 4, 8})
      for (const int keep_kind : {0, 1, 2}) {
        const solver::Grid grid{bits, 16, symmetric};
        const solver::Solution from = some_solution(grid, keep_kind);
        const at::Tensor keep =
            solver::grouped((from.keep.defined() ? from.keep : at::ones({6, 72}, at::kBool)).to(at::kDouble), 16);
        const at::Tensor live = keep.sum(2).gt(0).logical_and(from.scale > 0).flatten().nonzero().flatten();
        const auto of_live = [&](const at::Tensor& x) { return x.flatten(0, 1).index_select(0, live).to(at::kDouble); };
        const TrainedMatrix matrix(from, grid, at::kCPU);
        move_parameters(matrix, of_live(from.zero).to(at::kFloat));
        const std::vector<at::Tensor> now = matrix.parameters();
        ASSERT_EQ(now[0].size(0), live.size(0));

        // In double and by hand: the stored scale and zero, d/dscale = sum of (code - zero) dW and d/doffset =
        // -scale / unit sum of dW over what is kept, whether clamped or not.
        const at::Tensor scale = now[0].detach().clamp(0x1p-24, 65504).to(at::kHalf).to(at::kDouble);
        const at::Tensor unit = of_live(from.scale);
        const at::Tensor zero =
            symmetric
                ? of_live(from.zero)
                : (now[1].detach() / unit.to(at::kFloat)).round().clamp(0, double((1 << bits) - 1)).to(at::kDouble);
        const at::Tensor steps =
            (of_live(solver::grouped(from.code.to(at::kDouble), 16)) - zero.unsqueeze(1)) * of_live(keep);
        const at::Tensor W = solver::ungrouped(
            at::zeros({6 * 5, 16}, at::kDouble).index_copy(0, live, steps * scale.unsqueeze(1)).reshape({6, 5, 16}),
            72);
        const at::Tensor x = random_matrix(7, 72, 8), dy = random_matrix(7, 6, 9);
        const at::Tensor dW = at::mm(dy.to(at::kDouble).t(), x.to(at::kDouble));
        const at::Tensor dkept = of_live(solver::grouped(dW, 16)) * of_live(keep);
        for (const int64_t most_weights : {1, 150, 1 << 20}) {  // one row, two, all
          for (at::Tensor parameter : now) parameter.mutable_grad().reset();
          at::Tensor in = x.clone().set_requires_grad(true);
          const at::Tensor y = product(in, matrix, most_weights);
          (y * dy).sum().backward();
          // Errors of float32 sums, against the largest: values of clamped scales are up to 65504 * 255.
          const auto near = [](const at::Tensor& got, const at::Tensor& want) {
            const double most = want.abs().max().item<double>();
            return (got.to(at::kDouble) - want).abs().max().item<double>() <= 1e-5 * most;
          };
          EXPECT_TRUE(near(y.detach(), at::mm(x.to(at::kDouble), W.t()))) << bits << ' ' << keep_kind;
          EXPECT_TRUE(near(in.grad(), at::mm(dy.to(at::kDouble), W))) << bits << ' ' << keep_kind;
          EXPECT_TRUE(near(now[0].grad(), (steps * dkept).sum(1))) << bits << ' ' << keep_kind;
          if (!symmetric) {
            EXPECT_TRUE(near(now[1].grad(), -scale / unit * dkept.sum(1))) << bits << ' ' << keep_kind;
          }
        }
        EXPECT_TRUE(matrix.solution(from).weight.equal(matrix.weight().detach())) << bits << ' ' << keep_kind;
      }
}

TEST(TrainedMatrix, KeepsOnItsDeviceWhatTheDocumentationSays) {
  // docs/compress.md: half a byte a kept weight, 10 bytes a kept group, a bit a group.
  const solver::Grid grid{4, 16};
  const at::Tensor W = random_matrix(64, 256, 3);
  at::Tensor keep = at::ones({64, 256}, at::kBool);
  for (int64_t k = 0; k < 256; k += 32) keep.narrow(1, k, 16).zero_();
  const at::Tensor kept = solver::masked(W, keep);
  const solver::Solution from =
      solver::stored(solver::round_to_grid(kept, grid, solver::fit_grid(kept, grid)), grid, keep);
  const int64_t groups = 64 * 16, kept_groups = groups / 2;
  EXPECT_EQ(TrainedMatrix(from, grid, at::kCPU).device_bytes(), kept_groups * (8 + 10) + groups / 8);
  const solver::Grid even{4, 16, true};
  const solver::Solution alike =
      solver::stored(solver::round_to_grid(kept, even, solver::fit_grid(kept, even)), even, keep);
  EXPECT_EQ(TrainedMatrix(alike, even, at::kCPU).device_bytes(), kept_groups * (8 + 6) + groups / 8);
}

struct Walked {
  WalkOptions options;
  std::vector<int32_t> ids;
  Samples samples;
  int64_t layers = 0;
};

Walked walk_it(const io::Checkpoint& checkpoint, const std::string& work, solver::Pattern::Kind kind) {
  Walked out;
  const auto config = model::read_config(checkpoint);
  out.layers = config.n_layers;
  out.options.method = kind == solver::Pattern::Kind::groups ? "gqsa" : "wanda+awq";
  out.options.grid = {4, 16};
  out.options.pattern = {kind, 0.4, 0, 0, 16};
  out.options.work_folder = work;
  out.options.progress = false;
  out.options.keep_solutions = true;
  Rng rng(1);
  for (int64_t i = 0; i < kWindow * kWindows; ++i) out.ids.push_back(int32_t(rng.below(uint64_t(config.n_vocab))));
  out.samples = choose_samples(kWindow * kWindows, {.samples = kWindows, .seq_len = kWindow}, "ids");
  walk(checkpoint, out.ids, out.samples, out.options);
  return out;
}

const E2eOptions kOptions{.epochs = 3, .lr = 2e-3, .batch = 2, .save_every = 2, .seed = 4, .progress = false};

std::string model_of(const io::Checkpoint& checkpoint, const Walked& walked, const std::string& file) {
  write_model(checkpoint, tuned_folder(walked.options.work_folder), walked.layers, file);
  return test::read_text(file);
}

at::Tensor decoded(const PackedLayer& layer, const std::string& name) {
  for (const PackedTensor& tensor : layer.tensors)
    if (tensor.name == name) return unpack(tensor);
  throw std::runtime_error(name);
}

TEST(E2e, LowersTheLossOfEveryFamilyAndLeavesMasks) {
  for (const char* model :
       {"hf/llama_mha", "hf/qwen2", "hf/qwen3", "hf/mistral", "hf/opt", "hf/opt_post_norm_projected"})
    for (const auto kind : {solver::Pattern::Kind::groups, solver::Pattern::Kind::row}) {
      const test::TempDir folder;
      const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture(model));
      const Walked walked = walk_it(checkpoint, folder.file("work"), kind);
      const E2eReport report = e2e(checkpoint, walked.ids, walked.samples, walked.options, kOptions);
      EXPECT_TRUE(report.kept) << model;
      EXPECT_LT(report.after, report.before) << model;
      EXPECT_LT(report.epochs.back(), report.epochs.front()) << model;
      EXPECT_EQ(report.steps, 9) << model;
      const auto name = "blk.0.ffn_up.weight";
      const PackedLayer before = read_layer(layer_path(walked.options.work_folder, 0)),
                        after = read_layer(layer_path(tuned_folder(walked.options.work_folder), 0));
      EXPECT_FALSE(decoded(before, name).equal(decoded(after, name))) << model;
      const auto solutions = read_solutions(solutions_path(walked.options.work_folder, 0));
      const at::Tensor dropped = solutions[size_t(model::Matrix::up)].keep.logical_not();
      EXPECT_GT(dropped.sum().item<int64_t>(), 0);
      EXPECT_TRUE((decoded(after, name).masked_select(dropped) == 0).all().item<bool>()) << model;
    }
}

TEST(E2e, TheLossIsTheRuntimesOwn) {
  const test::TempDir folder;
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  const Walked walked = walk_it(checkpoint, folder.file("work"), solver::Pattern::Kind::groups);
  E2eOptions still = kOptions;
  still.epochs = 1;
  still.lr = 1e-12;
  const E2eReport report = e2e(checkpoint, walked.ids, walked.samples, walked.options, still);
  // The written model through the nets again, in one piece, with LibTorch's own loss.
  model_of(checkpoint, walked, folder.file("out.gguf"));
  const io::Checkpoint made = io::Checkpoint::open(folder.file("out.gguf"));
  const c10::NoGradGuard no_grad;
  const Net net(made);
  const Head head = net.load_head();
  double sum = 0;
  for (int64_t w = 0; w < kWindows; ++w) {
    at::Tensor row = at::empty({1, kWindow}, at::kLong);
    for (int64_t t = 0; t < kWindow; ++t) row[0][t] = walked.ids[size_t(walked.samples.first[size_t(w)] + t)];
    at::Tensor hidden = net.embed(row);
    for (int64_t l = 0; l < walked.layers; ++l) hidden = net.forward(net.load_layer(l), hidden);
    const at::Tensor logits = net.logits(head, hidden)[0].narrow(0, 0, kWindow - 1).to(at::kDouble);
    sum -= logits.log_softmax(1).gather(1, row[0].narrow(0, 1, kWindow - 1).unsqueeze(1)).mean().item<double>();
  }
  EXPECT_NEAR(report.before, sum / kWindows, 1e-4);
}

TEST(E2e, GoesOnWhereItStoppedWithTheSameBytes) {
  struct Stopped {};
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  const test::TempDir whole_folder;
  const Walked whole = walk_it(checkpoint, whole_folder.file("work"), solver::Pattern::Kind::groups);
  const E2eReport one = e2e(checkpoint, whole.ids, whole.samples, whole.options, kOptions);
  const std::string bytes = model_of(checkpoint, whole, whole_folder.file("out.gguf"));
  for (const int64_t stop : {1, 2, 5, 8, 9}) {
    const test::TempDir folder;
    const Walked walked = walk_it(checkpoint, folder.file("work"), solver::Pattern::Kind::groups);
    const auto stopping = [&](int64_t step) {
      if (step == stop) throw Stopped();
    };
    EXPECT_THROW(e2e(checkpoint, walked.ids, walked.samples, walked.options, kOptions, stopping), Stopped);
    const E2eReport rest = e2e(checkpoint, walked.ids, walked.samples, walked.options, kOptions);
    EXPECT_EQ(rest.resumed_steps, stop == 9 ? 9 : stop / 2 * 2);
    EXPECT_EQ(rest.epochs, one.epochs) << stop;
    EXPECT_EQ(rest.after, one.after) << stop;
    EXPECT_TRUE(model_of(checkpoint, walked, folder.file("out.gguf")) == bytes) << stop;
  }
}

TEST(E2e, RefusesAnotherRunsCheckpointAndADamagedOne) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  const test::TempDir folder;
  const Walked walked = walk_it(checkpoint, folder.file("work"), solver::Pattern::Kind::groups);
  e2e(checkpoint, walked.ids, walked.samples, walked.options, kOptions);
  E2eOptions other = kOptions;
  other.lr *= 2;
  EXPECT_THROW(e2e(checkpoint, walked.ids, walked.samples, walked.options, other), Error);
  const Walked elsewhere = walk_it(checkpoint, folder.file("other"), solver::Pattern::Kind::row);
  std::filesystem::copy_file(folder.file("work/e2e.pt"), folder.file("other/e2e.pt"));
  try {
    e2e(checkpoint, elsewhere.ids, elsewhere.samples, elsewhere.options, kOptions);
    ADD_FAILURE() << "another walk's parameters were taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("other solutions"), std::string::npos) << error.what();
  }
  std::filesystem::resize_file(folder.file("work/e2e.pt"), 100);
  EXPECT_THROW(e2e(checkpoint, walked.ids, walked.samples, walked.options, kOptions), Error);
}

TEST(E2e, LeavesTheNetAloneWhereTrainingDoesNotHelp) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  const test::TempDir folder;
  const Walked walked = walk_it(checkpoint, folder.file("work"), solver::Pattern::Kind::groups);
  E2eOptions still = kOptions;
  still.lr = 1e-12;  // no scale reaches another f16
  const E2eReport report = e2e(checkpoint, walked.ids, walked.samples, walked.options, still);
  EXPECT_EQ(report.after, report.before);
  EXPECT_FALSE(report.kept);
  const auto layer = [&](const std::string& work) { return test::read_text(layer_path(work, 0)); };
  EXPECT_TRUE(layer(walked.options.work_folder) == layer(tuned_folder(walked.options.work_folder)));
}

}  // namespace
}  // namespace lacuna::compress
