// `image step`, `image denoise` and `image bench` as a user runs them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "io/float_tensors.h"
#include "kernels/cuda_support.h"
#include "process.h"
#include "relative_error.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

using Json = nlohmann::json;

std::string tiny(const std::string& name) { return fixture("flux_tiny/" + name); }

/// The tensors of a fixture under the names that the program reads: without "in.".
std::string inputs_file(const TempDir& dir, const std::string& name, const std::string& without = {}) {
  io::FloatTensors out;
  for (auto& [key, tensor] : io::read_float_tensors(tiny(name + ".safetensors")))
    if (key.starts_with("in.") && key.substr(3) != without) out[key.substr(3)] = tensor;
  const std::string path = dir.file("in_" + name + without + ".safetensors");
  io::write_float_tensors(path, out);
  return path;
}

double distance(const io::FloatTensor& a, const io::FloatTensor& b) {
  EXPECT_EQ(a.dims, b.dims);
  EXPECT_EQ(a.values.size(), b.values.size());
  Largest out;
  for (size_t i = 0; i < a.values.size(); ++i) out.add(std::abs(double(a.values[i]) - b.values[i]));
  return out.value();
}

std::vector<Json> lines_of(const std::string& text) {
  std::vector<Json> out;
  for (size_t begin = 0, end = 0; (end = text.find('\n', begin)) != text.npos; begin = end + 1)
    out.push_back(Json::parse(text.substr(begin, end - begin)));
  return out;
}

TEST(Image, EveryCommandExplainsItsFlags) {
  const std::string group = run_lacuna({"image", "--help"}).out;
  for (const char* command : {"step", "denoise", "bench"}) {
    EXPECT_NE(group.find(std::string("\n  ") + command), std::string::npos) << command;
    const Finished help = run_lacuna({"image", command, "--help"});
    EXPECT_EQ(help.code, 0);
    for (const char* flag : {"--threads", "--device", "--json", "--help"})
      EXPECT_NE(help.out.find(flag), std::string::npos) << command << ' ' << flag;
  }
}

TEST(ImageStep, PredictsAsDiffusers) {
  const TempDir dir;
  for (const char* name : {"dev", "schnell", "moe"}) {
    const std::string out = dir.file("out.safetensors");
    const Finished run =
        run_lacuna({"image", "step", tiny(name), "--inputs", inputs_file(dir, name), "-o", out, "--json"});
    ASSERT_EQ(run.code, 0) << run.err;
    const auto file = io::read_float_tensors(tiny(std::string(name) + ".safetensors"));
    const auto& truth = file.at("f64.sample");
    // As in flux_test.cc; the outputs are below 8.
    EXPECT_LE(distance(io::read_float_tensors(out).at("sample"), truth),
              4 * double(file.at("error.sample").values[0]) + 8 * 0x1p-24);
    const Json row = lines_of(run.out).at(0);
    EXPECT_EQ(row.at("batch"), truth.dims[0]);
    EXPECT_EQ(row.at("tokens"), truth.dims[1]);
    EXPECT_EQ(row.at("path"), out);
    EXPECT_GT(row.at("step_s"), 0);
  }
}

double relative(const io::FloatTensor& a, const io::FloatTensor& b) {
  EXPECT_EQ(a.dims, b.dims);
  return test::relative_error(a.values, b.values);
}

// E4M3 rounds weights and inputs by 2^-4 of themselves at most, a few percent in the mean, in each of some ten products
// that follow each other; without half of random weights much more is lost.
TEST(ImageStep, RunsWhatCompressMakes) {
  const TempDir dir;
  const auto step = [&](const std::string& name, const std::string& policy) {
    const std::string model = dir.file(name + policy + ".gguf"), out = dir.file("out.safetensors");
    const Finished made = run_lacuna({"image", "compress", tiny(name), "--policy", policy, "-o", model});
    EXPECT_EQ(made.code, 0) << made.err;
    const std::string inputs = inputs_file(dir, name == "original" ? "dev" : name);
    const Finished run = run_lacuna({"image", "step", model, "--inputs", inputs, "-o", out});
    EXPECT_EQ(run.code, 0) << run.err;
    return io::read_float_tensors(out).at("sample");
  };
  const auto truth = io::read_float_tensors(tiny("dev.safetensors")).at("f64.sample");
  const double f8 = relative(step("dev", "f8"), truth), sparse = relative(step("dev", "quaspa"), truth);
  EXPECT_GT(f8, 0);
  EXPECT_LT(f8, 0.25);
  EXPECT_GT(sparse, f8);
  // Rows of fused matrices have the codes and the places that they have apart.
  for (const char* policy : {"f8", "quaspa"})
    EXPECT_EQ(step("original", policy).values, step("dev", policy).values) << policy;
  step("moe", "quaspa");
}

