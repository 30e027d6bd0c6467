// Files with gq, bm, gs and nm24_q4 tensors: written by GgufWriter and quantize, read by Checkpoint, refused when they
// lie.
#include <algorithm>
#include <cstring>

#include "core/rng.h"
#include "core/scalar.h"
#include "gguf_bytes.h"
#include "grouped_weights.h"
#include "io/checkpoint.h"
#include "io/gguf.h"
#include "io/gguf_writer.h"
#include "io/manifest.h"
#include "io/quantize.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

using layout::Family;
using layout::Id;

const std::string kDigest(64, '7');

test::GroupedWeight weight_of(Id id, int64_t N, int64_t K) {
  return test::grouped_weight(id, N, K, 3, {.group_size = 32, .sparsity = 0.5});
}

/// A file with one tensor "w".
void write_one(const std::string& path, const test::GroupedWeight& w) {
  GgufWriter writer(path, Metadata(), {{"w", w.layout, {w.shape.N, w.shape.K}, w.params}});
  writer.set_source_sha256("w", kDigest);
  writer.write(w.bytes);
  writer.finish();
}

std::vector<float> values(const Tensor& tensor) {
  std::vector<float> out(size_t(tensor.shape.N * tensor.shape.K));
  layout::decode_rows(*tensor.layout, tensor.shape, tensor.bytes, 0, tensor.shape.N, out.data(), tensor.params);
  return out;
}

TEST(GroupedFile, ComesBack) {
  const test::TempDir folder;
  for (const Id id : test::grouped_layouts()) {
    for (const layout::Shape shape : {layout::Shape{1, 64}, {33, 576}, {3, 257}, {257, 1}}) {
      if (shape.K % layout::get(id).block_cols != 0) continue;
      const test::GroupedWeight w = weight_of(id, shape.N, shape.K);
      write_one(folder.file("x.gguf"), w);
      const Checkpoint read = Checkpoint::open(folder.file("x.gguf"));
      const Tensor& tensor = read.require("w");
      EXPECT_EQ(tensor.layout->id, id);
      EXPECT_EQ(tensor.shape, shape);
      EXPECT_EQ(tensor.params, w.params);
      EXPECT_TRUE(std::ranges::equal(tensor.bytes, w.bytes));
      EXPECT_EQ(values(tensor), w.decoded);
      const Manifest manifest = parse_manifest(read.metadata().need_string(kManifestKey), "x");
      EXPECT_EQ(manifest.at("w").nnz, std::count(w.keep.begin(), w.keep.end(), 1)) << w.layout->name;
    }
  }
}

// The size that the header of each layout promises: within 2% where a row's padding does not count.
TEST(GroupedFile, SizesFollowTheArithmetic) {
  for (const double sparsity : {0.5, 0.75}) {
    const int64_t N = 64, K = 4096;
    const test::GroupedWeight w = test::grouped_weight(Id::bm4, N, K, 1, {.group_size = 128, .sparsity = sparsity});
    const double bits = 1 + 4 * double(w.params.nnz) / double(N * K) + 32.0 / 128;
    EXPECT_NEAR(8.0 * double(w.bytes.size()) / double(N * K), bits, 0.02 * bits);
    const test::GroupedWeight gs = test::grouped_weight(Id::gs4, N, K, 1, {.group_size = 16, .sparsity = sparsity});
    const double gs_bits = 1.0 / 16 + (4 + 20.0 / 16) * double(gs.params.nnz) / double(N * K);
    EXPECT_NEAR(8.0 * double(gs.bytes.size()) / double(N * K), gs_bits, 0.02 * gs_bits);
  }
}

