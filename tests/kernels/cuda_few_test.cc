// tests/kernels/cuda_few_test.cc - the CUDA GEMV of a few tokens over zigzag weights against double precision.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/prepared.h"
#include "kernels/cuda_memory.h"
#include "kernels/support.h"
#include "kernels/zigzag_weights.h"

namespace lacuna {
namespace {

using layout::Id;
using test::device;
using test::OnDevice;
using test::stream;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

/// Prepared weights in device memory.
struct Loaded {
  explicit Loaded(const test::Weight& w)
      : group(cuda::prepare_group({&w.view, 1}, test::pool())),
        codes(bytes_of(group.codes)),
        headers(bytes_of(group.headers)) {}
  static std::vector<std::byte> bytes_of(const HugeBuffer& buffer) {
    return {buffer.bytes().begin(), buffer.bytes().end()};
  }
  /// Copies of `part` below each other.
  Loaded(const Loaded& part, int64_t copies)
      : codes(repeated(part.group.codes, columns_of(part) * form_of(part).code_bytes, copies)),
        headers(repeated(part.group.headers, columns_of(part) * form_of(part).header_bytes, copies)) {
    group.layout = part.group.layout, group.K = part.group.K, group.rows = part.group.rows * copies;
  }
  static int64_t columns_of(const Loaded& of) { return of.group.rows * of.group.K; }
  static const cuda::ColumnForm& form_of(const Loaded& of) { return cuda::column_form(*of.group.layout); }
  /// size: bytes without what lies behind the last copy.
  static std::vector<std::byte> repeated(const HugeBuffer& buffer, int64_t size, int64_t copies) {
    std::vector<std::byte> out;
    for (int64_t i = 0; i < copies; ++i) out.insert(out.end(), buffer.data(), buffer.data() + size);
    out.insert(out.end(), buffer.data() + size, buffer.data() + buffer.size());
    return out;
  }
  cuda::Columns columns() const { return {codes.data(), headers.data(), group.rows, group.K}; }
  cuda::PreparedGroup group;
  OnDevice<std::byte> codes, headers;
};

struct Way {
  bool fixed_order = false, biases = false;
};

/// y [M, 256 rows] of x [M, K]; rows lie further apart than they are long, and what lies between stays as it is.
std::vector<float> multiply(const Loaded& w, const std::vector<float>& x, int64_t M, const Way& way) {
  const int64_t K = w.group.K, N = w.group.rows * 256, x_stride = K + 3, y_stride = N + 8;
  std::vector<float> apart(size_t(M * x_stride), kNan), y(size_t(M * y_stride), kNan), start(static_cast<size_t>(N));
  for (int64_t n = 0; n < N; ++n) start[size_t(n)] = way.biases ? float(n % 7) : 0.0f;
  for (int64_t m = 0; m < M; ++m) {
    std::copy_n(&x[size_t(m * K)], K, &apart[size_t(m * x_stride)]);
    if (!way.fixed_order) std::copy_n(start.begin(), N, y.begin() + m * y_stride);
  }
  const OnDevice<float> x_there(apart), start_there(start);
  OnDevice<float> y_there(y);
  const int segments = cuda::few_segments(device().info(), w.columns());
  const OnDevice<float> partial(size_t(M * segments * N));
  const OnDevice<uint32_t> arrived(std::vector<uint32_t>(size_t(w.group.rows), 0u));
  cuda::GemvFewArgs args;
  args.weights = w.columns();
  args.M = M;
  args.x = x_there.data();
  args.x_stride = x_stride;
  args.y = y_there.data();
  args.y_stride = y_stride;
  if (way.fixed_order) args.workspace = {partial.data(), arrived.data(), way.biases ? start_there.data() : nullptr};
  cuda::launch_gemv_few(device(), stream(), *w.group.layout, args);
  y = y_there.values();
  for (const uint32_t count : arrived.values()) EXPECT_EQ(count, 0u);
  std::vector<float> out;
  for (int64_t m = 0; m < M; ++m) {
    out.insert(out.end(), y.begin() + m * y_stride, y.begin() + m * y_stride + N);
    for (int64_t i = N; i < y_stride; ++i) EXPECT_TRUE(std::isnan(y[size_t(m * y_stride + i)])) << "between rows";
  }
  return out;
}

double reference(const test::Weight& w, const float* x, int64_t n) {
  double sum = 0;
  for (int64_t k = 0; k < w.view.shape.K; ++k) sum += double(w.decoded[size_t(n * w.view.shape.K + k)]) * double(x[k]);
  return sum;
}

class CudaGemvFew : public testing::TestWithParam<Id> {};
INSTANTIATE_TEST_SUITE_P(EachLayout, CudaGemvFew,
                         testing::Values(Id::zz2_k, Id::zz3_k, Id::zz4_k, Id::zz5_k, Id::zz6_k, Id::zz8),
                         [](const auto& of) { return std::string(layout::get(of.param).name); });

// A column that is left out, read twice, taken with another one's scale or another token's factor changes a whole
// number.
TEST_P(CudaGemvFew, ExactOnWholeNumbers) {
  LACUNA_NEED_DEVICE();
  for (const int64_t N : {1, 257, 1000}) {
    for (const int64_t K : {1, 7, 16, 33, 255, 1025}) {
      if (test::emulated() && (N > 300 || K > 300)) continue;
      const test::Weight w = test::make_weight(GetParam(), {N, K}, N % 2 == 0 ? 0 : 256, uint64_t(N * 10000 + K), true);
      const Loaded there(w);
      for (const int64_t M : {1, 2, 3, 4}) {
        const std::vector<float> x = test::whole_inputs(M * K, uint64_t(K + M));
        for (const Way& way : {Way{}, Way{true, true}, Way{false, true}}) {
          const std::vector<float> y = multiply(there, x, M, way);
          for (int64_t m = 0; m < M; ++m)
            for (int64_t n = 0; n < N; ++n)
              ASSERT_EQ(double(y[size_t(m * there.group.rows * 256 + n)]),
                        reference(w, &x[size_t(m * K)], n) + (way.biases ? double(n % 7) : 0.0))
                  << "N " << N << " K " << K << " token " << m << " of " << M << " output " << n;
        }
      }
    }
  }
}

TEST_P(CudaGemvFew, MoreBlocksThanTheDeviceHolds) {
  LACUNA_NEED_DEVICE();
  const int64_t K = 70, M = 3, held = device().info().multiprocessors * int64_t{4};
  const test::Weight w = test::make_weight(GetParam(), {3 * 256, K}, 0, 10, true);
  const Loaded part(w), there(part, (held * 5 / 2 + 2) / 3);
  const std::vector<float> x = test::whole_inputs(M * K, 11);
  std::vector<double> expected;
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < 3 * 256; ++n) expected.push_back(reference(w, &x[size_t(m * K)], n));
  for (const Way& way : {Way{}, Way{true, true}}) {
    const std::vector<float> y = multiply(there, x, M, way);
    const int64_t N = there.group.rows * 256;
    for (int64_t i = 0; i < M * N; ++i)
      ASSERT_EQ(double(y[size_t(i)]),
                expected[size_t(i / N * 3 * 256 + i % N % (3 * 256))] + (way.biases ? double(i % N % 7) : 0.0))
          << "token " << i / N << " output " << i % N;
  }
}

// gemv.h: about 1e-3 of a result's size, root mean square.
TEST_P(CudaGemvFew, WithinWhatRoundingDoes) {
  LACUNA_NEED_DEVICE();
  const int64_t N = 300, K = test::emulated() ? 160 : 4096;
  const test::Weight w = test::make_weight(GetParam(), {N, K}, 256, 5, false);
  const Loaded there(w);
  for (const int64_t M : {2, 4}) {
    const std::vector<float> x = test::random_inputs(M * K, uint64_t(M));
    const std::vector<float> y = multiply(there, x, M, {}), fixed = multiply(there, x, M, {true, false});
    for (int64_t m = 0; m < M; ++m) {
      double error = 0, fixed_error = 0, size = 0;
      for (int64_t n = 0; n < N; ++n) {
        const auto at = size_t(m * there.group.rows * 256 + n);
        const double expected = reference(w, &x[size_t(m * K)], n);
        error += std::pow(double(y[at]) - expected, 2);
        fixed_error += std::pow(double(fixed[at]) - expected, 2);
        size += expected * expected;
      }
      EXPECT_LT(std::sqrt(error / size), 2.5e-3) << m << " of " << M;
      EXPECT_LT(std::sqrt(fixed_error / size), 2.5e-3) << m << " of " << M;
    }
  }
}

TEST_P(CudaGemvFew, InAFixedOrderEveryRunGivesTheSameBits) {
  LACUNA_NEED_DEVICE();
  const int64_t K = test::emulated() ? 100 : 4096;
  const Loaded there(test::make_weight(GetParam(), {500, K}, 256, 6, false));
  const std::vector<float> x = test::random_inputs(3 * K, 7), first = multiply(there, x, 3, {true, true});
  for (int run = 0; run < (test::emulated() ? 2 : 100); ++run) {
    const std::vector<float> again = multiply(there, x, 3, {true, true});
    for (size_t i = 0; i < first.size(); ++i)
      ASSERT_EQ(std::bit_cast<uint32_t>(again[i]), std::bit_cast<uint32_t>(first[i])) << i;
  }
}

// What is not finite shows in the outputs of its own token, and in no other's.
TEST_P(CudaGemvFew, NonFiniteInputsShowInTheirTokenAlone) {
  LACUNA_NEED_DEVICE();
  const int64_t N = 40, K = 90;
  const test::Weight w = test::make_weight(GetParam(), {N, K}, 256, 8, true);
  const Loaded there(w);
  for (const float bad : {kNan, kInf, -kInf}) {
    std::vector<float> x = test::whole_inputs(4 * K, 9);
    x[size_t(2 * K + 70)] = bad;
    const std::vector<float> y = multiply(there, x, 4, {});
    for (int64_t m = 0; m < 4; ++m)
      for (int64_t n = 0; n < N; ++n) {
        const float v = y[size_t(m * 256 + n)];
        if (m == 2)
          EXPECT_FALSE(std::isfinite(v)) << n;
        else
          EXPECT_EQ(double(v), reference(w, &x[size_t(m * K)], n)) << m << ' ' << n;
      }
  }
}

TEST(CudaGemvFewErrors, TooManyTokensAndOtherLayouts) {
  LACUNA_NEED_DEVICE();
  cuda::GemvFewArgs args;
  args.M = 5;
  args.weights.rows = 1;
  EXPECT_THAT([&] { cuda::launch_gemv_few(device(), stream(), layout::get(Id::zz4_k), args); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("at most 4")));
  args.M = 2;
  EXPECT_THAT([&] { cuda::launch_gemv_few(device(), stream(), layout::get(Id::q4_K), args); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("q4_K")));
}

}  // namespace
}  // namespace lacuna
