#include "io/sentencepiece.h"

#include <cmath>
#include <cstring>
#include <string_view>

#include "core/error.h"
#include "io/byte_reader.h"

namespace lacuna::io {

namespace {

/// One field of a message: a number (varint, fixed 32 or 64) or bytes.
struct Field {
  uint64_t number = 0;
  uint32_t wire_type = 0;
  uint64_t value = 0;
  std::span<const std::byte> bytes;

  int32_t int32() const { return int32_t(uint32_t(value)); }
  std::string text() const { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }
  float float32() const {
    const auto bits = uint32_t(value);
    return std::bit_cast<float>(bits);
  }
};

constexpr uint32_t kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5;

class Message {
 public:
  Message(std::span<const std::byte> bytes, const std::string& where) : in_(bytes, where), where_(where) {}

  bool next(Field& field) {
    if (in_.remaining() == 0) return false;
    const uint64_t tag = varint();
    field = {tag >> 3, uint32_t(tag & 7), 0, {}};
    if (field.number == 0) throw Error("{}: not a SentencePiece model: a field of number 0", where_);
    switch (field.wire_type) {
      case kVarint:
        field.value = varint();
        break;
      case kFixed64:
        field.value = in_.read<uint64_t>("a 64-bit field");
        break;
      case kFixed32:
        field.value = in_.read<uint32_t>("a 32-bit field");
        break;
      case kBytes:
        field.bytes = in_.take(varint(), "a field");
        break;
      default:
        throw Error("{}: not a SentencePiece model: wire type {}", where_, field.wire_type);
    }
    return true;
  }
  /// The next field must be of this kind.
  void expect(const Field& field, uint32_t wire_type) const {
    if (field.wire_type != wire_type)
      throw Error("{}: not a SentencePiece model: field {} has wire type {}, expected {}", where_, field.number,
                  field.wire_type, wire_type);
  }

 private:
  uint64_t varint() {
    uint64_t out = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = in_.read<uint8_t>("a number");
      out |= uint64_t(byte & 0x7f) << shift;
      if ((byte & 0x80) == 0) return out;
    }
    throw Error("{}: not a SentencePiece model: a number longer than 10 bytes", where_);
  }
  ByteReader in_;
  const std::string& where_;
};

// The enumerations of sentencepiece_model.proto.
enum class ModelType : uint64_t { unigram = 1, bpe, word, character };
constexpr TokenType kTypes[] = {TokenType::normal,       TokenType::unknown, TokenType::control,
                                TokenType::user_defined, TokenType::unused,  TokenType::byte};  // from 1 on

void read_piece(std::span<const std::byte> bytes, Vocabulary& out, const std::string& where) {
  std::string piece;
  float score = 0;
  TokenType type = TokenType::normal;
  Message message(bytes, where);
  for (Field field; message.next(field);) {
    if (field.number == 1) {
      message.expect(field, kBytes);
      piece = field.text();
    } else if (field.number == 2) {
      message.expect(field, kFixed32);
      score = field.float32();
    } else if (field.number == 3) {
      message.expect(field, kVarint);
      if (field.value < 1 || field.value > std::size(kTypes))
        throw Error("{}: piece {} has the unknown type {}", where, out.tokens.size(), field.value);
      type = kTypes[field.value - 1];
    }
  }
  if (piece.empty()) throw Error("{}: piece {} is empty", where, out.tokens.size());
  if (std::isnan(score)) throw Error("{}: piece {} (\"{}\") has no number as score", where, out.tokens.size(), piece);
  out.tokens.push_back(std::move(piece));
  out.scores.push_back(score);
  out.types.push_back(type);
}

struct Ids {
  int32_t unk = 0, bos = 1, eos = 2, pad = -1;  // the proto's defaults
};

ModelType read_trainer(std::span<const std::byte> bytes, Ids& ids, const std::string& where) {
  auto type = ModelType::unigram;
  Message message(bytes, where);
  for (Field field; message.next(field);) {
    switch (field.number) {
      case 3:
        message.expect(field, kVarint);
        type = ModelType(field.value);
        break;
      case 40:
        ids.unk = field.int32();
        break;
      case 41:
        ids.bos = field.int32();
        break;
      case 42:
        ids.eos = field.int32();
        break;
      case 43:
        ids.pad = field.int32();
        break;
      default:
        break;
    }
  }
  return type;
}

void read_normalizer(std::span<const std::byte> bytes, Vocabulary& out, const std::string& where) {
  Message message(bytes, where);
  for (Field field; message.next(field);) {
    switch (field.number) {
      case 2:
        if (!field.bytes.empty())
          throw Error("{}: text normalisation by a character map is not supported, only \"identity\"", where);
        break;
      case 3:
        out.add_space_prefix = field.value != 0;
        break;
      case 4:
        out.remove_extra_whitespaces = field.value != 0;
        break;
      case 5:
        if (field.value == 0) throw Error("{}: escape_whitespaces false is not supported", where);
        break;
      default:
        break;
    }
  }
}

}  // namespace

Vocabulary parse_sentencepiece(std::span<const std::byte> file, const std::string& where) {
  Vocabulary out;
  out.add_space_prefix = out.remove_extra_whitespaces = true;  // the proto's defaults
  Ids ids;
  auto type = ModelType::unigram;
  Message message(file, where);
  for (Field field; message.next(field);) {
    if (field.number < 1 || field.number > 3) continue;
    message.expect(field, kBytes);
    if (field.number == 1) read_piece(field.bytes, out, where);
    if (field.number == 2) type = read_trainer(field.bytes, ids, where);
    if (field.number == 3) read_normalizer(field.bytes, out, where);
  }
  if (out.tokens.empty()) throw Error("{}: not a SentencePiece model: it has no pieces", where);
  if (type == ModelType::unigram)
    out.model = Vocabulary::Model::unigram;
  else if (type == ModelType::bpe)
    out.model = Vocabulary::Model::sentencepiece;
  else
    throw Error("{}: SentencePiece model type {} is not supported; known are 1 (unigram), 2 (BPE)", where,
                uint64_t(type));
  const auto id = [&](int32_t value) -> std::optional<int32_t> {  // -1: the model has none
    if (value < 0) return std::nullopt;
    if (size_t(value) >= out.tokens.size())
      throw Error("{}: a special id {} of {} pieces", where, value, out.tokens.size());
    return value;
  };
  out.unk_id = id(ids.unk);
  out.bos_id = id(ids.bos);
  out.eos_id = id(ids.eos);
  out.pad_id = id(ids.pad);
  return out;
}

}  // namespace lacuna::io
