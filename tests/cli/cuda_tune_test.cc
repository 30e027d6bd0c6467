// `tune --device cuda` and `bench --what decode --tune`, and what run and bench do with the card's profile: plans of
// group-sparse products.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "calibrate/cuda_profile.h"
#include "cli/profile.h"
#include "kernels/cuda_support.h"
#include "process.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

using Json = nlohmann::json;
using layout::Id;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

/// A cache folder of its own for what this process loads, with a profile of a gs4 product, and the warnings meanwhile.
class GroupsProfile : public testing::Test {
 protected:
  GroupsProfile() {
    ::setenv("LACUNA_CACHE", dir_.file("cache").c_str(), 1);
    spdlog::set_default_logger(
        std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(said_)));
    card_.name = "NVIDIA H200", card_.driver = "13.0", card_.major = 9, card_.multiprocessors = 132;
    profile_.machine = cli::this_machine(card_);
    plan_.blocks = 264;
    profile_.group_sparse.push_back({product_, plan_, 1.6, 1.5});
  }
  ~GroupsProfile() override {
    spdlog::set_default_logger(before_);
    ::unsetenv("LACUNA_CACHE");
  }

  std::string path() const { return cli::profile_path(profile_.machine); }
  /// Nothing is taken from the profile with this change, with one warning that has the words.
  void expect_unused(const std::function<void(Json&)>& change, const std::string& words) {
    Json json = Json::parse(profile_.to_json());
    change(json);
    calibrate::save_cuda_profile(path(), profile_);  // makes the folder
    std::ofstream(path(), std::ios::trunc) << json.dump();
    said_.str("");
    const cli::CudaPlans found = cli::load_cuda_plans({}, card_);
    EXPECT_TRUE(found.plans.empty()) << words;
    EXPECT_EQ(found.source, "default plans: " + path() + " is not used");
    EXPECT_THAT(said_.str(), AllOf(HasSubstr("the profile is not used: "), HasSubstr(words),
                                   HasSubstr("make a new one with `lacuna tune MODEL --device cuda`")));
    EXPECT_EQ(std::ranges::count(said_.str(), '\n'), 1) << said_.str();
  }

  TempDir dir_;
  cuda::DeviceInfo card_;
  const cuda::GroupsProduct product_{Id::gs4, 48, 4096, 16, 50};
  cuda::GroupsPlan plan_ = cuda::groups_plans(layout::get(Id::gs4), true).back();
  calibrate::CudaProfile profile_;
  std::ostringstream said_;

 private:
  std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
};

TEST_F(GroupsProfile, IsTakenUnlessFlagsSayOtherwise) {
  calibrate::save_cuda_profile(path(), profile_);
  const auto found_by = [&](const cli::ProfileFlags& flags) {
    const cli::CudaPlans plans = cli::load_cuda_plans(flags, card_);
    const cuda::GroupsPlan* const found = plans.plans.find_groups(product_);
    return std::pair(plans.source, found == nullptr ? cuda::GroupsPlan{} : *found);
  };
  EXPECT_EQ(found_by({}), std::pair(path(), plan_));
  cli::ProfileFlags none, fixed;
  none.none = true, fixed.deterministic = true;
  EXPECT_EQ(found_by(none), std::pair(std::string("default plans (--no-profile)"), cuda::GroupsPlan{}));
  EXPECT_EQ(found_by(fixed), std::pair(std::string("default plans (--deterministic)"), cuda::GroupsPlan{}));
  EXPECT_EQ(said_.str(), "");
}

TEST_F(GroupsProfile, WhatCannotBeUsedIsLeftOutWithOneWarning) {
  const auto entry = [](Json& json) -> Json& { return json["group_sparse"][0]; };
  expect_unused([&](Json& j) { entry(j)["plan"]["warps"] = 7; },
                "gs4 48 x 4096, groups of 16, 50% kept: no kernel has the plan stream-K, 264 blocks, 7 warps");
  expect_unused([&](Json& j) { entry(j)["plan"]["math"] = "mma"; }, "no kernel has the plan");
  expect_unused([&](Json& j) { entry(j)["group_size"] = 8; }, "no kernel has the plan");  // those are chunks
  expect_unused([&](Json& j) { entry(j)["plan"]["blocks"] = 0; }, "\"blocks\" is 0");
  expect_unused([&](Json& j) { entry(j)["plan"]["split"] = 1; }, "split");
  expect_unused([&](Json& j) { entry(j)["kept_percent"] = -5; }, "\"kept_percent\" is -5");
  expect_unused([&](Json& j) { entry(j)["layout"] = "q4_K"; }, "is no group-sparse layout");
  expect_unused([&](Json& j) { j["group_sparse"] = 3; }, "group_sparse");
}

