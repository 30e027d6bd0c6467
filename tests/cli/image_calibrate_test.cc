// `image calibrate`, the masks made of what it writes, and `image errors`, as a user runs them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "io/float_tensors.h"
#include "kernels/cuda_support.h"
#include "process.h"
#include "relative_error.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Json = nlohmann::json;

std::string tiny(const std::string& name) { return fixture("flux_tiny/" + name); }

/// The tensors of a fixture under the names that the program reads: without "in.", changed by `change`.
std::string inputs_file(const TempDir& dir, const std::string& name,
                        const std::function<void(io::FloatTensors&)>& change = {}) {
  io::FloatTensors out;
  for (auto& [key, tensor] : io::read_float_tensors(tiny(name + ".safetensors")))
    if (key.starts_with("in.")) out[key.substr(3)] = tensor;
  if (change) change(out);
  const std::string path = dir.file("in_" + name + ".safetensors");
  io::write_float_tensors(path, out);
  return path;
}

std::vector<Json> lines_of(const std::string& text) {
  std::vector<Json> out;
  for (size_t begin = 0, end = 0; (end = text.find('\n', begin)) != text.npos; begin = end + 1)
    out.push_back(Json::parse(text.substr(begin, end - begin)));
  return out;
}

double largest(const std::vector<float>& values) {
  double out = 0;
  for (const float value : values) out = std::max(out, std::abs(double(value)));
  return out;
}

/// As in flux_test.cc: PyTorch's float32 run of the same net is as far from the double one as one order of summation
/// takes it; ours may be four times as far. Both files' values were rounded to float32 once.
void expect_norms(const io::FloatTensors& ours, const io::FloatTensors& file) {
  size_t compared = 0;
  for (const auto& [key, truth] : file) {
    if (!key.starts_with("f64.")) continue;
    const std::string name = key.substr(4);
    ASSERT_TRUE(ours.contains(name)) << name;
    const io::FloatTensor& got = ours.at(name);
    ASSERT_EQ(got.dims, truth.dims) << name;
    const double bound = 4 * double(file.at("error." + name).values[0]) + 2 * 0x1p-24 * largest(truth.values);
    Largest distance;
    for (size_t i = 0; i < got.values.size(); ++i)
      distance.add(std::abs(double(got.values[i]) - double(truth.values[i])));
    EXPECT_LE(distance.value(), bound) << name;
    ++compared;
  }
  EXPECT_EQ(compared, ours.size());
}

TEST(ImageCalibrate, HelpOfTheCommands) {
  const std::string group = output_of({"image", "--help"});
  for (const char* flag : {"--device", "--gpu ", "--gpu-memory"})
    EXPECT_THAT(output_of({"image", "calibrate", "--help"}), HasSubstr(flag));
  for (const char* command : {"calibrate", "errors"}) {
    EXPECT_THAT(group, HasSubstr(std::string("\n  ") + command));
    const std::string help = output_of({"image", command, "--help"});
    for (const char* flag : {"--inputs", "--steps", "--seed", "--threads", "--json"})
      EXPECT_THAT(help, HasSubstr(flag)) << command;
  }
  EXPECT_THAT(output_of({"image", "compress", "--help"}),
              AllOf(HasSubstr("--second-moments"), HasSubstr("--awp-weights")));
}

constexpr const char* kMomentOf = "transformer_blocks.0.attn.to_out.0.weight";

TEST(ImageCalibrate, NormsOfSingleStepsAreDiffusers) {
  const TempDir dir;
  for (const char* name : {"dev", "moe"}) {
    const std::string out = dir.file(std::string(name) + ".norms");
    const Json report = json_of({"image", "calibrate", tiny(name), "--inputs", inputs_file(dir, name), "-o", out,
                                 "--second-moments", kMomentOf});
    expect_norms(io::read_float_tensors(out),
                 io::read_float_tensors(tiny(std::string("norms_") + name + ".safetensors")));
    EXPECT_EQ(report.at("runs"), std::string(name) == "dev" ? 2 : 1);
    EXPECT_EQ(report.at("second_moments"), 1);
    EXPECT_TRUE(report.at("unseen").empty()) << report;
  }
}

TEST(ImageCalibrate, NormsOverTheStepsOfAPromptAreDiffusers) {
  const TempDir dir;
  const std::string out = dir.file("norms");
  const Json report = json_of({"image", "calibrate", tiny("dev"), "--inputs", inputs_file(dir, "denoise"), "-o", out,
                               "--steps", "4", "--second-moments", "transformer_blocks.0.attn.to_out.*.weight"});
  expect_norms(io::read_float_tensors(out), io::read_float_tensors(tiny("norms_denoise.safetensors")));
  EXPECT_EQ(report.at("runs"), 4);
  EXPECT_EQ(report.at("images"), 1);
}

