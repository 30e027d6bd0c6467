// tests/kernels/cuda_rows_test.cc - the row kernels of the CUDA backend against decoded rows and double precision.
#include "kernels/cuda_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/active.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda_memory.h"
#include "kernels/linear.h"
#include "layout/layout.h"

namespace lacuna {
namespace {

using layout::Id;
using test::device;
using test::OnDevice;
using test::stream;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

ThreadPool& pool() {
  static ThreadPool two(2);
  return two;
}

/// Where a canonical block has its f16 scales and its codes.
struct Fields {
  std::vector<size_t> halves;
  size_t codes_begin, codes_end;
};
Fields fields(Id id) {
  switch (id) {
    case Id::q4_0:
      return {{0}, 2, 18};
    case Id::q4_1:
      return {{0, 2}, 4, 20};
    case Id::q5_0:
      return {{0}, 2, 22};
    case Id::q5_1:
      return {{0, 2}, 4, 24};
    case Id::q8_0:
      return {{0}, 2, 34};
    case Id::q2_K:
      return {{80, 82}, 16, 80};
    case Id::q3_K:
      return {{108}, 0, 96};
    case Id::q4_K:
      return {{0, 2}, 16, 144};
    case Id::q5_K:
      return {{0, 2}, 16, 176};
    case Id::q6_K:
      return {{208}, 0, 192};
    default:
      return {{}, 0, 0};
  }
}

/// Random bytes with finite scales: every code and every small scale occurs.
std::vector<std::byte> random_rows(const layout::Layout& l, int64_t N, int64_t K, uint64_t seed) {
  Rng rng(seed);
  std::vector<std::byte> bytes(size_t(l.size_bytes({N, K})));
  const auto put_half = [&](size_t at, double value) {
    const f16 h = to_f16(float(value));
    std::memcpy(&bytes[at], &h, 2);
  };
  if (l.block_cols > 1) {
    for (std::byte& byte : bytes) byte = std::byte(rng.next() >> 56);
    for (size_t at = 0; at < bytes.size(); at += size_t(l.block_bytes))
      for (const size_t offset : fields(l.id).halves) put_half(at + offset, rng.normal() * 0.01);
    return bytes;
  }
  for (size_t i = 0; i < size_t(N * K); ++i) {
    const auto value = float(rng.normal());
    const bf16 b = to_bf16(value);
    if (l.id == Id::f32) std::memcpy(&bytes[4 * i], &value, 4);
    if (l.id == Id::f16) put_half(2 * i, value);
    if (l.id == Id::bf16) std::memcpy(&bytes[2 * i], &b, 2);
  }
  return bytes;
}

std::vector<float> random_values(int64_t count, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& v : out) v = float(rng.normal());
  return out;
}

std::vector<std::byte> prepared(const layout::Layout& l, int64_t N, int64_t K, const std::vector<std::byte>& bytes) {
  std::vector<std::byte> out(size_t(N * cuda::row_places(l, K).row_bytes));
  cuda::prepare_rows(l, {N, K}, {}, bytes, pool(), out.data());
  return out;
}

/// The most that a weight of each place may be inside the kernel, where codes are taken relative to another zero: at
/// most ten times the range that codes span, and the weight at either end of it.
std::vector<float> magnitudes(const layout::Layout& l, int64_t N, int64_t K, std::vector<std::byte> bytes) {
  std::vector<float> out(size_t(N * K)), end(out.size());
  if (l.block_cols == 1 || l.id == Id::q8_0) {
    layout::decode_rows(l, {N, K}, bytes, 0, N, out.data());
    for (float& w : out) w = std::abs(w);
    return out;
  }
  const Fields f = fields(l.id);
  const auto fill = [&](int value, std::vector<float>& to) {
    for (size_t at = 0; at < bytes.size(); at += size_t(l.block_bytes))
      std::memset(&bytes[at + f.codes_begin], value, f.codes_end - f.codes_begin);
    layout::decode_rows(l, {N, K}, bytes, 0, N, to.data());
  };
  fill(0, out);
  fill(255, end);
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = 10 * std::abs(out[i] - end[i]) + std::max(std::abs(out[i]), std::abs(end[i]));
  return out;
}

/// Roundings one after the other: 16 products of a half unit, what joins units, lanes and warps, one for each chunk.
double rounding_bound(int64_t K) { return 0x1p-24 * (double(K) / 512 + 64); }

class EachLayout : public testing::TestWithParam<Id> {};
INSTANTIATE_TEST_SUITE_P(CudaRows, EachLayout,
                         testing::Values(Id::f32, Id::f16, Id::bf16, Id::q4_0, Id::q4_1, Id::q5_0, Id::q5_1, Id::q8_0,
                                         Id::q2_K, Id::q3_K, Id::q4_K, Id::q5_K, Id::q6_K),
                         [](const auto& test) { return std::string(layout::get(test.param).name); });

std::vector<int64_t> widths(const layout::Layout& l) {
  const int64_t b = l.block_cols;
  if (b == 1) return {1, 3, 7, 31, 64, 65, 1000, 1027, 4096, 11007};
  if (b == 32) return {32, 96, 576, 1024, 1056, 4096, 11008};
  return {256, 768, 1024, 1280, 4096, 11008};
}

TEST_P(EachLayout, EmbeddingIsTheDecodedRow) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(GetParam());
  for (const int64_t K : widths(l)) {
    const int64_t N = 37;
    const auto bytes = random_rows(l, N, K, uint64_t(K));
    const OnDevice<std::byte> rows(prepared(l, N, K, bytes));
    const std::vector<int32_t> ids = {36, 0, 5, 5, -1, 37};
    const OnDevice<int32_t> ids_there(ids);
    const OnDevice<float> out(ids.size() * size_t(K));
    cuda::launch_embed(device(), stream(), {&l, rows.data(), N, K}, ids_there.data(), int64_t(ids.size()), out.data());
    const auto got = out.values();
    std::vector<float> row(static_cast<size_t>(K));
    for (size_t m = 0; m < ids.size(); ++m) {
      const bool known = ids[m] >= 0 && ids[m] < N;
      if (known) layout::decode_rows(l, {N, K}, bytes, ids[m], 1, row.data());
      for (size_t k = 0; k < size_t(K); ++k) {
        const float v = got[m * size_t(K) + k];
        if (known) {
          ASSERT_EQ(v, row[k]) << "K " << K << " id " << ids[m] << " column " << k;
        } else {
          ASSERT_TRUE(std::isnan(v)) << ids[m];
        }
      }
    }
  }
}

