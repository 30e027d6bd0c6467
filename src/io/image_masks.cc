#include "io/image_masks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <map>

#include "core/error.h"
#include "core/mapped_file.h"
#include "io/safetensors.h"
#include "layout/two_of_four.h"

namespace lacuna::io {

namespace {

struct Method {
  std::string_view name;
  bool norms, entropy, gradients, moments, masks;
  double alpha;  // 0: has none
};
constexpr std::array<Method, 6> kMethods = {{{"magnitude", false, false, false, false, false, 0},
                                             {"wanda", true, false, false, false, false, 0},
                                             {"wanda++", true, false, true, false, false, 100},
                                             {"e-sparse", true, true, false, false, false, 1},
                                             {"awp", false, false, false, true, false, 0},
                                             {"file", false, false, false, false, true, 0}}};
const Method& of(MaskMethod method) { return kMethods[size_t(method)]; }

const layout::Layout* float_layout(std::string_view dtype) {
  if (dtype == "F32") return &layout::get(layout::Id::f32);
  if (dtype == "F16") return &layout::get(layout::Id::f16);
  if (dtype == "BF16") return &layout::get(layout::Id::bf16);
  return nullptr;
}

/// No NaN, whatever the finite factors.
float score_of(float w, double importance) { return float(std::abs(double(w)) * importance); }

/// A safetensors file whose tensors are looked up by name.
class TensorFile {
 public:
  explicit TensorFile(const std::string& path) : file_(path) {
    for (SafetensorsEntry& entry : parse_safetensors(file_.bytes(), path)) {
      std::string name = entry.name;
      entries_.emplace(std::move(name), std::move(entry));
    }
  }
  const std::string& path() const { return file_.path(); }
  bool has(const std::string& name) const { return entries_.contains(name); }

  /// Throws Error unless the tensor is there in this shape.
  const SafetensorsEntry& need(const std::string& name, std::span<const int64_t> dims) const {
    const auto found = entries_.find(name);
    if (found == entries_.end())
      throw Error("{}: has no tensor {}; collect it for every matrix that becomes 2:4", path(), name);
    const SafetensorsEntry& entry = found->second;
    if (!std::ranges::equal(entry.dims, dims))
      throw Error("{}: tensor {}: the shape is [{}], but the weight asks for [{}]", path(), name,
                  fmt::join(entry.dims, ", "), fmt::join(dims, ", "));
    return entry;
  }
  /// The same; throws Error for another type than F32, F16 and BF16 too.
  const SafetensorsEntry& need_floats(const std::string& name, std::span<const int64_t> dims) const {
    const SafetensorsEntry& entry = need(name, dims);
    if (float_layout(entry.dtype) == nullptr)
      throw Error("{}: tensor {}: dtype {}, but it must be F32, F16 or BF16", path(), name, entry.dtype);
    return entry;
  }

 private:
  MappedFile file_;
  std::map<std::string, SafetensorsEntry, std::less<>> entries_;
};

/// Rows [row0, row0 + rows) of K values. Throws Error for one that is negative or not finite.
std::vector<float> read_rows(const TensorFile& file, const SafetensorsEntry& entry, int64_t K, int64_t row0,
                             int64_t rows) {
  std::vector<float> out(size_t(rows * K));
  const layout::Layout& from = *float_layout(entry.dtype);
  layout::decode_rows(from, {int64_t(entry.bytes.size()) / std::max<int64_t>(1, from.row_bytes(K)), K}, entry.bytes,
                      row0, rows, out.data());
  for (size_t i = 0; i < out.size(); ++i)
    if (!(out[i] >= 0 && std::isfinite(out[i])))
      throw Error("{}: tensor {}: value {} is {}, but it must be a finite number >= 0; collect it again", file.path(),
                  entry.name, row0 * K + int64_t(i), out[i]);
  return out;
}

}  // namespace

MaskMethod mask_method(const std::string& name) {
  for (size_t i = 0; i < kMethods.size(); ++i)
    if (kMethods[i].name == name) return MaskMethod(i);
  throw Error("unknown mask \"{}\"; known are {}", name, mask_method_names());
}
std::string mask_method_name(MaskMethod method) { return std::string(of(method).name); }
std::string mask_method_names() {
  std::string out;
  for (const Method& method : kMethods) out += (out.empty() ? "" : ", ") + std::string(method.name);
  return out;
}
double usual_alpha(MaskMethod method) { return of(method).alpha; }

void magnitude_scores(std::span<const float> w, std::span<float> score) {
  for (size_t k = 0; k < w.size(); ++k) score[k] = std::abs(w[k]);
}
void wanda_scores(std::span<const float> w, std::span<const float> norm, std::span<float> score) {
  for (size_t k = 0; k < w.size(); ++k) score[k] = score_of(w[k], norm[k]);
}
void wanda_plus_plus_scores(std::span<const float> w, std::span<const float> norm, std::span<const float> gradient,
                            float alpha, std::span<float> score) {
  for (size_t k = 0; k < w.size(); ++k) score[k] = score_of(w[k], double(alpha) * gradient[k] + norm[k]);
}
void e_sparse_scores(std::span<const float> w, std::span<const float> norm, std::span<const float> entropy, float alpha,
                     std::span<float> score) {
  for (size_t k = 0; k < w.size(); ++k) score[k] = score_of(w[k], entropy[k] + double(alpha) * norm[k]);
}

class MaskMaker::Files {
 public:
  explicit Files(const MaskOptions& options) {
    const Method& method = of(options.method);
    open(method, method.norms, "--norms", options.norms, norms);
    open(method, method.gradients, "--gradients", options.gradients, gradients);
    open(method, method.masks, "--mask-file", options.masks, masks);
    check(method, method.moments, "--second-moments", !options.moments.empty());
    for (const std::string& path : options.moments) moments.push_back(std::make_unique<TensorFile>(path));
  }

