// src/kernels/cpu/isa/ops_attention.cc - softmax attention with a running maximum over blocks of kBlock positions.
//
// One token: each cached key and value is read once, straight from the cache's number format, for all heads of its
// group. Many tokens: a block of keys (transposed) and values becomes float once and is used by every row of the
// block, a row being one head of one token; both products then are small matrix products.
#include <type_traits>

#include "kernels/cpu/isa/ops_simd.h"
#include "kernels/cpu/ops_isa.h"

namespace lacuna::cpu::LACUNA_ISA {
namespace {

using kernels::AttentionArgs;
using kernels::KvType;

constexpr int64_t kBlock = 64;  // positions
static_assert(kLanes == 1 || kLanes == 4 || kLanes == 8 || kLanes == 16, "reductions are written for these");
// AVX-512 and NEON have 32 vector registers, the others 16.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_NEON
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
constexpr int kGroupRows = kRegisters == 32 ? 4 : 2;    // most heads at a time in one-token attention
constexpr int kTileRows = 6;                            // rows of a matrix product's register tile
constexpr int kTileVectors = kRegisters == 32 ? 4 : 2;  // vectors of a row of it

inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

inline Vf load(const float* p) { return hn::LoadU(F32(), p); }
inline Vf load(const f16* p) { return load_f16(p); }

#if HWY_TARGET == HWY_SCALAR
inline void store_sums4(const Vf* v, float* out) {
  for (int j = 0; j < 4; ++j) out[j] = hn::GetLane(v[j]);
}
#else
/// Adds the 128-bit blocks of v.
template <class D>
inline hn::Vec<hn::FixedTag<float, 4> > sum_blocks(D, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> half;
    return sum_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else {
    return v;
  }
}

/// The larger of each lane of the 128-bit blocks of v.
template <class D>
inline hn::Vec<hn::FixedTag<float, 4> > max_blocks(D, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> half;
    return max_blocks(half, hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else {
    return v;
  }
}

/// out[j] = sum of the lanes of v[j], j in [0, 4).
inline void store_sums4(const Vf* v, float* out) {
  const F32 d;
  const hn::RepartitionToWide<F32> d64;
  const Vf ab = hn::Add(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1]));
  const Vf cd = hn::Add(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3]));
  const auto ab64 = hn::BitCast(d64, ab), cd64 = hn::BitCast(d64, cd);
  const Vf abcd = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, ab64, cd64)),
                          hn::BitCast(d, hn::InterleaveUpper(d64, ab64, cd64)));
  hn::StoreU(sum_blocks(d, abcd), hn::FixedTag<float, 4>(), out);
}

/// Stores the 128-bit blocks of v `stride` floats apart.
template <class D>
inline void store_blocks(D d, hn::Vec<D> v, float* out, int64_t stride) {
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> half;
    store_blocks(half, hn::LowerHalf(half, v), out, stride);
    store_blocks(half, hn::UpperHalf(half, v), out + int64_t(hn::MaxLanes(D())) / 8 * stride, stride);
  } else {
    hn::StoreU(v, d, out);
  }
}
#endif

/// Largest of row[0, kBlock).
inline float block_max(const float* row) {
  const F32 d;
  Vf top = hn::LoadU(d, row);
  for (int64_t i = kLanes; i < kBlock; i += kLanes) top = hn::Max(top, hn::LoadU(d, row + i));
  return max(top);
}

/// row = exp(row - top), returns the sum. A top of -inf (nothing visible, or all scores -inf) gives zeros.
inline float block_exp(float* row, float top) {
  const F32 d;
  const Vf shift = hn::Set(d, top > -HUGE_VALF ? top : 0.0f);
  Vf total = hn::Zero(d);
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const Vf w = exp(hn::Sub(hn::LoadU(d, row + i), shift));
    hn::StoreU(w, d, row + i);
    total = hn::Add(total, w);
  }
  return sum(total);
}

/// exp(before - after) for a maximum that rose from `before` to `after`.
inline float rescale(float before, float after) {
  if (before == after) return 1;
  return hn::GetLane(exp(hn::Set(F32(), before - after)));
}

inline void scale_row(float* row, int64_t count, float factor) {
  const F32 d;
  const Vf f = hn::Set(d, factor);
  for (int64_t i = 0; i < count; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, row + i), f), d, row + i);
}