struct Product {
  std::vector<float> got, expected, bound;
};
Product multiply(const layout::Layout& l, const std::vector<int64_t>& outputs, int64_t K, std::vector<float> x,
                 bool bias, float threshold = 0, const std::vector<float>* norms = nullptr) {
  std::vector<cuda::RowsPart> parts;
  std::vector<OnDevice<std::byte>> weights;
  std::vector<OnDevice<float>> results, biases;
  Product out;
  std::vector<int32_t> active(x.size());
  kernels::Activation in{x.data(), 1, K};
  if (threshold > 0) {
    in.active_count = kernels::collect_active(pool(), x.data(), 1, K, norms == nullptr ? nullptr : norms->data(),
                                              threshold, active.data());
    in.active = active.data();
  }
  std::vector<uint8_t> counts(x.size(), threshold > 0 ? 0 : 1);
  if (threshold > 0)
    for (int64_t i = 0; i < in.active_count; ++i) counts[size_t(active[size_t(i)])] = 1;
  for (const int64_t N : outputs) {
    const auto bytes = random_rows(l, N, K, uint64_t(N * 7919 + K));
    weights.emplace_back(prepared(l, N, K, bytes));
    const auto b = random_values(N, 3);
    if (bias) biases.emplace_back(b);
    results.emplace_back(size_t(N));
    parts.push_back({{&l, weights.back().data(), N, K}, bias ? biases.back().data() : nullptr, results.back().data()});
    std::vector<float> expected(static_cast<size_t>(N));
    kernels::WeightView view{"w", &l, {N, K}, bytes};
    if (bias) view.bias = b;
    kernels::reference_linear(view, in, {expected.data(), N});
    out.expected.insert(out.expected.end(), expected.begin(), expected.end());
    const auto size = magnitudes(l, N, K, bytes);
    for (int64_t n = 0; n < N; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < K; ++k)
        if (counts[size_t(k)]) sum += double(size[size_t(n * K + k)]) * std::abs(double(x[size_t(k)]));
      out.bound.push_back(float(rounding_bound(K) * sum + 0x1p-22 * std::abs(expected[size_t(n)]) + 1e-30));
    }
  }
  const OnDevice<float> x_there(x);
  std::vector<OnDevice<float>> norms_there;
  if (norms != nullptr) norms_there.emplace_back(*norms);
  cuda::launch_rows(device(), stream(),
                    {parts, x_there.data(), threshold, norms == nullptr ? nullptr : norms_there[0].data()});
  for (const auto& result : results) {
    const auto y = result.values();
    out.got.insert(out.got.end(), y.begin(), y.end());
  }
  return out;
}

