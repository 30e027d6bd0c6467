#include "io/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>

#include "core/error.h"
#include "gguf_bytes.h"
#include "io/gguf_writer.h"
#include "io/manifest.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

namespace fs = std::filesystem;

/// Writes a checkpoint as one GGUF file.
void write_gguf(const Checkpoint& checkpoint, const std::string& path) {
  std::vector<TensorPlan> plan;
  for (const Tensor& tensor : checkpoint.tensors())
    plan.push_back({tensor.name, tensor.layout, tensor.dims, tensor.params});
  GgufWriter writer(path, checkpoint.metadata(), plan);
  for (const Tensor& tensor : checkpoint.tensors()) writer.write(tensor.bytes);
  writer.finish();
}

void expect_same_tensors(const Checkpoint& a, const Checkpoint& b) {
  ASSERT_EQ(a.tensors().size(), b.tensors().size());
  for (size_t i = 0; i < a.tensors().size(); ++i) {
    const Tensor &x = a.tensors()[i], &y = b.tensors()[i];
    EXPECT_EQ(x.name, y.name);
    EXPECT_EQ(x.layout, y.layout);
    EXPECT_EQ(x.shape, y.shape);
    EXPECT_EQ(x.dims, y.dims);
    EXPECT_TRUE(std::ranges::equal(x.bytes, y.bytes)) << x.name;
  }
}

// The same weights from the Hugging Face folder and from the GGUF file that the gguf package made of it.
TEST(Checkpoint, BothKindsOfOneModelHoldTheSameWeights) {
  for (const char* name : {"llama_mha", "llama_tied", "llama_head_dim", "llama_odd_heads", "llama_bias", "mistral",
                           "qwen2", "qwen2_untied", "qwen3", "qwen3_untied", "llama_gqa_rope_llama3"}) {
    SCOPED_TRACE(name);
    const Checkpoint hf = Checkpoint::open(test::fixture(std::string("hf/") + name));
    const Checkpoint gguf = Checkpoint::open(test::fixture(std::string("gguf_models/") + name + ".gguf"));
    EXPECT_EQ(hf.source(), Source::huggingface);
    EXPECT_EQ(gguf.source(), Source::gguf);
    EXPECT_EQ(hf.architecture(), gguf.architecture());
    EXPECT_EQ(hf.rope_pairs(), RopePairs::halves);
    const bool llama = gguf.architecture() == "llama";
    EXPECT_EQ(gguf.rope_pairs(), llama ? RopePairs::adjacent : RopePairs::halves);
    std::set<std::string> extra;
    for (const Tensor& tensor : gguf.tensors()) extra.insert(tensor.name);
    const int64_t heads = hf.metadata().need_integer(hf.architecture() + ".attention.head_count");
    for (const Tensor& tensor : hf.tensors()) {
      extra.erase(tensor.name);
      const Tensor& other = gguf.require(tensor.name);
      EXPECT_EQ(tensor.shape, other.shape) << tensor.name;
      const bool q = tensor.name.find("attn_q.") != std::string::npos,
                 k = tensor.name.find("attn_k.") != std::string::npos;
      if (!llama || (!q && !k)) {
        EXPECT_TRUE(std::ranges::equal(tensor.bytes, other.bytes)) << tensor.name;
        continue;
      }
      // Rows (of a bias: elements) of q and k are permuted.
      const bool bias = tensor.name.ends_with(".bias");
      const int64_t rows = bias ? tensor.shape.K : tensor.shape.N;
      const size_t row_bytes = tensor.bytes.size() / size_t(rows);
      const int64_t head_dim = hf.require("blk.0.attn_q.weight").shape.N / heads;
      const auto order = rope_adjacent_rows(rows / head_dim, head_dim);
      ASSERT_EQ(int64_t(order.size()), rows);
      for (int64_t row = 0; row < rows; ++row)
        EXPECT_TRUE(std::ranges::equal(other.bytes.subspan(size_t(row) * row_bytes, row_bytes),
                                       tensor.bytes.subspan(size_t(order[size_t(row)]) * row_bytes, row_bytes)))
            << tensor.name << " row " << row;
    }
    extra.erase("rope_freqs.weight");
    EXPECT_TRUE(extra.empty()) << *extra.begin();
  }
}

TEST(Checkpoint, EveryFixtureFolderRoundTripsThroughGguf) {
  test::TempDir folder;
  for (const auto& entry : fs::directory_iterator(test::fixture("hf"))) {
    SCOPED_TRACE(entry.path().filename().string());
    const Checkpoint hf = Checkpoint::open(entry.path().string());
    const std::string path = folder.file("x.gguf");
    write_gguf(hf, path);
    const Checkpoint gguf = Checkpoint::open(path);
    expect_same_tensors(hf, gguf);
    EXPECT_EQ(gguf.metadata().entries(), hf.metadata().entries());
    EXPECT_EQ(gguf.file_bytes(), int64_t(fs::file_size(path)));
  }
}

