#include "solver/columns.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "solver/threads.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define LACUNA_FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LACUNA_FOR_EACH_CPU
#endif

namespace lacuna::solver {
namespace {

using detail::RawColumns;

typedef float Floats __attribute__((vector_size(64)));
constexpr int kFloats = 16, kVectors = 4, kLanes = kFloats * kVectors;

/// Rows of weights [n0, n0 + width) of a block, width <= kLanes. factor_t: [B, B] transposed and contiguous. left: [B,
/// kLanes], work space.
LACUNA_FOR_EACH_CPU void fix_lanes(const RawColumns& c, const float* factor_t, int64_t n0, int64_t width, float* left) {
  const auto load = [&](const float* from, float fill, Floats* to) __attribute__((always_inline)) {
    alignas(64) float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = i < width ? from[i] : fill;
    __builtin_memcpy(to, lanes, sizeof(lanes));
  };
  const auto store = [&](const Floats* from, float* to) __attribute__((always_inline)) {
    __builtin_memcpy(to, from, size_t(width) * sizeof(float));
  };
  const int64_t B = c.end;
  Floats scale[kVectors] = {}, zero[kVectors] = {}, step[kVectors] = {};
  if (c.scale != nullptr) {
    load(c.scale + n0, 0, scale);
    load(c.zero + n0, 0, zero);
    load(c.step + n0, 1, step);
  }
  // Column j less what columns [first, k) left over for it.
  const auto up_to_date = [&](int64_t j, int64_t k, Floats * value) __attribute__((always_inline)) {
    Floats sum[kVectors];
    load(c.values + j * c.N + n0, 0, sum);
    const float* factor = factor_t + j * B;
    for (int64_t p = c.first; p < k; ++p)
      for (int v = 0; v < kVectors; ++v) {
        Floats others;
        __builtin_memcpy(&others, left + p * kLanes + v * kFloats, sizeof(others));
        sum[v] -= factor[p] * others;
      }
    for (int v = 0; v < kVectors; ++v) value[v] = sum[v];
  };
  const Floats nothing = {}, most = nothing + c.most;
  // Codes are at most 255: what is further out is clamped anyway, and the sum below rounds only what is small.
  const Floats far = nothing + 1024.0f, whole = nothing + 0x1.8p23f;
  for (int64_t k = c.first; k < c.last; ++k) {
    const int64_t at = k * c.N + n0;
    Floats value[kVectors], before[kVectors] = {}, stored[kVectors], code[kVectors];
    up_to_date(k, k, value);
    if (c.inverse != nullptr) {
      load(c.stored + at, 0, before);
      for (int v = 0; v < kVectors; ++v) value[v] = before[v] + value[v] * c.inverse[k];
    }
    for (int v = 0; v < kVectors; ++v) stored[v] = value[v];
    if (c.scale != nullptr) {
      for (int v = 0; v < kVectors; ++v) {
        Floats steps = value[v] / step[v];
        steps = steps > far ? far : steps;  // a NaN stays one
        steps = steps < -far ? -far : steps;
        steps = (steps + whole) - whole + zero[v];
        steps = steps < nothing ? nothing : steps;
        code[v] = steps > most ? most : steps;
        stored[v] = (code[v] - zero[v]) * scale[v];
      }
      store(code, c.code + at);
    }
    if (c.keep != nullptr) {
      alignas(64) float keep[kLanes];
      for (int i = 0; i < kLanes; ++i) keep[i] = i < width && c.keep[at + i] ? 1.0f : 0.0f;
      for (int v = 0; v < kVectors; ++v) {
        Floats kept;
        __builtin_memcpy(&kept, keep + kFloats * v, sizeof(kept));
        stored[v] = kept != nothing ? stored[v] : nothing;
      }
    }
    Floats rest[kVectors];
    for (int v = 0; v < kVectors; ++v) rest[v] = c.inverse != nullptr ? stored[v] - before[v] : value[v] - stored[v];
    __builtin_memcpy(left + k * kLanes, rest, sizeof(rest));
    store(rest, c.left + at);
    store(stored, c.stored + at);
  }
  for (int64_t j = c.last; j < c.end; ++j) {
    Floats value[kVectors];
    up_to_date(j, c.last, value);
    store(value, c.values + j * c.N + n0);
  }
}

void fix_columns_cpu(const RawColumns& c) {
  const int64_t B = c.end;
  std::vector<float> factor_t(size_t(B * B));
  for (int64_t k = c.first; k < c.last; ++k)
    for (int64_t j = k + 1; j < B; ++j) factor_t[size_t(j * B + k)] = c.factor[k * c.factor_step + j];
  const int64_t tiles = (c.N + kLanes - 1) / kLanes, work = c.N * B * (c.last - c.first);
  const int64_t each = B * kLanes;
  std::vector<float> left(size_t(each * part_count(tiles, work)));
  for_parts(tiles, work, [&](int64_t part, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      fix_lanes(c, factor_t.data(), t * kLanes, std::min<int64_t>(kLanes, c.N - t * kLanes), left.data() + part * each);
  });
}

}  // namespace

bool columns_on_cuda() {
#if defined(LACUNA_SOLVER_CUDA)
  return true;
#else
  return false;
#endif
}

#if !defined(LACUNA_SOLVER_CUDA)
void detail::fix_columns_cuda(const RawColumns&) {
  throw Error(
      "this program was built without nvcc, which solving on a GPU needs: install CUDA 12.4 or later and build again, "
      "or "
      "leave --device cuda out");
}
#endif

void fix_columns(const ColumnBlock& block, int64_t first, int64_t last, const ColumnRule& rule) {
  const auto floats = [](const at::Tensor& t) { return t.defined() ? t.data_ptr<float>() : nullptr; };
  RawColumns c;
  c.N = block.values.size(1);
  c.first = first;
  c.last = last;
  c.end = block.values.size(0);
  c.factor_step = block.factor.stride(0);
  c.values = floats(block.values);
  c.factor = floats(block.factor);
  c.stored = floats(block.stored);
  c.left = floats(block.left);
  c.inverse = floats(block.inverse);
  if (rule.scale.defined()) {
    c.code = floats(block.code);
    c.scale = floats(rule.scale);
    c.zero = floats(rule.zero);
    c.step = floats(rule.step);
    c.most = float((1 << rule.bits) - 1);
  }
  if (rule.keep.defined()) c.keep = rule.keep.data_ptr<bool>();
  if (!block.values.is_cuda()) return fix_columns_cpu(c);
  c.device = block.values.device().index();
  detail::fix_columns_cuda(c);
}

}  // namespace lacuna::solver
