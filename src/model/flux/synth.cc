#include "model/flux/synth.h"

#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "model/flux/names.h"
#include "model/synth.h"

namespace lacuna::model::flux {

namespace {

Config schnell() {
  Config out;
  out.guidance = false;
  return out;
}

Config dev() {
  Config out = schnell();
  out.guidance = true;
  return out;
}

Config moe() {
  Config out = dev();
  out.n_double = 16;
  out.n_single = 40;
  out.n_heads = 16;
  out.mlp_width = 4 * out.width();
  out.moe = {32, 4, 2048, true};
  return out;
}

Config tiny() {
  Config out = dev();
  out.n_double = 2;
  out.n_single = 2;
  out.n_heads = 2;
  out.text_dim = 256;
  out.pooled_dim = 256;
  out.mlp_width = 4 * out.width();
  return out;
}

bool of_a_block(std::string_view name) {
  return name.starts_with("transformer_blocks.") || name.starts_with("single_transformer_blocks.");
}

}  // namespace

std::span<const ImageShape> known_image_shapes() {
  static const std::array<ImageShape, 4> kShapes = {
      ImageShape{"flux.1-dev", dev()}, {"flux.1-schnell", schnell()}, {"flux-moe-18b", moe()}, {"tiny", tiny()}};
  return kShapes;
}

const ImageShape& find_image_shape(std::string_view name) {
  std::string names;
  for (const ImageShape& shape : known_image_shapes()) {
    if (shape.name == name) return shape;
    names += (names.empty() ? "" : ", ") + std::string(shape.name);
  }
  throw Error("unknown shape '{}'; known: {}", name, names);
}

int64_t count_parameters(const Config& config) {
  int64_t count = 0;
  for (const TensorShape& tensor : tensor_shapes(config)) count += tensor.shape.N * tensor.shape.K;
  return count;
}

io::ImageCheckpoint random_checkpoint(std::string_view name, const Config& config, layout::Id layout, uint64_t seed,
                                      ThreadPool& pool) {
  std::vector<io::Tensor> tensors;
  std::vector<HugeBuffer> memory;
  for (const TensorShape& tensor : tensor_shapes(config)) {
    const auto& stored = layout::get(tensor.is_vector          ? layout::Id::f32
                                     : of_a_block(tensor.name) ? layout
                                                               : layout::Id::bf16);
    if (tensor.is_vector) {
      memory.emplace_back(size_t(tensor.shape.K) * sizeof(float), false);
      if (tensor.name.ends_with(".weight")) {
        const std::vector<float> ones(size_t(tensor.shape.K), 1.0f);
        std::memcpy(memory.back().data(), ones.data(), memory.back().size());
      }
    } else {
      memory.push_back(naming_file(tensor.name, [&] { return random_matrix(stored, tensor.shape, {}, seed++, pool); }));
    }
    std::vector<int64_t> dims = {tensor.shape.N, tensor.shape.K};
    if (tensor.is_vector) dims.erase(dims.begin());
    tensors.push_back({tensor.name, &stored, tensor.shape, std::move(dims), memory.back().bytes()});
  }
  return io::ImageCheckpoint::in_memory(std::string(name), format_config(config), std::move(tensors),
                                        std::move(memory));
}

}  // namespace lacuna::model::flux
