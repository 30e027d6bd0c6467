// Folders in the formats of other programs (tests/fixtures/quantized; README.md there says what made each).
#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "core/sha256.h"
#include "hf_folder.h"
#include "io/gguf_model.h"
#include "io/hf_names.h"
#include "io/quantize.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

using nlohmann::json;

std::vector<std::string> names() {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(test::fixture("quantized")))
    out.push_back(entry.path().filename());
  std::sort(out.begin(), out.end());
  return out;
}

std::vector<float> values(const Tensor& tensor) {
  std::vector<float> out(size_t(tensor.shape.N * tensor.shape.K));
  layout::decode_rows(*tensor.layout, tensor.shape, tensor.bytes, 0, tensor.shape.N, out.data(), tensor.params);
  return out;
}

std::set<std::string> layouts_of(const Checkpoint& checkpoint) {
  std::set<std::string> out;
  for (const Tensor& tensor : checkpoint.tensors())
    if (is_matrix(tensor) && tensor.name.starts_with("blk.")) out.emplace(tensor.layout->name);
  return out;
}

class ImportFolder : public testing::TestWithParam<std::string> {
 protected:
  std::string path() const { return test::fixture("quantized/" + GetParam()); }
};

TEST_P(ImportFolder, HoldsTheValuesThatItWasMadeWith) {
  const Checkpoint read = Checkpoint::open(path());
  const json expected = json::parse(test::read_text(path() + "/expected.json"));
  ASSERT_GE(expected.size(), 7u);
  for (const auto& [module, one] : expected.items()) {
    const Tensor& tensor = read.require(gguf_tensor_name(read.architecture(), 1, module + ".weight", path()));
    layout::check_bytes(*tensor.layout, tensor.shape, tensor.bytes, tensor.params);
    EXPECT_EQ(tensor.dims, one["shape"].get<std::vector<int64_t>>()) << module;
    const std::vector<float> w = values(tensor);
    EXPECT_EQ(std::vector<float>(w.begin(), w.begin() + 4), one["first"].get<std::vector<float>>()) << module;
    EXPECT_EQ(sha256_hex(std::as_bytes(std::span(w))), one["sha256"]) << module;
  }
}

TEST_P(ImportFolder, IsStoredAsItIs) {
  const test::TempDir dir;
  ThreadPool pool(2);
  const Checkpoint source = Checkpoint::open(path());
  const QuantizeReport report = quantize(source, dir.file("x.gguf"), {.keep_source = true, .progress = false}, pool);
  EXPECT_TRUE(report.fell_back().empty());
  EXPECT_TRUE(report.requantized.empty());
  quantize(source, dir.file("f32.gguf"), {.layout = layout::Id::f32, .progress = false}, pool);
  const Checkpoint made = Checkpoint::open(dir.file("x.gguf")), wide = Checkpoint::open(dir.file("f32.gguf"));
  ASSERT_EQ(made.tensors().size(), source.tensors().size());
  for (const Tensor& tensor : source.tensors()) {
    const Tensor& copy = made.require(tensor.name);
    EXPECT_EQ(copy.layout, is_matrix(tensor) ? tensor.layout : &layout::get(layout::Id::f32)) << tensor.name;
    EXPECT_EQ(copy.params, tensor.params) << tensor.name;
    std::vector<float> expected = values(tensor);
    const std::vector<int64_t> order = gguf_row_order(source, tensor);
    const size_t row = is_matrix(tensor) ? size_t(tensor.shape.K) : 1;
    const std::vector<float> unordered = expected;
    for (size_t n = 0; n < order.size(); ++n) std::copy_n(&unordered[size_t(order[n]) * row], row, &expected[n * row]);
    EXPECT_EQ(values(copy), expected) << tensor.name;
    EXPECT_EQ(values(wide.require(tensor.name)), expected) << tensor.name;
  }
  // And once more, from the file.
  quantize(made, dir.file("y.gguf"), {.keep_source = true, .progress = false}, pool);
  const Checkpoint again = Checkpoint::open(dir.file("y.gguf"));
  for (const Tensor& tensor : made.tensors())
    EXPECT_TRUE(std::ranges::equal(again.require(tensor.name).bytes, tensor.bytes)) << tensor.name;
}

INSTANTIATE_TEST_SUITE_P(All, ImportFolder, testing::ValuesIn(names()), [](const auto& one) { return one.param; });

