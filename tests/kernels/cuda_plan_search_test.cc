// The search for plans with a fake clock; what it finds on a card is in the tests of those who search.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <vector>

#include "kernels/cuda/plan_search.h"

namespace lacuna::cuda {
namespace {

using testing::ElementsAre;
using Plans = std::vector<int>;
using Stages = std::vector<std::vector<Candidates<int>>>;

Candidates<int> always(Plans candidates) {
  return [candidates](const int&) { return candidates; };
}

TEST(CudaPlanSearch, FindsEachProductsFastestPlan) {
  const auto measure = [](const Plans& p) { return 10.0 + std::abs(p[0] - 3) + std::abs(p[1] - 5); };
  Plans plans = {0, 0};
  const Candidates<int> all = always({1, 2, 3, 4, 5, 6});
  search_plans(plans, Stages{{all}, {all}}, measure);
  EXPECT_THAT(plans, ElementsAre(3, 5));
}

// The second product's plan only pays with the first one's, which only pays with the second one's first step.
TEST(CudaPlanSearch, ASecondRoundSeesWhatTheOthersBecame) {
  const auto measure = [](const Plans& p) {
    if (p == Plans{1, 1}) return 1.0;
    return p[1] == 1 ? 2.0 : p[0] == 1 ? 4.0 : 3.0;
  };
  const Stages stages = {{always({1})}, {always({1})}};
  Plans once = {0, 0}, twice = once;
  search_plans(once, stages, measure, {.rounds = 1});
  EXPECT_THAT(once, ElementsAre(0, 1));
  search_plans(twice, stages, measure, {.rounds = 2});
  EXPECT_THAT(twice, ElementsAre(1, 1));
}

TEST(CudaPlanSearch, GainsWithinTheNoiseAreNotTaken) {
  const std::vector<double> ms = {1000, 999, 997, 996};  // of plans 0 to 3
  const auto measure = [&](const Plans& p) { return ms[size_t(p[0])]; };
  Plans plans = {0};
  search_plans(plans, Stages{{always({1})}}, measure, {.noise = 0.002});
  EXPECT_THAT(plans, ElementsAre(0));
  search_plans(plans, Stages{{always({1, 2, 3})}}, measure, {.noise = 0.002});
  EXPECT_THAT(plans, ElementsAre(2)) << "the last one is no more than 0.1% faster than what is in use by then";
  search_plans(plans, Stages{{always({3})}}, measure, {.noise = 0});
  EXPECT_THAT(plans, ElementsAre(3));
  search_plans(plans, Stages{{always({3})}}, [](const Plans&) { return 1.0; }, {.noise = 0});
  EXPECT_THAT(plans, ElementsAre(3));
}

TEST(CudaPlanSearch, StagesStartFromTheBestSoFar) {
  std::vector<Plans> asked(2);
  const Candidates<int> first = [&](const int& best) {
    asked[0].push_back(best);
    return Plans{best + 10, best + 20};
  };
  const Candidates<int> second = [&](const int& best) {
    asked[1].push_back(best);
    return best == 0 ? Plans{} : Plans{best + 1};
  };
  Plans plans = {0};
  search_plans(plans, Stages{{first, second}}, [](const Plans& p) { return 100.0 - p[0]; });
  // Both candidates of a stage are made of what was best when it began; the second is faster.
  EXPECT_THAT(asked[0], ElementsAre(0, 21));
  EXPECT_THAT(asked[1], ElementsAre(20, 41));
  EXPECT_THAT(plans, ElementsAre(42));
}

TEST(CudaPlanSearch, WhatIsInUseIsNotMeasuredAgain) {
  std::vector<Plans> measured;
  const auto measure = [&](const Plans& p) {
    measured.push_back(p);
    return 1.0;
  };
  Plans plans = {7, 8};
  int steps = 0;
  search_plans(plans, Stages{{always({7, 1}), always({})}, {always({8})}}, measure,
               {.rounds = 2, .step = [&] { ++steps; }});
  EXPECT_THAT(measured, ElementsAre(Plans{7, 8}, Plans{1, 8}, Plans{1, 8}));
  EXPECT_THAT(plans, ElementsAre(7, 8));
  EXPECT_EQ(steps, 6);
  Plans none;
  search_plans(none, Stages{}, [](const Plans&) { return 1.0; });
  EXPECT_TRUE(none.empty());
}

TEST(CudaPlanSearch, GainsAreMeasuredAgainAndLuckIsGivenUp) {
  Plans plans = {2, 3, 0};
  const Plans standard = {0, 0, 0};
  std::vector<Plans> measured;
  // Plan 2 of the first product gains 1 ms, plan 3 of the second one nothing.
  const std::vector<PlanGain> gains = measure_gains(plans, standard, [&](const Plans& p) {
    measured.push_back(p);
    return 10.0 - (p[0] == 2);
  });
  EXPECT_THAT(plans, ElementsAre(2, 0, 0));
  ASSERT_EQ(gains.size(), 3u);
  EXPECT_EQ(gains[0].standard_ms, 10);
  EXPECT_EQ(gains[0].found_ms, 9);
  EXPECT_EQ(gains[1].standard_ms, 9);
  EXPECT_EQ(gains[1].found_ms, 9);
  EXPECT_EQ(gains[2].standard_ms, gains[2].found_ms);
  EXPECT_THAT(measured, ElementsAre(Plans{0, 3, 0}, Plans{2, 3, 0}, Plans{2, 0, 0}, Plans{2, 3, 0}, Plans{2, 0, 0}));
}

// Found plans that are slower together than others are together, though no single change shows it.
TEST(CudaPlanSearch, OthersAreTakenAllAtOnceOrNotAtAll) {
  int measured = 0;
  const auto measure = [&](const Plans& p) {
    ++measured;
    return p == Plans{1, 1, 1} ? 8.0 : 9.0 + p[0];
  };
  Plans plans = {2, 0, 3};
  double ms = 0;
  EXPECT_TRUE(take_if_faster(plans, {1, 1, 1}, measure, ms));
  EXPECT_EQ(plans, (Plans{1, 1, 1}));
  EXPECT_EQ(ms, 8);
  EXPECT_FALSE(take_if_faster(plans, {0, 1, 1}, measure, ms));
  EXPECT_EQ(plans, (Plans{1, 1, 1}));
  EXPECT_EQ(ms, 8);
  EXPECT_EQ(measured, 4);
  EXPECT_FALSE(take_if_faster(plans, {1, 1, 1}, measure, ms));
  EXPECT_EQ(measured, 5) << "what is in use is not measured again";
}

// ---- what is tried ----

TEST(CudaPlanSearch, EarlyCandidatesChangeNothingElse) {
  const GemvPlan plan{.warps = 4, .chunk = 16, .resident = 32, .segments = 5, .early_headers = 0.5f};
  std::set<float> codes;
  for (GemvPlan tried : early_candidates(plan)) {
    EXPECT_EQ(tried.early_headers, 1);
    codes.insert(tried.early_codes);
    tried.early_headers = plan.early_headers, tried.early_codes = plan.early_codes;
    EXPECT_EQ(tried, plan);
  }
  EXPECT_EQ(codes, (std::set{0.0f, 0.1f, 0.2f, 0.3f, 0.5f}));
  EXPECT_EQ(without_early_headers(plan).early_headers, 0);

  const GroupsPlan groups{16, 32, Split::slice, Math::dot, 9, 3};
  std::set<int> early;
  for (GroupsPlan tried : early_candidates(groups)) {
    early.insert(tried.early);
    tried.early = groups.early;
    EXPECT_EQ(tried, groups);
  }
  EXPECT_EQ(early, (std::set{0, 1, 2, 4, 8, 16, kMostEarly}));
}

/// Weights of so many records or chunks; only their numbers are looked at.
Groups weights_of(bool units, int64_t panels, int64_t count, int64_t quads = 0) {
  static const Quad kQuad;
  Groups out;
  out.panels = panels, out.K = 4096, out.group = 16, out.count = count;
  if (units) out.quads = &kQuad, out.quad_count = quads;
  return out;
}

TEST(CudaPlanSearch, BlocksAreThoseThatALaunchTakes) {
  const GroupsPlan stream{8, 24, Split::stream, Math::mma, 100}, slice{8, 24, Split::slice, Math::mma, 100};
  const auto blocks = [](const Groups& weights, GroupsPlan plan, int asked) {
    plan.blocks = asked;
    GroupsPlan found = fitted(weights, plan);
    const int out = found.blocks;
    found.blocks = asked;
    EXPECT_EQ(found, plan);
    return out;
  };
  const Groups chunks = weights_of(false, 16, 70), units = weights_of(true, 16, 900, 50);
  EXPECT_EQ(blocks(chunks, stream, 100), 70);
  EXPECT_EQ(blocks(chunks, stream, 70), 70);
  EXPECT_EQ(blocks(chunks, stream, 0), 1);
  EXPECT_EQ(blocks(chunks, slice, 100), 96);
  EXPECT_EQ(blocks(chunks, slice, 15), 16);
  EXPECT_EQ(blocks(units, stream, 100), 50);
  EXPECT_EQ(blocks(units, slice, 33), 33);
  EXPECT_EQ(blocks(units, slice, -1), 1);
  EXPECT_EQ(blocks(weights_of(false, 0, 0), stream, 7), 1);
}

TEST(CudaPlanSearch, EveryKernelOfGroupsIsTriedWithSeveralNumbersOfBlocks) {
  DeviceInfo device;
  device.multiprocessors = 132;
  for (const auto id : {layout::Id::gs4, layout::Id::gs8, layout::Id::gs16}) {
    const layout::Layout& layout = layout::get(id);
    for (const bool units : {false, true}) {
      if (units && id != layout::Id::gs4) continue;
      const Groups weights = weights_of(units, 48, 40000, 3000);
      for (const Split split : {Split::stream, Split::slice}) {
        GroupsPlan best = default_plan(device, layout, weights);
        best.split = split, best.early = 4;
        std::set<std::pair<int, int>> kernels, expected;
        for (const GroupsPlan& kernel : groups_plans(layout, units)) expected.emplace(kernel.warps, kernel.resident);
        std::set<int> blocks;
        for (const GroupsPlan& tried : kernel_candidates(device, layout, weights, best)) {
          EXPECT_EQ(tried.split, split);
          EXPECT_EQ(tried.early, 4);
          EXPECT_EQ(fitted(weights, tried), tried);
          EXPECT_LE(tried.blocks, filled(device, weights, tried).blocks);
          kernels.emplace(tried.warps, tried.resident);
          blocks.insert(tried.blocks);
        }
        EXPECT_EQ(kernels, expected);
        EXPECT_GE(blocks.size(), 3u);
      }
    }
  }
  const GroupsPlan fma{8, 16, Split::stream, Math::fma, 264};
  for (const GroupsPlan& tried :
       kernel_candidates(device, layout::get(layout::Id::gs4), weights_of(false, 48, 40000), fma)) {
    EXPECT_EQ(tried.math, Math::fma);
    EXPECT_EQ(tried.resident, 16);
  }
}

}  // namespace
}  // namespace lacuna::cuda
