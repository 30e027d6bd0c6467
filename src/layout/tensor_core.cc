#include "layout/tensor_core.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/checked_math.h"
#include "core/e4m3.h"
#include "core/error.h"
#include "core/scalar.h"
#include "layout/float_rows.h"
#include "layout/row_work.h"
#include "layout/two_of_four.h"

namespace lacuna::layout {

namespace {

constexpr int64_t kScaleBytes = 4;
constexpr auto kValueOf = [] {
  std::array<float, 256> out{};
  for (size_t code = 0; code < out.size(); ++code) out[code] = to_float(e4m3{uint8_t(code)});
  return out;
}();

int place_of(const std::byte* index, int64_t kept) { return int(index[kept / 4] >> (2 * (kept % 4)) & std::byte{3}); }

/// Places of the kept weights of a row, two a group; those of a last group's zeros follow its weights.
void find_places(std::span<const uint8_t> keep, std::span<uint8_t> places) {
  const auto K = int64_t(keep.size());
  if (const int64_t bad = find_bad_group(keep); bad >= 0) {
    const auto four = keep.subspan(size_t(4 * bad), size_t(std::min<int64_t>(4, K - 4 * bad)));
    throw Error("the group of four at input {} keeps {} weights; 2:4 needs exactly {} of its {}", 4 * bad,
                std::count_if(four.begin(), four.end(), [](uint8_t one) { return one != 0; }), kept_of_four(K, bad),
                four.size());
  }
  for (size_t g = 0; 2 * g < places.size(); ++g) {
    size_t kept = 2 * g;
    for (size_t i = 0; i < 4 && kept < 2 * g + 2; ++i)
      if (const size_t k = 4 * g + i; k >= keep.size() || keep[k] != 0) places[kept++] = uint8_t(i);
  }
}

void write_index(std::span<const uint8_t> places, std::byte* index) {
  for (size_t i = 0; i < places.size(); ++i) index[i / 4] |= std::byte(places[i] << (2 * (i % 4)));
}

float row_scale(std::span<const float> w) {
  float most = 0;
  for (const float value : w) most = std::max(most, std::abs(value));
  return e4m3_scale(most);
}

void write_values(const TensorCoreRow& map, std::span<const float> values, float scale, std::span<std::byte> out) {
  if (!map.scaled) return encode_bf16(values, out);
  for (size_t i = 0; i < values.size(); ++i) out[i] = std::byte(to_e4m3(values[i] / scale).bits);
}

void encode_row(const TensorCoreRow& map, std::span<const float> w, std::span<const uint8_t> keep,
                std::span<std::byte> out) {
  const float scale = map.scaled ? row_scale(w) : 1;
  if (map.scaled) std::memcpy(out.data(), &scale, kScaleBytes);
  const auto values = out.subspan(size_t(map.values));
  if (!map.sparse) return write_values(map, w, scale, values);
  std::vector<uint8_t> places(static_cast<size_t>(map.kept));
  find_places(keep, places);
  std::fill_n(out.begin() + map.index, map.values - map.index, std::byte{0});
  write_index(places, out.data() + map.index);
  std::vector<float> kept(places.size());
  for (size_t i = 0; i < places.size(); ++i) {
    const size_t k = 4 * (i / 2) + places[i];
    kept[i] = k < w.size() ? w[k] : 0.0f;
  }
  write_values(map, kept, scale, values);
}

bool sound_values(const TensorCoreRow& map, std::span<const std::byte> values) {
  if (!map.scaled) return is_finite_bf16(values);
  return std::none_of(values.begin(), values.end(), [](std::byte code) { return is_nan(e4m3{uint8_t(code)}); });
}

/// Places ascend, the last group keeps the weights that it has to and zeros that are +0, and so are bits of no group.
bool sound_places(const TensorCoreRow& map, int64_t K, std::span<const std::byte> row) {
  const std::byte* index = row.data() + map.index;
  for (int64_t i = 0; i < map.kept; i += 2)
    if (place_of(index, i) >= place_of(index, i + 1)) return false;
  if (map.groups % 2 != 0 && (index[map.groups / 2] >> 4) != std::byte{0}) return false;
  const int64_t value_bytes = map.scaled ? 1 : 2;
  int64_t kept = 0;  // weights of the last group
  for (int64_t i = std::max<int64_t>(0, map.kept - 2); i < map.kept; ++i) {
    const auto value = row.subspan(size_t(map.values + i * value_bytes), size_t(value_bytes));
    if (4 * (i / 2) + place_of(index, i) < K)
      ++kept;
    else if (std::any_of(value.begin(), value.end(), [](std::byte byte) { return byte != std::byte{0}; }))
      return false;
  }
  return map.groups == 0 || kept == kept_of_four(K, map.groups - 1);
}

bool is_sound(const TensorCoreRow& map, int64_t K, std::span<const std::byte> row) {
  if (map.scaled) {
    float scale;
    std::memcpy(&scale, row.data(), kScaleBytes);
    if (!(scale >= 0 && scale <= std::numeric_limits<float>::max() / kLargestE4m3))
      return false;  // no weight is infinite
  }
  return sound_values(map, row.subspan(size_t(map.values))) && (!map.sparse || sound_places(map, K, row));
}

}  // namespace

TensorCoreRow tensor_core_row(const Layout& layout, int64_t K) {
  assert(layout.family == Family::tensor_core && K >= 0);
  TensorCoreRow out;
  out.sparse = layout.id != Id::f8;
  out.scaled = layout.id != Id::nm24_bf16;
  out.groups = K / 4 + (K % 4 != 0);
  out.kept = out.sparse ? 2 * out.groups : K;
  out.index = out.scaled ? kScaleBytes : 0;
  out.values = out.index + (out.sparse ? out.groups / 2 + out.groups % 2 : 0);
  const auto values = checked_mul(out.kept, out.scaled ? 1 : 2);
  const auto bytes = values ? checked_add(*values, out.values) : values;
  if (!bytes) throw Error("K = {} in {} is more than 2^63 bytes; the file is damaged", K, layout.name);
  out.bytes = *bytes;
  return out;
}

void encode_tensor_core(const Layout& layout, Shape shape, std::span<const float> w, std::span<const uint8_t> keep,
                        std::span<std::byte> out, ThreadPool* pool) {
  const TensorCoreRow map = tensor_core_row(layout, shape.K);
  const auto weights = size_t(shape.N * shape.K);
  assert(w.size() == weights && int64_t(out.size()) == layout.size_bytes(shape));
  if (keep.size() != (map.sparse ? weights : 0))
    throw Error("a mask of {} weights for [{}, {}] in {}, which needs {}", keep.size(), shape.N, shape.K, layout.name,
                map.sparse ? "one of all weights" : "none");
  each_row(shape.N, pool, [&](int64_t n) {
    const auto begin = size_t(n * shape.K), cols = size_t(shape.K);
    encode_row(map, w.subspan(begin, cols), keep.empty() ? keep : keep.subspan(begin, cols),
               out.subspan(size_t(n * map.bytes), size_t(map.bytes)));
  });
}

float read_tensor_core_row(const Layout& layout, int64_t K, std::span<const std::byte> row, std::span<float> values,
                           std::span<uint8_t> places) {
  const TensorCoreRow map = tensor_core_row(layout, K);
  assert(int64_t(row.size()) == map.bytes && int64_t(values.size()) == map.kept);
  assert(places.empty() || (map.sparse && places.size() == values.size()));
  float scale = 1;
  const auto stored = row.subspan(size_t(map.values));
  if (map.scaled) {
    std::memcpy(&scale, row.data(), kScaleBytes);
    for (size_t i = 0; i < values.size(); ++i) values[i] = kValueOf[size_t(stored[i])];
  } else {
    decode_bf16(stored, values);
  }
  for (size_t i = 0; i < places.size(); ++i) places[i] = uint8_t(place_of(row.data() + map.index, int64_t(i)));
  return scale;
}

void read_keep(const Layout& layout, int64_t K, std::span<const std::byte> row, std::span<uint8_t> keep) {
  const TensorCoreRow map = tensor_core_row(layout, K);
  assert(map.sparse && int64_t(keep.size()) == K);
  std::ranges::fill(keep, uint8_t{0});
  for (int64_t i = 0; i < map.kept; ++i)
    if (const int64_t k = 4 * (i / 2) + place_of(row.data() + map.index, i); k < K) keep[size_t(k)] = 1;
}

int64_t tensor_core_size(const Layout& layout, Shape shape, Params) {
  const auto size = checked_mul(tensor_core_row(layout, shape.K).bytes, shape.N);
  if (!size) throw Error("[{}, {}] in {} is more than 2^63 bytes; the file is damaged", shape.N, shape.K, layout.name);
  return *size;
}

void decode_tensor_core(const Layout& layout, Shape shape, Params, std::span<const std::byte> bytes, int64_t row0,
                        int64_t rows, float* out) {
  const TensorCoreRow map = tensor_core_row(layout, shape.K);
  std::vector<float> values(static_cast<size_t>(map.kept));
  std::vector<uint8_t> places(map.sparse ? values.size() : 0);
  for (int64_t n = row0; n < row0 + rows; ++n, out += shape.K) {
    const auto row = bytes.subspan(size_t(n * map.bytes), size_t(map.bytes));
    const float scale = read_tensor_core_row(layout, shape.K, row, values, places);
    if (map.sparse) std::fill_n(out, shape.K, 0.0f);
    for (size_t i = 0; i < values.size(); ++i) {
      const size_t k = map.sparse ? 4 * (i / 2) + places[i] : i;
      if (k < size_t(shape.K)) out[k] = scale * values[i];
    }
  }
}

int64_t first_bad_tensor_core_row(const Layout& layout, Shape shape, Params, std::span<const std::byte> bytes) {
  const TensorCoreRow map = tensor_core_row(layout, shape.K);
  for (int64_t n = 0; n < shape.N; ++n)
    if (!is_sound(map, shape.K, bytes.subspan(size_t(n * map.bytes), size_t(map.bytes)))) return n;
  return -1;
}

int64_t tensor_core_kept_weights(const Layout& layout, Shape shape) {
  const bool sparse = tensor_core_row(layout, shape.K).sparse;
  return shape.N * (sparse ? shape.K / 4 * 2 + std::min<int64_t>(2, shape.K % 4) : shape.K);
}

}  // namespace lacuna::layout