TEST(ImportFolders, BecomeTheseLayouts) {
  const std::map<std::string, std::set<std::string>> expected = {
      {"awq_gemm", {"gq4"}},        {"awq_gemv", {"gq4"}},      {"bitmask", {"bm16"}},
      {"bitmask_2_of_4", {"bm16"}}, {"bitmask_bf16", {"bf16"}}, {"bitmask_2_of_4_int_8", {"bm8"}},
      {"gptq_3_v2", {"gq3"}},       {"gptq_4", {"gq4"}},        {"gptq_rules", {"gq2", "gq8"}},
      {"gptq_words", {"gq4"}},      {"int_8", {"gq8"}},         {"packed_2_of_4", {"nm24_q4"}},
      {"packed_3", {"gq3"}},        {"packed_4", {"gq4"}},      {"packed_4_zeros", {"gq4"}},
      {"packed_8", {"gq8"}}};
  ASSERT_EQ(names().size(), expected.size());
  for (const auto& [name, layouts] : expected)
    EXPECT_EQ(layouts_of(Checkpoint::open(test::fixture("quantized/" + name))), layouts) << name;
}

TEST(ImportFolders, SplitFilesAndOlderKeysAndNames) {
  const test::Folder folder("quantized/gptq_4");
  const auto open = [&] { return values(folder.checkpoint().require("blk.0.ffn_down.weight")); };
  const auto expected = open();
  // Parts of a module in two shards.
  const auto entries = test::entries_of(folder.file("model.safetensors"));
  std::vector<test::Entry> shards[2];
  json index{{"weight_map", json::object()}};
  for (size_t i = 0; i < entries.size(); ++i) {
    shards[i % 2].push_back(entries[i]);
    index["weight_map"][entries[i].name] = fmt::format("part-{}.safetensors", i % 2);
  }
  for (size_t i = 0; i < 2; ++i) folder.put(fmt::format("part-{}.safetensors", i), test::safetensors(shards[i]));
  folder.put("model.safetensors.index.json", index.dump());
  EXPECT_EQ(open(), expected);
  // AutoGPTQ's first folders say it in a file of its own.
  json config = json::parse(test::read_text(folder.file("config.json")));
  json own = config["quantization_config"];
  own.erase("quant_method");
  folder.put("quantize_config.json", own.dump());
  config.erase("quantization_config");
  folder.put("config.json", config.dump());
  EXPECT_EQ(open(), expected);

  const test::Folder pruned("quantized/bitmask");
  const auto kept = values(pruned.checkpoint().require("blk.0.ffn_down.weight"));
  auto older = test::entries_of(pruned.file("model.safetensors"));
  for (test::Entry& entry : older)
    for (const char* part : {".compressed", ".bitmask", ".shape", ".row_offsets"})
      if (entry.name.ends_with(part)) entry.name.insert(entry.name.size() - strlen(part), ".weight");
  pruned.put("model.safetensors", test::safetensors(older));
  config = json::parse(test::read_text(pruned.file("config.json")));
  config["compression_config"] = config["quantization_config"];
  config.erase("quantization_config");
  pruned.put("config.json", config.dump());
  EXPECT_EQ(values(pruned.checkpoint().require("blk.0.ffn_down.weight")), kept);
}

TEST(ImportFolders, FirstFoldersOfAutoAwq) {
  const test::Folder folder("quantized/awq_gemm");
  const auto open = [&] { return values(folder.checkpoint().require("blk.0.ffn_down.weight")); };
  const auto expected = open();
  json config = json::parse(test::read_text(folder.file("config.json")));
  const json own = {{"zero_point", true}, {"q_group_size", 16}, {"w_bit", 4}, {"version", "GEMM"}};
  config.erase("quantization_config");
  folder.put("config.json", config.dump());
  EXPECT_ERROR(folder.open(), "a part of a quantized or pruned weight, but ");
  EXPECT_ERROR(folder.open(), "config.json lacks quantization_config, which says how it was made");
  folder.put("quant_config.json", own.dump());
  EXPECT_EQ(open(), expected);
}

TEST(ImportFolders, WithoutAWordAboutIt) {
  for (const char* name : {"gptq_4", "packed_4", "int_8", "bitmask", "bitmask_2_of_4_int_8"}) {
    const test::Folder folder(fmt::format("quantized/{}", name));
    folder.patch("config.json", R"({"quantization_config":null})");
    EXPECT_ERROR(folder.open(), "config.json lacks quantization_config, which says how it was made");
  }
}

TEST(ImportFolders, RulesCountInTheOrderOfTheFile) {
  const test::Folder folder("quantized/gptq_rules");
  const auto expected = values(folder.checkpoint().require("blk.0.ffn_down.weight"));
  std::string config = test::read_text(folder.file("config.json"));
  const std::string dynamic = "\"dynamic\":";
  const size_t at = config.find(dynamic);
  ASSERT_NE(at, std::string::npos);
  const size_t brace = config.find('{', at);
  config.insert(brace + 1,
                R"("model.layers.0.mlp":{"bits":2,"group_size":16},"a.*|model":{"bits":8,"group_size":32},)");
  folder.put("config.json", config);
  EXPECT_EQ(values(folder.checkpoint().require("blk.0.ffn_down.weight")), expected);
  config.insert(brace + 1, R"("z|model.*mlp":{"bits":8},)");
  folder.put("config.json", config);
  EXPECT_ERROR(folder.open(), "do not hold the 8-bit codes");
}

