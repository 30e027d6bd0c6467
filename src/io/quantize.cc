#include "io/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <optional>

#include "core/error.h"
#include "core/mapped_file.h"
#include "core/progress.h"
#include "io/gguf_writer.h"
#include "io/manifest.h"
#include "layout/fallback.h"

namespace lacuna::io {
namespace {

constexpr int64_t kChunkBytes = int64_t{8} << 20;  // of the output, in memory at once
constexpr int64_t kRowsPerTask = 4;
constexpr std::string_view kRopeFactors = "rope_freqs.weight";
constexpr float kLargestHalf = 65504;
constexpr double kHeadBits = 6.5;  // a head below q6_K costs more quality than it saves

bool is_matrix(const Tensor& tensor) { return tensor.dims.size() >= 2 && tensor.name.ends_with(".weight"); }

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

layout::Id wanted_layout(const Checkpoint& source, const Tensor& tensor, const QuantizeOptions& options) {
  if (!is_matrix(tensor)) return layout::Id::f32;
  if (tensor.name == "position_embd.weight") return tensor.layout->id;
  if (options.pure) return options.layout;
  const bool embedding = tensor.name == "token_embd.weight";
  const bool head = tensor.name == "output.weight" || (embedding && !source.find("output.weight"));
  if (embedding && options.embedding_layout) return *options.embedding_layout;
  if (!head) return options.layout;
  if (options.head_layout) return *options.head_layout;
  return layout::get(options.layout).bits_per_weight() < kHeadBits ? layout::Id::q6_K : options.layout;
}

/// What each rotary frequency is divided by under Llama 3.1's scaling, which GGUF stores as a tensor, not as keys;
/// empty for models without it. (Frequencies that turn often within the original context stay, rare ones are stretched
/// by `factor`, those between are blended.)
std::vector<float> llama3_rope_factors(const Checkpoint& source) {
  const Metadata& metadata = source.metadata();
  const std::string prefix = source.architecture() + ".rope.";
  if (metadata.string(prefix + "scaling.type").value_or("") != "llama3" || source.find(kRopeFactors)) return {};
  const double factor = metadata.need_number(prefix + "scaling.factor");
  const double low = metadata.need_number(prefix + "scaling.low_freq_factor");
  const double high = metadata.need_number(prefix + "scaling.high_freq_factor");
  const double original = metadata.need_number(prefix + "scaling.original_context_length");
  if (!(low < high))
    throw Error("{}: {}scaling.low_freq_factor {} must be less than high_freq_factor {}", source.path(), prefix, low,
                high);
  const double base = metadata.need_number(prefix + "freq_base");
  const int64_t n_rot = metadata.need_integer(prefix + "dimension_count");
  std::vector<float> factors;
  for (int64_t i = 0; i < n_rot; i += 2) {
    const double turns = original * std::pow(base, -double(i) / double(n_rot)) / (2 * std::numbers::pi);
    const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    factors.push_back(float(1 / (kept + (1 - kept) / factor)));
  }
  return factors;
}

Metadata output_metadata(const Checkpoint& source, const QuantizeOptions& options, bool rope_as_tensor) {
  Metadata out;
  for (const auto& [key, value] : source.metadata().entries())
    if (!key.starts_with("split.") && !key.starts_with("quantize.") && key != kManifestKey &&
        key != "general.file_type" && !(rope_as_tensor && key.starts_with(source.architecture() + ".rope.scaling.")))
      out.set(key, value);
  if (source.vocabulary().model != Vocabulary::Model::none && !out.contains("tokenizer.ggml.model"))
    vocabulary_to_metadata(source.vocabulary(), out);
  out.set("general.quantization_version", uint32_t{2});
  if (const auto type = file_type(options.layout)) out.set("general.file_type", *type);
  return out;
}

/// Row of the output -> row of the source; empty: the same.
std::vector<int64_t> row_order(const Checkpoint& source, const Tensor& tensor) {
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

/// Converts the rows [row0, row0 + rows) of the output into `out`.
class Converter {
 public:
  Converter(const Checkpoint& source, const Tensor& tensor, const layout::Layout& to)
      : tensor_(tensor), to_(to), matrix_(is_matrix(tensor)), order_(row_order(source, tensor)) {
    source_row_bytes_ = tensor.layout->row_bytes(tensor.shape.K);
    row_bytes_ = to.row_bytes(tensor.shape.K);
  }
  void rows(int64_t row0, int64_t count, ThreadPool& pool, std::byte* out) const {
    pool.parallel_for(count, kRowsPerTask, [&](int64_t begin, int64_t end) {
      std::vector<float> w(size_t(tensor_.shape.K));
      for (int64_t i = begin; i < end; ++i) row(row0 + i, w, {out + i * row_bytes_, size_t(row_bytes_)});
    });
  }

 private:
  void row(int64_t n, std::vector<float>& w, std::span<std::byte> out) const {
    const int64_t from = matrix_ && !order_.empty() ? order_[size_t(n)] : n;
    const auto bytes = tensor_.bytes.subspan(size_t(from * source_row_bytes_), size_t(source_row_bytes_));
    tensor_.layout->decode_row(*tensor_.layout, bytes, w);
    if (const int64_t bad = layout::find_non_finite(w); bad >= 0)
      throw Error("{}: the value at row {}, column {} is {}; a model with NaN or infinity cannot be quantized",
                  tensor_.name, from, bad, w[size_t(bad)]);
    if (tensor_.layout == &to_ && (matrix_ || order_.empty())) {
      std::memcpy(out.data(), bytes.data(), bytes.size());
      return;
    }
    if (!matrix_ && !order_.empty()) {
      const std::vector<float> unordered = w;
      for (size_t k = 0; k < w.size(); ++k) w[k] = unordered[size_t(order_[k])];
    }
    to_.encode_row(to_, w, {}, out);
    // f16 values and f16 scales saturate, which only rows this large can show.
    if (const float largest = magnitude(w); largest > kLargestHalf) {
      std::vector<float> stored(w.size());
      to_.decode_row(to_, out, stored);
      if (to_.id == layout::Id::f16 || magnitude(stored) < 0.75f * largest)
        throw Error("{}: row {} has values that {} cannot hold (its largest magnitude is {}); try bf16", tensor_.name,
                    from, to_.name, largest);
    }
  }
  static float magnitude(std::span<const float> w) {
    float largest = 0;
    for (const float x : w) largest = std::max(largest, std::abs(x));
    return largest;
  }

  const Tensor& tensor_;
  const layout::Layout& to_;
  bool matrix_;
  std::vector<int64_t> order_;
  int64_t source_row_bytes_ = 0, row_bytes_ = 0;
};

}  // namespace

std::vector<const QuantizeReport::Tensor*> QuantizeReport::fell_back() const {
  std::vector<const Tensor*> out;
  for (const Tensor& tensor : tensors)
    if (tensor.stored != tensor.wanted) out.push_back(&tensor);
  return out;
}

QuantizeReport plan_quantize(const Checkpoint& source, const QuantizeOptions& options) {
  if (source.tensors().empty())
    throw Error("{}: the model has no tensors, so there is nothing to quantize", source.path());
  QuantizeReport report;
  for (const Tensor& tensor : source.tensors()) {
    const layout::Id wanted = wanted_layout(source, tensor, options);
    const layout::Layout& stored = layout::get(layout::fitting_layout(wanted, tensor.shape.K));
    report.tensors.push_back({.name = tensor.name,
                              .dims = tensor.dims,
                              .source = tensor.layout,
                              .wanted = &layout::get(wanted),
                              .stored = &stored,
                              .count = tensor.shape.N * tensor.shape.K,
                              .bytes = stored.size_bytes(stored, tensor.shape)});
    const QuantizeReport::Tensor& planned = report.tensors.back();
    report.params += planned.count;
    report.bytes += planned.bytes;
    const std::string from(tensor.layout->name);
    if (tensor.layout->bits_per_weight() < 16 && tensor.layout != planned.stored &&
        std::find(report.requantized.begin(), report.requantized.end(), from) == report.requantized.end())
      report.requantized.push_back(from);
  }
  if (const auto factors = int64_t(llama3_rope_factors(source).size()); factors > 0) {
    const layout::Layout* f32 = &layout::get(layout::Id::f32);
    report.tensors.push_back({std::string(kRopeFactors), {factors}, f32, f32, f32, factors, factors * 4});
    report.params += factors;
    report.bytes += factors * 4;
  }
  if (const auto fell = report.fell_back(); options.strict && !fell.empty())
    throw Error(
        "{} of {} tensors do not fit {} (first: {}, rows of {}, not a multiple of {}); leave out --strict to "
        "store them as {}",
        fell.size(), report.tensors.size(), fell[0]->wanted->name, fell[0]->name, fell[0]->dims.back(),
        fell[0]->wanted->block_cols, fell[0]->stored->name);
  return report;
}

QuantizeReport quantize(const Checkpoint& source, const std::string& path, const QuantizeOptions& options,
                        ThreadPool& pool) {
  QuantizeReport report = plan_quantize(source, options);
  std::vector<TensorPlan> plan;
  for (const QuantizeReport::Tensor& tensor : report.tensors) plan.push_back({tensor.name, tensor.stored, tensor.dims});
  const std::vector<float> rope_factors = llama3_rope_factors(source);
  GgufWriter writer(path, output_metadata(source, options, !rope_factors.empty()), std::move(plan));

  std::optional<Progress> progress;
  if (options.progress) progress.emplace("quantize", report.bytes, "B");
  std::vector<std::byte> chunk;
  for (size_t t = 0; t < source.tensors().size(); ++t) {
    const Tensor& tensor = source.tensors()[t];
    const layout::Layout& to = *report.tensors[t].stored;
    const Converter converter(source, tensor, to);
    const int64_t row_bytes = to.row_bytes(tensor.shape.K);
    const int64_t rows = std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, row_bytes));
    for (int64_t row0 = 0; row0 < tensor.shape.N; row0 += rows) {
      const int64_t count = std::min(rows, tensor.shape.N - row0);
      chunk.resize(size_t(count * row_bytes));
      converter.rows(row0, count, pool, chunk.data());
      writer.write(chunk);
      if (progress) progress->add(count * row_bytes);
    }
    MappedFile::release(tensor.bytes);
  }
  if (!rope_factors.empty()) writer.write(std::as_bytes(std::span(rope_factors)));
  report.file_bytes = writer.finish();
  return report;
}

}  // namespace lacuna::io
