// eval/bandwidth.h
#include "eval/bandwidth.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace lacuna::eval {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

// Every read goes to memory, so no pattern is much faster than reading on. The wide factors are for other programs on
// the machine: what they catch is a wrong count of bytes.
TEST(Bandwidth, RandomColumnsAreOfTheOrderOfReadingOn) {
  ThreadPool pool(2);
  const double sequential = measure_read_gb_s(pool);
  ASSERT_GT(sequential, 0.1);
  for (const int64_t column_bytes : {int64_t{1000}, int64_t{100000}}) {
    for (const double share : {0.5, 1.0}) {
      const double rate = measure_column_read_gb_s(pool, column_bytes, share);
      EXPECT_GT(rate, 0.02 * sequential) << column_bytes << " bytes, " << share;
      EXPECT_LT(rate, 20 * sequential) << column_bytes << " bytes, " << share;
    }
  }
}

TEST(Bandwidth, ClockOfARealCore) {
  const double ghz = measure_clock_ghz();
  EXPECT_GT(ghz, 0.05);  // other programs may take most of the core
  EXPECT_LT(ghz, 8);
}

TEST(Bandwidth, RefusesWhatItCannotMeasure) {
  ThreadPool pool(1);
  const auto expect_refused = [&](int64_t bytes, double share) {
    EXPECT_THAT(([&] { measure_column_read_gb_s(pool, bytes, share); }),
                ThrowsMessage<Error>(HasSubstr("expected at least 64 bytes")))
        << bytes << " " << share;
  };
  expect_refused(63, 0.5);
  expect_refused(64, 0);
  expect_refused(64, 1.01);
}

}  // namespace
}  // namespace lacuna::eval
