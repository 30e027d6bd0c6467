// tests/host_device/peers.h - whether the host's devices write into each other's memory.
#pragma once

namespace lacuna::test {

struct Peers {
  bool reach = false;  // the driver says that they can
  bool see = true;     // and they see what is written
  int prepared = 0, launches = 0;
};

inline Peers& peers() {
  static Peers now;
  return now;
}

}  // namespace lacuna::test
