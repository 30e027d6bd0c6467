// Any bytes as lacuna.manifest: read or refused with an Error; sizes that were read do not overflow.
#include <cstdlib>

#include "core/checked_math.h"
#include "core/error.h"
#include "io/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lacuna;
  try {
    for (const auto& [name, tensor] : io::parse_manifest({reinterpret_cast<const char*>(data), size}, "fuzz.gguf")) {
      const auto weights = checked_mul(tensor.shape.N, tensor.shape.K);
      if (name.empty() || !weights || tensor.nnz < 0 || tensor.nnz > *weights || tensor.sha256.size() != 64)
        std::abort();
      try {
        const layout::Layout& layout = io::packed_layout(name, tensor, "fuzz.gguf");
        const layout::Params params = io::packed_params(name, tensor, layout, "fuzz.gguf");
        if (params.tile_rows < 0 || params.group_size < 0 || layout.size_bytes(tensor.shape, params) <= 0) std::abort();
      } catch (const Error&) {
      }
    }
  } catch (const Error&) {
  }
  return 0;
}