TEST(GroupedFile, LiesAreRefused) {
  const test::TempDir folder;
  const std::string path = folder.file("x.gguf");
  const auto open = [&](std::string_view layout, int64_t N, int64_t K, int64_t nnz, std::string_view params,
                        uint64_t bytes) {
    const std::string manifest = fmt::format(
        R"({{"version":1,"tensors":{{"w":{{"layout":"{}","N":{},"K":{},"nnz":{},"params":{},"sha256":"{}"}}}}}})",
        layout, N, K, nnz, params, kDigest);
    test::write_bytes(path, test::Bytes()
                                .gguf(1, 1)
                                .string(kManifestKey)
                                .number(8u)
                                .string(manifest)
                                .tensor("w", {bytes}, uint32_t(kGgmlTypeI8), 0)
                                .pad(32)
                                .raw(std::string(bytes, '\0'))
                                .text());
    return Checkpoint::open(path);
  };
  // gq4 [2, 10] in groups of 4: 3 scales, 3 zeros, 5 bytes of codes, one of padding.
  EXPECT_EQ(open("gq4", 2, 10, 20, R"({"group_size":4})", 36).require("w").params.group_size, 4);
  EXPECT_ERROR(open("gq4", 2, 10, 20, R"({"group_size":5})", 36), "tensor w: gq4 [2, 10] takes 28 bytes, found 36");
  EXPECT_ERROR(open("gq4", 2, 10, 20, R"({"group_size":-4})", 36), "tensor w: group_size is -4");
  EXPECT_ERROR(open("gq4", 2, 10, 20, "{}", 36), "gq4 needs the parameter group_size");
  EXPECT_ERROR(open("gq4", 2, 10, 20, R"({"group_size":4,"octets":1})", 36), "unknown parameter \"octets\"; gq4 has");
  EXPECT_ERROR(open("gq4", 2, 10, 19, R"({"group_size":4})", 36), "nnz = 19, but gq4 [2, 10] keeps 20");
  EXPECT_ERROR(open("gq4", int64_t{1} << 40, int64_t{1} << 22, int64_t{1} << 62, R"({"group_size":1})", 36), "bytes");
  // bm4 [2, 10] with one octet: sections of 32 bytes each, then 4 bytes of codes.
  EXPECT_EQ(open("bm4", 2, 10, 1, R"({"group_size":0,"octets":1})", 132).require("w").params.nnz, 1);
  EXPECT_ERROR(open("bm4", 2, 10, 2, R"({"group_size":0,"octets":2})", 132), "takes 136 bytes, found 132");
  EXPECT_ERROR(open("bm4", 2, 10, 9, R"({"group_size":0,"octets":1})", 132), "tensor w: 1 octets hold 0 to 8");
  EXPECT_ERROR(open("bm4", 2, 10, 1, R"({"group_size":0,"octets":5})", 148), "octets is 5, but [2, 10] has at most 4");
  EXPECT_ERROR(open("bm4", 2, 10, 1, R"({"group_size":0,"octets":4294967296})", 148), "between 0 and 2^32 - 1");
  EXPECT_ERROR(open("bm4", 2, 10, 1, R"({"group_size":0})", 132), "bm4 needs the parameter octets");
  EXPECT_ERROR(open("bm16", 2, 10, 1, R"({"group_size":0,"octets":1})", 132), "unknown parameter \"group_size\"");
  // gs4 [2, 20] with one group of 8: sections of 32 bytes each, then 4 bytes of codes.
  EXPECT_EQ(open("gs4", 2, 20, 8, R"({"group_size":8,"kept_groups":1})", 132).require("w").params.kept_groups, 1);
  EXPECT_EQ(open("gs4", 2, 20, 4, R"({"group_size":8,"kept_groups":1})", 132).require("w").params.nnz, 4);
  EXPECT_ERROR(open("gs4", 2, 20, 8, R"({"group_size":8,"kept_groups":2})", 132), "takes 136 bytes, found 132");
  EXPECT_ERROR(open("gs4", 2, 20, 9, R"({"group_size":8,"kept_groups":1})", 132), "1 groups hold 4 to 8 weights");
  EXPECT_ERROR(open("gs4", 2, 20, 40, R"({"group_size":8,"kept_groups":7})", 152), "kept_groups is 7, but [2, 20]");
  EXPECT_ERROR(open("gs4", 2, 20, 8, R"({"group_size":8,"kept_groups":4294967296})", 132), "between 0 and 2^32 - 1");
  EXPECT_ERROR(open("gs4", 2, 20, 8, R"({"group_size":8,"kept_groups":-1})", 132), "kept_groups is -1");
  EXPECT_ERROR(open("gs4", 2, 20, 8, R"({"group_size":24,"kept_groups":1})", 132), "group_size is 24, but gs4 has");
  EXPECT_ERROR(open("gs4", 2, 20, 8, R"({"group_size":8})", 132), "gs4 needs the parameter kept_groups");
  EXPECT_ERROR(open("gs4", 2, 20, 8, R"({"group_size":8,"kept_groups":1,"octets":1})", 132),
               "unknown parameter \"octets\"; gs4 has group_size, kept_groups");
  EXPECT_ERROR(open("gs16", int64_t{1} << 40, int64_t{1} << 22, 8, R"({"group_size":8,"kept_groups":1})", 132),
               "bytes");
  EXPECT_ERROR(open("nm24_q4", 1, 64, 64, "{}", 26), "nnz = 64, but nm24_q4 [1, 64] keeps 32");
  EXPECT_ERROR(open("nm24_q4", 1, 96, 48, "{}", 39), "K = 96, but nm24_q4 needs a multiple of 64");
  EXPECT_ERROR(open("nm24_q4", 1, 64, 32, R"({"group_size":64})", 26), "unknown parameter");
  // What only the bytes can show is found when the weight is used (layout::check_bytes).
  write_one(path, weight_of(Id::bm4, 5, 64));
  const std::string whole = test::read_text(path);
  for (const size_t cut : {whole.size() - size_t(kGgufDefaultAlignment), whole.size() / 2}) {
    test::write_bytes(path, whole.substr(0, cut));
    EXPECT_THROW(Checkpoint::open(path), Error);
  }
}

