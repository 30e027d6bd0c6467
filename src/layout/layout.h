// src/layout/layout.h - the table of stored layouts: what a weight matrix's canonical bytes mean.
//
// W is [N, K]: N outputs (rows), K inputs (columns). A layout row is {id, name, size, encode, decode,
// first_bad_row}; nothing outside src/layout and the kernel tables says a layout's name. decode is the truth that every
// kernel is tested against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace lacuna::layout {

// clang-format off
enum class Id : uint8_t {
  // Row layouts: a row of W is a run of blocks.
  f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_K, q3_K, q4_K, q5_K, q6_K,
  // Zigzag layouts: a block runs along the outputs (zigzag.h).
  zz2_k, zz3_k, zz4_k, zz5_k, zz6_k, zz8,
};
// clang-format on

struct Shape {
  int64_t N = 0;  // outputs
  int64_t K = 0;  // inputs
  friend bool operator==(const Shape&, const Shape&) = default;
};

/// What a layout may leave open; the manifest of a file stores it.
struct Params {
  /// Zigzag layouts: outputs that lie together in one column, a multiple of 256; 0: whole columns.
  int64_t tile_rows = 0;
  friend bool operator==(const Params&, const Params&) = default;
};

struct Layout {
  Id id;
  std::string_view name;  // as on the command line and in `inspect`: "q4_K"
  int ggml_type;          // type number in GGUF; -1: stored as an I8 tensor described by lacuna.manifest
  int64_t block_cols;     // K must be a multiple of this
  int64_t block_bytes;    // bytes of block_cols weights of one row; zigzag: of 256 outputs of one column

  /// Bytes of the whole matrix. Throws Error when K is no multiple of block_cols or the size overflows.
  int64_t (*size_bytes)(const Layout&, Shape);
  // The next three are nullptr in zigzag layouts, whose functions are in zigzag.h.

  /// Encodes one row: w: [K], out: row_bytes(K) bytes. importance: [K] weights of each input's squared error, or empty
  /// (all equal). Rounding is deterministic. NaN and inf are the caller's to refuse (see find_non_finite).
  void (*encode_row)(const Layout&, std::span<const float> w, std::span<const float> importance,
                     std::span<std::byte> out);
  /// Decodes one row; this function defines the layout. w: [K].
  void (*decode_row)(const Layout&, std::span<const std::byte> row, std::span<float> w);
  /// Checks bytes from a file that decoding alone would not notice (non-finite scales). Returns the index of the first
  /// bad row or -1.
  int64_t (*first_bad_row)(const Layout&, Shape, std::span<const std::byte> bytes);

  bool zigzag = false;
  /// Zigzag: the row layout whose block of 256 weights is a superblock (zz8: whose eight blocks are).
  Id superblock = Id::f32;

  /// Bytes of one row; zigzag: of 256 outputs.
  int64_t row_bytes(int64_t K) const { return K / block_cols * block_bytes; }
  double bits_per_weight() const { return 8.0 * double(block_bytes) / double(zigzag ? 256 : block_cols); }
};

/// All layouts, in the order of Id.
std::span<const Layout> all();
/// Those whose rows are runs of blocks: every one that is not zigzag.
std::span<const Layout> row_layouts();
const Layout& get(Id id);
/// The row layout of the same bits and blocks: q4_K of zz4_k, q8_0 of zz8; a row layout itself.
const Layout& row_layout(const Layout& layout);
/// Throws Error for parameters that the layout does not have or cannot take.
void check_params(const Layout& layout, Params params);
/// nullptr when there is none.
const Layout* find(std::string_view name);
const Layout* find_ggml_type(int type);
/// "f32, f16, ..." for error messages.
std::string_view known_names();
/// The same of row_layouts().
std::string_view known_row_names();

/// decode(encode(w)) of one row of a row layout, in place: the grid that solvers optimise on. w: [K].
void project_row(const Layout& layout, std::span<float> w, std::span<const float> importance = {});

/// Decodes rows [row0, row0 + rows) of a matrix in any layout into out: [rows, K].
void decode_rows(const Layout& layout, Shape shape, std::span<const std::byte> bytes, int64_t row0, int64_t rows,
                 float* out, Params params = {});

/// Layout::first_bad_row for any layout; of a bad superblock the first output.
int64_t first_bad_row(const Layout& layout, Shape shape, std::span<const std::byte> bytes, Params params = {});

/// Index of the first NaN or infinity, or -1.
int64_t find_non_finite(std::span<const float> values);

}  // namespace lacuna::layout
