// Several small numbers to a byte.
#include "compress/bits.h"

#include <gtest/gtest.h>

namespace lacuna::compress {
namespace {

TEST(Bits, ComeBackAndTakeTheirBytes) {
  for (const int bits : {1, 2, 4, 8})
    for (const int64_t width : {1, 2, 5, 7, 8, 9, 16, 17}) {
      const int64_t n = 6;
      // Every value occurs, and the largest beside zeros.
      const at::Tensor values = (at::arange(n * width).reshape({n, width}) * 37 % (1 << bits)).to(at::kByte);
      const at::Tensor packed = pack_bits(values, bits);
      EXPECT_EQ(packed.size(1), (width * bits + 7) / 8);
      EXPECT_TRUE(unpack_bits(packed, bits, width).equal(values)) << bits << ' ' << width;
      EXPECT_TRUE(unpack_bits(packed.narrow(0, 2, 3), bits, width).equal(values.narrow(0, 2, 3)));
    }
}

TEST(Bits, TheFirstIsInTheLowBits) {
  const auto bytes = [](std::initializer_list<int64_t> values) {
    return at::tensor(at::ArrayRef<int64_t>(values), at::kLong).to(at::kByte).unsqueeze(0);
  };
  EXPECT_TRUE(pack_bits(bytes({1, 15, 2}), 4).equal(bytes({0xf1, 0x02})));
  EXPECT_TRUE(pack_bits(bytes({1, 0, 0, 0, 0, 0, 0, 1, 1}), 1).equal(bytes({0x81, 0x01})));
}

TEST(Bits, OfNothingAreNothing) {
  const at::Tensor none = at::empty({0, 5}, at::kByte);
  EXPECT_TRUE(unpack_bits(pack_bits(none, 4), 4, 5).equal(none));
}

}  // namespace
}  // namespace lacuna::compress
