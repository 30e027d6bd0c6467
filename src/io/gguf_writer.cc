#include "io/gguf_writer.h"

#include <set>
#include <type_traits>

#include "core/checked_math.h"
#include "core/error.h"
#include "io/gguf.h"
#include "io/manifest.h"

namespace lacuna::io {

namespace {

template <class T>
constexpr uint32_t value_type() {
  if constexpr (std::is_same_v<T, uint8_t>) return 0;
  if constexpr (std::is_same_v<T, int8_t>) return 1;
  if constexpr (std::is_same_v<T, uint16_t>) return 2;
  if constexpr (std::is_same_v<T, int16_t>) return 3;
  if constexpr (std::is_same_v<T, uint32_t>) return 4;
  if constexpr (std::is_same_v<T, int32_t>) return 5;
  if constexpr (std::is_same_v<T, float>) return 6;
  if constexpr (std::is_same_v<T, bool>) return 7;
  if constexpr (std::is_same_v<T, std::string>) return 8;
  if constexpr (std::is_same_v<T, uint64_t>) return 10;
  if constexpr (std::is_same_v<T, int64_t>) return 11;
  if constexpr (std::is_same_v<T, double>) return 12;
}
constexpr uint32_t kArrayType = 9;

/// The writing side of one file's header.
class Header {
 public:
  explicit Header(AtomicFile& file) : file_(file) {}

  template <class T>
  void number(T value) {
    file_.write(std::as_bytes(std::span(&value, 1)));
  }
  void text(std::string_view value) {
    number(uint64_t(value.size()));
    file_.write(std::as_bytes(std::span(value)));
  }
  void value(const MetadataValue& value) {
    std::visit([this](const auto& v) { typed(v); }, value);
  }

 private:
  template <class T>
  void element(const T& v) {
    if constexpr (std::is_same_v<T, std::string>)
      text(v);
    else if constexpr (std::is_same_v<T, bool>)
      number(uint8_t(v));
    else
      number(v);
  }
  template <class T>
  void typed(const T& v) {
    number(value_type<T>());
    element(v);
  }
  template <class T>
  void typed(const std::vector<T>& v) {
    number(kArrayType);
    number(value_type<T>());
    number(uint64_t(v.size()));
    for (size_t i = 0; i < v.size(); ++i) element<T>(v[i]);
  }

