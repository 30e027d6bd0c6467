#include "kernels/cpu/quantized_inputs.h"

#include <algorithm>

namespace lacuna::cpu {
namespace {

/// Quantized inputs of a tile should stay in the second-level cache beside the weights that stream through.
constexpr int64_t kTileBytes = int64_t{1} << 20;
/// Tokens that a worker quantizes at once.
constexpr int64_t kGrain = 8;

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

}  // namespace

QuantizedInputs::QuantizedInputs(const LinearTable& table, int64_t K)
    : table_(table), K_(K), tile_(std::clamp<int64_t>(kTileBytes / std::max<int64_t>(K, 1) / 16 * 16, 16, kMaxTile)) {}

int QuantizedInputs::need(const ActivationNeeds& needs) {
  any_ = any_ || needs.quantized;
  if (!needs.quantized || (needs.offset == 0 && !needs.sums)) return -1;
  const auto same = [&](const QuantizeArgs::Extra& extra) { return extra.needs == needs; };
  auto found = std::find_if(extras_.begin(), extras_.end(), same);
  if (found == extras_.end()) found = extras_.insert(extras_.end(), {needs, nullptr, nullptr});
  return int(found - extras_.begin());
}

QuantizedInputs::Places QuantizedInputs::places(int64_t M) const {
  Places at;
  if (!any_) return at;
  const int64_t blocks = M * (K_ / kBlock);
  const auto place = [&](int64_t bytes) {
    const int64_t begin = at.total;
    at.total += round_up(bytes, 64);
    return begin;
  };
  at.codes = place(blocks * kBlock);
  at.scale = place(blocks * 4);
  for (size_t e = 0; e < extras_.size(); ++e) {
    const int64_t bytes = blocks * 4 * (32 / extras_[e].needs.group);
    at.start[e] = extras_[e].needs.offset != 0 ? place(bytes) : -1;
    at.sum[e] = extras_[e].needs.sums ? place(bytes) : -1;
    if (const int64_t group = extras_[e].needs.sparse_group; group != 0) {
      const int64_t cols = round_up(K_, group), unit = std::min(group, kBlock);
      at.unit_codes[e] = place(2 * (cols + group));
      at.unit_scale[e] = place(4 * (cols / unit + kReadPast));
      at.group_sum[e] = place(4 * (cols / group + kReadPast));
    }
  }
  return at;
}

QuantizeArgs QuantizedInputs::arguments(std::byte* memory, const Places& at, int64_t m, int64_t tokens,
                                        QuantizeArgs::Extra* extras) const {
  const int64_t blocks = m * (K_ / kBlock);
  QuantizeArgs q;
  q.K = K_;
  q.tokens = tokens;
  q.codes = reinterpret_cast<int8_t*>(memory + at.codes) + blocks * kBlock;
  q.scale = reinterpret_cast<float*>(memory + at.scale) + blocks;
  for (size_t e = 0; e < extras_.size(); ++e) {
    extras[e] = extras_[e];
    const int64_t groups = blocks * (32 / extras_[e].needs.group);
    if (at.start[e] >= 0) extras[e].start = reinterpret_cast<int32_t*>(memory + at.start[e]) + groups;
    if (at.sum[e] >= 0) extras[e].sum = reinterpret_cast<float*>(memory + at.sum[e]) + groups;
    if (extras_[e].needs.sparse_group == 0) continue;
    extras[e].unit_codes = reinterpret_cast<int8_t*>(memory + at.unit_codes[e]);
    extras[e].unit_scale = reinterpret_cast<float*>(memory + at.unit_scale[e]);
    extras[e].group_sum = reinterpret_cast<float*>(memory + at.group_sum[e]);
  }
  q.extras = extras;
  q.extra_count = int(extras_.size());
  return q;
}

void QuantizedInputs::quantize(ThreadPool& pool, const float* x, int64_t stride, int64_t M, std::byte* memory) const {
  const Places at = places(M);
  pool.parallel_for((M + kGrain - 1) / kGrain, 1, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin * kGrain, last = std::min(M, end * kGrain); m < last;) {
      const int64_t first = m / tile_ * tile_, tokens = std::min(tile_, M - first);
      QuantizeArgs::Extra extras[kMostNeeds];
      QuantizeArgs q = arguments(memory, at, first, tokens, extras);
      q.x = x + first * stride;
      q.x_stride = stride;
      q.token0 = m - first;
      q.token1 = std::min(last - first, tokens);
      table_.quantize(q);
      m = first + q.token1;
    }
  });
}

void QuantizedInputs::quantize_planes(const float* x, std::byte* memory) const {
  QuantizeArgs::Extra extras[kMostNeeds];
  QuantizeArgs q = arguments(memory, places(2), 0, 2, extras);
  q.planes = true;
  q.x = x;
  table_.quantize(q);
}

ActivationTile QuantizedInputs::tile(std::byte* memory, int64_t M, int64_t first, int64_t tokens, int need) const {
  QuantizeArgs::Extra extras[kMostNeeds];
  const QuantizeArgs q = arguments(memory, places(M), first, tokens, extras);
  ActivationTile tile;
  tile.tokens = tokens;
  tile.codes = q.codes;
  tile.scale = q.scale;
  if (need >= 0) {
    tile.start = extras[need].start;
    tile.sum = extras[need].sum;
    tile.unit_codes = extras[need].unit_codes;
    tile.unit_scale = extras[need].unit_scale;
    tile.group_sum = extras[need].group_sum;
  }
  return tile;
}

}  // namespace lacuna::cpu
