// tests/host_device/products.h - what the host's device was asked to multiply.
#pragma once

#include <cstdint>

namespace lacuna::test {

/// Products of many tokens since this was set to {}.
struct Products {
  int64_t count = 0, most_outputs = 0;  // of one
};

inline Products& products() {
  static Products now;
  return now;
}

}  // namespace lacuna::test