  /// The file that has a matrix's second moment. Throws Error where none has, or another shape or type.
  const TensorFile& moment_file(const std::string& name, int64_t K) const {
    const std::string tensor = name + ".second_moment";
    const auto found =
        std::find_if(moments.begin(), moments.end(), [&](const auto& file) { return file->has(tensor); });
    const TensorFile& file = found == moments.end() ? *moments.back() : **found;
    file.need_floats(tensor, std::array{K, K});
    return file;
  }

  /// [K, K] of a matrix; kept until another one is asked for. Throws Error for what no second moment can be.
  std::span<const float> moment(const std::string& name, int64_t K) {
    if (name == moment_of_) return moment_;
    const TensorFile& file = moment_file(name, K);
    const SafetensorsEntry& entry = file.need_floats(name + ".second_moment", std::array{K, K});
    moment_.resize(size_t(K * K));
    layout::decode_rows(*float_layout(entry.dtype), {K, K}, entry.bytes, 0, K, moment_.data());
    moment_of_ = name;
    const auto at = [&](int64_t i, int64_t j) { return double(moment_[size_t(i * K + j)]); };
    for (int64_t i = 0; i < K; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        const double scale = std::sqrt(std::max(0.0, at(i, i)) * std::max(0.0, at(j, j)));
        if (std::isfinite(at(i, j)) && std::isfinite(at(j, i)) && std::abs(at(i, j)) <= scale * 1.01 &&
            std::abs(at(i, j) - at(j, i)) <= scale * 0.01)
          continue;
        throw Error("{}: tensor {}: values ({}, {}) = {} and ({}, {}) = {} are of no second moment; collect it again",
                    file.path(), entry.name, i, j, at(i, j), j, i, at(j, i));
      }
    return moment_;
  }

  /// [K] of a matrix.
  std::vector<float> column(const std::string& name, const char* part, int64_t K) const {
    return read_rows(*norms, norms->need_floats(name + part, std::array{K}), K, 0, 1);
  }

  std::unique_ptr<TensorFile> norms, gradients, masks;
  std::vector<std::unique_ptr<TensorFile>> moments;

 private:
  static void check(const Method& method, bool needed, const char* flag, bool given) {
    if (needed && !given) throw Error("--mask {} needs {} FILE", method.name, flag);
    if (!needed && given) throw Error("{}: --mask {} does not read it; leave it out", flag, method.name);
  }
  static void open(const Method& method, bool needed, const char* flag, const std::string& path,
                   std::unique_ptr<TensorFile>& file) {
    check(method, needed, flag, !path.empty());
    if (needed) file = std::make_unique<TensorFile>(path);
  }

