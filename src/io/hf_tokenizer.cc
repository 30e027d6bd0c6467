#include "io/hf_tokenizer.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <set>

#include "core/error.h"
#include "core/files.h"
#include "core/mapped_file.h"
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
  bool has(const char* file) const { return file_exists(name(file)); }
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

/// The tokens that tokenizer_config.json and special_tokens_map.json name as special; nullopt where there is neither.
std::optional<std::set<std::string>> special_names(const Folder& folder, const json& tokenizer_config) {
  if (!folder.has("tokenizer_config.json") && !folder.has("special_tokens_map.json")) return std::nullopt;
  std::set<std::string> out;
  const auto read = [&](const json& config, const std::string& where) {
    for (const char* key : {"bos_token", "eos_token", "unk_token", "pad_token"})
      if (auto text = token_text(config, key, where)) out.insert(*std::move(text));
    const json* more = JsonObject(config, where).find("additional_special_tokens");
    if (more == nullptr || !more->is_array()) return;
    for (const json& entry : *more) {
      if (entry.is_object())
        out.insert(JsonObject(entry, where).need_string("content"));
      else if (entry.is_string())
        out.insert(entry.get<std::string>());
    }
  };
  read(tokenizer_config, folder.name("tokenizer_config.json"));
  read(folder.object("special_tokens_map.json"), folder.name("special_tokens_map.json"));
  return out;
}

/// tokenizer_config.json's added_tokens_decoder {"id": {content, special}} and added_tokens.json {content: id}. Where
/// no file says which of the latter are special, all are: text that a user types must not become a control token.
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
  const auto special = special_names(folder, config);
  for (const auto& [content, id] : extra.items()) {
    const int64_t number = extra_in.need_integer(content.c_str());
    const bool known = std::any_of(tokens.begin(), tokens.end(), [&](const AddedToken& t) { return t.id == number; });
    if (!known) tokens.push_back({number, content, !special || special->contains(content)});
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

/// A special token that is a plain piece so far becomes a control token.
void make_control(std::optional<int32_t> id, Vocabulary& vocabulary) {
  if (!id) return;
  TokenType& type = vocabulary.types[size_t(*id)];
  if (type == TokenType::normal || type == TokenType::user_defined) type = TokenType::control;
}

/// Sets an id by the token's text in tokenizer_config.json, `added`: this token is put beside every text already.
void name_special(const json& config, const char* key, bool added, std::optional<int32_t>& id,
                  const Vocabulary& vocabulary, const std::string& where) {
  const auto text = token_text(config, key, where);
  if (!text) return;
  const auto found = find_token(vocabulary, *text);
  if (!found) throw Error("{}: {} \"{}\" is not in the vocabulary", where, key, *text);
  if (added && id && id != found)
    throw Error("{}: {} is \"{}\", but tokenizer.json adds \"{}\" to every text", where, key, *text,
                vocabulary.tokens[size_t(*id)]);
  id = found;
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

Vocabulary read_pieces(const Folder& folder, const HfConfig& config, const json& tokenizer_config) {
  Vocabulary out;
  if (folder.has("tokenizer.json"))
    return parse_tokenizer_json(folder.text("tokenizer.json"), folder.name("tokenizer.json"));
  if (folder.has("tokenizer.model")) {
    const std::string file = folder.name("tokenizer.model");
    const MappedFile mapped(file);
    out = parse_sentencepiece(mapped.bytes(), file);
  } else if (folder.has("vocab.json") && folder.has("merges.txt")) {
    const std::string where = folder.name("tokenizer_config.json");
    out = read_vocab_and_merges(folder, config, JsonObject(tokenizer_config, where));
  } else {
    return out;
  }
  read_side_tokens(folder, tokenizer_config, out);
  return out;
}

/// Special ids: tokenizer_config.json names them by text and wins over config.json's numbers.
void read_special_ids(const Folder& folder, const json& tokenizer_config, const json& model_config, Vocabulary& out) {
  const std::string where = folder.name("tokenizer_config.json"), config_where = folder.name("config.json");
  const auto number = [&](const char* key, std::optional<int32_t>& id) {
    const auto ids = read_ids(model_config, key, out.tokens.size(), config_where);
    if (!id && !ids.empty()) id = ids[0];
  };
  number("bos_token_id", out.bos_id);
  number("eos_token_id", out.eos_id);
  number("pad_token_id", out.pad_id);
  name_special(tokenizer_config, "bos_token", out.add_bos.value_or(false), out.bos_id, out, where);
  name_special(tokenizer_config, "eos_token", out.add_eos.value_or(false), out.eos_id, out, where);
  // Nothing depends on these two, and fine-tuned models name ones that they lack.
  if (const auto pad = token_text(tokenizer_config, "pad_token", where))
    if (const auto id = find_token(out, *pad)) out.pad_id = id;
  if (const auto unknown = token_text(tokenizer_config, "unk_token", where))
    if (const auto id = find_token(out, *unknown)) out.unk_id = id;
  for (const auto id : {out.bos_id, out.eos_id, out.pad_id, out.unk_id}) make_control(id, out);
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
  Vocabulary out = read_pieces(folder, config, tokenizer_config);
  if (out.model == Vocabulary::Model::none) return out;
  if (int64_t(out.tokens.size()) > config.vocab_size)
    throw Error("{}: the tokenizer has {} tokens, but config.json's vocab_size is {}", path, out.tokens.size(),
                config.vocab_size);
  const std::string config_where = folder.name("config.json");
  const json model_config = parse_json_object(config_text, config_where);
  read_special_ids(folder, tokenizer_config, model_config, out);

  const JsonObject in(tokenizer_config, where);
  if (const auto add = in.boolean("add_bos_token")) out.add_bos = add;
  if (const auto add = in.boolean("add_eos_token")) out.add_eos = add;
  const std::string generation_where = folder.name("generation_config.json");
  const json generation = folder.object("generation_config.json");
  const bool own = JsonObject(generation, generation_where).find("eos_token_id") != nullptr;
  out.eog_ids = read_ids(own ? generation : model_config, "eos_token_id", out.tokens.size(),
                         own ? generation_where : config_where);
  out.chat_template = read_chat_template(folder, in);
  pad_tokens(out, config.vocab_size);
  return out;
}

}  // namespace lacuna::io
