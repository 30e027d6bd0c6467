// Any bytes as a safetensors file: read or refused with an Error; spans lie inside and do not overlap.
#include <cstdlib>

#include "core/error.h"
#include "io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lacuna;
  const auto bytes = std::as_bytes(std::span(data, size));
  try {
    const std::byte* end = bytes.data();
    for (const io::SafetensorsEntry& entry : io::parse_safetensors(bytes, "fuzz.safetensors")) {
      if (entry.bytes.data() < end || entry.bytes.data() + entry.bytes.size() > bytes.data() + size) std::abort();
      end = entry.bytes.data() + entry.bytes.size();
    }
  } catch (const Error&) {
  }
  return 0;
}