TEST(ImportFolders, WhatIsMissingOrTooMuchIsNamed) {
  const test::Folder folder("quantized/packed_4");
  const auto entries = test::entries_of(folder.file("model.safetensors"));
  const auto without = [&](std::string_view part) {
    std::vector<test::Entry> left;
    for (const test::Entry& entry : entries)
      if (entry.name != fmt::format("model.layers.0.mlp.up_proj.{}", part)) left.push_back(entry);
    EXPECT_LT(left.size(), entries.size());
    folder.put("model.safetensors", test::safetensors(left));
  };
  for (const char* part : {"weight_scale", "weight_shape"}) {
    without(part);
    EXPECT_ERROR(folder.open(), fmt::format("but model.layers.0.mlp.up_proj.{} is missing", part));
  }
  without("weight_packed");
  EXPECT_ERROR(folder.open(), "but model.layers.0.mlp.up_proj.weight is missing");
  auto more = entries;
  more.push_back({"model.layers.0.mlp.up_proj.surprise", "F32", {1}, "abcd"});
  folder.put("model.safetensors", test::safetensors(more));
  EXPECT_ERROR(folder.open(), "unknown tensor model.layers.0.mlp.up_proj.surprise");
  more.back() = {"model.layers.1.mlp.up_proj.weight_packed", "I32", {1, 1}, "abcd"};
  folder.put("model.safetensors", test::safetensors(more));
  EXPECT_ERROR(folder.open(), "model.layers.1.mlp.up_proj");
  // Activations' scales are of no use here.
  more.back() = {"model.layers.0.mlp.up_proj.input_scale", "F32", {1}, "abcd"};
  folder.put("model.safetensors", test::safetensors(more));
  EXPECT_EQ(folder.open().tensors.size(), folder.checkpoint().tensors().size());
  // Twice.
  more.back() = {"model.layers.0.mlp.up_proj.weight", "F32", {32, 32}, std::string(32 * 32 * 4, '\0')};
  folder.put("model.safetensors", test::safetensors(more));
  EXPECT_ERROR(folder.open(),
               "tensor model.layers.0.mlp.up_proj.weight: the weight of model.layers.0.mlp.up_proj comes ");
  // Before it was compressed: scales beside plain weights.
  auto frozen = entries;
  for (test::Entry& entry : frozen)
    if (entry.name == "model.layers.0.mlp.up_proj.weight_packed")
      entry = {"model.layers.0.mlp.up_proj.weight", "F32", {32, 32}, std::string(32 * 32 * 4, '\0')};
  folder.put("model.safetensors", test::safetensors(frozen));
  EXPECT_ERROR(folder.open(), "saved before its weights were compressed is to be saved again");
}

TEST(ImportFolders, CutFilesAreErrors) {  // RECIPES 5
  const test::Folder folder("quantized/awq_gemm");
  const std::string whole = test::read_text(folder.file("model.safetensors"));
  for (const size_t size : {whole.size() / 2, whole.size() - 1, size_t{100}}) {
    folder.put("model.safetensors", std::string_view(whole).substr(0, size));
    EXPECT_ERROR(folder.open(), "model.safetensors: ");
  }
}

TEST(ImportFolders, AQuantizedHeadIsTheHead) {  // RECIPES 7
  const test::Folder folder("quantized/gptq_4");
  auto entries = test::entries_of(folder.file("model.safetensors"));
  // q_proj has as many outputs as the vocabulary has tokens.
  std::erase_if(entries, [](const test::Entry& entry) { return entry.name == "lm_head.weight"; });
  const auto layer = entries;
  for (const test::Entry& entry : layer) {
    if (!entry.name.starts_with("model.layers.0.self_attn.q_proj.")) continue;
    test::Entry head = entry;
    head.name = "lm_head" + entry.name.substr(entry.name.rfind('.'));
    entries.push_back(head);
  }
  folder.put("model.safetensors", test::safetensors(entries));
  for (const char* tied : {R"({"tie_word_embeddings":true})", R"({"tie_word_embeddings":false})"}) {
    folder.patch("config.json", tied);
    const Checkpoint read = folder.checkpoint();
    EXPECT_EQ(read.require("output.weight").layout->id, layout::Id::gq4);
    EXPECT_EQ(values(read.require("output.weight")), values(read.require("blk.0.attn_q.weight")));
  }
}

TEST(ImportFolders, WarningsReachTheCheckpoint) {
  EXPECT_EQ(Checkpoint::open(test::fixture("quantized/int_8")).warnings().size(), 1u);
  EXPECT_EQ(Checkpoint::open(test::fixture("quantized/bitmask_bf16")).warnings().size(), 1u);
  EXPECT_TRUE(Checkpoint::open(test::fixture("quantized/packed_4")).warnings().empty());
}

}  // namespace
}  // namespace lacuna::io