/// Result of one row: normalised to `out`, or as it is to `partial`.
inline void finish_row(const float* sums, float top, float total, int64_t head_dim, float* out, float* partial) {
  if (partial != nullptr) {
    std::memcpy(partial, sums, size_t(head_dim) * sizeof(float));
    partial[head_dim] = top;
    partial[head_dim + 1] = total;
    return;
  }
  const float inverse = 1 / total;
  for (int64_t i = 0; i < head_dim; ++i) out[i] = sums[i] * inverse;
}

// ---- one token ----

/// scores[g * kBlock + p] = q[g] . k[p] for `heads` heads and n positions; k: rows `stride` elements apart.
template <int kHeads, class T>
inline void score_heads(const float* q, int64_t dp, const T* k, int64_t stride, int64_t n, float* scores) {
  for (int64_t p = 0; p < n; p += 4) {
    const T* rows[4];
    for (int64_t j = 0; j < 4; ++j) rows[j] = k + (p + j < n ? p + j : n - 1) * stride;
    Vf acc[kHeads][4];
    for (auto& head : acc)
      for (Vf& a : head) a = hn::Zero(F32());
    for (int64_t i = 0; i < dp; i += kLanes) {
      const Vf key[4] = {load(rows[0] + i), load(rows[1] + i), load(rows[2] + i), load(rows[3] + i)};
      for (int g = 0; g < kHeads; ++g) {
        const Vf query = load(q + g * dp + i);
        for (int j = 0; j < 4; ++j) acc[g][j] = hn::MulAdd(query, key[j], acc[g][j]);
      }
    }
    for (int g = 0; g < kHeads; ++g) store_sums4(acc[g], scores + g * kBlock + p);
  }
}

/// sums[g] += sum over p of weights[g * kBlock + p] v[p], kVectors vectors from element `begin`.
template <int kHeads, int kVectors, class T>
inline void weigh_part(const float* weights, const T* v, int64_t stride, int64_t n, int64_t dp, int64_t begin,
                       float* sums) {
  const F32 d;
  Vf acc[kHeads][kVectors];
  for (int g = 0; g < kHeads; ++g)
    for (int j = 0; j < kVectors; ++j) acc[g][j] = hn::LoadU(d, sums + g * dp + begin + j * kLanes);
  for (int64_t p = 0; p < n; ++p) {
    const T* row = v + p * stride + begin;
    Vf value[kVectors];
    for (int j = 0; j < kVectors; ++j) value[j] = load(row + j * kLanes);
    for (int g = 0; g < kHeads; ++g) {
      const Vf w = hn::Set(d, weights[g * kBlock + p]);
      for (int j = 0; j < kVectors; ++j) acc[g][j] = hn::MulAdd(w, value[j], acc[g][j]);
    }
  }
  for (int g = 0; g < kHeads; ++g)
    for (int j = 0; j < kVectors; ++j) hn::StoreU(acc[g][j], d, sums + g * dp + begin + j * kLanes);
}

template <int kHeads, class T>
inline void weigh_heads(const float* weights, const T* v, int64_t stride, int64_t n, int64_t dp, float* sums) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= dp; i += 4 * kLanes) weigh_part<kHeads, 4>(weights, v, stride, n, dp, i, sums);
  for (; i < dp; i += kLanes) weigh_part<kHeads, 1>(weights, v, stride, n, dp, i, sums);
}

/// Calls body(std::integral_constant<int, heads>, first head) on runs of at most kGroupRows heads.
template <class Body>
inline void for_heads(int64_t group, const Body& body) {
  int64_t g = 0;
  for (; g + kGroupRows <= group; g += kGroupRows) body(std::integral_constant<int, kGroupRows>(), g);
  if constexpr (kGroupRows == 4) {
    if (g + 3 == group) return body(std::integral_constant<int, 3>(), g);
  }
  if (g + 2 <= group) body(std::integral_constant<int, 2>(), g), g += 2;
  if (g < group) body(std::integral_constant<int, 1>(), g);
}

/// One block of n positions for all heads of the group.
template <class T>
inline void token_block(int64_t group, const float* q, int64_t dp, const T* k, const T* v, int64_t stride, int64_t n,
                        float* scores, float* sums, float* tops, float* totals) {
  for_heads(group, [&](auto heads, int64_t g) {
    score_heads<decltype(heads)::value>(q + g * dp, dp, k, stride, n, scores + g * kBlock);
  });
  for (int64_t g = 0; g < group; ++g) {
    float* row = scores + g * kBlock;
    for (int64_t p = n; p < kBlock; ++p) row[p] = -HUGE_VALF;
    const float block_top = block_max(row);
    const float top = block_top > tops[g] ? block_top : tops[g];
    const float factor = rescale(tops[g], top);
    if (factor != 1) scale_row(sums + g * dp, dp, factor);
    totals[g * kLanes] = totals[g * kLanes] * factor + block_exp(row, top);
    tops[g] = top;
  }
  for_heads(group, [&](auto heads, int64_t g) {
    weigh_heads<decltype(heads)::value>(scores + g * kBlock, v, stride, n, dp, sums + g * dp);
  });
}

