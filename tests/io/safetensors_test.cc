#include "io/safetensors.h"

#include "gguf_bytes.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

using test::Bytes;

Bytes file_of(std::string_view header, size_t data) {
  return Bytes().number(uint64_t(header.size())).raw(header).raw(std::string(data, 'x'));
}
auto parse(const Bytes& bytes) { return parse_safetensors(bytes.span(), "m.safetensors"); }
auto parse(std::string_view header, size_t data) { return parse(file_of(header, data)); }

TEST(Safetensors, ReadsEntriesInFileOrder) {
  const Bytes bytes = file_of(
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[8,20]},)"
      R"("b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"c":{"dtype":"I64","shape":[],"data_offsets":[20,28]},)"
      R"("d":{"dtype":"F16","shape":[0,4],"data_offsets":[28,28]}})",
      28);
  const auto entries = parse(bytes);
  ASSERT_EQ(entries.size(), 4u);
  EXPECT_EQ(entries[0].name, "b");
  EXPECT_EQ(entries[1].dtype, "BF16");
  EXPECT_EQ(entries[1].dims, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(entries[1].bytes.data(), bytes.span().data() + bytes.span().size() - 28 + 8);
  EXPECT_EQ(entries[2].name, "c");
  EXPECT_TRUE(entries[2].dims.empty());
  EXPECT_TRUE(entries[3].bytes.empty());
}

// RECIPES 3.
TEST(Safetensors, LyingHeaderLengths) {
  EXPECT_ERROR(parse(Bytes().number(UINT64_MAX - 1).raw("{}")),
               "the header is announced with 18446744073709551614 bytes");
  EXPECT_ERROR(parse(Bytes().number(uint64_t{11}).raw("{}")), "announced with 11 bytes, but 2 follow");
  EXPECT_ERROR(parse(Bytes().number(uint64_t{3}).raw("{}")), "cut short");
  EXPECT_ERROR(parse(Bytes().number(uint32_t{2})), "the header's length");
  EXPECT_ERROR(parse(Bytes()), "the header's length");
  EXPECT_ERROR(parse(Bytes().number(uint64_t{0})), "bad JSON");
}

TEST(Safetensors, LyingOffsets) {
  const auto f32 = [](std::string_view shape, std::string_view offsets) {
    return fmt::format(R"({{"w":{{"dtype":"F32","shape":{},"data_offsets":{}}}}})", shape, offsets);
  };
  EXPECT_EQ(parse(f32("[32,8]", "[0,1024]"), 1024).size(), 1u);
  EXPECT_ERROR(parse(f32("[32,8]", "[0,65536]"), 1024),
               "m.safetensors: tensor w: data_offsets [0, 65536] lie outside the 1024 bytes");
  EXPECT_ERROR(parse(f32("[32,8]", "[0,65536]"), 65536),
               "shape [32, 8] of F32 takes 1024 bytes, but data_offsets [0, 65536] span 65536");
  EXPECT_ERROR(parse(f32("[32,8]", "[0,1020]"), 1020), "takes 1024 bytes");
  EXPECT_ERROR(parse(f32("[1]", "[-4,0]"), 4), "data_offsets must hold integers from 0");
  EXPECT_ERROR(parse(f32("[1]", "[8,4]"), 8), "lie outside");
  EXPECT_ERROR(parse(f32("[1]", "[0]"), 4), "must hold begin and end, found 1 numbers");
  EXPECT_ERROR(parse(f32("[1]", "[0,4.0]"), 4), "must hold integers");
  EXPECT_ERROR(parse(f32("[1]", "[0,18446744073709551615]"), 4), "must hold integers");
  EXPECT_ERROR(parse(f32("[-1]", "[0,4]"), 4), "shape must hold integers from 0");
  EXPECT_ERROR(parse(f32("[4294967296,4294967296]", "[0,4]"), 4), "too large for 64 bits");
  EXPECT_ERROR(parse(f32("[2305843009213693953,4]", "[0,4]"), 4), "too large for 64 bits");
  EXPECT_ERROR(parse(f32("[1]", "[4,8]"), 8), "4 bytes before tensor w belong to no tensor");
  EXPECT_ERROR(parse(f32("[1]", "[0,4]"), 5), "1 bytes at the end belong to no tensor");
}

TEST(Safetensors, OverlapDuplicatesTypes) {
  EXPECT_ERROR(
      parse(
          R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
          6),
      "tensor b overlaps");
  EXPECT_ERROR(
      parse(
          R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
          8),
      "JSON key \"a\" occurs twice");
  EXPECT_ERROR(parse(R"({"a":{"dtype":"Q9","shape":[4],"data_offsets":[0,4]}})", 4),
               "unknown dtype \"Q9\"; known are F64, F32");
  EXPECT_ERROR(parse(R"({"a":{"shape":[4],"data_offsets":[0,4]}})", 4), "\"dtype\" is missing");
  EXPECT_ERROR(parse(R"({"a":7})", 4), "expected a JSON object");
  EXPECT_ERROR(parse("[]", 0), "expected a JSON object at the top");
  EXPECT_ERROR(parse(R"({"":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4), "without a name");
}

// RECIPES 5.
TEST(Safetensors, EveryTruncation) {
  const std::string whole = test::read_text(test::fixture("hf/llama_tied/model.safetensors"));
  ASSERT_FALSE(parse_safetensors(test::as_span(whole), "whole").empty());
  for (size_t size = 0; size < whole.size(); size += size < 5000 ? 1 : 97) {
    const std::vector<char> cut(whole.begin(), whole.begin() + std::ptrdiff_t(size));
    EXPECT_ERROR(parse_safetensors(std::as_bytes(std::span(cut)), "cut"), "cut");
  }
  EXPECT_ERROR(parse_safetensors(test::as_span(std::string_view(whole).substr(0, whole.size() - 1)), "cut"),
               "cut short");
}

}  // namespace
}  // namespace lacuna::io
