// Linear layers in f8, nm24_f8 and nm24_bf16 on the CPU, beside sums in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/e4m3.h"
#include "core/error.h"
#include "kernels/cpu/linear_kernel.h"
#include "kernels/e4m3_tokens.h"
#include "kernels/linear.h"
#include "tensor_core_weights.h"

namespace lacuna::kernels {
namespace {

using cpu::Isa;
using layout::Id;
using test::tensor_core_layouts;
using test::tensor_core_weight;
using test::TensorCoreWeight;

ThreadPool& pool() {
  static ThreadPool threads(2);
  return threads;
}

std::vector<Isa> isas() {
  std::vector<Isa> out;
  for (const Isa isa : {Isa::generic, Isa::avx2, Isa::avx512, Isa::avx512vnni})
    if (cpu::supported(isa)) out.push_back(isa);
  return out;
}

WeightView view_of(const TensorCoreWeight& w, std::span<const float> bias = {}) {
  return {"w", w.layout, w.shape, w.bytes, bias};
}

std::vector<float> random_tokens(int64_t M, int64_t K, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> x(size_t(M * K));
  for (int64_t m = 0; m < M; ++m)
    for (int64_t k = 0; k < K; ++k)
      x[size_t(m * K + k)] = float(rng.normal() * std::exp2(double(m % 5)) * (rng.below(50) == 0 ? 30 : 1));
  return x;
}

std::vector<float> run(Isa isa, const WeightView& view, const std::vector<float>& x, int64_t M) {
  const auto [N, K] = view.shape;
  const auto group = cpu::make_linear_group(isa, {&view, 1}, pool(), Prepare::automatic);
  std::vector<float> y(size_t(M * N), std::numeric_limits<float>::quiet_NaN());
  const Output out{y.data(), N};
  group->run({x.data(), M, K}, {&out, 1});
  return y;
}

/// y and its bound by the definition: codes and scales in double precision. Inputs and weights that are put together
/// from code and scale, their product and the bias are rounded once each, sums of K products at most K times.
void check(Isa isa, const TensorCoreWeight& w, int64_t M, bool with_bias) {
  const auto [N, K] = w.shape;
  const std::vector<float> x = random_tokens(M, K, uint64_t(M));
  std::vector<float> bias;
  for (int64_t n = 0; with_bias && n < N; ++n) bias.push_back(float(n % 7) - 3);
  const std::vector<float> y = run(isa, view_of(w, bias), x, M);
  const bool rounds = layout::has_e4m3_codes(*w.layout);
  std::vector<e4m3> codes(static_cast<size_t>(K));
  for (int64_t m = 0; m < M; ++m) {
    float scale = 1;
    if (rounds) quantize_per_token(x.data() + m * K, K, 1, K, codes.data(), &scale);
    for (int64_t n = 0; n < N; ++n) {
      double exact = with_bias ? double(bias[size_t(n)]) : 0, through = std::abs(exact);
      for (int64_t k = 0; k < K; ++k) {
        const double input = rounds ? double(scale) * to_float(codes[size_t(k)]) : double(x[size_t(m * K + k)]);
        const double product = double(w.decoded[size_t(n * K + k)]) * input;
        exact += product;
        through += std::abs(product);
      }
      ASSERT_LE(std::abs(double(y[size_t(m * N + n)]) - exact), 0x1p-24 * double(K + 4) * through + 1e-30)
          << w.layout->name << " " << cpu::isa_name(isa) << " M " << M << " N " << N << " K " << K << " m " << m
          << " n " << n;
    }
  }
}

class TensorCoreLinear : public testing::TestWithParam<Isa> {};

TEST_P(TensorCoreLinear, EveryShapeMatchesDouble) {
  for (const Id id : tensor_core_layouts())
    for (const int64_t K : {1, 2, 3, 5, 16, 64, 257})
      for (const int64_t N : {1, 16, 17, 35})
        for (const int64_t M : {1, 2, 7}) check(GetParam(), tensor_core_weight(id, N, K, 1), M, N == 17);
}

TEST_P(TensorCoreLinear, TokensOfATextAndUnevenOutputs) {
  for (const Id id : tensor_core_layouts()) {
    for (const int64_t N : {4097, 4098, 4100}) check(GetParam(), tensor_core_weight(id, N, 96, 2), 1, true);
    check(GetParam(), tensor_core_weight(id, 4098, 40, 2), 77, true);
    check(GetParam(), tensor_core_weight(id, 33, 320, 3), 130, false);
    check(GetParam(), tensor_core_weight(id, 20, 36, 3), 600, false);
  }
}

// RECIPES 18.
TEST_P(TensorCoreLinear, NoTokens) {
  for (const Id id : tensor_core_layouts()) {
    const TensorCoreWeight w = tensor_core_weight(id, 8, 16, 4);
    EXPECT_TRUE(run(GetParam(), view_of(w), {}, 0).empty());
  }
}

// RECIPES 17: an all-zero token, denormals, an all-zero output channel (row 2 of the weights), all zero.
TEST_P(TensorCoreLinear, ZerosAndDenormals) {
  for (const Id id : tensor_core_layouts()) {
    TensorCoreWeight w = tensor_core_weight(id, 5, 12, 5);
    std::vector<float> x = random_tokens(3, 12, 6);
    std::fill_n(x.begin(), 12, 0.0f);
    std::fill_n(x.begin() + 12, 12, 1e-40f);
    const std::vector<float> y = run(GetParam(), view_of(w), x, 3);
    for (const float value : y) EXPECT_TRUE(std::isfinite(value));
    for (size_t n = 0; n < 5; ++n) EXPECT_EQ(y[n], 0);
    for (size_t m = 0; m < 3; ++m) EXPECT_EQ(y[5 * m + 2], 0);
    std::fill(w.w.begin(), w.w.end(), 0.0f);
    layout::encode_tensor_core(*w.layout, w.shape, w.w, w.keep, w.bytes);
    for (const float value : run(GetParam(), view_of(w), x, 3)) EXPECT_EQ(value, 0);
  }
}

// RECIPES 16: sums past the range of f16, and of alternating signs.
TEST_P(TensorCoreLinear, LargeInputs) {
  for (const Id id : tensor_core_layouts()) {
    const TensorCoreWeight made = tensor_core_weight(id, 3, 32, 7);
    TensorCoreWeight w = made;
    std::fill(w.w.begin(), w.w.end(), 1.0f);
    layout::encode_tensor_core(*w.layout, w.shape, w.w, w.keep, w.bytes);
    std::vector<float> x(64, 4560.0f);
    for (size_t k = 0; k < 32; ++k) x[32 + k] = k / 4 % 2 == 0 ? 4560.0f : -4560.0f;
    const std::vector<float> y = run(GetParam(), view_of(w), x, 2);
    const float sum = id == Id::f8 ? 32 * 4560.0f : 16 * 4560.0f;
    for (size_t n = 0; n < 3; ++n) {
      EXPECT_NEAR(y[n], sum, sum * 0x1p-18f);
      EXPECT_NEAR(y[3 + n], 0, sum * 0x1p-18f);
    }
  }
}

// RECIPES 22, 25: rows of NaN and infinity beside a token change no bit of its outputs and stay visible in theirs.
TEST_P(TensorCoreLinear, PaddingFullOfNanDoesNotLeak) {
  for (const Id id : tensor_core_layouts()) {
    const int64_t N = 37, K = 100;
    const TensorCoreWeight w = tensor_core_weight(id, N, K, 8);
    const std::vector<float> x = random_tokens(3, K, 9);
    const std::vector<float> alone = run(GetParam(), view_of(w), x, 3);
    for (const float filler : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::vector<float> padded(size_t(6 * K), filler);
      for (size_t m = 0; m < 3; ++m)
        std::memcpy(&padded[2 * m * size_t(K)], &x[m * size_t(K)], size_t(K) * sizeof(float));
      const std::vector<float> y = run(GetParam(), view_of(w), padded, 6);
      for (int64_t m = 0; m < 3; ++m)
        for (int64_t n = 0; n < N; ++n) {
          ASSERT_EQ(y[size_t(2 * m * N + n)], alone[size_t(m * N + n)]) << w.layout->name;
          ASSERT_TRUE(std::isnan(y[size_t((2 * m + 1) * N + n)]) || filler > 0) << w.layout->name << " " << n;
          ASSERT_FALSE(std::isfinite(y[size_t((2 * m + 1) * N + n)])) << w.layout->name << " " << n;
        }
    }
  }
}

// q, k and v of different layouts read one input; a part without codes gets it as it is.
TEST_P(TensorCoreLinear, MixedGroup) {
  const int64_t K = 64, M = 5;
  const TensorCoreWeight sparse = tensor_core_weight(Id::nm24_f8, 20, K, 10),
                         dense = tensor_core_weight(Id::f8, 9, K, 11),
                         wide = tensor_core_weight(Id::nm24_bf16, 33, K, 12);
  std::vector<std::byte> plain(size_t(7 * K * 2));
  std::vector<float> values(static_cast<size_t>(K), 0.5f);
  const layout::Layout& bf16 = layout::get(Id::bf16);
  for (size_t n = 0; n < 7; ++n)
    bf16.encode_row(bf16, values, {}, std::span(plain).subspan(n * size_t(K) * 2, size_t(K) * 2));
  const WeightView views[] = {view_of(sparse), view_of(dense), view_of(wide), {"plain", &bf16, {7, K}, plain}};
  const auto group = cpu::make_linear_group(GetParam(), views, pool(), Prepare::automatic);
  const std::vector<float> x = random_tokens(M, K, 13);
  std::vector<std::vector<float>> y;
  std::vector<Output> out;
  for (const WeightView& view : views) y.emplace_back(size_t(M * view.shape.N));
  for (size_t i = 0; i < y.size(); ++i) out.push_back({y[i].data(), views[i].shape.N});
  group->run({x.data(), M, K}, out);
  for (size_t i = 0; i < y.size(); ++i) EXPECT_EQ(y[i], run(GetParam(), views[i], x, M)) << i;
  EXPECT_NE(group->explain().find("decoded_e4m3"), std::string::npos) << group->explain();
}

// RECIPES 19, 5: weights that are not sound are refused before a kernel reads them.
TEST_P(TensorCoreLinear, DamagedWeightsAreRefused) {
  for (const Id id : tensor_core_layouts()) {
    TensorCoreWeight w = tensor_core_weight(id, 4, 8, 14);
    std::fill(w.bytes.begin(), w.bytes.end(), std::byte{0xff});
    const WeightView view = view_of(w);
    EXPECT_THROW(cpu::make_linear_group(GetParam(), {&view, 1}, pool(), Prepare::automatic), Error);
    w.bytes.pop_back();
    const WeightView cut = view_of(w);
    EXPECT_THROW(cpu::make_linear_group(GetParam(), {&cut, 1}, pool(), Prepare::automatic), Error);
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, TensorCoreLinear, testing::ValuesIn(isas()),
                         [](const auto& isa) { return std::string(cpu::isa_name(isa.param)); });

}  // namespace
}  // namespace lacuna::kernels
