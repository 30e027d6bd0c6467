// Whole walks over tiny checkpoints.
#include "compress/walk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <filesystem>

#include "cli/models.h"
#include "compress/device.h"
#include "core/error.h"
#include "core/rng.h"
#include "io/atomic_file.h"
#include "layout/layout.h"
#include "model/decoder.h"
#include "test_support.h"

namespace lacuna::compress {
namespace {

using testing::HasSubstr;

constexpr int64_t kWindow = 16, kWindows = 6;

std::vector<int32_t> random_ids(int64_t n_vocab, uint64_t seed = 1) {
  Rng rng(seed);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < kWindow * kWindows; ++i) ids.push_back(int32_t(rng.below(uint64_t(n_vocab))));
  return ids;
}

WalkOptions options_for(const std::string& work, const std::string& method, int bits, double sparsity) {
  WalkOptions options;
  options.method = method;
  options.grid = {bits, 16};
  if (sparsity > 0) options.pattern = {solver::Pattern::Kind::row, sparsity};
  options.work_folder = work;
  options.progress = false;
  return options;
}

WalkReport compress_to(const io::Checkpoint& checkpoint, const WalkOptions& options, const std::string& file) {
  const auto config = model::read_config(checkpoint);
  const Samples samples = choose_samples(kWindow * kWindows, {.samples = kWindows, .seq_len = kWindow}, "ids");
  const WalkReport report = walk(checkpoint, random_ids(config.n_vocab), samples, options);
  write_model(checkpoint, options.work_folder, config.n_layers, file);
  return report;
}

std::vector<float> last_logits(const std::string& path, std::span<const int32_t> ids) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(path);
  ThreadPool pool(1);
  const auto decoder = model::Decoder::load(checkpoint, pool, {kernels::Prepare::automatic, false});
  model::Session session(*decoder, int64_t(ids.size()), kernels::KvType::f32);
  const auto logits = decoder->forward(session, ids);
  return {logits.begin(), logits.end()};
}

std::vector<float> weights_of(const io::Tensor& tensor) {
  std::vector<float> out(size_t(tensor.shape.N * tensor.shape.K));
  layout::decode_rows(*tensor.layout, tensor.shape, tensor.bytes, 0, tensor.shape.N, out.data(), tensor.params);
  return out;
}

const std::vector<std::string> kModels = {
    "hf/llama_mha", "hf/llama_bias", "hf/llama_gqa_rope_llama3",   "hf/llama_odd_heads",    "hf/opt", "hf/qwen2",
    "hf/qwen3",     "hf/llama_tied", "hf/opt_post_norm_projected", "gguf_models/qwen2.gguf"};

TEST(Walk, EightBitsKeepTheLogitsOfEveryFamily) {
  for (const std::string& name : kModels) {
    SCOPED_TRACE(name);
    const test::TempDir folder;
    const std::string source = test::fixture(name), file = folder.file("out.gguf");
    const io::Checkpoint checkpoint = io::Checkpoint::open(source);
    const WalkReport report = compress_to(checkpoint, options_for(folder.file("work"), "rtn", 8, 0), file);
    const auto config = model::read_config(checkpoint);
    EXPECT_EQ(int64_t(report.matrices.size()), config.n_layers * (config.mlp == model::Mlp::swiglu ? 7 : 6));
    const auto ids = random_ids(config.n_vocab, 7);
    const auto prompt = std::span(ids).first(12);
    const auto dense = last_logits(source, prompt), stored = last_logits(file, prompt);
    ASSERT_EQ(dense.size(), stored.size());
    double difference = 0, size = 0;
    for (size_t i = 0; i < dense.size(); ++i) {
      difference += std::pow(dense[i] - stored[i], 2);
      size += std::pow(dense[i], 2);
    }
    EXPECT_LT(difference, 0.03 * 0.03 * size);  // a weight is within 0.2% of its group; such nets magnify that 15 times
    EXPECT_GT(difference, 0);
  }
}

