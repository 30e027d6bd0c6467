// `image compress` and `image policy`, as a user runs them.
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "core/rng.h"
#include "process.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

/// One .safetensors file with a matrix of each kind, F32.
void write_model(const std::string& path, int64_t width) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  Rng rng(3);
  for (const char* name : {"single_transformer_blocks.0.proj_out.weight",
                           "transformer_blocks.0.ff_context.net.2.weight", "x_embedder.weight"}) {
    const size_t begin = data.size();
    for (int64_t i = 0; i < width * width; ++i) {
      const auto value = float(rng.normal());
      data.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
    header[name] = {{"dtype", "F32"}, {"shape", {width, width}}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), sizeof(length));
  out << text << data;
}

TEST(ImageWeights, CompressReportsWhatIsStored) {
  const TempDir dir;
  const std::string model = dir.file("m.safetensors"), out = dir.file("m.lacuna");
  write_model(model, 64);
  const auto report = json_of({"image", "compress", model, "-o", out});
  EXPECT_EQ(report["path"], out);
  EXPECT_EQ(report["bytes"], std::filesystem::file_size(out));
  EXPECT_EQ(report["params"], 3 * 64 * 64);
  EXPECT_EQ(report["mask"], "magnitude");
  EXPECT_GT(report["peak_memory_bytes"], 0);
  ASSERT_EQ(report["layouts"].size(), 3u);
  EXPECT_EQ(report["layouts"][0]["layout"], "bf16");
  EXPECT_EQ(report["layouts"][1]["bytes"], 64 * (4 + 64));
  EXPECT_EQ(report["layouts"][2]["bytes"], 64 * (4 + 8 + 32));
  EXPECT_EQ(report["layouts"][2]["kept"], 64 * 32);
  const std::string text = output_of({"image", "compress", model, "-o", out, "--policy", "f8"});
  EXPECT_NE(text.find("policy f8, no masks"), std::string::npos) << text;
}

TEST(ImageWeights, InspectShowsTheLayouts) {
  const TempDir dir;
  write_model(dir.file("m.safetensors"), 20);
  output_of({"image", "compress", dir.file("m.safetensors"), "-o", dir.file("m.lacuna")});
  const auto shown = json_of({"inspect", dir.file("m.lacuna")});
  EXPECT_EQ(shown["arch"], "flux");
  for (const auto& tensor : shown["tensors"]) {
    if (tensor["name"] == "x_embedder.weight") {
      EXPECT_EQ(tensor["layout"], "bf16");
      continue;
    }
    const bool sparse = tensor["name"] == "single_transformer_blocks.0.proj_out.weight";
    EXPECT_EQ(tensor["layout"], sparse ? "nm24_f8" : "f8");
    EXPECT_EQ(tensor["bytes"], sparse ? 20 * (4 + 3 + 10) : 20 * 24);
  }
  EXPECT_NE(output_of({"inspect", dir.file("m.lacuna")}).find("keeps 50.0%"), std::string::npos);
}

TEST(ImageWeights, PolicyIsWhatCompressReads) {
  const TempDir dir;
  write_model(dir.file("m.safetensors"), 16);
  std::ofstream(dir.file("p.json")) << output_of({"image", "policy", "f8"});
  EXPECT_EQ(json_of({"image", "policy", "f8"})["rest"], "bf16");
  const auto own =
      json_of({"image", "compress", dir.file("m.safetensors"), "-o", dir.file("a"), "--policy", dir.file("p.json")});
  const auto built_in =
      json_of({"image", "compress", dir.file("m.safetensors"), "-o", dir.file("b"), "--policy", "f8"});
  EXPECT_EQ(own["layouts"], built_in["layouts"]);
}

// RECIPES 6: a disk that is full, a folder that is not there.
TEST(ImageWeights, ErrorsAreOneLineAndLeaveNothing) {
  const TempDir dir;
  const std::string model = dir.file("m.safetensors"), out = dir.file("m.lacuna");
  write_model(model, 256);
  const auto fails = [&](const std::vector<std::string>& arguments, int code, const std::string& says,
                         const RunOptions& options = {}, int lines = 1) {
    const Finished run = run_lacuna(arguments, options);
    EXPECT_EQ(run.code, code) << run.err;
    EXPECT_NE(run.err.find(says), std::string::npos) << run.err;
    EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), lines) << run.err;
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
  };
  fails({"image", "compress", model, "-o", out}, 1, "m.lacuna", {.file_size_limit = 100000}, 2);  // a warning before
  fails({"image", "compress", model, "-o", out, "--mask", "wanda"}, 1, "--mask wanda needs --norms FILE");
  fails({"image", "compress", model, "-o", out, "--mask", "sparsegpt"}, 2, "unknown mask");
  for (const std::vector<std::string>& mask :
       {{"--mask", "awp"}, {"--awp-weights"}, {"--alpha", "3"}, std::vector<std::string>{"--mask", "e-sparse"}}) {
    std::vector<std::string> arguments = {"image", "compress", model, "-o", out, "--policy", "f8"};
    arguments.insert(arguments.end(), mask.begin(), mask.end());
    fails(arguments, 1, "makes no matrix 2:4");
  }
  fails({"image", "compress", model, "-o", out, "--policy", "nothing"}, 1, "quaspa, f8, nm24_bf16, bf16");
  fails({"image", "compress", dir.file("absent"), "-o", out}, 1, "absent");
  fails({"image", "compress", model, "-o", "/dev/full"}, 1, "/dev/full", {}, 2);
  const std::string before = read_text(model);
  fails({"image", "compress", model, "-o", model}, 1, "is a file that is read");
  fails({"image", "compress", model, "-o", model, "--norms", model}, 1, "is a file that is read");
  EXPECT_TRUE(read_text(model) == before);
  fails({"image", "compress", model}, 2, "see `lacuna image compress --help`");
  fails({"image", "colour"}, 2, "see `lacuna image --help`");
  fails({"image"}, 2, "subcommand");
}

TEST(ImageWeights, SaysBeforehandThatNoCommandRunsTheNet) {
  const TempDir dir;
  write_model(dir.file("m.safetensors"), 256);
  const Finished run = run_lacuna({"image", "compress", dir.file("m.safetensors"), "-o", dir.file("f8")});
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_NE(run.err.find(
                "needs its config.json; name the folder that has both; `lacuna image step` and `denoise` will not run"),
            std::string::npos)
      << run.err;
  // A built-in policy's name is no file.
  const Finished named =
      run_lacuna({"image", "compress", dir.file("m.safetensors"), "-o", dir.file("f8"), "--policy", "f8"});
  EXPECT_EQ(named.code, 0) << named.err;
}

TEST(ImageWeights, HelpOfEachCommand) {
  EXPECT_NE(output_of({"image", "--help"}).find("compress"), std::string::npos);
  const std::string help = output_of({"image", "compress", "--help"});
  for (const char* flag : {"--policy", "--mask", "--norms", "--gradients", "--mask-file", "--alpha", "--out"})
    EXPECT_NE(help.find(flag), std::string::npos) << flag;
}

}  // namespace
}  // namespace lacuna::test
