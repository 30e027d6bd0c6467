// src/kernels/cpu/ops.cc - how the ops of ops.h are split over threads; the arithmetic is in isa/ops_*.cc.
#include "kernels/ops.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstddef>

#include "kernels/cpu/ops_isa.h"
#include "kernels/cpu/scratch.h"

namespace lacuna::kernels {
namespace {

// Below this many values a fork and join costs more than it saves (about 2 us against 0.1 ns a value and thread).
constexpr int64_t kSerialValues = 16 * 1024;
constexpr int64_t kSerialProducts = 128 * 1024;  // of one token's attention
constexpr int64_t kBlockRows = 96;               // rows (token x head) of an attention task
constexpr int64_t kMinChunk = 256;               // positions
constexpr int64_t kMaxChunks = 64;

/// Splits `count` values over threads.
template <class Body>
void for_values(ThreadPool& pool, int64_t count, const Body& body) {
  if (count <= kSerialValues) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  pool.parallel_for(count, std::max<int64_t>(kSerialValues / 4, count / (4 * pool.size())), body);
}

/// Splits M rows of `width` values over threads.
template <class Body>
void for_rows(ThreadPool& pool, int64_t M, int64_t width, const Body& body) {
  if (M <= 0) return;
  if (M == 1 || M * width <= kSerialValues) {
    body(int64_t{0}, M);
    return;
  }
  pool.parallel_for(M, std::max<int64_t>(1, M / (4 * pool.size())), body);
}

/// Floats of a thread's scratch memory.
template <cpu::Scratch kUse>
float* floats_of(int64_t count) {
  return reinterpret_cast<float*>(cpu::scratch<kUse>(size_t(count) * sizeof(float)));
}

}  // namespace

void rms_norm(ThreadPool& pool, const float* x, const float* weight, float eps, int64_t M, int64_t K, float* y) {
  const auto rows = LACUNA_CPU_SELECT(rms_norm_rows);
  for_rows(pool, M, K, [&](int64_t b, int64_t e) { rows(x + b * K, weight, eps, e - b, K, y + b * K); });
}

void layer_norm(ThreadPool& pool, const float* x, const float* weight, const float* bias, float eps, int64_t M,
                int64_t K, float* y) {
  const auto rows = LACUNA_CPU_SELECT(layer_norm_rows);
  for_rows(pool, M, K, [&](int64_t b, int64_t e) { rows(x + b * K, weight, bias, eps, e - b, K, y + b * K); });
}

void add(ThreadPool& pool, const float* y, int64_t count, float* x) {
  const auto span = LACUNA_CPU_SELECT(add_span);
  for_values(pool, count, [&](int64_t b, int64_t e) { span(y + b, e - b, x + b); });
}

void swiglu(ThreadPool& pool, const float* gate, const float* up, int64_t count, float* out) {
  const auto span = LACUNA_CPU_SELECT(swiglu_span);
  for_values(pool, count, [&](int64_t b, int64_t e) { span(gate + b, up + b, e - b, out + b); });
}

void add_gated(ThreadPool& pool, const float* y, const float* gate, int64_t M, int64_t K, float* x) {
  const auto rows = LACUNA_CPU_SELECT(add_gated_rows);
  for_rows(pool, M, K, [&](int64_t b, int64_t e) { rows(y + b * K, gate, e - b, K, x + b * K); });
}

void gelu_tanh(ThreadPool& pool, float* x, int64_t M, int64_t K, int64_t stride) {
  const auto span = LACUNA_CPU_SELECT(gelu_tanh_span);
  for_rows(pool, M, K, [&](int64_t b, int64_t e) {
    for (int64_t m = b; m < e; ++m) span(x + m * stride, K);
  });
}

void relu(ThreadPool& pool, float* x, int64_t count) {
  const auto span = LACUNA_CPU_SELECT(relu_span);
  for_values(pool, count, [&](int64_t b, int64_t e) { span(x + b, e - b); });
}

void rope(ThreadPool& pool, float* x, int64_t M, int64_t n_heads, int64_t head_dim, int64_t stride, const float* cos,
          const float* sin, int64_t n_rot, bool adjacent) {
  assert(n_rot % 2 == 0 && n_rot <= head_dim);
  const auto rows = LACUNA_CPU_SELECT(rope_rows);
  const int64_t half = n_rot / 2;
  for_rows(pool, M, n_heads * head_dim, [&](int64_t b, int64_t e) {
    rows(x + b * stride, e - b, n_heads, head_dim, stride, cos + b * half, sin + b * half, n_rot, adjacent);
  });
}

int64_t kv_head_bytes(KvType type, int64_t head_dim) {
  switch (type) {
    case KvType::f16:
      return head_dim * 2;
    case KvType::q8_0:
      return head_dim + 2 * ((head_dim + 31) / 32);
    case KvType::f32:
      return head_dim * 4;
  }
  assert(false);
  return 0;
}

void kv_store(ThreadPool& pool, const KvLayer& cache, int64_t position, int64_t M, const float* k, int64_t k_stride,
              const float* v, int64_t v_stride) {
  assert(position >= 0 && position + M <= cache.capacity);
  const auto encode = LACUNA_CPU_SELECT(kv_encode);
  const int64_t bytes = kv_head_bytes(cache.type, cache.head_dim);
  for_rows(pool, M, 2 * cache.n_kv_heads * cache.head_dim, [&](int64_t b, int64_t e) {
    for (int64_t m = b; m < e; ++m) {
      for (int64_t h = 0; h < cache.n_kv_heads; ++h) {
        const int64_t place = (h * cache.capacity + position + m) * bytes;
        encode(cache.type, k + m * k_stride + h * cache.head_dim, cache.head_dim,
               static_cast<std::byte*>(cache.keys) + place);
        encode(cache.type, v + m * v_stride + h * cache.head_dim, cache.head_dim,
               static_cast<std::byte*>(cache.values) + place);
      }
    }
  });
}

void attention(ThreadPool& pool, const AttentionArgs& args) {
  if (args.M <= 0) return;
  const int64_t n_kv = args.cache.n_kv_heads, head_dim = args.cache.head_dim;
  assert(n_kv > 0 && args.n_heads % n_kv == 0 && args.position + args.M <= args.cache.capacity);
  assert(args.causal || args.window == 0);
  const auto run_block = LACUNA_CPU_SELECT(attention_block);
  const auto merge = LACUNA_CPU_SELECT(attention_merge);
  const auto scratch_floats = LACUNA_CPU_SELECT(attention_scratch_floats);

  // Tasks: (block of tokens) x (key-value head) x (chunk of positions).
  const int64_t group = args.n_heads / n_kv, threads = pool.size();
  const int64_t block_tokens = std::min(args.M, std::max<int64_t>(1, kBlockRows / group));
  const int64_t token_blocks = (args.M + block_tokens - 1) / block_tokens;
  const int64_t end = args.position + args.M;
  const int64_t begin = args.window > 0 ? std::max<int64_t>(0, args.position - args.window + 1) : 0;
  const bool serial = threads == 1 || args.M * (end - begin) * args.n_heads * head_dim <= kSerialProducts;
  int64_t chunks = 1;
  if (!serial && token_blocks * n_kv < 4 * threads) {
    const int64_t wanted = (4 * threads + token_blocks * n_kv - 1) / (token_blocks * n_kv);
    chunks = std::clamp((end - begin) / kMinChunk, int64_t{1}, std::min(wanted, kMaxChunks));
  }
  const int64_t chunk = (end - begin + chunks - 1) / chunks;
  const int64_t rows = block_tokens * group;
  const int64_t part_stride = rows * (head_dim + 2);
  const int64_t need = scratch_floats(rows, head_dim);
  float* partials = nullptr;
  if (threads > 1) {
    // All threads grow together, at the first call, so that no later token allocates.
    thread_local std::array<int64_t, 2> grown = {0, 0};
    const int64_t most_chunks = args.M == 1 ? std::min(4 * threads, kMaxChunks) : chunks;
    const int64_t partial_floats = most_chunks * token_blocks * n_kv * part_stride;
    if (grown[0] < need || grown[1] < threads) {
      pool.run([&](int) { floats_of<cpu::Scratch::task>(need); });
      grown = {std::max(grown[0], need), threads};
    }
    partials = floats_of<cpu::Scratch::partials>(partial_floats);
  }

  const int64_t tasks = token_blocks * n_kv * chunks;
  const auto run_tasks = [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      cpu::AttentionTask task;
      task.args = &args;
      const int64_t chunk_index = t % chunks, unit = t / chunks;
      task.kv_head = unit % n_kv;
      const int64_t block = token_blocks - 1 - unit / n_kv;  // the longest first
      task.token_begin = block * block_tokens;
      task.token_end = std::min(args.M, task.token_begin + block_tokens);
      task.position_begin = begin + chunk_index * chunk;
      task.position_end = std::min(end, task.position_begin + chunk);
      task.scratch = floats_of<cpu::Scratch::task>(need);
      if (chunks > 1) task.partial = partials + t * part_stride;
      run_block(task);
    }
  };
  if (serial) {
    run_tasks(0, tasks);
  } else {
    pool.parallel_for(tasks, 1, run_tasks);
  }
  if (chunks == 1) return;
  for (int64_t unit = 0; unit < token_blocks * n_kv; ++unit) {
    const int64_t block = token_blocks - 1 - unit / n_kv;
    merge(args, unit % n_kv, block * block_tokens, std::min(args.M, (block + 1) * block_tokens),
          partials + unit * chunks * part_stride, chunks, part_stride);
  }
}

double log_sum_exp(const float* x, int64_t count) { return LACUNA_CPU_SELECT(log_sum_exp_span)(x, count); }

std::string_view isa_name() { return cpu::isa_name(cpu::isa()); }

}  // namespace lacuna::kernels
