// `image tune`, and what the other `image` commands do with its profile.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "calibrate/cuda_profile.h"
#include "cli/profile.h"
#include "core/error.h"
#include "core/rng.h"
#include "io/float_tensors.h"
#include "io/image_checkpoint.h"
#include "kernels/cuda_support.h"
#include "model/flux/config.h"
#include "model/flux/sampler.h"
#include "process.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

using Json = nlohmann::json;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

std::string tiny(const std::string& name) { return fixture("flux_tiny/" + name); }

TEST(ImageTune, SaysWhatIsWrong) {
  const TempDir dir;
  expect_error({"image", "tune", "--synthetic", "tiny"}, "give --device cuda");
  expect_error({"image", "tune", "--device", "cuda"}, "name a MODEL or give --synthetic SHAPE");
  for (const std::vector<std::string>& wrong : {std::vector<std::string>{"--size", "40x32", "--synthetic", "tiny"},
                                                {"--policy", "f8", tiny("dev")},
                                                {"--text-tokens", "0", "--synthetic", "tiny"},
                                                {"--synthetic", "tiny", tiny("dev")}}) {
    std::vector<std::string> command = {"image", "tune", "--device", "cuda"};
    command.insert(command.end(), wrong.begin(), wrong.end());
    EXPECT_EQ(run_lacuna(command).code, 2) << wrong.front();
  }
  for (const char* command : {"step", "denoise"})
    for (const std::vector<std::string>& flag :
         {std::vector<std::string>{"--profile", dir.file("p.json")}, {"--no-profile"}, {"--explain"}}) {
      std::vector<std::string> all = {"image", command, tiny("dev"), "--inputs", dir.file("in"), "-o", dir.file("out")};
      all.insert(all.end(), flag.begin(), flag.end());
      expect_error(all, flag.front() + " needs --device cuda");
    }
  expect_error({"image", "bench", "--synthetic", "tiny", "--no-profile"}, "--no-profile needs --device cuda");
  EXPECT_EQ(run_lacuna({"image", "bench", "--synthetic", "tiny", "--device", "cuda", "--no-profile", "--profile",
                        dir.file("p.json")})
                .code,
            2);
}

/// A cache folder of its own for what this process loads, and the warnings meanwhile.
class TensorCoreProfile : public testing::Test {
 protected:
  TensorCoreProfile() {
    ::setenv("LACUNA_CACHE", dir_.file("cache").c_str(), 1);
    spdlog::set_default_logger(
        std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(said_)));
    card_.name = "NVIDIA H200", card_.driver = "13.0", card_.major = 9, card_.multiprocessors = 132;
    profile_.machine = cli::this_machine(card_);
    const auto plans = cuda::tensor_core_plans(product_.operation, product_.accumulate);
    profile_.tensor_core.set({product_, plans.empty() ? cuda::TensorCorePlan{} : plans.back(), 12, 11});
  }
  ~TensorCoreProfile() override {
    spdlog::set_default_logger(before_);
    ::unsetenv("LACUNA_CACHE");
  }

  std::string path() const { return cli::profile_path(profile_.machine); }
  void write(const std::string& text) {
    calibrate::save_cuda_profile(path(), profile_);  // makes the folder
    std::ofstream(path(), std::ios::trunc) << text;
  }
  /// Nothing is taken from this text, with one warning that has the words.
  void expect_unused(const std::string& text, const std::string& words) {
    write(text);
    said_.str("");
    const cli::TensorCorePlans found = cli::load_tensor_core_plans({}, card_);
    EXPECT_TRUE(found.plans.empty()) << words;
    EXPECT_EQ(found.source, "default plans: " + path() + " is not used");
    EXPECT_THAT(said_.str(), AllOf(HasSubstr("the profile is not used: "), HasSubstr(words),
                                   HasSubstr("make a new one with `lacuna image tune MODEL --device cuda`")));
    EXPECT_EQ(std::ranges::count(said_.str(), '\n'), 1) << said_.str();
  }

  TempDir dir_;
  cuda::DeviceInfo card_;
  const cuda::TensorCoreProduct product_{
      {.eight_bits = true, .sparse = true}, cuda::Accumulate::fast, 3072, 12288, 0, 4096};
  calibrate::CudaProfile profile_;
  std::ostringstream said_;

 private:
  std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
};

