// Every op against the same in double precision.
#include "kernels/ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "core/rng.h"
#include "core/scalar.h"
#include "test_support.h"

namespace lacuna::kernels {
namespace {

constexpr double kEps = 0x1p-24;  // of a float rounding
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<float> random(size_t count, uint64_t seed, double scale = 1) {
  Rng rng(seed);
  std::vector<float> out(count);
  for (float& x : out) x = float(rng.normal() * scale);
  return out;
}

ThreadPool& pool() {
  static ThreadPool two(2);
  return two;
}

double silu(double g) { return g / (1 + std::exp(-g)); }

// ---- norms and activations ----

class Width : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Odd, Width, testing::Values(1, 3, 10, 15, 16, 17, 63, 64, 65, 576, 1000, 4096));

TEST_P(Width, RmsNorm) {
  const int64_t K = GetParam();
  for (const int64_t M : {1, 2, 37}) {
    const auto x = random(size_t(M * K), 1), w = random(size_t(K), 2);
    std::vector<float> y(x.size(), kNan);
    rms_norm(pool(), x.data(), w.data(), 1e-5f, M, K, y.data());
    for (int64_t m = 0; m < M; ++m) {
      double squares = 0;
      for (int64_t k = 0; k < K; ++k) squares += double(x[m * K + k]) * x[m * K + k];
      const double inverse = 1 / std::sqrt(squares / double(K) + double(1e-5f));
      for (int64_t k = 0; k < K; ++k) {
        const double expected = x[m * K + k] * inverse * w[k];
        // The sum has at most K/16 + 20 roundings in a chain, halved by the root; then a handful.
        EXPECT_NEAR(y[m * K + k], expected, std::abs(expected) * kEps * (double(K) / 16 + 30)) << m << ' ' << k;
      }
    }
  }
}

TEST_P(Width, LayerNorm) {
  const int64_t K = GetParam();
  for (const int64_t M : {1, 2, 37}) {
    auto x = random(size_t(M * K), 3);
    for (float& v : x) v += 3;
    const auto w = random(size_t(K), 4), b = random(size_t(K), 5);
    std::vector<float> y(x.size(), kNan);
    layer_norm(pool(), x.data(), w.data(), b.data(), 1e-3f, M, K, y.data());
    for (int64_t m = 0; m < M; ++m) {
      double mean = 0, squares = 0;
      for (int64_t k = 0; k < K; ++k) mean += x[m * K + k] / double(K);
      for (int64_t k = 0; k < K; ++k) squares += (x[m * K + k] - mean) * (x[m * K + k] - mean);
      const double inverse = 1 / std::sqrt(squares / double(K) + double(1e-3f));
      for (int64_t k = 0; k < K; ++k) {
        const double centred = x[m * K + k] - mean;
        const double expected = centred * inverse * w[k] + b[k];
        const double size = (std::abs(centred) + 3 + std::abs(mean)) * inverse * std::abs(w[k]) + std::abs(expected);
        EXPECT_NEAR(y[m * K + k], expected, size * kEps * (double(K) / 16 + 30)) << m << ' ' << k;
      }
    }
  }
}

TEST_P(Width, ElementwiseOps) {
  for (const int64_t count : {GetParam(), GetParam() * 1000}) {
    const auto a = random(size_t(count), 6, 4), b = random(size_t(count), 7);
    auto sum = a;
    add(pool(), b.data(), count, sum.data());
    auto positive = a;
    relu(pool(), positive.data(), count);
    std::vector<float> gated(a.size(), kNan);
    swiglu(pool(), a.data(), b.data(), count, gated.data());
    int64_t wrong = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      wrong += sum[i] != a[i] + b[i];
      wrong += positive[i] != std::max(a[i], 0.0f);
      const double expected = silu(a[i]) * b[i];
      wrong += !(std::abs(gated[i] - expected) <= 8 * kEps * std::abs(expected));
    }
    EXPECT_EQ(wrong, 0) << count;
  }
}

