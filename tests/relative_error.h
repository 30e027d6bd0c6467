// tests/relative_error.h - how far one result is from another, as a share of its size.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <span>

namespace lacuna::test {

/// ||a - b|| / ||b||; fails the test where they are not of one length.
inline double relative_error(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  if (a.size() != b.size()) return NAN;
  double error = 0, square = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double difference = double(a[i]) - double(b[i]);
    error += difference * difference, square += double(b[i]) * double(b[i]);
  }
  return std::sqrt(error / square);
}

}  // namespace lacuna::test