/// A group-sparse model and a cache folder of its own, on a card.
class TuneCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda_device(&reason) == nullptr) GTEST_SKIP() << "SKIPPED: " << reason;
  }
  std::string model(const char* layout) const {
    const std::string path = dir_.file(std::string(layout) + ".gguf");
    std::vector<std::string> command = {"quantize", fixture("text_model.gguf"), "--layout", layout, "-o", path};
    if (layout[0] == 'g') command.insert(command.end(), {"--group-size", "16"});
    output_of(command);
    return path;
  }
  std::vector<Json> bench(const std::string& path, std::vector<std::string> flags) const {
    flags.insert(flags.begin(), {"bench", path, "--device", "cuda", "--what", "decode", "--gen", "4", "--context", "4",
                                 "--runs", "1", "--json"});
    return json_lines(output_of(flags, cache_));
  }
  /// What run writes, to stdout and with --explain to stderr.
  Finished run(const std::string& path, std::vector<std::string> flags) const {
    flags.insert(flags.begin(),
                 {"run", path, "-p", "The", "-n", "8", "--temp", "0", "--ignore-eos", "--device", "cuda", "--explain"});
    Finished done = run_lacuna(flags, cache_);
    EXPECT_EQ(done.code, 0) << done.err;
    return done;
  }

  TempDir dir_;
  const RunOptions cache_{.environment = {{"LACUNA_CACHE", dir_.file("cache")}}};
};

TEST_F(TuneCuda, StoresPlansOfGroupSparseProductsThatRunAndBenchUse) {
  for (const char* layout : {"gs4", "gs8"}) {  // units and chunks; the second model's products are added
    SCOPED_TRACE(layout);
    const std::string path = model(layout);
    const auto rows = json_lines(output_of({"tune", path, "--device", "cuda", "--json"}, cache_));
    ASSERT_EQ(rows.size(), 4u) << "q+k+v, output, gate+up, down";
    const std::string file = rows[0].at("path");
    const auto stored = [&] { return calibrate::CudaProfile::parse(read_text(file), file).group_sparse; };
    EXPECT_EQ(stored().size(), layout == std::string("gs4") ? 4u : 8u);
    for (const Json& row : rows) {
      EXPECT_EQ(row.at("layout"), layout);
      EXPECT_EQ(row.at("group_size"), 16);
      EXPECT_EQ(row.at("kept_percent"), 100);
      EXPECT_GT(row.at("standard_ms"), 0);
      EXPECT_LE(row.at("tuned_ms"), row.at("standard_ms"));
      EXPECT_THAT(std::string(row.at("product")), HasSubstr("groups of 16, 100% kept"));
    }
    for (const auto& tuning : stored()) EXPECT_NO_THROW(cuda::check_plan(tuning.product, tuning.plan));

    // A plan that no search starts from, so that --explain tells it from the default one.
    calibrate::CudaProfile profile = calibrate::CudaProfile::parse(read_text(file), file);
    for (model::CudaGroupsTuning& tuning : profile.group_sparse) tuning.plan.early = 3;
    calibrate::save_cuda_profile(file, profile);
    const Finished tuned = run(path, {}), standard = run(path, {"--no-profile"}),
                   fixed = run(path, {"--deterministic"});
    EXPECT_THAT(tuned.err, AllOf(HasSubstr("profile: " + file), HasSubstr(", 3 early")));
    EXPECT_THAT(standard.err, AllOf(HasSubstr("default plans (--no-profile)"), Not(HasSubstr(", 3 early"))));
    EXPECT_THAT(fixed.err, AllOf(HasSubstr("default plans (--deterministic)"), Not(HasSubstr(", 3 early"))));
    for (const Json& row : bench(path, {})) EXPECT_THAT(std::string(row.at("plans")), HasSubstr(", 3 early"));
    for (const Json& row : bench(path, {"--no-profile"}))
      EXPECT_THAT(std::string(row.at("plans")), Not(HasSubstr(", 3 early")));

    calibrate::CudaProfile broken = profile;
    broken.group_sparse.back().plan.warps = 7;
    calibrate::save_cuda_profile(file, broken);
    EXPECT_THAT(run(path, {}).err, AllOf(HasSubstr("no kernel has the plan"), HasSubstr("is not used")));
    calibrate::save_cuda_profile(file, profile);
  }
}

TEST_F(TuneCuda, BenchFindsPlansOfGroupSparseProducts) {
  for (const char* layout : {"gs4", "gs8", "gs16"}) {
    SCOPED_TRACE(layout);
    const auto rows = bench(model(layout), {"--tune"});
    ASSERT_EQ(rows.size(), 2u);
    for (const Json& row : rows) {
      EXPECT_EQ(row.at("checked"), true);
      EXPECT_GT(row.at("median_ms"), 0);
      EXPECT_THAT(std::string(row.at("plans")),
                  AllOf(HasSubstr("plans found first (--tune)"),
                        HasSubstr(std::string("ffn_down: ") + layout + " with groups of 16, ")));
    }
  }
  expect_error({"bench", model("q8_0"), "--device", "cuda", "--what", "decode", "--tune"},
               "has neither zigzag nor group-sparse weights", cache_);
  expect_error({"tune", model("q8_0"), "--device", "cuda"}, "has neither zigzag nor group-sparse weights", cache_);
  expect_error({"tune", model("gs4"), "--device", "cuda", "--levels", "50"}, "leave out --levels", cache_);
}

}  // namespace
}  // namespace lacuna::test
