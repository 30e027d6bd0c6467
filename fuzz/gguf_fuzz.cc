// Any bytes as a GGUF file: read or refused with an Error, and what was read can be relied on.
#include <cstdlib>

#include "core/error.h"
#include "io/checkpoint.h"
#include "io/gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lacuna;
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    const io::GgufFile file = io::parse_gguf(bytes, "fuzz.gguf");
    for (const io::GgufTensor& tensor : file.tensors) {
      if (tensor.bytes.data() < bytes.data() || tensor.bytes.data() + tensor.bytes.size() > bytes.data() + size)
        std::abort();
      unsigned sum = 0;
      for (const std::byte b : tensor.bytes) sum += unsigned(b);
      if (sum > 255u * tensor.bytes.size()) std::abort();
    }
    for (const auto& [key, value] : file.metadata.entries())
      if (file.metadata.find(key) != &value) std::abort();
    const Vocabulary vocabulary = io::vocabulary_from_metadata(file.metadata);
    if (vocabulary.types.size() != vocabulary.tokens.size()) std::abort();
  } catch (const Error&) {
  }
  return 0;
}