TEST_P(Width, GeluTanh) {
  const int64_t K = GetParam();
  for (const int64_t M : {1, 2, 37}) {
    const int64_t stride = K + 3;
    const auto x = random(size_t(M * stride), 12, 3);
    auto y = x;
    gelu_tanh(pool(), y.data(), M, K, stride);
    int64_t wrong = 0;
    for (int64_t i = 0; i < M * stride; ++i) {
      const double v = x[size_t(i)], inner = 2 * std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v);
      const double expected = i % stride < K ? v / (1 + std::exp(-inner)) : v;
      // The exponent has a relative error of six roundings, which the exponential makes one of |inner| times as much.
      // Exponents end at 88.4, where a value is |v| e^-88.4.
      wrong += !(std::abs(y[size_t(i)] - expected) <=
                 (8 + 6 * std::abs(inner)) * kEps * std::abs(expected) + std::abs(v) * 5e-39);
    }
    EXPECT_EQ(wrong, 0) << M;
  }
}

TEST(Ops, GeluTanhAtExtremes) {
  std::vector<float> x = {0, -0.0f, 10, -10, 1e30f, -1e30f, kInf, kNan, 88};
  gelu_tanh(pool(), x.data(), 1, int64_t(x.size()), int64_t(x.size()));
  EXPECT_EQ(x[0], 0);
  EXPECT_EQ(x[1], 0);
  EXPECT_EQ(x[2], 10);
  EXPECT_NEAR(x[3], 0, 1e-30);
  EXPECT_EQ(x[4], 1e30f);
  EXPECT_LE(std::abs(x[5]), 1e-6f);
  EXPECT_EQ(x[6], kInf);
  EXPECT_TRUE(std::isnan(x[7]));
  EXPECT_EQ(x[8], 88);
}

TEST_P(Width, AddGated) {
  const int64_t K = GetParam();
  for (const int64_t M : {1, 2, 37}) {
    const auto x = random(size_t(M * K), 13), y = random(size_t(M * K), 14), gate = random(size_t(K), 15);
    auto sum = x;
    add_gated(pool(), y.data(), gate.data(), M, K, sum.data());
    int64_t wrong = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double product = double(gate[i % size_t(K)]) * y[i];
      // The product may be rounded on its own, where there is no fused instruction.
      wrong += !(std::abs(sum[i] - (x[i] + product)) <= kEps * (std::abs(product) + std::abs(x[i] + product)) * 1.01);
    }
    EXPECT_EQ(wrong, 0) << M;
  }
}

TEST(Ops, SwigluAtExtremes) {
  const std::vector<float> gate = {0, -0.0f, 100, -100, 1e30f, -1e30f, kInf, -87, 88, -88, kNan};
  const std::vector<float> up(gate.size(), 2.0f);
  std::vector<float> out(gate.size());
  swiglu(pool(), gate.data(), up.data(), int64_t(gate.size()), out.data());
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(out[1], 0);
  EXPECT_EQ(out[2], 200);
  EXPECT_NEAR(out[3], 0, 1e-30);
  EXPECT_EQ(out[4], 2e30f);
  EXPECT_LE(std::abs(out[5]), 1e-6f);
  EXPECT_EQ(out[6], kInf);
  EXPECT_NEAR(out[7], 2 * silu(-87), 1e-36);
  EXPECT_EQ(out[8], 176);
  EXPECT_TRUE(std::isnan(out[10]));
}

TEST(Ops, ReluKeepsNan) {
  std::vector<float> x(33, -1.0f);
  x[3] = kNan;
  x[32] = kNan;
  relu(pool(), x.data(), 33);
  EXPECT_TRUE(std::isnan(x[3]));
  EXPECT_TRUE(std::isnan(x[32]));
  EXPECT_EQ(x[4], 0);
}

TEST(Ops, EmptyInputsDoNothing) {
  rms_norm(pool(), nullptr, nullptr, 1e-5f, 0, 64, nullptr);
  layer_norm(pool(), nullptr, nullptr, nullptr, 1e-5f, 0, 64, nullptr);
  add(pool(), nullptr, 0, nullptr);
  swiglu(pool(), nullptr, nullptr, 0, nullptr);
  relu(pool(), nullptr, 0);
  add_gated(pool(), nullptr, nullptr, 0, 64, nullptr);
  gelu_tanh(pool(), nullptr, 0, 64, 64);
  rope(pool(), nullptr, 0, 4, 64, 256, nullptr, nullptr, 64, false);
  attention(pool(), {});
}

