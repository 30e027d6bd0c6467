#include "model/synth.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numbers>
#include <optional>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/progress.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "core/sha256.h"
#include "io/checkpoint.h"
#include "io/gguf_writer.h"
#include "layout/fallback.h"
#include "layout/grouped.h"
#include "layout/tensor_core.h"
#include "layout/two_of_four.h"
#include "layout/zigzag.h"

namespace lacuna::model {
namespace {

constexpr int64_t kRunCols = 256;    // weights of one run; a multiple of every layout's block
constexpr int64_t kPoolRuns = 2048;  // distinct runs: 512K weights, 288 KiB in q4_K
constexpr int64_t kChunkBytes = int64_t{16} << 20;
constexpr int64_t kSuperblocksPerDraw = 256;  // superblocks of one random generator
constexpr int64_t kPositionOffset = 2;        // OPT's position table begins with two unused rows
constexpr int64_t kOriginalContext = 8192;    // of Llama 3's rotary scaling

/// GPT-2's printable stand-in for each byte, as UTF-8.
std::string byte_token(int byte) {
  const auto printable = [](int b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174; };
  int code = byte;
  if (!printable(byte)) {
    code = 256;
    for (int b = 0; b < byte; ++b) code += printable(b) ? 0 : 1;
  }
  if (code < 0x80) return std::string(1, char(code));
  return {char(0xc0 | (code >> 6)), char(0x80 | (code & 0x3f))};
}

Vocabulary stand_in_vocabulary(int64_t size) {
  const std::string space = byte_token(' ');
  Vocabulary out;
  out.model = Vocabulary::Model::byte_bpe;
  out.pre = "gpt-2";
  for (int byte = 0; byte < 256; ++byte) out.tokens.push_back(byte_token(byte));
  out.tokens.push_back(space + space);
  out.merges.push_back(space + " " + space);
  for (int64_t id = int64_t(out.tokens.size()); id < size - 2; ++id) out.tokens.push_back(fmt::format("[{}]", id));
  out.types.assign(out.tokens.size(), TokenType::normal);
  for (const char* control : {"<|begin|>", "<|end|>"}) {
    out.tokens.push_back(control);
    out.types.push_back(TokenType::control);
  }
  out.add_bos = false;
  out.bos_id = int32_t(size - 2);
  out.eos_id = int32_t(size - 1);
  return out;
}

io::Metadata make_metadata(const ModelShape& shape, int64_t n_layers) {
  io::Metadata out;
  const std::string prefix = std::string(shape.architecture) + ".";
  const auto count = [&](const char* key, int64_t value) { out.set(prefix + key, uint32_t(value)); };
  out.set("general.architecture", std::string(shape.architecture));
  out.set("general.type", std::string("model"));
  out.set("general.name", std::string(shape.name) + " with random weights");
  count("block_count", n_layers);
  count("context_length", shape.n_ctx);
  count("embedding_length", shape.n_embd);
  count("feed_forward_length", shape.n_ff);
  count("vocab_size", shape.n_vocab);
  count("attention.head_count", shape.n_heads);
  count("attention.head_count_kv", shape.n_kv_heads);
  if (shape.rope_base > 0) {
    count("attention.key_length", shape.head_dim);
    count("attention.value_length", shape.head_dim);
    count("rope.dimension_count", shape.head_dim);
    out.set(prefix + "rope.freq_base", float(shape.rope_base));
    out.set(prefix + "attention.layer_norm_rms_epsilon", float(shape.norm_eps));
  } else {
    out.set(prefix + "attention.layer_norm_epsilon", float(shape.norm_eps));
    count("position_offset", kPositionOffset);
    count("word_embed_proj_dim", shape.n_embd);
    out.set(prefix + "activation_function", std::string("relu"));
    out.set(prefix + "do_layer_norm_before", true);
    out.set(prefix + "final_layer_norm", true);
  }
  out.set("general.quantization_version", uint32_t{2});
  io::vocabulary_to_metadata(stand_in_vocabulary(shape.n_vocab), out);
  return out;
}

/// A tensor and how it is filled.
struct Part {
  enum class Fill : uint8_t { ones, zeros, random, rope_factors };
  io::TensorPlan plan;
  Fill fill = Fill::random;
};

class Plan {
 public:
  Plan(const ModelShape& shape, const SynthOptions& options, int64_t n_layers) : shape_(shape), options_(options) {
    const bool learned = shape.rope_base == 0;
    matrix("token_embd", shape.n_vocab, shape.n_embd,
           shape.tied ? options.head_layout : layout::row_layout(layout::get(options.layout)).id);
    if (learned) matrix("position_embd", shape.n_ctx + kPositionOffset, shape.n_embd, layout::Id::f16);
    if (shape.rope_factor != 1)
      parts.push_back(
          {{"rope_freqs.weight", &layout::get(layout::Id::f32), {shape.head_dim / 2}}, Part::Fill::rope_factors});
    const int64_t q = shape.n_heads * shape.head_dim, kv = shape.n_kv_heads * shape.head_dim;
    for (int64_t i = 0; i < n_layers; ++i) {
      const std::string blk = fmt::format("blk.{}.", i);
      norm(blk + "attn_norm", learned);
      linear(blk + "attn_q", q, shape.n_embd, shape.qkv_bias);
      linear(blk + "attn_k", kv, shape.n_embd, shape.qkv_bias);
      linear(blk + "attn_v", kv, shape.n_embd, shape.qkv_bias);
      linear(blk + "attn_output", shape.n_embd, q, learned);
      norm(blk + "ffn_norm", learned);
      if (!learned) linear(blk + "ffn_gate", shape.n_ff, shape.n_embd, false);
      linear(blk + "ffn_up", shape.n_ff, shape.n_embd, learned);
      linear(blk + "ffn_down", shape.n_embd, shape.n_ff, learned);
    }
    norm("output_norm", learned);
    if (!shape.tied) matrix("output", shape.n_vocab, shape.n_embd, options.head_layout);
  }
  std::vector<Part> parts;

