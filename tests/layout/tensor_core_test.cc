#include "layout/tensor_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/e4m3.h"
#include "core/error.h"
#include "core/scalar.h"
#include "layout/two_of_four.h"
#include "tensor_core_weights.h"

namespace lacuna::layout {
namespace {

using test::tensor_core_layouts;
using test::tensor_core_weight;
using test::TensorCoreWeight;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

std::vector<std::byte> bytes(std::initializer_list<int> values) {
  std::vector<std::byte> out;
  for (const int value : values) out.push_back(std::byte(value));
  return out;
}

std::vector<std::byte> encode(Id id, const std::vector<float>& w, const std::vector<uint8_t>& keep = {}) {
  const Shape shape{1, int64_t(w.size())};
  std::vector<std::byte> out(size_t(get(id).size_bytes(shape)), std::byte{0xaa});
  encode_tensor_core(get(id), shape, w, keep, out);
  return out;
}

std::vector<float> decode(Id id, const std::vector<std::byte>& row, int64_t K) {
  std::vector<float> w(size_t(K), 12345.0f);
  decode_rows(get(id), {1, K}, row, 0, 1, w.data());
  return w;
}

// These bytes never change. The largest weight is 448 / 4, so that the scale is 0.25 and codes are those of 4 w.
TEST(TensorCoreLayouts, BytesMatchGolden) {
  const std::vector<float> w = {112, -0.25f, 0.5f, 0.0625f, -1, 3, -0.0f, 4, 2};  // K = 9: three groups
  const std::vector<uint8_t> keep = {1, 0, 0, 1, 0, 1, 1, 0, 1};
  // 0.25 = 0x3e800000. Codes: 448 = 0x7e, -1 = 0xb8, 2 = 0x40, 0.25 = 0x28, -4 = 0xc8, 12 = 0x54, 16 = 0x58, 8 = 0x50.
  EXPECT_EQ(encode(Id::f8, w), bytes({0, 0, 0x80, 0x3e, 0x7e, 0xb8, 0x40, 0x28, 0xc8, 0x54, 0x80, 0x58, 0x50}));
  // Places 0, 3 | 1, 2 | 0 and the zero past the end at 1: nibbles 0b1100, 0b1001, 0b0100.
  EXPECT_EQ(encode(Id::nm24_f8, w, keep), bytes({0, 0, 0x80, 0x3e, 0x9c, 0x04, 0x7e, 0x28, 0x54, 0x80, 0x50, 0x00}));
  // bf16: 112 = 0x42e0, 0.0625 = 0x3d80, 3 = 0x4040, -0 = 0x8000, 2 = 0x4000.
  EXPECT_EQ(encode(Id::nm24_bf16, w, keep),
            bytes({0x9c, 0x04, 0xe0, 0x42, 0x80, 0x3d, 0x40, 0x40, 0x00, 0x80, 0x00, 0x40, 0x00, 0x00}));
}

TEST(TensorCoreLayouts, Sizes) {
  const auto size = [](Id id, int64_t N, int64_t K) { return get(id).size_bytes({N, K}); };
  EXPECT_EQ(size(Id::f8, 3, 3072), 3 * (4 + 3072));
  EXPECT_EQ(size(Id::nm24_f8, 3, 3072), 3 * (4 + 1536 + 384));
  EXPECT_EQ(size(Id::nm24_bf16, 3, 3072), 3 * (3072 + 384));
  EXPECT_EQ(size(Id::f8, 7, 1), 7 * 5);
  EXPECT_EQ(size(Id::nm24_f8, 7, 1), 7 * (4 + 1 + 2));
  EXPECT_EQ(size(Id::nm24_bf16, 7, 5), 7 * (1 + 8));
  EXPECT_EQ(size(Id::nm24_f8, 0, 64), 0);
  EXPECT_EQ(get(Id::f8).bits_per_weight(), 8);
  EXPECT_EQ(get(Id::nm24_f8).bits_per_weight(), 5);
  EXPECT_EQ(get(Id::nm24_bf16).bits_per_weight(), 9);
  EXPECT_EQ(kept_weights(get(Id::nm24_f8), {3, 11}, {}), 3 * 6);
  EXPECT_EQ(kept_weights(get(Id::nm24_f8), {3, 9}, {}), 3 * 5);
  EXPECT_EQ(kept_weights(get(Id::f8), {3, 9}, {}), 27);
  for (const Id id : tensor_core_layouts()) {  // RECIPES 1
    EXPECT_THROW(get(id).size_bytes({8, kMost}), Error);
    EXPECT_THROW(get(id).size_bytes({int64_t{1} << 40, int64_t{1} << 30}), Error);
    EXPECT_THROW(get(id).size_bytes({-1, 4}), Error);
  }
}

// A weight is within 2^-4 of its code's value, relatively, or half of the least code's; a bf16 value within 2^-8.
// Quotient and product are rounded once each.
TEST(TensorCoreLayouts, KeptWeightsAreWithinHalfAStepAndDroppedOnesZero) {
  for (const Id id : tensor_core_layouts()) {
    for (const int64_t K : {1, 2, 3, 4, 5, 6, 7, 8, 64, 257, 576}) {
      const TensorCoreWeight w = tensor_core_weight(id, 9, K, 1);
      EXPECT_EQ(first_bad_row(*w.layout, w.shape, w.bytes), -1);
      int64_t kept = 0;
      for (int64_t n = 0; n < 9; ++n) {
        float most = 0;
        for (int64_t k = 0; k < K; ++k) most = std::max(most, std::abs(w.w[size_t(n * K + k)]));
        for (int64_t k = 0; k < K; ++k) {
          const auto i = size_t(n * K + k);
          if (!w.keep.empty() && w.keep[i] == 0) {
            EXPECT_EQ(std::bit_cast<uint32_t>(w.decoded[i]), 0u) << "+0";
            continue;
          }
          ++kept;
          const double exact = w.w[i], error = std::abs(w.decoded[i] - exact);
          const double bound = id == Id::nm24_bf16 ? std::abs(exact) * 0x1p-8
                                                   : std::max(std::abs(exact) * 0x1p-4, double(most) / 448 * 0x1p-10);
          EXPECT_LE(error, bound * (1 + 0x1p-20)) << get(id).name << " K " << K;
        }
      }
      EXPECT_EQ(kept, kept_weights(*w.layout, w.shape, {}));
      for (int64_t n = 0; n < 9 && !w.keep.empty(); ++n) {
        std::vector<uint8_t> keep(static_cast<size_t>(K));
        const TensorCoreRow map = tensor_core_row(*w.layout, K);
        read_keep(*w.layout, K, std::span(w.bytes).subspan(size_t(n * map.bytes), size_t(map.bytes)), keep);
        EXPECT_TRUE(std::equal(keep.begin(), keep.end(), w.keep.begin() + n * K));
      }
    }
  }
}

TEST(TensorCoreLayouts, TheScaleIsThatOfTheDenseRow) {
  const std::vector<float> w = {448, 1, 2, 3};
  const std::vector<std::byte> dense = encode(Id::f8, w), sparse = encode(Id::nm24_f8, w, {0, 1, 0, 1});
  EXPECT_TRUE(std::equal(dense.begin(), dense.begin() + 4, sparse.begin()));
  EXPECT_EQ(sparse[5], dense[5]);
  EXPECT_EQ(sparse[6], dense[7]);
}

// RECIPES 14 and 17.
TEST(TensorCoreLayouts, ZerosDenormalsAndLargestFloatsStayFinite) {
  for (const Id id : {Id::f8, Id::nm24_f8}) {
    const std::vector<uint8_t> keep = id == Id::f8 ? std::vector<uint8_t>{} : std::vector<uint8_t>{1, 1, 0, 0};
    for (const float value : {0.0f, 1e-40f, 3.4e38f}) {
      const std::vector<std::byte> row = encode(id, {value, -value, 0, 0}, keep);
      EXPECT_EQ(first_bad_row(get(id), {1, 4}, row), -1);
      const std::vector<float> w = decode(id, row, 4);
      EXPECT_NEAR(w[0], value, std::max(value * 0x1p-20f, 0x1p-136f));
      EXPECT_EQ(w[1], -w[0]);
    }
  }
  const std::vector<float> large =
      decode(Id::nm24_bf16, encode(Id::nm24_bf16, {3.4e38f, -3.4e38f, 0, 0}, {1, 1, 0, 0}), 4);
  EXPECT_TRUE(std::isfinite(large[0]) && std::isfinite(large[1]));
}

// RECIPES 21: what a 2:4 row holds comes back bit for bit.
TEST(TensorCoreLayouts, PrunedGroupsComeBackBitForBit) {
  const float a = 1.5f, b = -0.375f, z = -0.0f;
  const std::vector<std::vector<float>> groups = {{0, 0, 0, 0}, {0, 0, 0, a}, {a, 0, 0, 0}, {0, a, 0, 0}, {a, b, 0, 0},
                                                  {0, 0, a, b}, {z, 0, 0, 0}, {0, a, z, 0}, {0, 0, 0, z}, {b, 0, 0, a}};
  std::vector<float> w;
  for (const auto& group : groups) w.insert(w.end(), group.begin(), group.end());
  w.insert(w.end(), {a, z, 0});  // and a last group of three
  std::vector<uint8_t> keep(w.size());
  keep_nonzero(w, keep);
  EXPECT_EQ(find_bad_group(keep), -1);
  for (const Id id : {Id::nm24_bf16, Id::nm24_f8}) {
    const std::vector<float> got = decode(id, encode(id, w, keep), int64_t(w.size()));
    for (size_t k = 0; k < w.size(); ++k) {
      if (id == Id::nm24_bf16 || w[k] == 0) {
        EXPECT_EQ(std::bit_cast<uint32_t>(got[k]), std::bit_cast<uint32_t>(w[k])) << get(id).name << " " << k;
      }
    }
  }
}

TEST(TensorCoreLayouts, AGroupThatKeepsThreeIsRefusedByItsPlace) {
  const int64_t N = 40, K = 4096;
  std::vector<float> w(size_t(N * K), 1.0f);
  std::vector<uint8_t> keep(w.size());
  for (size_t i = 0; i < keep.size(); ++i) keep[i] = i % 4 < 2;
  keep[size_t(31 * K + 2050)] = 1;
  std::vector<std::byte> out(size_t(get(Id::nm24_f8).size_bytes({N, K})));
  EXPECT_THAT(
      [&] {
        encode_tensor_core(get(Id::nm24_f8), {N, K}, w, keep, out);
      },
      ThrowsMessage<Error>("row 31: the group of four at input 2048 keeps 3 weights; 2:4 needs exactly 2 of its 4"));
  EXPECT_THAT(
      [] {
        encode(Id::nm24_bf16, {1, 2, 3, 4, 5}, {1, 1, 0, 0, 0});
      },
      ThrowsMessage<Error>(HasSubstr("at input 4 keeps 0 weights; 2:4 needs exactly 1 of its 1")));
  EXPECT_THAT([] { encode(Id::nm24_f8, {1, 2, 3, 4}); }, ThrowsMessage<Error>(HasSubstr("a mask of 0 weights")));
  EXPECT_THAT([] { encode(Id::f8, {1, 2, 3, 4}, {1, 1, 0, 0}); }, ThrowsMessage<Error>(HasSubstr("which needs none")));
}

// RECIPES 5, 21: bytes that no encoder writes are found.
TEST(TensorCoreLayouts, DamagedRowsAreFound) {
  const int64_t K = 9;
  for (const Id id : tensor_core_layouts()) {
    const TensorCoreWeight w = tensor_core_weight(id, 5, K, 2);
    const TensorCoreRow map = tensor_core_row(*w.layout, K);
    const auto bad_with = [&](int64_t at, std::initializer_list<int> put) {
      std::vector<std::byte> damaged = w.bytes;
      for (int64_t i = 3 * map.bytes + at; const int value : put) damaged[size_t(i++)] = std::byte(value);
      return first_bad_row(*w.layout, w.shape, damaged);
    };
    if (map.scaled) {
      EXPECT_EQ(bad_with(0, {0, 0, 0x80, 0x7f}), 3) << "infinite scale";
      EXPECT_EQ(bad_with(0, {0, 0, 0xc0, 0x7f}), 3) << "NaN scale";
      EXPECT_EQ(bad_with(0, {0, 0, 0x80, 0xbf}), 3) << "negative scale";
      EXPECT_EQ(bad_with(map.values + 1, {0x7f}), 3);
      EXPECT_EQ(bad_with(map.values, {0xff}), 3);
    } else {
      EXPECT_EQ(bad_with(map.values, {0x80, 0x7f}), 3);
      EXPECT_EQ(bad_with(map.values + 2, {0xc0, 0xff}), 3);
    }
    if (map.sparse) {
      EXPECT_EQ(bad_with(map.index, {0x55}), 3) << "1, 1";
      EXPECT_EQ(bad_with(map.index, {0x41}), 3) << "1, 0";
      EXPECT_EQ(bad_with(map.index + 1, {0x44}), 3) << "bits of no group";
      EXPECT_EQ(bad_with(map.bytes - 1, {0x01}), 3) << "a weight past the end";
      EXPECT_EQ(bad_with(map.index, {0x44}), -1);
    }
    EXPECT_THAT(
        [&] {
          std::vector<std::byte> damaged = w.bytes;
          std::fill(damaged.begin(), damaged.end(), std::byte{0xff});
          check_bytes(*w.layout, w.shape, damaged);
        },
        ThrowsMessage<Error>(AllOf(HasSubstr("row 0"), HasSubstr("the file is damaged"))));
  }
}

// A last group that leaves out a weight it has room for, with zeros at the places past the end.
TEST(TensorCoreLayouts, ALastGroupThatDropsTooManyIsFound) {
  for (const Id id : {Id::nm24_f8, Id::nm24_bf16}) {
    for (const auto& [K, index] : {std::pair{1, 0x0e}, {1, 0x09}, {2, 0x0c}, {2, 0x0e}, {3, 0x0c}, {3, 0x0e}}) {
      std::vector<uint8_t> keep(size_t(K), 1);
      if (K == 3) keep[1] = 0;
      std::vector<std::byte> row = encode(id, std::vector<float>(size_t(K), 0.0f), keep);
      EXPECT_EQ(first_bad_row(get(id), {1, K}, row), -1);
      row[size_t(tensor_core_row(get(id), K).index)] = std::byte(index);
      EXPECT_EQ(first_bad_row(get(id), {1, K}, row), 0) << K << " " << index;
    }
  }
}

TEST(TwoOfFour, LargestScoresWinAndTheFirstOfEqualOnes) {
  std::vector<uint8_t> keep(11);
  keep_largest(std::vector<float>{1, 3, 2, 4, 5, 5, 5, 5, 0, 0, 1}, keep);
  EXPECT_EQ(keep, (std::vector<uint8_t>{0, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1}));
  keep.resize(5);
  keep_largest(std::vector<float>{0, 0, 0, 0, -1}, keep);
  EXPECT_EQ(keep, (std::vector<uint8_t>{1, 1, 0, 0, 1})) << "a last group of one keeps it";
}

TEST(TwoOfFour, NonzerosAreKeptAndThreeRefused) {
  std::vector<uint8_t> keep(8);
  keep_nonzero(std::vector<float>{0, 0, 1, 0, 0, -0.0f, 0, 0}, keep);
  EXPECT_EQ(keep, (std::vector<uint8_t>{1, 0, 1, 0, 1, 1, 0, 0}));
  EXPECT_THAT(
      [&] {
        keep_nonzero(std::vector<float>{0, 0, 1, 0, 2, -1, 0, 7}, keep);
      },
      ThrowsMessage<Error>(HasSubstr("at input 4 has 3 weights that are not 0")));
  EXPECT_EQ(find_bad_group(std::vector<uint8_t>{1, 1, 0, 0, 1, 0, 0}), 1);
}

}  // namespace
}  // namespace lacuna::layout
