#include "compress/samples.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "core/error.h"

namespace lacuna::compress {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(ChooseSamples, TakesAllWindowsWhereTheyAreJustEnough) {
  const Samples samples = choose_samples(35, {.samples = 3, .seq_len = 10}, "text");
  EXPECT_THAT(samples.first, ElementsAre(0, 10, 20));
  EXPECT_EQ(samples.tokens(), 30);
  EXPECT_EQ(samples.describe(), "3 windows of 10 tokens, 30 of the text's 35 tokens (85.7%), none twice");
}

TEST(ChooseSamples, TellsOfAShortfall) {
  const Samples samples = choose_samples(25, {.samples = 128, .seq_len = 10}, "text");
  EXPECT_EQ(samples.count(), 2);
  EXPECT_EQ(samples.asked, 128);
}

TEST(ChooseSamples, ChoosesDistinctWindowsBySeed) {
  std::set<std::vector<int64_t>> seen;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Samples samples = choose_samples(1000, {.samples = 5, .seq_len = 10, .seed = seed}, "text");
    EXPECT_EQ(samples.count(), 5);
    EXPECT_TRUE(std::is_sorted(samples.first.begin(), samples.first.end()));
    EXPECT_EQ(std::set<int64_t>(samples.first.begin(), samples.first.end()).size(), 5U);
    for (const int64_t first : samples.first) {
      EXPECT_EQ(first % 10, 0);
      EXPECT_LE(first + 10, 1000);
    }
    EXPECT_EQ(samples.first, choose_samples(1000, {.samples = 5, .seq_len = 10, .seed = seed}, "text").first);
    seen.insert(samples.first);
  }
  EXPECT_GE(seen.size(), 19U);
}

TEST(ChooseSamples, RefusesATextWithoutAWholeWindow) {
  for (const int64_t tokens : {0, 1, 9}) {
    try {
      choose_samples(tokens, {.samples = 1, .seq_len = 10}, "short.txt");
      FAIL() << tokens;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("short.txt: has " + std::to_string(tokens) + " tokens, a window needs 10"));
    }
  }
}

}  // namespace
}  // namespace lacuna::compress
