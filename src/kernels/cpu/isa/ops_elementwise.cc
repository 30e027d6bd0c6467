// src/kernels/cpu/isa/ops_elementwise.cc - norms, activations, rotary embedding and the cache's number formats.
#include "kernels/cpu/isa/ops_simd.h"
#include "kernels/cpu/ops_isa.h"

namespace lacuna::cpu::LACUNA_ISA {
namespace {

/// Calls body(i) for whole vectors and tail(i, n) for the rest.
template <class Body, class Tail>
inline void for_vectors(int64_t count, const Body& body, const Tail& tail) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i);
  if (i < count) tail(i, size_t(count - i));
}

/// out[i] = fn(a[i]), in whole vectors; the rest through a padded copy, so that each value takes the same path.
template <class Fn>
inline void map1(const float* a, int64_t count, float* out, const Fn& fn) {
  const F32 d;
  for_vectors(
      count, [&](int64_t i) { hn::StoreU(fn(hn::LoadU(d, a + i)), d, out + i); },
      [&](int64_t i, size_t n) {
        HWY_ALIGN float buffer[kLanes] = {};
        std::memcpy(buffer, a + i, n * sizeof(float));
        hn::Store(fn(hn::Load(d, buffer)), d, buffer);
        std::memcpy(out + i, buffer, n * sizeof(float));
      });
}

template <class Fn>
inline void map2(const float* a, const float* b, int64_t count, float* out, const Fn& fn) {
  const F32 d;
  for_vectors(
      count, [&](int64_t i) { hn::StoreU(fn(hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, out + i); },
      [&](int64_t i, size_t n) {
        HWY_ALIGN float left[kLanes] = {}, right[kLanes] = {};
        std::memcpy(left, a + i, n * sizeof(float));
        std::memcpy(right, b + i, n * sizeof(float));
        hn::Store(fn(hn::Load(d, left), hn::Load(d, right)), d, left);
        std::memcpy(out + i, left, n * sizeof(float));
      });
}

/// Sum of fn(x[i]), in four chains.
template <class Fn>
inline float reduce(const float* x, int64_t count, const Fn& fn) {
  const F32 d;
  Vf s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    s0 = hn::Add(s0, fn(hn::LoadU(d, x + i)));
    s1 = hn::Add(s1, fn(hn::LoadU(d, x + i + kLanes)));
    s2 = hn::Add(s2, fn(hn::LoadU(d, x + i + 2 * kLanes)));
    s3 = hn::Add(s3, fn(hn::LoadU(d, x + i + 3 * kLanes)));
  }
  for (; i + kLanes <= count; i += kLanes) s0 = hn::Add(s0, fn(hn::LoadU(d, x + i)));
  float rest = 0;
  for (; i < count; ++i) rest += hn::GetLane(fn(hn::Set(d, x[i])));
  return sum(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))) + rest;
}

}  // namespace

void rms_norm_rows(const float* x, const float* weight, float eps, int64_t M, int64_t K, float* y) {
  const F32 d;
  for (int64_t m = 0; m < M; ++m, x += K, y += K) {
    const float squares = reduce(x, K, [](Vf v) { return hn::Mul(v, v); });
    const Vf inverse = hn::Set(d, 1.0f / std::sqrt(squares / float(K) + eps));
    map2(x, weight, K, y, [&](Vf v, Vf w) { return hn::Mul(hn::Mul(v, inverse), w); });
  }
}

void layer_norm_rows(const float* x, const float* weight, const float* bias, float eps, int64_t M, int64_t K,
                     float* y) {
  const F32 d;
  for (int64_t m = 0; m < M; ++m, x += K, y += K) {
    const float mean = reduce(x, K, [](Vf v) { return v; }) / float(K);
    const Vf mean_v = hn::Set(d, mean);
    const float squares = reduce(x, K, [&](Vf v) {
      const Vf centred = hn::Sub(v, mean_v);
      return hn::Mul(centred, centred);
    });
    const Vf inverse = hn::Set(d, 1.0f / std::sqrt(squares / float(K) + eps));
    map2(x, weight, K, y, [&](Vf v, Vf w) { return hn::Mul(hn::Mul(hn::Sub(v, mean_v), inverse), w); });
    map2(y, bias, K, y, [](Vf v, Vf b) { return hn::Add(v, b); });
  }
}

