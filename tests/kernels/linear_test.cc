// tests/kernels/linear_test.cc - every row of every instruction set's kernel table against double precision.
#include "kernels/linear.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "grouped_weights.h"
#include "kernels/cpu/linear_kernel.h"
#include "kernels/support.h"
#include "layout/layout.h"
#include "tensor_core_weights.h"

namespace lacuna {
namespace {

using cpu::Isa;
using kernels::Activation;
using kernels::Output;
using kernels::Prepare;
using kernels::WeightView;
using test::isas;
using test::pool;

/// Where the f16 scales of a canonical block are.
std::vector<int> half_offsets(layout::Id id) {
  using layout::Id;
  switch (id) {
    case Id::q4_0:
    case Id::q5_0:
    case Id::q8_0:
      return {0};
    case Id::q4_1:
    case Id::q5_1:
    case Id::q4_K:
    case Id::q5_K:
      return {0, 2};
    case Id::q2_K:
      return {80, 82};
    case Id::q3_K:
      return {108};
    case Id::q6_K:
      return {208};
    default:
      return {};
  }
}

/// A weight matrix of random bytes with finite scales: every code and every small scale occurs.
struct Weight {
  std::vector<std::byte> bytes;
  std::vector<float> bias;
  std::vector<float> decoded;  // [N, K]
  WeightView view;
};

Weight random_weight(layout::Id id, int64_t N, int64_t K, uint64_t seed, bool bias = false) {
  const layout::Layout& l = layout::get(id);
  Rng rng(seed);
  Weight w;
  w.bytes.resize(size_t(l.size_bytes({N, K})));
  const auto put_half = [&](size_t at, float value) {
    const f16 h = to_f16(value);
    std::memcpy(&w.bytes[at], &h, 2);
  };
  if (l.block_cols == 1) {
    for (int64_t i = 0; i < N * K; ++i) {
      const float value = float(rng.normal());
      const bf16 b = to_bf16(value);
      if (id == layout::Id::f32) std::memcpy(&w.bytes[size_t(4 * i)], &value, 4);
      if (id == layout::Id::f16) put_half(size_t(2 * i), value);
      if (id == layout::Id::bf16) std::memcpy(&w.bytes[size_t(2 * i)], &b, 2);
    }
  } else {
    for (std::byte& byte : w.bytes) byte = std::byte(rng.next() >> 56);
    for (size_t at = 0; at < w.bytes.size(); at += size_t(l.block_bytes))
      for (const int offset : half_offsets(id)) put_half(at + size_t(offset), float(rng.normal() * 0.01));
  }
  if (bias)
    for (int64_t n = 0; n < N; ++n) w.bias.push_back(float(rng.normal()));
  w.decoded.resize(size_t(N * K));
  layout::decode_rows(l, {N, K}, w.bytes, 0, N, w.decoded.data());
  w.view = {std::string(l.name) + ".weight", &l, {N, K}, w.bytes, w.bias};
  return w;
}

std::vector<float> random_inputs(int64_t M, int64_t K, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> x(size_t(M * K));
  for (float& value : x) value = float(rng.normal() * std::exp(rng.normal()));
  return x;
}

/// The quantization of the kernels, written again: absmax/127 per 32, nearest even; with `planes` what is left is
/// rounded to 1/254 of that step. step: [M, K] the finest step.
void quantize(const std::vector<float>& x, bool planes, std::vector<double>& rounded, std::vector<float>& step) {
  rounded.assign(x.size(), 0);
  step.assign(x.size(), 0);
  for (size_t at = 0; at < x.size(); at += 32) {
    float absmax = 0;
    for (size_t i = 0; i < 32; ++i) absmax = std::max(absmax, std::fabs(x[at + i]));
    const float scale = absmax / 127.0f;
    for (size_t i = 0; i < 32; ++i) {
      step[at + i] = planes ? scale / 254 : scale;
      if (scale == 0) continue;
      const double codes = double(x[at + i]) * 127.0 / double(absmax), coarse = std::nearbyint(codes);
      rounded[at + i] = double(scale) * (planes ? coarse + std::nearbyint((codes - coarse) * 254) / 254 : coarse);
    }
  }
}

/// Fails where |y - sum w x| passes the bound: rounding of the float sums, plus, for block layouts, what quantizing x
/// may change: half a step of each input times |w|.
void expect_close(const Weight& w, const std::vector<float>& x, int64_t M, const float* y, int64_t stride,
                  const std::string& what) {
  const auto [N, K] = w.view.shape;
  const bool quantized = w.view.layout->block_cols > 1;
  const bool planes = M == 1;  // a single token is quantized more finely
  std::vector<float> step;
  std::vector<double> rounded;
  std::vector<double> tie(x.size(), 0.0);  // an input within rounding of the middle of two codes may go either way
  // The float product x * 127/absmax is off by up to 2 * 127 * 2^-24 of a coarse step.
  const double near_tie = planes ? 254 * 254 * 0x1p-24 : 1e-4;
  if (quantized) {
    quantize(x, planes, rounded, step);
    for (size_t i = 0; i < x.size(); ++i) {
      const double codes = step[i] > 0 ? double(x[i]) / step[i] : 0;
      if (std::fabs(codes - std::floor(codes) - 0.5) < near_tie) tie[i] = step[i];
    }
  }
  for (int64_t n = 0; n < N; ++n) {
    const float* row = &w.decoded[size_t(n * K)];
    // Scale * code and minimum may each be thrice the largest weight of their block.
    std::vector<double> part(row, row + K);
    if (quantized) {
      for (int64_t k = 0; k < K; k += 32) {
        double largest = 0;
        for (int64_t i = k; i < k + 32; ++i) largest = std::max(largest, std::fabs(double(row[i])));
        std::fill_n(part.begin() + k, 32, 3 * largest);
      }
    }
    const double bias = w.bias.empty() ? 0.0 : double(w.bias[size_t(n)]);
    for (int64_t m = 0; m < M; ++m) {
      const size_t at = size_t(m * K);
      double exact = bias, magnitude = std::fabs(bias), on_codes = bias, slack = 0, ties = 0;
      for (int64_t k = 0; k < K; ++k) {
        exact += double(row[k]) * double(x[at + size_t(k)]);
        magnitude += std::fabs(part[size_t(k)] * double(x[at + size_t(k)]));
      }
      for (int64_t k = 0; quantized && k < K; ++k) {
        on_codes += double(row[k]) * rounded[at + size_t(k)];
        slack += 0.5 * double(step[at + size_t(k)]) * std::fabs(double(row[k]));
        ties += tie[at + size_t(k)] * std::fabs(double(row[k]));
      }
      // A sum of K / 16 groups (lanes of floats) adds a scaled code and a minimum each: at most K / 8 roundings, each
      // of a partial sum below `magnitude`. Denormal scales of x lose up to half of 2^-149 a code.
      const double floats = 0x1p-23 * double(K / 8 + 16) * magnitude + 1e-38;
      const double got = y[m * stride + n];
      if (quantized) {
        ASSERT_LE(std::fabs(got - on_codes), floats + ties)
            << what << " m=" << m << " n=" << n << " got " << got << " expected " << on_codes;
      }
      ASSERT_LE(std::fabs(got - exact), slack * (1 + 1e-5) + floats) << what << " m=" << m << " n=" << n;
    }
  }
}

/// Runs one weight on one instruction set with poisoned outputs and guard columns.
void check(Isa isa, Prepare prepare, const Weight& w, const std::vector<float>& x, int64_t M) {
  const auto [N, K] = w.view.shape;
  auto group = cpu::make_linear_group(isa, {&w.view, 1}, pool(), prepare);
  const int64_t stride = N + 5, x_stride = K + 3;
  std::vector<float> strided(size_t(M * x_stride), std::numeric_limits<float>::quiet_NaN());
  for (int64_t m = 0; m < M; ++m)
    for (int64_t k = 0; k < K; ++k) strided[size_t(m * x_stride + k)] = x[size_t(m * K + k)];
  std::vector<float> y(size_t(M * stride) + 16, -77.0f);
  const Output out{y.data(), stride};
  group->run({strided.data(), M, x_stride}, {&out, 1});
  const std::string what = std::string(cpu::isa_name(isa)) + " " + group->explain() + " M=" + std::to_string(M) +
                           " N=" + std::to_string(N) + " K=" + std::to_string(K);
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = N; n < stride; ++n) ASSERT_EQ(y[size_t(m * stride + n)], -77.0f) << "guard of " << what;
  for (size_t i = size_t(M * stride); i < y.size(); ++i) ASSERT_EQ(y[i], -77.0f) << "guard of " << what;
  expect_close(w, x, M, y.data(), stride, what);
}

std::vector<int64_t> inputs_of(const layout::Layout& l) {
  if (l.block_cols == 1) return {1, 15, 32, 255, 576, 1408};
  if (l.block_cols == 32) return {32, 64, 576, 1408};
  return {256, 512, 1280};
}

class LinearKernels : public testing::TestWithParam<Isa> {};

TEST_P(LinearKernels, EveryLayoutEveryShapeMatchesDouble) {
  const Isa isa = GetParam();
  for (const layout::Layout& l : layout::row_layouts()) {
    for (const Prepare prepare : {Prepare::automatic, Prepare::in_place}) {
      for (const int64_t K : inputs_of(l)) {
        for (const int64_t N : {1, 3, 15, 16, 17, 64, 100}) {
          const Weight w = random_weight(l.id, N, K, uint64_t(N * 131 + K), N % 2 == 1);
          for (const int64_t M : {0, 1, 2, 3, 7, 9, 13}) {
            const std::vector<float> x = random_inputs(M, K, uint64_t(M * 17 + K));
            ASSERT_NO_FATAL_FAILURE(check(isa, prepare, w, x, M));
          }
        }
      }
    }
  }
}

TEST_P(LinearKernels, LongRowsAndManyTokens) {
  const Isa isa = GetParam();
  for (const layout::Layout& l : layout::row_layouts()) {
    const int64_t K = l.block_cols == 256 ? 4608 : 4544;
    const Weight w = random_weight(l.id, 33, K, 5);
    for (const int64_t M : {8, 12, 33, 131})
      ASSERT_NO_FATAL_FAILURE(check(isa, Prepare::automatic, w, random_inputs(M, K, 6), M));
  }
  // More than one chunk of tokens, tiles smaller than a chunk.
  const Weight w = random_weight(layout::Id::q4_0, 17, 64, 7);
  check(isa, Prepare::automatic, w, random_inputs(1030, 64, 8), 1030);
}

TEST_P(LinearKernels, NoRowOfTheTableIsLeftOut) {
  const Isa isa = GetParam();
  const cpu::LinearTable& table = cpu::linear_table(isa);
  ASSERT_GT(table.count, 0);
  std::set<std::string> ran;
  for (const layout::Layout& l : layout::row_layouts()) {
    for (const Prepare prepare : {Prepare::automatic, Prepare::in_place}) {
      const Weight w = random_weight(l.id, 19, 256, 3);
      const auto group = cpu::make_linear_group(isa, {&w.view, 1}, pool(), prepare);
      const std::string line = group->explain();
      for (int i = 0; i < table.count; ++i)
        if (line.find(table.kernels[i].one_name) != std::string::npos) ran.insert(table.kernels[i].name);
      ASSERT_NO_FATAL_FAILURE(check(isa, prepare, w, random_inputs(3, 256, 4), 3));
      EXPECT_NE(line.find(std::string(l.name)), std::string::npos) << line;
    }
  }
  for (const layout::Id id : test::grouped_layouts()) {
    for (const Prepare prepare : {Prepare::automatic, Prepare::in_place}) {
      for (const int64_t group_size : {8, 16, 32, 64, 128}) {  // gs has a kernel for each
        const test::GroupedWeight w = test::grouped_weight(id, 19, 256, 3, {.group_size = group_size});
        const WeightView view{"w", w.layout, w.shape, w.bytes, {}, w.params};
        const std::string line = cpu::make_linear_group(isa, {&view, 1}, pool(), prepare)->explain();
        for (int i = 0; i < table.count; ++i)
          if (line.find(std::string(table.kernels[i].one_name) + " ") != std::string::npos)
            ran.insert(table.kernels[i].name);
      }
    }
  }
  for (const layout::Id id : test::tensor_core_layouts()) {
    const test::TensorCoreWeight w = test::tensor_core_weight(id, 19, 64, 3);
    const WeightView view{"w", w.layout, w.shape, w.bytes};
    const std::string line = cpu::make_linear_group(isa, {&view, 1}, pool(), Prepare::automatic)->explain();
    for (int i = 0; i < table.count; ++i)
      if (line.find(std::string(table.kernels[i].one_name) + " ") != std::string::npos)
        ran.insert(table.kernels[i].name);
  }
  EXPECT_EQ(int(ran.size()), table.count) << "a kernel of the table ran nowhere";
}

TEST_P(LinearKernels, MixedGroupSharesOneInput) {
  const Isa isa = GetParam();
  const int64_t K = 512;
  using layout::Id;
  std::vector<Weight> weights;
  const Id ids[] = {Id::q4_K, Id::q6_K, Id::q8_0, Id::q5_0, Id::q4_0, Id::q4_1, Id::q2_K, Id::q3_K, Id::f32, Id::q5_K};
  for (const Id id : ids)
    weights.push_back(random_weight(id, 20 + 7 * int64_t(weights.size()), K, weights.size(), true));
  std::vector<WeightView> views;
  for (const Weight& w : weights) views.push_back(w.view);
  const auto group = cpu::make_linear_group(isa, views, pool(), Prepare::automatic);
  for (const int64_t M : {1, 5, 140}) {
    const std::vector<float> x = random_inputs(M, K, 11);
    std::vector<std::vector<float>> y;
    std::vector<Output> out;
    for (const Weight& w : weights) y.emplace_back(size_t(M * w.view.shape.N), -1.0f);
    for (size_t i = 0; i < y.size(); ++i) out.push_back({y[i].data(), weights[i].view.shape.N});
    group->run({x.data(), M, K}, out);
    for (size_t i = 0; i < y.size(); ++i)
      ASSERT_NO_FATAL_FAILURE(expect_close(weights[i], x, M, y[i].data(), weights[i].view.shape.N, views[i].name));
  }
}

// RECIPES 16: sums past the range of f16; and alternating signs.
TEST_P(LinearKernels, LargeInputs) {
  for (const layout::Layout& l : layout::row_layouts()) {
    const Weight w = random_weight(l.id, 16, 256, 1);
    std::vector<float> x(512);
    for (size_t i = 0; i < 256; ++i) x[i] = i < 32 ? 4560.0f : 0.0f;
    for (size_t i = 256; i < 512; ++i) x[i] = i % 2 == 0 ? 4560.0f : -4560.0f;
    ASSERT_NO_FATAL_FAILURE(check(GetParam(), Prepare::automatic, w, x, 2));
    ASSERT_NO_FATAL_FAILURE(check(GetParam(), Prepare::in_place, w, x, 2));
  }
}

// RECIPES 17: zero rows, zero tensors, denormal maximum.
TEST_P(LinearKernels, ZerosAndDenormals) {
  for (const layout::Layout& l : layout::row_layouts()) {
    for (const Prepare prepare : {Prepare::automatic, Prepare::in_place}) {
      Weight w = random_weight(l.id, 17, 256, 1);
      std::vector<float> x(3 * 256);
      for (size_t i = 256; i < 512; ++i) x[i] = i % 3 == 0 ? 1e-40f : -1e-41f;
      for (size_t i = 512; i < 768; ++i) x[i] = i % 3 == 0 ? 1e-30f : -1e-36f;
      ASSERT_NO_FATAL_FAILURE(check(GetParam(), prepare, w, x, 3));
      std::fill(w.bytes.begin(), w.bytes.end(), std::byte{0});
      std::fill(w.decoded.begin(), w.decoded.end(), 0.0f);
      ASSERT_NO_FATAL_FAILURE(check(GetParam(), prepare, w, random_inputs(3, 256, 2), 3));
    }
  }
}

TEST_P(LinearKernels, NonFiniteInputsShow) {
  for (const layout::Layout& l : layout::row_layouts()) {
    const int64_t N = 17, K = 512;
    const Weight w = random_weight(l.id, N, K, 1);
    for (const Prepare prepare : {Prepare::automatic, Prepare::in_place}) {
      const auto group = cpu::make_linear_group(GetParam(), {&w.view, 1}, pool(), prepare);
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity()}) {
        std::vector<float> x = random_inputs(3, K, 2), y(size_t(3 * N)), clean(size_t(3 * N));
        const Output out{clean.data(), N}, bad_out{y.data(), N};
        group->run({x.data(), 3, K}, {&out, 1});
        x[size_t(K + 300)] = bad;
        group->run({x.data(), 3, K}, {&bad_out, 1});
        for (int64_t n = 0; n < N; ++n) {
          const bool shows = !std::isfinite(y[size_t(N + n)]);
          EXPECT_TRUE(shows || w.decoded[size_t(n * K + 300)] == 0.0f) << l.name << " row " << n;
          EXPECT_EQ(y[size_t(n)], clean[size_t(n)]);
          EXPECT_EQ(y[size_t(2 * N + n)], clean[size_t(2 * N + n)]);
        }
        std::vector<float> one(static_cast<size_t>(N));
        const Output one_out{one.data(), N};
        group->run({x.data() + K, 1, K}, {&one_out, 1});
        for (int64_t n = 0; n < N; ++n)
          EXPECT_TRUE(!std::isfinite(one[size_t(n)]) || w.decoded[size_t(n * K + 300)] == 0.0f) << l.name;
      }
    }
  }
}