struct Scratch {
  float *q, *sums, *scores, *keys, *values, *tops, *factors, *totals;
};

inline Scratch carve(float* base, int64_t rows, int64_t dp) {
  Scratch s;
  s.q = base;
  s.sums = s.q + rows * dp;
  s.scores = s.sums + rows * dp;
  s.keys = s.scores + rows * kBlock;
  s.values = s.keys + kBlock * dp;
  s.tops = s.values + kBlock * dp;
  // Rows begin anywhere in tops, and whole vectors are read and written from there.
  s.factors = s.tops + padded(rows) + kLanes;
  s.totals = s.factors + padded(rows) + kLanes;  // kLanes partial sums a row
  return s;
}

inline const char* cache_row(const AttentionArgs& args, const void* base, int64_t kv_head, int64_t position) {
  return static_cast<const char*>(base) +
         (kv_head * args.cache.capacity + position) * kernels::kv_head_bytes(args.cache.type, args.cache.head_dim);
}

/// Rows of queries, scaled, padded with zeros; sums, maxima and totals at their start.
inline void load_queries(const AttentionTask& task, int64_t group, int64_t dp, const Scratch& s) {
  const AttentionArgs& args = *task.args;
  const int64_t head_dim = args.cache.head_dim;
  int64_t row = 0;
  for (int64_t m = task.token_begin; m < task.token_end; ++m) {
    for (int64_t g = 0; g < group; ++g, ++row) {
      const float* q = args.q + m * args.q_stride + (task.kv_head * group + g) * head_dim;
      float* to = s.q + row * dp;
      for (int64_t i = 0; i < head_dim; ++i) to[i] = q[i] * args.scale;
      for (int64_t i = head_dim; i < dp; ++i) to[i] = 0;
      std::memset(s.sums + row * dp, 0, size_t(dp) * sizeof(float));
      s.tops[row] = -HUGE_VALF;
      for (int64_t i = 0; i < kLanes; ++i) s.totals[row * kLanes + i] = 0;
    }
  }
}

inline void finish(const AttentionTask& task, int64_t group, int64_t dp, const Scratch& s) {
  const AttentionArgs& args = *task.args;
  const int64_t head_dim = args.cache.head_dim;
  int64_t row = 0;
  for (int64_t m = task.token_begin; m < task.token_end; ++m) {
    for (int64_t g = 0; g < group; ++g, ++row) {
      float* out = args.out + m * args.out_stride + (task.kv_head * group + g) * head_dim;
      finish_row(s.sums + row * dp, s.tops[row], sum(hn::LoadU(F32(), s.totals + row * kLanes)), head_dim, out,
                 task.partial == nullptr ? nullptr : task.partial + row * (head_dim + 2));
    }
  }
}

/// Values of positions [begin, begin + n) as float rows of dp, padded with zeros.
inline void decode_rows(const AttentionArgs& args, const void* base, int64_t kv_head, int64_t begin, int64_t n,
                        int64_t dp, float* out) {
  const int64_t head_dim = args.cache.head_dim;
  for (int64_t p = 0; p < n; ++p, out += dp) {
    kv_decode(args.cache.type, cache_row(args, base, kv_head, begin + p), head_dim, out);
    for (int64_t i = head_dim; i < dp; ++i) out[i] = 0;
  }
}