void add_span(const float* y, int64_t count, float* x) {
  map2(x, y, count, x, [](Vf a, Vf b) { return hn::Add(a, b); });
}

void swiglu_span(const float* gate, const float* up, int64_t count, float* out) {
  const Vf one = hn::Set(F32(), 1.0f);
  map2(gate, up, count, out, [&](Vf g, Vf u) { return hn::Mul(hn::Div(g, hn::Add(one, exp(hn::Neg(g)))), u); });
}

void add_gated_rows(const float* y, const float* gate, int64_t M, int64_t K, float* x) {
  const F32 d;
  for (int64_t m = 0; m < M; ++m, x += K, y += K) {
    for_vectors(
        K,
        [&](int64_t i) {
          hn::StoreU(hn::MulAdd(hn::LoadU(d, gate + i), hn::LoadU(d, y + i), hn::LoadU(d, x + i)), d, x + i);
        },
        [&](int64_t i, size_t n) {
          for (size_t k = 0; k < n; ++k)
            x[i + int64_t(k)] = std::fma(gate[i + int64_t(k)], y[i + int64_t(k)], x[i + int64_t(k)]);
        });
  }
}

void gelu_tanh_span(float* x, int64_t count) {
  const F32 d;
  const Vf one = hn::Set(d, 1.0f), cubic = hn::Set(d, 0.044715f);
  const Vf minus_two_root = hn::Set(d, -1.5957691216057308f);  // -2 sqrt(2/pi)
  // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)); no cancellation.
  map1(x, count, x, [&](Vf v) {
    const Vf inner = hn::MulAdd(hn::Mul(cubic, v), hn::Mul(v, v), v);
    return hn::Div(v, hn::Add(one, exp(hn::Mul(minus_two_root, inner))));
  });
}

void relu_span(float* x, int64_t count) {
  const Vf zero = hn::Zero(F32());
  map1(x, count, x, [&](Vf v) { return hn::IfThenElse(hn::Lt(v, zero), zero, v); });  // NaN stays
}

void exp_span(const float* x, int64_t count, float* y) {
  map1(x, count, y, [](Vf v) { return exp(v); });
}

double log_sum_exp_span(const float* x, int64_t count) {
  const F32 d;
  float top = x[0];
  Vf tops = hn::Set(d, top), nan = hn::Zero(d);
  for_vectors(
      count,
      [&](int64_t i) {
        const Vf v = hn::LoadU(d, x + i);
        tops = hn::Max(tops, v);
        nan = hn::Add(nan, hn::Sub(v, v));  // NaN for NaN and infinities
      },
      [&](int64_t i, size_t n) {
        for (size_t k = 0; k < n; ++k) {
          top = x[i + int64_t(k)] > top ? x[i + int64_t(k)] : top;
          if (x[i + int64_t(k)] != x[i + int64_t(k)]) nan = hn::Set(d, x[i + int64_t(k)]);
        }
      });
  const float vector_top = max(tops);
  top = vector_top > top ? vector_top : top;
  if (sum(nan) != 0) {  // NaN here: look closer, since infinities are legal
    for (int64_t i = 0; i < count; ++i)
      if (x[i] != x[i]) return double(x[i]);
    top = x[0];
    for (int64_t i = 1; i < count; ++i) top = x[i] > top ? x[i] : top;
    if (top - top != 0) return double(top);
  }
  // Blocks of floats, added up in double.
  double total = 0;
  const Vf shift = hn::Set(d, top);
  for (int64_t begin = 0; begin < count; begin += 1024) {
    const int64_t n = count - begin < 1024 ? count - begin : 1024;
    total += double(reduce(x + begin, n, [&](Vf v) { return exp(hn::Sub(v, shift)); }));
  }
  return double(top) + std::log(total);
}

