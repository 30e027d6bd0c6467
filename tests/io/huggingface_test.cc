#include "io/huggingface.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "hf_folder.h"
#include "io/checkpoint.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

using test::entries_of;
using test::Entry;
using test::safetensors;

class Folder : public test::Folder {
 public:
  explicit Folder(const std::string& fixture) : test::Folder("hf/" + fixture) {}
};

TEST(HuggingFace, ShardsFollowTheIndex) {
  const Folder folder("llama_sharded");
  const HfFolder opened = folder.open();
  EXPECT_EQ(opened.files.size(), 2u);
  EXPECT_EQ(opened.tensors.size(), 21u);
  const json index = json::parse(test::read_text(folder.file("model.safetensors.index.json")));
  for (const HfTensor& tensor : opened.tensors)
    EXPECT_EQ(fs::path(tensor.file).filename().string(), index["weight_map"][tensor.entry.name]);
  // A file that the index does not name is not read, and neither is a tensor that it does not name.
  folder.put("model.safetensors", "garbage");
  EXPECT_EQ(folder.open().tensors.size(), 21u);
  auto entries = entries_of(folder.file("model-00002-of-00002.safetensors"));
  entries.push_back({"some.other.tensor", "F32", {1}, "abcd"});
  folder.put("model-00002-of-00002.safetensors", safetensors(entries));
  EXPECT_EQ(folder.open().tensors.size(), 21u);
}

// RECIPES 4.
TEST(HuggingFace, MissingShardsAndEntries) {
  const Folder folder("llama_sharded");
  const auto entries = entries_of(folder.file("model-00002-of-00002.safetensors"));
  const std::string lost = entries.back().name;
  folder.put("model-00002-of-00002.safetensors", safetensors({entries.begin(), entries.end() - 1}));
  EXPECT_ERROR(folder.open(),
               fmt::format("model-00002-of-00002.safetensors: tensor {} is missing; the index says", lost));
  fs::remove(folder.file("model-00002-of-00002.safetensors"));
  EXPECT_ERROR(folder.open(), "model-00002-of-00002.safetensors: this shard is missing; the index names it for tensor");
  folder.put("model.safetensors.index.json", R"({"weight_map":{}})");
  EXPECT_ERROR(folder.open(), "weight_map is empty");
  for (const char* name : {"../model.safetensors", "/etc/passwd", "..", "", "a/b"}) {
    folder.put("model.safetensors.index.json", json{{"weight_map", {{"w", name}}}}.dump());
    EXPECT_ERROR(folder.open(), "which is no file of this folder");
  }
  folder.put("model.safetensors.index.json", R"({"weight_map":{"w":1}})");
  EXPECT_ERROR(folder.open(), "must name a file");
  folder.put("model.safetensors.index.json", R"({})");
  EXPECT_ERROR(folder.open(), "\"weight_map\" is missing");
  fs::remove(folder.file("model.safetensors.index.json"));
  EXPECT_ERROR(folder.open(), "neither model.safetensors nor model.safetensors.index.json");
}

// RECIPES 5.
TEST(HuggingFace, CutShard) {
  const Folder folder("llama_tied");
  const std::string whole = test::read_text(folder.file("model.safetensors"));
  uint64_t header = 0;
  std::memcpy(&header, whole.data(), 8);
  for (const size_t size : {whole.size() / 2, size_t(8 + header + 1), whole.size() - 1, size_t{8}, size_t{0}}) {
    folder.put("model.safetensors", std::string_view(whole).substr(0, size));
    EXPECT_ERROR(folder.open(), "model.safetensors: ");
  }
}

