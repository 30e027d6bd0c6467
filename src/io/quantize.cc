#include "io/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>

#include "core/error.h"
#include "core/mapped_file.h"
#include "core/progress.h"
#include "core/sha256.h"
#include "io/gguf_model.h"
#include "io/gguf_writer.h"
#include "layout/fallback.h"
#include "layout/grouped.h"
#include "layout/nm24_q4.h"
#include "layout/zigzag.h"

namespace lacuna::io {
namespace {

constexpr int64_t kChunkBytes = int64_t{8} << 20;  // of the output, in memory at once
constexpr int64_t kStripCols = 512;                // of a task, a multiple of every block
constexpr float kLargestHalf = 65504;
constexpr double kHeadBits = 6.5;  // a head below q6_K costs more quality than it saves

layout::Id matching_zigzag(const Tensor& tensor) {
  if (tensor.layout->zigzag) return tensor.layout->id;
  const layout::Layout* best = nullptr;
  for (const layout::Layout& layout : layout::all())
    if (layout.zigzag && layout.bits_per_weight() >= tensor.layout->bits_per_weight() &&
        (best == nullptr || layout.bits_per_weight() < best->bits_per_weight()))
      best = &layout;
  if (best == nullptr || tensor.layout->family != layout::Family::rows)
    throw Error("{}: is stored as {}, which no zigzag layout matches; name one instead, zz4_k, zz5_k, zz6_k or zz8",
                tensor.name, tensor.layout->name);
  return best->id;
}

layout::Id wanted_layout(const Checkpoint& source, const Tensor& tensor, const QuantizeOptions& options) {
  if (!is_matrix(tensor)) return layout::Id::f32;
  if (tensor.name == "position_embd.weight" || options.keep_source) return tensor.layout->id;
  const bool embedding = tensor.name == "token_embd.weight";
  const bool head = tensor.name == "output.weight" || (embedding && !source.find("output.weight"));
  if (options.match_source) {  // `pure` is of no meaning then
    if (embedding && options.embedding_layout) return *options.embedding_layout;
    if (head && options.head_layout) return *options.head_layout;
    return embedding || head || tensor.dims.size() != 2 ? tensor.layout->id : matching_zigzag(tensor);
  }
  const layout::Id id = layout::row_layout(layout::get(options.layout)).id;
  if (!embedding && !head) return tensor.dims.size() == 2 ? options.layout : id;
  if (options.pure) return id;
  if (embedding && options.embedding_layout) return *options.embedding_layout;
  if (!head) return id;
  if (options.head_layout) return *options.head_layout;
  return layout::get(id).bits_per_weight() < kHeadBits ? layout::Id::q6_K : id;
}

/// Whether only whole rows of this layout can be read or written, by functions that know the matrix.
bool is_grouped(const layout::Layout& layout) { return layout.family != layout::Family::rows && !layout.zigzag; }

/// Those of `wanted` that the layout has.
layout::Params own_params(const layout::Layout& layout, layout::Params wanted) {
  layout::Params out;
  for (const layout::Parameter& parameter : layout::parameters(layout)) out.*parameter.value = wanted.*parameter.value;
  return out;
}

/// Converts one tensor, in regions of at most 256 rows and kStripCols columns: what fits the second cache.
class Converter {
 public:
  Converter(const Tensor& tensor, const layout::Layout& to, layout::Params params, std::vector<int64_t> order)
      : tensor_(tensor),
        from_(*tensor.layout),
        to_(to),
        params_(params),
        K_(tensor.shape.K),
        matrix_(is_matrix(tensor)),
        order_(std::move(order)) {
    strip_cols_ = matrix_ && !is_grouped(from_) ? kStripCols : K_;
  }

