#include "core/error.h"

#include <gtest/gtest.h>

#include "core/files.h"
#include "test_support.h"

namespace lacuna {
namespace {

TEST(Error, ANulDoesNotCutTheSentence) {
  EXPECT_STREQ(Error("tensor {}: too large", std::string("a\0b\0", 4)).what(), "tensor a\\x00b\\x00: too large");
}

TEST(NamingFile, PutsTheNameInFrontOnce) {
  const auto what = [](const char* message) {
    try {
      naming_file("model.gguf", [&]() -> int { throw Error("{}", message); });
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(what("key x is missing"), "model.gguf: key x is missing");
  EXPECT_EQ(what("model.gguf: key x is missing"), "model.gguf: key x is missing");
  EXPECT_EQ(naming_file("model.gguf", [] { return 7; }), 7);
}

TEST(Files, AnswersOrNamesTheFile) {
  const test::TempDir dir;
  EXPECT_FALSE(file_exists(dir.file("none")));
  EXPECT_FALSE(file_exists(dir.file("none") + "/below"));
  EXPECT_TRUE(file_exists(dir.path()));
  std::ofstream(dir.file("four")) << "four";
  EXPECT_EQ(file_bytes(dir.file("four")), 4);
  std::filesystem::create_symlink("loop", dir.file("loop"));
  for (const std::string& bad : {dir.file("loop"), dir.file(std::string(300, 'n'))}) {
    try {
      file_exists(bad);
      ADD_FAILURE() << bad;
    } catch (const Error& error) {
      EXPECT_TRUE(std::string_view(error.what()).starts_with(bad + ": ")) << error.what();
    }
    EXPECT_THROW(file_bytes(bad), Error);
  }
}

}  // namespace
}  // namespace lacuna