/// A model of one pruned matrix "blk.0.ffn_up.weight" and a vector, in f32.
void write_source(const std::string& path, const std::vector<float>& w, layout::Shape shape) {
  const layout::Layout& f32 = layout::get(Id::f32);
  Metadata metadata;
  metadata.set("general.architecture", std::string("llama"));
  GgufWriter writer(path, metadata,
                    {{"blk.0.ffn_up.weight", &f32, {shape.N, shape.K}}, {"output_norm.weight", &f32, {shape.K}}});
  writer.write(std::as_bytes(std::span(w)));
  writer.write(std::as_bytes(std::span(w).first(size_t(shape.K))));
  writer.finish();
}

/// Of every four weights two, one or none are kept, of every seventh group of 16 none.
std::vector<float> pruned(layout::Shape shape) {
  Rng rng(5);
  std::vector<float> w(size_t(shape.N * shape.K));
  for (size_t i = 0; i < w.size(); ++i)
    w[i] = i % 4 < i / 4 % 3 && i / 16 % 7 != 3 ? to_float(to_f16(float(rng.normal() * 0.02 + 0.001))) : 0.0f;
  return w;
}

TEST(QuantizeGrouped, RoundsAndKeepsTheZerosOfAPrunedModel) {
  const test::TempDir folder;
  ThreadPool pool(2);
  const layout::Shape shape{70, 576};
  const std::vector<float> w = pruned(shape);
  write_source(folder.file("x.gguf"), w, shape);
  const Checkpoint source = Checkpoint::open(folder.file("x.gguf"));
  for (const Id id : test::grouped_layouts()) {
    const layout::Layout& to = layout::get(id);
    QuantizeOptions options;
    options.layout = id;
    options.progress = false;
    if (to.bits < 16 && to.family != Family::two_of_four) options.params.group_size = 64;
    if (to.family == Family::group_sparse) options.params.group_size = 16;
    const QuantizeReport report = quantize(source, folder.file("y.gguf"), options, pool);
    EXPECT_TRUE(report.fell_back().empty());
    const Checkpoint made = Checkpoint::open(folder.file("y.gguf"));
    const Tensor& tensor = made.require("blk.0.ffn_up.weight");
    ASSERT_EQ(tensor.layout->id, id);
    EXPECT_EQ(made.require("output_norm.weight").layout->id, Id::f32);
    EXPECT_EQ(layout::first_bad_row(to, tensor.shape, tensor.bytes, tensor.params), -1);
    const std::vector<float> got = values(tensor);
    const size_t width = to.family == Family::group_sparse ? 16 : 64;
    for (size_t g = 0; g < got.size(); g += width) {
      float least = 0, most = 0;
      for (size_t k = g; k < g + width; ++k) least = std::min(least, w[k]), most = std::max(most, w[k]);
      // A step of the grid; nm24_q4's has 7 steps above zero. f16 shortens the range by 2^-11.
      const float step = to.family == Family::two_of_four ? std::max(most / 7, -least / 8)
                                                          : (most - least) / float((1 << to.bits) - 1);
      for (size_t k = g; k < g + width; ++k) {
        if (to.bits == 16) {
          ASSERT_EQ(got[k], w[k]) << to.name << " " << k;
        } else {
          ASSERT_LE(std::abs(got[k] - w[k]), step + (most - least) * 0x1p-10f) << to.name << " " << k;
        }
        ASSERT_TRUE(w[k] != 0 || got[k] == 0) << to.name << " " << k;
      }
    }
    if (to.family == Family::bitmask) {
      EXPECT_EQ(tensor.params.nnz, int64_t(w.size()) - std::count(w.begin(), w.end(), 0.0f));
    }
    if (to.family == Family::group_sparse) {
      int64_t kept = 0;
      for (auto group = w.begin(); group != w.end(); group += 16)
        kept += std::any_of(group, group + 16, [](float x) { return x != 0; });
      EXPECT_EQ(tensor.params.kept_groups, kept);
      EXPECT_LT(kept, shape.N * shape.K / 16 * 6 / 7 + 1);
    }
    // Once more into the same layout: the bytes are kept; into f32: the values.
    quantize(made, folder.file("z.gguf"), options, pool);
    const Checkpoint copy = Checkpoint::open(folder.file("z.gguf"));
    EXPECT_TRUE(std::ranges::equal(copy.require("blk.0.ffn_up.weight").bytes, tensor.bytes)) << to.name;
    options.layout = Id::f32;
    options.params = {};
    quantize(made, folder.file("z.gguf"), options, pool);
    EXPECT_EQ(values(Checkpoint::open(folder.file("z.gguf")).require("blk.0.ffn_up.weight")), got) << to.name;
  }
}

