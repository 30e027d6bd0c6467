#include "io/import.h"

#include "core/error.h"
#include "core/mapped_file.h"
#include "io/json.h"

namespace lacuna::io {

void ModuleTensors::add(std::string_view part, const FileTensor& tensor) {
  if (!parts_.emplace(part, &tensor).second) throw Error("{}: {} has a second tensor {}", tensor.where(), name_, part);
}

const FileTensor* ModuleTensors::find(std::string_view part) const {
  const auto found = parts_.find(part);
  return found == parts_.end() ? nullptr : found->second;
}

const FileTensor& ModuleTensors::need(std::string_view part) const {
  if (const FileTensor* tensor = find(part)) return *tensor;
  const auto& [there, tensor] = *parts_.begin();
  throw Error("{}: {} has this tensor, but {}.{} is missing", tensor->where(), name_, name_, part);
}

int64_t ModuleTensors::bytes() const {
  int64_t bytes = 0;
  for (const auto& [part, tensor] : parts_) bytes += int64_t(tensor->entry.bytes.size());
  return bytes;
}

void ModuleTensors::release() const {
  for (const auto& [part, tensor] : parts_) MappedFile::release(tensor->entry.bytes);
}

std::unique_ptr<Importer> make_importer(const nlohmann::json& config, const std::string& where) {
  // LLM Compressor's first files name no method.
  const bool unnamed = config.is_object() && (config.contains("config_groups") || config.contains("sparsity_config"));
  const JsonObject in(config, where);
  const std::string method = in.string("quant_method").value_or(unnamed ? "compressed-tensors" : "");
  if (method == "gptq") return make_gptq_importer(config, where);
  if (method == "awq") return make_awq_importer(config, where);
  if (method == "compressed-tensors") return make_compressed_importer(config, where);
  throw Error(
      "{}: quant_method \"{}\" is not read; known are gptq, awq and compressed-tensors; start from the model before it "
      "was quantized",
      where, method);
}

}  // namespace lacuna::io