// Matrices that the first release joined read one input.
TEST(ImageCalibrate, NamesAreTheCheckpoints) {
  const TempDir dir;
  const std::string inputs = inputs_file(dir, "dev");
  output_of({"image", "calibrate", tiny("dev"), "--inputs", inputs, "-o", dir.file("a")});
  output_of({"image", "calibrate", tiny("original"), "--inputs", inputs, "-o", dir.file("b")});
  const auto ours = io::read_float_tensors(dir.file("a")), theirs = io::read_float_tensors(dir.file("b"));
  for (const auto& [a, b] :
       std::map<std::string, std::string>{{"transformer_blocks.1.attn.to_k", "double_blocks.1.img_attn.qkv"},
                                          {"transformer_blocks.0.ff_context.net.2", "double_blocks.0.txt_mlp.2"},
                                          {"single_transformer_blocks.1.proj_mlp", "single_blocks.1.linear1"},
                                          {"single_transformer_blocks.1.proj_out", "single_blocks.1.linear2"},
                                          {"norm_out.linear", "final_layer.adaLN_modulation.1"}})
    EXPECT_EQ(ours.at(a + ".weight.norm").values, theirs.at(b + ".weight.norm").values) << a;
}

// Squares add up, and what two files hold counts as if it were one.
TEST(ImageCalibrate, SeveralFilesAreOne) {
  const TempDir dir;
  const std::string steps = inputs_file(dir, "dev");
  const auto norms = [&](std::vector<std::string> inputs) {
    std::vector<std::string> arguments = {"image", "calibrate", tiny("dev"), "-o", dir.file("out")};
    for (const std::string& path : inputs) arguments.insert(arguments.end(), {"--inputs", path});
    output_of(arguments);
    return io::read_float_tensors(dir.file("out")).at("proj_out.weight.norm").values;
  };
  const std::vector<float> one = norms({steps}), two = norms({steps, steps});
  for (size_t k = 0; k < one.size(); ++k) EXPECT_FLOAT_EQ(two[k], std::sqrt(2.0f) * one[k]);
}

double relative(const io::FloatTensor& a, const io::FloatTensor& b) {
  EXPECT_EQ(a.dims, b.dims);
  return test::relative_error(a.values, b.values);
}

TEST(ImageCalibrate, MasksOfItsFileRun) {
  const TempDir dir;
  const std::string inputs = inputs_file(dir, "dev"), norms = dir.file("norms"), model = dir.file("m.gguf");
  output_of({"image",
             "calibrate",
             tiny("dev"),
             "--inputs",
             inputs,
             "-o",
             norms,
             "--entropies",
             "--second-moments",
             "transformer_blocks.*.attn.to_*.weight",
             "--second-moments",
             "transformer_blocks.*.attn.to_out.0.weight",
             "--second-moments",
             "transformer_blocks.*.ff.net.*.weight",
             "--second-moments",
             "transformer_blocks.*.ff.net.0.proj.weight",
             "--second-moments",
             "single_transformer_blocks.*.*.weight",
             "--second-moments",
             "single_transformer_blocks.*.attn.*.weight"});
  // 2:4 alone, so that E4M3 does not hide what masks do.
  const auto sample = [&](std::vector<std::string> mask, const std::string& says) {
    std::vector<std::string> arguments = {"image", "compress", tiny("dev"), "-o", model, "--policy", "nm24_bf16"};
    arguments.insert(arguments.end(), mask.begin(), mask.end());
    EXPECT_EQ(json_of(arguments).at("mask"), says);
    output_of({"image", "step", model, "--inputs", inputs, "-o", dir.file("out")});
    return io::read_float_tensors(dir.file("out")).at("sample");
  };
  const io::FloatTensor truth = io::read_float_tensors(tiny("dev.safetensors")).at("f64.sample");
  const io::FloatTensor magnitude = sample({"--mask", "magnitude"}, "magnitude");
  const io::FloatTensor wanda = sample({"--mask", "wanda", "--norms", norms}, "wanda");
  const io::FloatTensor e_sparse = sample({"--mask", "e-sparse", "--norms", norms}, "e-sparse, alpha 1");
  const io::FloatTensor awp = sample({"--mask", "awp", "--second-moments", norms}, "awp");
  const io::FloatTensor weights =
      sample({"--mask", "awp", "--second-moments", norms, "--awp-weights"}, "awp, with its weights");
  EXPECT_NE(wanda.values, magnitude.values);
  EXPECT_NE(e_sparse.values, wanda.values);
  EXPECT_NE(awp.values, wanda.values);
  // Weights that were fitted to these very inputs.
  EXPECT_LT(relative(weights, truth), relative(awp, truth));
  EXPECT_LT(relative(weights, truth), relative(magnitude, truth));
}

