#include "io/import.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.h"
#include "core/mapped_file.h"
#include "io/json.h"

namespace lacuna::io {

void ModuleTensors::add(std::string_view part, const FileTensor& tensor) {
  if (!parts_.emplace(part, &tensor).second) throw Error("{}: {} has a second tensor {}", tensor.where(), name_, part);
}

const FileTensor* ModuleTensors::look(std::string_view part) const {
  const auto found = parts_.find(part);
  return found == parts_.end() ? nullptr : found->second;
}

const FileTensor* ModuleTensors::find(std::string_view part) const {
  const FileTensor* tensor = look(part);
  if (tensor != nullptr) read_.emplace(part);
  return tensor;
}

const FileTensor& ModuleTensors::need(std::string_view part) const {
  if (const FileTensor* tensor = find(part)) return *tensor;
  const auto& [there, tensor] = *parts_.begin();
  throw Error("{}: {} has this tensor, but {}.{} is missing", tensor->where(), name_, name_, part);
}

void ModuleTensors::check_all_read() const {
  for (const auto& [part, tensor] : parts_)
    if (!read_.contains(part))
      throw Error("{}: the weight of {} comes from {}, which leave no place for this tensor", tensor->where(), name_,
                  fmt::join(read_, ", "));
}

int64_t ModuleTensors::bytes() const {
  int64_t bytes = 0;
  for (const auto& [part, tensor] : parts_) bytes += int64_t(tensor->entry.bytes.size());
  return bytes;
}

void ModuleTensors::release() const {
  for (const auto& [part, tensor] : parts_) MappedFile::release(tensor->entry.bytes);
}

ImportedMatrix Importer::import(const ModuleTensors& module, ThreadPool* pool) {
  module.forget_reads();
  ImportedMatrix out = read(module, pool);
  module.check_all_read();
  return out;
}

std::unique_ptr<Importer> make_importer(const QuantizationConfig& config) {
  const auto& [settings, where, rules] = config;
  // LLM Compressor's first files name no method.
  const bool unnamed =
      settings.is_object() && (settings.contains("config_groups") || settings.contains("sparsity_config"));
  const JsonObject in(settings, where);
  const std::string method = in.string("quant_method").value_or(unnamed ? "compressed-tensors" : "");
  if (method == "gptq") return make_gptq_importer(config);
  if (method == "awq") return make_awq_importer(config);
  if (method == "compressed-tensors") return make_compressed_importer(config);
  throw Error(
      "{}: quant_method \"{}\" is not read; known are gptq, awq and compressed-tensors; start from the model before it "
      "was quantized",
      where, method);
}

bool is_quantized_part(std::string_view part) {
  constexpr std::string_view kParts[] = {"qweight", "qzeros", "weight_packed", "weight_scale", "compressed", "bitmask"};
  return std::ranges::find(kParts, part) != std::end(kParts);
}

}  // namespace lacuna::io
