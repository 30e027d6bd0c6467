// tests/kernels/heads.h - queries, keys and values of tests of attention, on the CPU and on a device.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <vector>

#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda_memory.h"
#include "kernels/ops.h"
#include "kernels/support.h"

namespace lacuna::test {

inline constexpr double kEps = 0x1p-24;

inline std::vector<float> random(int64_t count, uint64_t seed, double scale = 1) {
  Rng rng(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& v : out) v = float(rng.normal() * scale);
  return out;
}

struct HeadCase {
  int64_t n_heads, n_kv_heads, head_dim, n_rot;
  bool adjacent, norm;
};
inline void PrintTo(const HeadCase& c, std::ostream* out) {
  *out << c.n_heads << '/' << c.n_kv_heads << " x " << c.head_dim << " rot " << c.n_rot
       << (c.adjacent ? " adjacent" : "") << (c.norm ? " norm" : "");
}

/// Queries, keys and values of M tokens at `position`, on the CPU and on the device.
struct HeadData {
  HeadCase c;
  int64_t M, position, capacity;
  std::vector<float> q, k, v, q_norm, k_norm, cos, sin;
  std::vector<f16> keys, values;  // before
  OnDevice<float> q_there, k_there, v_there, q_norm_there, k_norm_there, cos_there, sin_there;
  OnDevice<f16> keys_there, values_there;
  OnDevice<int32_t> position_there;

  static std::vector<f16> halves(int64_t count, uint64_t seed) {
    std::vector<f16> out;
    for (const float v : random(count, seed)) out.push_back(to_f16(v));
    return out;
  }
  static std::vector<float> table(int64_t rows, int64_t half, bool sine) {
    std::vector<float> out(size_t(rows * half));
    for (int64_t p = 0; p < rows; ++p)
      for (int64_t i = 0; i < half; ++i) {
        const double angle = double(p) * std::pow(1e4, -double(i) / double(half));
        out[size_t(p * half + i)] = float(sine ? std::sin(angle) : std::cos(angle));
      }
    return out;
  }
  HeadData(const HeadCase& head_case, int64_t tokens, int64_t at, int64_t room)
      : c(head_case),
        M(tokens),
        position(at),
        capacity(room),
        q(random(M * c.n_heads * c.head_dim, 1)),
        k(random(M * c.n_kv_heads * c.head_dim, 2)),
        v(random(M * c.n_kv_heads * c.head_dim, 3)),
        q_norm(random(c.head_dim, 4)),
        k_norm(random(c.head_dim, 5)),
        cos(table(room, c.n_rot / 2, false)),
        sin(table(room, c.n_rot / 2, true)),
        keys(halves(c.n_kv_heads * room * c.head_dim, 6)),
        values(halves(c.n_kv_heads * room * c.head_dim, 7)),
        q_there(q),
        k_there(k),
        v_there(v),
        q_norm_there(q_norm),
        k_norm_there(k_norm),
        cos_there(cos),
        sin_there(sin),
        keys_there(keys),
        values_there(values),
        position_there(std::vector<int32_t>{int32_t(at)}) {}

