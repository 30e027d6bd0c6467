// tests/host_device/sparse_check_test.cc - what a benchmark compares before it times tokens that leave inputs out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "core/error.h"
#include "eval/bench.h"
#include "eval/cuda_decode.h"
#include "kernels/plan.h"
#include "loaded_model.h"
#include "model/cuda_decoder.h"
#include "model/synth.h"
#include "test_support.h"

namespace lacuna::eval {
namespace {

using model::Input;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kLayers = 5;

class HostSparseCheck : public testing::Test {
 protected:
  HostSparseCheck() {
    const model::ModelShape shape = {"small", "llama", kLayers, 256,   8, 4,    128,  768,
                                     301,     64,      1e-5,    10000, 1, true, false};
    const std::string path = (folder_.path() / "small.gguf").string();
    ThreadPool pool(2);
    synthesize(shape, path, {.layout = layout::Id::zz8, .head_layout = layout::Id::f32, .progress = false}, pool);
    model_ = std::make_unique<test::LoadedModel>(path);
    gpu_ = model::CudaDecoder::load(model_->checkpoint, model_->pool, device_, {.context = 16, .progress = false});
  }

  /// Every third input, found by its column's norm.
  model::SparsityOptions a_third() const {
    model::Thresholds thresholds;
    thresholds.criterion = model::Criterion::wina;
    thresholds.t.assign(size_t(kLayers), {1e-30f, 1e-30f, 1e-30f, 1e-30f});
    thresholds.realised.assign(size_t(kLayers), {1.0f / 3, 1.0f / 3, 1.0f / 3, 1.0f / 3});
    thresholds.norms.resize(size_t(kLayers));
    const auto widths = model::input_widths(gpu_->config());
    for (auto& layer : thresholds.norms)
      for (size_t i = 0; i < widths.size(); ++i)
        for (int64_t k = 0; k < widths[i]; ++k) layer[i].push_back(k % 3 == 0 ? 0.0f : 1.5f);
    return {thresholds, 2, false};
  }

  test::TempDir folder_;
  cuda::Device device_;
  std::unique_ptr<test::LoadedModel> model_;
  std::unique_ptr<model::CudaDecoder> gpu_;
};

TEST_F(HostSparseCheck, TheSameInputsLeftOutPass) {
  const double dense = check_cuda_decoder(*gpu_, *model_->decoder);
  EXPECT_LT(dense, 0.02);
  const double sparse = check_cuda_sparsity(*gpu_, *model_->decoder, a_third());
  EXPECT_LT(sparse, 0.04);
  ASSERT_TRUE(gpu_->sparsity()) << "the decoder is as it will be timed";
  EXPECT_EQ(gpu_->sparsity()->dense_prefix, 2);
  EXPECT_EQ(gpu_->sparsity()->thresholds.t, a_third().thresholds.t);
  EXPECT_FALSE(model_->decoder->sparsity());
  EXPECT_EQ(gpu_->length(), 0);
}

// Thresholds that leave out next to nothing: the check raises them until it would see what they do.
TEST_F(HostSparseCheck, SmallThresholdsAreChecked) {
  model::SparsityOptions few = a_third();
  few.thresholds.criterion = model::Criterion::magnitude;
  few.thresholds.norms.clear();
  for (auto& layer : few.thresholds.t) layer = {0.1f, 1e-4f, 0.1f, 1e-4f};
  EXPECT_LT(check_cuda_sparsity(*gpu_, *model_->decoder, few), 0.05);
  kernels::Plans plans;
  for (const Group& group : model_groups(model_->checkpoint))
    if (group.parts.size() == 3) plans.set(kernels::plan_key(group.parts), {.dense_below = 0.5});
  const auto other = model::Decoder::load(model_->checkpoint, model_->pool, {.progress = false, .plans = &plans});
  EXPECT_THAT([&] { check_cuda_sparsity(*gpu_, *other, few); },
              ThrowsMessage<Error>(AllOf(HasSubstr("attn_in"), HasSubstr("every fourth"))));
}

// A decoder on the CPU whose plans run one matrix dense stands for a device that leaves out what it must not.
TEST_F(HostSparseCheck, OtherInputsLeftOutAreFound) {
  for (const auto& [input, matrix] : {std::pair{Input::attn_out, "o"}, {Input::ffn_down, "down"}}) {
    kernels::Plans plans;
    for (const Group& group : model_groups(model_->checkpoint))
      if (group.parts.size() == 1 && group.parts[0].shape.K == model::input_widths(gpu_->config())[size_t(input)])
        plans.set(kernels::plan_key(group.parts), {.dense_below = 0.5});
    ASSERT_FALSE(plans.all().empty()) << matrix;
    const auto other = model::Decoder::load(model_->checkpoint, model_->pool, {.progress = false, .plans = &plans});
    EXPECT_THAT([&] { check_cuda_sparsity(*gpu_, *other, a_third()); },
                ThrowsMessage<Error>(AllOf(HasSubstr(std::string(model::name_of(input))), HasSubstr("every fourth"))));
  }
}

}  // namespace
}  // namespace lacuna::eval