TEST(Ops, LogSumExp) {
  for (const int64_t count : {1, 5, 16, 17, 1023, 1024, 1025, 151936}) {
    const auto x = random(size_t(count), 8, 5);
    double top = -1e300, total = 0;
    for (const float v : x) top = std::max(top, double(v));
    for (const float v : x) total += std::exp(v - top);
    EXPECT_NEAR(log_sum_exp(x.data(), count), top + std::log(total), 1e-6) << count;
  }
  std::vector<float> x = random(100, 9);
  x[50] = -kInf;
  EXPECT_TRUE(std::isfinite(log_sum_exp(x.data(), 100)));
  for (const size_t place : {0, 37, 99}) {
    std::vector<float> broken = x;
    broken[place] = kNan;
    EXPECT_TRUE(std::isnan(log_sum_exp(broken.data(), 100))) << place;
  }
  x[99] = kInf;
  EXPECT_EQ(log_sum_exp(x.data(), 100), kInf);
  const std::vector<float> none(20, -kInf);
  EXPECT_EQ(log_sum_exp(none.data(), 20), -kInf);
}

/// exp itself, seen through log_sum_exp's and swiglu's building block: silu(-x) = -x / (1 + exp(x)) with x chosen so
/// that exp(x) dominates.
TEST(Ops, ExpIsWithinTwoUnitsInTheLastPlace) {
  test::Largest worst;
  std::vector<float> gate, up;
  for (double x = 18; x < 80; x += 0.00317) gate.push_back(float(-x));
  up.assign(gate.size(), 1.0f);
  std::vector<float> out(gate.size());
  swiglu(pool(), gate.data(), up.data(), int64_t(gate.size()), out.data());
  for (size_t i = 0; i < gate.size(); ++i) {
    const double expected = silu(gate[i]);
    worst.add(std::abs(out[i] / expected - 1));
  }
  // exp: 2^-22.5; the sum, the division and the product round once each.
  EXPECT_LE(worst.value(), std::exp2(-22.5) + 3 * kEps);
}

// ---- rotary embedding ----

TEST(Ops, RopeTurnsPairs) {
  for (const int64_t head_dim : {10, 12, 64, 80, 128}) {
    for (const int64_t n_rot : {head_dim, head_dim / 2 / 2 * 2}) {
      for (const bool adjacent : {false, true}) {
        for (const int64_t M : {1, 3, 70}) {
          const int64_t heads = 3, stride = heads * head_dim + 5, half = n_rot / 2;
          const auto x = random(size_t(M * stride), 10), angles = random(size_t(M * half), 11, 3);
          std::vector<float> cos(angles.size()), sin(angles.size());
          for (size_t i = 0; i < angles.size(); ++i) cos[i] = std::cos(angles[i]), sin[i] = std::sin(angles[i]);
          auto y = x;
          rope(pool(), y.data(), M, heads, head_dim, stride, cos.data(), sin.data(), n_rot, adjacent);
          auto expected = x;
          for (int64_t m = 0; m < M; ++m) {
            for (int64_t h = 0; h < heads; ++h) {
              for (int64_t i = 0; i < half; ++i) {
                const int64_t base = m * stride + h * head_dim;
                const int64_t p = base + (adjacent ? 2 * i : i), q = base + (adjacent ? 2 * i + 1 : i + half);
                const double c = cos[m * half + i], s = sin[m * half + i];
                expected[p] = float(x[p] * c - x[q] * s);
                expected[q] = float(x[p] * s + x[q] * c);
              }
            }
          }
          for (size_t i = 0; i < y.size(); ++i) ASSERT_NEAR(y[i], expected[i], 4e-7 * 6) << head_dim << ' ' << i;
        }
      }
    }
  }
}

// ---- cache and attention ----

