#include "io/tokenizer_json.h"

#include <nlohmann/json.hpp>

#include "gguf_bytes.h"
#include "io/pre_tokenizers.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

using nlohmann::json;

json byte_level() {
  return json::parse(R"({"added_tokens":[{"id":4,"content":"<|end|>","special":true}],"normalizer":null,
    "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":true},"post_processor":null,
    "model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2,"aba":3},"merges":["a b","ab a"]}})");
}
json sentencepiece() {
  return json::parse(
      R"({"added_tokens":[],"normalizer":{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},
    {"type":"Replace","pattern":{"String":" "},"content":"▁"}]},"pre_tokenizer":null,
    "model":{"type":"BPE","unk_token":"<unk>","byte_fallback":true,
             "vocab":{"<unk>":0,"<0x0A>":1,"▁":2,"a":3,"▁a":4,"b":5,"▁ab":6},"merges":[["▁","a"],["▁a","b"]]}})");
}
json with(json top, std::string_view changes) {
  top.merge_patch(json::parse(changes));
  return top;
}
Vocabulary parse(const json& top) { return parse_tokenizer_json(top.dump(), "tokenizer.json"); }

TEST(TokenizerJson, ByteLevelBpe) {
  const Vocabulary v = parse(byte_level());
  EXPECT_EQ(v.model, Vocabulary::Model::byte_bpe);
  EXPECT_EQ(v.pre, "gpt-2");
  EXPECT_TRUE(v.split_regexes.empty());
  EXPECT_EQ(v.tokens, (std::vector<std::string>{"a", "b", "ab", "aba", "<|end|>"}));
  EXPECT_EQ(v.merges, (std::vector<std::string>{"a b", "ab a"}));
  EXPECT_EQ(v.types[3], TokenType::normal);
  EXPECT_EQ(v.types[4], TokenType::control);
  EXPECT_EQ(v.add_bos, false);
  EXPECT_EQ(v.add_eos, false);
  EXPECT_FALSE(v.add_space_prefix);
  EXPECT_FALSE(v.nfc);
}

TEST(TokenizerJson, BothSpellingsOfMerges) {
  json pairs = byte_level();
  pairs["model"]["merges"] = json::parse(R"([["a","b"],["ab","a"]])");
  EXPECT_EQ(parse(pairs).merges, parse(byte_level()).merges);
}

TEST(TokenizerJson, SentencePieceTypeBpe) {
  const Vocabulary v = parse(sentencepiece());
  EXPECT_EQ(v.model, Vocabulary::Model::sentencepiece);
  EXPECT_TRUE(v.add_space_prefix);
  EXPECT_FALSE(v.remove_extra_whitespaces);
  EXPECT_EQ(v.unk_id, 0);
  EXPECT_EQ(v.types[0], TokenType::unknown);
  EXPECT_EQ(v.types[1], TokenType::byte);
  EXPECT_EQ(v.merges.size(), 2u);
  EXPECT_EQ(v.scores[4], 0.0f);   // rank 0
  EXPECT_EQ(v.scores[6], -1.0f);  // rank 1
  EXPECT_LT(v.scores[3], -1e6f);  // no merge makes it
  json metaspace = sentencepiece();
  metaspace["normalizer"] = nullptr;
  metaspace["pre_tokenizer"] =
      json::parse(R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"never","split":false})");
  EXPECT_FALSE(parse(metaspace).add_space_prefix);
  metaspace["pre_tokenizer"]["prepend_scheme"] = "first";
  EXPECT_TRUE(parse(metaspace).add_space_prefix);
  metaspace["pre_tokenizer"]["split"] = true;
  EXPECT_EQ(parse(metaspace).merges.size(), 2u);  // no merge goes across a space
  metaspace["model"]["vocab"]["▁▁"] = 7;
  metaspace["model"]["merges"].push_back(json::array({"▁", "▁"}));
  EXPECT_ERROR(parse(metaspace), "goes across one");
}

TEST(TokenizerJson, Unigram) {
  const json top = json::parse(R"({"pre_tokenizer":{"type":"Metaspace","replacement":"▁","add_prefix_space":true},
    "model":{"type":"Unigram","unk_id":0,"byte_fallback":true,"vocab":[["<unk>",0],["<0x41>",-9],["▁a",-1.5]]}})");
  const Vocabulary v = parse(top);
  EXPECT_EQ(v.model, Vocabulary::Model::unigram);
  EXPECT_EQ(v.scores, (std::vector<float>{0, -9, -1.5f}));
  EXPECT_EQ(v.types[0], TokenType::unknown);
  EXPECT_EQ(v.types[1], TokenType::byte);
  EXPECT_ERROR(parse(with(top, R"({"model":{"unk_id":3}})")), "unk_id 3 of 3 tokens");
  EXPECT_ERROR(parse(with(top, R"({"model":{"vocab":[["a"]]}})")), "must be [piece, score]");
}

