// src/io/import_tensors.h - what importers share: typed, checked reads of a module's tensors, and packing.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "io/import.h"

namespace lacuna::io {

/// A matrix of 32-bit words in a file, at any address.
struct WordMatrix {
  int64_t rows = 0, cols = 0;
  const std::byte* data = nullptr;

  std::vector<uint32_t> row(int64_t n) const;
  /// Columns [first, first + count): [count, rows].
  std::vector<uint32_t> columns(int64_t first, int64_t count) const;
};

/// Reads codes of `bits` <= 8 from words, low bits first: one string of bits, or where `whole` is set without a code
/// that lies in two words. The two are the same where the bits divide 32.
void unpack_codes(std::span<const uint32_t> words, int bits, bool whole, std::span<uint8_t> code);
/// Words that `count` codes take.
constexpr int64_t words_of(int bits, int64_t count, bool whole) {
  return whole ? (count + 32 / bits - 1) / (32 / bits) : (count * bits + 31) / 32;
}

/// Of a tensor I32 [rows, cols] without an empty dimension.
WordMatrix word_matrix(const FileTensor& tensor);

/// Throws Error unless the tensor has this shape; what says what it should follow from.
void need_shape(const FileTensor& tensor, std::span<const int64_t> dims, std::string_view what);

/// All numbers of a tensor of F16, BF16 or F32. Throws Error for another type, for NaN and infinity, and for a number
/// that f16 does not hold, which our layouts' scales are.
std::vector<float> read_scales(const FileTensor& tensor);

/// All numbers of a tensor of I8, I16, I32 or I64.
std::vector<int64_t> read_integers(const FileTensor& tensor);

/// A tensor of two numbers, both 1 or more: N and K.
layout::Shape read_shape(const FileTensor& tensor);

/// The bits of a code, one of `known`. Throws Error.
void check_bits(int64_t bits, std::span<const int> known, const std::string& where);

/// Throws Error unless input k belongs to group k / group_size: g_idx of a checkpoint that was quantized in the order
/// of activations (act-order) says otherwise. All -1: no order.
void check_group_order(const FileTensor& g_idx, int64_t K, int64_t group_size);

/// A matrix as codes: weight = scale * (code - zero); a weight that is not kept is 0.
struct CodedMatrix {
  int bits = 0;
  layout::Shape shape;
  int64_t group_size = 0;  // 0: whole rows
  std::vector<uint8_t> code;
  std::vector<float> scale, zero;
  std::vector<uint8_t> keep;  // empty: all

  /// Takes the memory for [N, K] codes in groups.
  CodedMatrix(int bits, layout::Shape shape, int64_t group_size);
  int64_t groups() const;
};

/// In the gq layout of its bits, or the bm layout where it has a mask.
ImportedMatrix pack_coded(const CodedMatrix& matrix, ThreadPool* pool);

/// Calls body(begin, end) on pieces of [0, count), on all workers where there is a pool.
template <class Body>
void for_pieces(ThreadPool* pool, int64_t count, int64_t grain, const Body& body) {
  if (pool == nullptr)
    body(int64_t{0}, count);
  else
    pool->parallel_for(count, grain, body);
}

}  // namespace lacuna::io
