// `perplexity`: its file of logits.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "process.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

const std::string kModel = fixture("text_model.gguf");
const std::string kText = fixture("text_model/sample.txt");

std::vector<std::string> command(const std::string& out, const std::string& ctx = "8") {
  return {"perplexity", kModel, "-f", kText, "--ctx", ctx, "--chunks", "2", "--logits-out", out};
}

/// n_vocab and n_rows agree with the length.
void expect_logits(const std::string& bytes, int32_t rows) {
  int32_t header[2] = {0, 0};
  ASSERT_GE(bytes.size(), sizeof(header));
  std::memcpy(header, bytes.data(), sizeof(header));
  EXPECT_GT(header[0], 0);
  EXPECT_EQ(header[1], rows);
  EXPECT_EQ(bytes.size(), sizeof(header) + size_t(header[0]) * size_t(header[1]) * sizeof(float));
}

TEST(LogitsOut, TheHeaderCountsTheRows) {
  const TempDir dir;
  const std::string out = dir.file("logits");
  for (const char* protocol : {"hf", "llama.cpp"}) {
    std::vector<std::string> arguments = command(out);
    arguments.insert(arguments.end(), {"--protocol", protocol});
    const auto result = json_of(arguments);
    EXPECT_EQ(result["tokens"], protocol == std::string("hf") ? 14 : 6);
    expect_logits(read_text(out), result["tokens"]);
  }
}

TEST(LogitsOut, FilesBesideItAreLeftAlone) {
  const TempDir dir;
  std::ofstream(dir.file("logits.partial")) << "mine";
  output_of(command(dir.file("logits")));
  EXPECT_EQ(read_text(dir.file("logits.partial")), "mine");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 2);
}

TEST(LogitsOut, ALinkIsFollowedAndAPipeIsWrittenThrough) {
  const TempDir dir;
  std::ofstream(dir.file("target")) << "old";
  std::filesystem::create_symlink(dir.file("target"), dir.file("link"));
  output_of(command(dir.file("link")));
  EXPECT_TRUE(std::filesystem::is_symlink(dir.file("link")));
  expect_logits(read_text(dir.file("target")), 14);

  const std::string fifo = dir.file("fifo");
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const int reader = ::open(fifo.c_str(), O_RDWR | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  std::vector<std::string> arguments = command(fifo, "2");
  output_of(arguments);
  EXPECT_TRUE(std::filesystem::is_fifo(fifo));
  std::string bytes(size_t{1} << 17, ' ');
  const ssize_t got = ::read(reader, bytes.data(), bytes.size());
  ::close(reader);
  ASSERT_GT(got, 0);
  expect_logits(bytes.substr(0, size_t(got)), 2);
}

TEST(LogitsOut, AFailedRunLeavesNothing) {
  const TempDir dir;
  std::vector<std::string> arguments = command(dir.file("logits"), "2");
  arguments.insert(arguments.end(), {"--protocol", "llama.cpp"});
  expect_error(arguments, "3 tokens or more");
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  expect_error(command(dir.file("absent/logits")), "absent/logits");
}

}  // namespace
}  // namespace lacuna::test
