// tests/kernels/cuda_ops_test.cc - every op of the CUDA backend against the CPU's or double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/active.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda_memory.h"
#include "kernels/heads.h"
#include "kernels/ops.h"

namespace lacuna {
namespace {

using test::device;
using test::HeadCase;
using test::HeadData;
using test::kEps;
using test::kHeadCases;
using test::OnDevice;
using test::pool;
using test::random;
using test::reference_attention;
using test::stream;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

/// The list that a kernel wrote, and that of the CPU for the values it is of.
struct List {
  OnDevice<int32_t> list, count{1};
  cuda::Collect collect;
  std::vector<float> norms;
  std::vector<OnDevice<float>> norms_there;
  List(int64_t K, float t, bool with_norms) : list(size_t(K)) {
    collect = {t, nullptr, list.data(), count.data()};
    if (!with_norms) return;
    norms = random(K, 99);
    for (float& n : norms) n = std::abs(n);
    norms_there.emplace_back(norms);
    collect.norms = norms_there[0].data();
  }
  void expect_of(const std::vector<float>& values, const std::string& what) const {
    const auto K = int64_t(values.size());
    std::vector<int32_t> expected(values.size());
    expected.resize(size_t(kernels::collect_active(pool(), values.data(), 1, K, norms.empty() ? nullptr : norms.data(),
                                                   collect.threshold, expected.data())));
    const auto got_count = count.values()[0];
    ASSERT_EQ(got_count, int32_t(expected.size())) << what;
    auto got = list.values();
    got.resize(size_t(got_count));
    ASSERT_EQ(got, expected) << what;
  }
};

class CudaWidth : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Odd, CudaWidth,
                         testing::Values(1, 3, 10, 63, 64, 576, 1000, 1027, 2048, 4096, 5120, 8192, 11008, 14336, 28672,
                                         32767, 32768));

TEST_P(CudaWidth, RmsNormAfterASum) {
  LACUNA_NEED_DEVICE();
  const int64_t K = GetParam();
  for (const int64_t M : {1, 2, 5}) {
    for (const bool with_add : {false, true}) {
      const auto x = random(M * K, 1), add = random(M * K, 2), w = random(K, 3);
      OnDevice<float> x_there(x), preset(size_t{1000});
      const OnDevice<float> add_there(add), w_there(w), y(size_t(M * K));
      const List list(K, 0.4f, M == 1 && with_add);
      cuda::NormArgs args;
      args.x = x_there.data();
      args.add = with_add ? add_there.data() : nullptr;
      args.weight = w_there.data();
      args.eps = 1e-5f;
      args.M = M;
      args.K = K;
      args.y = y.data();
      const auto start = with_add ? random(1000, 6) : std::vector<float>(1000, 0.0f);
      const OnDevice<float> start_there(start);
      args.preset = {preset.data(), 1000, with_add ? start_there.data() : nullptr};
      if (M == 1) args.collect = list.collect;
      cuda::launch_norm(device(), stream(), args);
      const auto got = y.values(), sums = x_there.values();
      for (int64_t m = 0; m < M; ++m) {
        double squares = 0;
        for (int64_t k = 0; k < K; ++k) {
          const auto i = size_t(m * K + k);
          const float sum = with_add ? x[i] + add[i] : x[i];
          ASSERT_EQ(sums[i], sum);
          squares += double(sum) * sum;
        }
        const double inverse = 1 / std::sqrt(squares / double(K) + double(1e-5f));
        for (int64_t k = 0; k < K; ++k) {
          const auto i = size_t(m * K + k);
          const double expected = sums[i] * inverse * w[size_t(k)];
          // A thread adds at most 32 squares, then 5 + 5 + 8 sums; halved by the root; then a handful.
          ASSERT_NEAR(got[i], expected, std::abs(expected) * kEps * 40) << m << ' ' << k;
        }
      }
      EXPECT_EQ(preset.values(), start);
      if (M == 1) list.expect_of(got, "norm");
    }
  }
}

// Partial sums of several devices: added up in their order, then to x.
TEST_P(CudaWidth, SumsOfPartsInTheirOrder) {
  LACUNA_NEED_DEVICE();
  const int64_t K = GetParam(), stride = (2 * K + 3) / 4 * 4 + 8;
  for (const int parts : {1, 2, 3, 8}) {
    for (const int64_t M : {1, 2}) {
      const auto x = random(M * K, 1), add = random(parts * stride, 2), w = random(K, 3);
      std::vector<float> expected = x;
      for (size_t i = 0; i < x.size(); ++i) {
        float sum = add[i];
        for (int part = 1; part < parts; ++part) sum += add[size_t(part * stride) + i];
        expected[i] += sum;
      }
      const OnDevice<float> x_there(x), again(x), add_there(add), w_there(w), y(size_t(M * K));
      cuda::NormArgs args;
      args.x = x_there.data();
      args.add = add_there.data();
      args.parts = parts;
      args.add_stride = stride;
      args.weight = w_there.data();
      args.eps = 1e-5f;
      args.M = M;
      args.K = K;
      args.y = y.data();
      cuda::launch_norm(device(), stream(), args);
      EXPECT_EQ(x_there.values(), expected) << parts;
      cuda::launch_add(device(), stream(), add_there.data(), M * K, again.data(), parts, stride);
      EXPECT_EQ(again.values(), expected) << parts;
    }
  }
}

TEST_P(CudaWidth, CountsInactiveInputs) {
  LACUNA_NEED_DEVICE();
  const int64_t K = GetParam();
  auto x = random(K, 8), norms = random(K, 9);
  if (K > 2) x[1] = std::numeric_limits<float>::quiet_NaN(), x[2] = 0.5f;
  for (float& norm : norms) norm = std::abs(norm);
  const OnDevice<float> x_there(x), norms_there(norms);
  OnDevice<unsigned long long> count(std::vector<unsigned long long>{3});
  unsigned long long expected = 3;  // it adds
  for (const bool by_norms : {false, true}) {
    for (size_t k = 0; k < x.size(); ++k) expected += std::abs(x[k]) * (by_norms ? norms[k] : 1.0f) < 0.5f;
    cuda::launch_count_inactive(device(), stream(), x_there.data(), K, by_norms ? norms_there.data() : nullptr, 0.5f,
                                count.data());
    EXPECT_EQ(count.values()[0], expected);
  }
}

TEST_P(CudaWidth, LayerNorm) {
  LACUNA_NEED_DEVICE();
  const int64_t K = GetParam();
  for (const int64_t M : {1, 3}) {
    auto x = random(M * K, 3);
    for (float& v : x) v += 3;
    const auto w = random(K, 4), b = random(K, 5);
    const OnDevice<float> x_there(x), w_there(w), b_there(b);
    cuda::NormArgs args;
    args.x = x_there.data();
    args.weight = w_there.data();
    args.bias = b_there.data();
    args.eps = 1e-3f;
    args.M = M;
    args.K = K;
    args.y = x_there.data();  // in place
    cuda::launch_norm(device(), stream(), args);
    const auto got = x_there.values();
    for (int64_t m = 0; m < M; ++m) {
      const float* row = x.data() + m * K;
      double mean = 0, squares = 0;
      for (int64_t k = 0; k < K; ++k) mean += row[k] / double(K);
      for (int64_t k = 0; k < K; ++k) squares += (row[k] - mean) * (row[k] - mean);
      const double inverse = 1 / std::sqrt(squares / double(K) + double(1e-3f));
      for (int64_t k = 0; k < K; ++k) {
        const double centred = row[k] - mean, expected = centred * inverse * w[size_t(k)] + b[size_t(k)];
        const double size =
            (std::abs(centred) + 3 + std::abs(mean)) * inverse * std::abs(w[size_t(k)]) + std::abs(expected);
        ASSERT_NEAR(got[size_t(m * K + k)], expected, size * kEps * 60) << m << ' ' << k;
      }
    }
  }
}

TEST_P(CudaWidth, GatesAndTheirLists) {
  LACUNA_NEED_DEVICE();
  const int64_t K = GetParam();
  auto gate = random(K, 6, 4), up = random(K, 7);
  gate[0] = -100, gate[size_t(K / 2)] = 90;
  for (const bool listed : {false, true}) {
    for (const auto kind : {cuda::Gate::swiglu, cuda::Gate::relu, cuda::Gate::none}) {
      if (kind == cuda::Gate::none && !listed) continue;
      const OnDevice<float> gate_there(gate), up_there(up), out(size_t{static_cast<size_t>(K)});
      const List list(K, 0.3f, K % 2 == 0);
      cuda::GateArgs args;
      args.gate = kind;
      args.x = gate_there.data();
      args.up = up_there.data();
      args.out = out.data();
      args.count = K;
      if (listed) args.collect = list.collect;
      cuda::launch_gate(device(), stream(), args);
      const auto got = kind == cuda::Gate::none ? gate : out.values();
      for (size_t k = 0; k < gate.size() && kind != cuda::Gate::none; ++k) {
        const double g = gate[k];
        if (kind == cuda::Gate::relu) {
          ASSERT_EQ(got[k], std::max(gate[k], 0.0f)) << k;
        } else {  // the exponential's argument is rounded: |g| / ln 2 times 2^-24, and its result to 2^-22
          const double expected = g / (1 + std::exp(-g)) * up[k];
          ASSERT_NEAR(got[k], expected, std::abs(expected) * kEps * (3 * std::abs(g) + 16) + 1e-37) << k << ' ' << g;
        }
      }
      if (listed) list.expect_of(got, "gate");
    }
  }
}

TEST_P(CudaWidth, ListsOfNoneAllAndWhatIsNotANumber) {
  LACUNA_NEED_DEVICE();
  const int64_t K = GetParam();
  auto x = random(K, 8);
  x[size_t(K - 1)] = kNan, x[size_t(K / 2)] = -kInf, x[0] = 0.75f, x[size_t(K / 3)] = -0.75f;
  const OnDevice<float> x_there(x);
  for (const float t : {0.0f, 0.75f, 1e-30f, 1e30f, kInf}) {
    for (const bool norms : {false, true}) {
      const List list(K, t, norms);
      cuda::GateArgs args;
      args.gate = cuda::Gate::none;
      args.x = x_there.data();
      args.count = K;
      args.collect = list.collect;
      cuda::launch_gate(device(), stream(), args);
      list.expect_of(x, fmt::format("t {} norms {}", t, norms));
    }
  }
}

TEST(CudaOps, WiderThanAnyListIsRefused) {
  LACUNA_NEED_DEVICE();
  const OnDevice<float> x(size_t{1 << 18});
  const List list(1 << 18, 1, false);
  cuda::GateArgs args;
  args.gate = cuda::Gate::none;
  args.x = x.data();
  args.count = 1 << 18;
  args.collect = list.collect;
  EXPECT_THROW(cuda::launch_gate(device(), stream(), args), Error);
}

TEST(CudaOps, Add) {
  LACUNA_NEED_DEVICE();
  for (const int64_t count : {1, 5, 4096, 100003}) {
    auto x = random(count, 9);
    const auto y = random(count, 10);
    const OnDevice<float> x_there(x), y_there(y);
    cuda::launch_add(device(), stream(), y_there.data(), count, x_there.data());
    for (size_t k = 0; k < x.size(); ++k) x[k] += y[k];
    EXPECT_EQ(x_there.values(), x);
  }
}

// More values than all blocks of a launch take at a time, which is 8192 for each multiprocessor.
TEST(CudaOps, MoreValuesThanBlocksTakeAtOnce) {
  LACUNA_NEED_DEVICE();
  const int64_t count = 20000 * device().info().multiprocessors + 3;
  auto x = random(count, 11, 4);
  const auto y = random(count, 12);
  const OnDevice<float> x_there(x), y_there(y), out(static_cast<size_t>(count));
  cuda::GateArgs gate;
  gate.gate = cuda::Gate::relu;
  gate.x = x_there.data();
  gate.out = out.data();
  gate.count = count;
  cuda::launch_gate(device(), stream(), gate);
  const auto gated = out.values();
  for (size_t k = 0; k < x.size(); ++k) ASSERT_EQ(gated[k], std::max(x[k], 0.0f)) << k;

  const OnDevice<unsigned long long> inactive(std::vector<unsigned long long>{3});
  cuda::launch_count_inactive(device(), stream(), x_there.data(), count, nullptr, 0.5f, inactive.data());
  const auto below = std::ranges::count_if(x, [](float v) { return std::abs(v) < 0.5f; });
  EXPECT_EQ(inactive.values()[0], 3 + static_cast<unsigned long long>(below));

  cuda::launch_add(device(), stream(), y_there.data(), count, x_there.data());
  for (size_t k = 0; k < x.size(); ++k) x[k] += y[k];
  EXPECT_EQ(x_there.values(), x);
}

// ---- heads and attention ----

class CudaHeads : public testing::TestWithParam<HeadCase> {};
INSTANTIATE_TEST_SUITE_P(Shapes, CudaHeads, testing::ValuesIn(kHeadCases));

TEST_P(CudaHeads, NormRotateStore) {
  LACUNA_NEED_DEVICE();
  for (const int64_t M : {1, 4}) {
    HeadData data(GetParam(), M, 17, 23);
    cuda::launch_heads(device(), stream(), data.heads());
    const auto q = data.q_there.values();
    data.run_on_cpu();
    data.expect_same_cache();
    for (size_t i = 0; i < q.size(); ++i) ASSERT_NEAR(q[i], data.q[i], std::abs(data.q[i]) * 0x1p-20 + 0x1p-19) << i;
  }
}

struct Attended {
  std::vector<float> out;
  std::vector<int32_t> list;
};

TEST_P(CudaHeads, Attention) {
  LACUNA_NEED_DEVICE();
  const HeadCase c = GetParam();
  const float scale = 1 / std::sqrt(float(c.head_dim));
  for (const int64_t length : {1, 2, 31, 128, 129, 257, 1000, 5000}) {
    for (const int64_t window : {int64_t{0}, int64_t{1}, int64_t{200}}) {
      if (window > 0 && length != 257 && length != 1000) continue;
      HeadData data(c, 1, length - 1, std::max<int64_t>(length, 64) + 3);
      const int64_t width = c.n_heads * c.head_dim;
      const int64_t bytes = cuda::attention_workspace_bytes(device(), 1, c.n_heads, c.n_kv_heads, c.head_dim);
      OnDevice<std::byte> workspace{static_cast<size_t>(bytes)};
      workspace.buffer().fill(0);
      const OnDevice<float> out{static_cast<size_t>(width)};
      OnDevice<float> zeros(size_t{64});
      const List list(width, 0.02f, length % 2 == 0);
      cuda::AttentionArgs args;
      args.heads = data.heads();
      args.with_heads = true;
      args.window = window;
      args.scale = scale;
      args.out = out.data();
      args.collect = list.collect;
      args.preset = {zeros.data(), 64};
      args.workspace = workspace.data();
      cuda::launch_attention(device(), stream(), args);
      const auto fused = out.values();
      list.expect_of(fused, fmt::format("length {}", length));
      EXPECT_EQ(zeros.values(), std::vector<float>(64, 0.0f));
      EXPECT_EQ(data.q_there.values(), data.q);  // not rotated in place
      data.run_on_cpu();
      data.expect_same_cache();
      const auto keys = data.keys_there.values(), values = data.values_there.values();
      const auto expected = reference_attention(data, data.q.data(), keys, values, length - 1, window, scale);
      // Scores are below 64 (q and k of size sqrt(2 head_dim) at most, norm weights), off by that times head_dim / 8 +
      // 20 roundings; weights by that and 2^-22; values are below 6, sums have at most length / 32 + 40 roundings.
      const double bound = 6 * kEps * (64.0 * (double(c.head_dim) / 8 + 20) + double(length) / 32 + 44);
      for (size_t i = 0; i < fused.size(); ++i)
        ASSERT_NEAR(fused[i], expected[i], bound) << "length " << length << " window " << window << " at " << i;
      // The two launches by themselves give the same bits, and so does a second run with the same workspace.
      data.q_there = random(width, 1);
      cuda::launch_heads(device(), stream(), data.heads());
      args.with_heads = false;
      args.collect = {};
      cuda::launch_attention(device(), stream(), args);
      EXPECT_EQ(out.values(), fused) << "length " << length;
    }
  }
}

TEST_P(CudaHeads, AttentionOfSeveralTokens) {
  LACUNA_NEED_DEVICE();
  const HeadCase c = GetParam();
  const float scale = 1 / std::sqrt(float(c.head_dim));
  const int64_t M = 3, position = 298, width = c.n_heads * c.head_dim;
  HeadData data(c, M, position, 305);
  OnDevice<std::byte> workspace(
      size_t(cuda::attention_workspace_bytes(device(), M, c.n_heads, c.n_kv_heads, c.head_dim)));
  workspace.buffer().fill(0);
  const OnDevice<float> out(size_t(M * width));
  cuda::AttentionArgs args;
  args.heads = data.heads();
  args.scale = scale;
  args.out = out.data();
  args.workspace = workspace.data();
  cuda::launch_heads(device(), stream(), args.heads);
  cuda::launch_attention(device(), stream(), args);
  const auto got = out.values();
  data.run_on_cpu();
  const auto keys = data.keys_there.values(), values = data.values_there.values();
  const double bound = 6 * kEps * (64.0 * (double(c.head_dim) / 8 + 20) + 60);
  for (int64_t m = 0; m < M; ++m) {
    const auto expected = reference_attention(data, data.q.data() + m * width, keys, values, position + m, 0, scale);
    for (size_t i = 0; i < size_t(width); ++i)
      ASSERT_NEAR(got[size_t(m * width) + i], expected[i], bound) << m << ' ' << i;
  }
}

// Sums whose rows lie apart, and biases that repeat.
TEST(CudaOps, NormOfRowsApartAndRepeatedPresets) {
  LACUNA_NEED_DEVICE();
  const int64_t M = 3, K = 576, row = 768, period = 12;
  const auto x = random(M * K, 1), add = random(M * row, 2), weight = random(K, 3), values = random(period, 4);
  const OnDevice<float> x_there(x), add_there(add), weight_there(weight), values_there(values);
  const OnDevice<float> y(size_t(M * K)), preset(size_t(M * period));
  cuda::NormArgs args;
  args.x = x_there.data();
  args.add = add_there.data();
  args.add_row = row;
  args.weight = weight_there.data();
  args.eps = 1e-5f;
  args.M = M;
  args.K = K;
  args.y = y.data();
  args.preset = {preset.data(), M * period, values_there.data(), period};
  cuda::launch_norm(device(), stream(), args);
  const auto sums = x_there.values(), got = y.values(), set = preset.values();
  for (int64_t m = 0; m < M; ++m) {
    double squares = 0;
    for (int64_t k = 0; k < K; ++k) {
      const float sum = x[size_t(m * K + k)] + add[size_t(m * row + k)];
      ASSERT_EQ(sums[size_t(m * K + k)], sum) << m << ' ' << k;
      squares += double(sum) * double(sum);
    }
    const double inverse = 1 / std::sqrt(squares / double(K) + 1e-5);
    for (int64_t k = 0; k < K; ++k) {
      const double expected = double(sums[size_t(m * K + k)]) * inverse * double(weight[size_t(k)]);
      ASSERT_NEAR(got[size_t(m * K + k)], expected, 1e-6 * (1 + std::abs(expected))) << m << ' ' << k;
    }
  }
  for (size_t i = 0; i < set.size(); ++i) EXPECT_EQ(set[i], values[i % size_t(period)]) << i;
}

TEST_P(CudaHeads, AttentionOfABatch) {
  LACUNA_NEED_DEVICE();
  const HeadCase c = GetParam();
  const float scale = 1 / std::sqrt(float(c.head_dim));
  const int64_t width = c.n_heads * c.head_dim, stride = width + 8;
  struct Case {
    int64_t M, position, window;
  };
  for (const auto& [M, position, window] : {Case{1, 0, 0}, Case{5, 0, 0}, Case{150, 0, 0}, Case{9, 300, 0},
                                            Case{70, 129, 0}, Case{70, 129, 1}, Case{66, 250, 100}, Case{64, 0, 7}}) {
    HeadData data(c, M, position, position + M);
    const OnDevice<float> out(size_t(M * stride));
    cuda::BatchAttentionArgs args;
    args.heads = data.heads();
    args.window = window;
    args.scale = scale;
    args.out = out.data();
    args.out_stride = stride;
    cuda::launch_heads(device(), stream(), args.heads);
    cuda::launch_batch_attention(device(), stream(), args);
    const auto got = out.values();
    data.run_on_cpu();
    const auto keys = data.keys_there.values(), values = data.values_there.values();
    // Scores are below 64, off by the queries' 2^-21 of a row's largest and by the roundings of sums; weights by that
    // and twice 2^-11 (numerator and total), or 2^-25 of the largest each; values are below 6.
    const double of_score = 64 * (std::sqrt(double(c.head_dim)) * 0x1p-21 + (double(c.head_dim) / 8 + 20) * kEps);
    const double bound = 6 * (0x1p-10 + double(position + M) * 0x1p-24 + 2 * of_score);
    double error = 0, size = 0;
    for (int64_t m = 0; m < M; ++m) {
      const auto expected =
          reference_attention(data, data.q.data() + m * width, keys, values, position + m, window, scale);
      for (size_t i = 0; i < size_t(stride); ++i) {
        const float v = got[size_t(m * stride) + i];
        if (i >= size_t(width)) {
          ASSERT_TRUE(std::isnan(v)) << "written between the rows";
          continue;
        }
        ASSERT_NEAR(v, expected[i], bound)
            << "M " << M << " at " << position << " window " << window << ": token " << m << " element " << i;
        error += std::pow(v - expected[i], 2);
        size += std::pow(expected[i], 2);
      }
    }
    EXPECT_LT(std::sqrt(error / size), 0x1p-11) << "M " << M << " at " << position << " window " << window;
  }
}

TEST(CudaOps, AttentionPassesOnWhatIsNotANumber) {
  LACUNA_NEED_DEVICE();
  const HeadCase c{4, 2, 64, 64, false, false};
  HeadData data(c, 1, 299, 300);
  auto keys = data.keys;
  keys[size_t(5 * 64 + 3)] = to_f16(kNan);  // of key head 0
  data.keys_there = keys;
  OnDevice<std::byte> workspace(size_t(cuda::attention_workspace_bytes(device(), 1, 4, 2, 64)));
  workspace.buffer().fill(0);
  const OnDevice<float> out(size_t{256});
  cuda::AttentionArgs args;
  args.heads = data.heads();
  args.with_heads = true;
  args.scale = 0.125f;
  args.out = out.data();
  args.workspace = workspace.data();
  cuda::launch_attention(device(), stream(), args);
  const auto got = out.values();
  for (size_t i = 0; i < 256; ++i) EXPECT_EQ(std::isnan(got[i]), i < 128) << i;
}

TEST(CudaOps, Argmax) {
  LACUNA_NEED_DEVICE();
  OnDevice<std::byte> workspace(size_t(cuda::argmax_workspace_bytes(3)));
  workspace.buffer().fill(0);
  const OnDevice<int32_t> ids(size_t{3}), position(std::vector<int32_t>{41});
  int32_t at = 41;
  // Of the last one threads take several values: more than 2048 a multiprocessor.
  const int64_t most = 5000 * device().info().multiprocessors + 1;
  for (const int64_t N : {int64_t{1}, int64_t{2}, int64_t{5}, int64_t{1023}, int64_t{32000}, int64_t{151936}, most}) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      auto x = random(3 * N, seed);
      for (float& v : x) v = std::round(v * 4);  // ties
      std::fill_n(x.begin() + N, N, seed % 2 == 0 ? -kInf : kNan);
      if (seed == 1) x[size_t(N - 1)] = kInf;
      if (seed == 2 && N > 4) std::fill_n(x.begin(), N, -0.0f), x[3] = 0.0f, x[2] = kNan;
      const OnDevice<float> x_there(x);
      cuda::launch_argmax(device(), stream(), {x_there.data(), 3, N, ids.data(), position.data(), workspace.data()});
      const auto got = ids.values();
      for (size_t m = 0; m < 3; ++m) {
        int64_t best = -1;
        for (int64_t k = 0; k < N; ++k) {
          const float v = x[m * size_t(N) + size_t(k)];
          if (!std::isnan(v) && (best < 0 || v > x[m * size_t(N) + size_t(best)])) best = k;
        }
        ASSERT_EQ(got[m], std::max<int64_t>(best, 0)) << "N " << N << " seed " << seed << " row " << m;
      }
      ASSERT_EQ(position.values()[0], ++at);
    }
  }
}

