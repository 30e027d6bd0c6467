#include "io/hf_tokenizer.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>

#include "core/error.h"
#include "core/mapped_file.h"
#include "io/end_of_generation.h"
#include "io/json.h"
#include "io/sentencepiece.h"
#include "io/tokenizer_json.h"

namespace lacuna::io {

namespace {

using nlohmann::json;

class Folder {
 public:
  explicit Folder(std::string path) : path_(std::move(path)) {}
  std::string name(const char* file) const { return (std::filesystem::path(path_) / file).string(); }
  bool has(const char* file) const { return std::filesystem::exists(name(file)); }
  std::string text(const char* file) const { return read_file(name(file)); }
  /// An empty object where there is no such file.
  json object(const char* file) const { return has(file) ? parse_json_object(text(file), name(file)) : json::object(); }

 private:
  std::string path_;
};

/// bos_token and the like: a string, or an object that holds it.
std::optional<std::string> token_text(const json& config, const char* key, const std::string& where) {
  const JsonObject in(config, where);
  const json* value = in.find(key);
  if (value != nullptr && value->is_object()) return JsonObject(*value, where).need_string("content");
  return in.string(key);
}

std::optional<int32_t> find_token(const Vocabulary& vocabulary, const std::string& text) {
  const auto found = std::find(vocabulary.tokens.begin(), vocabulary.tokens.end(), text);
  if (found == vocabulary.tokens.end()) return std::nullopt;
  return int32_t(found - vocabulary.tokens.begin());
}

/// An id, a list of ids, or nothing.
std::vector<int32_t> read_ids(const json& config, const char* key, size_t n_tokens, const std::string& where) {
  std::vector<int32_t> out;
  const json* value = JsonObject(config, where).find(key);
  if (value == nullptr) return out;
  for (const json& id : value->is_array() ? *value : json::array({*value})) {
    if (!id.is_number_integer()) throw Error("{}: \"{}\" must be an id or a list of ids", where, key);
    if (id == json(-1)) continue;  // "none"
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= n_tokens)
      throw Error("{}: \"{}\" names the id {}, but there are {} tokens", where, key, id.dump(), n_tokens);
    out.push_back(id.get<int32_t>());
  }
  return out;
}

/// tokenizer_config.json's added_tokens_decoder {"id": {content, special}} and added_tokens.json {content: id}.
void read_side_tokens(const Folder& folder, const json& config, Vocabulary& vocabulary) {
  std::vector<AddedToken> tokens;
  const std::string where = folder.name("tokenizer_config.json");
  if (const json* added = JsonObject(config, where).object("added_tokens_decoder")) {
    for (const auto& [id, entry] : added->items()) {
      const JsonObject in(entry, where);
      AddedToken token{-1, in.need_string("content"), in.boolean("special").value_or(false)};
      const auto [end, failed] = std::from_chars(id.data(), id.data() + id.size(), token.id);
      if (failed != std::errc() || end != id.data() + id.size())
        throw Error("{}: added_tokens_decoder: \"{}\" is no id", where, id);
      for (const char* key : {"single_word", "lstrip", "rstrip"})
        if (in.boolean(key).value_or(false))
          throw Error("{}: added token \"{}\" with {} is not supported", where, token.content, key);
      tokens.push_back(std::move(token));
    }
  }
  const std::string extra_where = folder.name("added_tokens.json");
  const json extra = folder.object("added_tokens.json");
  const JsonObject extra_in(extra, extra_where);
  for (const auto& [content, id] : extra.items()) {
    const int64_t number = extra_in.need_integer(content.c_str());
    const bool known = std::any_of(tokens.begin(), tokens.end(), [&](const AddedToken& t) { return t.id == number; });
    if (!known) tokens.push_back({number, content, true});
  }
  std::sort(tokens.begin(), tokens.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  for (const AddedToken& token : tokens) add_token(vocabulary, token, where);
}

/// vocab.json and merges.txt do not say how text is cut into words: the tokenizer's class, else the model's kind, does.
Vocabulary read_vocab_and_merges(const Folder& folder, const HfConfig& config, const JsonObject& tokenizer_config) {
  Vocabulary out =
      parse_vocab_and_merges(folder.text("vocab.json"), folder.text("merges.txt"), folder.name("vocab.json"));
  std::string kind = tokenizer_config.string("tokenizer_class").value_or("");
  if (kind.ends_with("Fast")) kind.resize(kind.size() - 4);
  if (kind == "GPT2Tokenizer" || (kind.empty() && config.model_type == "opt")) {
    out.pre = "gpt-2";
  } else if (kind == "Qwen2Tokenizer" || (kind.empty() && config.model_type.starts_with("qwen"))) {
    out.pre = "qwen2";
    out.nfc = true;
  } else {
    throw Error(
        "{}: vocab.json and merges.txt with tokenizer class \"{}\" in a model of type {}; known classes are "
        "GPT2Tokenizer, Qwen2Tokenizer; others need a tokenizer.json",
        folder.name("vocab.json"), kind, config.model_type);
  }
  if (tokenizer_config.boolean("add_prefix_space").value_or(false))
    throw Error("{}: add_prefix_space is not supported", folder.name("tokenizer_config.json"));
  return out;
}

/// Sets an id by the token's text in tokenizer_config.json. A special token that is a plain piece so far becomes one.
void name_special(const json& config, const char* key, std::optional<int32_t>& id, Vocabulary& vocabulary,
                  const std::string& where) {
  const auto text = token_text(config, key, where);
  if (!text) return;
  const auto found = find_token(vocabulary, *text);
  if (!found) throw Error("{}: {} \"{}\" is not in the vocabulary", where, key, *text);
  id = found;
  TokenType& type = vocabulary.types[size_t(*found)];
  if (type == TokenType::normal || type == TokenType::user_defined) type = TokenType::control;
}

std::string read_chat_template(const Folder& folder, const JsonObject& tokenizer_config) {
  if (folder.has("chat_template.jinja")) return folder.text("chat_template.jinja");
  const json* value = tokenizer_config.find("chat_template");
  if (value == nullptr) return {};
  if (value->is_array()) {  // several, by name
    const std::string where = folder.name("tokenizer_config.json");
    for (const json& entry : *value) {
      const JsonObject in(entry, where);
      if (in.need_string("name") == "default") return in.need_string("template");
    }
    return {};
  }
  return tokenizer_config.string("chat_template").value_or("");
}

}  // namespace

std::string read_file(const std::string& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

Vocabulary read_hf_tokenizer(const std::string& path, const HfConfig& config, const std::string& config_text) {
  const Folder folder(path);
  const std::string where = folder.name("tokenizer_config.json");
  const json tokenizer_config = folder.object("tokenizer_config.json");
  const JsonObject in(tokenizer_config, where);
  Vocabulary out;
  if (folder.has("tokenizer.json")) {
    out = parse_tokenizer_json(folder.text("tokenizer.json"), folder.name("tokenizer.json"));
  } else if (folder.has("tokenizer.model")) {
    const std::string file = folder.name("tokenizer.model");
    const MappedFile mapped(file);
    out = parse_sentencepiece(mapped.bytes(), file);
    read_side_tokens(folder, tokenizer_config, out);
  } else if (folder.has("vocab.json") && folder.has("merges.txt")) {
    out = read_vocab_and_merges(folder, config, in);
    read_side_tokens(folder, tokenizer_config, out);
  } else {
    return out;
  }
  if (int64_t(out.tokens.size()) > config.vocab_size)
    throw Error("{}: the tokenizer has {} tokens, but config.json's vocab_size is {}", path, out.tokens.size(),
                config.vocab_size);

  const std::string config_where = folder.name("config.json");
  const json model_config = parse_json_object(config_text, config_where);
  const std::string generation_where = folder.name("generation_config.json");
  const json generation = folder.object("generation_config.json");
  const auto bos = read_ids(model_config, "bos_token_id", out.tokens.size(), config_where);
  const auto eos = read_ids(model_config, "eos_token_id", out.tokens.size(), config_where);
  if (!out.bos_id && !bos.empty()) out.bos_id = bos[0];
  if (!out.eos_id && !eos.empty()) out.eos_id = eos[0];
  name_special(tokenizer_config, "bos_token", out.bos_id, out, where);
  name_special(tokenizer_config, "eos_token", out.eos_id, out, where);
  name_special(tokenizer_config, "pad_token", out.pad_id, out, where);
  if (const auto unknown = token_text(tokenizer_config, "unk_token", where)) {
    if (const auto id = find_token(out, *unknown)) {
      out.unk_id = id;
      if (out.types[size_t(*id)] == TokenType::normal) out.types[size_t(*id)] = TokenType::control;
    }
  }
  for (const auto id : {out.bos_id, out.eos_id})
    if (id && out.types[size_t(*id)] == TokenType::normal) out.types[size_t(*id)] = TokenType::control;
  if (const auto add = in.boolean("add_bos_token")) out.add_bos = add;
  if (const auto add = in.boolean("add_eos_token")) out.add_eos = add;
  out.eog_ids = read_ids(generation, "eos_token_id", out.tokens.size(), generation_where);
  if (!JsonObject(generation, generation_where).find("eos_token_id")) out.eog_ids = eos;
  out.chat_template = read_chat_template(folder, in);
  add_known_end_tokens(out);
  pad_tokens(out, config.vocab_size);
  return out;
}

}  // namespace lacuna::io
