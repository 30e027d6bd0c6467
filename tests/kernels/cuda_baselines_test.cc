// tests/kernels/cuda_baselines_test.cc - SpQt's baselines on a CUDA device against double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "core/thread_pool.h"
#include "kernels/cuda/active.h"
#include "kernels/cuda/baselines.h"
#include "kernels/cuda/prepared.h"
#include "kernels/cuda_support.h"
#include "kernels/linear.h"
#include "layout/layout.h"
#include "layout/q4_K.h"

namespace lacuna {
namespace {

using layout::Id;
using layout::Shape;

class CudaBaselines : public test::CudaTest, public testing::WithParamInterface<Shape> {
 protected:
  /// A matrix and an input whose values at even places are left out by a threshold of 1, one of which is that itself.
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    x_.resize(size_t(GetParam().K));
    Rng rng(3);
    for (size_t k = 0; k < x_.size(); ++k)
      x_[k] = k % 2 == 0 ? 0.9f * float(rng.uniform()) : (rng.below(2) == 0 ? 1.0f : -1.5f);
    for (int32_t k = 0; k < int32_t(x_.size()); ++k)
      if (!(std::fabs(x_[size_t(k)]) < 1)) active_.push_back(k);
    x_there_ = to_device(x_);
  }
  /// Random blocks of q4_K, by rows or by columns.
  kernels::WeightView make(Id id) {
    const layout::Layout& layout = layout::get(id);
    bytes_.resize(size_t(layout.size_bytes(GetParam())));
    Rng rng(5);
    for (size_t at = 0; at < bytes_.size(); at += sizeof(layout::Q4KBlock)) {
      layout::Q4KBlock block;
      for (uint8_t& byte : block.scale_min) byte = uint8_t(rng.next() >> 56);
      for (uint8_t& byte : block.code) byte = uint8_t(rng.next() >> 56);
      block.d = to_f16(float(rng.normal() * 0.01));
      block.dmin = to_f16(float(rng.normal() * 0.01));
      std::memcpy(&bytes_[at], &block, sizeof(block));
    }
    return {"w", &layout, GetParam(), bytes_};
  }
  /// Error of y, relative to the size of the product.
  double error(const kernels::WeightView& weight, const std::vector<float>& y) {
    const int64_t N = GetParam().N;
    kernels::Activation input{x_.data(), 1, GetParam().K};
    input.active = active_.data();
    input.active_count = int64_t(active_.size());
    std::vector<float> expected(static_cast<size_t>(N));
    kernels::reference_linear(weight, input, {expected.data(), N});
    double difference = 0, size = 0;
    for (int64_t n = 0; n < N; ++n) {
      difference += std::pow(double(y[size_t(n)]) - double(expected[size_t(n)]), 2);
      size += std::pow(double(expected[size_t(n)]), 2);
    }
    return std::sqrt(difference / size);
  }
  /// Prepared zigzag weights on the device, and outputs of zeros.
  cuda::GemvArgs upload(const kernels::WeightView& weight) {
    const cuda::PreparedGroup group = cuda::prepare_group({&weight, 1}, pool_);
    codes_ = cuda::Buffer(device(), int64_t(group.codes.size()), "codes");
    codes_.upload(group.codes.bytes());
    headers_ = cuda::Buffer(device(), int64_t(group.headers.size()), "headers");
    headers_.upload(group.headers.bytes());
    y_ = to_device(std::vector<float>(size_t(group.rows * 256)));
    cuda::GemvArgs args;
    args.weights = {codes_.data(), headers_.data(), group.rows, group.K};
    args.x = x_there_.as<float>();
    args.threshold = 1;
    args.y = y_.as<float>();
    return args;
  }

  ThreadPool pool_{2};
  std::vector<std::byte> bytes_;
  std::vector<float> x_;
  std::vector<int32_t> active_;
  cuda::Buffer x_there_, codes_, headers_, y_;
};

INSTANTIATE_TEST_SUITE_P(Shapes, CudaBaselines,
                         testing::Values(Shape{1, 256}, Shape{6, 512}, Shape{300, 1024}, Shape{1024, 2560}),
                         [](const auto& at) { return std::to_string(at.param.N) + "x" + std::to_string(at.param.K); });

// Products and sums are f32: K of them are off by K * 2^-24 of their sizes at most, which is under 2e-4 here.
TEST_P(CudaBaselines, RowsThatSkipWeights) {
  const kernels::WeightView weight = make(Id::q4_K);
  const cuda::Buffer there = to_device(bytes_), y = to_device(std::vector<float>(size_t(GetParam().N)));
  cuda::launch_skipping_rows(device(), stream(),
                             {there.data(), GetParam().N, GetParam().K, x_there_.as<float>(), 1, y.as<float>()});
  stream().synchronize();
  EXPECT_LT(error(weight, to_host<float>(y)), 2e-4);
}

// The zigzag kernels' arithmetic: gemv.h says how far it is off.
TEST_P(CudaBaselines, ColumnsWithoutBalancing) {
  const kernels::WeightView weight = make(Id::zz4_k);
  const cuda::GemvArgs args = upload(weight);
  for (const int segments : {1, 3}) {
    y_.fill(0);
    cuda::launch_unbalanced(device(), stream(), segments, args);
    stream().synchronize();
    EXPECT_LT(error(weight, to_host<float>(y_)), 3e-3) << segments;
  }
}

TEST_P(CudaBaselines, ColumnsByAtomics) {
  const kernels::WeightView weight = make(Id::zz4_k);
  cuda::GemvArgs args = upload(weight);
  const cuda::Buffer list = to_device(active_), count = to_device(std::vector<int32_t>{int32_t(active_.size())});
  args.list = list.as<int32_t>();
  args.count = count.as<int32_t>();
  cuda::launch_column_parallel(device(), stream(), args);
  stream().synchronize();
  EXPECT_LT(error(weight, to_host<float>(y_)), 3e-3);
}

TEST_P(CudaBaselines, RefuseWhatTheyDoNotDo) {
  const kernels::WeightView weight = make(Id::zz4_k);
  cuda::GemvArgs args = upload(weight);
  args.up = args.x;
  EXPECT_THROW(cuda::launch_unbalanced(device(), stream(), 1, args), Error);
  EXPECT_THROW(cuda::launch_skipping_rows(device(), stream(), {codes_.data(), 1, 300, args.x, 1, args.y}), Error);
}

}  // namespace
}  // namespace lacuna
