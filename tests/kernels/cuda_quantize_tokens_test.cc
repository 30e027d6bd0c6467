// tests/kernels/cuda_quantize_tokens_test.cc - tokens quantized on a CUDA device: the bytes of the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/e4m3.h"
#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/cuda/tensor_core.h"
#include "kernels/cuda_memory.h"
#include "kernels/e4m3_tokens.h"

namespace lacuna {
namespace {

using cuda::Element;
using test::device;
using test::OnDevice;
using test::stream;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
constexpr Element kElements[] = {Element::f32, Element::f16, Element::bf16};

/// Values as the type has them, and what they are in float32.
std::vector<std::byte> as_element(Element type, std::vector<float>& values) {
  std::vector<std::byte> out(values.size() * size_t(cuda::bytes_of(type)));
  for (size_t i = 0; i < values.size(); ++i) {
    const f16 half = to_f16(values[i]);
    const bf16 brain = to_bf16(values[i]);
    if (type == Element::f32) std::memcpy(&out[4 * i], &values[i], 4);
    if (type == Element::f16) std::memcpy(&out[2 * i], &half, 2), values[i] = to_float(half);
    if (type == Element::bf16) std::memcpy(&out[2 * i], &brain, 2), values[i] = to_float(brain);
  }
  return out;
}

/// Quantizes rows `stride` apart, from `skip` values past an address that is aligned to 256 bytes, and compares with
/// the CPU. What lies between rows of codes stays as it was.
void expect_bytes_of_the_cpu(Element type, std::vector<float> x, int64_t M, int64_t K, int64_t stride, int64_t skip,
                             const std::string& what) {
  ASSERT_EQ(int64_t(x.size()), skip + M * stride);
  const OnDevice<std::byte> on_device(as_element(type, x));
  const int64_t code_stride = (K + 15) / 16 * 16;
  const OnDevice<std::byte> codes(size_t(M * code_stride));
  const OnDevice<float> scale{size_t(M)};
  cuda::launch_quantize_tokens(device(), stream(),
                               {.type = type,
                                .x = on_device.data() + skip * cuda::bytes_of(type),
                                .stride = stride,
                                .M = M,
                                .K = K,
                                .codes = codes.data(),
                                .code_stride = code_stride,
                                .scale = scale.data()});
  std::vector<e4m3> expected(size_t(M * K));
  std::vector<float> expected_scale(static_cast<size_t>(M));
  kernels::quantize_per_token(x.data() + skip, stride, M, K, expected.data(), expected_scale.data());
  const std::vector<std::byte> got = codes.values();
  const std::vector<float> got_scale = scale.values();
  for (int64_t m = 0; m < M; ++m) {
    ASSERT_EQ(std::bit_cast<uint32_t>(got_scale[size_t(m)]), std::bit_cast<uint32_t>(expected_scale[size_t(m)]))
        << what << ", token " << m;
    for (int64_t k = 0; k < code_stride; ++k) {
      const e4m3 code{uint8_t(got[size_t(m * code_stride + k)])};
      if (k >= K)
        ASSERT_EQ(code.bits, 0xff) << what << ", token " << m << ", past its end";
      else if (const e4m3 want = expected[size_t(m * K + k)]; is_nan(want))
        ASSERT_TRUE(is_nan(code)) << what << ", token " << m << ", input " << k;
      else
        ASSERT_EQ(code.bits, want.bits) << what << ", token " << m << ", input " << k;
    }
  }
}

/// Tokens of widely different sizes; what lies between and before the rows is NaN.
std::vector<float> tokens(int64_t M, int64_t K, int64_t stride, int64_t skip, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> x(size_t(skip + M * stride), kNan);
  for (int64_t m = 0; m < M; ++m) {
    const double size = std::exp2(double(rng.below(24)) - 16);
    for (int64_t k = 0; k < K; ++k)
      x[size_t(skip + m * stride + k)] = float(rng.normal() * size * std::exp(rng.normal()));
  }
  return x;
}

TEST(CudaQuantizeTokens, GiveTheBytesOfTheCpu) {
  LACUNA_NEED_DEVICE();
  for (const Element type : kElements)
    for (const int64_t K : {1, 7, 8, 64, 100, 129, 1024, 1032, 3072, 3080, 4097, 12288, 15360, 65536, 65544, 69997}) {
      for (const int64_t M : {1, 15, 16, 17, 77, 129}) {
        if (M > (test::emulated() ? K > 4200 ? 1 : 17 : 77) && K > 100) continue;
        for (const int64_t extra : {0, 8, 3})
          for (const int64_t skip : {0, 1})
            if (!test::emulated() || M < 16 || skip == 0)
              expect_bytes_of_the_cpu(type, tokens(M, K, K + extra, skip, uint64_t(K + M)), M, K, K + extra, skip,
                                      "type " + std::to_string(int(type)) + ", K " + std::to_string(K) + ", M " +
                                          std::to_string(M) + ", stride + " + std::to_string(extra));
      }
    }
}

TEST(CudaQuantizeTokens, ManyTokens) {
  LACUNA_NEED_DEVICE();
  const int64_t M = test::emulated() ? 257 : 18432, K = test::emulated() ? 40 : 3072;
  for (const Element type : kElements)
    expect_bytes_of_the_cpu(type, tokens(M, K, K, 0, 3), M, K, K, 0, "type " + std::to_string(int(type)));
}

// RECIPES 17 and 19: zeros, denormals, and, in a token whose scale is 1, what E4M3 rounds and saturates.
TEST(CudaQuantizeTokens, ZerosDenormalsAndEnds) {
  LACUNA_NEED_DEVICE();
  const int64_t K = 12;
  std::vector<float> x(size_t(6 * K), 0.0f);
  const auto token = [&](size_t m) { return x.begin() + std::ptrdiff_t(m * size_t(K)); };
  x[5] = -0.0f;
  const std::vector<float> denormals = {1e-40f, -1e-40f, 5e-41f, 1e-45f, -0.0f, 0x1p-126f, -0x1p-127f};
  std::ranges::copy(denormals, token(1));
  const std::vector<float> ends = {448, -448, 464, 0x1p-10f, 0x1.8p-10f, -0x1p-10f, 0x1p-11f, -0.0f, 17, 19, 0x1.1p0f};
  std::ranges::copy(ends, token(2));
  token(2)[2] = 447.9f;  // a larger one would be the scale
  std::ranges::copy(std::vector<float>{3e38f, -3.4e38f, 1, -1, 1e-38f}, token(3));
  std::ranges::copy(std::vector<float>{std::numeric_limits<float>::max(), 1e30f}, token(4));
  std::ranges::copy(std::vector<float>{448, 464, 480, 1e4f, -1e4f}, token(5));
  for (const Element type : kElements) expect_bytes_of_the_cpu(type, x, 6, K, K, 0, "ends");
}

// RECIPES 19: NaN and infinity show in their own token and place.
TEST(CudaQuantizeTokens, NanAndInfinityStayInTheirToken) {
  LACUNA_NEED_DEVICE();
  for (const Element type : kElements)
    for (const int64_t K : {9, 2000, 4160}) {
      std::vector<float> x = tokens(5, K, K, 0, 9);
      x[size_t(K + 4)] = kNan;
      x[size_t(2 * K + 8)] = kInf;
      x[size_t(3 * K)] = -kInf, x[size_t(4 * K - 1)] = kNan;
      expect_bytes_of_the_cpu(type, x, 5, K, K, 0, "not finite");
    }
}

TEST(CudaQuantizeTokens, NoTokensAndBadArguments) {
  LACUNA_NEED_DEVICE();
  cuda::launch_quantize_tokens(device(), stream(), {.M = 0, .K = 64});  // nothing is touched: nullptr everywhere
  const OnDevice<std::byte> x(1024), codes(1024);
  const OnDevice<float> scale(4);
  const cuda::QuantizeTokensArgs good{.type = Element::bf16,
                                      .x = x.data(),
                                      .stride = 64,
                                      .M = 4,
                                      .K = 60,
                                      .codes = codes.data(),
                                      .code_stride = 64,
                                      .scale = scale.data()};
  const auto launch_with = [&](auto change) {
    return [&, change] {
      cuda::QuantizeTokensArgs args = good;
      change(args);
      cuda::launch_quantize_tokens(device(), stream(), args);
    };
  };
  EXPECT_THAT(launch_with([](auto& a) { a.stride = 59; }), ThrowsMessage<Error>(HasSubstr("59 values apart")));
  EXPECT_THAT(launch_with([](auto& a) { a.code_stride = 72; }), ThrowsMessage<Error>(HasSubstr("72 bytes apart")));
  EXPECT_THAT(launch_with([](auto& a) { a.code_stride = 48; }), ThrowsMessage<Error>(HasSubstr("48 bytes apart")));
  EXPECT_THAT(launch_with([](auto& a) { a.codes += 8; }), ThrowsMessage<Error>(HasSubstr("aligned to 16 bytes")));
  EXPECT_THAT(launch_with([](auto& a) { a.scale = nullptr; }), ThrowsMessage<Error>(HasSubstr("needs memory")));
  EXPECT_THAT(launch_with([](auto& a) { a.x = static_cast<const std::byte*>(a.x) + 1; }),
              ThrowsMessage<Error>(HasSubstr("2-byte values")));
}

}  // namespace
}  // namespace lacuna