TEST(ImageStep, SaysWhatIsWrong) {
  const TempDir dir;
  const std::string out = dir.file("out.safetensors");
  const auto error = [&](const std::string& model, const std::string& inputs) {
    const Finished run = run_lacuna({"image", "step", model, "--inputs", inputs, "-o", out});
    EXPECT_EQ(run.code, 1);
    EXPECT_FALSE(std::filesystem::exists(out));
    return run.err;
  };
  EXPECT_THAT(error(tiny("dev"), inputs_file(dir, "dev", "guidance")),
              testing::AllOf(testing::HasSubstr("tensor guidance is missing"), testing::HasSubstr("in_devguidance")));
  EXPECT_THAT(error(tiny("schnell"), inputs_file(dir, "dev")),
              testing::AllOf(testing::HasSubstr("encoder_hidden_states"), testing::HasSubstr("[2, any, 24]")));
  EXPECT_THAT(error(dir.file("absent"), inputs_file(dir, "dev")), testing::HasSubstr("absent"));
  // What is read is not replaced: the inputs, and a folder's weights.
  const std::string inputs = inputs_file(dir, "dev"), net = dir.file("net");
  std::filesystem::copy(tiny("dev"), net);
  for (const std::string& kept : {inputs, net + "/diffusion_pytorch_model.safetensors", net + "/config.json"}) {
    const std::string before = read_text(kept);
    const Finished run = run_lacuna({"image", "step", net, "--inputs", inputs, "-o", kept});
    EXPECT_EQ(run.code, 1);
    EXPECT_THAT(run.err, testing::HasSubstr("is a file that is read"));
    EXPECT_TRUE(read_text(kept) == before);
  }
  EXPECT_THAT(error(tiny("dev"), dir.file("absent")), testing::HasSubstr("absent"));
  EXPECT_EQ(run_lacuna({"image", "step", tiny("dev")}).code, 2);
  EXPECT_EQ(run_lacuna({"image"}).code, 2);
}

TEST(ImageDenoise, FourStepsAreDiffusers) {
  const TempDir dir;
  const std::string out = dir.file("out.safetensors");
  const Finished run = run_lacuna({"image", "denoise", tiny("original"), "--inputs", inputs_file(dir, "denoise"), "-o",
                                   out, "--steps", "4", "--json"});
  ASSERT_EQ(run.code, 0) << run.err;
  const auto file = io::read_float_tensors(tiny("denoise.safetensors"));
  EXPECT_LE(distance(io::read_float_tensors(out).at("latents"), file.at("f64.unpacked")),
            4 * double(file.at("error.latents").values[0]) + 8 * 0x1p-24);
  const Json row = lines_of(run.out).at(0);
  EXPECT_EQ(row.at("steps"), 4);
  EXPECT_EQ(row.at("tokens"), 6);
  EXPECT_EQ(row.at("noise_levels").size(), 5);
}

TEST(ImageDenoise, NoiseFollowsTheSeed) {
  const TempDir dir;
  const std::string inputs = inputs_file(dir, "denoise", "latents");
  const auto run = [&](const std::string& seed) {
    const std::string out = dir.file("out" + seed + ".safetensors");
    const Finished done = run_lacuna({"image", "denoise", tiny("dev"), "--inputs", inputs, "-o", out, "--steps", "2",
                                      "--height", "32", "--width", "48", "--seed", seed, "--guidance", "2"});
    EXPECT_EQ(done.code, 0) << done.err;
    return io::read_float_tensors(out).at("latents");
  };
  const io::FloatTensor one = run("1");
  EXPECT_EQ(one.dims, (std::vector<int64_t>{1, 2, 4, 6}));
  EXPECT_EQ(one.values, run("1").values);
  EXPECT_NE(one.values, run("2").values);
}

TEST(ImageDenoise, SaysWhatIsWrong) {
  const TempDir dir;
  const std::string out = dir.file("out.safetensors"), inputs = inputs_file(dir, "denoise");
  const auto run = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments = {"image", "denoise", tiny("dev"), "--inputs", inputs, "-o", out};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_lacuna(arguments);
  };
  EXPECT_EQ(run({"--steps", "0"}).code, 2);
  EXPECT_EQ(run({"--height", "40"}).code, 2);
  EXPECT_THAT(run({"--height", "32"}).err, testing::HasSubstr("--height needs inputs without latents"));
  const std::string schedule = dir.file("scheduler_config.json");
  std::ofstream(schedule) << R"({"_class_name": "DDIMScheduler"})";
  EXPECT_THAT(run({"--schedule", schedule}).err, testing::HasSubstr("DDIMScheduler"));
  for (const char* shifts : {R"({"shift": 1e-300})", R"({"use_dynamic_shifting": true, "base_shift": 1e6})"}) {
    std::ofstream(schedule) << shifts;
    EXPECT_THAT(run({"--schedule", schedule}).err, testing::HasSubstr("the schedule's shifts make a noise level of"));
  }
  EXPECT_FALSE(std::filesystem::exists(out));
}