  AtomicFile& file_;
};

bool is_packed(const TensorPlan& tensor) { return tensor.layout->ggml_type < 0; }

/// The manifest of a plan; entries of the older one are kept where they describe the same.
Manifest plan_manifest(const std::vector<TensorPlan>& tensors, const Metadata& metadata, const std::string& path) {
  Manifest older, out;
  if (const auto text = metadata.string(kManifestKey)) older = parse_manifest(*text, path);
  for (const TensorPlan& tensor : tensors) {
    if (!is_packed(tensor)) continue;
    ManifestTensor entry = manifest_entry(*tensor.layout, {tensor.dims[0], tensor.dims[1]}, tensor.params);
    const auto copied = older.find(tensor.name);
    if (copied != older.end() && copied->second.layout == entry.layout && copied->second.shape == entry.shape &&
        copied->second.params == entry.params && copied->second.nnz == entry.nnz)
      entry = copied->second;
    out.emplace(tensor.name, std::move(entry));
  }
  return out;
}

/// Bytes of a planned tensor; checks what a reader would refuse.
int64_t planned_bytes(const TensorPlan& tensor) {
  if (tensor.name.empty()) throw Error("a planned tensor has no name");
  if (tensor.layout == nullptr) throw Error("tensor {}: a planned tensor has no layout", tensor.name);
  if (tensor.dims.empty() || tensor.dims.size() > 4)
    throw Error("tensor {}: {} dimensions; GGUF holds 1 to 4", tensor.name, tensor.dims.size());
  for (const int64_t dim : tensor.dims)
    if (dim < 1) throw Error("tensor {}: a dimension of {}", tensor.name, dim);
  if (is_packed(tensor)) {
    if (tensor.dims.size() != 2)
      throw Error("tensor {}: {} dimensions; {} holds matrices only", tensor.name, tensor.dims.size(),
                  tensor.layout->name);
    layout::check_params(*tensor.layout, tensor.params);
    return tensor.layout->size_bytes({tensor.dims[0], tensor.dims[1]}, tensor.params);
  }
  const int64_t K = tensor.dims.back();
  if (K % tensor.layout->block_cols != 0)
    throw Error("tensor {}: K = {}, but {} needs a multiple of {}", tensor.name, K, tensor.layout->name,
                tensor.layout->block_cols);
  const auto rows = checked_product(std::span(tensor.dims).first(tensor.dims.size() - 1));
  const auto row_bytes = checked_mul(K / tensor.layout->block_cols, tensor.layout->block_bytes);
  const auto size = rows && row_bytes ? checked_mul(*rows, *row_bytes) : std::nullopt;
  if (!size) throw Error("tensor {}: its shape is too large for 64 bits", tensor.name);
  return *size;
}

void write_padding(AtomicFile& file, int64_t alignment) {
  static constexpr std::byte kZeros[64] = {};
  for (int64_t left = (alignment - file.position() % alignment) % alignment; left > 0;) {
    const int64_t part = std::min<int64_t>(left, sizeof(kZeros));
    file.write(std::span(kZeros, size_t(part)));
    left -= part;
  }
}

}  // namespace

GgufWriter::GgufWriter(const std::string& path, const Metadata& metadata, std::vector<TensorPlan> tensors)
    : file_(path), tensors_(std::move(tensors)), alignment_(gguf_alignment(metadata, path)) {
  std::vector<int64_t> sizes;
  for (const TensorPlan& tensor : tensors_) sizes.push_back(planned_bytes(tensor));
  const Manifest manifest = plan_manifest(tensors_, metadata, path);
  Header header(file_);
  file_.write(std::as_bytes(std::span(std::string_view("GGUF"))));
  header.number(uint32_t{3});
  header.number(uint64_t(tensors_.size()));
  header.number(uint64_t(metadata.entries().size()) - (metadata.contains(kManifestKey) ? 1 : 0) +
                (manifest.empty() ? 0 : 1));
  for (const auto& [key, value] : metadata.entries()) {
    if (key == kManifestKey) continue;
    header.text(key);
    header.value(value);
  }
  if (!manifest.empty()) {
    std::map<std::string, size_t, std::less<>> at;
    const std::string text = format_manifest(manifest, at);
    header.text(kManifestKey);
    header.value(text);
    for (const auto& [name, offset] : at)
      if (manifest.at(name).sha256.empty())
        sha256_at_[name] = file_.position() - int64_t(text.size()) + int64_t(offset);
  }
  std::set<std::string_view> names;
  int64_t offset = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const TensorPlan& tensor = tensors_[i];
    const int64_t bytes = sizes[i];
    const std::vector<int64_t> dims = is_packed(tensor) ? std::vector<int64_t>{bytes} : tensor.dims;
    if (!names.insert(tensor.name).second) throw Error("{}: tensor {} is planned twice", path, tensor.name);
    header.text(tensor.name);
    header.number(uint32_t(dims.size()));
    for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) header.number(uint64_t(*dim));
    header.number(uint32_t(is_packed(tensor) ? kGgmlTypeI8 : tensor.layout->ggml_type));
    header.number(uint64_t(offset));
    const auto end = checked_add(offset, bytes);
    const auto padded = end ? checked_add(*end, alignment_ - 1) : std::nullopt;
    if (!padded) throw Error("{}: the tensors together are too large for 64 bits", path);
    offset = *padded / alignment_ * alignment_;
  }
  write_padding(file_, alignment_);
}

GgufWriter::~GgufWriter() = default;

void GgufWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (current_ == tensors_.size()) throw Error("{} bytes more than all planned tensors hold", bytes.size());
    const int64_t left = planned_bytes(tensors_[current_]) - written_of_current_;
    const auto part = bytes.first(size_t(std::min<int64_t>(left, int64_t(bytes.size()))));
    file_.write(part);
    written_of_current_ += int64_t(part.size());
    bytes = bytes.subspan(part.size());
    if (int64_t(part.size()) == left) advance();
  }
}

void GgufWriter::advance() {
  write_padding(file_, alignment_);
  ++current_;
  written_of_current_ = 0;
}

void GgufWriter::set_source_sha256(const std::string& tensor, const std::string& hex) {
  const auto place = sha256_at_.find(tensor);
  if (place == sha256_at_.end()) throw Error("tensor {}: no digest of its source is expected", tensor);
  file_.overwrite(place->second, std::as_bytes(std::span(hex)));
  sha256_at_.erase(place);
}

int64_t GgufWriter::finish() {
  if (current_ != tensors_.size()) {
    const TensorPlan& tensor = tensors_[current_];
    throw Error("tensor {}: {} of {} bytes were written", tensor.name, written_of_current_, planned_bytes(tensor));
  }
  if (!sha256_at_.empty()) throw Error("tensor {}: the digest of its source is missing", sha256_at_.begin()->first);
  file_.commit();
  return file_.position();
}

}  // namespace lacuna::io
