#include "io/hf_tokenizer.h"

#include <filesystem>

#include "gguf_bytes.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

namespace fs = std::filesystem;

constexpr const char* kVocab = R"({"<s>":0,"</s>":1,"a":2,"b":3,"ab":4})";
constexpr const char* kMerges = "#version: 0.2\na b\n";

class HfTokenizer : public testing::Test {
 protected:
  void put(const std::string& name, std::string_view text) { test::write_bytes(folder_.file(name), text); }
  void put_fixture(const std::string& path) {
    for (const auto& entry : fs::directory_iterator(test::fixture(path)))
      fs::copy_file(entry, folder_.path() / entry.path().filename(), fs::copy_options::overwrite_existing);
  }
  Vocabulary read(const std::string& model_type, int64_t vocab_size, const std::string& config = "{}") {
    HfConfig c;
    c.model_type = model_type;
    c.vocab_size = vocab_size;
    return read_hf_tokenizer(folder_.path().string(), c, config);
  }
  test::TempDir folder_;
};

TEST_F(HfTokenizer, NoTokenizerFiles) { EXPECT_EQ(read("llama", 9).model, Vocabulary::Model::none); }

TEST_F(HfTokenizer, VocabAndMergesByModelAndClass) {
  put("vocab.json", kVocab);
  put("merges.txt", kMerges);
  const Vocabulary opt = read("opt", 8, R"({"bos_token_id":1,"eos_token_id":1,"pad_token_id":0})");
  EXPECT_EQ(opt.pre, "gpt-2");
  EXPECT_FALSE(opt.nfc);
  ASSERT_EQ(opt.tokens.size(), 8u);
  EXPECT_EQ(opt.tokens[7], "[PAD7]");
  EXPECT_EQ(opt.types[7], TokenType::unused);
  EXPECT_EQ(opt.types[0], TokenType::control);
  EXPECT_EQ(opt.types[1], TokenType::control);
  EXPECT_EQ(opt.eog_ids, std::vector<int32_t>{1});
  EXPECT_EQ(opt.add_bos, std::nullopt);
  const Vocabulary qwen = read("qwen2", 5);
  EXPECT_EQ(qwen.pre, "qwen2");
  EXPECT_TRUE(qwen.nfc);
  EXPECT_ERROR(read("llama", 5), "others need a tokenizer.json");
  put("tokenizer_config.json", R"({"tokenizer_class":"GPT2TokenizerFast"})");
  EXPECT_EQ(read("llama", 5).pre, "gpt-2");
  put("tokenizer_config.json", R"({"tokenizer_class":"GPT2Tokenizer","add_prefix_space":true})");
  EXPECT_ERROR(read("opt", 5), "add_prefix_space");
  EXPECT_ERROR(read("opt", 4), "add_prefix_space");
  put("tokenizer_config.json", R"({"tokenizer_class":"GPT2Tokenizer"})");
  EXPECT_ERROR(read("opt", 4), "the tokenizer has 5 tokens, but config.json's vocab_size is 4");
}

TEST_F(HfTokenizer, TokenizerConfigNamesSpecialTokens) {
  put("vocab.json", kVocab);
  put("merges.txt", kMerges);
  put("tokenizer_config.json", R"({"bos_token":"<s>","eos_token":{"content":"</s>","lstrip":false},"pad_token":"<none>",
    "add_bos_token":true,"chat_template":"T","added_tokens_decoder":{"5":{"content":"<|im_end|>","special":true},
    "6":{"content":"<tool>","special":false}}})");
  const Vocabulary v = read("opt", 8, R"({"bos_token_id":3})");
  EXPECT_EQ(v.bos_id, 0);  // the name wins over config.json's number
  EXPECT_EQ(v.eos_id, 1);
  EXPECT_EQ(v.pad_id, std::nullopt);
  EXPECT_EQ(v.add_bos, true);
  EXPECT_EQ(v.chat_template, "T");
  EXPECT_EQ(v.tokens[5], "<|im_end|>");
  EXPECT_EQ(v.types[5], TokenType::control);
  EXPECT_EQ(v.types[6], TokenType::user_defined);
  put("tokenizer_config.json", R"({"bos_token":"<none>"})");
  EXPECT_ERROR(read("opt", 8), "bos_token \"<none>\" is not in the vocabulary");
  put("tokenizer_config.json", R"({"added_tokens_decoder":{"x":{"content":"y"}}})");
  EXPECT_ERROR(read("opt", 8), "\"x\" is no id");
  put("tokenizer_config.json", R"({"added_tokens_decoder":{"5":{"content":"y","rstrip":true}}})");
  EXPECT_ERROR(read("opt", 8), "\"y\" with rstrip");
}