TEST(Walk, DroppedWeightsAreZeroInTheFile) {
  for (const char* method : {"magnitude", "wanda", "sparsegpt", "awp", "awp+"}) {
    SCOPED_TRACE(method);
    for (const int bits : {0, 4}) {
      if (bits > 0 && (method == std::string("magnitude") || method == std::string("wanda"))) continue;
      const test::TempDir folder;
      const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
      const std::string file = folder.file("out.gguf");
      const WalkReport report = compress_to(checkpoint, options_for(folder.file("work"), method, bits, 0.5), file);
      const io::Checkpoint out = io::Checkpoint::open(file);
      for (const MatrixReport& matrix : report.matrices) {
        const auto w = weights_of(out.require(matrix.name));
        int64_t dropped = 0;
        for (int64_t n = 0; n < matrix.N; ++n) {
          int64_t zeros = 0;
          for (int64_t k = 0; k < matrix.K; ++k) {
            const float value = w[size_t(n * matrix.K + k)];
            zeros += value == 0;
            EXPECT_FALSE(value == 0 && std::signbit(value));
          }
          EXPECT_GE(zeros, matrix.K / 2) << matrix.name;
          dropped += zeros;
        }
        EXPECT_GE(double(dropped) / double(matrix.N * matrix.K), matrix.sparsity);
        EXPECT_LE(matrix.loss, 1);
      }
    }
  }
}

TEST(Walk, AFolderAndItsGgufGiveTheSameMatrices) {
  const test::TempDir folder;
  const auto options = options_for(folder.file("work"), "gptq", 4, 0);
  const io::Checkpoint hf = io::Checkpoint::open(test::fixture("hf/llama_gqa_rope_llama3"));
  const io::Checkpoint gguf = io::Checkpoint::open(test::fixture("gguf_models/llama_gqa_rope_llama3.gguf"));
  compress_to(hf, options, folder.file("hf.gguf"));
  auto other = options;
  other.work_folder = folder.file("work2");
  compress_to(gguf, other, folder.file("gguf.gguf"));
  const io::Checkpoint a = io::Checkpoint::open(folder.file("hf.gguf")),
                       b = io::Checkpoint::open(folder.file("gguf.gguf"));
  int64_t compared = 0;
  for (const io::Tensor& tensor : a.tensors()) {
    if (tensor.name.find("attn_q.weight") == std::string::npos) continue;
    EXPECT_EQ(weights_of(tensor), weights_of(b.require(tensor.name))) << tensor.name;
    ++compared;
  }
  EXPECT_GT(compared, 0);
}

TEST(Walk, GoesOnWhereItStoppedWithTheSameBytes) {
  for (const Inputs inputs : {Inputs::compressed, Inputs::dense}) {
    const test::TempDir folder;
    const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
    auto options = options_for(folder.file("work"), "gptq", 3, 0);
    options.inputs = inputs;
    const WalkReport whole = compress_to(checkpoint, options, folder.file("whole.gguf"));
    EXPECT_EQ(whole.resumed_layers, 0);
    const int64_t layers = model::read_config(checkpoint).n_layers;
    ASSERT_GE(layers, 2);
    for (int64_t from = 0; from < layers; ++from) {
      for (int64_t layer = from; layer < layers; ++layer)
        std::filesystem::remove(layer_path(options.work_folder, layer));
      options.hidden_on_disk = !options.hidden_on_disk;  // must not matter
      const WalkReport again = compress_to(checkpoint, options, folder.file("again.gguf"));
      EXPECT_EQ(again.resumed_layers, from);
      EXPECT_EQ(again.matrices.size(), whole.matrices.size());
      EXPECT_EQ(test::read_text(folder.file("again.gguf")), test::read_text(folder.file("whole.gguf"))) << from;
    }
  }
}

