#include "io/json.h"

#include "gguf_bytes.h"

namespace lacuna::io {
namespace {

TEST(Json, RefusesWhatItCannotTrust) {
  EXPECT_ERROR(parse_json("{", "f"), "f: bad JSON");
  EXPECT_ERROR(parse_json("", "f"), "f: bad JSON");
  EXPECT_ERROR(parse_json("{\"a\":1}x", "f"), "bad JSON");
  EXPECT_ERROR(parse_json("\"\xff\"", "f"), "bad JSON");
  EXPECT_ERROR(parse_json("1e999", "f"), "bad JSON");
  EXPECT_ERROR(parse_json(R"({"a":1,"a":2})", "f"), "JSON key \"a\" occurs twice");
  EXPECT_ERROR(parse_json(R"({"x":[{"a":1,"b":{"a":1},"a":2}]})", "f"), "occurs twice");
  EXPECT_EQ(parse_json(R"([{"a":1},{"a":{"a":2}}])", "f").size(), 2u);
  EXPECT_ERROR(parse_json_object("[1]", "f"), "expected a JSON object at the top, found array");
}

TEST(Json, SaysWhereWithoutTheLibrarysName) {
  try {
    parse_json("{\"a\":}", "f");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_TRUE(std::string_view(error.what()).starts_with("f: bad JSON: parse error at line 1, column 6"))
        << error.what();
  }
}

TEST(Json, DepthIsBounded) {
  EXPECT_NO_THROW(parse_json(std::string(kMaxJsonDepth, '[') + std::string(kMaxJsonDepth, ']'), "f"));
  EXPECT_ERROR(parse_json(std::string(kMaxJsonDepth + 1, '[') + std::string(kMaxJsonDepth + 1, ']'), "f"),
               "nested deeper than 64");
  EXPECT_ERROR(parse_json(std::string(1'000'000, '['), "f"), "nested deeper");
}

TEST(Json, TypedReads) {
  const std::string where = "f";
  const auto json =
      parse_json(R"({"i":-3,"big":9223372036854775808,"f":1.5,"s":"x","n":null,"b":true,"a":[],"o":{}})", where);
  const JsonObject in(json, where);
  EXPECT_EQ(in.integer("i"), -3);
  EXPECT_EQ(in.number("i"), -3.0);
  EXPECT_EQ(in.number("f"), 1.5);
  EXPECT_EQ(in.integer("n"), std::nullopt);
  EXPECT_EQ(in.string("s"), "x");
  EXPECT_ERROR(in.integer("big"), "too large for 63 bits");
  EXPECT_ERROR(in.integer("f"), "\"f\" must be an integer, found number");
  EXPECT_ERROR(in.number("s"), "must be a number");
  EXPECT_ERROR(in.string("i"), "must be a string");
  EXPECT_ERROR(in.boolean("i"), "must be true or false");
  EXPECT_ERROR(in.array("o"), "must be an array");
  EXPECT_ERROR(in.object("a"), "must be an object");
  EXPECT_ERROR(in.need_string("n"), "f: \"n\" is missing");
  EXPECT_ERROR(in.need_integer("none"), "\"none\" is missing");
  EXPECT_ERROR(in.need_array("none"), "is missing");
  EXPECT_ERROR(in.need_object("none"), "is missing");
  EXPECT_ERROR(JsonObject(json["a"], where), "expected a JSON object, found array");
}

TEST(JsonKeys, AreInTheOrderOfTheText) {
  const auto keys = [](std::string_view text, std::vector<std::string_view> path) { return json_keys(text, path); };
  using Keys = std::vector<std::string>;
  const char* text = R"({"z":{"b":1,"a":{"k":2},"0":[{"c":3}]},"a":[{"b":4}],"y":5})";
  EXPECT_EQ(keys(text, {}), (Keys{"z", "a", "y"}));
  EXPECT_EQ(keys(text, {"z"}), (Keys{"b", "a", "0"}));
  EXPECT_EQ(keys(text, {"z", "a"}), Keys{"k"});
  EXPECT_EQ(keys(text, {"a"}), Keys{}) << "an array";
  EXPECT_EQ(keys(text, {"z", "0"}), Keys{});
  EXPECT_EQ(keys(text, {"y"}), Keys{});
  EXPECT_EQ(keys(text, {"b"}), Keys{}) << "not at the top";
  EXPECT_EQ(keys("[{\"a\":1}]", {}), Keys{});
}

}  // namespace
}  // namespace lacuna::io