  /// Row layouts: rows [row0, row0 + count) of the output into `out`.
  void rows(int64_t row0, int64_t count, ThreadPool& pool, std::span<std::byte> out) const {
    const int64_t strips = strips_of_row();
    pool.parallel_for(layout::super_rows(count) * strips, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> w;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t first = task / strips * layout::kSuperRows, k0 = task % strips * strip_cols_;
        const Region region{row0 + first, std::min(layout::kSuperRows, count - first), k0,
                            std::min(strip_cols_, K_ - k0)};
        encode_rows(region, w, out.subspan(size_t(first * to_.row_bytes(K_))));
      }
    });
  }

  /// gq, bm, gs and nm24_q4: the whole matrix. Weights that are 0 are those that bm and nm24_q4 drop, groups of zeros
  /// those that gs drops. Returns the SHA-256 of the source's bytes.
  std::string grouped(ThreadPool& pool, std::vector<std::byte>& out) const {
    if (&from_ == &to_ && own_params(to_, tensor_.params) == own_params(to_, params_)) {
      naming_file(tensor_.name, [&] { layout::check_bytes(from_, tensor_.shape, tensor_.bytes, tensor_.params); });
      out.assign(tensor_.bytes.begin(), tensor_.bytes.end());
      if (!order_.empty()) layout::permute_rows(from_, tensor_.shape, tensor_.params, tensor_.bytes, order_, out);
      return sha256_hex(tensor_.bytes);
    }
    if (to_.family == layout::Family::two_of_four)
      pack_two_of_four(pool, out);
    else if (to_.bits == 16)
      pack_values(pool, out);
    else
      pack_codes(pool, out);
    return sha256_hex(tensor_.bytes);
  }

  /// The params of a bm or gs layout with the octets, kept_groups and nnz that this tensor's zeros make.
  layout::Params count_kept(layout::Params params) const {
    std::vector<float> w;
    std::vector<uint8_t> keep(size_t(K_), 0);
    params.octets = params.kept_groups = params.nnz = 0;
    for (int64_t n = 0; n < tensor_.shape.N; ++n) {
      decode({n, 1, 0, K_}, w);
      mask_of(w, keep);
      const layout::Params row = layout::complete_params(to_, {1, K_}, params, keep);
      params.octets += row.octets;
      params.kept_groups += row.kept_groups;
      params.nnz += row.nnz;
    }
    return params;
  }

  /// Zigzag layouts: the whole matrix. Returns the SHA-256 of the source's bytes.
  std::string zigzag(ThreadPool& pool, std::span<std::byte> out) const {
    const int64_t strips = strips_of_row();
    std::string digest;
    const bool moved = &from_ == &to_;
    // Task 0 is the digest, which takes one worker about as long as one of the others takes for 50 rows of a matrix.
    pool.parallel_for(1 + (moved ? 1 : layout::super_rows(tensor_.shape.N) * strips), 1,
                      [&](int64_t begin, int64_t end) {
                        std::vector<float> w;
                        for (int64_t task = begin; task < end; ++task) {
                          const int64_t r = (task - 1) / strips, k0 = (task - 1) % strips * strip_cols_;
                          if (task == 0)
                            digest = sha256_hex(tensor_.bytes);
                          else if (moved)
                            move_superblocks(out);
                          else
                            encode_superblocks(r, k0, w, out);
                        }
                      });
    return digest;
  }

 private:
  struct Region {
    int64_t row0, rows, k0, cols;
  };

  /// keep: [K], what bm and gs keep of a row.
  void mask_of(std::span<const float> w, std::span<uint8_t> keep) const {
    for (size_t k = 0; k < w.size(); ++k) keep[k] = w[k] != 0.0f;
    if (to_.family != layout::Family::group_sparse) return;
    for (size_t k = 0; k < keep.size(); k += size_t(params_.group_size)) {
      const auto group = keep.subspan(k, std::min(size_t(params_.group_size), keep.size() - k));
      if (std::ranges::find(group, 1) != group.end()) std::ranges::fill(group, uint8_t{1});
    }
  }

