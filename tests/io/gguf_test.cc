#include "io/gguf.h"

#include <nlohmann/json.hpp>

#include "core/mapped_file.h"
#include "core/rng.h"
#include "gguf_bytes.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

using nlohmann::json;
using test::Bytes;

GgufFile parse(const Bytes& bytes) { return parse_gguf(bytes.span(), "x.gguf"); }

std::string hex(std::span<const std::byte> bytes) {
  std::string out;
  for (const std::byte b : bytes) out += fmt::format("{:02x}", int(b));
  return out;
}

/// A metadata value as contents.json spells it.
json to_json(const MetadataValue& value) {
  return std::visit([](const auto& v) { return json(v); }, value);
}
constexpr std::string_view kTypes[] = {
    "uint8",          "int8",        "uint16",        "int16",         "uint32",        "int32",
    "float32",        "bool",        "string",        "uint64",        "int64",         "float64",
    "array<uint8>",   "array<int8>", "array<uint16>", "array<int16>",  "array<uint32>", "array<int32>",
    "array<float32>", "array<bool>", "array<string>", "array<uint64>", "array<int64>",  "array<float64>"};

TEST(Gguf, ReadsWhatTheReferenceWriterWrote) {
  const json contents = json::parse(test::read_text(test::fixture("gguf/contents.json")));
  ASSERT_FALSE(contents.empty());
  for (const auto& [name, expected] : contents.items()) {
    SCOPED_TRACE(name);
    const MappedFile mapped(test::fixture("gguf/" + name));
    const GgufFile file = parse_gguf(mapped.bytes(), name);
    EXPECT_EQ(file.version, expected["version"]);
    EXPECT_EQ(file.alignment, expected["alignment"]);
    ASSERT_EQ(file.metadata.entries().size(), expected["metadata"].size());
    for (size_t i = 0; i < file.metadata.entries().size(); ++i) {
      const auto& [key, value] = file.metadata.entries()[i];
      const json& want = expected["metadata"][i];
      EXPECT_EQ(key, want["key"]);
      EXPECT_EQ(kTypes[value.index()], want["type"]) << key;
      EXPECT_EQ(to_json(value), want["value"]) << key;
    }
    ASSERT_EQ(file.tensors.size(), expected["tensors"].size());
    for (size_t i = 0; i < file.tensors.size(); ++i) {
      const GgufTensor& tensor = file.tensors[i];
      const json& want = expected["tensors"][i];
      EXPECT_EQ(tensor.name, want["name"]);
      EXPECT_EQ(ggml_type_name(tensor.type), want["type"]);
      std::vector<int64_t> ne(tensor.dims.rbegin(), tensor.dims.rend());
      EXPECT_EQ(json(ne), want["ne"]) << tensor.name;
      EXPECT_EQ(hex(tensor.bytes), want["bytes"]) << tensor.name;
    }
  }
}

TEST(Gguf, RefusesOtherMagicsAndVersions) {
  EXPECT_ERROR(parse(Bytes().raw("GGML").number(3)), "x.gguf: not a GGUF file");
  EXPECT_ERROR(parse(Bytes().raw("GG")), "the magic");
  EXPECT_ERROR(parse(Bytes()), "the magic");
  EXPECT_ERROR(parse(Bytes().gguf(0, 0, 1)), "version 1 is not supported");
  EXPECT_ERROR(parse(Bytes().gguf(0, 0, 4)), "version 4 is not supported");
  EXPECT_ERROR(parse(Bytes().gguf(0, 0, 0)), "version 0 is not supported");
  EXPECT_ERROR(parse(Bytes().gguf(0, 0, 0x03000000)), "big-endian");
  const MappedFile big(test::fixture("gguf/refused_big_endian.gguf"));
  EXPECT_ERROR(parse_gguf(big.bytes(), "big.gguf"), "big.gguf: a big-endian");
  const MappedFile nested(test::fixture("gguf/refused_nested_array.gguf"));
  EXPECT_ERROR(parse_gguf(nested.bytes(), "nested.gguf"), "arrays of arrays");
}

TEST(Gguf, EmptyFileOfEitherVersion) {
  for (const uint32_t version : {2u, 3u}) {
    const Bytes bytes = Bytes().gguf(0, 0, version);
    const GgufFile file = parse(bytes);
    EXPECT_TRUE(file.tensors.empty());
    EXPECT_EQ(file.version, int(version));
    EXPECT_EQ(file.alignment, 32);
  }
}

// RECIPES 2: counts that only a lie can announce are refused before anything is allocated.
TEST(Gguf, LyingCounts) {
  EXPECT_ERROR(parse(Bytes().gguf(0, uint64_t{1} << 63)), "9223372036854775808 metadata keys are announced");
  EXPECT_ERROR(parse(Bytes().gguf(uint64_t{1} << 62, 0)), "4611686018427387904 tensors are announced");
  EXPECT_ERROR(parse(Bytes().gguf(1, 0)), "1 tensors are announced");
  EXPECT_ERROR(parse(Bytes().gguf(UINT64_MAX, UINT64_MAX)), "are announced");
}