inline void attend_token(const AttentionTask& task, int64_t group, int64_t dp, const Scratch& s) {
  const AttentionArgs& args = *task.args;
  const int64_t head_dim = args.cache.head_dim;
  const int64_t now = args.causal ? args.position + task.token_begin : args.position + args.M - 1;
  const int64_t first = args.window > 0 && now - args.window + 1 > 0 ? now - args.window + 1 : 0;
  const int64_t begin = task.position_begin > first ? task.position_begin : first;
  const int64_t end = task.position_end < now + 1 ? task.position_end : now + 1;
  for (int64_t p = begin; p < end; p += kBlock) {
    const int64_t n = end - p < kBlock ? end - p : kBlock;
    const char* keys = cache_row(args, args.cache.keys, task.kv_head, p);
    const char* values = cache_row(args, args.cache.values, task.kv_head, p);
    if (dp == head_dim && args.cache.type == KvType::f16) {
      token_block(group, s.q, dp, reinterpret_cast<const f16*>(keys), reinterpret_cast<const f16*>(values), head_dim, n,
                  s.scores, s.sums, s.tops, s.totals);
    } else if (dp == head_dim && args.cache.type == KvType::f32) {
      token_block(group, s.q, dp, reinterpret_cast<const float*>(keys), reinterpret_cast<const float*>(values),
                  head_dim, n, s.scores, s.sums, s.tops, s.totals);
    } else {
      decode_rows(args, args.cache.keys, task.kv_head, p, n, dp, s.keys);
      decode_rows(args, args.cache.values, task.kv_head, p, n, dp, s.values);
      token_block<float>(group, s.q, dp, s.keys, s.values, dp, n, s.scores, s.sums, s.tops, s.totals);
    }
  }
}

// ---- many tokens ----

/// c[r][j] (+)= sum over k of a[r][k] b[k][j]: kRows rows, kVectors vectors of columns.
template <int kRows, int kVectors, bool kAdd>
inline void product_tile(const float* a, int64_t lda, int64_t K, const float* b, int64_t ldb, float* c, int64_t ldc) {
  const F32 d;
  Vf acc[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVectors; ++j) acc[r][j] = kAdd ? hn::LoadU(d, c + r * ldc + j * kLanes) : hn::Zero(d);
  for (int64_t k = 0; k < K; ++k) {
    Vf right[kVectors];
    for (int j = 0; j < kVectors; ++j) right[j] = hn::LoadU(d, b + k * ldb + j * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vf left = hn::Set(d, a[r * lda + k]);
      for (int j = 0; j < kVectors; ++j) acc[r][j] = hn::MulAdd(left, right[j], acc[r][j]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVectors; ++j) hn::StoreU(acc[r][j], d, c + r * ldc + j * kLanes);
}

template <int kRows, bool kAdd>
inline void product_rows(const float* a, int64_t lda, int64_t K, const float* b, int64_t ldb, float* c, int64_t ldc,
                         int64_t columns) {
  int64_t j = 0;
  for (; j + kTileVectors * kLanes <= columns; j += kTileVectors * kLanes)
    product_tile<kRows, kTileVectors, kAdd>(a, lda, K, b + j, ldb, c + j, ldc);
  for (; j < columns; j += kLanes) product_tile<kRows, 1, kAdd>(a, lda, K, b + j, ldb, c + j, ldc);
}

/// columns is a multiple of kLanes.
template <bool kAdd>
inline void product(int64_t rows, const float* a, int64_t lda, int64_t K, const float* b, int64_t ldb, float* c,
                    int64_t ldc, int64_t columns) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows)
    product_rows<kTileRows, kAdd>(a + r * lda, lda, K, b, ldb, c + r * ldc, ldc, columns);
  for (; r + 2 <= rows; r += 2) product_rows<2, kAdd>(a + r * lda, lda, K, b, ldb, c + r * ldc, ldc, columns);
  for (; r < rows; ++r) product_rows<1, kAdd>(a + r * lda, lda, K, b, ldb, c + r * ldc, ldc, columns);
}

/// out[i * kBlock + p] = in[p * dp + i]; n positions, the columns up to kBlock become zero.
#if HWY_TARGET == HWY_SCALAR
inline void transpose(const float* in, int64_t n, int64_t dp, float* out) {
  for (int64_t i = 0; i < dp; ++i)
    for (int64_t p = 0; p < kBlock; ++p) out[i * kBlock + p] = p < n ? in[p * dp + i] : 0.0f;
}
#else
inline void transpose(const float* in, int64_t n, int64_t dp, float* out) {
  const F32 d;
  const hn::RepartitionToWide<F32> d64;
  const Vf zero = hn::Zero(d);
  for (int64_t p = 0; p < kBlock; p += 4) {
    for (int64_t i = 0; i < dp; i += kLanes) {
      const Vf r0 = p < n ? hn::LoadU(d, in + p * dp + i) : zero;
      const Vf r1 = p + 1 < n ? hn::LoadU(d, in + (p + 1) * dp + i) : zero;
      const Vf r2 = p + 2 < n ? hn::LoadU(d, in + (p + 2) * dp + i) : zero;
      const Vf r3 = p + 3 < n ? hn::LoadU(d, in + (p + 3) * dp + i) : zero;
      // 4 x 4 transposes inside each 128-bit block.
      const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
      const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
      const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
      const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
      float* to = out + i * kBlock + p;
      store_blocks(d, hn::BitCast(d, hn::InterleaveLower(d64, low01, low23)), to, 4 * kBlock);
      store_blocks(d, hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23)), to + kBlock, 4 * kBlock);
      store_blocks(d, hn::BitCast(d, hn::InterleaveLower(d64, high01, high23)), to + 2 * kBlock, 4 * kBlock);
      store_blocks(d, hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23)), to + 3 * kBlock, 4 * kBlock);
    }
  }
}
#endif