 private:
  void matrix(const std::string& name, int64_t N, int64_t K, layout::Id id) {
    const layout::Layout& layout = layout::get(layout::fitting_layout(id, K));
    const bool own = &layout == &layout::get(options_.layout) && layout.family != layout::Family::rows;
    const layout::Params params =
        own ? random_params(layout, {N, K}, options_.params, options_.weight_sparsity) : layout::Params{};
    parts.push_back({{name + ".weight", &layout, {N, K}, params}, Part::Fill::random});
  }
  void vector(const std::string& name, int64_t n, Part::Fill fill) {
    parts.push_back({{name, &layout::get(layout::Id::f32), {n}}, fill});
  }
  void linear(const std::string& name, int64_t N, int64_t K, bool bias) {
    matrix(name, N, K, options_.layout);
    if (bias) vector(name + ".bias", N, Part::Fill::zeros);
  }
  void norm(const std::string& name, bool bias) {
    vector(name + ".weight", shape_.n_embd, Part::Fill::ones);
    if (bias) vector(name + ".bias", shape_.n_embd, Part::Fill::zeros);
  }
  const ModelShape& shape_;
  const SynthOptions& options_;
};

/// Encoded runs of one layout and one row length.
std::vector<std::byte> encode_pool(const layout::Layout& layout, int64_t K, uint64_t seed, ThreadPool& pool) {
  const int64_t run_bytes = layout.row_bytes(kRunCols);
  std::vector<std::byte> out(size_t(run_bytes * kPoolRuns));
  const double deviation = 1.0 / std::sqrt(double(K));
  pool.parallel_for(kPoolRuns, 32, [&](int64_t begin, int64_t end) {
    std::vector<float> w(kRunCols);
    for (int64_t run = begin; run < end; ++run) {
      Rng rng(seed ^ (uint64_t(run) << 20) ^ (uint64_t(K) << 40) ^ uint64_t(layout.id));
      for (float& x : w) x = float(rng.normal() * deviation);
      layout.encode_row(layout, w, {}, std::span(out).subspan(size_t(run * run_bytes), size_t(run_bytes)));
    }
  });
  return out;
}

/// Superblocks [first, first + count) of a zigzag matrix, drawn from `runs`. first: a multiple of kSuperblocksPerDraw.
void draw_superblocks(const layout::Layout& layout, const std::vector<std::byte>& runs, uint64_t seed, int64_t first,
                      int64_t count, ThreadPool& pool, std::byte* out) {
  const int64_t bytes = layout.block_bytes;
  pool.parallel_for(count, kSuperblocksPerDraw, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      Rng rng(seed ^ uint64_t((first + i) / kSuperblocksPerDraw));
      for (const int64_t last = std::min(end, i + kSuperblocksPerDraw); i < last; ++i)
        std::memcpy(out + i * bytes, runs.data() + int64_t(rng.below(kPoolRuns)) * bytes, size_t(bytes));
    }
  });
}

