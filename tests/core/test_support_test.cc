// The helpers of the tests are code too.
#include "test_support.h"

namespace lacuna::test {
namespace {

TEST(Largest, KeepsTheLargestValue) {
  Largest largest;
  EXPECT_EQ(largest.value(), 0);
  for (const double value : {1.0, 3.0, 2.0}) largest.add(value);
  EXPECT_EQ(largest.value(), 3);
}

TEST(Largest, NanSticks) {
  Largest largest;
  for (const double value : {1.0, std::nan(""), 3.0, 1e300}) largest.add(value);
  EXPECT_TRUE(std::isnan(largest.value()));
  EXPECT_FALSE(largest.value() <= 1) << "a bound accepts NaN";
}

}  // namespace
}  // namespace lacuna::test