TEST(Gguf, LyingLengths) {
  EXPECT_ERROR(parse(Bytes().gguf(0, 1).number(UINT64_MAX).raw("general.xxxxxxx")), "a metadata key");
  EXPECT_ERROR(parse(Bytes().gguf(0, 1).string("k").number(8u).number(uint64_t{1} << 40).raw("xx")), "k at byte");
  for (const uint32_t element : {0u, 1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 10u, 11u, 12u})
    for (const uint64_t count : {uint64_t{1} << 60, UINT64_MAX, uint64_t{100}}) {
      SCOPED_TRACE(element);
      EXPECT_ERROR(parse(Bytes().gguf(0, 1).string("k").number(9u).number(element).number(count).raw("12345678")),
                   "cut short");
    }
}

TEST(Gguf, BadValues) {
  EXPECT_ERROR(parse(Bytes().gguf(0, 1).string("k").number(13u).raw("12345678")), "k: unknown value type 13");
  EXPECT_ERROR(parse(Bytes().gguf(0, 1).string("k").number(9u).number(99u).number(uint64_t{0})), "unknown type 99");
  EXPECT_ERROR(parse(Bytes().gguf(0, 1).string("k").number(7u).number(uint8_t{2}).raw("123456")),
               "stored as 0 or 1, found 2");
  EXPECT_ERROR(parse(Bytes().gguf(0, 1).string("").number(0u).number(uint8_t{2}).raw("123456")), "has 0 bytes");
  const Bytes twice =
      Bytes().gguf(0, 2).string("k").number(0u).number(uint8_t{1}).string("k").number(0u).number(uint8_t{1});
  EXPECT_ERROR(parse(twice), "metadata key k occurs twice");
  for (const uint32_t alignment : {0u, 1u, 4u, 24u, 1u << 21})
    EXPECT_ERROR(parse(Bytes().gguf(0, 1).string("general.alignment").number(4u).number(alignment)),
                 "general.alignment is");
}

Bytes one_tensor(std::vector<uint64_t> ne, uint32_t type, uint64_t offset = 0, size_t data = 64) {
  return Bytes().gguf(1, 0).tensor("w", std::move(ne), type, offset).pad(32).raw(std::string(data, 'x'));
}

// RECIPES 1: shapes whose size wraps 64 bits.
TEST(Gguf, ShapesThatWrap) {
  constexpr uint32_t kF32 = 0, kQ8_0 = 8;
  EXPECT_ERROR(parse(one_tensor({1152, (uint64_t{1} << 42) + 1}, kQ8_0)), "lie outside the file");
  EXPECT_ERROR(parse(one_tensor({1152, (uint64_t{1} << 42) + 1}, kF32)), "lie outside the file");
  EXPECT_ERROR(parse(one_tensor({uint64_t{1} << 32, uint64_t{1} << 32}, kF32)), "too large for 64 bits");
  EXPECT_ERROR(parse(one_tensor({uint64_t{1} << 32, uint64_t{1} << 32}, kQ8_0)), "too large for 64 bits");
  EXPECT_ERROR(parse(one_tensor({uint64_t{1} << 62}, kF32)), "too large for 64 bits");
  EXPECT_ERROR(parse(one_tensor({4, uint64_t{1} << 62, 16}, kF32)), "too large for 64 bits");
  EXPECT_ERROR(parse(one_tensor({uint64_t{1} << 63}, kF32)), "dimension 0 is 9223372036854775808");
  EXPECT_ERROR(parse(one_tensor({0}, kF32)), "dimension 0 is 0");
  EXPECT_ERROR(parse(one_tensor({4, 0}, kF32)), "dimension 1 is 0");
}

// RECIPES 2: dimension counts and type numbers.
TEST(Gguf, DimensionsAndTypes) {
  EXPECT_ERROR(parse(one_tensor({1, 1, 1, 1, 1}, 0)), "5 dimensions");
  EXPECT_ERROR(parse(one_tensor({}, 0)), "0 dimensions");
  EXPECT_ERROR(parse(Bytes().gguf(1, 0).string("w").number(uint32_t{1} << 31).raw(std::string(99, 'x'))),
               "2147483648 dimensions");
  EXPECT_ERROR(parse(one_tensor({4}, 255)), "tensor w: type 255 (unknown) is not supported; known are f32, f16");
  EXPECT_ERROR(parse(one_tensor({256}, 17)), "type 17 (IQ2_XS) is not supported");
  EXPECT_ERROR(parse(one_tensor({4}, UINT32_MAX)), "(unknown) is not supported");
  EXPECT_ERROR(parse(one_tensor({33}, 8)), "K = 33, but Q8_0 needs a multiple of 32");
  EXPECT_ERROR(parse(Bytes().gguf(1, 0).tensor("", {4}, 0, 0).pad(32).raw("0123456789abcdef")), "without a name");
  const GgufFile four = parse(one_tensor({2, 2, 2, 2}, 0));
  EXPECT_EQ(four.tensors.at(0).dims, (std::vector<int64_t>{2, 2, 2, 2}));
}