/// Rows [first, first + count) of a matrix of K inputs, each put together from `runs`.
void draw_rows(const layout::Layout& layout, int64_t K, const std::vector<std::byte>& runs, uint64_t seed,
               int64_t first, int64_t count, ThreadPool& pool, std::byte* out) {
  const int64_t row_bytes = layout.row_bytes(K), run_bytes = layout.row_bytes(kRunCols);
  pool.parallel_for(count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Rng rng(seed ^ uint64_t(first + i));
      std::byte* row = out + i * row_bytes;
      for (int64_t at = 0; at < row_bytes; at += run_bytes)
        std::memcpy(row + at, runs.data() + int64_t(rng.below(kPoolRuns)) * run_bytes,
                    size_t(std::min(run_bytes, row_bytes - at)));
    }
  });
}

/// Writes a zigzag matrix of superblocks drawn from `runs`.
void write_superblocks(const io::TensorPlan& plan, const std::vector<std::byte>& runs, uint64_t seed, ThreadPool& pool,
                       io::GgufWriter& writer, std::optional<Progress>& progress) {
  const int64_t bytes = plan.layout->block_bytes;
  const int64_t chunk_superblocks = kChunkBytes / bytes / kSuperblocksPerDraw * kSuperblocksPerDraw;
  const int64_t count = layout::super_rows(plan.dims[0]) * plan.dims[1];
  std::vector<std::byte> chunk;
  for (int64_t first = 0; first < count; first += chunk_superblocks) {
    const int64_t superblocks = std::min(chunk_superblocks, count - first);
    chunk.resize(size_t(superblocks * bytes));
    draw_superblocks(*plan.layout, runs, seed, first, superblocks, pool, chunk.data());
    writer.write(chunk);
    if (progress) progress->add(int64_t(chunk.size()));
  }
}

// ---- gq, bm, gs, nm24_q4: codes in groups along a row ----

/// Of a row's first `cols` inputs, or groups of gs, those that are kept.
int64_t kept_before(int64_t cols, double sparsity) { return cols - int64_t(double(cols) * sparsity + 1e-6); }

/// Inputs that are kept or dropped together.
int64_t kept_together(const layout::Layout& layout, int64_t group_size) {
  return layout.family == layout::Family::group_sparse ? group_size : 1;
}

/// Runs of `cols` weights of which `kept` are kept, or `kept` groups of `together`; nm24_q4: two of every four.
struct CodeRuns {
  int64_t cols = 0;
  std::vector<float> value;         // [kPoolRuns, cols], in deviations
  std::vector<uint8_t> code, keep;  // [kPoolRuns, cols]
};

constexpr float kReach = 3;  // deviations from zero to the outermost code