  int64_t strips_of_row() const { return (K_ + strip_cols_ - 1) / strip_cols_; }
  int64_t source_row(int64_t n) const { return matrix_ && !order_.empty() ? order_[size_t(n)] : n; }
  std::span<const std::byte> source_bytes(int64_t n, int64_t k0, int64_t cols) const {
    const int64_t at = source_row(n) * from_.row_bytes(K_) + from_.row_bytes(k0);
    return tensor_.bytes.subspan(size_t(at), size_t(from_.row_bytes(cols)));
  }

  /// Calls work(first row, rows decoded: [rows, K]) for pieces of the matrix.
  template <class Work>
  void each_piece(ThreadPool& pool, const Work& work) const {
    constexpr int64_t kRows = 16;
    pool.parallel_for(tensor_.shape.N, kRows, [&](int64_t begin, int64_t end) {
      std::vector<float> w;
      for (int64_t n = begin; n < end; n += kRows) {
        const int64_t rows = std::min(kRows, end - n);
        decode({n, rows, 0, K_}, w);
        work(n, rows, w);
      }
    });
  }

  void pack_codes(ThreadPool& pool, std::vector<std::byte>& out) const {
    const int64_t N = tensor_.shape.N, K = K_, groups = layout::group_count(K, params_.group_size);
    const bool masked = layout::counts_kept(to_);
    std::vector<uint8_t> code(size_t(N * K)), keep(masked ? code.size() : 0);
    std::vector<float> scale(size_t(N * groups)), zero(scale.size());
    each_piece(pool, [&](int64_t first, int64_t rows, std::span<const float> w) {
      for (int64_t i = 0; i < rows; ++i) {
        const auto row = w.subspan(size_t(i * K), size_t(K));
        const auto at = size_t((first + i) * K), group = size_t((first + i) * groups);
        const auto mask = masked ? std::span(keep).subspan(at, size_t(K)) : std::span<uint8_t>();
        if (masked) mask_of(row, mask);
        layout::round_to_grid(to_.bits, params_.group_size, row, mask, std::span(code).subspan(at, size_t(K)),
                              std::span(scale).subspan(group, size_t(groups)),
                              std::span(zero).subspan(group, size_t(groups)));
        const float largest = magnitude(row), top = float((1 << to_.bits) - 1);
        if (largest > kLargestHalf)
          check_held(largest, top * *std::max_element(&scale[group], &scale[group] + groups), source_row(first + i));
      }
    });
    layout::pack_grouped(to_, tensor_.shape, own_group(), {code, scale, zero, keep}, out, &pool);
  }

  void pack_values(ThreadPool& pool, std::vector<std::byte>& out) const {
    const int64_t K = K_;
    std::vector<float> values(size_t(tensor_.shape.N * K));
    std::vector<uint8_t> keep(values.size());
    each_piece(pool, [&](int64_t first, int64_t rows, std::span<const float> w) {
      std::copy(w.begin(), w.end(), values.begin() + ptrdiff_t(first * K));
      for (int64_t i = 0; i < rows; ++i)
        mask_of(w.subspan(size_t(i * K), size_t(K)), std::span(keep).subspan(size_t((first + i) * K), size_t(K)));
    });
    naming_file(tensor_.name, [&] { layout::pack_values(to_, tensor_.shape, own_group(), values, keep, out, &pool); });
  }

  void pack_two_of_four(ThreadPool& pool, std::vector<std::byte>& out) const {
    out.resize(size_t(to_.size_bytes(tensor_.shape)));
    each_piece(pool, [&](int64_t first, int64_t rows, std::span<const float> w) {
      std::vector<uint8_t> keep(static_cast<size_t>(K_));
      std::vector<layout::Nm24Q4Block> blocks(size_t(K_ / layout::Nm24Q4Block::kCols));
      for (int64_t i = 0; i < rows; ++i) {
        const auto row = w.subspan(size_t(i * K_), size_t(K_));
        naming_file(fmt::format("{}: row {}", tensor_.name, source_row(first + i)), [&] {
          layout::keep_two_of_four(row, keep);
          layout::encode_row(row, keep, blocks);
        });
        const auto bytes = std::as_bytes(std::span(blocks));
        std::memcpy(out.data() + size_t(first + i) * bytes.size(), bytes.data(), bytes.size());
        if (magnitude(row) <= kLargestHalf) continue;
        std::vector<float> stored(row.size());
        for (size_t b = 0; b < blocks.size(); ++b) layout::decode_block(blocks[b], &stored[64 * b]);
        check_held(magnitude(row), magnitude(stored), source_row(first + i));
      }
    });
  }