struct Cache {
  std::vector<std::byte> keys, values;
  KvLayer layer;
  Cache(KvType type, int64_t capacity, int64_t n_kv_heads, int64_t head_dim) {
    const auto bytes = size_t(n_kv_heads * capacity * kv_head_bytes(type, head_dim));
    // Unwritten positions are NaN in every type: they must not be read into a result.
    keys.assign(bytes, std::byte{0xff});
    values.assign(bytes, std::byte{0xff});
    layer = {type, keys.data(), values.data(), capacity, n_kv_heads, head_dim};
  }
};

/// What the cache holds of a value of a head.
std::vector<double> stored(KvType type, const float* x, int64_t head_dim) {
  std::vector<double> out(x, x + head_dim);
  if (type == KvType::f16)
    for (double& v : out) v = to_float(to_f16(float(v)));
  if (type == KvType::q8_0) {
    for (int64_t begin = 0; begin < head_dim; begin += 32) {
      const int64_t end = std::min(head_dim, begin + 32);
      double largest = 0;
      for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(out[size_t(i)]));
      const float scale = to_float(to_f16(float(largest) / 127));
      for (int64_t i = begin; i < end; ++i) {
        const float inverse = 1 / scale;
        out[size_t(i)] =
            scale > 0 ? double(scale) * std::clamp(std::nearbyint(double(x[i] * inverse)), -127.0, 127.0) : 0;
      }
    }
  }
  return out;
}

struct Problem {
  KvType type = KvType::f16;
  int64_t head_dim = 64, n_heads = 9, n_kv_heads = 3, position = 0, M = 1, window = 0;
  bool causal = true;
};

void PrintTo(const Problem& p, std::ostream* out) {
  *out << "type " << int(p.type) << " head_dim " << p.head_dim << " heads " << p.n_heads << '/' << p.n_kv_heads
       << " position " << p.position << " M " << p.M << " window " << p.window << (p.causal ? "" : " all positions");
}

/// Runs attention over position + M tokens and compares with softmax in double over the stored values.
void check_attention(const Problem& p, ThreadPool& threads) {
  const int64_t total = p.position + p.M, D = p.head_dim, group = p.n_heads / p.n_kv_heads;
  const int64_t kv_stride = p.n_kv_heads * D + 3, q_stride = p.n_heads * D + 7, out_stride = p.n_heads * D + 1;
  const auto k = random(size_t(total * kv_stride), 20), v = random(size_t(total * kv_stride), 21);
  const auto q = random(size_t(p.M * q_stride), 22, 2);
  Cache cache(p.type, total + 5, p.n_kv_heads, D);
  // In two pieces, as a prompt and what follows it.
  kv_store(threads, cache.layer, 0, p.position, k.data(), kv_stride, v.data(), kv_stride);
  kv_store(threads, cache.layer, p.position, p.M, k.data() + p.position * kv_stride, kv_stride,
           v.data() + p.position * kv_stride, kv_stride);
  std::vector<float> out(size_t(p.M * out_stride), kNan);
  AttentionArgs args;
  args.q = q.data();
  args.q_stride = q_stride;
  args.M = p.M;
  args.n_heads = p.n_heads;
  args.cache = cache.layer;
  args.position = p.position;
  args.window = p.window;
  args.scale = float(1 / std::sqrt(double(D)));
  args.out = out.data();
  args.out_stride = out_stride;
  args.causal = p.causal;
  attention(threads, args);

  std::vector<std::vector<double>> keys, values;  // [position * n_kv_heads + head]
  for (int64_t t = 0; t < total; ++t) {
    for (int64_t h = 0; h < p.n_kv_heads; ++h) {
      keys.push_back(stored(p.type, k.data() + t * kv_stride + h * D, D));
      values.push_back(stored(p.type, v.data() + t * kv_stride + h * D, D));
    }
  }
  test::Largest worst;
  for (int64_t m = 0; m < p.M; ++m) {
    // Long cases: the ends and a sample between them.
    if (p.M > 40 && m % 13 != 0 && m + 3 < p.M && m > 2) continue;
    for (int64_t h = 0; h < p.n_heads; ++h) {
      const int64_t now = p.causal ? p.position + m : total - 1;
      const int64_t first = p.window > 0 ? std::max<int64_t>(0, now - p.window + 1) : 0;
      std::vector<double> scores;
      double top = -1e300;
      for (int64_t t = first; t <= now; ++t) {
        double dot = 0;
        const auto& key = keys[size_t(t * p.n_kv_heads + h / group)];
        for (int64_t i = 0; i < D; ++i) dot += double(q[size_t(m * q_stride + h * D + i)]) * key[size_t(i)];
        scores.push_back(dot * args.scale);
        top = std::max(top, scores.back());
      }
      double sum = 0;
      for (double& s : scores) sum += s = std::exp(s - top);
      for (int64_t i = 0; i < D; ++i) {
        double expected = 0;
        for (int64_t t = first; t <= now; ++t)
          expected += scores[size_t(t - first)] / sum * values[size_t(t * p.n_kv_heads + h / group)][size_t(i)];
        worst.add(std::abs(out[size_t(m * out_stride + h * D + i)] - expected));
      }
    }
    for (int64_t i = p.n_heads * D; i < out_stride; ++i)
      EXPECT_TRUE(std::isnan(out[size_t(m * out_stride + i)])) << "wrote between rows";
  }
  // Scores are of size |q||k|/sqrt(D) <= 2 * sqrt(D) * 1.5, each with an error of sqrt(D) roundings of that size;
  // values are below 5.
  EXPECT_LE(worst.value(), 5 * 3 * std::sqrt(double(D)) * std::sqrt(double(D)) * kEps * 4) << testing::PrintToString(p);
}

