// src/io/image_checkpoint.h - the weights of a diffusion transformer as files hold them, under the names that they have
// there.
//
// Read are: a folder as diffusers' save_pretrained writes it (config.json, and safetensors in one file or in shards),
// or a pipeline's folder, of which its folder transformer/ counts; one .safetensors file; a GGUF file.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/huge_buffer.h"
#include "core/mapped_file.h"
#include "io/checkpoint.h"
#include "io/import.h"

namespace lacuna::io {

/// Key of a GGUF file that holds the text of config.json.
inline constexpr std::string_view kImageConfigKey = "lacuna.image.config";

class ImageCheckpoint {
 public:
  /// Throws Error naming the file, and the tensor where one is to blame.
  static ImageCheckpoint open(const std::string& path);
  /// Tensors that a program made; memory owns their bytes. name: for messages.
  static ImageCheckpoint in_memory(std::string name, std::string config, std::vector<Tensor> tensors,
                                   std::vector<HugeBuffer> memory);

  const std::string& path() const { return path_; }
  /// Text of config.json and where it stands; empty: there is none.
  const std::string& config() const { return config_; }
  const std::string& config_path() const { return config_path_; }

  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }
  /// nullptr: there is none.
  const Tensor* find(std::string_view name) const;
  /// The file of a tensor, for messages.
  const std::string& file_of(std::string_view name) const;
  int64_t weight_bytes() const;

 private:
  void read_folder();
  void read_safetensors(std::vector<FileTensor>& tensors);
  void read_gguf();

  std::string path_, config_, config_path_;
  std::vector<MappedFile> files_;
  std::vector<HugeBuffer> memory_;
  std::vector<Checkpoint> gguf_;                // none or one, which keeps its bytes
  std::vector<std::vector<std::byte>> copies_;  // of tensors at odd addresses
  std::map<std::string, Tensor, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> files_of_;
};

}  // namespace lacuna::io