TEST_F(HfTokenizer, AddedTokensFile) {
  put("vocab.json", kVocab);
  put("merges.txt", kMerges);
  put("added_tokens.json", R"({"<x>":6,"<y>":5})");
  EXPECT_EQ(read("opt", 7).types[6], TokenType::control);  // nobody says: text that a user types must not forge it
  put("special_tokens_map.json", R"({"additional_special_tokens":["<x>"]})");
  const Vocabulary v = read("opt", 7);
  EXPECT_EQ(v.tokens[6], "<x>");
  EXPECT_EQ(v.types[6], TokenType::control);
  EXPECT_EQ(v.types[5], TokenType::user_defined);
  put("added_tokens.json", R"({"<x>":2})");
  EXPECT_ERROR(read("opt", 7), "has the id 2 of token \"a\"");
  put("added_tokens.json", R"({"<x>":"5"})");
  EXPECT_ERROR(read("opt", 7), "must be an integer");
}

TEST_F(HfTokenizer, EndOfGenerationIds) {
  put("vocab.json", kVocab);
  put("merges.txt", kMerges);
  EXPECT_EQ(read("opt", 5, R"({"eos_token_id":[1,4]})").eog_ids, (std::vector<int32_t>{1, 4}));
  put("generation_config.json", R"({"eos_token_id":3})");
  EXPECT_EQ(read("opt", 5, R"({"eos_token_id":[1,4]})").eog_ids, std::vector<int32_t>{3});
  EXPECT_EQ(read("opt", 5, R"({"eos_token_id":[1,4]})").eos_id, 1);
  put("generation_config.json", R"({"eos_token_id":[0,9]})");
  EXPECT_ERROR(read("opt", 5), "generation_config.json: \"eos_token_id\" names the id 9, but there are 5 tokens");
  put("generation_config.json", R"({"eos_token_id":"x"})");
  EXPECT_ERROR(read("opt", 5), "must be an id or a list of ids");
  put("generation_config.json", R"({"eos_token_id":-1})");
  EXPECT_TRUE(read("opt", 5).eog_ids.empty());
}

TEST_F(HfTokenizer, ChatTemplates) {
  put("vocab.json", kVocab);
  put("merges.txt", kMerges);
  put("tokenizer_config.json",
      R"({"chat_template":[{"name":"tool_use","template":"A"},{"name":"default","template":"B"}]})");
  EXPECT_EQ(read("opt", 5).chat_template, "B");
  put("chat_template.jinja", "C");
  EXPECT_EQ(read("opt", 5).chat_template, "C");
}

TEST_F(HfTokenizer, BeginTokenOfTemplateAndConfigMustAgree) {
  put_fixture("tokenizer/tiny_llama3");
  const Vocabulary v = read("llama", 400);
  EXPECT_EQ(v.add_bos, true);
  EXPECT_EQ(v.bos_id, 392);
  EXPECT_EQ(v.eos_id, 396);
  EXPECT_EQ(v.types[397], TokenType::user_defined);
  EXPECT_EQ(v.tokens.size(), 400u);
  put("tokenizer_config.json", R"({"bos_token":"<|eot_id|>"})");
  EXPECT_ERROR(read("llama", 400),
               "bos_token is \"<|eot_id|>\", but tokenizer.json adds \"<|begin_of_text|>\" to every text");
  put("tokenizer_config.json", R"({"add_bos_token":false})");
  EXPECT_EQ(read("llama", 400).add_bos, false);
}

TEST_F(HfTokenizer, TokenizerJsonWinsOverTokenizerModel) {
  put_fixture("tokenizer/tiny_spm_json");
  EXPECT_FALSE(read("llama", 500).merges.empty());
  fs::copy_file(test::fixture("tokenizer/tiny_spm/tokenizer.model"), folder_.file("tokenizer.model"));
  EXPECT_FALSE(read("llama", 500).merges.empty());
  fs::remove(folder_.file("tokenizer.json"));
  const Vocabulary v = read("llama", 501);
  EXPECT_TRUE(v.merges.empty());
  EXPECT_EQ(v.scores.size(), 501u);
  EXPECT_EQ(v.model, Vocabulary::Model::sentencepiece);
  EXPECT_EQ(v.types[0], TokenType::unknown);
}

}  // namespace
}  // namespace lacuna::io
