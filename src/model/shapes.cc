#include "model/shapes.h"

#include <string>

#include "core/error.h"

namespace lacuna::model {
namespace {

// From each model's published config.json.
// clang-format off
constexpr ModelShape kShapes[] = {
    //                             layers  embd heads  kv  dim    ff   vocab     ctx   eps     base  factor  tied  bias
    {"llama-2-7b",    "llama",     32,  4096,  32,  32,  128, 11008,  32000,   4096, 1e-5,   10000,  1, false, false},
    {"llama-2-13b",   "llama",     40,  5120,  40,  40,  128, 13824,  32000,   4096, 1e-5,   10000,  1, false, false},
    {"llama-30b",     "llama",     60,  6656,  52,  52,  128, 17920,  32000,   2048, 1e-6,   10000,  1, false, false},
    {"llama-2-70b",   "llama",     80,  8192,  64,   8,  128, 28672,  32000,   4096, 1e-5,   10000,  1, false, false},
    {"llama-3-8b",    "llama",     32,  4096,  32,   8,  128, 14336, 128256,   8192, 1e-5,  500000,  1, false, false},
    {"llama-3.2-1b",  "llama",     16,  2048,  32,   8,   64,  8192, 128256, 131072, 1e-5,  500000, 32, true,  false},
    {"qwen2.5-1.5b",  "qwen2",     28,  1536,  12,   2,  128,  8960, 151936,  32768, 1e-6, 1000000,  1, true,  true},
    {"opt-6.7b",      "opt",       32,  4096,  32,  32,  128, 16384,  50272,   2048, 1e-5,       0,  1, true,  true},
};
// clang-format on

}  // namespace

std::span<const ModelShape> known_shapes() { return kShapes; }

const ModelShape& find_shape(std::string_view name) {
  std::string names;
  for (const ModelShape& shape : kShapes) {
    if (shape.name == name) return shape;
    names += (names.empty() ? "" : ", ") + std::string(shape.name);
  }
  throw Error("unknown shape '{}'; known: {}", name, names);
}

}  // namespace lacuna::model