/// out[j] = largest of the kBlock scores of row j, j in [0, 4).
inline void block_max4(const float* rows, float* out) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t j = 0; j < 4; ++j) out[j] = block_max(rows + j * kBlock);
#else
  const F32 d;
  const hn::RepartitionToWide<F32> d64;
  Vf top[4];
  for (int64_t j = 0; j < 4; ++j) {
    top[j] = hn::LoadU(d, rows + j * kBlock);
    for (int64_t i = kLanes; i < kBlock; i += kLanes) top[j] = hn::Max(top[j], hn::LoadU(d, rows + j * kBlock + i));
  }
  const Vf ab = hn::Max(hn::InterleaveLower(d, top[0], top[1]), hn::InterleaveUpper(d, top[0], top[1]));
  const Vf cd = hn::Max(hn::InterleaveLower(d, top[2], top[3]), hn::InterleaveUpper(d, top[2], top[3]));
  const auto ab64 = hn::BitCast(d64, ab), cd64 = hn::BitCast(d64, cd);
  const Vf abcd = hn::Max(hn::BitCast(d, hn::InterleaveLower(d64, ab64, cd64)),
                          hn::BitCast(d, hn::InterleaveUpper(d64, ab64, cd64)));
  hn::StoreU(max_blocks(d, abcd), hn::FixedTag<float, 4>(), out);
#endif
}

/// Turns the scores of `rows` rows into weights against each row's new maximum; brings sums and totals to it. tops:
/// padded to whole vectors; totals: kLanes partial sums a row; factors: scratch as large as tops.
inline void softmax_rows(float* scores, int64_t rows, int64_t dp, float* sums, float* tops, float* totals,
                         float* factors) {
  const F32 d;
  // Maxima of this block into `factors`, then the new maximum and exp(old - new).
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) block_max4(scores + r * kBlock, factors + r);
  for (; r < rows; ++r) factors[r] = block_max(scores + r * kBlock);
  for (; r < padded(rows); ++r) factors[r] = -HUGE_VALF;  // leaves the maxima of the rows after these as they are
  for (r = 0; r < rows; r += kLanes) {
    const Vf before = hn::LoadU(d, tops + r);
    const Vf after = hn::Max(before, hn::LoadU(d, factors + r));
    const Vf factor = hn::IfThenElse(hn::Eq(before, after), hn::Set(d, 1.0f), exp(hn::Sub(before, after)));
    hn::StoreU(after, d, tops + r);
    hn::StoreU(factor, d, factors + r);
  }
  for (r = 0; r < rows; ++r) {
    float* row = scores + r * kBlock;
    if (factors[r] != 1) scale_row(sums + r * dp, dp, factors[r]);
    const Vf shift = hn::Set(d, tops[r] > -HUGE_VALF ? tops[r] : 0.0f);  // nothing visible yet: zeros
    Vf total = hn::Mul(hn::LoadU(d, totals + r * kLanes), hn::Set(d, factors[r]));
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Vf w = exp(hn::Sub(hn::LoadU(d, row + i), shift));
      hn::StoreU(w, d, row + i);
      total = hn::Add(total, w);
    }
    hn::StoreU(total, d, totals + r * kLanes);
  }
}

inline int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

