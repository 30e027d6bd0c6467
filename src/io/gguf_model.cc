#include "io/gguf_model.h"

#include <cmath>
#include <optional>

#include "core/error.h"
#include "io/manifest.h"
#include "io/rope_scaling.h"

namespace lacuna::io {
namespace {

/// GGUF's general.file_type for a file of mostly this layout (llama.cpp's numbering); it has none for zigzag layouts.
std::optional<uint32_t> file_type(layout::Id id) {
  switch (id) {
    case layout::Id::f32:
      return 0;
    case layout::Id::f16:
      return 1;
    case layout::Id::bf16:
      return 32;
    case layout::Id::q4_0:
      return 2;
    case layout::Id::q4_1:
      return 3;
    case layout::Id::q5_0:
      return 8;
    case layout::Id::q5_1:
      return 9;
    case layout::Id::q8_0:
      return 7;
    case layout::Id::q2_K:
      return 10;
    case layout::Id::q3_K:
      return 11;
    case layout::Id::q4_K:
      return 14;
    case layout::Id::q5_K:
      return 16;
    case layout::Id::q6_K:
      return 18;
    default:
      return std::nullopt;
  }
}

}  // namespace

std::vector<float> llama3_rope_factors(const Checkpoint& source) {
  const Metadata& metadata = source.metadata();
  const std::string prefix = source.architecture() + ".rope.";
  if (metadata.string(prefix + "scaling.type").value_or("") != "llama3" || source.find(kRopeFactors)) return {};
  const Llama3Scaling scaling{.factor = metadata.need_number(prefix + "scaling.factor"),
                              .low_freq_factor = metadata.need_number(prefix + "scaling.low_freq_factor"),
                              .high_freq_factor = metadata.need_number(prefix + "scaling.high_freq_factor"),
                              .original_context = metadata.need_number(prefix + "scaling.original_context_length")};
  if (!(scaling.low_freq_factor < scaling.high_freq_factor))
    throw Error("{}: {}scaling.low_freq_factor {} must be less than high_freq_factor {}", source.path(), prefix,
                scaling.low_freq_factor, scaling.high_freq_factor);
  const double base = metadata.need_number(prefix + "freq_base");
  const int64_t n_rot = metadata.need_integer(prefix + "dimension_count");
  std::vector<float> factors;
  for (int64_t i = 0; i < n_rot; i += 2)
    factors.push_back(float(1 / scaling.multiplier(std::pow(base, -double(i) / double(n_rot)))));
  return factors;
}

Metadata gguf_metadata(const Checkpoint& source, layout::Id id) {
  const auto type = file_type(id);
  const bool rope_as_tensor = !llama3_rope_factors(source).empty();
  Metadata out;
  for (const auto& [key, value] : source.metadata().entries())
    if (!key.starts_with("split.") && !key.starts_with("quantize.") && key != kManifestKey &&
        (type || key != "general.file_type") &&
        !(rope_as_tensor && key.starts_with(source.architecture() + ".rope.scaling.")))
      out.set(key, value);
  if (source.vocabulary().model != Vocabulary::Model::none && !out.contains("tokenizer.ggml.model"))
    vocabulary_to_metadata(source.vocabulary(), out);
  out.set("general.quantization_version", uint32_t{2});
  if (type) out.set("general.file_type", *type);
  return out;
}

std::vector<int64_t> gguf_row_order(const Checkpoint& source, const Tensor& tensor) {
  if (source.architecture() != "llama" || source.rope_pairs() != RopePairs::halves) return {};
  const bool q = tensor.name.find(".attn_q.") != std::string::npos;
  const bool k = tensor.name.find(".attn_k.") != std::string::npos;
  if (!q && !k) return {};
  const int64_t n_heads = source.metadata().need_integer("llama.attention.head_count");
  const int64_t heads = q ? n_heads : source.metadata().integer("llama.attention.head_count_kv").value_or(n_heads);
  const int64_t rows = is_matrix(tensor) ? tensor.shape.N : tensor.shape.K;  // a bias is one row of K values
  if (heads <= 0 || rows % heads != 0 || rows / heads % 2 != 0)
    throw Error("{}: {} rows cannot be {} heads of an even size", tensor.name, rows, heads);
  return rope_adjacent_rows(heads, rows / heads);
}

}  // namespace lacuna::io
