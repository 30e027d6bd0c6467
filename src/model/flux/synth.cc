#include "model/flux/synth.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
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

/// A name without its numbers.
std::string kind_of(std::string_view name) {
  std::string out;
  std::ranges::copy_if(name, std::back_inserter(out), [](char c) { return c < '0' || c > '9'; });
  return out;
}

HugeBuffer constant_vector(int64_t K, float value) {
  const std::vector<float> values(static_cast<size_t>(K), value);
  HugeBuffer out(values.size() * sizeof(float), false);
  std::memcpy(out.data(), values.data(), out.size());
  return out;
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

io::ImageCheckpoint random_checkpoint(std::string_view name, const Config& config, const io::ImagePolicy& policy,
                                      uint64_t seed, ThreadPool& pool) {
  std::vector<io::Tensor> tensors;
  std::vector<HugeBuffer> memory;
  std::map<std::tuple<std::string, int64_t, int64_t, const layout::Layout*>, std::span<const std::byte>> made;
  for (const TensorShape& tensor : tensor_shapes(config)) {
    const layout::Layout* stored = &layout::get(layout::Id::f32);
    if (!tensor.is_vector) {
      stored = policy.choose(tensor.name).layout;
      if (stored == nullptr) stored = &layout::get(layout::Id::bf16);
    }
    const auto [place, is_new] = made.try_emplace({kind_of(tensor.name), tensor.shape.N, tensor.shape.K, stored});
    if (is_new) {
      memory.push_back(
          tensor.is_vector
              ? constant_vector(tensor.shape.K, tensor.name.ends_with(".weight") ? 1.0f : 0.0f)
              : naming_file(tensor.name, [&] { return random_matrix(*stored, tensor.shape, {}, seed++, pool); }));
      place->second = memory.back().bytes();
    }
    std::vector<int64_t> dims = {tensor.shape.N, tensor.shape.K};
    if (tensor.is_vector) dims.erase(dims.begin());
    tensors.push_back({tensor.name, stored, tensor.shape, std::move(dims), place->second});
  }
  return io::ImageCheckpoint::in_memory(std::string(name), format_config(config), std::move(tensors),
                                        std::move(memory));
}

}  // namespace lacuna::model::flux
