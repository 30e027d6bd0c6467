// tests/host_device/calibrate_test.cc - calibration on a device that is the host, against the CPU's: which values are
// seen, masked and compared. What kernels compute is tested elsewhere.
#include "calibrate/calibrate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "calibrate/cuda_subject.h"
#include "calibrate/same_calibration.h"
#include "core/error.h"
#include "loaded_model.h"
#include "model/cuda_decoder.h"
#include "test_support.h"

namespace lacuna::calibrate {
namespace {

using layout::Id;
using testing::HasSubstr;
using testing::ThrowsMessage;

/// Random weights on the CPU and on the device.
struct Both {
  /// bad_token: its embedding holds infinity at 5; -1: none.
  explicit Both(Id id, bool biases, int64_t shards = 1, int64_t gpu_layers = 0, int64_t bad_token = -1) {
    const std::string path = (folder.path() / "small.gguf").string();
    test::synthesize_small(path, id, biases);
    if (bad_token >= 0) write_infinity(path, bad_token);
    cpu = std::make_unique<test::LoadedModel>(path);
    model::CudaDecoderOptions options;
    options.progress = false;
    options.context = 48;
    options.shards = shards;
    options.gpu_layers = gpu_layers;
    gpu = model::CudaDecoder::load(cpu->checkpoint, cpu->pool, device, options);
    ids = test::random_ids(240);
  }
  /// In the f32 embedding of one token.
  static void write_infinity(const std::string& path, int64_t token) {
    std::string bytes = test::read_text(path);
    const io::Checkpoint checkpoint = io::Checkpoint::open(path);
    const io::Tensor& words = checkpoint.require("token_embd.weight");
    const auto row = words.bytes.subspan(size_t(token * words.shape.K) * sizeof(float), 64);
    const size_t at = bytes.find(std::string_view(reinterpret_cast<const char*>(row.data()), row.size()));
    ASSERT_NE(at, std::string::npos);
    const float infinity = std::numeric_limits<float>::infinity();
    std::memcpy(bytes.data() + at + 5 * sizeof(float), &infinity, sizeof(float));
    std::ofstream(path, std::ios::binary) << bytes;
  }