class Attention : public testing::TestWithParam<std::tuple<KvType, int64_t>> {};
INSTANTIATE_TEST_SUITE_P(Types, Attention,
                         testing::Combine(testing::Values(KvType::f16, KvType::q8_0, KvType::f32),
                                          testing::Values(1, 10, 12, 64, 80, 96, 112, 128, 256)));

TEST_P(Attention, OneToken) {
  const auto [type, head_dim] = GetParam();
  for (const int64_t position : {0, 1, 3, 62, 63, 64, 65, 200})
    check_attention({type, head_dim, 6, 2, position, 1, 0}, pool());
}

TEST_P(Attention, ManyTokens) {
  const auto [type, head_dim] = GetParam();
  for (const auto& [position, M] : {std::pair{0, 2}, {0, 33}, {0, 130}, {61, 5}, {64, 64}, {100, 37}})
    check_attention({type, head_dim, 6, 2, position, M, 0}, pool());
}

TEST_P(Attention, Window) {
  const auto [type, head_dim] = GetParam();
  for (const int64_t window : {1, 5, 64, 70, 1000})
    for (const auto& [position, M] : {std::pair{0, 1}, {150, 1}, {0, 140}, {130, 9}})
      check_attention({type, head_dim, 2, 1, position, M, window}, pool());
}

TEST_P(Attention, AllPositions) {
  const auto [type, head_dim] = GetParam();
  for (const auto& [position, M] : {std::pair{0, 1}, {0, 2}, {0, 33}, {0, 130}, {61, 5}, {64, 64}, {100, 37}, {200, 1}})
    check_attention({type, head_dim, 6, 2, position, M, 0, false}, pool());
}

TEST(AttentionShapes, AllPositionsOverThreads) {
  ThreadPool one(1), three(3);
  for (ThreadPool* threads : {&one, &pool(), &three})
    for (const int64_t M : {7, 97, 600}) check_attention({KvType::f32, 16, 2, 2, 0, M, 0, false}, *threads);
}

TEST(AttentionShapes, AnyGroup) {
  for (const auto& [heads, kv] : {std::pair{1, 1}, {4, 4}, {5, 1}, {7, 1}, {14, 2}, {12, 2}, {32, 8}, {13, 13}})
    for (const auto& [position, M] : {std::pair{90, 1}, {0, 50}, {70, 3}})
      check_attention({KvType::f16, 64, heads, kv, position, M, 0}, pool());
}