void rope_rows(float* x, int64_t M, int64_t n_heads, int64_t head_dim, int64_t stride, const float* cos,
               const float* sin, int64_t n_rot, bool adjacent) {
  const int64_t half = n_rot / 2;
  for (int64_t m = 0; m < M; ++m, x += stride, cos += half, sin += half) {
    for (int64_t h = 0; h < n_heads; ++h) {
      float* head = x + h * head_dim;
      if (adjacent) {
        for (int64_t i = 0; i < half; ++i) {
          const float a = head[2 * i], b = head[2 * i + 1];
          head[2 * i] = a * cos[i] - b * sin[i];
          head[2 * i + 1] = a * sin[i] + b * cos[i];
        }
      } else {
        float* upper = head + half;
        for (int64_t i = 0; i < half; ++i) {
          const float a = head[i], b = upper[i];
          head[i] = a * cos[i] - b * sin[i];
          upper[i] = a * sin[i] + b * cos[i];
        }
      }
    }
  }
}

void kv_encode(kernels::KvType type, const float* x, int64_t head_dim, void* out) {
  const F32 d;
  switch (type) {
    case kernels::KvType::f32:
      std::memcpy(out, x, size_t(head_dim) * sizeof(float));
      return;
    case kernels::KvType::f16: {
      f16* to = static_cast<f16*>(out);
      for_vectors(
          head_dim, [&](int64_t i) { store_f16(hn::LoadU(d, x + i), to + i); },
          [&](int64_t i, size_t n) {
            for (size_t k = 0; k < n; ++k) to[i + int64_t(k)] = to_f16(x[i + int64_t(k)]);
          });
      return;
    }
    case kernels::KvType::q8_0: {
      // Blocks of 32: f16 scale, then one signed byte a value. A NaN or infinity makes the scale NaN, so that it shows.
      auto* to = static_cast<unsigned char*>(out);
      for (int64_t begin = 0; begin < head_dim; begin += 32) {
        const int64_t n = head_dim - begin < 32 ? head_dim - begin : 32;
        float largest = 0, check = 0;
        for (int64_t i = 0; i < n; ++i) {
          const float magnitude = std::fabs(x[begin + i]);
          largest = magnitude > largest ? magnitude : largest;
          check += x[begin + i] * 0.0f;
        }
        const f16 stored = check == 0 ? to_f16(largest / 127) : f16{0x7e00};
        const float scale = to_float(stored);
        const float inverse = scale > 0 ? 1 / scale : 0.0f;
        std::memcpy(to, &stored, 2);
        for (int64_t i = 0; i < n; ++i) {
          float code = x[begin + i] * inverse;
          code = code > -127 ? code : -127.0f;
          code = code < 127 ? code : 127.0f;
          to[2 + i] = static_cast<unsigned char>(static_cast<signed char>(std::lrint(code)));
        }
        to += 2 + n;
      }
      return;
    }
  }
}

void kv_decode(kernels::KvType type, const void* in, int64_t head_dim, float* out) {
  const F32 d;
  switch (type) {
    case kernels::KvType::f32:
      std::memcpy(out, in, size_t(head_dim) * sizeof(float));
      return;
    case kernels::KvType::f16: {
      const f16* from = static_cast<const f16*>(in);
      for_vectors(
          head_dim, [&](int64_t i) { hn::StoreU(load_f16(from + i), d, out + i); },
          [&](int64_t i, size_t n) {
            for (size_t k = 0; k < n; ++k) out[i + int64_t(k)] = to_float(from[i + int64_t(k)]);
          });
      return;
    }
    case kernels::KvType::q8_0: {
      auto* from = static_cast<const signed char*>(in);
      for (int64_t begin = 0; begin < head_dim; begin += 32) {
        const int64_t n = head_dim - begin < 32 ? head_dim - begin : 32;
        f16 stored;
        std::memcpy(&stored, from, 2);
        const float scale = to_float(stored);
        if (n == 32) {
          const hn::Rebind<int8_t, F32> d8;
          const hn::Rebind<int32_t, F32> d32;
          const Vf scale_v = hn::Set(d, scale);
          for (int64_t i = 0; i < 32; i += kLanes) {
            const auto codes = hn::PromoteTo(d32, hn::LoadU(d8, reinterpret_cast<const int8_t*>(from) + 2 + i));
            hn::StoreU(hn::Mul(hn::ConvertTo(d, codes), scale_v), d, out + begin + i);
          }
        } else {
          for (int64_t i = 0; i < n; ++i) out[begin + i] = float(from[2 + i]) * scale;
        }
        from += 2 + n;
      }
      return;
    }
  }
}

}  // namespace lacuna::cpu::LACUNA_ISA