CodeRuns draw_code_runs(const layout::Layout& layout, int64_t cols, int64_t together, int64_t kept, uint64_t seed,
                        ThreadPool& pool) {
  const auto size = size_t(kPoolRuns * cols);
  CodeRuns out{cols, std::vector<float>(size), std::vector<uint8_t>(size), std::vector<uint8_t>(size)};
  const float top = layout.bits < 16 ? float((1 << layout.bits) - 1) : 0, zero = std::ceil(top / 2);
  pool.parallel_for(kPoolRuns, 32, [&](int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) {
      Rng rng(seed ^ (uint64_t(run) << 20) ^ (uint64_t(cols * 257 + kept) << 40) ^ uint64_t(layout.id));
      const int64_t span = layout.family == layout::Family::two_of_four ? 4 : cols;  // inputs of which some are kept
      int64_t left = 0;
      bool keep = false;
      for (int64_t k = 0; k < cols; ++k) {
        const auto at = size_t(run * cols + k);
        if (k % span == 0) left = span == cols ? kept : 2;
        if (k % together == 0) {
          keep = int64_t(rng.below(uint64_t((span - k % span + together - 1) / together))) < left;
          left -= keep;
        }
        out.keep[at] = keep;
        out.value[at] = float(rng.normal());
        out.code[at] = uint8_t(std::clamp(std::nearbyint(out.value[at] * top / (2 * kReach)) + zero, 0.0f, top));
      }
    }
  });
  return out;
}

/// The bytes of a random matrix.
std::vector<std::byte> random_codes(const layout::Layout& layout, layout::Shape shape, layout::Params params,
                                    double sparsity, uint64_t seed, ThreadPool& pool) {
  const auto [N, K] = shape;
  const int64_t rows = N, cols = K;  // lambdas do not capture structured bindings in every compiler
  const bool two_of_four = layout.family == layout::Family::two_of_four, values = layout.bits == 16;
  const int64_t group_size = two_of_four ? layout.block_cols : params.group_size;
  const int64_t groups = layout::group_count(K, group_size);
  const double deviation = 1 / std::sqrt(double(K) * (two_of_four ? 0.5 : 1 - sparsity));
  std::map<std::pair<int64_t, int64_t>, CodeRuns> pools;  // by cols and kept
  const int64_t together = kept_together(layout, group_size);
  const auto kept_at = [&](int64_t k) { return kept_before((k + together - 1) / together, sparsity); };
  const auto runs_at = [&](int64_t k) -> const CodeRuns& {
    const int64_t width = std::min(kRunCols, cols - k);
    return pools.at({width, kept_at(k + width) - kept_at(k)});
  };
  for (int64_t k = 0; k < K; k += kRunCols) {
    const int64_t width = std::min(kRunCols, K - k);
    const int64_t kept = kept_at(k + width) - kept_at(k);
    if (!pools.contains({width, kept}))
      pools[{width, kept}] = draw_code_runs(layout, width, together, kept, seed, pool);
  }
  std::vector<uint8_t> code(values ? 0 : size_t(N * K)), keep(size_t(N * K));
  std::vector<float> weight(values ? size_t(N * K) : 0), scale(size_t(N * groups)), zero(scale.size());
  const float top = values ? 1 : float((1 << layout.bits) - 1);
  pool.parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      Rng rng(seed ^ uint64_t(n) << 8);
      for (int64_t k = 0; k < cols; k += kRunCols) {
        const CodeRuns& runs = runs_at(k);
        const auto from = size_t(int64_t(rng.below(kPoolRuns)) * runs.cols), to = size_t(n * cols + k);
        std::memcpy(&keep[to], &runs.keep[from], size_t(runs.cols));
        if (!values) std::memcpy(&code[to], &runs.code[from], size_t(runs.cols));
        for (int64_t i = 0; values && i < runs.cols; ++i)
          weight[to + size_t(i)] = float(deviation) * runs.value[from + size_t(i)];
      }
      for (int64_t g = n * groups; g < (n + 1) * groups; ++g) {
        const double step = deviation * 2 * double(kReach) / double(top) * (0.9 + 0.2 * rng.uniform());
        scale[size_t(g)] = to_float(to_f16(float(step)));
        zero[size_t(g)] = std::ceil(top / 2);
      }
    }
  });
  std::vector<std::byte> out;
  if (values)
    layout::pack_values(layout, shape, {.group_size = group_size}, weight, keep, out, &pool);
  else
    layout::pack_grouped(layout, shape, {.group_size = group_size}, {code, scale, zero, keep}, out, &pool);
  return out;
}