void expect_close(const Product& p, const std::string& what) {
  double error = 0, size = 0;
  for (size_t n = 0; n < p.got.size(); ++n) {
    ASSERT_NEAR(p.got[n], p.expected[n], p.bound[n]) << what << " output " << n;
    error += std::pow(double(p.got[n]) - p.expected[n], 2);
    size += std::pow(double(p.expected[n]), 2);
  }
  if (p.got.size() < 16) return;
  EXPECT_LT(std::sqrt(error / size), 4e-6) << what;
}

TEST_P(EachLayout, ProductIsTheReference) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(GetParam());
  for (const int64_t K : widths(l)) {
    for (const int64_t N : {1, 2, 3, 33, 257}) {
      const std::string what = fmt::format("{} N {} K {}", l.name, N, K);
      expect_close(multiply(l, {N}, K, random_values(K, 11), N % 2 == 1), what);
    }
    expect_close(multiply(l, {130, 3, 1, 64}, K, random_values(K, 12), true), fmt::format("four parts, K {}", K));
  }
  expect_close(multiply(l, {5001}, 1024, random_values(1024, 13), false), "many rows");
}

struct Expected {
  std::vector<float> y;
  std::vector<double> bound;
};

/// Of M tokens: [M, N] each. size: magnitudes() of the weights.
Expected expect(const kernels::WeightView& w, const std::vector<float>& size, const std::vector<float>& x,
                int64_t x_stride, int64_t M) {
  const auto [N, K] = w.shape;
  Expected out{std::vector<float>(size_t(M * N)), {}};
  for (int64_t m = 0; m < M; ++m) {
    const float* const token = &x[size_t(m * x_stride)];
    kernels::reference_linear(w, {token, 1, K}, {&out.y[size_t(m * N)], N});
    for (int64_t n = 0; n < N; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += double(size[size_t(n * K + k)]) * std::abs(double(token[k]));
      out.bound.push_back(rounding_bound(K) * sum + 0x1p-22 * std::abs(double(out.y[size_t(m * N + n)])) + 1e-30);
    }
  }
  return out;
}

TEST_P(EachLayout, ProductsOfAFewTokensAreTheReference) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(GetParam());
  for (const int64_t K : widths(l)) {
    const int64_t N = 131, x_stride = (K + 7) / 4 * 4, y_stride = N + 2;
    const auto bytes = random_rows(l, N, K, uint64_t(K));
    const auto x = random_values(4 * x_stride, 15), bias = random_values(N, 16);
    const auto size = magnitudes(l, N, K, bytes);
    const OnDevice<std::byte> weights(prepared(l, N, K, bytes));
    const OnDevice<float> x_there(x), bias_there(bias);
    kernels::WeightView view{"w", &l, {N, K}, bytes};
    view.bias = bias;
    for (const int64_t M : {2, 3, 4}) {
      const OnDevice<float> y(size_t(M * y_stride));
      const std::vector<cuda::RowsPart> parts = {{{&l, weights.data(), N, K}, bias_there.data(), y.data()}};
      launch_rows(parts, x_there, M, x_stride, y_stride);
      const auto got = y.values();
      const Expected expected = expect(view, size, x, x_stride, M);
      for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < N; ++n)
          ASSERT_NEAR(got[size_t(m * y_stride + n)], expected.y[size_t(m * N + n)], expected.bound[size_t(m * N + n)])
              << l.name << " K " << K << " token " << m << " of " << M << " output " << n;
    }
  }
}