TEST(AttentionShapes, LongContextsAreSplitOverThreads) {
  ThreadPool one(1), three(3);
  for (ThreadPool* threads : {&one, &pool(), &three}) {
    for (const KvType type : {KvType::f16, KvType::q8_0}) {
      for (const int64_t M : {1, 2, 7}) {
        check_attention({type, 64, 4, 2, 2500, M, 0}, *threads);
        check_attention({type, 64, 4, 1, 2500, M, 1100}, *threads);
      }
    }
  }
}

TEST(AttentionShapes, EverySplitOfThePromptGivesTheSame) {
  for (const int64_t M : {1, 2, 3, 5, 16, 31, 32, 33, 64, 100})
    check_attention({KvType::f32, 12, 3, 1, 100 - M, M, 0}, pool());
}

TEST(AttentionValues, LargeScoresDoNotOverflow) {
  Cache cache(KvType::f32, 8, 1, 64);
  std::vector<float> k(64 * 3, 100.0f), v(64 * 3, 1.0f), q(64, 100.0f), out(64);
  for (int i = 0; i < 64; ++i) v[size_t(128 + i)] = 3, k[size_t(128 + i)] = 101;
  kv_store(pool(), cache.layer, 0, 3, k.data(), 64, v.data(), 64);
  AttentionArgs args{q.data(), 64, 1, 1, cache.layer, 2, 0, 1.0f, out.data(), 64};
  attention(pool(), args);
  for (const float x : out) EXPECT_EQ(x, 3);  // the third key wins by exp(6400)
}

TEST(AttentionValues, NanInQueryKeyOrValueShows) {
  for (const KvType type : {KvType::f16, KvType::q8_0, KvType::f32}) {
    for (const int64_t M : {1, 4}) {
      for (const int where : {0, 1, 2}) {
        Cache cache(type, 16, 1, 64);
        auto k = random(64 * 10, 30), v = random(64 * 10, 31), q = random(size_t(64 * M), 32);
        (where == 0 ? q[5] : where == 1 ? k[64 * 2 + 7] : v[64 * 2 + 7]) = kNan;
        kv_store(pool(), cache.layer, 0, 10, k.data(), 64, v.data(), 64);
        std::vector<float> out(size_t(64 * M), 0.0f);
        AttentionArgs args{q.data(), 64, M, 1, cache.layer, 10 - M, 0, 0.125f, out.data(), 64};
        attention(pool(), args);
        EXPECT_TRUE(std::isnan(out[7])) << "type " << int(type) << " M " << M << " where " << where;
      }
    }
  }
}

TEST(KvCache, ValuesPastF16BecomeInfiniteAndShow) {
  Cache cache(KvType::f16, 2, 1, 16);
  const std::vector<float> big(16, 1e5f);
  kv_store(pool(), cache.layer, 0, 1, big.data(), 16, big.data(), 16);
  EXPECT_EQ(to_float(reinterpret_cast<const f16*>(cache.keys.data())[3]), kInf);
}

TEST(KvCache, HeadBytes) {
  EXPECT_EQ(kv_head_bytes(KvType::f16, 10), 20);
  EXPECT_EQ(kv_head_bytes(KvType::f32, 10), 40);
  EXPECT_EQ(kv_head_bytes(KvType::q8_0, 64), 68);
  EXPECT_EQ(kv_head_bytes(KvType::q8_0, 80), 86);
}

TEST(KvCache, ZerosAndTinyValuesStayFinite) {
  Cache cache(KvType::q8_0, 2, 1, 40);
  std::vector<float> x(40, 0.0f);
  x[35] = 1e-40f;
  kv_store(pool(), cache.layer, 0, 1, x.data(), 40, x.data(), 40);
  std::vector<float> q(40, 1.0f), out(40, kNan);
  AttentionArgs args{q.data(), 40, 1, 1, cache.layer, 0, 0, 1.0f, out.data(), 40};
  attention(pool(), args);
  for (const float y : out) EXPECT_EQ(y, 0);
}

TEST(Isa, HasAName) { EXPECT_FALSE(isa_name().empty()); }

}  // namespace
}  // namespace lacuna::kernels
