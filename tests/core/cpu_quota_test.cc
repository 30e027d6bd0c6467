#include "core/cpu_quota.h"

#include <gtest/gtest.h>

#include <limits>

#include "core/thread_pool.h"

namespace lacuna {
namespace {

TEST(CpuQuota, IsRoundedUpToWholeCores) {
  EXPECT_EQ(cores_of_quota("150000 100000"), 2);
  EXPECT_EQ(cores_of_quota("200000 100000"), 2);
  EXPECT_EQ(cores_of_quota("1000 100000"), 1);
  EXPECT_EQ(cores_of_quota("9223372036854775807 1"), std::numeric_limits<int>::max());
  for (const char* none : {"", "max 100000", "100000", "100000 ", "100000 0", "-1 100000", "0 100000", "x y"})
    EXPECT_EQ(cores_of_quota(none), std::nullopt) << none;
  EXPECT_GE(usable_cores(), 1);
}

}  // namespace
}  // namespace lacuna