// Three parts whose rows are copies of `outputs` ones: teams take several groups of rows each, with one warp a row and
// with several, whose shares of one row must not meet those of the next.
TEST_P(EachLayout, TeamsOfManyRows) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(GetParam());
  const int64_t K = l.block_cols == 1 ? 1030 : 1280, outputs = 97, multiprocessors = device().info().multiprocessors;
  const auto bytes = random_rows(l, outputs, K, 17), canonical = prepared(l, outputs, K, bytes);
  const auto size = magnitudes(l, outputs, K, bytes);
  const int64_t x_stride = (K + 7) / 4 * 4, most_rows = 320 * multiprocessors;
  auto x = random_values(3 * x_stride, 18);
  const OnDevice<float> x_there(x);
  OnDevice<std::byte> weights(size_t((most_rows / outputs + 1)) * canonical.size());
  for (int64_t at = 0; at < weights.buffer().bytes(); at += int64_t(canonical.size()))
    weights.buffer().upload(canonical, at);
  struct Case {
    int64_t M;
    float threshold;
  };
  for (const auto& [M, threshold] : {Case{1, 0}, {1, 0.5f}, {3, 0}}) {
    for (float& v : x)
      if (std::abs(v) < threshold) v = 0;
    const Expected expected = expect({"w", &l, {outputs, K}, bytes}, size, x, x_stride, M);
    for (const int64_t rows : {40 * multiprocessors, 80 * multiprocessors, most_rows}) {
      const int64_t y_stride = 2 * rows + 3;
      const OnDevice<float> y(size_t(M * y_stride));
      std::vector<cuda::RowsPart> parts;
      int64_t at = 0;
      for (const int64_t N : {rows / 3, int64_t{3}, rows - rows / 3}) {
        parts.push_back({{&l, weights.data(), N, K}, nullptr, y.data() + at});
        at += N;
      }
      launch_rows(parts, x_there, M, x_stride, y_stride, threshold);
      const auto got = y.values();
      for (int64_t m = 0; m < M; ++m) {
        int64_t first = 0;
        for (const cuda::RowsPart& part : parts) {
          for (int64_t n = 0; n < part.weights.N; ++n) {
            const auto i = size_t(m * outputs + n % outputs);
            ASSERT_NEAR(got[size_t(m * y_stride + first + n)], expected.y[i], expected.bound[i])
                << l.name << ": " << rows << " rows, token " << m << " of " << M << ", output " << first + n
                << ", threshold " << threshold;
          }
          first += part.weights.N;
        }
        for (int64_t n = first; n < y_stride; ++n) ASSERT_TRUE(std::isnan(got[size_t(m * y_stride + n)])) << n;
      }
    }
    x = random_values(3 * x_stride, 18);
  }
}

TEST_P(EachLayout, InactiveInputsAreZeros) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(GetParam());
  const int64_t K = 1280;
  auto x = random_values(K, 21), norms = random_values(K, 22);
  for (float& n : norms) n = std::abs(n);
  x[3] = 0.5f, x[4] = -0.5f, x[5] = std::nextafter(0.5f, 0.0f);
  expect_close(multiply(l, {65}, K, x, true, 0.5f), "magnitude");
  expect_close(multiply(l, {65}, K, x, true, 0.5f, &norms), "norms");
  const auto none = multiply(l, {9}, K, x, true, 1e30f);
  expect_close(none, "none");
  const auto same = multiply(l, {9}, K, x, true, 1e-38f);
  expect_close(same, "all");
}

TEST_P(EachLayout, WhatIsNotFiniteStaysNotFinite) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(GetParam());
  const int64_t K = 1024;
  for (const float bad : {kNan, kInf, -kInf}) {
    auto x = random_values(K, 31);
    x[777] = bad;
    const auto p = multiply(l, {40}, K, x, false, 0.1f);  // NaN and infinity are active
    for (size_t n = 0; n < p.got.size(); ++n) EXPECT_FALSE(std::isfinite(p.got[n])) << n << ' ' << bad;
  }
}

