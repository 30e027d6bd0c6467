// Texts to calibrate with.
#include "io/documents.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace lacuna::io {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(Documents, PlainTextIsOne) {
  EXPECT_THAT(split_documents("a\nb\n", {}, "f"), ElementsAre("a\nb\n"));
  EXPECT_THAT(split_documents("", {}, "f"), ElementsAre(""));
}

TEST(Documents, JsonLinesByKey) {
  EXPECT_THAT(split_documents("{\"text\":\"a\",\"id\":1}\n\n{\"text\":\"b\"}", {}, "f"), ElementsAre("a", "b"));
  EXPECT_THAT(split_documents("{\"prefix\":\"a\",\"gold_completion\":\"b\"}\n", {}, "f"), ElementsAre("ab"));
  EXPECT_THAT(split_documents("{\"x\":\"a\",\"y\":\"b\"}\n", {"y", "x"}, "f"), ElementsAre("ba"));
  EXPECT_EQ(join_documents({"a", "b"}), "a\n\nb");
}

TEST(Documents, ErrorsNameLineAndKeys) {
  EXPECT_THAT(
      [] { split_documents("{\"text\":\"a\"}\n{\"body\":\"b\",\"n\":2}\n", {}, "f.jsonl"); },
      ThrowsMessage<Error>(AllOf(HasSubstr("f.jsonl: line 2"), HasSubstr("'text'"), HasSubstr("under: body;"))));
  EXPECT_THAT([] { split_documents("{\"text\":3}\n", {}, "f"); }, ThrowsMessage<Error>(HasSubstr("line 1")));
  EXPECT_THAT([] { split_documents("{\"text\":\"a\"\n", {}, "f"); }, ThrowsMessage<Error>(HasSubstr("line 1")));
}

}  // namespace
}  // namespace lacuna::io