std::vector<float> vector_values(const Part& part, const ModelShape& shape) {
  std::vector<float> out(size_t(part.plan.dims[0]), part.fill == Part::Fill::ones ? 1.0f : 0.0f);
  if (part.fill != Part::Fill::rope_factors) return out;
  for (size_t i = 0; i < out.size(); ++i) {
    const double turns = double(kOriginalContext) *
                         std::pow(shape.rope_base, -2.0 * double(i) / double(shape.head_dim)) / (2 * std::numbers::pi);
    const double kept = std::clamp((turns - 1) / (4 - 1), 0.0, 1.0);  // low and high frequency factors 1 and 4
    out[i] = float(1 / (kept + (1 - kept) / shape.rope_factor));
  }
  return out;
}

/// Normal weights; of every four the two largest where the layout is 2:4.
void encode_random(const layout::Layout& layout, layout::Shape shape, uint64_t seed, ThreadPool& pool,
                   std::span<std::byte> out) {
  const auto K = size_t(shape.K);
  std::vector<float> w(size_t(shape.N) * K), sizes(w.size());
  std::vector<uint8_t> keep(layout::tensor_core_row(layout, shape.K).sparse ? w.size() : 0);
  const float deviation = 1 / std::sqrt(float(K));
  pool.parallel_for(shape.N, 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      Rng rng(seed ^ uint64_t(n) << 8);
      for (size_t i = size_t(n) * K; i < size_t(n + 1) * K; ++i)
        w[i] = deviation * float(rng.normal()), sizes[i] = std::fabs(w[i]);
      if (!keep.empty())
        layout::keep_largest(std::span(sizes).subspan(size_t(n) * K, K), std::span(keep).subspan(size_t(n) * K, K));
    }
  });
  layout::encode_tensor_core(layout, shape, w, keep, out, &pool);
}

}  // namespace

int64_t synthesize(const ModelShape& shape, const std::string& path, const SynthOptions& options, ThreadPool& pool) {
  const int64_t n_layers = options.n_layers > 0 ? options.n_layers : shape.n_layers;
  if (n_layers > shape.n_layers)
    throw Error("{} has {} layers, {} were asked for", shape.name, shape.n_layers, n_layers);
  layout::check_params(layout::get(options.layout), options.params);
  if (options.weight_sparsity != 0)
    random_params(layout::get(options.layout), {}, options.params, options.weight_sparsity);
  if (layout::get(options.head_layout).family != layout::Family::rows)
    throw Error("the output head cannot be {}: give it a row layout, one of {}", layout::get(options.head_layout).name,
                layout::known_row_names());
  const Plan plan(shape, options, n_layers);
  std::vector<io::TensorPlan> tensors;
  int64_t total = 0;
  for (const Part& part : plan.parts) {
    tensors.push_back(part.plan);
    total += part.plan.layout->size_bytes({part.plan.dims.size() > 1 ? part.plan.dims[0] : 1, part.plan.dims.back()},
                                          part.plan.params);
  }
  io::GgufWriter writer(path, make_metadata(shape, n_layers), std::move(tensors));

  std::optional<Progress> progress;
  if (options.progress) progress.emplace("synth", total, "B");
  std::map<std::pair<const layout::Layout*, int64_t>, std::vector<std::byte>> pools;
  std::vector<std::byte> chunk;
  for (size_t t = 0; t < plan.parts.size(); ++t) {
    const Part& part = plan.parts[t];
    if (part.fill != Part::Fill::random) {
      const std::vector<float> values = vector_values(part, shape);
      writer.write(std::as_bytes(std::span(values)));
      continue;
    }
    const std::string source = fmt::format("{} {}", part.plan.name, options.seed);
    const uint64_t seed = options.seed ^ (uint64_t(t) << 40);
    if (part.plan.layout->family != layout::Family::rows && !part.plan.layout->zigzag) {
      writer.write(random_codes(*part.plan.layout, {part.plan.dims[0], part.plan.dims[1]}, part.plan.params,
                                options.weight_sparsity, seed, pool));
      writer.set_source_sha256(part.plan.name, sha256_hex(std::as_bytes(std::span(source))));
      continue;
    }
    const bool zigzag = part.plan.layout->zigzag;
    const layout::Layout& layout = layout::row_layout(*part.plan.layout);
    const int64_t N = part.plan.dims[0], K = part.plan.dims[1];
    std::vector<std::byte>& runs = pools[{&layout, K}];
    if (runs.empty()) runs = encode_pool(layout, K, options.seed, pool);
    if (zigzag) {
      write_superblocks(part.plan, runs, seed, pool, writer, progress);
      writer.set_source_sha256(part.plan.name, sha256_hex(std::as_bytes(std::span(source))));
      continue;
    }
    const int64_t row_bytes = layout.row_bytes(K), rows = std::max<int64_t>(1, kChunkBytes / row_bytes);
    for (int64_t row0 = 0; row0 < N; row0 += rows) {
      const int64_t count = std::min(rows, N - row0);
      chunk.resize(size_t(count * row_bytes));
      draw_rows(layout, K, runs, seed, row0, count, pool, chunk.data());
      writer.write(chunk);
      if (progress) progress->add(count * row_bytes);
    }
  }
  return writer.finish();
}

