// src/layout/layout.h - the table of stored layouts: what a weight matrix's canonical bytes mean.
//
// W is [N, K]: N outputs (rows), K inputs (columns). A layout row is {id, name, size, encode, decode, first_bad};
// nothing outside src/layout and the kernel tables says a layout's name. decode is the truth that every kernel is
// tested against.
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
  // Grouped rows (gq.h), bitmask (bm.h), 2:4 (nm24_q4.h).
  gq2, gq3, gq4, gq8, bm2, bm3, bm4, bm8, bm16, nm24_q4,
  // Group-sparse (gs.h).
  gs2, gs3, gs4, gs8, gs16,
  // FP8 and 2:4 for tensor cores (tensor_core.h).
  f8, nm24_f8, nm24_bf16,
};
// clang-format on

enum class Family : uint8_t {
  rows,          // a row is a run of blocks, which encode_row and decode_row handle
  zigzag,        // zigzag.h
  grouped,       // codes with scale and zero per group of inputs: gq.h
  bitmask,       // bm.h
  two_of_four,   // nm24_q4.h
  group_sparse,  // codes of the groups of inputs that are kept: gs.h
  tensor_core,   // FP8 with one scale a row, 2:4 values: tensor_core.h
};

struct Shape {
  int64_t N = 0;  // outputs
  int64_t K = 0;  // inputs
  friend bool operator==(const Shape&, const Shape&) = default;
};

/// What a layout may leave open; the manifest of a file stores it.
struct Params {
  /// Zigzag layouts: outputs that lie together in one column, a multiple of 256; 0: whole columns.
  int64_t tile_rows = 0;
  /// gq and bm layouts: inputs of a row that share scale and zero; 0: the whole row. gs layouts: and are kept together;
  /// 8, 16, 32, 64 or 128.
  int64_t group_size = 0;
  /// bm layouts: eight codes each, of the whole matrix.
  int64_t octets = 0;
  /// gs layouts: groups that are kept, of the whole matrix.
  int64_t kept_groups = 0;
  /// bm and gs layouts: weights that are kept.
  int64_t nnz = 0;
  friend bool operator==(const Params&, const Params&) = default;
};

/// A parameter as the manifest names it.
struct Parameter {
  std::string_view name;
  int64_t Params::*value;
};

struct Layout {
  Id id;
  std::string_view name;  // as on the command line and in `inspect`: "q4_K"
  int ggml_type;          // type number in GGUF; -1: stored as an I8 tensor described by lacuna.manifest
  int64_t block_cols;     // K must be a multiple of this
  int64_t block_bytes;    // bytes of block_cols weights of one row; zigzag: of 256 outputs of one column; others: 0

  int64_t (*size)(const Layout&, Shape, Params);

  /// Encodes one row: w: [K], out: row_bytes(K) bytes. importance: [K] weights of each input's squared error, or empty
  /// (all equal). Rounding is deterministic. NaN and inf are the caller's to refuse (see find_non_finite). nullptr
  /// unless the family is `rows`, like decode_row.
  void (*encode_row)(const Layout&, std::span<const float> w, std::span<const float> importance,
                     std::span<std::byte> out);
  /// Decodes one row. w: [K].
  void (*decode_row)(const Layout&, std::span<const std::byte> row, std::span<float> w);
  /// Decodes rows [row0, row0 + rows) into out: [rows, K]; this function defines the layout.
  void (*decode)(const Layout&, Shape, Params, std::span<const std::byte> bytes, int64_t row0, int64_t rows,
                 float* out);
  /// Checks bytes from a file that decoding alone would not notice (non-finite scales). Returns the index of the first
  /// bad row or -1.
  int64_t (*first_bad)(const Layout&, Shape, Params, std::span<const std::byte> bytes);

  Family family = Family::rows;
  bool zigzag = false;
  /// The row layout of the same bits; zigzag: the one whose block of 256 weights is a superblock (zz8: whose eight
  /// blocks are).
  Id row_id = Id::f32;
  int bits = 0;  // of a code; gq, bm, gs and nm24_q4

  /// Bytes of the whole matrix. Throws Error when K is no multiple of block_cols or the size overflows.
  int64_t size_bytes(Shape shape, Params params = {}) const;
  /// Bytes of one row of a row layout; zigzag: of 256 outputs.
  int64_t row_bytes(int64_t K) const { return K / block_cols * block_bytes; }
  /// Of a gq or bm layout: with groups of 128, of a gs layout: of 16; all weights kept. Of f8 and nm24_f8: without the
  /// scale of a row.
  double bits_per_weight() const;
};

/// All layouts, in the order of Id.
std::span<const Layout> all();
/// Those of the family `rows`: whose rows are runs of blocks.
std::span<const Layout> row_layouts();
const Layout& get(Id id);
/// The row layout of the same bits: q4_K of zz4_k and of gq4, q8_0 of zz8; a row layout itself.
const Layout& row_layout(const Layout& layout);
/// The parameters that a layout has; empty: none.
std::span<const Parameter> parameters(const Layout& layout);
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

/// Whether weights are E4M3 codes, which E4M3 activations are multiplied with: f8 and nm24_f8.
bool has_e4m3_codes(const Layout& layout);
/// Whether matrices of a layout keep numbers of weights of their own: bm and gs.
bool counts_kept(const Layout& layout);
/// Weights that are kept: all of them, half of a 2:4 layout's (tensor_core.h says which of a last group), params.nnz of
/// a bm or gs layout.
int64_t kept_weights(const Layout& layout, Shape shape, Params params);

/// Layout::first_bad; of a bad superblock the first output.
int64_t first_bad_row(const Layout& layout, Shape shape, std::span<const std::byte> bytes, Params params = {});

/// Throws Error saying what is wrong where first_bad_row finds something.
void check_bytes(const Layout& layout, Shape shape, std::span<const std::byte> bytes, Params params = {});

/// Index of the first NaN or infinity, or -1.
int64_t find_non_finite(std::span<const float> values);

}  // namespace lacuna::layout