TEST(Walk, InputsDecideWhatLaterLayersSee) {
  const test::TempDir folder;
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  auto options = options_for(folder.file("a"), "gptq", 2, 0);
  const WalkReport compressed = compress_to(checkpoint, options, folder.file("a.gguf"));
  options.inputs = Inputs::dense;
  options.work_folder = folder.file("b");
  const WalkReport dense = compress_to(checkpoint, options, folder.file("b.gguf"));
  EXPECT_EQ(compressed.matrices[0].loss, dense.matrices[0].loss);  // the first layer's inputs are the same
  EXPECT_NE(compressed.matrices.back().loss, dense.matrices.back().loss);
}

/// A llama with random weights whose matrices have 64 and 128 inputs.
void write_wide_model(const std::string& path) {
  model::ModelShape shape = test::kTinyShape;
  shape.n_embd = 64;
  shape.head_dim = 16;
  shape.n_ff = 128;
  test::write_model(shape, path, layout::Id::f32, layout::Id::f32);
}

TEST(Walk, TwoOfFourWithFourBitsGoIntoTheirLayout) {
  const test::TempDir folder;
  write_wide_model(folder.file("model.gguf"));
  const io::Checkpoint checkpoint = io::Checkpoint::open(folder.file("model.gguf"));
  for (const char* method : {"sparsegpt", "awp", "awp+", "awq+wanda", "wanda+awq"}) {
    SCOPED_TRACE(method);
    WalkOptions options = options_for(folder.file(method), method, 4, 0);
    options.grid = {4, 64, true};
    options.pattern = {solver::Pattern::Kind::n_m, 0.5, 2, 4};
    options.layout = "nm24_q4";
    const std::string file = folder.file("out.gguf");
    const WalkReport report = compress_to(checkpoint, options, file);
    const io::Checkpoint out = io::Checkpoint::open(file);
    for (const MatrixReport& matrix : report.matrices) {
      const io::Tensor& tensor = out.require(matrix.name);
      EXPECT_EQ(tensor.layout->id, layout::Id::nm24_q4);
      EXPECT_EQ(matrix.bits, 3.25);
      const bool solves =
          method == std::string("sparsegpt") || method == std::string("awp") || method == std::string("awp+");
      // The two AWQ pairs drop by Wanda's score and make up for nothing: on random weights they are about as good as
      // magnitude and rounding, which is loss_before.
      EXPECT_LT(matrix.loss, (solves ? 1.0 : 1.25) * matrix.loss_before) << matrix.name;
      const auto w = weights_of(tensor);
      for (size_t k = 0; k < w.size(); k += 4)
        EXPECT_LE(4 - std::count(&w[k], &w[k] + 4, 0.0f), 2) << matrix.name << ", " << k;
    }
    const std::vector<int32_t> prompt = {1, 2, 3};
    for (const float logit : last_logits(file, prompt)) ASSERT_TRUE(std::isfinite(logit));
  }
}

