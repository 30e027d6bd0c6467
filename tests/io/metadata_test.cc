#include "io/metadata.h"

#include "gguf_bytes.h"

namespace lacuna::io {
namespace {

TEST(Metadata, KeepsInsertionOrderAndReplacesInPlace) {
  Metadata m;
  m.set("b", uint32_t{1});
  m.set("a", std::string("x"));
  m.set("b", int64_t{-5});
  ASSERT_EQ(m.entries().size(), 2u);
  EXPECT_EQ(m.entries()[0].first, "b");
  EXPECT_EQ(m.integer("b"), -5);
  EXPECT_EQ(m.string("a"), "x");
}

TEST(Metadata, EraseKeepsOtherKeysFindable) {
  Metadata m;
  for (const char* key : {"a", "b", "c"}) m.set(key, std::string(key));
  m.erase("b");
  m.erase("not there");
  ASSERT_EQ(m.entries().size(), 2u);
  EXPECT_EQ(m.string("a"), "a");
  EXPECT_EQ(m.string("c"), "c");
  EXPECT_FALSE(m.contains("b"));
  m.set("b", true);
  EXPECT_EQ(m.entries()[2].first, "b");
}

TEST(Metadata, AnyIntegerWidthWhereTheValueFits) {
  Metadata m;
  m.set("u8", uint8_t{200});
  m.set("i8", int8_t{-7});
  m.set("u64", uint64_t{1} << 63);
  m.set("bool", true);
  EXPECT_EQ(m.integer("u8"), 200);
  EXPECT_EQ(m.integer("i8"), -7);
  EXPECT_EQ(m.number("u8"), 200.0);
  EXPECT_EQ(m.integer("absent"), std::nullopt);
  EXPECT_ERROR(m.integer("u64"), "u64: 9223372036854775808 does not fit");
  EXPECT_ERROR(m.integer("bool"), "bool: expected an integer, found bool");
  EXPECT_ERROR(m.need_integer("absent"), "absent is missing");
}

TEST(Metadata, ArraysAndOneElement) {
  Metadata m;
  m.set("one", uint32_t{3});
  m.set("many", std::vector<int16_t>{-1, 2});
  m.set("floats", std::vector<double>{0.5, 2});
  m.set("texts", std::vector<std::string>{"a"});
  m.set("bools", std::vector<bool>{true});
  EXPECT_EQ(m.integers("one"), (std::vector<int64_t>{3}));
  EXPECT_EQ(m.integers("many"), (std::vector<int64_t>{-1, 2}));
  EXPECT_EQ(m.numbers("floats"), (std::vector<float>{0.5, 2}));
  ASSERT_NE(m.strings("texts"), nullptr);
  EXPECT_EQ(m.strings("absent"), nullptr);
  EXPECT_ERROR(m.integers("floats"), "floats: expected an array of integers, found float64 array");
  EXPECT_ERROR(m.integers("bools"), "found bool array");
  EXPECT_ERROR(m.numbers("texts"), "found string array");
  EXPECT_ERROR(m.strings("many"), "found int16 array");
  EXPECT_ERROR(m.boolean("one"), "expected a bool, found uint32");
  EXPECT_ERROR(m.string("one"), "expected a string");
  EXPECT_ERROR(m.need_string("absent"), "absent is missing");
  EXPECT_ERROR(m.need_number("absent"), "absent is missing");
}

}  // namespace
}  // namespace lacuna::io