TEST_F(TensorCoreProfile, IsTakenFromTheCacheFolderOrTheFileThatIsNamed) {
  EXPECT_EQ(cli::load_tensor_core_plans({}, card_).source,
            "default plans: nothing was measured on this card; `lacuna image tune MODEL --device cuda` does");
  EXPECT_THAT([&] { cli::load_tensor_core_plans({.path = dir_.file("none.json")}, card_); },
              ThrowsMessage<Error>("--profile " + dir_.file("none.json") +
                                   ": there is no such file; make it with `lacuna image tune MODEL --device cuda -o " +
                                   dir_.file("none.json") + "`"));
  cli::ProfileFlags none;
  none.none = true;
  EXPECT_EQ(cli::load_tensor_core_plans(none, card_).source, "default plans (--no-profile)");
  calibrate::save_cuda_profile(path(), profile_);
  calibrate::save_cuda_profile(dir_.file("other.json"), profile_);
  EXPECT_TRUE(cli::load_tensor_core_plans(none, card_).plans.empty());
  if (cuda::tensor_core_plans(product_.operation, product_.accumulate).empty())
    return expect_unused(profile_.to_json(), "the wgmma kernel, which this build lacks,");
  for (const std::string& named : {std::string(), dir_.file("other.json")}) {
    const cli::TensorCorePlans found = cli::load_tensor_core_plans({.path = named}, card_);
    EXPECT_EQ(found.plans, profile_.tensor_core);
    EXPECT_EQ(found.source, named.empty() ? path() : named);
  }
  EXPECT_EQ(said_.str(), "");
}

TEST_F(TensorCoreProfile, WhatCannotBeUsedIsLeftOutWithOneWarning) {
  const std::string good = profile_.to_json();
  expect_unused("", "bad JSON");
  expect_unused(good.substr(0, good.size() / 2), "bad JSON");
  expect_unused(good.substr(0, good.size() - 3), "bad JSON");
  const auto edited = [&](auto change) {
    Json json = Json::parse(good);
    change(json);
    return json.dump();
  };
  expect_unused(edited([](Json& j) { j["gpu"] = "NVIDIA H100 80GB HBM3"; }),
                "is of card \"NVIDIA H100 80GB HBM3\", this is \"NVIDIA H200\"");
  expect_unused(edited([](Json& j) { j["driver"] = "12.4"; }), "is of driver \"12.4\", this is \"13.0\"");
  expect_unused(edited([](Json& j) { j["version"] = "0.0.1"; }), "is of version \"0.0.1\"");
  expect_unused(edited([](Json& j) { j["tensor_core"][0]["plan"]["tokens"] = 200; }),
                "has no plan of " + std::to_string(profile_.tensor_core.tunings().begin()->second.plan.rows) +
                    " outputs x 200 tokens");
  expect_unused(edited([](Json& j) { j["tensor_core"][0]["plan"]["cluster"] = 1 << 20; }), "\"cluster\" is 1048576");
  expect_unused(edited([](Json& j) { j["tensor_core"][0]["tokens"] = -1; }), "\"tokens\" is -1");
  expect_unused(edited([](Json& j) { j["tensor_core"][0]["tuned_us"] = 0; }), "which is no time");

  write(edited([](Json& j) { j.erase("tensor_core"); }));
  said_.str("");
  EXPECT_EQ(cli::load_tensor_core_plans({}, card_).source,
            "default plans: " + path() +
                " has none of `image` commands; `lacuna image tune MODEL --device cuda` "
                "measures them");
  EXPECT_EQ(said_.str(), "");
}

/// Random tensors of a step of 128 x 128 pixels and 16 text tokens.
void write_step(const std::string& path, const model::flux::Config& config) {
  Rng rng(5);
  const auto random = [&](std::vector<int64_t> dims) {
    io::FloatTensor out{.dims = dims, .values = {}};
    int64_t count = 1;
    for (const int64_t dim : dims) count *= dim;
    for (int64_t i = 0; i < count; ++i) out.values.push_back(float(rng.normal()));
    return out;
  };
  io::FloatTensors out;
  out["hidden_states"] = random({1, 64, config.in_channels});
  out["encoder_hidden_states"] = random({1, 16, config.text_dim});
  out["pooled_projections"] = random({1, config.pooled_dim});
  out["timestep"] = {.dims = {1}, .values = {0.5f}};
  if (config.guidance) out["guidance"] = {.dims = {1}, .values = {3.5f}};
  out["img_ids"] = {.dims = {64, 3}, .values = model::flux::image_ids({1, 16, 16})};
  out["txt_ids"] = {.dims = {16, 3}, .values = std::vector<float>(48)};
  io::write_float_tensors(path, out);
}

/// Words about the plans of one part's kernels, or of all.
std::vector<std::string> kernels_of(const Json& parts) {
  std::vector<std::string> out;
  for (const auto& [part, kernels] : parts.items())
    for (const std::string kernel : kernels)
      if (kernel.find("wgmma") != kernel.npos && kernel.find("staged") != kernel.npos) out.push_back(kernel);
  return out;
}