  std::string moment_of_;
  std::vector<float> moment_;
};

MaskMaker::MaskMaker(const MaskOptions& options) : options_(options), files_(std::make_unique<Files>(options)) {
  const double usual = usual_alpha(options.method);
  if (options.alpha >= 0 && usual == 0) throw Error("--alpha: --mask {} has none; leave it out", describe());
  if (options_.alpha < 0) options_.alpha = usual;
  if (options.changed_weights && options.method != MaskMethod::awp)
    throw Error("--awp-weights needs --mask awp, which makes them");
  assert(options.method != MaskMethod::awp || options.descent);
}
MaskMaker::~MaskMaker() = default;

std::string MaskMaker::describe() const {
  const std::string name(of(options_.method).name);
  if (options_.changed_weights) return name + ", with its weights";
  return usual_alpha(options_.method) == 0 ? name : fmt::format("{}, alpha {}", name, options_.alpha);
}

void MaskMaker::check(const std::string& name, layout::Shape shape) const {
  const Method& method = of(options_.method);
  const std::array matrix = {shape.N, shape.K};
  if (method.norms) files_->column(name, ".norm", shape.K);
  if (method.entropy) files_->column(name, ".entropy", shape.K);
  if (method.gradients) files_->gradients->need_floats(name, matrix);
  if (method.moments) files_->moment_file(name, shape.K);
  if (!method.masks) return;
  const SafetensorsEntry& entry = files_->masks->need(name, matrix);
  if (entry.dtype != "BOOL" && entry.dtype != "U8" && entry.dtype != "I8")
    throw Error("{}: tensor {}: dtype {}, but a mask must be BOOL, U8 or I8", files_->masks->path(), name, entry.dtype);
}

int64_t MaskMaker::keep(const std::string& name, layout::Shape shape, int64_t row0, std::span<const float> w,
                        std::span<uint8_t> keep, ThreadPool& pool, std::span<float> changed) const {
  const Method& method = of(options_.method);
  const int64_t K = shape.K, rows = K == 0 ? 0 : int64_t(w.size()) / K;
  const auto width = size_t(K);
  std::vector<float> norm, entropy, gradient;
  if (method.norms) norm = files_->column(name, ".norm", K);
  if (method.entropy) entropy = files_->column(name, ".entropy", K);
  if (method.gradients) {
    const TensorFile& file = *files_->gradients;
    gradient = read_rows(file, file.need_floats(name, std::array{shape.N, K}), K, row0, rows);
  }
  if (method.moments) {
    std::vector<float> theta(w.size());
    options_.descent(w, files_->moment(name, K), keep, theta, pool);
    if (changes_weights()) std::copy(theta.begin(), theta.end(), changed.begin());
    return int64_t(sizeof(float)) * ((1 + kDescentArrays) * int64_t(theta.size()) + K * K);
  }
  if (method.masks) {
    const SafetensorsEntry& entry = files_->masks->need(name, std::array{shape.N, K});
    const auto from = entry.bytes.subspan(size_t(row0 * K), size_t(rows * K));
    std::transform(from.begin(), from.end(), keep.begin(), [](std::byte one) { return uint8_t(one); });
  }
  pool.parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> score(width);
    for (int64_t n = begin; n < end; ++n) {
      const auto row = w.subspan(size_t(n) * width, width);
      const auto marks = keep.subspan(size_t(n) * width, width);
      switch (options_.method) {
        case MaskMethod::magnitude:
          magnitude_scores(row, score);
          break;
        case MaskMethod::wanda:
          wanda_scores(row, norm, score);
          break;
        case MaskMethod::wanda_plus_plus:
          wanda_plus_plus_scores(row, norm, std::span(gradient).subspan(size_t(n) * width, width),
                                 float(options_.alpha), score);
          break;
        case MaskMethod::e_sparse:
          e_sparse_scores(row, norm, entropy, float(options_.alpha), score);
          break;
        case MaskMethod::awp:  // whole rows, above
          continue;
        case MaskMethod::file:
          if (std::any_of(marks.begin(), marks.end(), [](uint8_t mark) { return mark > 1; }))
            throw Error("{}: tensor {}: row {} has a value that is neither 0 nor 1", files_->masks->path(), name,
                        row0 + n);
          if (const int64_t group = layout::find_bad_group(marks); group >= 0)
            throw Error("{}: tensor {}: row {}: the group of four at input {} does not keep two weights, as 2:4 does",
                        files_->masks->path(), name, row0 + n, 4 * group);
          continue;
      }
      layout::keep_largest(score, marks);
    }
  });
  return int64_t(gradient.size() * sizeof(float));
}

}  // namespace lacuna::io