TEST(QuantizeGrouped, RefusesWhatALayoutCannotHold) {
  const test::TempDir folder;
  ThreadPool pool(1);
  const layout::Shape shape{3, 128};
  std::vector<float> w = pruned(shape);
  w[size_t(2 * 128 + 40)] = w[size_t(2 * 128 + 41)] = w[size_t(2 * 128 + 43)] = 1;
  write_source(folder.file("x.gguf"), w, shape);
  const Checkpoint source = Checkpoint::open(folder.file("x.gguf"));
  QuantizeOptions options;
  options.progress = false;
  options.layout = Id::nm24_q4;
  EXPECT_ERROR(quantize(source, folder.file("y.gguf"), options, pool),
               "blk.0.ffn_up.weight: row 2: the group of four at input 40 has 3 weights that are not 0");
  options.params.group_size = 64;
  EXPECT_ERROR(quantize(source, folder.file("y.gguf"), options, pool), "nm24_q4 has no group_size");
  options.layout = Id::bm4;
  options.head_layout = Id::gq4;
  EXPECT_ERROR(quantize(source, folder.file("y.gguf"), options, pool), "the output head cannot be gq4");
  EXPECT_FALSE(std::filesystem::exists(folder.file("y.gguf")));
}

}  // namespace
}  // namespace lacuna::io