// RECIPES 7: no head in the file; present and equal; present and different.
TEST(HuggingFace, TiedHeads) {
  const Folder folder("llama_tied");
  const std::string path = folder.file("model.safetensors");
  const auto has_head = [&] { return folder.checkpoint().find("output.weight") != nullptr; };
  EXPECT_FALSE(has_head());
  const int64_t tensors = int64_t(folder.checkpoint().tensors().size());

  auto entries = entries_of(path);
  Entry head;
  for (const Entry& e : entries)
    if (e.name == "model.embed_tokens.weight") head = e;
  head.name = "lm_head.weight";
  entries.push_back(head);
  folder.put("model.safetensors", safetensors(entries));
  EXPECT_FALSE(has_head());  // equal and tied: one copy
  EXPECT_EQ(int64_t(folder.checkpoint().tensors().size()), tensors);

  entries.back().bytes[5] ^= 1;
  folder.put("model.safetensors", safetensors(entries));
  EXPECT_TRUE(has_head());  // different: the file's own head counts

  entries.back() = head;
  folder.put("model.safetensors", safetensors(entries));
  folder.patch("config.json", R"({"tie_word_embeddings":false})");
  EXPECT_TRUE(has_head());  // not tied: kept, equal or not

  entries.pop_back();
  folder.put("model.safetensors", safetensors(entries));
  EXPECT_ERROR(folder.open(), "lm_head.weight is missing, and config.json does not say tie_word_embeddings");
}

TEST(HuggingFace, TensorsThatNobodyKnows) {
  const Folder folder("llama_tied");
  auto entries = entries_of(folder.file("model.safetensors"));
  entries.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", "F32", {1}, "abcd"});
  folder.put("model.safetensors", safetensors(entries));
  EXPECT_EQ(folder.open().tensors.size(), entries.size() - 1);
  entries.push_back({"model.layers.0.surprise.weight", "F32", {1}, "abcd"});
  folder.put("model.safetensors", safetensors(entries));
  EXPECT_ERROR(folder.open(), "unknown tensor model.layers.0.surprise.weight");
}

TEST(HuggingFace, WeightsOfOtherDtypesAndShapes) {
  const Folder folder("llama_tied");
  const auto good = entries_of(folder.file("model.safetensors"));
  const auto with_norm = [&](Entry norm) {
    auto entries = good;
    for (Entry& e : entries)
      if (e.name == "model.norm.weight") e = norm;
    folder.put("model.safetensors", safetensors(entries));
    return folder.checkpoint();
  };
  EXPECT_NO_THROW(with_norm({"model.norm.weight", "BF16", {16}, std::string(32, 'x')}));
  EXPECT_ERROR(with_norm({"model.norm.weight", "F64", {16}, std::string(128, 'x')}),
               "dtype F64 is not supported for weights; known are F32, F16, BF16");
  EXPECT_ERROR(with_norm({"model.norm.weight", "I8", {16}, std::string(16, 'x')}), "dtype I8 is not supported");
  EXPECT_ERROR(with_norm({"model.norm.weight", "F32", {}, std::string(4, 'x')}),
               "a vector or a matrix is expected, found shape []");
  EXPECT_ERROR(with_norm({"model.norm.weight", "F32", {0, 4}, ""}), "found shape [0, 4]");
  EXPECT_ERROR(with_norm({"model.norm.weight", "F32", {2, 2, 4}, std::string(64, 'x')}), "found shape [2, 2, 4]");
}

// A header of odd length puts f32 values at odd addresses; kernels get an aligned copy.
TEST(HuggingFace, OddAddresses) {
  const Folder folder("llama_tied");
  const std::string whole = test::read_text(folder.file("model.safetensors"));
  uint64_t header = 0;
  std::memcpy(&header, whole.data(), 8);
  for (int spaces = 0; spaces < 4; ++spaces) {
    folder.put("model.safetensors", test::Bytes()
                                        .number(header + uint64_t(spaces))
                                        .raw(std::string_view(whole).substr(8, header))
                                        .raw(std::string(size_t(spaces), ' '))
                                        .raw(std::string_view(whole).substr(8 + header))
                                        .text());
    const Checkpoint odd = folder.checkpoint();
    const Checkpoint even = Checkpoint::open(test::fixture("hf/llama_tied"));
    for (const Tensor& tensor : odd.tensors()) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.bytes.data()) % 4, 0u) << tensor.name;
      EXPECT_TRUE(std::ranges::equal(tensor.bytes, even.require(tensor.name).bytes)) << tensor.name;
    }
  }
}

}  // namespace
}  // namespace lacuna::io
