// Ids against third parties: llama.cpp's vectors, Hugging Face tokenizers, SentencePiece.
#include <gtest/gtest.h>

#include <sstream>

#include "tokenizer/vocabularies.h"

namespace lacuna::test {
namespace {

using Ids = std::vector<int32_t>;

struct Vector {
  std::string text;
  Ids ids;
};

/// Texts between separator lines, and one line of ids for each.
std::vector<Vector> llama_cpp_vectors(const std::string& name) {
  const std::filesystem::path folder = shared_data() / "tokenizer/llama.cpp";
  const std::string texts = read_text(folder / ("ggml-vocab-" + name + ".gguf.inp"));
  std::istringstream ids(read_text(folder / ("ggml-vocab-" + name + ".gguf.out")));
  constexpr std::string_view kSeparator = "\n__ggml_vocab_test__\n";
  std::vector<Vector> vectors;
  for (size_t at = 0; at != std::string::npos;) {
    const size_t end = texts.find(kSeparator, at);
    Vector vector{texts.substr(at, end == std::string::npos ? end : end - at), {}};
    std::string line;
    std::getline(ids, line);  // the last text has no ids, so its line may be missing
    std::istringstream numbers(line);
    for (int32_t id = 0; numbers >> id;) vector.ids.push_back(id);
    vectors.push_back(std::move(vector));
    at = end == std::string::npos ? end : end + kSeparator.size();
  }
  return vectors;
}

void expect_llama_cpp_vectors(const std::string& name, Vocabulary vocabulary) {
  const Tokenizer tokenizer(std::move(vocabulary));
  const std::vector<Vector> vectors = llama_cpp_vectors(name);
  ASSERT_EQ(vectors.size(), 47u);
  for (const Vector& vector : vectors) {
    EXPECT_EQ(encode_plain(tokenizer, vector.text), vector.ids) << testing::PrintToString(vector.text);
    EXPECT_EQ(tokenizer.decode(vector.ids), vector.text);
  }
}

class LlamaCppGguf : public testing::TestWithParam<std::string> {};

TEST_P(LlamaCppGguf, GivesItsIds) {
  const std::string file = "tokenizer/llama.cpp/ggml-vocab-" + GetParam() + ".gguf";
  LACUNA_NEED_SHARED(file);
  expect_llama_cpp_vectors(GetParam(), io::Checkpoint::open((shared_data() / file).string()).vocabulary());
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, LlamaCppGguf, testing::Values("llama-spm", "phi-3", "gpt-2"));

TEST(LlamaCpp, GivesItsIdsForQwen2) {
  LACUNA_NEED_SHARED("tokenizer/qwen2/vocab.json");
  expect_llama_cpp_vectors("qwen2", qwen2_vocabulary());
}

class Fixture : public testing::TestWithParam<std::string> {};

TEST_P(Fixture, GivesTheIdsOfHuggingFaceOrSentencePiece) {
  const std::string& name = GetParam();
  if (!name.starts_with("tiny_")) LACUNA_NEED_SHARED("tokenizer/gpt2/vocab.json");
  const auto texts = nlohmann::json::parse(read_text(fixture("tokenizer/texts.json"))).get<std::vector<std::string>>();
  const auto expected = nlohmann::json::parse(read_text(fixture("tokenizer/" + name + ".json")));
  const auto ids = expected.at("ids").get<std::vector<Ids>>();
  ASSERT_EQ(ids.size(), texts.size());
  ASSERT_GT(texts.size(), 50u);

  const Tokenizer tokenizer(fixture_vocabulary(name));
  for (size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(encode_plain(tokenizer, texts[i]), ids[i]) << "text " << i << ": " << texts[i];
    if (expected.contains("decoded")) {
      EXPECT_EQ(tokenizer.decode(ids[i]), expected["decoded"][i].get<std::string>()) << "text " << i;
    }
    if (expected.contains("ids_special")) {
      const auto& special = expected["ids_special"];
      const std::string key = std::to_string(i);
      EXPECT_EQ(encode_plain(tokenizer, texts[i], true), special.contains(key) ? special[key].get<Ids>() : ids[i])
          << "text " << i << ": " << texts[i];
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, Fixture,
                         testing::Values("gpt2", "opt", "qwen2", "llama2", "docs22m", "tiny_llama3", "tiny_smollm",
                                         "tiny_spm", "tiny_spm_json", "tiny_unigram"),
                         [](const auto& param) { return param.param; });

TEST(Docs22m, TokenizesThePromptOfItsReference) {
  LACUNA_NEED_SHARED("models/docs22m/reference.json");
  const auto reference = nlohmann::json::parse(read_text(shared_data() / "models/docs22m/reference.json"));
  const Tokenizer tokenizer(fixture_vocabulary("docs22m"));
  const auto ids = reference.at("ids").get<Ids>();
  EXPECT_EQ(tokenizer.encode(reference.at("prompt").get<std::string>()), ids);  // and no BOS
}

}  // namespace
}  // namespace lacuna::test
