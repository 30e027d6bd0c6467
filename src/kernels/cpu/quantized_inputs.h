// src/kernels/cpu/quantized_inputs.h - the inputs of a linear group as integers, quantized once for all its weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/cpu/linear_kernel.h"

namespace lacuna::cpu {

/// Lays out and fills the quantized inputs [M, K] in memory that the caller has, cut into tiles of tokens that a kernel
/// takes at once. Every tile is a contiguous piece of each array.
class QuantizedInputs {
 public:
  QuantizedInputs(const LinearTable& table, int64_t K);

  /// Notes what a kernel wants to know beside codes and scales; returns the index to pass to tile(), or -1.
  int need(const ActivationNeeds& needs);
  /// Whether any kernel that was noted reads quantized inputs.
  bool any() const { return any_; }
  /// Tokens of a tile.
  int64_t tile_size() const { return tile_; }
  /// Memory for M tokens; a single one in two planes counts as two.
  size_t bytes(int64_t M) const { return size_t(places(M).total); }

  /// x: [M, K], rows `stride` floats apart.
  void quantize(ThreadPool& pool, const float* x, int64_t stride, int64_t M, std::byte* memory) const;
  /// One token into two planes, which lie as a tile of two tokens.
  void quantize_planes(const float* x, std::byte* memory) const;
  /// The `tokens` tokens from `first` (a multiple of tile_size()) of M.
  ActivationTile tile(std::byte* memory, int64_t M, int64_t first, int64_t tokens, int need) const;

 private:
  /// Most sets of needs: one for each layout that has any.
  static constexpr size_t kMostNeeds = 16;
  struct Places {
    int64_t codes = 0, scale = 0, total = 0;
    int64_t start[kMostNeeds] = {}, sum[kMostNeeds] = {};
    int64_t unit_codes[kMostNeeds] = {}, unit_scale[kMostNeeds] = {}, group_sum[kMostNeeds] = {};  // of one token
  };
  Places places(int64_t M) const;
  /// Arguments that quantize the tile of `tokens` tokens at token m.
  QuantizeArgs arguments(std::byte* memory, const Places& at, int64_t m, int64_t tokens,
                         QuantizeArgs::Extra* extras) const;

  const LinearTable& table_;
  int64_t K_, tile_;
  bool any_ = false;
  std::vector<QuantizeArgs::Extra> extras_;
};

}  // namespace lacuna::cpu