TEST(Walk, RefusesALayoutThatAMatrixDoesNotFitBeforeAnyWork) {
  const test::TempDir folder;
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  WalkOptions options = options_for(folder.file("work"), "awp", 4, 0);
  options.grid = {4, 64, true};
  options.pattern = {solver::Pattern::Kind::n_m, 0.5, 2, 4};
  options.layout = "nm24_q4";
  try {
    compress_to(checkpoint, options, folder.file("out.gguf"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("blk.0.attn_q.weight: has 32 inputs, nm24_q4 stores blocks of 64"));
  }
  EXPECT_FALSE(std::filesystem::exists(options.work_folder));
}

TEST(Walk, WeightsOfTokensReachTheSolver) {
  const test::TempDir folder;
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  auto options = options_for(folder.file("a"), "gptq", 2, 0);
  compress_to(checkpoint, options, folder.file("a.gguf"));
  options.tokens.first = 100;
  options.work_folder = folder.file("b");
  const WalkReport weighted = compress_to(checkpoint, options, folder.file("b.gguf"));
  EXPECT_NE(test::read_text(folder.file("a.gguf")), test::read_text(folder.file("b.gguf")));
  const WalkReport again = compress_to(checkpoint, options, folder.file("b.gguf"));
  EXPECT_EQ(again.resumed_layers, model::read_config(checkpoint).n_layers);
  for (size_t i = 0; i < again.matrices.size(); ++i)
    EXPECT_EQ(again.matrices[i].outlier_share, weighted.matrices[i].outlier_share);
}

TEST(Walk, OnCudaAsGoodAsOnTheCpuAndTheSameFileAgain) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no CUDA device, or a LibTorch without CUDA";
  for (const std::string& name : kModels) {
    for (const char* method : {"awp", "awp+"}) {
      SCOPED_TRACE(name + ", " + method);
      const test::TempDir folder;
      const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture(name));
      auto options = options_for(folder.file("cpu"), method, 4, 0.5);
      const WalkReport host = compress_to(checkpoint, options, folder.file("cpu.gguf"));
      options.device = cuda_device(0);
      options.work_folder = folder.file("a");
      const WalkReport device = compress_to(checkpoint, options, folder.file("a.gguf"));
      options.work_folder = folder.file("b");
      compress_to(checkpoint, options, folder.file("b.gguf"));
      EXPECT_EQ(test::read_text(folder.file("a.gguf")), test::read_text(folder.file("b.gguf")));
      ASSERT_EQ(host.matrices.size(), device.matrices.size());
      double lost_there = 0, lost_here = 0;
      for (size_t i = 0; i < host.matrices.size(); ++i) {
        EXPECT_EQ(host.matrices[i].name, device.matrices[i].name);
        EXPECT_EQ(host.matrices[i].bytes, device.matrices[i].bytes);
        lost_here += host.matrices[i].loss;
        lost_there += device.matrices[i].loss;
      }
      EXPECT_NEAR(lost_there, lost_here, 0.05 * lost_here);
    }
  }
}

TEST(DeviceMemory, CountsWhatIsInUseAtOnce) {
  constexpr int64_t kBytes = 64 << 20;
  const auto use = [](at::Device device) {
    const DeviceMemory memory(device);
    at::zeros({kBytes}, at::device(device).dtype(at::kByte));
    return memory.peak();
  };
  EXPECT_EQ(use(at::kCPU), 0);
  if (!at::globalContext().hasCUDA()) return;
  const at::Device device = cuda_device(0);
  const int64_t before = DeviceMemory(device).peak();
  constexpr bool kTells = TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR >= 209;
  EXPECT_EQ(use(device), kTells ? before + kBytes : 0);
  EXPECT_EQ(DeviceMemory(device).peak(), before);
}

TEST(Walk, WithoutCudaTheErrorSaysWhatIsMissing) {
  try {
    cuda_device(at::globalContext().hasCUDA() ? 100 : 0);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr(at::globalContext().hasCUDA() ? "--gpu 100: " : "--torch FOLDER"));
  }
}

TEST(Walk, RefusesAnotherRunsFolder) {
  const test::TempDir folder;
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  auto options = options_for(folder.file("work"), "rtn", 4, 0);
  compress_to(checkpoint, options, folder.file("out.gguf"));
  options.grid.bits = 3;
  try {
    compress_to(checkpoint, options, folder.file("out.gguf"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("belongs to a run with another bits (4, now 3)"));
  }
}

TEST(Walk, LeavesFilesAloneThatAreNotItsOwn) {
  const test::TempDir folder;
  const io::Checkpoint checkpoint = io::Checkpoint::open(test::fixture("hf/llama_mha"));
  auto options = options_for(folder.file("work"), "rtn", 4, 0);
  std::filesystem::create_directories(options.work_folder);
  io::write_file_atomically(options.work_folder + "/thesis.txt", "precious");
  EXPECT_THROW(compress_to(checkpoint, options, folder.file("out.gguf")), Error);
  std::filesystem::remove(options.work_folder + "/thesis.txt");
  compress_to(checkpoint, options, folder.file("out.gguf"));
  io::write_file_atomically(options.work_folder + "/thesis.txt", "precious");
  remove_work(options.work_folder);
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(options.work_folder))
    left.push_back(entry.path().filename().string());
  EXPECT_THAT(left, testing::ElementsAre("thesis.txt"));
  std::filesystem::remove(options.work_folder + "/thesis.txt");
  remove_work(options.work_folder);
  EXPECT_FALSE(std::filesystem::exists(options.work_folder));
}