/// The largest k of N values, for several k.
void check_top_k(std::span<const int64_t> sizes) {
  for (const int64_t N : sizes) {
    for (const int64_t k : {int64_t{1}, int64_t{2}, int64_t{40}, int64_t{700}, int64_t{2048}}) {
      if (k > N) continue;
      OnDevice<std::byte> workspace(size_t(cuda::top_k_workspace_bytes(N, k)));
      workspace.buffer().upload(std::as_bytes(std::span(&cuda::kNoBadValue, 1)));
      const OnDevice<cuda::TopKCandidate> out(size_t(k + 1));
      for (const uint64_t seed : {0, 4, 1, 2, 3}) {  // what is bad does not stay
        auto x = random(N, seed);
        if (seed != 4)
          for (float& v : x) v = std::round(v * 4);  // ties
        // The largest in one slice; all equal; bad values; -infinity.
        if (seed == 1) std::fill_n(x.begin(), std::min<int64_t>(N, 3000), 9.0f);
        if (seed == 2) std::fill(x.begin(), x.end(), -0.0f), x[size_t(N / 2)] = 0.0f;
        if (seed == 3) std::fill_n(x.begin(), N - 1, -kInf);
        int32_t bad = -1;
        if (seed == 4 && N > 40) x[30] = kInf, x[17] = kNan, bad = 17;
        std::vector<int32_t> penalized = {int32_t(N / 2), -1, int32_t(N), 0};
        if (N > 3000) penalized.insert(penalized.end(), {3, 2048, 2999});
        if (penalized[0] == 0) penalized[0] = int32_t(N + 1);
        const float penalty = 1.3f;
        std::vector<std::pair<float, int32_t>> expected;
        for (int64_t i = 0; i < N; ++i) expected.emplace_back(x[size_t(i)], int32_t(i));
        for (const int32_t id : penalized)
          if (id >= 0 && id < N) {
            float& v = expected[size_t(id)].first;
            v = v > 0 ? v / penalty : v * penalty;
          }
        std::erase_if(expected, [](const auto& e) { return std::isnan(e.first); });
        std::partial_sort(
            expected.begin(), expected.begin() + std::min(k, int64_t(expected.size())), expected.end(),
            [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
        const OnDevice<float> there(x);
        const OnDevice<int32_t> ids(penalized);
        cuda::TopKArgs args;
        args.x = there.data();
        args.N = N;
        args.k = int(k);
        args.penalized = ids.data();
        args.n_penalized = int64_t(penalized.size());
        args.penalty = penalty;
        args.out = out.data();
        args.workspace = workspace.data();
        cuda::launch_top_k(device(), stream(), args);
        const auto got = out.values();
        ASSERT_EQ(got.back().id, bad) << "N " << N << " k " << k << " seed " << seed;
        for (size_t i = 0; i < std::min(size_t(k), expected.size()); ++i) {
          ASSERT_EQ(got[i].logit, expected[i].first) << "N " << N << " k " << k << " seed " << seed << " place " << i;
          ASSERT_EQ(got[i].id, expected[i].second) << "N " << N << " k " << k << " seed " << seed << " place " << i;
        }
      }
    }
  }
}

TEST(CudaOps, TopKOfAVocabulary) {
  LACUNA_NEED_DEVICE();
  constexpr int64_t kSizes[] = {32000, 151936, 1 << 20};
  check_top_k(kSizes);
}

TEST(CudaOps, TopK) {
  LACUNA_NEED_DEVICE();
  constexpr int64_t kSizes[] = {1, 2, 47, 2047, 2048, 2049};
  check_top_k(kSizes);
  cuda::TopKArgs args;
  args.N = 10;
  args.k = 11;
  EXPECT_THROW(cuda::launch_top_k(device(), stream(), args), Error);
  args.k = 1;
  args.N = (1 << 20) + 1;
  EXPECT_THROW(cuda::launch_top_k(device(), stream(), args), Error);
}

}  // namespace
}  // namespace lacuna
