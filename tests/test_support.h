// tests/test_support.h - where fixtures and shared data lie; a loud skip where data is absent.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "paths.h"

namespace lacuna::test {

/// A file or folder under tests/fixtures.
inline std::string fixture(const std::string& name) { return std::string(kSourceDir) + "/tests/fixtures/" + name; }

/// The folder of shared data: $LACUNA_SHARED_DATA, else ../shared/data beside the source tree.
inline std::filesystem::path shared_data() {
  if (const char* path = std::getenv("LACUNA_SHARED_DATA")) return path;
  return std::filesystem::path(kSourceDir) / ".." / "shared" / "data";
}

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

/// A folder that goes away with the object.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "lacuna-test-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// The largest of the values added; NaN from the first NaN on, so that no later value hides it.
class Largest {
 public:
  void add(double value) {
    if (std::isnan(value) || value > largest_) largest_ = value;
  }
  double value() const { return largest_; }

 private:
  double largest_ = 0;
};

}  // namespace lacuna::test

/// Skips the test when the shared data lacks `name`; scripts/test.sh knows which skips are allowed.
#define LACUNA_NEED_SHARED(name)                                      \
  if (!std::filesystem::exists(lacuna::test::shared_data() / (name))) \
  GTEST_SKIP() << "SKIPPED: shared data file " << (name) << " is absent (set LACUNA_SHARED_DATA)"