TEST(TokenizerJson, PreTokenizersOfKnownFamiliesGetTheirNames) {
  const auto pre = [](const json& node, bool ignore_merges = false) {
    json top = byte_level();
    top["pre_tokenizer"] = node;
    top["model"]["ignore_merges"] = ignore_merges;
    return parse(top);
  };
  const auto split = [](std::string_view regex) {
    json node = json::parse(
        R"({"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{},"behavior":"Isolated","invert":false},
      {"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]})");
    node["pretokenizers"][0]["pattern"]["Regex"] = regex;
    return node;
  };
  EXPECT_EQ(pre(split(kGpt2Regex)).pre, "gpt-2");
  const std::string llama3 =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  std::string qwen = llama3;
  qwen.erase(qwen.find("{1,3}"), 5);
  EXPECT_EQ(pre(split(llama3), true).pre, "llama-bpe");
  EXPECT_EQ(pre(split(qwen)).pre, "qwen2");
  // Llama 3's name also means ignore_merges; without it the regex has no name.
  const Vocabulary other = pre(split(llama3), false);
  EXPECT_EQ(other.pre, "");
  EXPECT_EQ(other.split_regexes, (std::vector<std::string>{llama3}));
  const Vocabulary own = pre(split("x+"));
  EXPECT_EQ(own.pre, "");
  EXPECT_EQ(own.split_regexes, (std::vector<std::string>{"x+"}));

  const json digits = json::parse(R"({"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},
    {"type":"ByteLevel","add_prefix_space":false,"use_regex":true}]})");
  EXPECT_EQ(pre(digits).pre, "smollm");
  json late = digits;
  std::swap(late["pretokenizers"][0], late["pretokenizers"][1]);
  EXPECT_EQ(pre(late).split_regexes, (std::vector<std::string>{std::string(kGpt2Regex), R"(\p{N})"}));
  json text = split("");
  text["pretokenizers"][0]["pattern"] = json::parse(R"({"String":"a.b"})");
  EXPECT_EQ(pre(text).split_regexes, (std::vector<std::string>{R"(a\.b)"}));
}