TEST(Checkpoint, FindRequireAndShapes) {
  const Checkpoint c = Checkpoint::open(test::fixture("hf/llama_tied"));
  EXPECT_EQ(c.path(), test::fixture("hf/llama_tied"));
  ASSERT_NE(c.find("output_norm.weight"), nullptr);
  EXPECT_EQ(c.find("output_norm.weight")->shape, (layout::Shape{1, 16}));
  EXPECT_EQ(c.require("token_embd.weight").shape, (layout::Shape{48, 16}));
  EXPECT_EQ(c.find("nothing"), nullptr);
  EXPECT_ERROR(c.require("nothing"), "llama_tied: tensor nothing is missing");
  EXPECT_EQ(c.metadata().string("general.name"), "llama_tied");
  EXPECT_EQ(Checkpoint::open(test::fixture("hf/llama_tied/")).metadata().string("general.name"), "llama_tied");
  EXPECT_EQ(Checkpoint::open(test::fixture("hf/opt")).architecture(), "opt");
  EXPECT_EQ(c.vocabulary().model, Vocabulary::Model::none);
}

TEST(Checkpoint, MoreThanTwoDimensionsFoldIntoRows) {
  test::TempDir folder;
  const std::string path = folder.file("x.gguf");
  {
    GgufWriter writer(path, Metadata(), {{"cube", &layout::get(layout::Id::f32), {2, 3, 4}}});
    writer.write(std::vector<std::byte>(96));
    writer.finish();
  }
  const Checkpoint c = Checkpoint::open(path);
  EXPECT_EQ(c.require("cube").shape, (layout::Shape{6, 4}));
  EXPECT_EQ(c.require("cube").dims, (std::vector<int64_t>{2, 3, 4}));
}

TEST(Checkpoint, TokenizerAndModelInOne) {
  const Checkpoint hf = Checkpoint::open(test::fixture("text_model"));
  const Checkpoint gguf = Checkpoint::open(test::fixture("text_model.gguf"));
  for (const Checkpoint* c : {&hf, &gguf}) {
    EXPECT_EQ(c->vocabulary().model, Vocabulary::Model::byte_bpe);
    EXPECT_EQ(c->vocabulary().pre, "llama-bpe");
    EXPECT_EQ(c->vocabulary().bos_id, 392);
    EXPECT_EQ(c->vocabulary().eos_id, 396);
    EXPECT_EQ(c->vocabulary().add_bos, true);
    EXPECT_FALSE(c->vocabulary().chat_template.empty());
  }
  EXPECT_EQ(hf.vocabulary().tokens, gguf.vocabulary().tokens);
  EXPECT_EQ(hf.vocabulary().types, gguf.vocabulary().types);
  EXPECT_EQ(hf.vocabulary().merges, gguf.vocabulary().merges);
  EXPECT_EQ(hf.vocabulary().chat_template, gguf.vocabulary().chat_template);
}

TEST(Checkpoint, Docs22m) {
  LACUNA_NEED_SHARED("models/docs22m/config.json");
  const Checkpoint c = Checkpoint::open((test::shared_data() / "models/docs22m").string());
  EXPECT_EQ(c.architecture(), "llama");
  int64_t parameters = 0;
  for (const Tensor& tensor : c.tensors()) {
    EXPECT_EQ(tensor.layout->name, "bf16") << tensor.name;
    parameters += tensor.shape.N * tensor.shape.K;
  }
  EXPECT_EQ(parameters, 21'895'680);
  EXPECT_EQ(c.find("output.weight"), nullptr);
  EXPECT_EQ(c.vocabulary().tokens.size(), 8192u);
  EXPECT_EQ(c.file_bytes(), 14814416 + 14293368 + 14689736);
}

TEST(Checkpoint, PlacesThatAreNoModel) {
  test::TempDir folder;
  EXPECT_ERROR(Checkpoint::open(folder.file("absent.gguf")), "absent.gguf: cannot open: No such file or directory");
  EXPECT_ERROR(Checkpoint::open(folder.path().string()), "a folder without config.json");
  test::write_bytes(folder.file("empty.gguf"), "");
  EXPECT_ERROR(Checkpoint::open(folder.file("empty.gguf")), "empty.gguf: ");
  test::write_bytes(folder.file("text.gguf"), "hello, this is text");
  EXPECT_ERROR(Checkpoint::open(folder.file("text.gguf")), "not a GGUF file");
  EXPECT_ERROR(Checkpoint::open("/dev/null"), "not a regular file");
  test::write_bytes(folder.file("config.json"), "{}");
  EXPECT_ERROR(Checkpoint::open(folder.path().string()), "config.json: \"model_type\" is missing");
}

TEST(Checkpoint, PlainIntegersAreNoWeights) {
  EXPECT_ERROR(Checkpoint::open(test::fixture("gguf/everything.gguf")), "tensor vector.i8: type I8 is no weight");
}