// RECIPES 8: row lengths; a block type refuses what is no multiple of its block, a float type takes any.
TEST(Gguf, RowLengths) {
  for (const uint64_t K : {4544, 576, 2688, 288, 257, 255, 32, 1}) {
    SCOPED_TRACE(K);
    EXPECT_EQ(parse(one_tensor({K, 3}, 0, 0, K * 12)).tensors.at(0).bytes.size(), K * 12);
    const uint64_t q8 = K / 32 * 34 * 3, q4 = K / 256 * 144 * 3;
    if (K % 32 == 0)
      EXPECT_EQ(parse(one_tensor({K, 3}, 8, 0, q8)).tensors.at(0).bytes.size(), q8);
    else
      EXPECT_ERROR(parse(one_tensor({K, 3}, 8, 0, q8 + 9999)), "needs a multiple of 32");
    if (K % 256 != 0) EXPECT_ERROR(parse(one_tensor({K, 3}, 12, 0, q4 + 9999)), "needs a multiple of 256");
  }
}

TEST(Gguf, OffsetsAndOverlap) {
  EXPECT_EQ(parse(one_tensor({16}, 0, 0)).tensors.at(0).bytes.size(), 64u);
  EXPECT_ERROR(parse(one_tensor({17}, 0, 0)), "its 68 bytes at offset 0 lie outside the file, which holds 64 bytes");
  EXPECT_ERROR(parse(one_tensor({4}, 0, 8)), "offset 8 is no multiple of the alignment 32");
  EXPECT_ERROR(parse(one_tensor({4}, 0, 64)), "lie outside the file");
  EXPECT_ERROR(parse(one_tensor({4}, 0, UINT64_MAX - 31)), "lie outside the file");
  const auto two = [](uint64_t first, uint64_t second) {
    return Bytes()
        .gguf(2, 0)
        .tensor("a", {16}, 0, first)
        .tensor("b", {16}, 0, second)
        .pad(32)
        .raw(std::string(160, 'x'));
  };
  EXPECT_EQ(parse(two(64, 0)).tensors.at(0).name, "a");          // any order of places
  EXPECT_EQ(parse(two(0, 96)).tensors.at(1).bytes.size(), 64u);  // a gap between them
  EXPECT_EQ(parse(two(0, 64)).tensors.at(1).bytes.size(), 64u);  // 32 bytes that belong to nothing at the end
  EXPECT_ERROR(parse(two(0, 32)), "tensors a and b overlap");
  EXPECT_ERROR(parse(two(0, 0)), "overlap");
  const Bytes same =
      Bytes().gguf(2, 0).tensor("a", {8}, 0, 0).tensor("a", {8}, 0, 32).pad(32).raw(std::string(64, 'x'));
  EXPECT_ERROR(parse(same), "tensor a occurs twice");
}

// RECIPES 5: every cut that loses a byte of a weight or of what comes before is refused in one sentence, and no cut
// reads past the end (run under ASan). The padding after the last tensor holds nothing; some writers leave it out.
TEST(Gguf, EveryTruncation) {
  const std::string whole = test::read_text(test::fixture("gguf/everything.gguf"));
  const GgufFile file = parse_gguf(test::as_span(whole), "whole.gguf");
  const auto last = file.tensors.back().bytes;
  const auto end = size_t(last.data() + last.size() - test::as_span(whole).data());
  ASSERT_LT(end, whole.size());
  for (size_t size = 0; size <= whole.size(); ++size) {
    const std::vector<char> cut(whole.begin(), whole.begin() + std::ptrdiff_t(size));
    const auto bytes = std::as_bytes(std::span(cut));
    if (size < end)
      EXPECT_ERROR(parse_gguf(bytes, "cut.gguf"), "cut.gguf: ");
    else
      EXPECT_EQ(parse_gguf(bytes, "cut.gguf").tensors.size(), file.tensors.size());
  }
}

// Damaged bytes are refused or read as something else; they never crash.
TEST(Gguf, RandomDamage) {
  const std::string whole = test::read_text(test::fixture("gguf/everything.gguf"));
  Rng rng(7);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string damaged = whole;
    for (uint64_t n = 1 + rng.below(4); n > 0; --n) damaged[rng.below(damaged.size())] = char(rng.next());
    try {
      parse_gguf(test::as_span(damaged), "damaged.gguf");
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 300);
}

}  // namespace
}  // namespace lacuna::io