TEST(ImageCalibrate, ExpertsWithoutTokensAreNamed) {
  const TempDir dir;
  const std::string out = dir.file("norms"),
                    inputs = inputs_file(dir, "moe", [](io::FloatTensors&t) {
                      const auto first = [&](const char* name) {
                        io::FloatTensor& tensor = t.at(name);
                        const size_t axis = tensor.dims.size() - 2;
                        tensor.values.resize(tensor.values.size() / size_t(tensor.dims[axis]));
                        tensor.dims[axis] = 1;
                      };
                      for (const char* name : {"hidden_states", "encoder_hidden_states", "img_ids", "txt_ids"})
                        first(name);
                    });
  const Finished run = run_lacuna({"image", "calibrate", tiny("moe"), "--inputs", inputs, "-o", out, "--json"});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr("read no token"));
  // One image token goes to two of four experts of the double block.
  const Json left = Json::parse(run.out).at("unseen");
  EXPECT_GE(left.size(), 4u);
  for (const std::string name : left) EXPECT_THAT(name, HasSubstr(".experts."));
  const Finished made =
      run_lacuna({"image", "compress", tiny("moe"), "-o", dir.file("m"), "--mask", "wanda", "--norms", out});
  EXPECT_EQ(made.code, 1);
  EXPECT_THAT(made.err, AllOf(HasSubstr("has no tensor"), HasSubstr(".experts.")));
  EXPECT_FALSE(std::filesystem::exists(dir.file("m")));
}

TEST(ImageCalibrate, ErrorsAreOneLineAndLeaveNothing) {
  const TempDir dir, out_dir;
  const std::string inputs = inputs_file(dir, "dev"), out = out_dir.file("norms");
  const auto fails = [&](const std::string& path, const std::vector<std::string>& more, int code,
                         const std::string& says) {
    std::vector<std::string> arguments = {"image", "calibrate", tiny("dev"), "--inputs", path, "-o", out};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Finished run = run_lacuna(arguments);
    EXPECT_EQ(run.code, code) << run.err;
    EXPECT_THAT(run.err, HasSubstr(says));
    EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), 1) << run.err;
    EXPECT_TRUE(std::filesystem::is_empty(out_dir.path()));
  };
  fails(dir.file("absent"), {}, 1, "absent");
  fails(tiny("dev/config.json"), {}, 1, "config.json");
  fails(inputs, {"--steps", "4"}, 1, "--steps needs prompt_embeds");
  fails(inputs, {"--inputs", inputs, "--steps", "4"}, 1, "--steps needs prompt_embeds, which none of the inputs has");
  const std::string prompts = inputs_file(dir, "denoise");
  fails(prompts, {"--height", "32"}, 1, "--height needs inputs without latents, but");
  fails(prompts, {"--inputs", inputs, "--seed", "1"}, 1,
        "--seed needs inputs without latents, but all inputs have them");
  fails(inputs, {"--second-moments", "nothing.*"}, 1, "has no matrix of that name");
  fails(inputs, {"--memory", "4"}, 1, "--memory needs --second-moments");
  fails(inputs, {"--memory", "0.000001", "--second-moments", "proj_out.weight"}, 1, "more than the 1073 allowed");
  fails(inputs, {"--memory", "0"}, 2, "--memory");
  fails(inputs, {"--gpu", "1"}, 1, "--gpu needs --device cuda");
  fails(inputs, {"--gpu-memory", "8"}, 1, "--gpu-memory needs --device cuda");
  fails(inputs, {"--device", "cuda", "--gpu", "-1"}, 2, "--gpu");
  fails(inputs, {"--device", "cuda", "--gpu-memory", "nan"}, 2, "--gpu-memory");
  fails(inputs, {"--device", "cuda", "--gpus", "2"}, 2, "--gpus");
  // Before a device is looked for.
  fails(inputs, {"--device", "cuda", "--memory", "4"}, 1, "--memory needs --second-moments");
  fails(inputs, {"--device", "cuda", "--second-moments", "nothing.*"}, 1, "has no matrix of that name");
  fails(dir.file("absent"), {"--device", "cuda"}, 1, "absent");
  std::string reason;
  if (cuda_device(&reason) == nullptr) fails(inputs, {"--device", "cuda"}, 1, reason);
  const auto changed = [&](const std::function<void(io::FloatTensors&)>& change) {
    return inputs_file(dir, "dev", change);
  };
  fails(changed([](auto& t) { t.erase("hidden_states"); }), {}, 1, "neither hidden_states");
  fails(changed([](auto& t) { t["prompt_embeds"] = t["pooled_projections"]; }), {}, 1, "keep one of them");
  fails(changed([](auto& t) { t.erase("txt_ids"); }), {}, 1, "tensor txt_ids is missing");
  fails(changed([](auto& t) { t["timestep"] = {{1}, {0.5f}}; }), {}, 1, "tensor timestep has shape [1], expected [2]");
  fails(changed([](auto& t) { t["timestep"].values[1] = 500; }), {}, 1,
        "timestep holds 500, but noise levels go from 0");
  fails(changed([](auto& t) {
          for (float& v : t["hidden_states"].values) v = 3e38f;
        }),
        {}, 1, "image 0");
  const std::string itself = inputs_file(dir, "dev");
  const Finished same = run_lacuna({"image", "calibrate", tiny("dev"), "--inputs", itself, "-o", itself});
  EXPECT_EQ(same.code, 1);
  EXPECT_THAT(same.err, HasSubstr("is a file that is read"));
  EXPECT_TRUE(std::filesystem::exists(itself));
  const Finished nowhere =
      run_lacuna({"image", "calibrate", tiny("dev"), "--inputs", itself, "-o", out_dir.file("none/norms")});
  EXPECT_EQ(nowhere.code, 1);
}

