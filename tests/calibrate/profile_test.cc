// Profiles: what is written is read again, models add up, and hostile files are refused with a reason.
#include "calibrate/profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "test_support.h"

namespace lacuna::calibrate {
namespace {

using kernels::Plan;
using nlohmann::json;
using testing::HasSubstr;
using testing::ThrowsMessage;

const Machine kHere{"A CPU (R) 5000", "avx2", 4, "1.2.3"};

GroupTuning group_of(const std::string& key) {
  GroupTuning group;
  group.key = key;
  group.name = "attn_output";
  group.bytes = 1234;
  group.levels = {0, 0.25, 0.5};
  group.noise = 0.003;
  group.plan = {.split = Plan::Split::rows, .chunk = 48, .prefetch = 16, .tile_rows = 512, .dense_below = 0.0625};
  group.measured.push_back({kernels::default_plan(), 1.5, {1.6, 1.25, 1.0}, 7});
  Plan other = group.plan;
  other.dense_below = 0;
  group.measured.push_back({other, 1.25, {1.3, 1.0, 0.75}, 9});
  return group;
}

Profile profile() {
  Profile out{kHere, {}};
  out.merge({group_of("zz4_k 512 x 64"), group_of("zz6_k 256+256 x 64")});
  return out;
}

void write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

TEST(Profile, IsReadAsItWasWritten) {
  const test::TempDir dir;
  const std::string path = dir.file("a/b/profile.json");
  EXPECT_EQ(load_profile(path, kHere), std::nullopt);
  save_profile(path, profile());
  const auto read = load_profile(path, kHere);
  ASSERT_TRUE(read);
  EXPECT_EQ(*read, profile());
  EXPECT_EQ(read->plans().all().at("zz4_k 512 x 64"), group_of("").plan);
  EXPECT_EQ(read->groups.begin()->second.chosen().dense_ms, 1.25);
}

TEST(Profile, ModelsAddUpAndNewerResultsReplaceOlderOnes) {
  Profile all = profile();
  GroupTuning again = group_of("zz4_k 512 x 64"), other = group_of("zz8 256 x 32");
  again.plan.dense_below = 0.5;
  all.merge({again, other});
  EXPECT_EQ(all.groups.size(), 3u);
  EXPECT_EQ(all.groups.at(again.key).plan.dense_below, 0.5);
  EXPECT_EQ(Profile::parse(all.to_json(), "p"), all);
}

TEST(Profile, FileNamesAreOfTheMachine) {
  EXPECT_EQ(profile_file_name(kHere), "a-cpu-r-5000-avx2-4-threads.json");
  EXPECT_EQ(profile_file_name({"../../x", "avx2", 4, ""}), "x-avx2-4-threads.json");
  EXPECT_LT(profile_file_name({std::string(5000, 'x'), "avx2", 4, ""}).size(), 200u);
}

TEST(Profile, ThoseOfAnotherMachineSaySo) {
  const test::TempDir dir;
  const std::string path = dir.file("p.json");
  const auto expect = [&](const Machine& machine, const std::string& words) {
    save_profile(path, {machine, {}});
    EXPECT_THAT([&] { load_profile(path, kHere); }, ThrowsMessage<Error>(HasSubstr(words)));
  };
  expect({"another CPU", "avx2", 4, "1.2.3"}, "is of CPU \"another CPU\"");
  expect({kHere.cpu, "avx512", 4, "1.2.3"}, "is of instruction set \"avx512\"");
  expect({kHere.cpu, "avx2", 5, "1.2.3"}, "is for 5 threads, this is a run with 4");
  expect({kHere.cpu, "avx2", 4, "1.2.2"}, "is of version \"1.2.2\"");
}

TEST(Profile, EveryTruncationIsRefused) {
  const std::string text = profile().to_json();
  for (size_t size = 0; size + 2 < text.size(); ++size)
    EXPECT_THROW(Profile::parse(std::string_view(text).substr(0, size), "p"), Error) << size;
}

TEST(Profile, NonsenseIsRefusedWithAReason) {
  const json good = json::parse(profile().to_json());
  ASSERT_NO_THROW(Profile::parse(good.dump(), "p"));
  const auto expect = [&](const char* pointer, const json& value, const std::string& words) {
    json bad = good;
    bad[json::json_pointer(pointer)] = value;
    EXPECT_THAT([&] { Profile::parse(bad.dump(), "p"); }, ThrowsMessage<Error>(HasSubstr(words))) << pointer << value;
  };
  const std::string group = "/groups/zz4_k 512 x 64";
  const auto in_group = [&](const char* pointer, const json& value, const std::string& words) {
    expect((group + pointer).c_str(), value, words);
  };
  expect("/lacuna_profile", 1, "format 1");
  expect("/lacuna_profile", "1", "must be an integer");
  expect("/version", 1, "must be a string");
  expect("/threads", 0, "0 threads");
  expect("/threads", 1e300, "must be an integer");
  expect("/threads", uint64_t(-1), "too large");
  expect("/groups", json::array(), "must be an object");
  in_group("", 5, "expected a JSON object");
  in_group("/levels", json::array(), "\"levels\" is empty");
  in_group("/levels", {0, 0.5, 0.25}, "ascend");
  in_group("/levels", {0.1, 0.2, 0.3}, "begin with 0");
  in_group("/levels", {0, 0.5, 1.5}, "below 1");
  in_group("/levels", {0, "x", 1.5}, "must hold numbers");
  in_group("/levels", {0, 0.5}, "3 times for 2 levels");
  in_group("/noise", nullptr, "\"noise\" is missing");
  in_group("/plan", nullptr, "\"plan\" is missing");
  in_group("/plan/split", "diagonals", "expected columns or rows");
  in_group("/plan/chunk", 20, "chunk = 20");
  in_group("/plan/chunk", int64_t{1} << 40, "chunk");
  in_group("/plan/chunk", -16, "chunk");
  in_group("/plan/prefetch", true, "must be an integer");
  in_group("/plan/prefetch", -1, "prefetch = -1");
  in_group("/plan/prefetch", int64_t{1} << 40, "prefetch");
  in_group("/plan/tile_rows", 100, "tile_rows = 100");
  in_group("/plan/tile_rows", 1e300, "must be an integer");
  in_group("/plan/dense_below", -0.5, "dense_below");
  in_group("/plan/dense_below", 1e300, "dense_below");
  in_group("/plan/tile_rows", 1024, "not among those measured");
  in_group("/measured", json::array(), "must begin with the default plan");
  in_group("/measured/0/plan/chunk", 48, "must begin with the default plan");
  in_group("/measured/1/dense_ms", 0, "a time of 0 ms");
  in_group("/measured/1/sparse_ms/1", -1, "a time of -1 ms");
  in_group("/measured/1/rounds", -1, "-1 rounds");
  for (const char* text :
       {"", "null", "[]", "5", "\"x\"", "{}", "{\"lacuna_profile\":1}", "\xff\xfe", "{\"a\":1,\"a\":2}",
        "{\"lacuna_profile\":99999999999999999999999}", "{\"lacuna_profile\":1e999}"})
    EXPECT_THROW(Profile::parse(text, "p"), Error) << text;
  std::string deep = "{\"groups\":";
  for (int i = 0; i < 100000; ++i) deep += "[";
  EXPECT_THAT([&] { Profile::parse(deep, "p"); }, ThrowsMessage<Error>(HasSubstr("nested deeper")));
}

TEST(Profile, FilesThatCannotBeReadAreErrors) {
  const test::TempDir dir;
  EXPECT_THROW(load_profile(dir.path().string(), kHere), Error) << "a folder";
  write(dir.file("p.json"), profile().to_json());
  EXPECT_EQ(load_profile(dir.file("p.json/below"), kHere), std::nullopt);
  EXPECT_THROW(save_profile(dir.file("p.json/below/q.json"), profile()), Error);
}

}  // namespace
}  // namespace lacuna::calibrate
