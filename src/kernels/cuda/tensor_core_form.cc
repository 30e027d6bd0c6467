#include "kernels/cuda/tensor_core_form.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "layout/tensor_core.h"

namespace lacuna::cuda {

namespace {

constexpr int64_t kTile = 64;      // rows of a wgmma, and the columns that 32 metadata words of 16 rows cover
constexpr std::byte kFirstTwo{4};  // the places 0 and 1

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

/// Which 4 bits of the metadata belong to columns [k, k + 4) of a row.
class MetadataMap {
 public:
  explicit MetadataMap(const TensorCoreForm& form)
      : form_(form), wide_(form.value_bytes == 2), tile_(form.options.tile_cols) {}

  int64_t at(int64_t row, int64_t k) const {
    return form_.options.order == MetadataOrder::lanes ? in_lanes(row, k) : in_atoms(row, k) / 4;
  }

 private:
  int64_t in_lanes(int64_t row, int64_t k) const {
    const int64_t half = row / 8 % 2, pair = k / 32 % 2;
    const int64_t lane = 4 * (row % 8) + 2 * pair + (wide_ ? k / 16 % 2 : half);
    const int64_t nibble = wide_ ? 4 * half + k / 4 % 4 : k / 4 % 8;
    return (((row / 16) * (form_.cols / kTile) + k / kTile) * 32 + lane) * 8 + nibble;
  }
  /// In columns.
  int64_t in_atoms(int64_t row, int64_t k) const {
    const int64_t atom = k / tile_ * form_.rows * tile_ + row / kTile * kTile * tile_;
    if (!wide_) return atom + row % kTile * tile_ + k % tile_;
    return atom + k % 16 + 16 * (row / 8 % 2) + 32 * (k % tile_ / 32) +
           tile_ * (row % 8 + 8 * (k / 16 % 2) + 16 * (row / 16 % 4));
  }

  const TensorCoreForm& form_;
  bool wide_;
  int64_t tile_;
};

void put(std::vector<std::byte>& metadata, int64_t nibble, std::byte four) {
  metadata[size_t(nibble / 2)] |= four << (4 * (nibble % 2));
}
std::byte get(std::span<const std::byte> packed, int64_t nibble) {
  return packed[size_t(nibble / 2)] >> (4 * (nibble % 2)) & std::byte{15};
}

TensorCoreForm empty_form(const layout::TensorCoreRow& map, layout::Shape shape, const TensorCoreFormOptions& options) {
  TensorCoreForm out;
  out.options = options;
  out.rows = round_up(shape.N, options.tile_rows);
  out.cols = round_up(shape.K, options.tile_cols);
  out.value_bytes = map.scaled ? 1 : 2;
  out.values.resize(size_t(out.rows * (map.sparse ? out.cols / 2 : out.cols) * out.value_bytes));
  if (map.sparse) out.metadata.resize(size_t(out.rows * out.cols / 8));
  if (map.scaled) out.scale.assign(size_t(out.rows), 1.0f);
  return out;
}

void check_arguments(const layout::Layout& layout, const TensorCoreFormOptions& options) {
  if (layout.family != layout::Family::tensor_core)
    throw Error("{} has no form for FP8 and 2:4 tensor cores; f8, nm24_f8 and nm24_bf16 have", layout.name);
  if (options.tile_rows < kTile || options.tile_rows % kTile != 0 || options.tile_cols < kTile ||
      options.tile_cols % kTile != 0)
    throw Error("tiles of {} x {}; both numbers must be multiples of {}", options.tile_rows, options.tile_cols, kTile);
}

}  // namespace

TensorCoreForm make_tensor_core_form(const layout::Layout& layout, layout::Shape shape,
                                     std::span<const std::byte> bytes, const TensorCoreFormOptions& options,
                                     ThreadPool* pool) {
  check_arguments(layout, options);
  const layout::TensorCoreRow map = layout::tensor_core_row(layout, shape.K);
  TensorCoreForm out = empty_form(map, shape, options);
  const MetadataMap metadata(out);
  const auto stride = out.rows == 0 ? 0 : out.values.size() / size_t(out.rows);
  // 16 rows share bytes of metadata, so a worker takes whole tiles.
  const auto tiles = [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * kTile; n < end * kTile; ++n) {
      const auto row =
          n < shape.N ? bytes.subspan(size_t(n * map.bytes), size_t(map.bytes)) : std::span<const std::byte>();
      if (!row.empty()) {
        if (map.scaled) std::memcpy(&out.scale[size_t(n)], row.data(), sizeof(float));
        std::memcpy(out.values.data() + size_t(n) * stride, row.data() + map.values, size_t(map.bytes - map.values));
      }
      for (int64_t g = 0; map.sparse && g < out.cols / 4; ++g)
        put(out.metadata, metadata.at(n, 4 * g),
            !row.empty() && g < map.groups ? get(row.subspan(size_t(map.index)), g) : kFirstTwo);
    }
  };
  if (pool == nullptr)
    tiles(0, out.rows / kTile);
  else
    pool->parallel_for(out.rows / kTile, 1, tiles);
  return out;
}

std::vector<std::byte> canonical_bytes(const layout::Layout& layout, layout::Shape shape, const TensorCoreForm& form) {
  check_arguments(layout, form.options);
  const layout::TensorCoreRow map = layout::tensor_core_row(layout, shape.K);
  const TensorCoreForm like = empty_form(map, shape, form.options);
  if (like.rows != form.rows || like.cols != form.cols || like.values.size() != form.values.size() ||
      like.metadata.size() != form.metadata.size() || like.scale.size() != form.scale.size())
    throw Error("a form of {} x {} is not that of a matrix [{}, {}] in {}", form.rows, form.cols, shape.N, shape.K,
                layout.name);
  const MetadataMap metadata(form);
  const auto stride = form.rows == 0 ? 0 : form.values.size() / size_t(form.rows);
  std::vector<std::byte> out(size_t(layout.size_bytes(shape)));
  for (int64_t n = 0; n < shape.N; ++n) {
    std::byte* row = out.data() + n * map.bytes;
    if (map.scaled) std::memcpy(row, &form.scale[size_t(n)], sizeof(float));
    std::memcpy(row + map.values, form.values.data() + size_t(n) * stride, size_t(map.bytes - map.values));
    for (int64_t g = 0; map.sparse && g < map.groups; ++g)
      row[map.index + g / 2] |= get(form.metadata, metadata.at(n, 4 * g)) << (4 * (g % 2));
  }
  return out;
}

}  // namespace lacuna::cuda