// On a card: the CPU's file within what bf16 activations cost, as cuda_image_statistics_test.cc derives it for nets of
// this depth, and the same report.
TEST(ImageCalibrateCuda, TheFileIsTheCpus) {
  std::string reason;
  if (cuda_device(&reason) == nullptr) GTEST_SKIP() << "SKIPPED: " << reason;
  const TempDir dir;
  for (const std::string& name : std::vector<std::string>{"dev", "moe"}) {
    const std::string inputs = inputs_file(dir, name);
    const auto report = [&](const std::string& device, const std::string& out) {
      return json_of({"image", "calibrate", tiny(name), "--inputs", inputs, "-o", out, "--entropies",
                      "--second-moments", kMomentOf, "--device", device});
    };
    const Json ours = report("cuda", dir.file("cuda")), theirs = report("cpu", dir.file("cpu"));
    ASSERT_EQ(ours.size(), theirs.size());
    EXPECT_EQ(ours.at("device"), "cuda");
    EXPECT_EQ(theirs.at("device"), "cpu");
    for (const auto& [key, value] : theirs.items()) {
      ASSERT_TRUE(ours.contains(key)) << key;
      if (key != "path" && key != "seconds" && key != "peak_memory_bytes" && key != "device") {
        EXPECT_EQ(ours.at(key), value) << key;
      }
    }
    const auto found = io::read_float_tensors(dir.file("cuda")), expected = io::read_float_tensors(dir.file("cpu"));
    ASSERT_EQ(found.size(), expected.size());
    for (const auto& [key, truth] : expected) {
      ASSERT_TRUE(found.contains(key)) << key;
      if (key.ends_with(".norm")) {
        EXPECT_LE(relative(found.at(key), truth), 0.03) << key;
      }
      EXPECT_EQ(found.at(key).dims, truth.dims) << key;
    }
    // What a mask reads of it.
    for (const std::string& mask : std::vector<std::string>{"wanda", "e-sparse"})
      output_of(
          {"image", "compress", tiny(name), "-o", dir.file("m.gguf"), "--mask", mask, "--norms", dir.file("cuda")});
  }
  const std::vector<std::string> moment = {"image",   "calibrate",    tiny("dev"), "--inputs", inputs_file(dir, "dev"),
                                           "-o",      dir.file("no"), "--device",  "cuda",     "--second-moments",
                                           kMomentOf, "--memory",     "0.000001"};
  const Finished large = run_lacuna(moment);
  EXPECT_EQ(large.code, 1);
  EXPECT_THAT(large.err, HasSubstr("more than the 1073 allowed"));
  const Finished small = run_lacuna({"image", "calibrate", tiny("dev"), "--inputs", inputs_file(dir, "dev"), "-o",
                                     dir.file("no"), "--device", "cuda", "--gpu-memory", "0.00001"});
  EXPECT_EQ(small.code, 1);
  EXPECT_THAT(small.err, HasSubstr("MiB of weights"));
  EXPECT_FALSE(std::filesystem::exists(dir.file("no")));
}

