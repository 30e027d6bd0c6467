#include "io/atomic_file.h"

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <vector>

#include "gguf_bytes.h"
#include "io/checkpoint.h"
#include "io/gguf_writer.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> out;
  for (const auto& entry : fs::directory_iterator(folder)) out.push_back(entry.path().filename().string());
  std::sort(out.begin(), out.end());
  return out;
}

/// Writes a GGUF file of some MiB.
void write_model(const std::string& path, int64_t mib) {
  GgufWriter writer(path, Metadata(), {{"w", &layout::get(layout::Id::f32), {mib, 262144}}});
  const std::vector<std::byte> chunk(size_t{1} << 18, std::byte{0x3c});
  for (int64_t i = 0; i < mib * 4; ++i) writer.write(chunk);
  writer.finish();
}

TEST(AtomicFile, AppearsOnCommitOnly) {
  test::TempDir folder;
  const std::string path = folder.file("out.txt");
  AtomicFile file(path);
  file.write(test::as_span("hello "));
  file.write({});
  file.write(test::as_span("world"));
  EXPECT_EQ(file.position(), 11);
  EXPECT_FALSE(fs::exists(path));
  file.commit();
  EXPECT_EQ(test::read_text(path), "hello world");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"out.txt"});
}

TEST(AtomicFile, LargerThanTheBufferAndReplacing) {
  test::TempDir folder;
  const std::string path = folder.file("out.bin");
  test::write_bytes(path, "old");
  std::string text;
  for (int i = 0; text.size() < 3'500'000; ++i) text += std::to_string(i);
  {
    AtomicFile file(path);
    for (size_t at = 0; at < text.size(); at += 700'001)
      file.write(test::as_span(std::string_view(text).substr(at, 700'001)));
    EXPECT_EQ(test::read_text(path), "old");
    file.commit();
  }
  EXPECT_EQ(test::read_text(path), text);
  {
    AtomicFile abandoned(path);
    abandoned.write(test::as_span("new"));
  }
  EXPECT_EQ(test::read_text(path), text);
  EXPECT_EQ(names_in(folder.path()).size(), 1u);
}

TEST(AtomicFile, RemovesWhatKilledWritersLeft) {
  test::TempDir folder;
  const pid_t gone = ::fork();
  if (gone == 0) ::_exit(0);
  ASSERT_EQ(::waitpid(gone, nullptr, 0), gone);
  const auto left = [&](const std::string& name, pid_t pid, int minutes) {
    const std::string path = folder.file(fmt::format(".{}.{}-{}.partial", name, pid, minutes));
    test::write_bytes(path, "half");
    fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::minutes(minutes));
    return path;
  };
  const std::string stale = left("out", gone, 11), fresh = left("out", gone, 9), live = left("out", ::getppid(), 11),
                    other = left("out2", gone, 11);
  write_file_atomically(folder.file("out"), "whole");
  EXPECT_FALSE(fs::exists(stale));
  EXPECT_TRUE(fs::exists(fresh));
  EXPECT_TRUE(fs::exists(live));
  EXPECT_TRUE(fs::exists(other));
}

TEST(AtomicFile, RefusesAnEmptyName) { EXPECT_THROW(AtomicFile(""), Error); }

TEST(AtomicFile, ModeFollowsTheUmask) {
  test::TempDir folder;
  const mode_t old = ::umask(027);
  write_file_atomically(folder.file("x"), "x");
  ::umask(old);
  EXPECT_EQ(fs::status(folder.file("x")).permissions(), fs::perms(0640));
}

TEST(AtomicFile, ReplacesTheTargetOfALink) {
  test::TempDir folder;
  test::write_bytes(folder.file("real"), "old");
  fs::create_symlink("real", folder.file("link"));
  write_file_atomically(folder.file("link"), "new");
  EXPECT_TRUE(fs::is_symlink(folder.file("link")));
  EXPECT_EQ(test::read_text(folder.file("real")), "new");
}

TEST(AtomicFile, BadPlaces) {
  test::TempDir folder;
  EXPECT_ERROR(AtomicFile(folder.file("no/such/folder/x")), "No such file or directory");
  EXPECT_ERROR(AtomicFile(folder.path().string()), "is a folder");
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

// RECIPES 6: a full device, a full disk, a size limit, a kill: no plausible file.
TEST(AtomicFile, DevFull) {
  EXPECT_ERROR(write_file_atomically("/dev/full", "x"),
               "/dev/full: writing stopped before byte 1: No space left on device");
  EXPECT_ERROR(write_model("/dev/full", 4), "No space left on device");
  EXPECT_TRUE(fs::is_character_file("/dev/full"));  // not replaced by a file
}

TEST(AtomicFile, SizeLimitLeavesNothing) {
  test::TempDir folder;
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int status = 1;
    try {
      write_model(folder.file("big.gguf"), 4);
    } catch (const Error& error) {
      status = std::string_view(error.what()).find("File too large") != std::string_view::npos ? 42 : 2;
    }
    ::_exit(status);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 42) << status;
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(AtomicFile, SmallDiskLeavesNothingAndTheNextRunSucceeds) {
  test::TempDir folder;
  const std::string disk = folder.file("disk");
  fs::create_directory(disk);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=1m") != 0)
    GTEST_SKIP() << "SKIPPED: mounting a tmpfs needs root; /dev/full and the size limit test the same path";
  EXPECT_ERROR(write_model(disk + "/m.gguf", 4), "No space left on device");
  EXPECT_TRUE(fs::is_empty(disk));
  write_file_atomically(disk + "/small", "fits");
  EXPECT_EQ(test::read_text(disk + "/small"), "fits");
  ::umount(disk.c_str());
}

TEST(AtomicFile, KilledHalfWayLeavesOnlyANameThatNeverOpens) {
  test::TempDir folder;
  const std::string path = folder.file("m.gguf");
  const pid_t child = ::fork();
  if (child == 0) {
    GgufWriter writer(path, Metadata(), {{"w", &layout::get(layout::Id::f32), {4, 262144}}});
    writer.write(std::vector<std::byte>(size_t{2} << 20));
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  const auto left = names_in(folder.path());
  ASSERT_EQ(left.size(), 1u);
  EXPECT_TRUE(left[0].starts_with(".m.gguf.") && left[0].ends_with(".partial")) << left[0];
  EXPECT_ERROR(Checkpoint::open(folder.file(left[0])), "an unfinished file");
  EXPECT_ERROR(Checkpoint::open(path), "cannot open");
  write_model(path, 4);  // the next run is not disturbed by what lies there
  EXPECT_EQ(Checkpoint::open(path).tensors().size(), 1u);
}

}  // namespace
}  // namespace lacuna::io
