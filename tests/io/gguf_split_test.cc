#include "io/gguf_split.h"

#include <filesystem>

#include "gguf_bytes.h"
#include "io/gguf_writer.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

namespace fs = std::filesystem;

/// Writes one part with one tensor.
void write_part(const std::string& path, int no, int count, const std::string& tensor, int total = 2) {
  Metadata metadata;
  metadata.set("split.no", uint16_t(no));
  metadata.set("split.count", uint16_t(count));
  metadata.set("split.tensors.count", int32_t(total));
  metadata.set("part", int32_t(no));
  GgufWriter writer(path, metadata, {{tensor, &layout::get(layout::Id::f32), {4}}});
  writer.write(std::vector<std::byte>(16, std::byte(no)));
  writer.finish();
}

TEST(GgufSplit, AnyPartOpensAll) {
  for (const char* part : {"gguf/split-00001-of-00002.gguf", "gguf/split-00002-of-00002.gguf"}) {
    const GgufSet set = open_gguf_set(test::fixture(part));
    EXPECT_EQ(set.files.size(), 2u);
    EXPECT_EQ(set.tensors.size(), 3u);
    EXPECT_EQ(set.metadata.string("general.architecture"), "test");
    EXPECT_FALSE(set.metadata.contains("split.no"));
    EXPECT_FALSE(set.metadata.contains("split.count"));
    EXPECT_FALSE(set.metadata.contains("split.tensors.count"));
  }
}

TEST(GgufSplit, BytesComeFromTheirOwnPart) {
  test::TempDir folder;
  write_part(folder.file("m-00001-of-00002.gguf"), 0, 2, "a");
  write_part(folder.file("m-00002-of-00002.gguf"), 1, 2, "b");
  const GgufSet set = open_gguf_set(folder.file("m-00002-of-00002.gguf"));
  ASSERT_EQ(set.tensors.size(), 2u);
  EXPECT_EQ(set.tensors[0].bytes[0], std::byte{0});
  EXPECT_EQ(set.tensors[1].bytes[0], std::byte{1});
  EXPECT_EQ(set.metadata.integer("part"), 0);
}

// RECIPES 4.
TEST(GgufSplit, MissingAndContradictingParts) {
  test::TempDir folder;
  const std::string first = folder.file("m-00001-of-00003.gguf"), second = folder.file("m-00002-of-00003.gguf"),
                    third = folder.file("m-00003-of-00003.gguf");
  write_part(first, 0, 3, "a", 3);
  write_part(third, 2, 3, "c", 3);
  EXPECT_ERROR(open_gguf_set(first), "m-00002-of-00003.gguf: part 2 of 3 is missing");
  EXPECT_ERROR(open_gguf_set(third), "m-00002-of-00003.gguf: part 2 of 3 is missing");
  write_part(second, 0, 3, "b", 3);
  EXPECT_ERROR(open_gguf_set(first), "it says that it is part 1 of 3, expected part 2 of 3");
  EXPECT_ERROR(open_gguf_set(second), "its name must end with -00001-of-00003.gguf");
  write_part(second, 1, 3, "a", 3);
  EXPECT_ERROR(open_gguf_set(first), "tensor a stands in another part too");
  write_part(second, 1, 3, "b", 3);
  EXPECT_EQ(open_gguf_set(first).tensors.size(), 3u);
  write_part(first, 0, 3, "a", 4);
  EXPECT_ERROR(open_gguf_set(first), "the parts hold 3 tensors, split.tensors.count says 4");
  fs::copy_file(first, folder.file("renamed.gguf"));
  EXPECT_ERROR(open_gguf_set(folder.file("renamed.gguf")), "its name must end with");
  write_part(folder.file("x-00001-of-00002.gguf"), 7, 2, "a");
  EXPECT_ERROR(open_gguf_set(folder.file("x-00001-of-00002.gguf")), "split.no = 7, split.count = 2");
}

}  // namespace
}  // namespace lacuna::io
