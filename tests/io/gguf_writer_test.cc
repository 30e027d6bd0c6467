#include "io/gguf_writer.h"

#include <filesystem>
#include <limits>

#include "core/mapped_file.h"
#include "gguf_bytes.h"
#include "io/gguf.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

namespace fs = std::filesystem;

const layout::Layout* f32() { return &layout::get(layout::Id::f32); }
const layout::Layout* q8_0() { return &layout::get(layout::Id::q8_0); }

std::vector<std::byte> pattern(size_t size, int seed) {
  std::vector<std::byte> out(size);
  for (size_t i = 0; i < size; ++i) out[i] = std::byte((i * 31 + size_t(seed)) & 0xff);
  return out;
}

Metadata every_type() {
  Metadata m;
  m.set("general.architecture", std::string("test"));
  m.set("u8", std::numeric_limits<uint8_t>::max());
  m.set("i8", std::numeric_limits<int8_t>::min());
  m.set("u16", std::numeric_limits<uint16_t>::max());
  m.set("i16", std::numeric_limits<int16_t>::min());
  m.set("u32", std::numeric_limits<uint32_t>::max());
  m.set("i32", std::numeric_limits<int32_t>::min());
  m.set("f32", -0.1f);
  m.set("yes", true);
  m.set("no", false);
  m.set("text", std::string("a\0b\n\xc3\xa9", 6));
  m.set("u64", std::numeric_limits<uint64_t>::max());
  m.set("i64", std::numeric_limits<int64_t>::min());
  m.set("f64", 1e300);
  m.set("u8s", std::vector<uint8_t>{0, 255});
  m.set("i8s", std::vector<int8_t>{-128, 127});
  m.set("u16s", std::vector<uint16_t>{1, 65535});
  m.set("i16s", std::vector<int16_t>{-2, 3});
  m.set("u32s", std::vector<uint32_t>{1, 2, 3});
  m.set("i32s", std::vector<int32_t>{});
  m.set("f32s", std::vector<float>{0.5f, -2});
  m.set("bools", std::vector<bool>{true, false, true});
  m.set("texts", std::vector<std::string>{"", "x", "yz"});
  m.set("u64s", std::vector<uint64_t>{7});
  m.set("i64s", std::vector<int64_t>{-7});
  m.set("f64s", std::vector<double>{0.1});
  return m;
}

TEST(GgufWriter, EveryMetadataTypeAndTensorsComeBack) {
  test::TempDir folder;
  const std::string path = folder.file("x.gguf");
  for (const uint32_t alignment : {0u, 8u, 32u, 256u}) {  // 0: no key
    SCOPED_TRACE(alignment);
    Metadata metadata = every_type();
    if (alignment > 0) metadata.set("general.alignment", alignment);
    const auto a = pattern(5 * 4, 1), b = pattern(3 * 2 * 34, 2), c = pattern(2 * 3 * 4 * 4, 3);
    GgufWriter writer(path, metadata, {{"a", f32(), {5}}, {"b", q8_0(), {3, 64}}, {"c", f32(), {2, 3, 4}}});
    writer.write(a);
    writer.write(std::span(b).first(7));  // in pieces, across a tensor's end
    std::vector<std::byte> rest(b.begin() + 7, b.end());
    rest.insert(rest.end(), c.begin(), c.end());
    writer.write(rest);
    const int64_t size = writer.finish();
    EXPECT_EQ(size, int64_t(fs::file_size(path)));

    const MappedFile mapped(path);
    const GgufFile file = parse_gguf(mapped.bytes(), path);
    EXPECT_EQ(file.version, 3);
    EXPECT_EQ(file.metadata.entries(), metadata.entries());
    ASSERT_EQ(file.tensors.size(), 3u);
    EXPECT_EQ(file.tensors[2].dims, (std::vector<int64_t>{2, 3, 4}));
    EXPECT_TRUE(std::ranges::equal(file.tensors[0].bytes, a));
    EXPECT_TRUE(std::ranges::equal(file.tensors[1].bytes, b));
    EXPECT_TRUE(std::ranges::equal(file.tensors[2].bytes, c));
  }
}

// What another program wrote, read and written again, is the same file byte for byte.
TEST(GgufWriter, CopiesFilesOfTheReferenceWriterByteForByte) {
  test::TempDir folder;
  for (const char* name : {"gguf_models/llama_mha.gguf", "gguf_models/qwen3.gguf",
                           "gguf_models/llama_gqa_rope_llama3.gguf", "gguf/vocabulary.gguf"}) {
    SCOPED_TRACE(name);
    const MappedFile mapped(test::fixture(name));
    const GgufFile file = parse_gguf(mapped.bytes(), name);
    std::vector<TensorPlan> plan;
    for (const GgufTensor& tensor : file.tensors)
      plan.push_back({tensor.name, layout::find_ggml_type(tensor.type), tensor.dims});
    const std::string path = folder.file("copy.gguf");
    GgufWriter writer(path, file.metadata, plan);
    for (const GgufTensor& tensor : file.tensors) writer.write(tensor.bytes);
    writer.finish();
    EXPECT_EQ(test::read_text(path), test::read_text(test::fixture(name)));
  }
}

TEST(GgufWriter, RefusesPlansThatNoReaderTakes) {
  test::TempDir folder;
  const std::string path = folder.file("x.gguf");
  const auto write = [&](std::vector<TensorPlan> plan) { GgufWriter(path, Metadata(), std::move(plan)); };
  EXPECT_ERROR(write({{"w", q8_0(), {3, 33}}}), "tensor w: K = 33, but q8_0 needs a multiple of 32");
  EXPECT_ERROR(write({{"w", f32(), {}}}), "0 dimensions");
  EXPECT_ERROR(write({{"w", f32(), {1, 1, 1, 1, 1}}}), "5 dimensions");
  EXPECT_ERROR(write({{"w", f32(), {0, 4}}}), "a dimension of 0");
  EXPECT_ERROR(write({{"w", f32(), {int64_t{1} << 40, int64_t{1} << 40}}}), "too large");
  EXPECT_ERROR(write({{"w", nullptr, {4}}}), "no layout");
  EXPECT_ERROR(write({{"", f32(), {4}}}), "no name");
  EXPECT_ERROR(write({{"w", f32(), {4}}, {"w", f32(), {4}}}), "planned twice");
  Metadata odd;
  odd.set("general.alignment", uint32_t{12});
  EXPECT_ERROR(GgufWriter(path, odd, {}), "power of two");
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(GgufWriter, WrongAmountsLeaveNoFile) {
  test::TempDir folder;
  const std::string path = folder.file("x.gguf");
  {
    GgufWriter writer(path, Metadata(), {{"w", f32(), {4}}});
    writer.write(pattern(15, 0));
    EXPECT_ERROR(writer.finish(), "tensor w: 15 of 16 bytes were written");
  }
  {
    GgufWriter writer(path, Metadata(), {{"w", f32(), {4}}});
    EXPECT_ERROR(writer.write(pattern(17, 0)), "1 bytes more than all planned tensors hold");
  }
  { GgufWriter unfinished(path, Metadata(), {{"w", f32(), {4}}}); }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

}  // namespace
}  // namespace lacuna::io
