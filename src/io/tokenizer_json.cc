#include "io/tokenizer_json.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <vector>

#include "core/error.h"
#include "io/json.h"
#include "io/pre_tokenizers.h"

namespace lacuna::io {

namespace {

using nlohmann::json;

constexpr std::string_view kSpace = "\xe2\x96\x81";  // U+2581
constexpr int64_t kMaxGap = 65536;                   // unused ids between tokens, all together
// Below every rank: a token that no merge makes is never preferred by a reader that ranks by score.
constexpr float kNoMergeScore = -1e9f;

using TokenIds = std::unordered_map<std::string_view, int32_t>;

/// {token: id}, in any order, as an array by id.
void read_vocab(const json& vocab, Vocabulary& out, const std::string& where) {
  int64_t largest = -1;
  for (const auto& [token, id] : vocab.items()) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > uint64_t(INT32_MAX))
      throw Error("{}: the id of token \"{}\" must be an integer from 0 to 2^31 - 1", where, token);
    largest = std::max(largest, id.get<int64_t>());
  }
  if (largest + 1 > int64_t(vocab.size()) + kMaxGap)
    throw Error("{}: {} tokens, but ids up to {}", where, vocab.size(), largest);
  std::vector<bool> seen(size_t(largest + 1));
  out.tokens.resize(size_t(largest + 1));
  for (const auto& [token, id] : vocab.items()) {
    const auto at = id.get<size_t>();
    if (seen[at]) throw Error("{}: tokens \"{}\" and \"{}\" share the id {}", where, out.tokens[at], token, at);
    seen[at] = true;
    out.tokens[at] = token;
  }
  out.types.assign(out.tokens.size(), TokenType::normal);
  for (size_t i = 0; i < seen.size(); ++i) {
    if (seen[i]) continue;
    out.tokens[i] = fmt::format("[PAD{}]", i);
    out.types[i] = TokenType::unused;
  }
}

TokenIds index_tokens(const Vocabulary& vocabulary) {
  TokenIds out;
  out.reserve(vocabulary.tokens.size());
  for (size_t i = 0; i < vocabulary.tokens.size(); ++i) out.emplace(vocabulary.tokens[i], int32_t(i));
  return out;
}

/// Checks one merge and appends it as "left right".
void add_merge(Vocabulary& out, const TokenIds& ids, std::string_view left, std::string_view right,
               const std::string& where) {
  if (left.empty() || right.empty() || left.find(' ') != left.npos || right.find(' ') != right.npos)
    throw Error("{}: merge {} (\"{}\", \"{}\") must be two parts without spaces", where, out.merges.size(), left,
                right);
  const std::string merged = fmt::format("{}{}", left, right);
  for (const std::string_view part : {left, right, std::string_view(merged)})
    if (!ids.contains(part))
      throw Error("{}: merge {} (\"{}\", \"{}\") needs the token \"{}\", which the vocabulary lacks", where,
                  out.merges.size(), left, right, part);
  out.merges.push_back(fmt::format("{} {}", left, right));
}

void add_merge_line(Vocabulary& out, const TokenIds& ids, std::string_view line, const std::string& where) {
  const size_t space = line.find(' ');
  if (space == line.npos) throw Error("{}: merge {} (\"{}\") must be two parts", where, out.merges.size(), line);
  add_merge(out, ids, line.substr(0, space), line.substr(space + 1), where);
}

