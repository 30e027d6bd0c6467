#include "io/import_tensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "core/scalar.h"
#include "layout/grouped.h"

namespace lacuna::io {

namespace {

template <class T>
T load(std::span<const std::byte> bytes, size_t index) {
  T out;
  std::memcpy(&out, bytes.data() + index * sizeof(T), sizeof(T));
  return out;
}

template <class T>
std::vector<int64_t> widened(std::span<const std::byte> bytes) {
  std::vector<T> out(bytes.size() / sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  return {out.begin(), out.end()};
}

}  // namespace

std::vector<uint32_t> WordMatrix::row(int64_t n) const {
  std::vector<uint32_t> out(static_cast<size_t>(cols));
  std::memcpy(out.data(), data + 4 * n * cols, 4 * out.size());
  return out;
}

std::vector<uint32_t> WordMatrix::columns(int64_t first, int64_t count) const {
  std::vector<uint32_t> out(size_t(count * rows));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < count; ++c)
      std::memcpy(&out[size_t(c * rows + r)], data + 4 * (r * cols + first + c), sizeof(uint32_t));
  return out;
}

void unpack_codes(std::span<const uint32_t> words, int bits, bool whole, std::span<uint8_t> code) {
  assert(int64_t(words.size()) >= words_of(bits, int64_t(code.size()), whole));
  const uint32_t mask = (uint32_t{1} << bits) - 1;
  if (whole || 32 % bits == 0) {
    const size_t in_word = size_t(32 / bits);
    for (size_t k = 0; k < code.size(); k += in_word) {
      uint32_t word = words[k / in_word];
      const size_t count = std::min(in_word, code.size() - k);
      for (size_t i = 0; i < count; ++i, word >>= bits) code[k + i] = uint8_t(word & mask);
    }
    return;
  }
  uint64_t string = 0;
  int left = 0;  // bits of it
  for (size_t k = 0, next = 0; k < code.size(); ++k) {
    if (left < bits) {
      string |= uint64_t{words[next++]} << left;
      left += 32;
    }
    code[k] = uint8_t(string & mask);
    string >>= bits;
    left -= bits;
  }
}

WordMatrix word_matrix(const FileTensor& tensor) {
  const SafetensorsEntry& entry = tensor.entry;
  if (entry.dtype != "I32" || entry.dims.size() != 2 || entry.bytes.empty())
    throw Error("{}: a matrix of I32 is expected, found {} [{}]", tensor.where(), entry.dtype,
                fmt::join(entry.dims, ", "));
  return {entry.dims[0], entry.dims[1], entry.bytes.data()};
}

void need_shape(const FileTensor& tensor, std::span<const int64_t> dims, std::string_view what) {
  if (!std::ranges::equal(tensor.entry.dims, dims))
    throw Error("{}: shape [{}] is expected for {}, found [{}]", tensor.where(), fmt::join(dims, ", "), what,
                fmt::join(tensor.entry.dims, ", "));
}

std::vector<float> read_scales(const FileTensor& tensor) {
  const auto [name, dtype, dims, bytes] = tensor.entry;
  const bool half = dtype == "F16", brain = dtype == "BF16";
  if (!half && !brain && dtype != "F32")
    throw Error("{}: scales of dtype {} are not read; known are F16, BF16, F32", tensor.where(), dtype);
  std::vector<float> out(bytes.size() / (half || brain ? 2 : 4));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = half ? to_float(load<f16>(bytes, i)) : brain ? to_float(load<bf16>(bytes, i)) : load<float>(bytes, i);
    if (!std::isfinite(out[i])) throw Error("{}: scale {} is {}; the file is damaged", tensor.where(), i, out[i]);
    if (!half && to_float(to_f16(out[i])) != out[i])
      throw Error(
          "{}: scale {} is {} in {}, which the f16 scales of the gq and bm layouts do not hold exactly; store the "
          "model's scales as F16, or start from the model before it was quantized",
          tensor.where(), i, out[i], dtype);
  }
  return out;
}

std::vector<int64_t> read_integers(const FileTensor& tensor) {
  const SafetensorsEntry& entry = tensor.entry;
  if (entry.dtype == "I64") return widened<int64_t>(entry.bytes);
  if (entry.dtype == "I32") return widened<int32_t>(entry.bytes);
  if (entry.dtype == "I16") return widened<int16_t>(entry.bytes);
  if (entry.dtype == "I8") return widened<int8_t>(entry.bytes);
  throw Error("{}: integers are expected, found dtype {}", tensor.where(), entry.dtype);
}

layout::Shape read_shape(const FileTensor& tensor) {
  const std::vector<int64_t> dims = read_integers(tensor);
  if (dims.size() != 2) throw Error("{}: two numbers are expected, found {}", tensor.where(), dims.size());
  if (dims[0] < 1 || dims[1] < 1)
    throw Error("{}: outputs and inputs of a matrix are expected, found [{}, {}]", tensor.where(), dims[0], dims[1]);
  return {dims[0], dims[1]};
}

void check_bits(int64_t bits, std::span<const int> known, const std::string& where) {
  if (std::ranges::find(known, bits) == known.end())
    throw Error("{}: weights of {} bits are not read; known are {}", where, bits, fmt::join(known, ", "));
}

void check_group_order(const FileTensor& g_idx, int64_t K, int64_t group_size) {
  need_shape(g_idx, std::array{K}, "one group for each input");
  const std::vector<int64_t> group = read_integers(g_idx);
  if (std::ranges::all_of(group, [](int64_t g) { return g == -1; })) return;
  const int64_t whole = layout::whole_group(K, group_size);
  for (int64_t k = 0; k < K; ++k)
    if (group[size_t(k)] != k / whole)
      throw Error(
          "{}: input {} is in group {} and not in {}: the weights were quantized in the order of activations "
          "(act-order), which no layout here stores; quantize the model again with desc_act false or with static "
          "groups, or start from the model before it was quantized",
          g_idx.where(), k, group[size_t(k)], k / whole);
}

CodedMatrix::CodedMatrix(int code_bits, layout::Shape matrix, int64_t size)
    : bits(code_bits), shape(matrix), group_size(size <= 0 || size >= matrix.K ? 0 : size) {
  code.resize(size_t(shape.N * shape.K));
  scale.resize(size_t(shape.N * groups()));
  zero.resize(scale.size());
}

int64_t CodedMatrix::groups() const { return layout::group_count(shape.K, group_size); }

ImportedMatrix pack_coded(const CodedMatrix& matrix, ThreadPool* pool) {
  const auto family = matrix.keep.empty() ? layout::Family::grouped : layout::Family::bitmask;
  const layout::Layout* to = nullptr;
  for (const layout::Layout& layout : layout::all())
    if (layout.family == family && layout.bits < 16 && layout.bits >= matrix.bits &&
        (to == nullptr || layout.bits < to->bits))
      to = &layout;
  if (to == nullptr) throw Error("no layout holds codes of {} bits", matrix.bits);
  ImportedMatrix out{to, matrix.shape, {}, {}};
  out.params = layout::pack_grouped(*to, matrix.shape, {.group_size = matrix.group_size},
                                    {matrix.code, matrix.scale, matrix.zero, matrix.keep}, out.bytes, pool);
  return out;
}

}  // namespace lacuna::io
