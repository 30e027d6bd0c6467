#include "model/shapes.h"

#include <algorithm>
#include <charconv>
#include <optional>

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

constexpr int64_t kSingleWeights = int64_t{1} << 30;  // of all copies: 256 MiB at 2 bits
constexpr int64_t kLeastSide = 256, kMostSide = int64_t{1} << 20;

/// "NxK"; none: `text` is something else.
std::optional<LinearGroupShape> parse_matrix(std::string_view text) {
  LinearGroupShape out{std::string(text), 0, {0}};
  const char* const end = text.data() + text.size();
  const auto [cross, n_error] = std::from_chars(text.data(), end, out.outputs[0]);
  if (n_error != std::errc() || cross == end || *cross != 'x') return std::nullopt;
  const auto [last, k_error] = std::from_chars(cross + 1, end, out.K);
  if (k_error != std::errc() || last != end) return std::nullopt;
  return out;
}

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

LinearLayers linear_layers(const ModelShape& s) {
  const int64_t q = s.n_heads * s.head_dim, kv = s.n_kv_heads * s.head_dim;
  LinearLayers out{std::string(s.name), s.n_layers, {{"q+k+v", s.n_embd, {q, kv, kv}}, {"o", q, {s.n_embd}}}};
  if (s.architecture == "opt")
    out.groups.push_back({"up", s.n_embd, {s.n_ff}});
  else
    out.groups.push_back({"gate+up", s.n_embd, {s.n_ff, s.n_ff}});
  out.groups.push_back({"down", s.n_ff, {s.n_embd}});
  return out;
}

LinearLayers linear_layers(std::string_view name) {
  const std::optional<LinearGroupShape> matrix = parse_matrix(name);
  if (!matrix) return linear_layers(find_shape(name));
  const int64_t N = matrix->outputs[0], K = matrix->K;
  if (std::min(N, K) < kLeastSide || std::max(N, K) > kMostSide)
    throw Error("{}: expected N and K from {} to {}", name, kLeastSide, kMostSide);
  return {std::string(name), std::max<int64_t>(2, (kSingleWeights + N * K - 1) / (N * K)), {*matrix}};
}

}  // namespace lacuna::model
