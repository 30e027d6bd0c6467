#include "model/weight_groups.h"

#include <fmt/format.h>

#include <utility>

namespace lacuna::model {

int64_t WeightGroup::bytes() const {
  int64_t bytes = 0;
  for (const kernels::WeightView& part : parts) bytes += int64_t(part.bytes.size());
  return bytes;
}

kernels::WeightView view_of(const io::Tensor& tensor) {
  return {tensor.name, tensor.layout, tensor.shape, tensor.bytes, {}, tensor.params};
}

int64_t layer_count(const io::Checkpoint& checkpoint) {
  return checkpoint.metadata().need_integer(checkpoint.architecture() + ".block_count");
}

std::vector<WeightGroup> layer_groups(const io::Checkpoint& checkpoint, int64_t layer) {
  static constexpr const char* kNames[kInputs][3] = {{"attn_q", "attn_k", "attn_v"},
                                                     {"attn_output", nullptr, nullptr},
                                                     {"ffn_gate", "ffn_up", nullptr},
                                                     {"ffn_down", nullptr, nullptr}};
  std::vector<WeightGroup> groups;
  for (size_t input = 0; input < size_t(kInputs); ++input) {
    WeightGroup group;
    group.input = Input(input);
    for (const char* name : kNames[input]) {
      const io::Tensor* tensor = name ? checkpoint.find(fmt::format("blk.{}.{}.weight", layer, name)) : nullptr;
      if (!tensor) continue;
      if (!group.name.empty()) group.name += '+';
      group.name += name;
      group.parts.push_back(view_of(*tensor));
    }
    if (!group.parts.empty()) groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace lacuna::model