// On a card, of weights in four layouts: the CPU's results within what bf16 activations cost, as cuda_flux_test.cc
// says.
TEST(ImageCuda, StepDenoiseAndBench) {
  std::string reason;
  if (cuda_device(&reason) == nullptr) GTEST_SKIP() << "SKIPPED: " << reason;
  const TempDir dir;
  const auto result = [&](const char* command, const std::string& model, const std::string& inputs, const char* name,
                          std::vector<std::string> more) {
    const std::string out = dir.file("out.safetensors");
    more.insert(more.begin(), {"image", command, model, "--inputs", inputs, "-o", out});
    const Finished run = run_lacuna(more);
    EXPECT_EQ(run.code, 0) << run.err;
    return io::read_float_tensors(out).at(name);
  };
  for (const char* policy : {"bf16", "nm24_bf16", "f8", "quaspa"}) {
    const std::string model = dir.file(std::string(policy) + ".gguf");
    ASSERT_EQ(run_lacuna({"image", "compress", tiny("dev"), "--policy", policy, "-o", model}).code, 0);
    const std::string step = inputs_file(dir, "dev"), prompts = inputs_file(dir, "denoise");
    EXPECT_LT(relative(result("step", model, step, "sample", {"--device", "cuda"}),
                       result("step", model, step, "sample", {})),
              0.15)
        << policy;
    EXPECT_LT(relative(result("denoise", model, prompts, "latents", {"--device", "cuda", "--steps", "3"}),
                       result("denoise", model, prompts, "latents", {"--steps", "3"})),
              0.15)
        << policy;
  }
  const Finished bench = run_lacuna({"image", "bench", "--synthetic", "tiny", "--policy", "quaspa", "--size",
                                     "64x32,64x64x3", "--runs", "2", "--device", "cuda", "--explain", "--json"});
  ASSERT_EQ(bench.code, 0) << bench.err;
  std::set<std::string> parts;
  for (const Json& row : lines_of(bench.out)) {
    parts.insert(row.at("part"));
    if (row.at("part") == "single_in") {
      EXPECT_THAT(std::string(row.at("kernels").at(0)), testing::HasSubstr("1792 x 256: wgmma of 2:4 e4m3"));
    }
  }
  EXPECT_EQ(parts.size(), 17);  // all but router and experts, and the step
  const Finished small =
      run_lacuna({"image", "bench", "--synthetic", "tiny", "--device", "cuda", "--gpu-memory", "0.001", "--runs", "1"});
  EXPECT_EQ(small.code, 1);
  EXPECT_THAT(small.err, testing::HasSubstr("MiB of weights"));
}

TEST(ImageBench, TimesEveryPart) {
  const Finished run = run_lacuna({"image", "bench", "--synthetic", "tiny", "--layers", "1,1", "--size", "64x32",
                                   "--text-tokens", "3", "--runs", "2", "--json"});
  ASSERT_EQ(run.code, 0) << run.err;
  std::set<std::string> parts;
  double sum = 0, step = 0, flops = 0;
  for (const Json& row : lines_of(run.out)) {
    const std::string part = row.at("part");
    parts.insert(part);
    EXPECT_EQ(row.at("tokens"), 8);
    EXPECT_EQ(row.at("batch"), 1);
    EXPECT_EQ(row.at("layers"), (std::vector<int>{1, 1}));
    (part == "step" ? step : sum) += double(row.at("min_ms"));
    if (part == "double_up") flops = double(row.at("tflops")) * double(row.at("median_ms"));
  }
  EXPECT_EQ(parts.size(), 16);  // all but router and experts, and the step
  EXPECT_LE(sum, step * 1.001);
  EXPECT_NEAR(flops, 2.0 * 8 * 256 * 1024 * 1e-9, 1e-9);
  const Finished table =
      run_lacuna({"image", "bench", tiny("moe"), "--size", "32x32,48x32x2", "--text-tokens", "2", "--runs", "1"});
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out,
              testing::AllOf(testing::HasSubstr("expert_up"), testing::HasSubstr("attention"),
                             testing::HasSubstr("1 x (4 + 2) tokens"), testing::HasSubstr("2 x (6 + 2) tokens")));
  EXPECT_EQ(run_lacuna({"image", "bench"}).code, 1);
  for (const char* size : {"40x32", "32", "32x32x0", "32x32x", "32x32x2x2", "x32", "32x-32"})
    EXPECT_EQ(run_lacuna({"image", "bench", "--synthetic", "tiny", "--size", size}).code, 2) << size;
  EXPECT_EQ(run_lacuna({"image", "bench", "--synthetic", "flux.2"}).code, 1);
  EXPECT_EQ(run_lacuna({"image", "bench", "--synthetic", "tiny", "--layers", "0,0"}).code, 1);
}

}  // namespace
}  // namespace lacuna::test
