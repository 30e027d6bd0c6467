#include "io/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/files.h"
#include "core/mapped_file.h"
#include "io/gguf_split.h"
#include "io/huggingface.h"
#include "io/manifest.h"

namespace lacuna::io {

struct Checkpoint::Data {
  std::string path, architecture;
  Source source = Source::gguf;
  Metadata metadata;
  Vocabulary vocabulary;
  std::vector<MappedFile> files;
  // Imported weights, and copies of the few tensors that a file places at an odd address.
  std::vector<std::vector<std::byte>> owned;
  std::vector<std::string> warnings;
  std::vector<Tensor> tensors;
  std::map<std::string, size_t, std::less<>> index;

  void add(std::string name, const layout::Layout& layout, std::vector<int64_t> dims, layout::Shape shape,
           std::span<const std::byte> bytes, layout::Params params = {}) {
    index.emplace(name, tensors.size());
    tensors.push_back({std::move(name), &layout, shape, std::move(dims), bytes, params});
  }
  void read_gguf();
  void read_huggingface(int threads);
};

namespace {

/// [N, K]: dims beyond two are folded into N, a vector is one row. The product was checked when the file was parsed.
layout::Shape fold(std::span<const int64_t> dims) {
  int64_t N = 1;
  for (const int64_t dim : dims.first(dims.size() - 1)) N *= dim;
  return {N, dims.back()};
}

const layout::Layout* safetensors_layout(std::string_view dtype) {
  if (dtype == "F32") return &layout::get(layout::Id::f32);
  if (dtype == "F16") return &layout::get(layout::Id::f16);
  if (dtype == "BF16") return &layout::get(layout::Id::bf16);
  return nullptr;
}

}  // namespace

void Checkpoint::Data::read_gguf() {
  GgufSet set = open_gguf_set(path);
  files = std::move(set.files);
  metadata = std::move(set.metadata);
  Manifest manifest;
  naming_file(path, [&] {
    architecture = metadata.string("general.architecture").value_or("");
    vocabulary = vocabulary_from_metadata(metadata);
    if (const auto text = metadata.string(kManifestKey)) manifest = parse_manifest(*text, path);
  });
  for (GgufTensor& tensor : set.tensors) {
    const auto packed = manifest.find(tensor.name);
    if (packed != manifest.end()) {
      if (tensor.type != kGgmlTypeI8)
        throw Error("{}: tensor {}: {} describes it, but its type is {}, not I8", path, tensor.name, kManifestKey,
                    ggml_type_name(tensor.type));
      const layout::Layout& layout = packed_layout(tensor.name, packed->second, path);
      const layout::Params params = packed_params(tensor.name, packed->second, layout, path);
      const layout::Shape shape = packed->second.shape;
      const int64_t bytes = naming_file(fmt::format("{}: tensor {}", path, tensor.name),
                                        [&] { return layout.size_bytes(shape, params); });
      if (bytes != int64_t(tensor.bytes.size()))
        throw Error("{}: tensor {}: {} [{}, {}] takes {} bytes, found {}", path, tensor.name, layout.name, shape.N,
                    shape.K, bytes, tensor.bytes.size());
      manifest.erase(packed);
      add(std::move(tensor.name), layout, {shape.N, shape.K}, shape, tensor.bytes, params);
      continue;
    }
    const layout::Layout* layout = layout::find_ggml_type(tensor.type);
    if (layout == nullptr)
      throw Error("{}: tensor {}: type {} is no weight; known are {}, and I8 where {} describes it", path, tensor.name,
                  ggml_type_name(tensor.type), layout::known_row_names(), kManifestKey);
    const layout::Shape shape = fold(tensor.dims);
    add(std::move(tensor.name), *layout, std::move(tensor.dims), shape, tensor.bytes);
  }
  if (!manifest.empty())
    throw Error("{}: {} describes tensor {}, which the file lacks", path, kManifestKey, manifest.begin()->first);
}

void Checkpoint::Data::read_huggingface(int threads) {
  HfFolder folder = open_huggingface(path, threads);
  files = std::move(folder.files);
  metadata = std::move(folder.metadata);
  vocabulary = std::move(folder.vocabulary);
  architecture = std::move(folder.architecture);
  warnings = std::move(folder.warnings);
  for (HfTensor& tensor : folder.tensors) {
    SafetensorsEntry& entry = tensor.entry;
    if (tensor.imported) {
      ImportedMatrix& matrix = *tensor.imported;
      owned.push_back(std::move(matrix.bytes));
      add(std::move(tensor.name), *matrix.layout, {matrix.shape.N, matrix.shape.K}, matrix.shape, owned.back(),
          matrix.params);
      continue;
    }
    const layout::Layout* layout = safetensors_layout(entry.dtype);
    if (layout == nullptr)
      throw Error("{}: tensor {}: dtype {} is not supported for weights; known are F32, F16, BF16", tensor.file,
                  entry.name, entry.dtype);
    if (entry.dims.empty() || entry.bytes.empty() || entry.dims.size() > 2)
      throw Error("{}: tensor {}: a vector or a matrix is expected, found shape [{}]", tensor.file, entry.name,
                  fmt::join(entry.dims, ", "));
    std::span<const std::byte> bytes = entry.bytes;
    if (reinterpret_cast<uintptr_t>(bytes.data()) % size_t(layout->block_bytes) != 0) {
      owned.emplace_back(bytes.begin(), bytes.end());
      bytes = owned.back();
    }
    const layout::Shape shape = fold(entry.dims);
    add(std::move(tensor.name), *layout, std::move(entry.dims), shape, bytes);
  }
}

Checkpoint Checkpoint::open(const std::string& path, int threads) {
  namespace fs = std::filesystem;
  auto data = std::make_unique<Data>();
  data->path = path;
  std::error_code failed;
  if (fs::is_directory(path, failed)) {
    if (!file_exists(fs::path(path) / "config.json"))
      throw Error("{}: a folder without config.json; expected a Hugging Face folder or a .gguf file", path);
    data->source = Source::huggingface;
    data->read_huggingface(threads);
  } else {
    if (path.ends_with(".partial"))
      throw Error("{}: an unfinished file that an interrupted run left; delete it and write the model again", path);
    data->read_gguf();
  }
  return Checkpoint(std::move(data));
}

Checkpoint::Checkpoint(std::unique_ptr<Data> data) : data_(std::move(data)) {}
Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

const std::string& Checkpoint::path() const { return data_->path; }
Source Checkpoint::source() const { return data_->source; }
std::string Checkpoint::architecture() const { return data_->architecture; }
const Metadata& Checkpoint::metadata() const { return data_->metadata; }
const Vocabulary& Checkpoint::vocabulary() const { return data_->vocabulary; }
const std::vector<Tensor>& Checkpoint::tensors() const { return data_->tensors; }
const std::vector<std::string>& Checkpoint::warnings() const { return data_->warnings; }

RopePairs Checkpoint::rope_pairs() const {
  return data_->source == Source::gguf && data_->architecture == "llama" ? RopePairs::adjacent : RopePairs::halves;
}

const Tensor* Checkpoint::find(std::string_view name) const {
  const auto found = data_->index.find(name);
  return found == data_->index.end() ? nullptr : &data_->tensors[found->second];
}

const Tensor& Checkpoint::require(std::string_view name) const {
  if (const Tensor* tensor = find(name)) return *tensor;
  throw Error("{}: tensor {} is missing", data_->path, name);
}

void Checkpoint::drop_layers(std::span<const int64_t> layers) {
  const std::string count_key = data_->architecture + ".block_count";
  const int64_t count = data_->metadata.need_integer(count_key);
  std::vector<int64_t> number(size_t(std::max<int64_t>(count, 0)), 0);  // of each layer from now on; -1: it goes
  for (const int64_t layer : layers) {
    if (layer < 0 || layer >= count) throw Error("{}: has no layer {}, only 0 to {}", path(), layer, count - 1);
    number[size_t(layer)] = -1;
  }
  int64_t kept = 0;
  for (int64_t& n : number)
    if (n == 0) n = kept++;
  if (kept == 0) throw Error("{}: none of its {} layers would stay", path(), count);

  std::vector<Tensor> tensors;
  std::map<std::string, size_t, std::less<>> index;
  for (Tensor& tensor : data_->tensors) {
    constexpr std::string_view kBlock = "blk.";
    if (tensor.name.starts_with(kBlock)) {
      const char* first = tensor.name.data() + kBlock.size();
      const char* last = tensor.name.data() + tensor.name.size();
      int64_t layer = 0;
      const auto [end, error] = std::from_chars(first, last, layer);
      if (error != std::errc() || layer < 0 || layer >= count)
        throw Error("{}: tensor {} is of no layer from 0 to {}", path(), tensor.name, count - 1);
      if (number[size_t(layer)] < 0) continue;
      tensor.name = fmt::format("{}{}{}", kBlock, number[size_t(layer)], std::string(end, last));
    }
    index.emplace(tensor.name, tensors.size());
    tensors.push_back(std::move(tensor));
  }
  data_->tensors = std::move(tensors);
  data_->index = std::move(index);

  std::vector<std::string> found_for_all;
  for (const auto& [key, value] : data_->metadata.entries())
    if (key.starts_with(kThresholdPrefix)) found_for_all.push_back(key);
  for (const std::string& key : found_for_all) data_->metadata.erase(key);
  for (const char* name : {"attention.head_count", "attention.head_count_kv", "feed_forward_length"}) {
    const std::string key = fmt::format("{}.{}", data_->architecture, name);
    const auto values = data_->metadata.integers(key);  // one for all layers, or one for each
    if (!values || int64_t(values->size()) != count) continue;
    std::vector<uint32_t> rest;
    for (size_t layer = 0; layer < values->size(); ++layer)
      if (number[layer] >= 0) rest.push_back(uint32_t((*values)[layer]));
    data_->metadata.set(key, std::move(rest));
  }
  data_->metadata.set(count_key, uint32_t(kept));
}

int64_t Checkpoint::file_bytes() const {
  int64_t bytes = 0;
  for (const MappedFile& file : data_->files) bytes += int64_t(file.bytes().size());
  return bytes;
}

std::vector<int64_t> rope_adjacent_rows(int64_t n_heads, int64_t head_dim) {
  std::vector<int64_t> rows;
  rows.reserve(size_t(n_heads * head_dim));
  for (int64_t head = 0; head < n_heads; ++head)
    for (int64_t i = 0; i < head_dim; ++i)  // output row i of a head: even from its first half, odd from its second
      rows.push_back(head * head_dim + i / 2 + (i % 2) * (head_dim / 2));
  return rows;
}

}  // namespace lacuna::io
