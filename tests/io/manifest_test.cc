#include "io/manifest.h"

#include "gguf_bytes.h"

namespace lacuna::io {
namespace {

const std::string kSha(64, 'a');

std::string entry(std::string_view extra = "", std::string_view sha = kSha) {
  return fmt::format(R"({{"layout":"gs5","N":4,"K":32,"nnz":64,"params":{{"group_size":16}},"sha256":"{}"{}}})", sha,
                     extra);
}
std::string manifest(std::string_view tensors, std::string_view rest = R"("version":1)") {
  return fmt::format(R"({{{},"tensors":{{{}}}}})", rest, tensors);
}
Manifest parse(std::string_view text) { return parse_manifest(text, "x.gguf"); }

TEST(Manifest, ReadsAnEntry) {
  const Manifest m = parse(manifest("\"blk.0.attn_q.weight\":" + entry()));
  ASSERT_EQ(m.size(), 1u);
  const ManifestTensor& tensor = m.at("blk.0.attn_q.weight");
  EXPECT_EQ(tensor.layout, "gs5");
  EXPECT_EQ(tensor.shape, (layout::Shape{4, 32}));
  EXPECT_EQ(tensor.nnz, 64);
  EXPECT_EQ(tensor.params.at("group_size"), 16);
  EXPECT_EQ(tensor.sha256, kSha);
  EXPECT_TRUE(parse(manifest("")).empty());
}

TEST(Manifest, RefusesEverythingElse) {
  EXPECT_ERROR(parse("{"), "x.gguf: lacuna.manifest: bad JSON");
  EXPECT_ERROR(parse("[]"), "expected a JSON object at the top");
  EXPECT_ERROR(parse(R"({"tensors":{}})"), "\"version\" is missing");
  EXPECT_ERROR(parse(manifest("", R"("version":2)")), "version 2 is not supported, only 1 is");
  EXPECT_ERROR(parse(manifest("", R"("version":1,"more":0)")), "unknown key \"more\"");
  EXPECT_ERROR(parse(R"({"version":1})"), "\"tensors\" is missing");
  EXPECT_ERROR(parse(manifest("\"w\":" + entry(",\"x\":1"))), "tensor w: unknown key \"x\"");
  EXPECT_ERROR(parse(manifest("\"\":" + entry())), "without a name");
  EXPECT_ERROR(parse(manifest("\"w\":" + entry("", "abc"))), "64 lower-case hex digits");
  EXPECT_ERROR(parse(manifest("\"w\":" + entry("", std::string(64, 'A')))), "64 lower-case hex digits");
  EXPECT_ERROR(parse(manifest("\"w\":" + entry() + ",\"w\":" + entry())), "occurs twice");
  const auto with = [](std::string_view N, std::string_view K, std::string_view nnz, std::string_view params) {
    return manifest(fmt::format(R"("w":{{"layout":"gs5","N":{},"K":{},"nnz":{},"params":{},"sha256":"{}"}})", N, K, nnz,
                                params, kSha));
  };
  EXPECT_NO_THROW(parse(with("4", "32", "128", "{}")));
  EXPECT_ERROR(parse(with("4", "32", "129", "{}")), "nnz = 129 of 128 weights");
  EXPECT_ERROR(parse(with("4", "32", "-1", "{}")), "nnz = -1");
  EXPECT_ERROR(parse(with("0", "32", "0", "{}")), "N = 0");
  EXPECT_ERROR(parse(with("-4", "-32", "0", "{}")), "N = -4");
  EXPECT_ERROR(parse(with("4294967296", "4294967296", "0", "{}")), "below 2^63");
  EXPECT_ERROR(parse(with("4.5", "32", "0", "{}")), "\"N\" must be an integer");
  EXPECT_ERROR(parse(with("4", "32", "0", "[]")), "\"params\" must be an object");
  EXPECT_ERROR(parse(with("4", "32", "0", R"({"g":"x"})")), "\"g\" must be an integer");
}

TEST(Manifest, UnknownLayoutListsTheKnownOnes) {
  const Manifest m = parse(manifest("\"w\":" + entry()));
  EXPECT_ERROR(packed_layout("w", m.at("w"), "x.gguf"), "x.gguf: tensor w: unknown packed layout \"gs5\"; known are");
  ManifestTensor row_type = m.at("w");
  row_type.layout = "q4_K";  // a type that GGUF has itself is never packed
  EXPECT_ERROR(packed_layout("w", row_type, "x.gguf"), "unknown packed layout \"q4_K\"");
}

TEST(Manifest, ParametersOfZigzagLayouts) {
  const layout::Layout& zz4 = layout::get(layout::Id::zz4_k);
  ManifestTensor entry = manifest_entry(zz4, {300, 7}, {.tile_rows = 512});
  EXPECT_EQ(&packed_layout("w", entry, "x.gguf"), &zz4);
  EXPECT_EQ(entry.nnz, 2100);
  EXPECT_EQ(packed_params("w", entry, zz4, "x.gguf").tile_rows, 512);
  for (const int64_t tile_rows : {int64_t{-256}, int64_t{255}, std::numeric_limits<int64_t>::min()}) {
    entry.params["tile_rows"] = tile_rows;
    EXPECT_ERROR(packed_params("w", entry, zz4, "x.gguf"), "x.gguf: tensor w: tile_rows is");
  }
  entry.params = {};
  EXPECT_ERROR(packed_params("w", entry, zz4, "x.gguf"), "zz4_k needs the parameter tile_rows");
  entry.params = {{"tile_rows", 0}, {"group_size", 32}};
  EXPECT_ERROR(packed_params("w", entry, zz4, "x.gguf"), "unknown parameter \"group_size\"; zz4_k has tile_rows");
}

TEST(Manifest, EveryPackedLayoutsParametersComeBack) {
  for (const layout::Layout& layout : layout::all()) {
    if (layout.ggml_type >= 0) continue;
    layout::Params params;
    for (const layout::Parameter& parameter : layout::parameters(layout)) params.*parameter.value = 512;
    if (layout::counts_kept(layout)) params.nnz = 4000;
    if (layout.family == layout::Family::group_sparse) params.group_size = 64;
    const ManifestTensor entry = manifest_entry(layout, {64, 512}, params);
    EXPECT_EQ(packed_params("w", entry, layout, "x.gguf"), params) << layout.name;
    EXPECT_EQ(entry.params.size(), layout::parameters(layout).size());
    ManifestTensor lie = entry;
    lie.params["more"] = 1;
    EXPECT_ERROR(packed_params("w", lie, layout, "x.gguf"), "unknown parameter \"more\"");
  }
}

TEST(Manifest, WhatIsWrittenIsRead) {
  Manifest written;
  written["blk.0.attn_q.weight"] = manifest_entry(layout::get(layout::Id::zz8), {1, 1}, {});
  written["a \"quoted\" name\n"] = manifest_entry(layout::get(layout::Id::zz2_k), {257, 3}, {.tile_rows = 256});
  written["a \"quoted\" name\n"].sha256 = kSha;
  std::map<std::string, size_t, std::less<>> at;
  std::string text = format_manifest(written, at);
  ASSERT_EQ(at.size(), 2u);
  text.replace(at.at("blk.0.attn_q.weight"), 64, std::string(64, 'b'));
  const Manifest read = parse(text);
  ASSERT_EQ(read.size(), 2u);
  for (const auto& [name, tensor] : written) {
    EXPECT_EQ(read.at(name).layout, tensor.layout);
    EXPECT_EQ(read.at(name).shape, tensor.shape);
    EXPECT_EQ(read.at(name).nnz, tensor.nnz);
    EXPECT_EQ(read.at(name).params, tensor.params);
  }
  EXPECT_EQ(read.at("a \"quoted\" name\n").sha256, kSha);
  EXPECT_EQ(read.at("blk.0.attn_q.weight").sha256, std::string(64, 'b'));
  at.clear();
  EXPECT_TRUE(parse(format_manifest({}, at)).empty());
}

}  // namespace
}  // namespace lacuna::io
