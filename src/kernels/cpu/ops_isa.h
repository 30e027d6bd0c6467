// src/kernels/cpu/ops_isa.h - the single-threaded pieces of ops.h, compiled once per instruction set (isa/ops_*.cc).
// ops.cc splits the work over threads and calls these.
#pragma once

#include <cstdint>

#include "kernels/cpu/dispatch.h"
#include "kernels/ops.h"

namespace lacuna::cpu {

/// A block of queries of one key-value head against a range of positions.
struct AttentionTask {
  const kernels::AttentionArgs* args = nullptr;
  int64_t kv_head = 0;
  int64_t token_begin = 0, token_end = 0;        // query tokens
  int64_t position_begin = 0, position_end = 0;  // keys; those that a token may not see are skipped
  /// Scratch of attention_scratch_floats(rows, head_dim) floats, 64-byte aligned.
  float* scratch = nullptr;
  /// nullptr: the result goes to args->out. Otherwise [rows][head_dim + 2] unnormalised sums, then the maximum and the
  /// sum of weights, row = (token - token_begin) * group + head in the group; merged by attention_merge.
  float* partial = nullptr;
};

LACUNA_CPU_DECLARE(void rms_norm_rows(const float* x, const float* weight, float eps, int64_t M, int64_t K, float* y))
LACUNA_CPU_DECLARE(void layer_norm_rows(const float* x, const float* weight, const float* bias, float eps, int64_t M,
                                        int64_t K, float* y))
LACUNA_CPU_DECLARE(void add_span(const float* y, int64_t count, float* x))
LACUNA_CPU_DECLARE(void swiglu_span(const float* gate, const float* up, int64_t count, float* out))
LACUNA_CPU_DECLARE(void add_gated_rows(const float* y, const float* gate, int64_t M, int64_t K, float* x))
LACUNA_CPU_DECLARE(void gelu_tanh_span(float* x, int64_t count))
LACUNA_CPU_DECLARE(void relu_span(float* x, int64_t count))
/// y = exp(x), the exponential of every kernel here.
LACUNA_CPU_DECLARE(void exp_span(const float* x, int64_t count, float* y))
/// log(sum(exp(x))) over count >= 1 values; NaN when one is NaN.
LACUNA_CPU_DECLARE(double log_sum_exp_span(const float* x, int64_t count))
LACUNA_CPU_DECLARE(void rope_rows(float* x, int64_t M, int64_t n_heads, int64_t head_dim, int64_t stride,
                                  const float* cos, const float* sin, int64_t n_rot, bool adjacent))
/// One head of one position into the cache and back.
LACUNA_CPU_DECLARE(void kv_encode(kernels::KvType type, const float* x, int64_t head_dim, void* out))
LACUNA_CPU_DECLARE(void kv_decode(kernels::KvType type, const void* in, int64_t head_dim, float* out))
/// Floats of scratch for `rows` = tokens x heads of a group.
LACUNA_CPU_DECLARE(int64_t attention_scratch_floats(int64_t rows, int64_t head_dim))
LACUNA_CPU_DECLARE(void attention_block(const AttentionTask& task))
/// Combines `parts` partial results ([parts][rows][head_dim + 2]) of tokens [token_begin, token_end) of a key-value
/// head.
LACUNA_CPU_DECLARE(void attention_merge(const kernels::AttentionArgs& args, int64_t kv_head, int64_t token_begin,
                                        int64_t token_end, const float* partials, int64_t parts, int64_t part_stride))

}  // namespace lacuna::cpu