inline void attend_tokens(const AttentionTask& task, int64_t group, int64_t dp, const Scratch& s) {
  const AttentionArgs& args = *task.args;
  const int64_t window = args.window > 0 ? args.window : INT64_MAX / 2;
  // Of the first and the last token; without a causal mask every token sees as much as the last one of all does.
  const int64_t first_now = args.position + (args.causal ? task.token_begin : args.M - 1);
  const int64_t last_now = args.position + (args.causal ? task.token_end : args.M) - 1;
  const int64_t begin = clamp(first_now - window + 1, task.position_begin, task.position_end);
  const int64_t end = clamp(last_now + 1, task.position_begin, task.position_end);
  const int64_t tokens = task.token_end - task.token_begin;
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t n = end - block < kBlock ? end - block : kBlock;
    // Tokens that see something of this block: now >= block and now - window < block + n - 1.
    const int64_t t0 = clamp(block - first_now, 0, tokens);
    const int64_t t1 = clamp(block + n - 1 + window - first_now, t0, tokens);
    if (t0 == t1) continue;
    const int64_t row0 = t0 * group, rows = (t1 - t0) * group;
    decode_rows(args, args.cache.keys, task.kv_head, block, n, dp, s.values);  // values holds the keys for a moment
    transpose(s.values, n, dp, s.keys);
    decode_rows(args, args.cache.values, task.kv_head, block, n, dp, s.values);
    product<false>(rows, s.q + row0 * dp, dp, args.cache.head_dim, s.keys, kBlock, s.scores + row0 * kBlock, kBlock,
                   kBlock);
    // Scores of positions that a token may not see, and past n, become -inf.
    for (int64_t t = t0; t < t1; ++t) {
      const int64_t now = first_now + t;
      const int64_t low = clamp(now - window + 1 - block, 0, n), high = clamp(now + 1 - block, 0, n);
      if (low == 0 && high == kBlock) continue;
      for (int64_t row = t * group; row < (t + 1) * group; ++row) {
        float* scores = s.scores + row * kBlock;
        for (int64_t p = 0; p < low; ++p) scores[p] = -HUGE_VALF;
        for (int64_t p = high; p < kBlock; ++p) scores[p] = -HUGE_VALF;
      }
    }
    softmax_rows(s.scores + row0 * kBlock, rows, dp, s.sums + row0 * dp, s.tops + row0, s.totals + row0 * kLanes,
                 s.factors);
    product<true>(rows, s.scores + row0 * kBlock, kBlock, n, s.values, dp, s.sums + row0 * dp, dp, dp);
  }
}

}  // namespace

int64_t attention_scratch_floats(int64_t rows, int64_t head_dim) {
  const int64_t dp = padded(head_dim);
  return rows * (2 * dp + kBlock + kLanes) + 2 * kBlock * dp + 2 * (padded(rows) + kLanes);
}

void attention_block(const AttentionTask& task) {
  const int64_t group = task.args->n_heads / task.args->cache.n_kv_heads;
  const int64_t dp = padded(task.args->cache.head_dim);
  const int64_t tokens = task.token_end - task.token_begin;
  const Scratch s = carve(task.scratch, tokens * group, dp);
  load_queries(task, group, dp, s);
  if (tokens == 1) {
    attend_token(task, group, dp, s);
  } else {
    attend_tokens(task, group, dp, s);
  }
  finish(task, group, dp, s);
}

void attention_merge(const AttentionArgs& args, int64_t kv_head, int64_t token_begin, int64_t token_end,
                     const float* partials, int64_t parts, int64_t part_stride) {
  const int64_t head_dim = args.cache.head_dim, group = args.n_heads / args.cache.n_kv_heads;
  int64_t row = 0;
  for (int64_t m = token_begin; m < token_end; ++m) {
    for (int64_t g = 0; g < group; ++g, ++row) {
      const float* first = partials + row * (head_dim + 2);
      float top = -HUGE_VALF;
      for (int64_t i = 0; i < parts; ++i) {
        const float part_top = first[i * part_stride + head_dim];
        top = part_top > top ? part_top : top;
      }
      float* out = args.out + m * args.out_stride + (kv_head * group + g) * head_dim;
      float total = 0;
      for (int64_t i = 0; i < head_dim; ++i) out[i] = 0;
      for (int64_t part = 0; part < parts; ++part) {
        const float* p = first + part * part_stride;
        // A part that saw nothing has maximum -inf and adds nothing.
        const float weight = rescale(p[head_dim], top);
        total += weight * p[head_dim + 1];
        for (int64_t i = 0; i < head_dim; ++i) out[i] += weight * p[i];
      }
      const float inverse = 1 / total;
      for (int64_t i = 0; i < head_dim; ++i) out[i] *= inverse;
    }
  }
}

}  // namespace lacuna::cpu::LACUNA_ISA
