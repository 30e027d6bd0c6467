#include <map>
#include <optional>

#include "compress/walk.h"
#include "core/error.h"
#include "core/sha256.h"
#include "io/gguf_model.h"
#include "io/gguf_writer.h"

namespace lacuna::compress {
namespace {

/// Norms and biases become f32, as everywhere in GGUF files; matrices keep their bytes.
const layout::Layout& layout_as_it_is(const io::Tensor& tensor) {
  return io::is_matrix(tensor) ? *tensor.layout : layout::get(layout::Id::f32);
}

void write_as_it_is(const io::Checkpoint& checkpoint, const io::Tensor& tensor, io::GgufWriter& writer) {
  if (io::is_matrix(tensor)) {
    writer.write(tensor.bytes);
    if (tensor.layout->ggml_type < 0) writer.set_source_sha256(tensor.name, sha256_hex(tensor.bytes));
    return;
  }
  const auto count = size_t(tensor.shape.N * tensor.shape.K);
  std::vector<float> values(count), ordered(count);
  layout::decode_rows(*tensor.layout, tensor.shape, tensor.bytes, 0, tensor.shape.N, values.data(), tensor.params);
  const std::vector<int64_t> order = io::gguf_row_order(checkpoint, tensor);
  for (size_t i = 0; i < count; ++i) ordered[i] = values[order.empty() ? i : size_t(order[i])];
  writer.write(std::as_bytes(std::span(ordered)));
}

}  // namespace

int64_t write_model(const io::Checkpoint& checkpoint, const std::string& work_folder, int64_t layers,
                    const std::string& path) {
  std::map<std::string, int64_t> layer_of;  // of compressed tensors
  std::vector<io::TensorPlan> plan;
  std::map<std::string, io::TensorPlan> packed_plan;
  for (int64_t layer = 0; layer < layers; ++layer)
    for (const PackedTensor& tensor : read_layer(layer_path(work_folder, layer)).tensors) {
      layer_of[tensor.name] = layer;
      packed_plan[tensor.name] = {tensor.name, tensor.layout, tensor.dims, tensor.params};
    }
  for (const io::Tensor& tensor : checkpoint.tensors()) {
    const auto found = packed_plan.find(tensor.name);
    plan.push_back(found != packed_plan.end()
                       ? found->second
                       : io::TensorPlan{tensor.name, &layout_as_it_is(tensor), tensor.dims, tensor.params});
  }
  const std::vector<float> rope_factors = io::llama3_rope_factors(checkpoint);
  if (!rope_factors.empty())
    plan.push_back({std::string(io::kRopeFactors), &layout::get(layout::Id::f32), {int64_t(rope_factors.size())}, {}});

  io::GgufWriter writer(
      path, io::gguf_metadata(checkpoint, read_layer(layer_path(work_folder, 0)).tensors.back().layout->id), plan);
  std::optional<std::pair<int64_t, PackedLayer>> open;  // one layer is in memory at a time
  for (const io::Tensor& tensor : checkpoint.tensors()) {
    const auto found = layer_of.find(tensor.name);
    if (found == layer_of.end()) {
      write_as_it_is(checkpoint, tensor, writer);
      continue;
    }
    if (!open || open->first != found->second)
      open = {found->second, read_layer(layer_path(work_folder, found->second))};
    for (const PackedTensor& packed : open->second.tensors) {
      if (packed.name != tensor.name) continue;
      writer.write(packed.bytes);
      if (packed.layout->ggml_type < 0) writer.set_source_sha256(tensor.name, sha256_hex(tensor.bytes));
    }
  }
  if (!rope_factors.empty()) writer.write(std::as_bytes(std::span(rope_factors)));
  return writer.finish();
}

}  // namespace lacuna::compress