std::string quote_regex(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (std::string_view("\\^$.|?*+()[]{}-#").find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

class Reader {
 public:
  Reader(const json& top, const std::string& where) : top_(top, where), where_(where) {}

  Vocabulary read() {
    if (const json* normalizer = top_.object("normalizer")) read_normalizer(*normalizer);
    if (const json* pre = top_.object("pre_tokenizer")) read_pre_tokenizer(*pre);
    const json& model = top_.need_object("model");
    const JsonObject in(model, where_);
    // Files of before 2020 name no type; theirs is told by its merges.
    const std::string type = in.string("type").value_or(in.find("merges") ? "BPE" : "");
    if (type == "BPE")
      read_bpe(in);
    else if (type == "Unigram")
      read_unigram(in);
    else
      throw Error("{}: model type \"{}\" is not supported; known are BPE, Unigram", where_, type);
    read_added_tokens();
    if (const json* post = top_.object("post_processor")) read_post_processor(*post);
    if (!out_.add_bos) out_.add_bos = false;
    if (!out_.add_eos) out_.add_eos = false;
    if (out_.model == Vocabulary::Model::byte_bpe) name_pre_tokenizer(out_);
    return std::move(out_);
  }

 private:
  [[noreturn]] void unsupported(std::string_view what, std::string_view type, std::string_view known) const {
    throw Error("{}: {} \"{}\" is not supported; known are {}", where_, what, type, known);
  }
  /// The elements of a Sequence under `key`, or the object itself. Sequences inside sequences are flattened.
  std::vector<const json*> flatten(const json& node, const char* key) const {
    if (JsonObject(node, where_).need_string("type") != "Sequence") return {&node};
    std::vector<const json*> out;
    for (const json& part : JsonObject(node, where_).need_array(key))
      for (const json* inner : flatten(part, key)) out.push_back(inner);
    return out;
  }

  void read_normalizer(const json& node) {
    for (const json* part : flatten(node, "normalizers")) {
      const JsonObject in(*part, where_);
      const std::string type = in.need_string("type");
      if (type == "NFC") {
        out_.nfc = true;
      } else if (type == "Prepend") {
        if (in.need_string("prepend") != kSpace)
          throw Error("{}: normalizer Prepend of something else than U+2581", where_);
        prepends_space_ = true;
      } else if (type == "Replace") {
        const JsonObject pattern(in.need_object("pattern"), where_);
        if (pattern.string("String") != " " || in.need_string("content") != kSpace)
          throw Error("{}: normalizer Replace is supported only from a space to U+2581", where_);
        replaces_space_ = true;
      } else {
        unsupported("normalizer", type, "NFC, Prepend, Replace, Sequence");
      }
    }
  }

  void read_pre_tokenizer(const json& node) {
    for (const json* part : flatten(node, "pretokenizers")) {
      const JsonObject in(*part, where_);
      const std::string type = in.need_string("type");
      if (type == "ByteLevel") {
        byte_level_ = true;
        if (in.boolean("add_prefix_space").value_or(true))
          throw Error("{}: ByteLevel with add_prefix_space is not supported", where_);
        if (in.boolean("use_regex").value_or(true)) out_.split_regexes.emplace_back(kGpt2Regex);
      } else if (type == "Split") {
        read_split(in);
      } else if (type == "Digits") {
        if (!in.boolean("individual_digits").value_or(false))
          out_.split_regexes.emplace_back(R"(\p{N}+)");
        else if (out_.split_regexes.empty())
          out_.individual_digits = true;
        else
          out_.split_regexes.emplace_back(R"(\p{N})");
      } else if (type == "Metaspace") {
        read_metaspace(in);
      } else {
        unsupported("pre_tokenizer", type, "ByteLevel, Split, Digits, Metaspace, Sequence");
      }
    }
  }

  void read_split(const JsonObject& in) {
    const JsonObject pattern(in.need_object("pattern"), where_);
    const auto regex = pattern.string("Regex");
    const std::string behavior = in.need_string("behavior");
    const bool invert = in.boolean("invert").value_or(false);
    // Removing what does not match equals isolating what does, for the usual regexes, which match everything.
    if (!(behavior == "Isolated" && !invert) && !(behavior == "Removed" && invert))
      throw Error("{}: Split with behavior \"{}\" and invert {} is not supported", where_, behavior, invert);
    out_.split_regexes.push_back(regex ? *regex : quote_regex(pattern.need_string("String")));
  }

  void read_metaspace(const JsonObject& in) {
    if (in.string("replacement").value_or(std::string(kSpace)) != kSpace)
      throw Error("{}: Metaspace with a replacement other than U+2581", where_);
    replaces_space_ = true;
    const auto scheme = in.string("prepend_scheme");
    prepends_space_ = scheme ? *scheme != "never" : in.boolean("add_prefix_space").value_or(true);
    splits_words_ = in.boolean("split").value_or(true);
  }

  void read_bpe(const JsonObject& in) {
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (!in.string(key).value_or("").empty()) throw Error("{}: BPE with {} is not supported", where_, key);
    if (in.number("dropout").value_or(0) != 0) throw Error("{}: BPE with dropout is not supported", where_);
    out_.ignore_merges = in.boolean("ignore_merges").value_or(false);
    read_vocab(in.need_object("vocab"), out_, where_);
    const TokenIds ids = index_tokens(out_);
    for (const json& merge : in.need_array("merges")) {
      if (merge.is_string()) {
        add_merge_line(out_, ids, merge.get_ref<const std::string&>(), where_);
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        add_merge(out_, ids, merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>(), where_);
      } else {
        throw Error("{}: merge {} must be \"left right\" or [\"left\", \"right\"]", where_, out_.merges.size());
      }
    }
    if (const auto unknown = in.string("unk_token")) set_unknown(find_token(ids, *unknown));
    if (byte_level_) {
      if (replaces_space_ || prepends_space_) throw Error("{}: ByteLevel together with U+2581 for spaces", where_);
      out_.model = Vocabulary::Model::byte_bpe;
      out_.add_space_prefix = false;
      if (out_.unk_id) out_.types[size_t(*out_.unk_id)] = TokenType::unknown;
      return;
    }
    if (!replaces_space_)
      throw Error("{}: the BPE model is neither byte-level (ByteLevel) nor of SentencePiece type (U+2581 for spaces)",
                  where_);
    become_sentencepiece(Vocabulary::Model::sentencepiece, in.boolean("byte_fallback").value_or(false));
    out_.scores.assign(out_.tokens.size(), kNoMergeScore);
    for (size_t rank = out_.merges.size(); rank-- > 0;) {  // the first merge that makes a token counts
      std::string merged = out_.merges[rank];
      merged.erase(merged.find(' '), 1);
      out_.scores[size_t(ids.at(merged))] = -float(rank);
    }
    if (splits_words_) {
      for (const std::string& merge : out_.merges)
        if (merge.find(kSpace, 1) != merge.npos)
          throw Error("{}: Metaspace splits before each U+2581, but the merge \"{}\" goes across one", where_, merge);
    }
  }

  void read_unigram(const JsonObject& in) {
    if (byte_level_ || !replaces_space_) throw Error("{}: a Unigram model without Metaspace is not supported", where_);
    for (const json& entry : in.need_array("vocab")) {
      if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_number())
        throw Error("{}: Unigram vocab entry {} must be [piece, score]", where_, out_.tokens.size());
      out_.tokens.push_back(entry[0].get<std::string>());
      out_.scores.push_back(entry[1].get<float>());
    }
    out_.types.assign(out_.tokens.size(), TokenType::normal);
    if (const auto unknown = in.integer("unk_id")) {
      if (*unknown < 0 || *unknown >= int64_t(out_.tokens.size()))
        throw Error("{}: unk_id {} of {} tokens", where_, *unknown, out_.tokens.size());
      set_unknown(int32_t(*unknown));
    }
    become_sentencepiece(Vocabulary::Model::unigram, in.boolean("byte_fallback").value_or(false));
  }

  void become_sentencepiece(Vocabulary::Model model, bool byte_fallback) {
    if (!out_.split_regexes.empty() || out_.individual_digits)
      throw Error("{}: Split or Digits in a model of SentencePiece type is not supported", where_);
    if (out_.ignore_merges) throw Error("{}: ignore_merges in a model of SentencePiece type is not supported", where_);
    out_.model = model;
    out_.add_space_prefix = prepends_space_;
    if (out_.unk_id) out_.types[size_t(*out_.unk_id)] = TokenType::unknown;
    if (!byte_fallback) return;
    for (size_t i = 0; i < out_.tokens.size(); ++i) {
      const std::string& token = out_.tokens[i];
      if (token.size() == 6 && token.starts_with("<0x") && token[5] == '>' &&
          std::isxdigit(static_cast<unsigned char>(token[3])) && std::isxdigit(static_cast<unsigned char>(token[4])))
        out_.types[i] = TokenType::byte;
    }
  }

  void read_added_tokens() {
    const json* added = top_.array("added_tokens");
    if (added == nullptr) return;
    std::vector<AddedToken> tokens;
    for (const json& entry : *added) {
      const JsonObject in(entry, where_);
      AddedToken token{in.need_integer("id"), in.need_string("content"), in.boolean("special").value_or(false)};
      for (const char* key : {"single_word", "lstrip", "rstrip"})
        if (in.boolean(key).value_or(false))
          throw Error("{}: added token \"{}\" with {} is not supported", where_, token.content, key);
      tokens.push_back(std::move(token));
    }
    std::sort(tokens.begin(), tokens.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
    for (const AddedToken& token : tokens) add_token(out_, token, where_);
  }

  void read_post_processor(const json& node) {
    for (const json* part : flatten(node, "processors")) {
      const JsonObject in(*part, where_);
      const std::string type = in.need_string("type");
      if (type == "ByteLevel") continue;  // only moves offsets
      if (type != "TemplateProcessing") unsupported("post_processor", type, "ByteLevel, TemplateProcessing, Sequence");
      read_template(in.need_array("single"));
    }
  }

  /// [special token]? text [special token]?
  void read_template(const json& single) {
    bool after_text = false;
    const TokenIds ids = index_tokens(out_);
    for (const json& step : single) {
      const JsonObject in(step, where_);
      if (in.object("Sequence") != nullptr) {
        if (after_text) throw Error("{}: the post_processor's template repeats the text", where_);
        after_text = true;
        continue;
      }
      const int32_t id = find_token(ids, JsonObject(in.need_object("SpecialToken"), where_).need_string("id"));
      auto& adds = after_text ? out_.add_eos : out_.add_bos;
      if (adds) throw Error("{}: a post_processor that adds two tokens on one side is not supported", where_);
      adds = true;
      (after_text ? out_.eos_id : out_.bos_id) = id;
    }
    if (!after_text) throw Error("{}: the post_processor's template has no text", where_);
  }

  int32_t find_token(const TokenIds& ids, const std::string& token) const {
    const auto found = ids.find(token);
    if (found == ids.end()) throw Error("{}: the token \"{}\" is not in the vocabulary", where_, token);
    return found->second;
  }
  void set_unknown(int32_t id) { out_.unk_id = id; }

  JsonObject top_;
  const std::string& where_;
  Vocabulary out_;
  bool byte_level_ = false, replaces_space_ = false, prepends_space_ = false, splits_words_ = false;
};

}  // namespace

void pad_tokens(Vocabulary& vocabulary, int64_t size) {
  const bool scored = !vocabulary.scores.empty();
  while (int64_t(vocabulary.tokens.size()) < size) {
    vocabulary.tokens.push_back(fmt::format("[PAD{}]", vocabulary.tokens.size()));
    vocabulary.types.push_back(TokenType::unused);
    if (scored) vocabulary.scores.push_back(kNoMergeScore);
  }
}

void add_token(Vocabulary& vocabulary, const AddedToken& token, const std::string& where) {
  if (token.id < 0 || token.id > int64_t(vocabulary.tokens.size()) + kMaxGap)
    throw Error("{}: added token \"{}\" has the id {}, but there are {} tokens", where, token.content, token.id,
                vocabulary.tokens.size());
  if (token.content.empty()) throw Error("{}: added token {} is empty", where, token.id);
  pad_tokens(vocabulary, token.id + 1);
  const auto at = size_t(token.id);
  if (vocabulary.tokens[at] != token.content) {
    if (vocabulary.types[at] != TokenType::unused)
      throw Error("{}: added token \"{}\" has the id {} of token \"{}\"", where, token.content, token.id,
                  vocabulary.tokens[at]);
    vocabulary.tokens[at] = token.content;
  }
  // SentencePiece's unknown and byte tokens keep their meaning.
  if (vocabulary.types[at] != TokenType::unknown && vocabulary.types[at] != TokenType::byte)
    vocabulary.types[at] = token.special ? TokenType::control : TokenType::user_defined;
}

Vocabulary parse_tokenizer_json(std::string_view text, const std::string& where) {
  const json top = parse_json_object(text, where);
  return Reader(top, where).read();
}

Vocabulary parse_vocab_and_merges(std::string_view vocab_json, std::string_view merges, const std::string& where) {
  Vocabulary out;
  out.model = Vocabulary::Model::byte_bpe;
  out.add_space_prefix = false;
  read_vocab(parse_json_object(vocab_json, where), out, where);
  const TokenIds ids = index_tokens(out);
  for (bool first = true; !merges.empty(); first = false) {
    const size_t end = std::min(merges.find('\n'), merges.size());
    std::string_view line = merges.substr(0, end);
    merges.remove_prefix(std::min(end + 1, merges.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || (first && line.starts_with("#version"))) continue;
    add_merge_line(out, ids, line, where);
  }
  return out;
}

}  // namespace lacuna::io