// On a card of compute capability 9.0; others say that there is nothing to tune.
TEST(ImageCuda, TuneStoresPlansThatTheOtherCommandsUse) {
  std::string reason;
  const cuda::Device* const device = cuda_device(&reason);
  if (device == nullptr) GTEST_SKIP() << "SKIPPED: " << reason;
  const TempDir dir;
  const RunOptions cache{.environment = {{"LACUNA_CACHE", dir.file("cache")}}};
  const std::string model = dir.file("dev.gguf"), inputs = dir.file("in.safetensors");
  ASSERT_EQ(run_lacuna({"image", "compress", tiny("dev"), "--policy", "quaspa", "-o", model}).code, 0);
  const std::vector<std::string> tune_model = {"image",   "tune",    model,      "--text-tokens", "16",    "--size",
                                               "128x128", "--quick", "--device", "cuda",          "--json"};
  if (device->info().major != 9) return expect_error(tune_model, "there is nothing to tune", cache);

  const auto rows = json_lines(
      output_of({"image", "tune", "--synthetic", "tiny", "--policy", "quaspa,bf16", "--size", "128x128,256x256x2",
                 "--text-tokens", "16", "--quick", "--device", "cuda", "--explain", "--json"},
                cache));
  EXPECT_GE(rows.size(), 16u);
  const std::string path = rows.at(0).at("path");
  EXPECT_EQ(std::filesystem::path(path).parent_path(), dir.path() / "cache" / "profiles");
  for (const Json& row : rows) {
    EXPECT_GT(row.at("standard_us"), 0) << row;
    EXPECT_LE(row.at("tuned_us"), row.at("standard_us")) << row;
    EXPECT_GE(row.at("measured").size(), 2u) << row;
    EXPECT_EQ(row.at("measured")[0].at("plan"), row.at("default")) << row;
  }
  const auto stored = [&] { return calibrate::CudaProfile::parse(read_text(path), path).tensor_core; };
  EXPECT_EQ(stored().tunings().size(), rows.size());
  EXPECT_NO_THROW(stored().check_plans(path));
  // Products of another model add up; the same ones again are replaced.
  const auto more = json_lines(output_of(tune_model, cache));
  EXPECT_EQ(stored().tunings().size(), rows.size() + more.size());
  output_of(tune_model, cache);
  EXPECT_EQ(stored().tunings().size(), rows.size() + more.size());

  const auto bench = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"image", "bench", "--synthetic", "tiny", "--policy", "quaspa", "--size", "128x128",
                                 "--text-tokens", "16", "--runs", "1", "--device", "cuda", "--explain", "--json"});
    Json out = Json::object();
    for (const Json& row : json_lines(output_of(flags, cache))) out[std::string(row.at("part"))] = row.at("kernels");
    return kernels_of(out);
  };
  EXPECT_THAT(bench({}), AllOf(testing::SizeIs(testing::Ge(8)), Each(HasSubstr("; plan measured at "))));
  EXPECT_THAT(bench({"--no-profile"}), AllOf(testing::SizeIs(testing::Ge(8)), Each(HasSubstr("; plan by the model"))));

  // The same bits by every plan of every product.
  write_step(inputs, model::flux::read_config(io::ImageCheckpoint::open(model)));
  const auto step = [&](std::vector<std::string> flags, const char* words) {
    const std::string out = dir.file("out.safetensors");
    flags.insert(flags.begin(),
                 {"image", "step", model, "--inputs", inputs, "-o", out, "--device", "cuda", "--explain", "--json"});
    const Finished done = run_lacuna(flags, cache);
    EXPECT_EQ(done.code, 0) << done.err;
    EXPECT_THAT(done.err, HasSubstr(words));
    const auto lines = json_lines(done.out);
    EXPECT_THAT(kernels_of(lines.at(0).at("kernels")),
                Each(HasSubstr(lines.at(0).at("profile") == path ? "; plan measured at " : "; plan by the model")));
    return io::read_float_tensors(out).at("sample").values;
  };
  const auto expected = step({"--no-profile"}, "");
  EXPECT_EQ(step({}, ""), expected);
  calibrate::CudaProfile every = calibrate::CudaProfile::parse(read_text(path), path);
  for (size_t choice = 0; choice < 4; ++choice) {
    const auto before = every.tensor_core.tunings();
    for (const auto& [product, tuning] : before) {
      const auto plans = cuda::tensor_core_plans(product.operation, product.accumulate);
      every.tensor_core.set({product, plans[choice % plans.size()], tuning.standard_us, tuning.tuned_us});
    }
    calibrate::save_cuda_profile(path, every);
    EXPECT_EQ(step({}, ""), expected) << choice;
  }
  Json broken = Json::parse(every.to_json());
  broken["tensor_core"][0]["plan"]["tokens"] = 200;
  std::ofstream(path, std::ios::trunc) << broken.dump();
  EXPECT_EQ(step({}, "has no plan of"), expected);
  expect_error({"image", "step", model, "--inputs", inputs, "-o", dir.file("o"), "--device", "cuda", "--profile",
                dir.file("none.json")},
               "make it with `lacuna image tune MODEL --device cuda -o ", cache);
}

}  // namespace
}  // namespace lacuna::test
