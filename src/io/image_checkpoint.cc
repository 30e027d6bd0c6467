#include "io/image_checkpoint.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "core/error.h"
#include "core/files.h"
#include "io/hf_tokenizer.h"
#include "io/shards.h"

namespace lacuna::io {

namespace {

namespace fs = std::filesystem;

constexpr std::array<const char*, 2> kStems = {"diffusion_pytorch_model.safetensors", "model.safetensors"};

ShardPlan plan_folder(const fs::path& folder) {
  for (const char* stem : kStems) {
    const fs::path index = folder / (std::string(stem) + ".index.json");
    if (file_exists(index)) return read_shard_index(index);
    if (file_exists(folder / stem)) return {{stem, {}}};
  }
  std::vector<std::string> others;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors") others.push_back(entry.path().filename().string());
  if (others.size() == 1) return {{others.front(), {}}};
  if (others.empty()) throw Error("{}: holds no .safetensors file", folder.string());
  std::sort(others.begin(), others.end());
  throw Error("{}: holds {} .safetensors files ({}, {}, ...) and no index; name one of them", folder.string(),
              others.size(), others[0], others[1]);
}

const layout::Layout* layout_of(std::string_view dtype) {
  if (dtype == "F32") return &layout::get(layout::Id::f32);
  if (dtype == "F16") return &layout::get(layout::Id::f16);
  if (dtype == "BF16") return &layout::get(layout::Id::bf16);
  return nullptr;
}

}  // namespace

ImageCheckpoint ImageCheckpoint::open(const std::string& path) {
  ImageCheckpoint out;
  out.path_ = path;
  std::error_code failed;
  if (fs::is_directory(path, failed)) {
    out.read_folder();
  } else if (path.ends_with(".safetensors")) {
    std::vector<FileTensor> tensors;
    if (!file_exists(path)) throw Error("{}: there is no such file", path);
    read_shard(path, {}, out.files_, tensors);
    out.read_safetensors(tensors);
  } else {
    out.read_gguf();
  }
  if (out.tensors_.empty()) throw Error("{}: has no weights", path);
  return out;
}

ImageCheckpoint ImageCheckpoint::in_memory(std::string name, std::string config, std::vector<Tensor> tensors,
                                           std::vector<HugeBuffer> memory) {
  ImageCheckpoint out;
  out.config_path_ = name + ": configuration";
  out.path_ = std::move(name);
  out.config_ = std::move(config);
  out.memory_ = std::move(memory);
  for (Tensor& tensor : tensors) {
    std::string key = tensor.name;
    out.tensors_.emplace(std::move(key), std::move(tensor));
  }
  return out;
}

void ImageCheckpoint::read_folder() {
  fs::path folder(path_);
  if (!file_exists(folder / "config.json") && file_exists(folder / "transformer" / "config.json"))
    folder /= "transformer";
  if (file_exists(folder / "config.json")) {
    config_path_ = (folder / "config.json").string();
    config_ = read_file(config_path_);
  }
  const ShardPlan plan = plan_folder(folder);
  std::vector<FileTensor> tensors;
  for (const auto& [name, wanted] : plan) read_shard(folder / name, wanted, files_, tensors);
  read_safetensors(tensors);
}

void ImageCheckpoint::read_safetensors(std::vector<FileTensor>& tensors) {
  for (FileTensor& tensor : tensors) {
    SafetensorsEntry& entry = tensor.entry;
    const layout::Layout* layout = layout_of(entry.dtype);
    if (layout == nullptr)
      throw Error("{}: dtype {} is not supported for weights; known are F32, F16, BF16", tensor.where(), entry.dtype);
    if (entry.dims.empty() || entry.dims.size() > 2 || entry.bytes.empty())
      throw Error("{}: a vector or a matrix is expected, found shape [{}]", tensor.where(),
                  fmt::join(entry.dims, ", "));
    std::span<const std::byte> bytes = entry.bytes;
    if (reinterpret_cast<uintptr_t>(bytes.data()) % size_t(layout->block_bytes) != 0)
      bytes = copies_.emplace_back(bytes.begin(), bytes.end());
    const layout::Shape shape = {entry.dims.size() == 2 ? entry.dims[0] : 1, entry.dims.back()};
    if (!tensors_.emplace(entry.name, Tensor{entry.name, layout, shape, entry.dims, bytes}).second)
      throw Error("{}: is in two files", tensor.where());
    files_of_.emplace(entry.name, tensor.file);
  }
}

void ImageCheckpoint::read_gguf() {
  const Checkpoint& checkpoint = gguf_.emplace_back(Checkpoint::open(path_));
  if (checkpoint.architecture() != "flux")
    throw Error("{}: its architecture is \"{}\"; the image commands run \"flux\"", path_, checkpoint.architecture());
  if (auto text = checkpoint.metadata().string(kImageConfigKey)) {
    config_ = std::move(*text);
    config_path_ = fmt::format("{}: {}", path_, kImageConfigKey);
  }
  for (const Tensor& tensor : checkpoint.tensors()) tensors_.emplace(tensor.name, tensor);
}

const Tensor* ImageCheckpoint::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const std::string& ImageCheckpoint::file_of(std::string_view name) const {
  const auto found = files_of_.find(name);
  return found == files_of_.end() ? path_ : found->second;
}

int64_t ImageCheckpoint::weight_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors_) bytes += int64_t(tensor.bytes.size());
  return bytes;
}

}  // namespace lacuna::io