  cuda::Heads heads() const {
    cuda::Heads h;
    h.q = q_there.data(), h.k = k_there.data(), h.v = v_there.data();
    h.q_stride = c.n_heads * c.head_dim, h.kv_stride = c.n_kv_heads * c.head_dim;
    h.M = M, h.n_heads = c.n_heads, h.n_kv_heads = c.n_kv_heads, h.head_dim = c.head_dim;
    if (c.norm) h.q_norm = q_norm_there.data(), h.k_norm = k_norm_there.data(), h.norm_eps = 1e-6f;
    if (c.n_rot > 0) h.cos = cos_there.data(), h.sin = sin_there.data();
    h.n_rot = c.n_rot, h.adjacent = c.adjacent;
    h.cache = {keys_there.data(), values_there.data(), capacity};
    h.position = position_there.data();
    return h;
  }
  /// The same with the CPU's ops; keys and values go to the CPU's copies of the cache.
  void run_on_cpu() {
    if (c.norm) {
      kernels::rms_norm(pool(), q.data(), q_norm.data(), 1e-6f, M * c.n_heads, c.head_dim, q.data());
      kernels::rms_norm(pool(), k.data(), k_norm.data(), 1e-6f, M * c.n_kv_heads, c.head_dim, k.data());
    }
    const float *cos_row = cos.data() + position * c.n_rot / 2, *sin_row = sin.data() + position * c.n_rot / 2;
    if (c.n_rot > 0) {
      kernels::rope(pool(), q.data(), M, c.n_heads, c.head_dim, c.n_heads * c.head_dim, cos_row, sin_row, c.n_rot,
                    c.adjacent);
      kernels::rope(pool(), k.data(), M, c.n_kv_heads, c.head_dim, c.n_kv_heads * c.head_dim, cos_row, sin_row, c.n_rot,
                    c.adjacent);
    }
    const kernels::KvLayer layer{kernels::KvType::f16, keys.data(), values.data(), capacity, c.n_kv_heads, c.head_dim};
    kernels::kv_store(pool(), layer, position, M, k.data(), c.n_kv_heads * c.head_dim, v.data(),
                      c.n_kv_heads * c.head_dim);
  }
  /// The device's cache is the CPU's but for the last bit of what was computed.
  void expect_same_cache() const {
    EXPECT_EQ(std::memcmp(values_there.values().data(), values.data(), values.size() * 2), 0);
    const auto got = keys_there.values();
    for (size_t i = 0; i < got.size(); ++i) {
      const int64_t at = int64_t(i) / c.head_dim % capacity;
      const float a = to_float(got[i]), b = to_float(keys[i]);
      if (at < position || at >= position + M) {
        ASSERT_EQ(a, b) << "position " << at;
      } else {  // a rotation's error is relative to both elements, which are below 2^3 with norm weights or without
        ASSERT_NEAR(a, b, std::abs(b) * 0x1p-10 + 0x1p-19) << "position " << at;
      }
    }
  }
};

inline const HeadCase kHeadCases[] = {
    {32, 32, 128, 128, true, false}, {32, 8, 128, 128, false, false}, {9, 3, 64, 64, true, false},
    {14, 2, 64, 64, false, false},   {4, 4, 80, 32, false, false},    {6, 2, 96, 96, false, true},
    {16, 8, 128, 128, false, true},  {3, 1, 8, 8, true, false},       {2, 2, 256, 64, false, false},
    {24, 2, 72, 0, false, false},    {1, 1, 248, 248, true, true},
};
/// Softmax attention in double from halves; q as floats: [n_heads, head_dim].
inline std::vector<double> reference_attention(const HeadData& d, const float* q, const std::vector<f16>& keys,
                                               const std::vector<f16>& values, int64_t at, int64_t window,
                                               float scale) {
  const int64_t D = d.c.head_dim, begin = window > 0 ? std::max<int64_t>(0, at - window + 1) : 0;
  std::vector<double> out(size_t(d.c.n_heads * D));
  for (int64_t h = 0; h < d.c.n_heads; ++h) {
    const int64_t first = h / (d.c.n_heads / d.c.n_kv_heads) * d.capacity;
    std::vector<double> score;
    for (int64_t t = begin; t <= at; ++t) {
      double s = 0;
      for (int64_t e = 0; e < D; ++e) s += double(q[h * D + e]) * to_float(keys[size_t((first + t) * D + e)]);
      score.push_back(s * scale);
    }
    const double top = *std::max_element(score.begin(), score.end());
    double total = 0;
    for (double& s : score) total += s = std::exp(s - top);
    for (int64_t t = begin; t <= at; ++t)
      for (int64_t e = 0; e < D; ++e)
        out[size_t(h * D + e)] += score[size_t(t - begin)] / total * to_float(values[size_t((first + t) * D + e)]);
  }
  return out;
}

}  // namespace lacuna::test
