#include "io/rope_scaling.h"

#include <gtest/gtest.h>

namespace lacuna::test {
namespace {

TEST(Llama3Scaling, KeepsFastStretchesSlowAndBlendsBetween) {
  const io::Llama3Scaling scaling{.factor = 8, .low_freq_factor = 1, .high_freq_factor = 4, .original_context = 8192};
  const auto with_turns = [&](double turns) { return scaling.multiplier(turns * 2 * std::numbers::pi / 8192); };
  EXPECT_EQ(with_turns(1000), 1);
  EXPECT_EQ(with_turns(4.001), 1);
  EXPECT_EQ(with_turns(0.999), 0.125);
  EXPECT_EQ(with_turns(0), 0.125);
  EXPECT_NEAR(with_turns(2.5), 0.5 + 0.5 / 8, 1e-12);
  EXPECT_NEAR(with_turns(1.75), 0.25 + 0.75 / 8, 1e-12);
}

}  // namespace
}  // namespace lacuna::test
