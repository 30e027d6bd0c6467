#include "io/gguf_writer.h"

#include <set>
#include <type_traits>

#include "core/checked_math.h"
#include "core/error.h"
#include "io/gguf.h"

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

/// Bytes of a planned tensor; checks what a reader would refuse.
int64_t planned_bytes(const TensorPlan& tensor) {
  if (tensor.name.empty()) throw Error("a planned tensor has no name");
  if (tensor.layout == nullptr || tensor.layout->ggml_type < 0)
    throw Error("tensor {}: its layout has no GGUF type", tensor.name);
  if (tensor.dims.empty() || tensor.dims.size() > 4)
    throw Error("tensor {}: {} dimensions; GGUF holds 1 to 4", tensor.name, tensor.dims.size());
  for (const int64_t dim : tensor.dims)
    if (dim < 1) throw Error("tensor {}: a dimension of {}", tensor.name, dim);
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
  Header header(file_);
  file_.write(std::as_bytes(std::span(std::string_view("GGUF"))));
  header.number(uint32_t{3});
  header.number(uint64_t(tensors_.size()));
  header.number(uint64_t(metadata.entries().size()));
  for (const auto& [key, value] : metadata.entries()) {
    header.text(key);
    header.value(value);
  }
  std::set<std::string_view> names;
  int64_t offset = 0;
  for (const TensorPlan& tensor : tensors_) {
    const int64_t bytes = planned_bytes(tensor);
    if (!names.insert(tensor.name).second) throw Error("{}: tensor {} is planned twice", path, tensor.name);
    header.text(tensor.name);
    header.number(uint32_t(tensor.dims.size()));
    for (auto dim = tensor.dims.rbegin(); dim != tensor.dims.rend(); ++dim) header.number(uint64_t(*dim));
    header.number(uint32_t(tensor.layout->ggml_type));
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

int64_t GgufWriter::finish() {
  if (current_ != tensors_.size()) {
    const TensorPlan& tensor = tensors_[current_];
    throw Error("tensor {}: {} of {} bytes were written", tensor.name, written_of_current_, planned_bytes(tensor));
  }
  file_.commit();
  return file_.position();
}

}  // namespace lacuna::io