TEST(Checkpoint, ManifestsMustMatchTheFile) {
  test::TempDir folder;
  const std::string path = folder.file("x.gguf");
  const auto write = [&](std::string_view tensor, uint32_t type, std::string_view described) {
    const std::string manifest = fmt::format(
        R"({{"version":1,"tensors":{{"{}":{{"layout":"gs5","N":4,"K":8,"nnz":32,"params":{{}},"sha256":"{}"}}}}}})",
        described, std::string(64, '0'));
    test::write_bytes(path, test::Bytes()
                                .gguf(1, 1)
                                .string(kManifestKey)
                                .number(8u)
                                .string(manifest)
                                .tensor(tensor, {32}, type, 0)
                                .pad(32)
                                .raw(std::string(128, 'x'))
                                .text());
    return Checkpoint::open(path);
  };
  EXPECT_ERROR(write("w", 24, "w"), "tensor w: unknown packed layout \"gs5\"; known are");
  EXPECT_ERROR(write("w", 0, "w"), "describes it, but its type is F32, not I8");
  EXPECT_ERROR(write("w", 0, "v"), "describes tensor v, which the file lacks");
  EXPECT_ERROR(write("w", 24, "v"), "tensor w: type I8 is no weight");
}

TEST(Checkpoint, MovesKeepTheirViews) {
  Checkpoint a = Checkpoint::open(test::fixture("gguf_models/qwen3.gguf"));
  const std::byte* bytes = a.require("token_embd.weight").bytes.data();
  Checkpoint b = std::move(a);
  EXPECT_EQ(b.require("token_embd.weight").bytes.data(), bytes);
  b = Checkpoint::open(test::fixture("gguf_models/qwen2.gguf"));
  EXPECT_EQ(b.architecture(), "qwen2");
}

TEST(RopeAdjacentRows, InterleavesTheHalvesOfEachHead) {
  EXPECT_EQ(rope_adjacent_rows(2, 4), (std::vector<int64_t>{0, 2, 1, 3, 4, 6, 5, 7}));
  EXPECT_EQ(rope_adjacent_rows(1, 6), (std::vector<int64_t>{0, 3, 1, 4, 2, 5}));
}

TEST(Checkpoint, DropsLayersAndNumbersTheRestAnew) {
  const test::TempDir folder;
  const Checkpoint plain = Checkpoint::open(test::fixture("hf/llama_mha"));
  const int64_t layers = plain.metadata().need_integer("llama.block_count");
  ASSERT_GE(layers, 2);
  {  // Per-layer lists and thresholds as a GGUF file can hold them.
    Metadata metadata = plain.metadata();
    metadata.set("llama.attention.head_count_kv",
                 std::vector<uint32_t>(size_t(layers), uint32_t(metadata.need_integer("llama.attention.head_count"))));
    metadata.set(std::string(kThresholdPrefix) + "version", uint32_t{1});
    std::vector<TensorPlan> plan;
    for (const Tensor& tensor : plain.tensors()) plan.push_back({tensor.name, tensor.layout, tensor.dims, {}});
    GgufWriter writer(folder.file("a.gguf"), metadata, plan);
    for (const Tensor& tensor : plain.tensors()) writer.write(tensor.bytes);
    writer.finish();
  }
  const Checkpoint before = Checkpoint::open(folder.file("a.gguf"));
  Checkpoint after = Checkpoint::open(folder.file("a.gguf"));
  const std::vector<int64_t> first = {0};
  after.drop_layers(first);
  EXPECT_EQ(after.metadata().need_integer("llama.block_count"), layers - 1);
  EXPECT_EQ(after.metadata().integers("llama.attention.head_count_kv")->size(), size_t(layers - 1));
  EXPECT_FALSE(after.metadata().contains(std::string(kThresholdPrefix) + "version"));
  EXPECT_EQ(after.find("blk." + std::to_string(layers - 1) + ".attn_q.weight"), nullptr);
  size_t of_layers = 0;
  for (const Tensor& tensor : after.tensors()) {
    std::string name = tensor.name;
    if (name.starts_with("blk.")) {
      ++of_layers;
      name = "blk." + std::to_string(std::stoi(name.substr(4)) + 1) + name.substr(name.find('.', 4));
    }
    EXPECT_TRUE(std::ranges::equal(tensor.bytes, before.require(name).bytes)) << name;
    EXPECT_EQ(after.find(tensor.name), &tensor);
  }
  EXPECT_EQ(of_layers * size_t(layers),
            (of_layers + before.tensors().size() - after.tensors().size()) * size_t(layers - 1));
  EXPECT_THROW(after.drop_layers(std::vector<int64_t>{layers - 1}), Error);  // has no such layer any more
  std::vector<int64_t> all(size_t(layers - 1));
  std::iota(all.begin(), all.end(), 0);
  EXPECT_THROW(after.drop_layers(all), Error);
}

}  // namespace
}  // namespace lacuna::io
