// core/huge_buffer.h and core/mapped_file.h
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/huge_buffer.h"
#include "core/mapped_file.h"
#include "test_support.h"

namespace lacuna {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(HugeBuffer, ZeroedAlignedAndWritable) {
  for (const size_t size : {size_t{1}, size_t{64}, size_t{100000}, (size_t{2} << 20) + 3, size_t{9} << 20}) {
    HugeBuffer buffer(size);
    ASSERT_EQ(buffer.size(), size);
    ASSERT_EQ(buffer.bytes().size(), size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    EXPECT_TRUE(std::ranges::all_of(buffer.bytes(), [](std::byte b) { return b == std::byte{0}; }));
    std::ranges::fill(buffer.bytes(), std::byte{7});
    EXPECT_EQ(buffer.data()[size - 1], std::byte{7});
  }
  EXPECT_EQ(HugeBuffer(0).data(), nullptr);
}

TEST(HugeBuffer, Moves) {
  HugeBuffer a(100), b(3 << 20);
  std::byte* const data = a.data();
  a.data()[5] = std::byte{9};
  b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(b.size(), 100u);
  const HugeBuffer c(std::move(b));
  EXPECT_EQ(c.data()[5], std::byte{9});
  EXPECT_EQ(b.size(), 0u);  // NOLINT: what is left behind is empty
  EXPECT_EQ(b.data(), nullptr);
}

TEST(HugeBuffer, RefusesWhatTheSystemCannotGive) {
  for (const size_t size :
       {std::numeric_limits<size_t>::max(), std::numeric_limits<size_t>::max() - (1 << 20), size_t{1} << 62})
    EXPECT_THAT([size] { HugeBuffer{size}; }, ThrowsMessage<Error>(HasSubstr("cannot reserve"))) << size;
}

TEST(MappedFile, BytesOfTheFile) {
  const test::TempDir dir;
  const std::string text(100000, 'x');
  std::ofstream(dir.file("x"), std::ios::binary) << text;
  MappedFile file(dir.file("x"));
  ASSERT_EQ(file.bytes().size(), text.size());
  EXPECT_EQ(file.path(), dir.file("x"));
  const MappedFile moved(std::move(file));
  MappedFile::release(moved.bytes().subspan(1, 50000));  // may leave memory, can be read again
  MappedFile::release(moved.bytes());
  EXPECT_TRUE(std::ranges::all_of(moved.bytes(), [](std::byte b) { return b == std::byte{'x'}; }));
}

TEST(MappedFile, ReleaseLeavesOtherMemoryAlone) {
  std::vector<std::byte> mine(1 << 20, std::byte{3});
  HugeBuffer buffer(1 << 20);
  std::ranges::fill(buffer.bytes(), std::byte{4});
  MappedFile::release(mine);
  MappedFile::release(buffer.bytes());
  MappedFile::release({});
  EXPECT_TRUE(std::ranges::all_of(mine, [](std::byte b) { return b == std::byte{3}; }));
  EXPECT_TRUE(std::ranges::all_of(buffer.bytes(), [](std::byte b) { return b == std::byte{4}; }));
}

TEST(MappedFile, EmptyAbsentAndFolder) {
  const test::TempDir dir;
  std::ofstream(dir.file("empty"), std::ios::binary);
  EXPECT_TRUE(MappedFile(dir.file("empty")).bytes().empty());
  EXPECT_THAT([&] { MappedFile{dir.file("absent")}; },
              ThrowsMessage<Error>(testing::AllOf(HasSubstr("absent"), HasSubstr("No such file"))));
  EXPECT_THAT([&] { MappedFile{dir.path().string()}; }, ThrowsMessage<Error>(HasSubstr("not a regular file")));
}

}  // namespace
}  // namespace lacuna