  layout::Params own_group() const { return {.group_size = params_.group_size}; }

  /// w: [rows, cols]. Returns the largest magnitude.
  float decode(const Region& region, std::vector<float>& w) const {
    w.resize(size_t(region.rows * region.cols));
    if (from_.zigzag)
      layout::decode_zigzag_columns(from_, tensor_.shape, tensor_.params, tensor_.bytes, region.row0, region.rows,
                                    region.k0, region.cols, w.data());
    else if (is_grouped(from_) && order_.empty())
      layout::decode_rows(from_, tensor_.shape, tensor_.bytes, region.row0, region.rows, w.data(), tensor_.params);
    else if (is_grouped(from_))
      for (int64_t i = 0; i < region.rows; ++i)
        layout::decode_rows(from_, tensor_.shape, tensor_.bytes, source_row(region.row0 + i), 1, &w[size_t(i * K_)],
                            tensor_.params);
    else
      for (int64_t i = 0; i < region.rows; ++i)
        from_.decode_row(from_, source_bytes(region.row0 + i, region.k0, region.cols),
                         std::span(w).subspan(size_t(i * region.cols), size_t(region.cols)));
    if (const int64_t bad = layout::find_non_finite(w); bad >= 0)
      throw Error("{}: the value at row {}, column {} is {}; a model with NaN or infinity cannot be quantized",
                  tensor_.name, source_row(region.row0 + bad / region.cols), region.k0 + bad % region.cols,
                  w[size_t(bad)]);
    return magnitude(w);
  }

  void encode_rows(const Region& region, std::vector<float>& w, std::span<std::byte> out) const {
    const float largest = decode(region, w);
    if (!matrix_ && !order_.empty()) {
      const std::vector<float> unordered = w;
      for (size_t k = 0; k < w.size(); ++k) w[k] = unordered[size_t(order_[k])];
    }
    for (int64_t i = 0; i < region.rows; ++i) {
      const auto row =
          out.subspan(size_t(i * to_.row_bytes(K_) + to_.row_bytes(region.k0)), size_t(to_.row_bytes(region.cols)));
      const auto values = std::span(w).subspan(size_t(i * region.cols), size_t(region.cols));
      if (&from_ == &to_ && (matrix_ || order_.empty())) {
        const auto bytes = source_bytes(region.row0 + i, region.k0, region.cols);
        std::memcpy(row.data(), bytes.data(), bytes.size());
        continue;
      }
      to_.encode_row(to_, values, {}, row);
      if (largest <= kLargestHalf) continue;
      std::vector<float> stored(values.size());
      to_.decode_row(to_, row, stored);
      check_held(magnitude(values), magnitude(stored), source_row(region.row0 + i));
    }
  }

  void encode_superblocks(int64_t r, int64_t k0, std::vector<float>& w, std::span<std::byte> out) const {
    const int64_t row0 = r * layout::kSuperRows;
    const Region region{row0, std::min(layout::kSuperRows, tensor_.shape.N - row0), k0, std::min(strip_cols_, K_ - k0)};
    const float largest = decode(region, w);
    layout::encode_zigzag_columns(to_, tensor_.shape, params_, r, k0, region.cols, w.data(), out);
    if (largest <= kLargestHalf) return;
    std::vector<float> stored(w.size());
    layout::decode_zigzag_columns(to_, tensor_.shape, params_, out, row0, region.rows, k0, region.cols, stored.data());
    for (size_t i = 0; i < w.size(); ++i)
      check_held(std::abs(w[i]), std::abs(stored[i]), source_row(row0 + int64_t(i) / region.cols));
  }

