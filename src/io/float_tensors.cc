#include "io/float_tensors.h"

#include <cassert>
#include <nlohmann/json.hpp>
#include <span>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/mapped_file.h"
#include "io/safetensors.h"
#include "layout/float_rows.h"
#include "layout/layout.h"

namespace lacuna::io {

FloatTensors read_float_tensors(const std::string& path) {
  const MappedFile file(path);
  FloatTensors out;
  for (const SafetensorsEntry& entry : parse_safetensors(file.bytes(), path)) {
    FloatTensor tensor{entry.dims, std::vector<float>(size_t(checked_product(entry.dims).value_or(0)))};
    if (entry.dtype == "F32")
      layout::decode_f32(entry.bytes, tensor.values);
    else if (entry.dtype == "F16")
      layout::decode_f16(entry.bytes, tensor.values);
    else if (entry.dtype == "BF16")
      layout::decode_bf16(entry.bytes, tensor.values);
    else
      throw Error("{}: tensor {}: dtype {} is not supported; known are F32, F16, BF16", path, entry.name, entry.dtype);
    if (const int64_t bad = layout::find_non_finite(tensor.values); bad >= 0)
      throw Error("{}: tensor {}: value {} is {}, which is not finite", path, entry.name, bad,
                  tensor.values[size_t(bad)]);
    out.emplace(entry.name, std::move(tensor));
  }
  return out;
}

FloatTensorWriter::FloatTensorWriter(const std::string& path, const Plan& plan,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  for (const auto& [name, dims] : plan) {
    const int64_t begin = left_;
    left_ += checked_product(dims).value();
    header[name] = {{"dtype", "F32"},
                    {"shape", dims},
                    {"data_offsets", {begin * int64_t(sizeof(float)), left_ * int64_t(sizeof(float))}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the values start at a multiple of 8
  const auto length = uint64_t(text.size());
  file_.write(std::as_bytes(std::span(&length, 1)));
  file_.write(std::as_bytes(std::span(text)));
}

void FloatTensorWriter::write(std::span<const float> values) {
  left_ -= int64_t(values.size());
  assert(left_ >= 0);
  file_.write(std::as_bytes(values));
}

void FloatTensorWriter::finish() {
  assert(left_ == 0);
  file_.commit();
}

void write_float_tensors(const std::string& path, const FloatTensors& tensors,
                         const std::map<std::string, std::string>& metadata) {
  FloatTensorWriter::Plan plan;
  for (const auto& [name, tensor] : tensors) {
    assert(checked_product(tensor.dims) == int64_t(tensor.values.size()));
    plan.emplace_back(name, tensor.dims);
  }
  FloatTensorWriter writer(path, plan, metadata);
  for (const auto& [name, tensor] : tensors) writer.write(tensor.values);
  writer.finish();
}

}  // namespace lacuna::io
