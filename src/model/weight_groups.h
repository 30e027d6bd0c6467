// src/model/weight_groups.h - the weights of a layer that read one input and are called together.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "kernels/linear.h"
#include "model/sparsity.h"

namespace lacuna::model {

struct WeightGroup {
  Input input = Input::attn_in;
  std::string name;                        // "attn_q+attn_k+attn_v"
  std::vector<kernels::WeightView> parts;  // without biases

  int64_t bytes() const;
  std::string key() const { return kernels::plan_key(parts); }
};

kernels::WeightView view_of(const io::Tensor& tensor);

int64_t layer_count(const io::Checkpoint& checkpoint);
/// The groups of a layer in the order of Input, as Decoder makes them, of those that the file has.
std::vector<WeightGroup> layer_groups(const io::Checkpoint& checkpoint, int64_t layer);

}  // namespace lacuna::model
