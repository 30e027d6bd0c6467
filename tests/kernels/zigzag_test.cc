// tests/kernels/zigzag_test.cc - zigzag kernels of every instruction set against double precision.
#include "layout/zigzag.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/cpu/linear_kernel.h"
#include "kernels/cpu/zigzag_group.h"
#include "kernels/linear.h"
#include "kernels/support.h"
#include "layout/layout.h"

namespace lacuna {
namespace {

using cpu::Isa;
using kernels::Output;
using kernels::Prepare;
using kernels::WeightView;
using layout::Id;
using test::isas;
using test::pool;

const std::vector<Id> kZigzag = {Id::zz2_k, Id::zz3_k, Id::zz4_k, Id::zz5_k, Id::zz6_k, Id::zz8};

/// What a superblock holds, found by decoding: value = s * code - m per output.
struct Terms {
  float s[256], m[256];
};
struct CodeBytes {
  int begin, end, max_code;
};
CodeBytes code_bytes(Id id) {
  switch (id) {
    case Id::zz2_k:
      return {16, 80, 3};
    case Id::zz3_k:
      return {0, 96, 7};
    case Id::zz4_k:
      return {16, 144, 15};
    case Id::zz5_k:
      return {16, 176, 31};
    case Id::zz6_k:
      return {0, 192, 63};
    default:
      return {0, 272, 255};
  }
}

struct Weight {
  std::vector<std::byte> bytes;
  std::vector<float> bias, decoded;  // [N], [N, K]
  std::vector<float> s, m;           // [K, super rows * 256]
  std::vector<float> d, dmin;        // [K, super rows], what six-bit scales and minima are numbers of
  WeightView view;
};

Weight random_weight(Id id, int64_t N, int64_t K, int64_t tile_rows, uint64_t seed, bool bias = false) {
  const layout::Layout& l = layout::get(id);
  Rng rng(seed);
  Weight w;
  w.bytes.resize(size_t(l.size_bytes({N, K})));
  for (std::byte& byte : w.bytes) byte = std::byte(rng.next() >> 56);
  const auto put_half = [&](size_t at) {
    const f16 h = to_f16(float(rng.normal() * 0.01));
    std::memcpy(&w.bytes[at], &h, 2);
  };
  for (size_t at = 0; at < w.bytes.size(); at += size_t(l.block_bytes)) {
    if (id == Id::zz4_k || id == Id::zz5_k) put_half(at), put_half(at + 2);
    if (id == Id::zz2_k) put_half(at + 80), put_half(at + 82);
    if (id == Id::zz3_k) put_half(at + 108);
    if (id == Id::zz6_k) put_half(at + 208);
    if (id == Id::zz8)
      for (size_t b = 0; b < 8; ++b) put_half(at + 34 * b);
  }
  if (bias)
    for (int64_t n = 0; n < N; ++n) w.bias.push_back(float(rng.normal()));
  const layout::Shape shape{N, K};
  const layout::Params params{tile_rows};
  w.decoded.resize(size_t(N * K));
  layout::decode_zigzag(l, shape, params, w.bytes, 0, N, w.decoded.data());
  // Scales and minima: the same bytes with other codes.
  const CodeBytes codes = code_bytes(id);
  std::vector<std::byte> zeros = w.bytes, ones = w.bytes;
  for (size_t at = 0; at < w.bytes.size(); at += size_t(l.block_bytes)) {
    for (int i = codes.begin; i < codes.end; ++i) {
      if (id == Id::zz8 && i % 34 < 2) continue;
      zeros[at + size_t(i)] = std::byte{0};
      ones[at + size_t(i)] = id == Id::zz8 ? std::byte{1} : std::byte{0xff};
    }
  }
  const int64_t rows = layout::super_rows(N);
  w.s.resize(size_t(K * rows * 256));
  w.m.resize(w.s.size());
  const bool six_bit = id == Id::zz4_k || id == Id::zz5_k;
  if (six_bit) {
    w.d.resize(size_t(K * rows));
    w.dmin.resize(w.d.size());
  }
  const layout::ZigzagMap map(shape, params);
  for (int64_t k = 0; k < K; ++k) {
    for (int64_t r = 0; r < rows; ++r) {
      if (six_bit) {
        f16 both[2];
        std::memcpy(both, &w.bytes[size_t(map.index(r, k) * l.block_bytes)], 4);
        w.d[size_t(k * rows + r)] = to_float(both[0]);
        w.dmin[size_t(k * rows + r)] = to_float(both[1]);
      }
      float low[256], high[256];
      layout::decode_zigzag_superblock(l, shape, params, zeros, r, k, low);
      layout::decode_zigzag_superblock(l, shape, params, ones, r, k, high);
      for (int i = 0; i < 256; ++i) {
        const size_t at = size_t((k * rows + r) * 256 + i);
        w.s[at] = (high[i] - low[i]) / float(id == Id::zz8 ? 1 : codes.max_code);
        w.m[at] = id == Id::zz8 ? 128 * w.s[at] : -low[i];
      }
    }
  }
  w.view = {std::string(l.name) + ".weight", &l, shape, w.bytes, w.bias, params};
  return w;
}

std::vector<float> random_inputs(int64_t count, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& value : x) value = float(rng.normal() * std::exp(rng.normal()));
  return x;
}

/// One token. Each factor x * s is off by at most half a step, the largest of the block's factors / 32512 (kernels take
/// the largest of 32 columns, which is no more), times a code; and float sums round. Where scales are six-bit numbers
/// of d, a kernel may round x * d against its largest / 32767 instead and its product with a number / 64 again: by one
/// step of 64 times that at most; and x * dmin, by half a step of the largest / 32512, of which a minimum is up to 63
/// times.
void expect_close(const Weight& w, const float* x, const std::vector<int32_t>& active, const float* y,
                  const std::string& what, Isa isa = Isa::generic) {
  const auto [N, K] = w.view.shape;
  const int max_code = code_bytes(w.view.layout->id).max_code;
  const int64_t rows = layout::super_rows(N);
  for (int64_t n = 0; n < N; ++n) {
    double sum = w.bias.empty() ? 0 : w.bias[size_t(n)], size = std::fabs(sum), largest = 0, unit = 0, min_unit = 0;
    for (const int32_t k : active) {
      const size_t at = size_t(int64_t{k} * rows * 256 + n);
      sum += double(x[k]) * w.decoded[size_t(n * K + k)];
      size += std::fabs(double(x[k])) * (max_code * std::fabs(double(w.s[at])) + std::fabs(double(w.m[at])));
      largest = std::max(largest, std::fabs(double(x[k]) * w.s[at]));
    }
    const double count = double(active.size());
    if (!w.d.empty() && isa == Isa::avx512vnni) {
      for (const int32_t k : active) {
        const size_t at = size_t(int64_t{k} * rows + n / 256);
        unit = std::max(unit, std::fabs(double(x[k]) * w.d[at]));
        min_unit = std::max(min_unit, std::fabs(double(x[k]) * w.dmin[at]));
      }
    }
    const double rounding =
        std::max(0.5 * max_code * largest / 32512, max_code * 64 * unit / 32767 + 0.5 * 63 * min_unit / 32512);
    const double bound = count * rounding * 1.001 + size * 0x1p-24 * (count / 4 + 32) + 1e-30;
    ASSERT_NEAR(y[n], sum, bound) << what << ", output " << n;
  }
}

std::vector<int32_t> every(int64_t K) {
  std::vector<int32_t> all(static_cast<size_t>(K));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

class ZigzagKernels : public testing::TestWithParam<Id> {};

TEST_P(ZigzagKernels, OneTokenAnyShape) {
  for (const Isa isa : isas()) {
    for (const int64_t N : {1, 31, 255, 256, 257, 700}) {
      for (const int64_t K : {1, 3, 33, 70, 257}) {
        for (const int64_t tile_rows : {0, 256, 512}) {
          if (tile_rows == 512 && N < 700) continue;
          const Weight w = random_weight(GetParam(), N, K, tile_rows, uint64_t(N * 1000 + K), N == 257);
          const std::vector<float> x = random_inputs(K, uint64_t(K));
          std::vector<int32_t> some;
          for (int32_t k = 0; k < K; ++k)
            if ((k * 7919) % 5 < 2) some.push_back(k);
          for (const Prepare prepare : {Prepare::automatic, Prepare::in_place}) {
            auto group = cpu::make_zigzag_group(isa, {&w.view, 1}, pool(), prepare);
            std::vector<float> y(size_t(N), -1.0f);
            const Output out{y.data(), N};
            const std::string what = std::string(cpu::isa_name(isa)) + " N=" + std::to_string(N) +
                                     " K=" + std::to_string(K) + " tile_rows=" + std::to_string(tile_rows);
            group->run({x.data(), 1, K}, {&out, 1});
            expect_close(w, x.data(), every(K), y.data(), what + " dense", isa);
            group->run({x.data(), 1, K, some.data(), int64_t(some.size())}, {&out, 1});
            expect_close(w, x.data(), some, y.data(), what + " active", isa);
          }
        }
      }
    }
  }
}

TEST_P(ZigzagKernels, EveryCountOfActiveColumns) {
  const int64_t N = 300, K = 75;
  const Weight w = random_weight(GetParam(), N, K, 0, 5);
  const std::vector<float> x = random_inputs(K, 6);
  for (const Isa isa : isas()) {
    auto group = cpu::make_zigzag_group(isa, {&w.view, 1}, pool(), Prepare::automatic);
    for (int64_t count = 0; count <= K; ++count) {
      std::vector<int32_t> active;  // spread over all columns
      for (int64_t i = 0; i < count; ++i) active.push_back(int32_t(i * K / count));
      std::vector<float> y(size_t(N), -1.0f);
      const Output out{y.data(), N};
      group->run({x.data(), 1, K, active.data(), count}, {&out, 1});
      expect_close(w, x.data(), active, y.data(), std::string(cpu::isa_name(isa)) + " count " + std::to_string(count),
                   isa);
    }
  }
}

/// Several tokens: inputs are rounded to absmax/127 per 32 inputs and weights to absmax/127 of an output's 32 inputs
/// (the scale rounded up to f16, at most 2^-10 more, plus a subnormal step).
TEST_P(ZigzagKernels, SeveralTokens) {
  const int64_t N = 300;
  for (const Isa isa : isas()) {
    for (const int64_t K : {70, 96}) {
      for (const int64_t M : {2, 7, 16, 17, 37, 530}) {
        if (M == 530 && isa == Isa::generic) continue;  // a second chunk of tokens; slow there
        const Weight w = random_weight(GetParam(), N, K, 0, uint64_t(K), true);
        const std::vector<float> x = random_inputs(M * K, uint64_t(M));
        std::vector<int32_t> active = every(K);
        for (const bool masked : {false, true}) {
          if (masked) std::erase_if(active, [](int32_t k) { return k % 3 == 1; });
          auto group = cpu::make_zigzag_group(isa, {&w.view, 1}, pool(), Prepare::automatic);
          std::vector<float> y(size_t(M * N), -1.0f);
          const Output out{y.data(), N};
          group->run({x.data(), M, K, masked ? active.data() : nullptr, masked ? int64_t(active.size()) : -1},
                     {&out, 1});
          for (int64_t m = 0; m < M; ++m) {
            const float* row = x.data() + m * K;
            if (M <= cpu::kZigzagFewTokens) {
              expect_close(w, row, active, y.data() + m * N, "few tokens");
              continue;
            }
            for (int64_t n = 0; n < N; ++n) {
              double sum = w.bias[size_t(n)], bound = 1e-6;
              for (int64_t k0 = 0; k0 < K; k0 += 32) {
                double top_x = 0, top_w = 0;
                for (int64_t k = k0; k < std::min(K, k0 + 32); ++k) {
                  const bool counts = !masked || k % 3 != 1;
                  if (counts) top_x = std::max(top_x, std::fabs(double(row[k])));
                  top_w = std::max(top_w, std::fabs(double(w.decoded[size_t(n * K + k)])));
                }
                const double step_x = top_x / 127, step_w = top_w / 127 * (1 + 0x1p-9) + 0x1p-24;
                for (int64_t k = k0; k < std::min(K, k0 + 32); ++k) {
                  if (masked && k % 3 == 1) continue;
                  const double weight = w.decoded[size_t(n * K + k)];
                  sum += double(row[k]) * weight;
                  bound += 0.51 * step_x * (std::fabs(weight) + step_w) + 0.51 * step_w * std::fabs(double(row[k])) +
                           1e-5 * std::fabs(double(row[k]) * weight);
                }
              }
              ASSERT_NEAR(y[size_t(m * N + n)], sum, bound)
                  << cpu::isa_name(isa) << " K=" << K << " M=" << M << " token " << m << " output " << n;
            }
          }
        }
      }
    }
  }
}

TEST_P(ZigzagKernels, NonFiniteInputsShow) {
  const int64_t N = 256, K = 40;
  const Weight w = random_weight(GetParam(), N, K, 0, 9);
  for (const Isa isa : isas()) {
    auto group = cpu::make_zigzag_group(isa, {&w.view, 1}, pool(), Prepare::automatic);
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::vector<float> x = random_inputs(K, 10);
      x[17] = bad;
      std::vector<float> y(size_t(N), 0.0f);
      const Output out{y.data(), N};
      group->run({x.data(), 1, K}, {&out, 1});
      for (const float value : y) ASSERT_FALSE(std::isfinite(value)) << cpu::isa_name(isa);
      // One of three tokens.
      std::vector<float> xs = random_inputs(3 * K, 11), ys(size_t(3 * N), 0.0f);
      xs[size_t(K + 17)] = bad;
      const Output outs{ys.data(), N};
      group->run({xs.data(), 3, K}, {&outs, 1});
      for (int64_t i = 0; i < 3 * N; ++i)
        ASSERT_EQ(std::isfinite(ys[size_t(i)]), i / N != 1) << cpu::isa_name(isa) << " " << i;
    }
  }
}

TEST_P(ZigzagKernels, OneHugeInputAmongSmallOnes) {
  const int64_t N = 300, K = 70;
  const Weight w = random_weight(GetParam(), N, K, 0, 11);
  std::vector<float> x = random_inputs(K, 12);
  x[33] *= 3000;
  for (const Isa isa : isas()) {
    auto group = cpu::make_zigzag_group(isa, {&w.view, 1}, pool(), Prepare::automatic);
    std::vector<float> y(size_t(N), 1.0f);
    const Output out{y.data(), N};
    group->run({x.data(), 1, K}, {&out, 1});
    expect_close(w, x.data(), every(K), y.data(), std::string(cpu::isa_name(isa)), isa);
  }
}

TEST_P(ZigzagKernels, ATinyInputsAndZeros) {
  const int64_t N = 256, K = 40;
  const Weight w = random_weight(GetParam(), N, K, 0, 9);
  for (const Isa isa : isas()) {
    auto group = cpu::make_zigzag_group(isa, {&w.view, 1}, pool(), Prepare::automatic);
    for (const float scale : {0.0f, 1e-20f, 1e20f}) {
      std::vector<float> x = random_inputs(K, 10);
      for (float& value : x) value *= scale;
      std::vector<float> y(size_t(N), 1.0f);
      const Output out{y.data(), N};
      group->run({x.data(), 1, K}, {&out, 1});
      expect_close(w, x.data(), every(K), y.data(), "scale", isa);
      if (scale == 0) {
        for (const float value : y) ASSERT_EQ(value, 0.0f);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllLayouts, ZigzagKernels, testing::ValuesIn(kZigzag),
                         [](const auto& test) { return std::string(layout::get(test.param).name); });

TEST(ZigzagGroup, SplitByRowsGivesTheSameBitsOnAnyNumberOfThreads) {
  const int64_t N = 1100, K = 333;
  const Weight w = random_weight(Id::zz4_k, N, K, 0, 3);
  const std::vector<float> x = random_inputs(K, 4);
  std::vector<int32_t> active;
  for (int32_t k = 0; k < K; k += 1 + k % 3) active.push_back(k);
  for (const int64_t tile_rows : {0, 256, 512}) {
    std::vector<std::vector<float>> results;
    for (const int threads : {1, 2, 3, 7}) {
      ThreadPool workers(threads);
      auto group = cpu::make_zigzag_group(cpu::isa(), {&w.view, 1}, workers, Prepare::automatic,
                                          {.split = kernels::Plan::Split::rows, .tile_rows = tile_rows});
      std::vector<float> y(static_cast<size_t>(N));
      const Output out{y.data(), N};
      group->run({x.data(), 1, K, active.data(), int64_t(active.size())}, {&out, 1});
      results.push_back(y);
    }
    for (const auto& y : results) EXPECT_EQ(y, results[0]);
  }
}

TEST_P(ZigzagKernels, EveryPlan) {
  const int64_t N = 1100, K = 150;
  const Weight a = random_weight(GetParam(), N, K, 0, 3), b = random_weight(GetParam(), 300, K, 512, 5),
               c = random_weight(Id::zz6_k, 520, K, 256, 6);
  const std::vector<float> x = random_inputs(K, 4);
  std::vector<int32_t> active;
  for (int32_t k = 0; k < K; k += 1 + k % 3) active.push_back(k);
  for (const Isa isa : isas())
    for (const Prepare prepare : {Prepare::automatic, Prepare::in_place})
      for (const auto split : {kernels::Plan::Split::columns, kernels::Plan::Split::rows})
        for (const int chunk : {16, 32, 48, 64})
          for (const int prefetch : {0, 1, 3, kernels::Plan::kColumn})
            for (const int64_t tile_rows : {0, 256, 768, 4096}) {
              const kernels::Plan plan{split, chunk, prefetch, tile_rows, 0};
              SCOPED_TRACE(describe(plan));
              const WeightView views[] = {a.view, b.view, c.view};
              auto group = cpu::make_zigzag_group(isa, views, pool(), prepare, plan);
              std::vector<float> few_a(2 * N), few_b(2 * 300), few_c(2 * 520), twice = random_inputs(2 * K, 9);
              const Output few[] = {{few_a.data(), N}, {few_b.data(), 300}, {few_c.data(), 520}};
              group->run({twice.data(), 2, K, active.data(), int64_t(active.size())}, few);
              for (int64_t m = 0; m < 2; ++m) {
                expect_close(a, twice.data() + m * K, active, few_a.data() + m * N, "a of two tokens");
                expect_close(b, twice.data() + m * K, active, few_b.data() + m * 300, "b of two tokens");
                expect_close(c, twice.data() + m * K, active, few_c.data() + m * 520, "c of two tokens");
              }
              std::vector<float> ya(N), yb(300), yc(520);
              const Output out[] = {{ya.data(), N}, {yb.data(), 300}, {yc.data(), 520}};
              group->run({x.data(), 1, K, active.data(), int64_t(active.size())}, out);
              expect_close(a, x.data(), active, ya.data(), "a", isa);
              expect_close(b, x.data(), active, yb.data(), "b", isa);
              expect_close(c, x.data(), active, yc.data(), "c", isa);
              // Several tokens read the same prepared form.
              if (chunk != 32 || prefetch != 3) continue;
              const int64_t M = cpu::kZigzagFewTokens + 1;
              std::vector<float> xs, many(size_t(M * N)), rest_b(size_t(M * 300)), rest_c(size_t(M * 520));
              for (int64_t m = 0; m < M; ++m) xs.insert(xs.end(), x.begin(), x.end());
              const Output outs[] = {{many.data(), N}, {rest_b.data(), 300}, {rest_c.data(), 520}};
              group->run({xs.data(), M, K, active.data(), int64_t(active.size())}, outs);
              double squares = 0;
              for (const float value : ya) squares += double(value) * value;
              const double tenth = 0.1 * std::sqrt(squares / N);  // a superblock in the wrong place is off by far more
              for (int64_t n = 0; n < N; ++n) ASSERT_NEAR(many[size_t((M - 1) * N + n)], ya[size_t(n)], tenth);
            }
}

TEST(ZigzagGroup, PartsOfSeveralLayoutsAndRowsShareOneInput) {
  const int64_t K = 256;
  const Weight a = random_weight(Id::zz4_k, 512, K, 0, 1), b = random_weight(Id::zz4_k, 100, K, 0, 2),
               c = random_weight(Id::zz6_k, 300, K, 256, 3, true);
  std::vector<std::byte> row_bytes(size_t(64 * K * 4));
  Rng rng(8);
  for (int64_t i = 0; i < 64 * K; ++i) {
    const float value = float(rng.normal());
    std::memcpy(&row_bytes[size_t(4 * i)], &value, 4);
  }
  const WeightView rows{"rows", &layout::get(Id::f32), {64, K}, row_bytes};
  const std::vector<float> x = random_inputs(K, 4);
  std::vector<int32_t> active;
  for (int32_t k = 1; k < K; k += 3) active.push_back(k);
  for (const Isa isa : isas()) {
    const std::vector<WeightView> parts = {a.view, rows, b.view, c.view};
    auto group = cpu::make_linear_group(isa, parts, pool(), Prepare::automatic);
    std::vector<float> y[4] = {std::vector<float>(512), std::vector<float>(64), std::vector<float>(100),
                               std::vector<float>(300)};
    std::vector<Output> out;
    for (auto& part : y) out.push_back({part.data(), int64_t(part.size())});
    group->run({x.data(), 1, K, active.data(), int64_t(active.size())}, out);
    expect_close(a, x.data(), active, y[0].data(), "a", isa);
    expect_close(b, x.data(), active, y[2].data(), "b", isa);
    expect_close(c, x.data(), active, y[3].data(), "c", isa);
    for (int64_t n = 0; n < 64; ++n) {
      double sum = 0, size = 0;
      for (const int32_t k : active) {
        float value;
        std::memcpy(&value, &row_bytes[size_t(4 * (n * K + k))], 4);
        sum += double(value) * x[size_t(k)];
        size += std::fabs(double(value) * x[size_t(k)]);
      }
      EXPECT_NEAR(y[1][size_t(n)], sum, size * 1e-5);
    }
  }
}

}  // namespace
}  // namespace lacuna