TEST(CudaRows, EveryRunGivesTheSameBits) {
  LACUNA_NEED_DEVICE();
  for (const Id id : {Id::q4_K, Id::q6_K, Id::f16}) {
    const auto first = multiply(layout::get(id), {7, 300}, 4096, random_values(4096, 41), false);
    for (int i = 0; i < 5; ++i)
      ASSERT_EQ(multiply(layout::get(id), {7, 300}, 4096, random_values(4096, 41), false).got, first.got);
  }
}

TEST(CudaRows, AnInputWiderThanSharedMemory) {
  LACUNA_NEED_DEVICE();
  for (const Id id : {Id::q4_0, Id::q8_0, Id::f32})
    expect_close(multiply(layout::get(id), {3, 14}, 131072, random_values(131072, 51), true),
                 std::string(layout::get(id).name));
}

TEST(CudaRows, PartsOfSeveralLayouts) {
  LACUNA_NEED_DEVICE();
  const int64_t K = 512, N = 20;
  const auto x = random_values(K, 61);
  const OnDevice<float> x_there(x);
  std::vector<cuda::RowsPart> parts;
  std::vector<OnDevice<std::byte>> weights;
  std::vector<OnDevice<float>> results;
  const Id ids[] = {Id::q4_K, Id::q4_K, Id::q6_K, Id::f32};
  for (const Id id : ids) {
    const layout::Layout& l = layout::get(id);
    weights.emplace_back(prepared(l, N, K, random_rows(l, N, K, 5)));
    results.emplace_back(size_t(N));
    parts.push_back({{&l, weights.back().data(), N, K}, nullptr, results.back().data()});
  }
  cuda::launch_rows(device(), stream(), {parts, x_there.data()});
  for (size_t i = 0; i < 4; ++i) {
    const layout::Layout& l = layout::get(ids[i]);
    const auto bytes = random_rows(l, N, K, 5);
    std::vector<float> expected(N);
    kernels::reference_linear({"w", &l, {N, K}, bytes}, {x.data(), 1, K}, {expected.data(), N});
    const auto got = results[i].values();
    for (size_t n = 0; n < size_t(N); ++n) EXPECT_NEAR(got[n], expected[n], 1e-5 * (1 + std::abs(expected[n])));
  }
}

TEST(CudaRows, WeightsBeyondTwoGibibytes) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(Id::q8_0);
  const int64_t K = 4096, N = 600'000, row = cuda::row_places(l, K).row_bytes;
  ASSERT_GT(N * row, int64_t{1} << 31);
  if (device().free_bytes() < N * row + (int64_t{1} << 30)) GTEST_SKIP() << "SKIPPED: the device has too little memory";
  cuda::Buffer weights(device(), N * row, "weights");
  weights.fill(0);
  const auto x = random_values(K, 71);
  const auto bytes = random_rows(l, 2, K, 72);
  const auto last = prepared(l, 2, K, bytes);
  weights.upload(last, (N - 2) * row);
  const OnDevice<float> x_there(x), y(size_t{N}), embedded(size_t{K});
  const std::vector<cuda::RowsPart> parts = {{{&l, weights.data(), N, K}, nullptr, y.data()}};
  cuda::launch_rows(device(), stream(), {parts, x_there.data()});
  const OnDevice<int32_t> id(std::vector<int32_t>{int32_t(N - 1)});
  cuda::launch_embed(device(), stream(), parts[0].weights, id.data(), 1, embedded.data());
  std::vector<float> expected(2), decoded(size_t{K});
  kernels::reference_linear({"w", &l, {2, K}, bytes}, {x.data(), 1, K}, {expected.data(), 2});
  const auto got = y.values();
  for (size_t n = 0; n < size_t(N) - 2; ++n) ASSERT_EQ(got[n], 0.0f) << n;
  for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(got[size_t(N) - 2 + i], expected[i], 1e-4);
  layout::decode_rows(l, {2, K}, bytes, 1, 1, decoded.data());
  EXPECT_EQ(embedded.values(), decoded);
}

}  // namespace
}  // namespace lacuna