  test::TempDir folder;
  cuda::Device device;
  std::unique_ptr<test::LoadedModel> cpu;
  std::unique_ptr<model::CudaDecoder> gpu;
  std::vector<int32_t> ids;
};

class HostCalibrate : public testing::TestWithParam<std::pair<Id, bool>> {
 protected:
  /// The device's products are exact but for the f16 of keys and values, which the CPU's blocks do not round. That
  /// moves an input across its threshold now and then. Many tokens' products of zigzag weights on the CPU are of 8-bit
  /// inputs and weights: 2^-8 of a block's largest each.
  static test::CalibrationTolerance tolerance() {
    return GetParam().first == Id::f32 ? test::CalibrationTolerance{.uniform = 0.01, .layered = 0.01, .trial = 0.03}
                                       : test::CalibrationTolerance{.uniform = 0.03, .layered = 0.02, .trial = 0.12};
  }
};
INSTANTIATE_TEST_SUITE_P(Models, HostCalibrate,
                         testing::Values(std::pair{Id::f32, false}, std::pair{Id::f32, true},
                                         std::pair{Id::zz8, true}));

TEST_P(HostCalibrate, ThresholdsAreThoseOfTheCpu) {
  Both both(GetParam().first, GetParam().second);
  CpuSubject cpu(*both.cpu->decoder, both.cpu->checkpoint);
  CudaSubject gpu(*both.gpu, both.cpu->pool);
  test::expect_same_calibration(cpu, gpu, both.cpu->checkpoint, both.ids, tolerance());
}

TEST_P(HostCalibrate, TheSearchIsThatOfTheCpu) {
  Both both(GetParam().first, GetParam().second);
  CpuSubject cpu(*both.cpu->decoder, both.cpu->checkpoint);
  CudaSubject gpu(*both.gpu, both.cpu->pool);
  test::expect_same_search(cpu, gpu, both.ids, tolerance());
}

// A window in batches, of which the first ends before the positions that are left out do.
TEST(HostCalibrateOnce, BatchesContinueAWindow) {
  Both both(Id::f32, false);
  CpuSubject cpu(*both.cpu->decoder, both.cpu->checkpoint);
  CudaSubject gpu(*both.gpu, both.cpu->pool);
  model::SparsityOptions options;
  options.dense_prefix = 6;
  options.thresholds.t.assign(2, {0.5f, 0.02f, 0.5f, 0.01f});
  const auto run = [&](Subject& subject) {
    std::vector<int64_t> tokens;
    std::vector<Histogram> sizes(1);
    subject.set_sparsity(options);
    subject.begin(40);
    for (const auto& [first, count] : {std::pair{size_t{0}, size_t{3}}, {3, 2}, {5, 35}})
      subject.run(std::span(both.ids).subspan(first, count), 4,
                  [&](int64_t layer, model::Input input, const SeenInputs& inputs) {
                    if (layer != 1 || input != model::Input::ffn_down) return;
                    tokens.push_back(inputs.tokens());
                    const SeenInputs::Sizes to = {nullptr, &sizes[0]};
                    inputs.add_sizes({&to, 1}, 1);
                  });
    EXPECT_EQ(tokens, (std::vector<int64_t>{0, 1, 35}));
    EXPECT_EQ(sizes[0].count(), 36 * 320);
    return std::pair{subject.realised(), sizes[0].quantile(0.5)};
  };
  const auto [expected, size] = run(cpu);
  const auto [found, other] = run(gpu);
  EXPECT_NEAR(other, size, 0.01f * size);
  for (size_t l = 0; l < 2; ++l)
    for (size_t i = 0; i < size_t(model::kInputs); ++i) {
      EXPECT_GT(expected[l][i], 0.02) << l << " " << i;
      EXPECT_NEAR(found[l][i], expected[l][i], 0.01) << l << " " << i;
    }
}

// Nothing of calibration is left behind: tokens run as before.
TEST(HostCalibrateOnce, TheDecoderIsAsBefore) {
  Both both(Id::f32, false);
  const auto logits = [&] {
    both.gpu->truncate(0);
    const auto found = both.gpu->forward(std::span(both.ids).first(12));
    std::vector<float> out(found.begin(), found.end());
    const auto next = both.gpu->forward(std::span(both.ids).subspan(12, 1));
    out.insert(out.end(), next.begin(), next.end());
    return out;
  };
  const std::vector<float> before = logits();
  CudaSubject gpu(*both.gpu, both.cpu->pool);
  CalibrateOptions options = test::small_calibration();
  options.modes = {model::Mode::greedy};
  calibrate(gpu, both.cpu->checkpoint, both.ids, "sha", options);
  EXPECT_EQ(logits(), before);
}

TEST(HostCalibrateOnce, RefusesWhatItCannotDo) {
  Both both(Id::f32, false);
  CudaSubject gpu(*both.gpu, both.cpu->pool);
  CalibrateOptions options = test::small_calibration();
  options.group = 8;
  EXPECT_THAT([&] { calibrate(gpu, both.cpu->checkpoint, both.ids, "sha", options); },
              ThrowsMessage<Error>(HasSubstr("leave out --group")));
  options.group = 1;
  options.modes = {model::Mode::greedy};
  options.search_window = 49;
  EXPECT_THAT([&] { calibrate(gpu, both.cpu->checkpoint, both.ids, "sha", options); },
              ThrowsMessage<Error>(HasSubstr("windows of 49 tokens; the context holds 48")));
  Both half(Id::f32, false, 1, 1);
  EXPECT_THAT([&] { CudaSubject(*half.gpu, half.cpu->pool); }, ThrowsMessage<Error>(HasSubstr("--gpu-layers")));
  Both split(Id::f32, false, 2);
  EXPECT_THAT([&] { CudaSubject(*split.gpu, split.cpu->pool); }, ThrowsMessage<Error>(HasSubstr("--gpu-split")));
}

// Layer, input, place and value, in the positions that count.
TEST(HostCalibrateOnce, NamesAValueThatIsNotFinite) {
  Both both(Id::f32, false, 1, 0, 77);
  for (int32_t& id : both.ids) id = id == 77 ? 78 : id;
  CpuSubject cpu(*both.cpu->decoder, both.cpu->checkpoint);
  CudaSubject gpu(*both.gpu, both.cpu->pool);
  const auto collect = [&](Subject& subject, size_t bad) {
    std::vector<int32_t> ids(both.ids.begin(), both.ids.begin() + 96);
    ids[bad] = 77;
    return collect_statistics(subject, ids, {}, {.ctx = 48, .skipped = 4, .progress = false}).tokens;
  };
  EXPECT_THAT([&] { collect(gpu, 57); },
              ThrowsMessage<Error>(HasSubstr("layer 0, attn_in: value 5 of the token at position 9 is")));
  std::string expected, found;
  for (auto& [subject, what] : {std::pair<Subject*, std::string*>{&cpu, &expected}, {&gpu, &found}}) {
    try {
      collect(*subject, 57);
    } catch (const Error& error) {
      *what = error.what();
    }
  }
  EXPECT_EQ(found, expected);
}

}  // namespace
}  // namespace lacuna::calibrate
