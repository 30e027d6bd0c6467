#include "io/image_compress.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "core/error.h"
#include "core/mapped_file.h"
#include "core/progress.h"
#include "core/sha256.h"
#include "io/gguf_writer.h"
#include "io/json.h"
#include "layout/row_work.h"
#include "layout/tensor_core.h"

namespace lacuna::io {

namespace {

constexpr int64_t kPieceWeights = int64_t{1} << 20;  // decoded at once
constexpr std::array kSources = {layout::Id::f32, layout::Id::f16, layout::Id::bf16};

bool is_float(const layout::Layout& layout) {
  return std::find(kSources.begin(), kSources.end(), layout.id) != kSources.end();
}
bool is_sparse(const layout::Layout& layout) {
  return layout.family == layout::Family::tensor_core && layout::tensor_core_row(layout, 0).sparse;
}

/// One tensor on its way.
struct Job {
  const Tensor* tensor;
  const layout::Layout* to;
};

std::vector<Job> plan_jobs(const ImageCheckpoint& source, const ImagePolicy& policy, ImageCompressReport& report) {
  std::vector<Job> out;
  std::set<int> used;
  for (const auto& [name, tensor] : source.tensors()) {
    if (!is_float(*tensor.layout))
      throw Error("{}: tensor {} is {}: the model was compressed already; start from its f32, f16 or bf16 weights",
                  source.file_of(name), name, tensor.layout->name);
    const layout::Layout* to = tensor.layout;
    if (tensor.dims.size() == 2) {
      const ImagePolicy::Choice choice = policy.choose(name);
      if (choice.layout != nullptr) to = choice.layout;
      if (choice.rule >= 0) used.insert(choice.rule);
    }
    out.push_back({&tensor, to});
  }
  if (used.empty() && policy.rule_count() > 0)
    throw Error("{}: no matrix has a name that a rule of the policy {} matches; `lacuna image policy` shows the rules",
                source.path(), policy.name());
  for (size_t rule = 0; rule < policy.rule_count() && !policy.built_in(); ++rule)
    if (!used.contains(int(rule))) report.unused_rules.push_back(policy.rule_name(rule));
  return out;
}

std::string architecture_of(const ImageCheckpoint& source) {
  for (const char* blocks : {"single_transformer_blocks.", "single_blocks.", "double_blocks."}) {
    const auto first = source.tensors().lower_bound(blocks);
    if (first != source.tensors().end() && first->first.starts_with(blocks)) return "flux";
  }
  if (!source.config().empty()) {
    const nlohmann::json config = parse_json_object(source.config(), source.config_path());
    const auto name = JsonObject(config, source.config_path()).string("_class_name");
    if (name == "FluxTransformer2DModel") return "flux";
    if (name) return *name;
  }
  return "unknown";
}

Metadata metadata_of(const ImageCheckpoint& source, const ImagePolicy& policy, const std::string& mask) {
  Metadata out;
  out.set("general.architecture", architecture_of(source));
  out.set("general.quantization_version", uint32_t{2});
  if (!source.config().empty()) out.set(std::string(kImageConfigKey), source.config());
  out.set(std::string(kImagePolicyKey), policy.text());
  if (!mask.empty()) out.set(std::string(kImageMaskKey), mask);
  return out;
}

class Compressor {
 public:
  Compressor(const ImageCheckpoint& source, const MaskMaker* masks, ThreadPool& pool, GgufWriter& writer,
             ImageCompressReport& report)
      : source_(source), masks_(masks), pool_(pool), writer_(writer), report_(report) {}

  void run(const Job& job, std::optional<Progress>& progress) {
    const auto [N, K] = job.tensor->shape;
    const int64_t rows = std::max<int64_t>(1, kPieceWeights / std::max<int64_t>(1, K));
    for (int64_t row0 = 0; row0 < N; row0 += rows) {
      const int64_t count = std::min(rows, N - row0);
      piece(job, row0, count);
      if (progress) progress->add(count * job.tensor->layout->row_bytes(K));
    }
    if (job.to->ggml_type < 0) writer_.set_source_sha256(job.tensor->name, sha256_hex(job.tensor->bytes));
    MappedFile::release(job.tensor->bytes);
    note(job);
  }

  void finish() {
    for (const layout::Layout& layout : layout::all()) {
      const auto found = totals_.find(layout.id);
      if (found == totals_.end()) continue;
      Total& total = found->second;
      total.group.layout = &layout;
      total.group.relative_error = total.square > 0 ? std::sqrt(total.error / total.square) : 0;
      report_.groups.push_back(total.group);
    }
  }

 private:
  struct Total {
    ImageCompressReport::Group group;
    double error = 0, square = 0;
  };

