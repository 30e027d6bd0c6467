// src/io/manifest.h - `lacuna.manifest`: what the I8 tensors of a GGUF file hold.
//
// A JSON string under one metadata key, so that any GGUF tool can list the file:
//   {"version": 1, "tensors": {NAME: {"layout": LAYOUT, "N": outputs, "K": inputs, "nnz": kept weights,
//    "params": {PARAMETER: integer, ...}, "sha256": 64 hex digits of the source tensor's bytes}, ...}}
// Every key is needed; others are refused. The parameters are those of the layout (layout::parameters): tile_rows of
// the zigzag layouts, group_size of gq, group_size and octets of bm (bm16: octets), group_size and kept_groups of gs,
// none of nm24_q4, f8, nm24_f8 and nm24_bf16. nnz is N*K but in bm and gs, and of the nm24 layouts half of that.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "layout/layout.h"

namespace lacuna::io {

constexpr std::string_view kManifestKey = "lacuna.manifest";
constexpr int64_t kManifestVersion = 1;

struct ManifestTensor {
  std::string layout;
  layout::Shape shape;
  int64_t nnz = 0;  // 0..N*K
  std::map<std::string, int64_t> params;
  std::string sha256;
};

using Manifest = std::map<std::string, ManifestTensor, std::less<>>;  // by tensor name

/// Throws Error (starting with `where`) for anything that is not exactly as above. Layout names are looked up by
/// packed_layout.
Manifest parse_manifest(std::string_view text, const std::string& where);

/// The layout that a manifest names. Throws Error naming the tensor and listing the packed layouts when there is none.
const layout::Layout& packed_layout(const std::string& tensor, const ManifestTensor& entry, const std::string& where);
/// The parameters of an entry of that layout. Throws Error naming the tensor for one that the layout does not have, one
/// that is missing, a value that it does not take, and an nnz that the layout cannot have.
layout::Params packed_params(const std::string& tensor, const ManifestTensor& entry, const layout::Layout& layout,
                             const std::string& where);

/// The entry of a tensor in a packed layout; sha256 is left empty.
ManifestTensor manifest_entry(const layout::Layout& layout, layout::Shape shape, layout::Params params);

/// The inverse of parse_manifest. sha256_at: where each tensor's digest begins in the text, by name. An empty digest is
/// written as zeros, to be filled in there.
std::string format_manifest(const Manifest& manifest, std::map<std::string, size_t, std::less<>>& sha256_at);

}  // namespace lacuna::io