// The result of one of several tokens depends neither on how many others come with it nor on the number of threads.
TEST_P(LinearKernels, TokensAreIndependent) {
  const int64_t N = 50, K = 512, M = 21;
  ThreadPool one_thread(1);
  for (const layout::Layout& l : layout::row_layouts()) {
    const Weight w = random_weight(l.id, N, K, 9);
    const auto group = cpu::make_linear_group(GetParam(), {&w.view, 1}, pool(), Prepare::automatic);
    const auto alone = cpu::make_linear_group(GetParam(), {&w.view, 1}, one_thread, Prepare::automatic);
    const std::vector<float> x = random_inputs(M, K, 3);
    std::vector<float> y(size_t(M * N)), again(size_t(M * N));
    const Output out{y.data(), N}, again_out{again.data(), N};
    group->run({x.data(), M, K}, {&out, 1});
    alone->run({x.data(), M, K}, {&again_out, 1});
    EXPECT_EQ(y, again) << l.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, LinearKernels, testing::ValuesIn(isas()),
                         [](const auto& isa) { return std::string(cpu::isa_name(isa.param)); });

TEST(LinearGroup, RefusesWhatDoesNotFit) {
  Weight a = random_weight(layout::Id::q4_0, 16, 64, 1), b = random_weight(layout::Id::q4_0, 16, 96, 1);
  const WeightView views[] = {a.view, b.view};
  EXPECT_THROW(kernels::make_cpu_linear_group(views, pool()), Error);
  EXPECT_THROW(kernels::make_cpu_linear_group({}, pool()), Error);
  WeightView cut = a.view;
  cut.bytes = cut.bytes.first(cut.bytes.size() - 1);
  EXPECT_THROW(kernels::make_cpu_linear_group({&cut, 1}, pool()), Error);
  const float bias[3] = {};
  WeightView biased = a.view;
  biased.bias = bias;
  EXPECT_THROW(kernels::make_cpu_linear_group({&biased, 1}, pool()), Error);
}

TEST(LinearGroup, ReportsBytes) {
  const Weight w = random_weight(layout::Id::q4_K, 32, 512, 1);
  const auto packed = kernels::make_cpu_linear_group({&w.view, 1}, pool());
  // The panels hold as many bits as the blocks, and begin an odd number of cache lines apart.
  EXPECT_EQ(packed->weight_bytes(), int64_t(w.bytes.size()));
  EXPECT_EQ(packed->prepared_bytes(), int64_t(w.bytes.size()) + 2 * 64);
  const auto in_place = kernels::make_cpu_linear_group({&w.view, 1}, pool(), Prepare::in_place);
  EXPECT_EQ(in_place->weight_bytes(), int64_t(w.bytes.size()));
  EXPECT_EQ(in_place->prepared_bytes(), 0);
}

TEST(ReferenceLinear, MultipliesRowsByHand) {
  const float w[] = {1, 2, 3, -4, 5, -6}, bias[] = {10, 20}, x[] = {1, 10, 100, -1, 0.5, 2};
  const layout::Layout& l = layout::get(layout::Id::f32);
  const WeightView view{"w", &l, {2, 3}, std::as_bytes(std::span(w)), bias};
  float y[5] = {-7, -7, -7, -7, -7};
  kernels::reference_linear(view, {x, 2, 3}, {y, 3});
  EXPECT_EQ(y[0], 10 + 1 + 20 + 300);
  EXPECT_EQ(y[1], 20 - 4 + 50 - 600);
  EXPECT_EQ(y[2], -7);
  EXPECT_EQ(y[3], 10 - 1 + 1 + 6);
  EXPECT_EQ(y[4], 20 + 4 + 2.5 - 12);
}

// The comparator is code too.
TEST(ExpectClose, SeesOneWrongValue) {
  const Weight w = random_weight(layout::Id::q4_K, 4, 256, 1);
  const std::vector<float> x = random_inputs(2, 256, 2);
  std::vector<float> y(8);
  kernels::reference_linear(w.view, {x.data(), 2, 256}, {y.data(), 4});
  static std::vector<float> wrong;  // EXPECT_FATAL_FAILURE sees only statics
  wrong = y;
  wrong[5] = -wrong[5];
  static const Weight* weight;
  static const std::vector<float>* inputs;
  weight = &w;
  inputs = &x;
  testing::TestPartResultArray failures;
  {
    testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
    [] { expect_close(*weight, *inputs, 2, wrong.data(), 4, "wrong"); }();
  }
  EXPECT_EQ(failures.size(), 1);
}

}  // namespace
}  // namespace lacuna