  void piece(const Job& job, int64_t row0, int64_t rows) {
    const Tensor& tensor = *job.tensor;
    const layout::Shape shape{rows, tensor.shape.K};
    w_.resize(size_t(rows * shape.K));
    pool_.parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
      layout::decode_rows(*tensor.layout, tensor.shape, tensor.bytes, row0 + begin, end - begin,
                          w_.data() + begin * shape.K);
    });
    if (const int64_t bad = layout::find_non_finite(w_); bad >= 0)
      throw Error("{}: tensor {}: the weight of row {}, input {} is {}; a model with such weights is broken",
                  source_.file_of(tensor.name), tensor.name, row0 + bad / shape.K, bad % shape.K, w_[size_t(bad)]);
    if (job.to->id == layout::Id::f16)
      for (size_t i = 0; i < w_.size(); ++i)
        if (std::fabs(w_[i]) > layout::kLargestHalf)
          throw Error("{}: tensor {}: the weight of row {}, input {} is {}, more than f16 holds; store it as bf16",
                      source_.file_of(tensor.name), tensor.name, row0 + int64_t(i) / shape.K, int64_t(i) % shape.K,
                      w_[i]);
    bytes_.resize(size_t(job.to->size_bytes(shape)));
    naming_file(tensor.name, [&] { encode(job, row0, shape); });
    writer_.write(bytes_);
    add_error(job, shape);
    const size_t pieces = w_.capacity() + stored_.capacity() + changed_.capacity();
    report_.most_float_bytes = std::max(report_.most_float_bytes, int64_t(pieces * sizeof(float)) + mask_float_bytes_);
  }

  void encode(const Job& job, int64_t row0, layout::Shape shape) {
    const layout::Layout& to = *job.to;
    mask_float_bytes_ = 0;
    if (to.family == layout::Family::tensor_core) {
      keep_.resize(is_sparse(to) ? w_.size() : 0);
      const bool change = is_sparse(to) && masks_->changes_weights();
      changed_.resize(change ? w_.size() : 0);
      mask_float_bytes_ =
          is_sparse(to) ? masks_->keep(job.tensor->name, job.tensor->shape, row0, w_, keep_, pool_, changed_) : 0;
      return layout::encode_tensor_core(to, shape, change ? changed_ : w_, keep_, bytes_, &pool_);
    }
    const auto row_bytes = size_t(to.row_bytes(shape.K)), K = size_t(shape.K);
    pool_.parallel_for(shape.N, 16, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        to.encode_row(to, std::span(w_).subspan(size_t(n) * K, K), {},
                      std::span(bytes_).subspan(size_t(n) * row_bytes, row_bytes));
    });
  }

  void add_error(const Job& job, layout::Shape shape) {
    Total& total = totals_[job.to->id];
    stored_.resize(w_.size());
    pool_.parallel_for(shape.N, 16, [&](int64_t begin, int64_t end) {
      layout::decode_rows(*job.to, shape, bytes_, begin, end - begin, stored_.data() + begin * shape.K);
    });
    for (size_t i = 0; i < w_.size(); ++i) {
      const double difference = double(stored_[i]) - double(w_[i]);
      total.error += difference * difference;
      total.square += double(w_[i]) * double(w_[i]);
    }
  }

  void note(const Job& job) {
    const Tensor& tensor = *job.tensor;
    ImageCompressReport::Group& group = totals_[job.to->id].group;
    const int64_t weights = tensor.shape.N * tensor.shape.K, bytes = job.to->size_bytes(tensor.shape);
    ++group.tensors, ++report_.tensors;
    group.weights += weights, report_.weights += weights;
    group.kept += layout::kept_weights(*job.to, tensor.shape, {});
    group.bytes += bytes, report_.bytes += bytes;
    report_.source_bytes += int64_t(tensor.bytes.size());
  }

  const ImageCheckpoint& source_;
  const MaskMaker* masks_;  // nullptr: no matrix has one
  ThreadPool& pool_;
  GgufWriter& writer_;
  ImageCompressReport& report_;
  std::map<layout::Id, Total> totals_;
  std::vector<float> w_, stored_, changed_;
  int64_t mask_float_bytes_ = 0;
  std::vector<uint8_t> keep_;
  std::vector<std::byte> bytes_;
};

}  // namespace

ImageCompressReport compress_image(const std::string& source_path, const std::string& out,
                                   const ImageCompressOptions& options, ThreadPool& pool) {
  std::error_code unknown;  // then they are not the same file
  if (std::filesystem::equivalent(source_path, out, unknown))
    throw Error("{}: is the model that is read; give the new file another name", out);
  const ImageCheckpoint source = ImageCheckpoint::open(source_path);
  ImageCompressReport report;
  const std::vector<Job> jobs = plan_jobs(source, options.policy, report);
  std::optional<MaskMaker> masks;
  std::vector<TensorPlan> plan;
  int64_t total = 0;
  for (const auto& [tensor, to] : jobs) {
    if (is_sparse(*to)) {
      if (!masks) masks.emplace(options.mask);
      masks->check(tensor->name, tensor->shape);
    }
    plan.push_back({tensor->name, to, tensor->dims});
    total += int64_t(tensor->bytes.size());
  }
  if (!masks && options.mask.asks())
    throw Error("the policy {} makes no matrix 2:4, so that no mask is made; leave out --mask, its files and options",
                options.policy.name());
  if (masks) report.mask = masks->describe();
  if (options.on_checked) options.on_checked(source);

  GgufWriter writer(out, metadata_of(source, options.policy, report.mask), std::move(plan));
  std::optional<Progress> progress;
  if (options.progress) progress.emplace("image compress", total, "B");
  Compressor compressor(source, masks ? &*masks : nullptr, pool, writer, report);
  for (const Job& job : jobs) compressor.run(job, progress);
  compressor.finish();
  report.file_bytes = writer.finish();
  return report;
}

}  // namespace lacuna::io