TEST(ImageCompressAwp, ErrorsAreOneLineAndLeaveNothing) {
  const TempDir dir, out_dir;
  const auto fails = [&](const std::vector<std::string>& more, const std::string& says) {
    std::vector<std::string> arguments = {"image", "compress", tiny("dev"), "-o", out_dir.file("m")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Finished run = run_lacuna(arguments);
    EXPECT_EQ(run.code, 1) << run.err;
    EXPECT_THAT(run.err, HasSubstr(says));
    EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), 1) << run.err;
    EXPECT_TRUE(std::filesystem::is_empty(out_dir.path()));
  };
  fails({"--mask", "awp"}, "--mask awp needs --second-moments FILE");
  fails({"--awp-weights"}, "--awp-weights needs --mask awp");
  const std::string norms = dir.file("norms");
  output_of({"image", "calibrate", tiny("dev"), "--inputs", inputs_file(dir, "dev"), "-o", norms});
  fails({"--mask", "wanda", "--norms", norms, "--second-moments", norms}, "--mask wanda does not read it");
  fails({"--mask", "awp", "--second-moments", norms}, "second_moment; collect it");
  const std::string policy = dir.file("policy.json"), bad = dir.file("bad");
  std::ofstream(policy) << R"({"version": 1, "rules": [{"name": "proj_out.weight", "layout": "nm24_f8"}],
                               "rest": "bf16"})";
  io::FloatTensor moment{{30, 30}, std::vector<float>(900, 0.0f)};
  moment.values[1] = 1;  // beyond what its diagonal allows
  io::write_float_tensors(bad, {{"proj_out.weight.second_moment", moment}});
  fails({"--policy", policy, "--mask", "awp", "--second-moments", bad}, "are of no second moment");
  moment.dims = {15, 60};
  io::write_float_tensors(bad, {{"proj_out.weight.second_moment", moment}});
  fails({"--policy", policy, "--mask", "awp", "--second-moments", bad}, "asks for [30, 30]");
}

// ---- image errors ----

std::map<std::string, Json> rows_of(const std::vector<std::string>& arguments) {
  std::map<std::string, Json> out;
  for (const Json& row : lines_of(output_of(arguments))) out[row.at("name")] = row;
  return out;
}

TEST(ImageErrors, OfANetAgainstItselfAreZero) {
  const TempDir dir;
  const auto rows = rows_of(
      {"image", "errors", tiny("original"), "--against", tiny("dev"), "--inputs", inputs_file(dir, "dev"), "--json"});
  EXPECT_EQ(rows.size(), 3u + 2 * 4 + 2);
  for (const auto& [name, row] : rows) {
    EXPECT_EQ(row.at("relative_error"), 0) << name;
    EXPECT_TRUE(row.at("snr_db").is_null()) << name;
  }
}

TEST(ImageErrors, OfTheSampleAreThoseOfTwoSteps) {
  const TempDir dir;
  const std::string inputs = inputs_file(dir, "dev"), model = dir.file("m.gguf");
  output_of({"image", "compress", tiny("dev"), "-o", model});
  const auto sample = [&](const std::string& net) {
    output_of({"image", "step", net, "--inputs", inputs, "-o", dir.file("out")});
    return io::read_float_tensors(dir.file("out")).at("sample");
  };
  const double truth = relative(sample(model), sample(tiny("dev")));
  const auto rows = rows_of({"image", "errors", model, "--against", tiny("dev"), "--inputs", inputs, "--json"});
  EXPECT_NEAR(double(rows.at("sample").at("relative_error")), truth, 1e-9);
  EXPECT_NEAR(double(rows.at("sample").at("snr_db")), -20 * std::log10(truth), 1e-6);
  // Nothing was compressed before the first block; its text stream meets the image in attention alone.
  EXPECT_EQ(rows.at("x_embedder").at("relative_error"), 0);
  EXPECT_GT(rows.at("transformer_blocks.0").at("relative_error"),
            rows.at("transformer_blocks.0.text").at("relative_error"));
  const std::string table = output_of({"image", "errors", model, "--against", tiny("dev"), "--inputs", inputs});
  EXPECT_THAT(table, AllOf(HasSubstr("SNR (dB)"), HasSubstr("single_transformer_blocks.1.text")));
}

