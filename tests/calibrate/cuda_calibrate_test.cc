// Calibration on a CUDA device against the CPU's; without a card tests/host_device does the device's work.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "calibrate/cuda_subject.h"
#include "calibrate/same_calibration.h"
#include "kernels/cuda_support.h"
#include "loaded_model.h"
#include "model/cuda_decoder.h"
#include "test_support.h"

namespace lacuna::calibrate {
namespace {

using layout::Id;

class CudaCalibrate : public test::CudaTest {
 protected:
  /// uniform and search: both, on the CPU and on the device.
  void expect_same(Id id, bool biases, const test::CalibrationTolerance& tolerance) {
    SCOPED_TRACE(std::string(layout::get(id).name) + (biases ? " with biases" : ""));
    const test::TempDir folder;
    const std::string path = folder.file("small.gguf");
    test::synthesize_small(path, id, biases);
    test::LoadedModel model(path);
    model::CudaDecoderOptions options;
    options.progress = false;
    options.context = 48;
    const auto decoder = model::CudaDecoder::load(model.checkpoint, model.pool, device(), options);
    CpuSubject cpu(*model.decoder, model.checkpoint);
    CudaSubject gpu(*decoder, model.pool);
    const std::vector<int32_t> ids = test::random_ids(240);
    test::expect_same_calibration(cpu, gpu, model.checkpoint, ids, tolerance);
    test::expect_same_search(cpu, gpu, ids, tolerance);
  }
};

// On the device inputs and weights are rounded to f16, 2^-11 of themselves each, and so are attention's weights: values
// move by some 1e-3, and inputs that near their threshold cross it.
TEST_F(CudaCalibrate, ThresholdsAreThoseOfTheCpu) {
  const test::CalibrationTolerance tolerance = {.uniform = 0.02, .layered = 0.02, .trial = 0.06};
  expect_same(Id::f32, false, tolerance);
  expect_same(Id::f32, true, tolerance);
}

// Many tokens' products of zigzag weights on the CPU are of 8-bit inputs and weights: 2^-8 of a block's largest each.
TEST_F(CudaCalibrate, ThresholdsOfZigzagWeightsAreThoseOfTheCpu) {
  const test::CalibrationTolerance tolerance = {.uniform = 0.04, .layered = 0.03, .trial = 0.15};
  expect_same(Id::zz8, true, tolerance);
  expect_same(Id::zz4_k, true, tolerance);
}

// Counts are whole numbers and sums in a fixed order.
TEST_F(CudaCalibrate, TheSameBitsAgain) {
  const test::TempDir folder;
  const std::string path = folder.file("small.gguf");
  test::synthesize_small(path, Id::zz4_k, false);
  test::LoadedModel model(path);
  std::vector<model::ThresholdSet> found;
  for (int run = 0; run < 2; ++run) {
    model::CudaDecoderOptions options;
    options.progress = false;
    options.context = 48;
    const auto decoder = model::CudaDecoder::load(model.checkpoint, model.pool, device(), options);
    CudaSubject gpu(*decoder, model.pool);
    found.push_back(calibrate(gpu, model.checkpoint, test::random_ids(240), "sha", test::small_calibration()).set);
  }
  for (size_t e = 0; e < found[0].entries.size(); ++e) {
    EXPECT_EQ(found[0].entries[e].t, found[1].entries[e].t);
    EXPECT_EQ(found[0].entries[e].realised, found[1].entries[e].realised);
  }
}

}  // namespace
}  // namespace lacuna::calibrate
