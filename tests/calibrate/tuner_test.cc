// The tuner on small groups: every plan is checked, one is chosen, and where skipping begins to pay.
#include "calibrate/tuner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "calibrate/cold_group.h"
#include "core/error.h"
#include "io/quantize.h"
#include "layout/zigzag.h"
#include "model/weight_groups.h"
#include "test_support.h"

namespace lacuna::calibrate {
namespace {

using kernels::Plan;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::string zigzag_copy(const test::TempDir& dir, const std::string& from) {
  const std::string out = dir.file("zz.gguf");
  ThreadPool pool(1);
  io::quantize(io::Checkpoint::open(from), out, {.layout = layout::Id::zz4_k, .progress = false}, pool);
  return out;
}

TuneOptions brief() {
  TuneOptions options;
  options.seconds = 0.01;
  options.cold_bytes = 1 << 20;
  options.progress = false;
  return options;
}

TEST(Tuner, CandidatesAreDistinctLegalAndBeginWithTheDefault) {
  for (const int64_t rows : {1, 3, 8, 70})
    for (const int threads : {1, 2, 5}) {
      const std::vector<Plan> plans = candidate_plans(rows, threads);
      EXPECT_EQ(plans[0], kernels::default_plan());
      for (size_t i = 0; i < plans.size(); ++i) {
        kernels::check_plan(plans[i]);
        EXPECT_LT(plans[i].tile_rows, std::max<int64_t>(1, rows * layout::kSuperRows));
        if (rows < threads) {
          EXPECT_EQ(plans[i].split, Plan::Split::columns);
        }
        for (size_t j = 0; j < i; ++j) EXPECT_NE(plans[i], plans[j]);
      }
    }
  const std::vector<Plan> plans = candidate_plans(70, 2);
  std::set<int64_t> tiles;
  for (const Plan& plan : plans) tiles.insert(plan.tile_rows);
  EXPECT_EQ(tiles, (std::set<int64_t>{0, 256, 1024, 2048, 35 * 256}));
  EXPECT_EQ(plans.size(), 15u * 2 * 4);
}

TEST(Tuner, DenseBelowIsInterpolated) {
  const std::vector<double> levels = {0, 0.25, 0.5};
  EXPECT_EQ(dense_below(1, levels, {0.99, 0.8, 0.6}), 0);
  EXPECT_DOUBLE_EQ(dense_below(1, levels, {1.1, 0.9, 0.6}), 0.125);
  EXPECT_DOUBLE_EQ(dense_below(1, levels, {1.3, 1.1, 0.7}), 0.25 + 0.25 * 0.1 / 0.4);
  EXPECT_EQ(dense_below(1, levels, {1.3, 1.2, 1.0}), 1) << "as fast as dense is no gain";
  EXPECT_DOUBLE_EQ(dense_below(1, levels, {1.1, 0.9, 1.2}), 1) << "the highest level decides";
}

TEST(Tuner, FindsAPlanForEveryDistinctGroup) {
  const test::TempDir dir;
  const io::Checkpoint checkpoint = io::Checkpoint::open(zigzag_copy(dir, test::fixture("text_model.gguf")));
  ThreadPool pool(1);  // two wait for each other for long where cores are busy
  const std::vector<GroupTuning> groups = tune(checkpoint, pool, brief());
  std::set<std::string> keys;
  for (int64_t layer = 0; layer < model::layer_count(checkpoint); ++layer)
    for (const model::WeightGroup& group : model::layer_groups(checkpoint, layer)) keys.insert(group.key());
  ASSERT_EQ(groups.size(), keys.size());
  for (const GroupTuning& group : groups) {
    EXPECT_TRUE(keys.contains(group.key)) << group.key;
    EXPECT_EQ(group.levels, (std::vector<double>{0, 0.25, 0.4, 0.5, 0.65}));
    EXPECT_EQ(group.standard().plan, kernels::default_plan());
    kernels::check_plan(group.plan);
    for (const PlanTimes& times : group.measured) {
      EXPECT_GE(times.rounds, 2);
      EXPECT_GT(times.dense_ms, 0);
      ASSERT_EQ(times.sparse_ms.size(), group.levels.size());
      for (const double ms : times.sparse_ms) EXPECT_GT(ms, 0);
    }
    EXPECT_DOUBLE_EQ(group.plan.dense_below,
                     dense_below(group.chosen().dense_ms, group.levels, group.chosen().sparse_ms));
  }
}

TEST(Tuner, ModelsThatCannotBeTunedSayHowToMakeOneThatCan) {
  ThreadPool pool(1);
  EXPECT_THAT([&] { tune(io::Checkpoint::open(test::fixture("text_model.gguf")), pool, brief()); },
              ThrowsMessage<Error>(testing::AllOf(HasSubstr("nothing to tune"), HasSubstr("zz4_k, zz5_k"),
                                                  HasSubstr("lacuna quantize MODEL --layout zz4_k"))));
  const test::TempDir dir;
  const io::Checkpoint checkpoint = io::Checkpoint::open(zigzag_copy(dir, test::fixture("text_model.gguf")));
  for (const std::vector<double>& levels : {std::vector<double>{0.5, 0.25}, {0.0}, {1.0}, {0.5, 0.5}}) {
    TuneOptions options = brief();
    options.levels = levels;
    EXPECT_THROW(tune(checkpoint, pool, options), Error);
  }
}

TEST(ColdGroup, PlansThatComputeSomethingElseAreRefused) {
  const test::TempDir dir;
  const io::Checkpoint checkpoint = io::Checkpoint::open(zigzag_copy(dir, test::fixture("text_model.gguf")));
  ThreadPool pool(2);
  std::vector<kernels::WeightView> parts = model::layer_groups(checkpoint, 0)[0].parts;
  const double levels[] = {0, 0.5};
  ColdGroup group({parts}, levels, 1 << 16, pool);
  const std::vector<Plan> plans = candidate_plans(group.rows(), 2);
  group.prepare(plans);
  EXPECT_GT(group.time_ms(plans.back(), -1), 0);
  EXPECT_GT(group.time_ms(plans[0], 1), 0);

  // NaN outputs equal nothing, not even themselves: what is wrong does not pass for right.
  std::vector<std::byte> broken(parts[0].bytes.begin(), parts[0].bytes.end());
  std::fill_n(broken.begin(), 4, std::byte{0x7f});
  broken[1] = std::byte{0x7e};
  parts[0].bytes = broken;
  ColdGroup wrong({parts}, levels, 1 << 16, pool);
  EXPECT_THAT([&] { wrong.prepare(plans); }, ThrowsMessage<Error>(HasSubstr("nothing was timed")));
}

}  // namespace
}  // namespace lacuna::calibrate