  void move_superblocks(std::span<std::byte> out) const {
    const int64_t bad = layout::first_bad_row(from_, tensor_.shape, tensor_.bytes, tensor_.params);
    if (bad >= 0)
      throw Error("{}: a scale of rows {} and on is NaN or infinity; such a model cannot be quantized", tensor_.name,
                  bad);
    layout::permute_zigzag(from_, tensor_.shape, tensor_.params, tensor_.bytes, params_, out);
  }

  /// f16 values and f16 scales saturate, which only rows this large can show.
  void check_held(float wanted, float stored, int64_t row) const {
    if (wanted > kLargestHalf && (to_.id == layout::Id::f16 || stored < 0.75f * wanted))
      throw Error("{}: row {} has values that {} cannot hold (its largest magnitude is {}); try bf16", tensor_.name,
                  row, to_.name, wanted);
  }
  static float magnitude(std::span<const float> w) {
    float largest = 0;
    for (const float x : w) largest = std::max(largest, std::abs(x));
    return largest;
  }

  const Tensor& tensor_;
  const layout::Layout &from_, &to_;
  layout::Params params_;
  int64_t K_;
  bool matrix_;
  std::vector<int64_t> order_;
  int64_t strip_cols_ = 0;
};

/// Rows that are written at once; of a zigzag source whole superblock rows, so that each is decoded once.
int64_t rows_of_chunk(const Tensor& tensor, int64_t row_bytes) {
  const int64_t rows = std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(1, row_bytes));
  return tensor.layout->zigzag ? layout::super_rows(rows) * layout::kSuperRows : rows;
}

void check_options(const QuantizeOptions& options) {
  if (!options.keep_source && layout::get(options.layout).family == layout::Family::tensor_core)
    throw Error("{} is for diffusion transformers: `lacuna image compress` makes it; choose another layout here",
                layout::get(options.layout).name);
  layout::check_params(layout::get(options.layout), options.params);
  for (const auto& [name, params] : options.tensor_params) layout::check_params(layout::get(options.layout), params);
  for (const auto& [id, what] :
       {std::pair{options.head_layout, "output head"}, std::pair{options.embedding_layout, "embedding table"}})
    if (id && layout::get(*id).family != layout::Family::rows)
      throw Error("the {} cannot be {}: give it a row layout, one of {}", what, layout::get(*id).name,
                  layout::known_row_names());
}

/// The layout of most of the file's bytes.
layout::Id largest_share(const QuantizeReport& report) {
  std::map<layout::Id, int64_t> bytes;
  for (const QuantizeReport::Tensor& tensor : report.tensors) bytes[tensor.stored->id] += tensor.bytes;
  return std::ranges::max_element(bytes, {}, [](const auto& one) { return one.second; })->first;
}

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
  check_options(options);
  QuantizeReport report;
  for (const Tensor& tensor : source.tensors()) {
    const layout::Id wanted = wanted_layout(source, tensor, options);
    const layout::Layout& stored = layout::get(layout::fitting_layout(wanted, tensor.shape.K));
    const auto own = options.tensor_params.find(tensor.name);
    layout::Params params = own_params(stored, own == options.tensor_params.end() ? options.params : own->second);
    if (options.keep_source && tensor.layout == &stored) params = tensor.params;
    if (layout::counts_kept(stored)) {
      const bool moved = tensor.layout == &stored && tensor.params.group_size == params.group_size;
      params =
          moved ? tensor.params : Converter(tensor, stored, params, gguf_row_order(source, tensor)).count_kept(params);
    }
    report.tensors.push_back({.name = tensor.name,
                              .dims = tensor.dims,
                              .source = tensor.layout,
                              .wanted = &layout::get(wanted),
                              .stored = &stored,
                              .params = params,
                              .count = tensor.shape.N * tensor.shape.K,
                              .bytes = stored.size_bytes(tensor.shape, params)});
    const QuantizeReport::Tensor& planned = report.tensors.back();
    report.params += planned.count;
    report.bytes += planned.bytes;
    const std::string from(tensor.layout->name);
    if (tensor.layout->bits_per_weight() < 16 && stored.bits_per_weight() < 16 && tensor.layout != planned.stored &&
        std::find(report.requantized.begin(), report.requantized.end(), from) == report.requantized.end())
      report.requantized.push_back(from);
  }
  if (const auto factors = int64_t(llama3_rope_factors(source).size()); factors > 0) {
    const layout::Layout* f32 = &layout::get(layout::Id::f32);
    report.tensors.push_back({std::string(kRopeFactors), {factors}, f32, f32, f32, {}, factors, factors * 4});
    report.params += factors;
    report.bytes += factors * 4;
  }
  if (const auto fell = report.fell_back(); options.strict && !fell.empty()) {
    std::vector<std::pair<const layout::Layout*, int64_t>> counts;  // of each layout asked for
    for (const QuantizeReport::Tensor* tensor : fell) {
      const auto found =
          std::find_if(counts.begin(), counts.end(), [&](const auto& c) { return c.first == tensor->wanted; });
      if (found == counts.end())
        counts.emplace_back(tensor->wanted, 1);
      else
        ++found->second;
    }
    std::string each;
    for (const auto& [wanted, count] : counts)
      each += fmt::format("{}{} do not fit {}", each.empty() ? "" : ", ", count, wanted->name);
    throw Error(
        "{} of {} tensors would fall back: {} (first: {}, rows of {}, not a multiple of {}); leave out --strict to "
        "store that one as {}",
        fell.size(), report.tensors.size(), each, fell[0]->name, fell[0]->dims.back(), fell[0]->wanted->block_cols,
        fell[0]->stored->name);
  }
  return report;
}