TEST(Walk, RefusesTheLayersOfAModelThatChanged) {
  const test::TempDir folder;
  const std::string model = folder.file("model.gguf"), changed = folder.file("changed.gguf");
  test::write_tiny_model(model);
  test::rewrite(
      model, changed, [](io::Metadata&) {},
      [](const std::string& name, std::vector<std::byte>& bytes) {
        if (name == "blk.1.ffn_down.weight") bytes[1] ^= std::byte{1};
      });
  const auto options = options_for(folder.file("work"), "rtn", 4, 0);
  compress_to(io::Checkpoint::open(model), options, folder.file("out.gguf"));
  EXPECT_THROW(compress_to(io::Checkpoint::open(changed), options, folder.file("again.gguf")), Error);
}

TEST(Walk, NamesTheLayerWhoseInputsLeaveFloat32) {
  const test::TempDir folder;
  const std::string model = folder.file("model.gguf"), damaged = folder.file("damaged.gguf");
  test::write_tiny_model(model);
  test::rewrite(
      model, damaged, [](io::Metadata&) {},
      [](const std::string& name, std::vector<std::byte>& bytes) {
        if (name != "blk.1.attn_norm.weight") return;
        float* values = reinterpret_cast<float*>(bytes.data());
        for (size_t i = 0; i < bytes.size() / sizeof(float); ++i) values[i] = 3e37f;
      });
  try {
    compress_to(io::Checkpoint::open(damaged), options_for(folder.file("work"), "rtn", 4, 0), folder.file("out.gguf"));
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("layer 1"));
  }
  EXPECT_FALSE(std::filesystem::exists(folder.file("out.gguf")));
}

TEST(Walk, ChecksWhatGoesTogether) {
  const auto message = [](const WalkOptions& options) -> std::string {
    try {
      check(options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(options_for("", "awp", 4, 0.5)), "");
  EXPECT_THAT(message(options_for("", "awp", 0, 0)), HasSubstr("nothing to do"));
  EXPECT_THAT(message(options_for("", "wanda", 4, 0.5)), HasSubstr("does not round"));
  EXPECT_THAT(message(options_for("", "wanda", 0, 0)), HasSubstr("give --sparsity"));
  EXPECT_THAT(message(options_for("", "rtn", 4, 0.5)), HasSubstr("drops none"));
  EXPECT_THAT(message(options_for("", "awq+wanda", 4, 0)), HasSubstr("give --sparsity and --bits"));
  EXPECT_THAT(message(options_for("", "nothing", 4, 0)), HasSubstr("rtn"));
  auto wrong = options_for("", "awp", 4, 0.5);
  wrong.layout = "gq4";
  EXPECT_THAT(message(wrong), HasSubstr("is stored as bm4"));
  wrong.layout = "gq5";
  EXPECT_THAT(message(wrong), HasSubstr("known are auto"));
  wrong.layout = "nm24_q4";
  EXPECT_THAT(message(wrong), HasSubstr("it needs --bits 4 --pattern 2:4"));
  wrong.pattern = {solver::Pattern::Kind::n_m, 0.5, 2, 4};
  EXPECT_THAT(message(wrong), HasSubstr("leave --group-size out"));
  wrong.grid = {4, 64, true};
  EXPECT_EQ(message(wrong), "");
}

}  // namespace
}  // namespace lacuna::compress
