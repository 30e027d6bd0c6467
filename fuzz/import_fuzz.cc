// Any bytes as a quantized checkpoint (a quantization_config, a NUL, a safetensors file): each module is put into one
// of our layouts, whose bytes are whole, or refused with an Error.
#include <cstdlib>
#include <map>

#include "core/error.h"
#include "io/import.h"
#include "io/json.h"

namespace {

using namespace lacuna;

void check(const io::ImportedMatrix& matrix) {
  const auto [N, K] = matrix.shape;
  if (N < 1 || K < 1 || int64_t(matrix.bytes.size()) != matrix.layout->size_bytes(matrix.shape, matrix.params))
    std::abort();
  try {
    layout::check_bytes(*matrix.layout, matrix.shape, matrix.bytes, matrix.params);
  } catch (const Error&) {
    std::abort();
  }
  std::vector<float> w(static_cast<size_t>(N * K));
  layout::decode_rows(*matrix.layout, matrix.shape, matrix.bytes, 0, N, w.data(), matrix.params);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::string_view text = input.substr(0, input.find('\0'));
  const auto file = std::as_bytes(std::span(data, size)).subspan(std::min(size, text.size() + 1));
  try {
    constexpr std::string_view kRules[] = {"dynamic"};
    const auto importer =
        io::make_importer({io::parse_json_object(text, "fuzz.json"), "fuzz.json", io::json_keys(text, kRules)});
    std::vector<io::FileTensor> tensors;
    for (io::SafetensorsEntry& entry : io::parse_safetensors(file, "fuzz.safetensors"))
      tensors.push_back({std::move(entry), "fuzz.safetensors"});
    std::map<std::string, io::ModuleTensors> modules;
    for (const io::FileTensor& tensor : tensors) {
      const size_t dot = std::min(tensor.entry.name.rfind('.'), tensor.entry.name.size());
      const std::string module = tensor.entry.name.substr(0, dot), part = tensor.entry.name.substr(dot);
      if (part.empty() || importer->use_of(part.substr(1)) != io::PartUse::read) continue;
      modules.try_emplace(module, module).first->second.add(part.substr(1), tensor);
    }
    for (const auto& [name, module] : modules) {
      if (!importer->takes(module)) continue;
      io::ImportedMatrix matrix;
      try {
        matrix = importer->import(module, nullptr);
      } catch (const Error&) {
        continue;
      }
      check(matrix);
    }
  } catch (const Error&) {
  }
  return 0;
}
