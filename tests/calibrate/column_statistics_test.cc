#include "calibrate/column_statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/error.h"

namespace lacuna::calibrate {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(ColumnStatistics, NormsAndEntropiesByHand) {
  // Columns: 3 4 0 0 | 1 1 1 1 | 0 1 0 1 | 0 1 2 3; rows 5 apart.
  const std::vector<float> x = {3, 1, 0, 0, 9, 4, 1, 1, 1, 9, 0, 1, 0, 2, 9, 0, 1, 1, 3, 9};
  ColumnStatistics statistics(4);
  statistics.add(x.data(), 5, 3);
  statistics.add(x.data() + 15, 5, 1);
  EXPECT_EQ(statistics.tokens(), 4);
  const std::vector<float> norms = statistics.norms();
  EXPECT_EQ(norms[0], 5);
  EXPECT_EQ(norms[1], 2);
  EXPECT_FLOAT_EQ(norms[2], std::sqrt(2.0f));
  EXPECT_FLOAT_EQ(norms[3], std::sqrt(14.0f));
  EXPECT_THAT([&] { statistics.entropies(); }, ThrowsMessage<Error>(HasSubstr("0 tokens were counted")));
  statistics.count(x.data(), 5, 4);
  const std::vector<float> entropies = statistics.entropies();
  EXPECT_FLOAT_EQ(entropies[0], float(1.5 * std::log(2)));  // shares 1/4, 1/4, 1/2
  EXPECT_EQ(entropies[1], 0);
  EXPECT_FLOAT_EQ(entropies[2], float(std::log(2)));
  EXPECT_FLOAT_EQ(entropies[3], float(2 * std::log(2)));
}

TEST(ColumnStatistics, BinsAreEqualAndTheLargestValueIsInTheLast) {
  std::vector<float> x;
  for (int i = 0; i <= 1000; ++i) x.push_back(float(i) / 1000);
  ColumnStatistics statistics(1);
  statistics.add(x.data(), 1, int64_t(x.size()));
  statistics.count(x.data(), 1, int64_t(x.size()));
  EXPECT_NEAR(statistics.entropies()[0], std::log(kEntropyBins), 0.01)
      << "10 values a bin, one more or less by rounding";
}

// RECIPES 11: caught with its place, and nothing of the batch counts.
TEST(ColumnStatistics, RefusesWhatIsNotFinite) {
  std::vector<float> x = {1, 2, 3, 4};
  ColumnStatistics statistics(2);
  statistics.add(x.data(), 2, 2);
  x[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT([&] { statistics.add(x.data(), 2, 2); }, ThrowsMessage<Error>(HasSubstr("token 3: input 1 is nan")));
  x[3] = std::numeric_limits<float>::infinity();
  EXPECT_THROW(statistics.add(x.data(), 2, 2), Error);
  EXPECT_EQ(statistics.tokens(), 2);
  EXPECT_FLOAT_EQ(statistics.norms()[0], std::sqrt(10.0f));
}

TEST(ColumnStatistics, NoTokens) {
  const ColumnStatistics statistics(3);
  EXPECT_EQ(statistics.norms(), std::vector<float>(3, 0.0f));
  EXPECT_EQ(statistics.entropies(), std::vector<float>(3, 0.0f));
}

}  // namespace
}  // namespace lacuna::calibrate
