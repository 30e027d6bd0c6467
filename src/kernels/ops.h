// src/kernels/ops.h - contracts of everything in a decoder layer that is not a linear op. CPU, float32 in and out; the
// pool is used where M or the context makes it worth it. All pointers are row-major; M is the number of tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/scalar.h"
#include "core/thread_pool.h"

namespace lacuna::kernels {

/// y = x / sqrt(mean(x^2) + eps) * weight. x, y: [M, K] (may be the same); weight: [K].
void rms_norm(ThreadPool& pool, const float* x, const float* weight, float eps, int64_t M, int64_t K, float* y);
/// y = (x - mean) / sqrt(var + eps) * weight + bias (population variance). weight, bias: [K].
void layer_norm(ThreadPool& pool, const float* x, const float* weight, const float* bias, float eps, int64_t M,
                int64_t K, float* y);
/// x += y. [M * K] values.
void add(ThreadPool& pool, const float* y, int64_t count, float* x);
/// out = silu(gate) * up. [count] values; out may be gate.
void swiglu(ThreadPool& pool, const float* gate, const float* up, int64_t count, float* out);
/// x += gate * y, one gate a column. x, y: [M, K]; gate: [K].
void add_gated(ThreadPool& pool, const float* y, const float* gate, int64_t M, int64_t K, float* x);
/// x = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the tanh form of GELU (arXiv:1606.08415). x: [M, K], rows
/// `stride` floats apart.
void gelu_tanh(ThreadPool& pool, float* x, int64_t M, int64_t K, int64_t stride);
/// x = max(x, 0).
void relu(ThreadPool& pool, float* x, int64_t count);

/// Rotates the first `n_rot` elements of each head. x: [M, n_heads, head_dim] rows `stride` floats apart; cos, sin: [M,
/// n_rot / 2], row m for token m, attention scaling already multiplied in. adjacent: pairs (2i, 2i+1); else pairs (i, i
/// + n_rot/2).
void rope(ThreadPool& pool, float* x, int64_t M, int64_t n_heads, int64_t head_dim, int64_t stride, const float* cos,
          const float* sin, int64_t n_rot, bool adjacent);

enum class KvType : uint8_t { f16, q8_0, f32 };
/// Bytes of one head's keys or values of one position. q8_0: blocks of 32 along head_dim, the last one may be short.
int64_t kv_head_bytes(KvType type, int64_t head_dim);

/// One layer's cache. Keys and values are [n_kv_heads, capacity, head_dim] in `type`, position p of head h at (h *
/// capacity + p) * kv_head_bytes.
struct KvLayer {
  KvType type = KvType::f16;
  void* keys = nullptr;
  void* values = nullptr;
  int64_t capacity = 0, n_kv_heads = 0, head_dim = 0;
};

/// Stores M tokens' keys and values at positions [position, position + M). k, v: [M, n_kv_heads, head_dim], rows
/// k_stride / v_stride floats apart.
void kv_store(ThreadPool& pool, const KvLayer& cache, int64_t position, int64_t M, const float* k, int64_t k_stride,
              const float* v, int64_t v_stride);

struct AttentionArgs {
  const float* q = nullptr;  // [M, n_heads, head_dim], rows q_stride apart, rotary embedding applied
  int64_t q_stride = 0;
  int64_t M = 0, n_heads = 0;
  KvLayer cache;         // already holds positions [0, position + M)
  int64_t position = 0;  // of the first query token; token m sees positions <= position + m
  int64_t window = 0;    // > 0: token at p sees only positions > p - window
  float scale = 0;       // multiplies q.k, usually 1/sqrt(head_dim)
  float* out = nullptr;  // [M, n_heads, head_dim], rows out_stride apart
  int64_t out_stride = 0;
  bool causal = true;  // false: every token sees all positions [0, position + M); window must be 0
};
/// Softmax attention with a running maximum: memory O(M) beside the cache, never M x context. One token is split
/// over heads and context, many tokens over heads and blocks of queries. Query head h reads key head h / (n_heads /
/// n_kv_heads).
void attention(ThreadPool& pool, const AttentionArgs& args);

/// log(sum of exp(x)) over count >= 1 values, one thread: float exponentials (relative error below 2^-22), added up in
/// double. NaN when one is NaN.
double log_sum_exp(const float* x, int64_t count);

/// Instruction set that the kernels run on ("avx512vnni", "avx2", ...), chosen at start; the environment variable
/// LACUNA_ISA forces a lower one.
std::string_view isa_name();

}  // namespace lacuna::kernels