QuantizeReport quantize(const Checkpoint& source, const std::string& path, const QuantizeOptions& options,
                        ThreadPool& pool) {
  std::error_code unknown;  // a name that is not there yet is no other file's
  if (std::filesystem::equivalent(source.path(), path, unknown))
    throw Error("{}: is the model that is read ({}); give the new file another name", path, source.path());
  QuantizeReport report = plan_quantize(source, options);
  std::vector<TensorPlan> plan;
  for (const QuantizeReport::Tensor& tensor : report.tensors)
    plan.push_back({tensor.name, tensor.stored, tensor.dims, tensor.params});
  const std::vector<float> rope_factors = llama3_rope_factors(source);
  const layout::Id most = options.keep_source ? largest_share(report) : options.layout;
  GgufWriter writer(path, gguf_metadata(source, most), std::move(plan));

  std::optional<Progress> progress;
  if (options.progress) progress.emplace("quantize", report.bytes, "B");
  std::vector<std::byte> chunk;
  for (size_t t = 0; t < source.tensors().size(); ++t) {
    const Tensor& tensor = source.tensors()[t];
    const layout::Layout& to = *report.tensors[t].stored;
    const Converter converter(tensor, to, report.tensors[t].params, gguf_row_order(source, tensor));
    if (to.family != layout::Family::rows) {
      chunk.resize(size_t(report.tensors[t].bytes));
      writer.set_source_sha256(tensor.name, to.zigzag ? converter.zigzag(pool, chunk) : converter.grouped(pool, chunk));
      writer.write(chunk);
      if (progress) progress->add(int64_t(chunk.size()));
    } else {
      const int64_t row_bytes = to.row_bytes(tensor.shape.K);
      const int64_t rows = rows_of_chunk(tensor, row_bytes);
      for (int64_t row0 = 0; row0 < tensor.shape.N; row0 += rows) {
        const int64_t count = std::min(rows, tensor.shape.N - row0);
        chunk.resize(size_t(count * row_bytes));
        converter.rows(row0, count, pool, chunk);
        writer.write(chunk);
        if (progress) progress->add(count * row_bytes);
      }
    }
    MappedFile::release(tensor.bytes);
  }
  if (!rope_factors.empty()) writer.write(std::as_bytes(std::span(rope_factors)));
  report.file_bytes = writer.finish();
  return report;
}

}  // namespace lacuna::io
