// A trained model as AutoGPTQ's first versions wrote it, from text to text.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/scalar.h"
#include "io/hf_folder.h"
#include "process.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

constexpr int64_t kGroup = 32;

/// One matrix in 8 bits: weight = scale * (code - 128).
void add_gptq(const Entry& weight, std::vector<Entry>& out) {
  const int64_t N = weight.shape[0], K = weight.shape[1], G = K / kGroup;
  const auto at = [&](int64_t n, int64_t k) {
    f16 half;
    std::memcpy(&half, weight.bytes.data() + 2 * (n * K + k), sizeof(half));
    return to_float(half);
  };
  std::vector<uint8_t> code(size_t(N * K)), zero(size_t(G * N), 127);  // zeros are stored less one
  std::vector<uint16_t> scales(size_t(G * N));
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t g = 0; g < G; ++g) {
      float largest = 1e-4f;
      for (int64_t k = g * kGroup; k < (g + 1) * kGroup; ++k) largest = std::max(largest, std::abs(at(n, k)));
      const f16 scale = to_f16(largest / 127);
      scales[size_t(g * N + n)] = scale.bits;
      for (int64_t k = g * kGroup; k < (g + 1) * kGroup; ++k) {
        const float steps = std::clamp(std::nearbyint(at(n, k) / to_float(scale)), -128.0f, 127.0f);
        code[size_t((k / 4 * N + n) * 4 + k % 4)] = uint8_t(int(steps) + 128);  // four to a word, down the column
      }
    }
  }
  const std::string module = weight.name.substr(0, weight.name.rfind('.') + 1);
  out.push_back({module + "qweight", "I32", {K / 4, N}, bytes_of(code)});
  out.push_back({module + "qzeros", "I32", {G, N / 4}, bytes_of(zero)});
  out.push_back({module + "scales", "F16", {G, N}, bytes_of(scales)});
}

class GptqFolder : public Folder {
 public:
  GptqFolder() : Folder("text_model") {
    std::vector<Entry> entries;
    for (const Entry& entry : entries_of(file("model.safetensors"))) {
      if (entry.name.ends_with("_proj.weight"))
        add_gptq(entry, entries);
      else
        entries.push_back(entry);
    }
    std::filesystem::remove(file("model.safetensors"));
    put("gptq_model-8bit-32g.safetensors", safetensors(entries));
    put("quantize_config.json", R"({"bits":8,"group_size":32,"damp_percent":0.01,"desc_act":false,"sym":true})");
  }
};

TEST(GptqFolder, PredictsAsTheModelThatItWasMadeFrom) {
  const GptqFolder folder;
  const std::string out = folder.file("out.gguf"), text = fixture("text_model/sample.txt");
  const auto perplexity = [&](const std::string& model) {
    return json_of({"perplexity", model, "-f", text, "--ctx", "64"})["ppl"].get<double>();
  };
  const double expected = perplexity(fixture("text_model"));
  EXPECT_NEAR(perplexity(folder.path()), expected, 0.01 * expected);
  output_of({"quantize", folder.path(), "-o", out, "--layout", "source"});
  EXPECT_NEAR(perplexity(out), expected, 0.01 * expected);
  EXPECT_NE(output_of({"inspect", folder.path()}).find("gq8"), std::string::npos);
  EXPECT_FALSE(output_of({"run", folder.path(), "-p", "The file", "-n", "8", "--temp", "0"}).empty());
}

TEST(GptqFolder, TwoWeightFilesAreNotGuessedFrom) {
  const GptqFolder folder;
  folder.put("gptq_model-4bit-128g.safetensors", "");
  expect_error({"inspect", folder.path()}, "neither model.safetensors nor");
}

}  // namespace
}  // namespace lacuna::test