/// ||x (W - W')^T|| / ||x W^T|| in double precision; W' is W without the two smaller of every four.
double error_of_magnitude_mask(const io::FloatTensor& x, const io::FloatTensor& w) {
  const auto N = size_t(w.dims[0]), K = size_t(w.dims[1]), M = x.values.size() / K;
  std::vector<double> dropped(w.values.begin(), w.values.end());
  for (size_t at = 0; at < dropped.size(); at += 4) {
    std::vector<size_t> order = {at, at + 1, at + 2, at + 3};
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return std::abs(w.values[a]) > std::abs(w.values[b]); });
    dropped[order[0]] = dropped[order[1]] = 0;
  }
  double error = 0, square = 0;
  for (size_t m = 0; m < M; ++m)
    for (size_t n = 0; n < N; ++n) {
      double y = 0, lost = 0;
      for (size_t k = 0; k < K; ++k) {
        y += double(x.values[m * K + k]) * double(w.values[n * K + k]);
        lost += double(x.values[m * K + k]) * dropped[n * K + k];
      }
      error += lost * lost, square += y * y;
    }
  return std::sqrt(error / square);
}

TEST(ImageErrors, OfALayerAloneAreThoseOfItsMask) {
  const TempDir dir;
  const std::string inputs = inputs_file(dir, "dev"), model = dir.file("m.gguf"), policy = dir.file("policy.json");
  std::ofstream(policy) << R"({"version": 1, "rules": [{"name": "x_embedder.weight", "layout": "nm24_bf16"},
                               {"name": "context_embedder.weight", "layout": "nm24_bf16"}], "rest": "bf16"})";
  output_of({"image", "compress", tiny("dev"), "-o", model, "--policy", policy});
  const auto rows =
      rows_of({"image", "errors", model, "--against", tiny("dev"), "--inputs", inputs, "--layers", "--json"});
  const auto weights = io::read_float_tensors(tiny("dev/diffusion_pytorch_model.safetensors"));
  const auto x = io::read_float_tensors(inputs);
  for (const auto& [layer, input] : std::map<std::string, std::string>{
           {"x_embedder.weight", "hidden_states"}, {"context_embedder.weight", "encoder_hidden_states"}}) {
    const Json& row = rows.at(layer);
    EXPECT_EQ(row.at("layout"), "nm24_bf16");
    EXPECT_NEAR(double(row.at("relative_error")), error_of_magnitude_mask(x.at(input), weights.at(layer)), 1e-6);
  }
  // Inputs differ by now, the weights do not.
  EXPECT_GT(rows.at("transformer_blocks.0").at("relative_error"), 0.01);
  EXPECT_EQ(rows.at("transformer_blocks.0.attn.to_q.weight").at("relative_error"), 0);
}

TEST(ImageErrors, FollowAPromptsSteps) {
  const TempDir dir;
  const std::string model = dir.file("m.gguf");
  output_of({"image", "compress", tiny("dev"), "-o", model, "--policy", "f8"});
  const auto rows = rows_of({"image", "errors", model, "--against", tiny("dev"), "--inputs",
                             inputs_file(dir, "denoise"), "--steps", "3", "--json"});
  EXPECT_GT(rows.at("sample").at("relative_error"), 0);
  EXPECT_LT(rows.at("sample").at("relative_error"), 0.25);  // as ImageStep.RunsWhatCompressMakes
}

TEST(ImageErrors, SaysWhatIsWrong) {
  const TempDir dir;
  const std::string inputs = inputs_file(dir, "dev");
  const auto error = [&](const std::string& model, const std::string& against, std::vector<std::string> more) {
    std::vector<std::string> arguments = {"image", "errors", model, "--against", against, "--inputs", inputs};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Finished run = run_lacuna(arguments);
    EXPECT_EQ(run.code, 1);
    EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), 1) << run.err;
    return run.err;
  };
  EXPECT_THAT(error(tiny("dev"), tiny("schnell"), {}), HasSubstr("different shapes"));
  EXPECT_THAT(error(tiny("original"), tiny("dev"), {"--layers"}), HasSubstr("in one naming"));
  EXPECT_THAT(error(dir.file("absent"), tiny("dev"), {}), HasSubstr("absent"));
  EXPECT_EQ(run_lacuna({"image", "errors", tiny("dev"), "--inputs", inputs}).code, 2);
}

}  // namespace
}  // namespace lacuna::test