layout::Params random_params(const layout::Layout& layout, layout::Shape shape, layout::Params params,
                             double weight_sparsity) {
  const bool masked = layout::counts_kept(layout);
  if (layout.family == layout::Family::tensor_core)
    throw Error("there are no random models in {}; choose another layout", layout.name);
  if (!(weight_sparsity >= 0 && weight_sparsity < 1))
    throw Error("a weight sparsity of {}; it must lie between 0 and 1", weight_sparsity);
  if (weight_sparsity != 0 && !masked && !(layout.family == layout::Family::two_of_four && weight_sparsity == 0.5))
    throw Error("{} cannot have a weight sparsity of {}; the bm and gs layouts can, and nm24_q4 always has 0.5",
                layout.name, weight_sparsity);
  if (!masked) return params;
  const int64_t together = kept_together(layout, params.group_size);
  if (shape.K % together != 0)
    throw Error("random matrices in {} with groups of {} need a multiple of that as K, which is {}", layout.name,
                together, shape.K);
  const int64_t kept = kept_before(shape.K / together, weight_sparsity);
  if (together > 1) {
    params.kept_groups = shape.N * kept;
    params.nnz = params.kept_groups * together;
    return params;
  }
  params.nnz = shape.N * kept;
  params.octets = shape.N * ((kept + 7) / 8);
  return params;
}

HugeBuffer random_matrix(const layout::Layout& layout, layout::Shape shape, layout::Params params, uint64_t seed,
                         ThreadPool& pool, double weight_sparsity) {
  layout::check_params(layout, params);
  HugeBuffer out(size_t(layout.size_bytes(shape, params)));
  if (layout.family == layout::Family::tensor_core) {
    encode_random(layout, shape, seed, pool, out.bytes());
    return out;
  }
  if (layout.family != layout::Family::rows && !layout.zigzag) {
    const auto bytes = random_codes(layout, shape, params, weight_sparsity, seed, pool);
    if (bytes.size() != out.size())
      throw Error("a random matrix in {} has {} bytes, its parameters say {}; take them from random_params()",
                  layout.name, bytes.size(), out.size());
    std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }
  const layout::Layout& row = layout::row_layout(layout);
  const std::vector<std::byte> runs = encode_pool(row, shape.K, seed, pool);
  if (layout.zigzag)
    draw_superblocks(layout, runs, seed, 0, layout::super_rows(shape.N) * shape.K, pool, out.data());
  else
    draw_rows(row, shape.K, runs, seed, 0, shape.N, pool, out.data());
  return out;
}

}  // namespace lacuna::model