TEST(TokenizerJson, PostProcessor) {
  json top = byte_level();
  top["post_processor"] =
      json::parse(R"({"type":"Sequence","processors":[{"type":"ByteLevel"},{"type":"TemplateProcessing",
    "single":[{"SpecialToken":{"id":"<|end|>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}]}]})");
  EXPECT_EQ(parse(top).add_bos, true);
  EXPECT_EQ(parse(top).bos_id, 4);
  EXPECT_EQ(parse(top).add_eos, false);
  json& single = top["post_processor"]["processors"][1]["single"];
  std::swap(single[0], single[1]);
  EXPECT_EQ(parse(top).add_eos, true);
  EXPECT_EQ(parse(top).add_bos, false);
  single.push_back(single[1]);
  EXPECT_ERROR(parse(top), "adds two tokens on one side");
  single = json::parse(R"([{"SpecialToken":{"id":"<none>"}}])");
  EXPECT_ERROR(parse(top), "\"<none>\" is not in the vocabulary");
  single = json::array();
  EXPECT_ERROR(parse(top), "has no text");
  top["post_processor"] = json::parse(R"({"type":"BertProcessing"})");
  EXPECT_ERROR(parse(top), "post_processor \"BertProcessing\" is not supported");
}

TEST(TokenizerJson, WhatWouldChangeIdsIsRefused) {
  EXPECT_ERROR(parse(with(byte_level(), R"({"model":{"type":"WordPiece"}})")),
               "\"WordPiece\" is not supported; known are BPE, Unigram");
  EXPECT_ERROR(parse(with(byte_level(), R"({"model":{"dropout":0.1}})")), "dropout");
  EXPECT_ERROR(parse(with(byte_level(), R"({"model":{"end_of_word_suffix":"</w>"}})")), "end_of_word_suffix");
  EXPECT_ERROR(parse(with(byte_level(), R"({"model":{"continuing_subword_prefix":"##"}})")),
               "continuing_subword_prefix");
  EXPECT_NO_THROW(parse(with(byte_level(), R"({"model":{"end_of_word_suffix":""}})")));
  EXPECT_ERROR(parse(with(byte_level(), R"({"normalizer":{"type":"Lowercase"}})")),
               "normalizer \"Lowercase\" is not supported");
  EXPECT_TRUE(parse(with(byte_level(), R"({"normalizer":{"type":"NFC"}})")).nfc);
  EXPECT_ERROR(parse(with(byte_level(), R"({"pre_tokenizer":{"type":"Whitespace"}})")),
               "pre_tokenizer \"Whitespace\" is not supported");
  EXPECT_ERROR(parse(with(byte_level(), R"({"pre_tokenizer":{"add_prefix_space":true}})")), "add_prefix_space");
  EXPECT_ERROR(parse(with(byte_level(), R"({"pre_tokenizer":null})")), "neither byte-level");
  EXPECT_ERROR(
      parse(with(byte_level(), R"({"pre_tokenizer":{"type":"Split","pattern":{"Regex":"x"},"behavior":"Removed"}})")),
      "behavior \"Removed\"");
  EXPECT_ERROR(parse(with(byte_level(), R"({"added_tokens":[{"id":4,"content":"<m>","lstrip":true}]})")),
               "\"<m>\" with lstrip");
  EXPECT_ERROR(parse(with(sentencepiece(), R"({"model":{"unk_token":"<u>"}})")), "\"<u>\" is not in the vocabulary");
  EXPECT_ERROR(parse(with(sentencepiece(), R"({"model":{"ignore_merges":true}})")), "ignore_merges");
  EXPECT_ERROR(parse(with(sentencepiece(), R"({"pre_tokenizer":{"type":"Digits","individual_digits":true}})")),
               "Split or Digits");
}

TEST(TokenizerJson, LyingVocabularies) {
  EXPECT_ERROR(parse(with(byte_level(), R"({"model":{"vocab":{"b":0}}})")), "tokens \"a\" and \"b\" share the id 0");
  EXPECT_ERROR(parse(with(byte_level(), R"({"model":{"vocab":{"x":2147483647}}})")),
               "5 tokens, but ids up to 2147483647");
  EXPECT_ERROR(parse(with(byte_level(), R"({"model":{"vocab":{"x":-1}}})")), "must be an integer from 0");
  EXPECT_ERROR(parse(with(byte_level(), R"({"model":{"vocab":{"x":1e3}}})")), "must be an integer from 0");
  EXPECT_ERROR(parse(with(byte_level(), R"({"model":{"merges":["ab"]}})")), "merge 0 (\"ab\") must be two parts");
  EXPECT_ERROR(parse(with(byte_level(), R"({"model":{"merges":["a b c"]}})")), "must be two parts without spaces");
  EXPECT_ERROR(parse(with(byte_level(), R"({"model":{"merges":["b a"]}})")),
               "needs the token \"ba\", which the vocabulary lacks");
  EXPECT_ERROR(parse(with(byte_level(), R"({"model":{"merges":[["a"]]}})")), "merge 0 must be");
  EXPECT_ERROR(parse(with(byte_level(), R"({"added_tokens":[{"id":1,"content":"x"}]})")),
               "has the id 1 of token \"b\"");
  EXPECT_ERROR(parse(with(byte_level(), R"({"added_tokens":[{"id":-1,"content":"x"}]})")), "has the id -1");
  EXPECT_ERROR(parse(with(byte_level(), R"({"added_tokens":[{"id":9999999999,"content":"x"}]})")),
               "has the id 9999999999");
  EXPECT_ERROR(parse(with(byte_level(), R"({"added_tokens":[{"id":4,"content":""}]})")), "is empty");
  EXPECT_ERROR(parse(with(byte_level(), R"({"model":null})")), "\"model\" is missing");
  const Vocabulary gap = parse(with(byte_level(), R"({"added_tokens":[{"id":6,"content":"x"}]})"));
  EXPECT_EQ(gap.tokens[4], "[PAD4]");
  EXPECT_EQ(gap.types[4], TokenType::unused);
  EXPECT_EQ(gap.types[6], TokenType::user_defined);
}

TEST(TokenizerJson, VocabAndMergesFiles) {
  const Vocabulary v =
      parse_vocab_and_merges(R"({"a":0,"b":1,"ab":2,"#":3,"#a":4})", "#version: 0.2\na b\r\n\n# a\n", "vocab.json");
  EXPECT_EQ(v.merges, (std::vector<std::string>{"a b", "# a"}));
  EXPECT_EQ(v.model, Vocabulary::Model::byte_bpe);
  EXPECT_ERROR(parse_vocab_and_merges(R"({"a":0})", "a b", "vocab.json"), "needs the token \"b\"");
  EXPECT_ERROR(parse_vocab_and_merges(R"({"a":0})", "#version\nab\n", "vocab.json"), "must be two parts");
  EXPECT_ERROR(parse_vocab_and_merges("[]", "", "vocab.json"), "expected a JSON object");
}

TEST(TokenizerJson, Docs22m) {
  LACUNA_NEED_SHARED("models/docs22m/tokenizer.json");
  const Vocabulary v =
      parse_tokenizer_json(test::read_text(test::shared_data() / "models/docs22m/tokenizer.json"), "t");
  EXPECT_EQ(v.pre, "gpt-2");
  EXPECT_EQ(v.tokens.size(), 8192u);
  EXPECT_EQ(v.merges.size(), 7935u);
  EXPECT_EQ(v.types[0], TokenType::control);
}

TEST(TokenizerJson, EveryTruncationIsRefused) {
  const std::string whole = test::read_text(test::fixture("tokenizer/tiny_spm_json/tokenizer.json"));
  ASSERT_EQ(parse_tokenizer_json(whole, "t").tokens.size(), 500u);
  for (size_t size = 0; size + 2 < whole.size(); size += 61)
    EXPECT_ERROR(parse_tokenizer_json(std::string_view(whole).substr(0, size), "t"), "bad JSON");
}

}  // namespace
}  // namespace lacuna::io
