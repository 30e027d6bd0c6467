// src/model/flux/names.h - where the weights of the net lie in a file.
//
// The net asks for weights by diffusers' names, without ".weight" and ".bias", with one exception: the last norm's
// scale and shift are norm_out.scale and norm_out.shift, which a file has as one matrix, diffusers' with the scale
// first, the first release's with the shift first. The first release also joins q, k and v, and in single blocks the
// MLP's first matrix with them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "model/flux/config.h"

namespace lacuna::model::flux {

/// Rows [row, row + rows asked for) of a tensor that has `total` rows.
struct Place {
  std::string tensor;             // without the suffix
  const char* suffix = "weight";  // of the values; norms of the first release: "scale"
  int64_t row = 0;
  int64_t total = 0;  // 0: the tensor has no other rows
};

/// By the net's names. Names that are not in it lie under themselves.
std::map<std::string, Place> places(const Config& config, Naming naming);

struct TensorShape {
  std::string name;  // diffusers', complete
  layout::Shape shape;
  bool is_vector = false;
};

/// Every tensor of a file in diffusers' naming.
std::vector<TensorShape> tensor_shapes(const Config& config);

}  // namespace lacuna::model::flux
