// tests/layout/grouped_test.cc - gq, bm and nm24_q4: bytes, round trips, what is refused.
#include "layout/grouped.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "grouped_weights.h"
#include "layout/bm.h"
#include "layout/gq.h"
#include "layout/nm24_q4.h"
#include "layout/rows.h"

namespace lacuna::layout {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::vector<Id> codes_layouts() { return {Id::gq2, Id::gq3, Id::gq4, Id::gq8, Id::bm2, Id::bm3, Id::bm4, Id::bm8}; }

/// A solution with codes, scales and zeros of every kind.
struct Solution {
  Shape shape;
  std::vector<uint8_t> code, keep;
  std::vector<float> scale, zero, weight;  // weight: [N, K]
  GroupedCodes codes() const { return {code, scale, zero, keep}; }
};

Solution random_solution(int bits, Shape shape, int64_t group_size, double sparsity, uint64_t seed,
                         bool whole_zeros = false) {
  Rng rng(seed);
  const auto [N, K] = shape;
  const int64_t groups = group_count(K, group_size), g = whole_group(K, group_size);
  const uint64_t levels = uint64_t{1} << bits;
  Solution out{shape, {}, {}, {}, {}, {}};
  for (int64_t i = 0; i < N * groups; ++i) {
    out.scale.push_back(to_float(to_f16(float(rng.normal() * 0.01))));
    const double zero = double(rng.below(levels)) + (whole_zeros ? 0.0 : rng.normal() * 0.25);
    out.zero.push_back(to_float(to_f16(float(zero))));
  }
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t k = 0; k < K; ++k) {
      out.code.push_back(uint8_t(rng.below(levels)));
      out.keep.push_back(rng.uniform() >= sparsity);
      const auto i = size_t(n * groups + k / g);
      out.weight.push_back(out.keep.back() ? out.scale[i] * (float(out.code.back()) - out.zero[i]) : 0.0f);
    }
  }
  if (sparsity == 0) out.keep.clear();
  return out;
}

std::vector<float> decode(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes) {
  std::vector<float> out(size_t(shape.N * shape.K), 12345.0f);
  decode_rows(layout, shape, bytes, 0, shape.N, out.data(), params);
  return out;
}

/// Equal to the last bit, but for the sign of a kept zero.
void expect_same(std::span<const float> got, std::span<const float> expected, std::span<const uint8_t> keep,
                 const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i], expected[i]) << what << " at " << i;
    ASSERT_FALSE(!keep.empty() && keep[i] == 0 && std::signbit(got[i])) << what << " at " << i;
  }
}

std::vector<std::byte> bytes_of(std::initializer_list<int> values) {
  std::vector<std::byte> out;
  for (const int value : values) out.push_back(std::byte(value));
  return out;
}

// ---- golden bytes: these never change ----

TEST(Gq, BytesMatchGolden) {
  // Rows of 5 inputs in groups of 3: scales 1, 0.5; zeros 8, 1.5.
  const std::vector<uint8_t> code = {1, 2, 3, 4, 15};
  const std::vector<float> scale = {1, 0.5f}, zero = {8, 1.5f};
  std::vector<std::byte> out;
  const Params params = pack_grouped(get(Id::gq4), {1, 5}, {.group_size = 3}, {code, scale, zero}, out);
  EXPECT_EQ(params, (Params{.group_size = 3}));
  EXPECT_EQ(out, bytes_of({0x00, 0x3c, 0x00, 0x38, 0x00, 0x48, 0x00, 0x3e, 0x21, 0x43, 0x0f, 0x00}));
  EXPECT_EQ(decode(get(Id::gq4), {1, 5}, params, out), (std::vector<float>{-7, -6, -5, 1.25f, 6.75f}));

  // 3 bits: 1, 2, 3, 4, 7 = 001 010 011 100 111 from the low end: 0b111100011010001 = 0x78d1.
  const std::vector<uint8_t> three = {1, 2, 3, 4, 7};
  pack_grouped(get(Id::gq3), {1, 5}, {.group_size = 3}, {three, scale, zero}, out);
  EXPECT_EQ(out, bytes_of({0x00, 0x3c, 0x00, 0x38, 0x00, 0x48, 0x00, 0x3e, 0xd1, 0x78}));
  const std::vector<uint8_t> two = {1, 2, 3, 0, 3};
  pack_grouped(get(Id::gq2), {1, 5}, {.group_size = 3}, {two, scale, zero}, out);
  EXPECT_EQ(out, bytes_of({0x00, 0x3c, 0x00, 0x38, 0x00, 0x48, 0x00, 0x3e, 0x39, 0x03}));
  const std::vector<uint8_t> eight = {1, 2, 3, 0, 255};
  pack_grouped(get(Id::gq8), {1, 5}, {.group_size = 0}, {eight, std::span(scale).first(1), std::span(zero).first(1)},
               out);
  EXPECT_EQ(out, bytes_of({0x00, 0x3c, 0x00, 0x48, 1, 2, 3, 0, 255, 0}));
}

TEST(Bm, BytesMatchGolden) {
  // Two rows of 11 inputs; the first keeps 1, 3 and 10, the second 9 of them.
  const std::vector<uint8_t> keep = {0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1,  //
                                     1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0};
  std::vector<uint8_t> code(22, 9);
  for (int k = 0; k < 11; ++k) code[size_t(11 + k)] = uint8_t(k);
  code[1] = 5, code[3] = 6, code[10] = 7;
  const std::vector<float> scale = {1, 0.5f}, zero = {8, 2};
  std::vector<std::byte> out;
  const Params params = pack_grouped(get(Id::bm4), {2, 11}, {}, {code, scale, zero, keep}, out);
  EXPECT_EQ(params, (Params{.octets = 3, .nnz = 12}));
  std::vector<std::byte> expected(128 + 12);
  const auto put = [&](size_t at, std::initializer_list<int> values) {
    for (const int value : values) expected[at++] = std::byte(value);
  };
  put(4, {1, 0, 0, 0, 3});
  put(32, {0x00, 0x3c, 0x00, 0x38});
  put(64, {0x00, 0x48, 0x00, 0x40});
  put(96, {0x0a, 0x04, 0xff, 0x02});
  put(128, {0x65, 0x07, 0, 0, 0x10, 0x32, 0x54, 0x76, 0x09, 0, 0, 0});
  EXPECT_EQ(out, expected);
  const std::vector<float> w = decode(get(Id::bm4), {2, 11}, params, out);
  EXPECT_EQ(w, (std::vector<float>{0,  -3,    0, -2,   0, 0,    0, 0,    0, 0,    -1,  //
                                   -1, -0.5f, 0, 0.5f, 1, 1.5f, 2, 2.5f, 0, 3.5f, 0}));

  const std::vector<float> values = {1, -2, 0.5f};
  const std::vector<uint8_t> mask = {0, 1, 1};
  const Params plain = pack_values(get(Id::bm16), {1, 3}, {}, values, mask, out);
  EXPECT_EQ(plain, (Params{.octets = 1, .nnz = 2}));
  expected.assign(64 + 16, std::byte{0});
  put(4, {1});
  put(32, {0x06});
  put(64, {0x00, 0xc0, 0x00, 0x38});
  EXPECT_EQ(out, expected);
  EXPECT_EQ(decode(get(Id::bm16), {1, 3}, plain, out), (std::vector<float>{0, -2, 0.5f}));
}

TEST(Nm24Q4, BytesMatchGolden) {
  // Groups of four keep (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), then again; codes 0..15, 0..15.
  constexpr int kPairs[6][2] = {{0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3}};
  std::vector<uint8_t> code(64, 3), keep(64, 0);
  for (size_t four = 0; four < 16; ++four) {
    for (size_t i = 0; i < 2; ++i) {
      const size_t k = 4 * four + size_t(kPairs[four % 6][i]);
      keep[k] = 1;
      code[k] = uint8_t((2 * four + i) % 16);
    }
  }
  const std::vector<float> scale = {0.5f}, zero = {8};
  std::vector<std::byte> out;
  const Params params = pack_grouped(get(Id::nm24_q4), {1, 64}, {.group_size = 64}, {code, scale, zero, keep}, out);
  EXPECT_EQ(params, Params{});
  std::vector<std::byte> expected = bytes_of({0x00, 0x38, 0x84, 0x9c, 0xed, 0x84, 0x9c, 0xed, 0x84, 0x9c});
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 8; ++i) expected.push_back(std::byte(2 * i | (2 * i + 1) << 4));
  EXPECT_EQ(out, expected);
  const std::vector<float> w = decode(get(Id::nm24_q4), {1, 64}, params, out);
  for (size_t k = 0; k < 64; ++k) EXPECT_EQ(w[k], keep[k] ? 0.5f * float(code[k] - 8) : 0.0f) << k;
}

// ---- round trips ----

// RECIPES 8, 15: every group size with every row length.
TEST(PackGrouped, EveryShapeAndGroupComesBack) {
  for (const Id id : codes_layouts()) {
    const Layout& layout = get(id);
    const bool masked = layout.family == Family::bitmask;
    for (const int64_t K : {1, 255, 257, 576, 4544}) {
      for (const int64_t N : {1, 3}) {
        for (const int64_t group_size :
             {int64_t{16}, int64_t{32}, int64_t{64}, int64_t{128}, int64_t{256}, K, int64_t{0}}) {
          for (const double sparsity : {0.0, 0.5, 0.97}) {
            if (sparsity > 0 && !masked) continue;
            const std::string what = fmt::format("{} [{}, {}] g{} {}", layout.name, N, K, group_size, sparsity);
            const Solution s = random_solution(layout.bits, {N, K}, group_size, sparsity, uint64_t(N * K + group_size));
            std::vector<std::byte> bytes;
            const Params params = pack_grouped(layout, s.shape, {.group_size = group_size}, s.codes(), bytes);
            ASSERT_EQ(int64_t(bytes.size()), layout.size_bytes(s.shape, params)) << what;
            ASSERT_NO_FATAL_FAILURE(expect_same(decode(layout, s.shape, params, bytes), s.weight, s.keep, what));
            ASSERT_EQ(first_bad_row(layout, s.shape, bytes, params), -1) << what;
            const int64_t kept = s.keep.empty() ? N * K : std::count(s.keep.begin(), s.keep.end(), 1);
            ASSERT_EQ(kept_weights(layout, s.shape, params), kept) << what;
            // The arithmetic of the headers.
            const int64_t groups = group_count(K, group_size);
            if (masked) {
              ASSERT_LE(int64_t(bytes.size()),
                        4 * (N + 1) + 4 * N * groups + N * (K / 8 + 1) + 4 * 31 + (kept + 7 * N) * layout.bits / 8)
                  << what;
            } else {
              ASSERT_EQ(int64_t(bytes.size()), N * (4 * groups + (K * layout.bits + 15) / 16 * 2)) << what;
            }
          }
        }
      }
    }
  }
}

TEST(PackGrouped, RowsAloneAndThreadsGiveTheSameBytes) {
  ThreadPool pool(2);
  for (const Id id : codes_layouts()) {
    const Layout& layout = get(id);
    const bool masked = layout.family == Family::bitmask;
    const Solution s = random_solution(layout.bits, {67, 257}, 64, masked ? 0.6 : 0.0, 3);
    std::vector<std::byte> one, two;
    const Params params = pack_grouped(layout, s.shape, {.group_size = 64}, s.codes(), one);
    EXPECT_EQ(pack_grouped(layout, s.shape, {.group_size = 64}, s.codes(), two, &pool), params);
    EXPECT_EQ(one, two) << layout.name;
    std::vector<float> part(5 * 257);
    decode_rows(layout, s.shape, one, 60, 5, part.data(), params);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), s.weight.begin() + 60 * 257)) << layout.name;
  }
}

// RECIPES 13, 14: rows, groups and matrices without a weight.
TEST(PackGrouped, NothingKept) {
  for (const Id id : {Id::bm2, Id::bm3, Id::bm4, Id::bm8, Id::bm16}) {
    const Layout& layout = get(id);
    for (const int64_t K : {1, 64, 257}) {
      std::vector<uint8_t> keep(size_t(3 * K), 0), code(keep.size(), 1);
      for (const bool middle : {false, true}) {
        if (middle) std::fill_n(keep.begin() + K, K, uint8_t{1});  // only row 1
        std::vector<float> scale(3, 0.25f), zero(3, 0), w(keep.size(), 7);
        std::vector<std::byte> bytes;
        const Params params = layout.bits == 16 ? pack_values(layout, {3, K}, {}, w, keep, bytes)
                                                : pack_grouped(layout, {3, K}, {}, {code, scale, zero, keep}, bytes);
        EXPECT_EQ(params.nnz, middle ? K : 0);
        EXPECT_EQ(first_bad_row(layout, {3, K}, bytes, params), -1) << layout.name;
        const auto got = decode(layout, {3, K}, params, bytes);
        for (size_t i = 0; i < got.size(); ++i) {
          EXPECT_EQ(got[i], keep[i] == 0 ? 0.0f : layout.bits == 16 ? 7.0f : 0.25f) << layout.name;
          EXPECT_FALSE(std::signbit(got[i]));
        }
      }
    }
  }
}

TEST(PackGrouped, GqTakesAMaskWhereTheZeroIsACode) {
  const std::vector<uint8_t> code = {3, 9, 200}, keep = {1, 0, 0};
  std::vector<std::byte> out;
  std::vector<float> scale = {0.5f}, zero = {7};
  const Params params = pack_grouped(get(Id::gq4), {1, 3}, {}, {code, scale, zero, keep}, out);
  EXPECT_EQ(decode(get(Id::gq4), {1, 3}, params, out), (std::vector<float>{-2, 0, 0}));
  for (const float bad : {7.5f, -1.0f, 16.0f}) {
    zero[0] = bad;
    EXPECT_THAT(
        [&] {
          pack_grouped(get(Id::gq4), {1, 3}, {}, {code, scale, zero, keep}, out);
        },
        ThrowsMessage<Error>(AllOf(HasSubstr("row 0: input 1 is dropped"), HasSubstr("bm layout"))));
  }
}

TEST(PackGrouped, RefusesWhatDoesNotFit) {
  for (const Id id : codes_layouts()) {
    const Layout& layout = get(id);
    const int64_t N = 3, K = 40;
    const Solution good = random_solution(layout.bits, {N, K}, 16, 0, 1);
    std::vector<std::byte> out;
    const auto pack = [&](const Solution& s, Params params = {.group_size = 16}) {
      return [&layout, &out, s, params] { pack_grouped(layout, s.shape, params, s.codes(), out); };
    };
    EXPECT_NO_THROW(pack(good)());
    Solution bad = good;
    bad.scale[4] = 0.1f;  // no f16
    EXPECT_THAT(pack(bad),
                ThrowsMessage<Error>(AllOf(HasSubstr("row 1: the scale of group 1 is 0.1"), HasSubstr("f16"))));
    for (const float value :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 65536.0f}) {
      bad = good;
      bad.zero[8] = value;
      EXPECT_THAT(pack(bad), ThrowsMessage<Error>(HasSubstr("row 2: the zero of group 2")));
    }
    if (layout.bits < 8) {
      bad = good;
      bad.code[size_t(K + 5)] = uint8_t(1 << layout.bits);
      EXPECT_THAT(pack(bad), ThrowsMessage<Error>(HasSubstr("row 1: the code of input 5 is")));
    }
    bad = good;
    bad.code.pop_back();
    EXPECT_THAT(pack(bad), ThrowsMessage<Error>(HasSubstr("needs 120 codes")));
    EXPECT_THAT(pack(good, {.group_size = 8}), ThrowsMessage<Error>(HasSubstr("with 5 groups a row")));
    EXPECT_THAT(pack(good, {.group_size = -1}), ThrowsMessage<Error>(HasSubstr("group_size is -1")));
    EXPECT_THAT(pack(good, {.tile_rows = 256, .group_size = 16}), ThrowsMessage<Error>(HasSubstr("has no tile_rows")));
  }
  std::vector<std::byte> out;
  for (const Id id : {Id::q4_K, Id::f16, Id::zz4_k, Id::bm16})
    EXPECT_THAT(
        [&] {
          pack_grouped(get(id), {1, 256}, {}, {}, out);
        },
        ThrowsMessage<Error>(HasSubstr("does not hold codes in groups")));
  for (const Id id : {Id::gq4, Id::bm4, Id::f16})
    EXPECT_THAT(
        [&] {
          pack_values(get(id), {1, 256}, {}, {}, {}, out);
        },
        ThrowsMessage<Error>(HasSubstr("does not hold plain values")));
  const std::vector<float> large = {1, 65520};
  EXPECT_THAT(
      [&] {
        pack_values(get(Id::bm16), {1, 2}, {}, large, {}, out);
      },
      ThrowsMessage<Error>(HasSubstr("row 0: the weight of input 1 is 65520")));
  const std::vector<uint8_t> keep = {1, 0};
  EXPECT_NO_THROW(pack_values(get(Id::bm16), {1, 2}, {}, large, keep, out)) << "what is dropped does not count";
}

TEST(PermuteRows, MovesRowsAndNothingElse) {
  for (const Id id : test::grouped_layouts()) {
    for (const Shape shape : {Shape{1, 64}, {37, 192}, {5, 70}}) {
      if (shape.K % get(id).block_cols != 0) continue;
      const test::GroupedWeight w = test::grouped_weight(
          id, shape.N, shape.K, 9, {.group_size = 32, .sparsity = 0.6, .dropped_row = shape.N / 2});
      std::vector<int64_t> order;
      for (int64_t n = 0; n < shape.N; ++n) order.push_back((n * 7 + 3) % shape.N);
      std::vector<std::byte> moved(w.bytes.size(), std::byte{0xff});
      permute_rows(*w.layout, shape, w.params, w.bytes, order, moved);
      EXPECT_EQ(first_bad_row(*w.layout, shape, moved, w.params), -1) << w.layout->name;
      std::vector<float> got(w.decoded.size());
      decode_rows(*w.layout, shape, moved, 0, shape.N, got.data(), w.params);
      for (int64_t n = 0; n < shape.N; ++n)
        for (int64_t k = 0; k < shape.K; ++k)
          ASSERT_EQ(got[size_t(n * shape.K + k)], w.decoded[size_t(order[size_t(n)] * shape.K + k)]) << w.layout->name;
    }
  }
}

// ---- nm24_q4 ----

// RECIPES 21: which places hold something does not matter, zeros are kept to fill up.
TEST(Nm24Q4, SparserGroupsAreFilledUp) {
  const std::vector<std::vector<float>> groups = {{0, 0, 0, 0}, {0, 0, 0, 1},  {1, 0, 0, 0},     {0, 1, 0, 0},
                                                  {1, 1, 0, 0}, {0, 0, 1, -1}, {-0.0f, 1, 0, 0}, {0, -1, 0, 1}};
  std::vector<float> w;
  for (int i = 0; i < 64; ++i) w.insert(w.end(), groups[size_t(i) % 8].begin(), groups[size_t(i) % 8].end());
  std::vector<uint8_t> keep(w.size());
  keep_two_of_four(w, keep);
  std::vector<Nm24Q4Block> blocks(w.size() / 64);
  encode_row(w, keep, blocks);
  const Layout& layout = get(Id::nm24_q4);
  const auto bytes = std::as_bytes(std::span(blocks));
  EXPECT_EQ(first_bad_row(layout, {1, 256}, bytes), -1);
  // Scale 1/7, codes 1, 8, 15: 1 and -1 come back as 7 and -7 times f16(1/7).
  const float seven = 7 * to_float(to_f16(1.0f / 7));
  const std::vector<float> got = decode(layout, {1, 256}, {}, bytes);
  for (size_t k = 0; k < w.size(); ++k) EXPECT_EQ(got[k], w[k] * seven) << k;
}

TEST(Nm24Q4, OneGroupOfThreeAmongThousandsIsNamed) {
  const int64_t N = 4, K = 4096;
  std::vector<uint8_t> code(size_t(N * K), 1), keep(code.size());
  for (size_t i = 0; i < keep.size(); ++i) keep[i] = i % 2;
  keep[size_t(2 * K + 1000)] = 1;
  const std::vector<float> scale(size_t(N * K / 64), 1), zero(scale.size(), 8);
  std::vector<std::byte> out;
  const auto pack = [&] { pack_grouped(get(Id::nm24_q4), {N, K}, {.group_size = 64}, {code, scale, zero, keep}, out); };
  EXPECT_THAT(pack,
              ThrowsMessage<Error>("row 2: the group of four at input 1000 keeps 3 weights; nm24_q4 needs exactly "
                                   "2 of every 4"));
  keep[size_t(2 * K + 1000)] = keep[size_t(2 * K + 1001)] = 0;
  EXPECT_THAT(pack, ThrowsMessage<Error>(HasSubstr("row 2: the group of four at input 1000 keeps 1 weights")));
  std::vector<float> w(64, 0);
  w[60] = w[61] = w[63] = 1;
  std::vector<uint8_t> mask(64);
  EXPECT_THAT([&] { keep_two_of_four(w, mask); },
              ThrowsMessage<Error>(HasSubstr("the group of four at input 60 has 3 weights that are not 0")));
}

TEST(Nm24Q4, RefusesOtherGridsAndShapes) {
  const Layout& layout = get(Id::nm24_q4);
  std::vector<uint8_t> code(128, 1), keep(128);
  for (size_t i = 0; i < 128; ++i) keep[i] = i % 4 < 2;
  std::vector<float> scale(2, 1), zero(2, 8);
  std::vector<std::byte> out;
  const auto pack = [&](int64_t K, int64_t group_size) {
    return [&, K, group_size] {
      pack_grouped(layout, {1, K}, {.group_size = group_size}, {code, scale, zero, keep}, out);
    };
  };
  EXPECT_NO_THROW(pack(128, 64)());
  EXPECT_THAT(pack(128, 128), ThrowsMessage<Error>(HasSubstr("groups of 64 inputs, got group_size 128")));
  EXPECT_THAT(pack(96, 64), ThrowsMessage<Error>(HasSubstr("K = 96, but nm24_q4 needs a multiple of 64")));
  zero[1] = 7;
  EXPECT_THAT(pack(128, 64), ThrowsMessage<Error>(HasSubstr("row 0: a zero is 7, but nm24_q4 has only 8")));
  zero[1] = 8;
  keep.clear();
  EXPECT_THAT(pack(128, 64), ThrowsMessage<Error>(HasSubstr("there is no mask")));
}

// ---- rounding ----

TEST(RoundToGrid, ReachesBothEndsWithZeroOnTheGrid) {
  for (const int bits : {2, 3, 4, 8}) {
    for (const int64_t K : {1, 64, 257}) {
      const std::vector<float> w = test_rows::bell(size_t(K), uint64_t(K));
      const auto groups = size_t(group_count(K, 64));
      std::vector<uint8_t> code(static_cast<size_t>(K));
      std::vector<float> scale(groups), zero(groups);
      round_to_grid(bits, 64, w, {}, code, scale, zero);
      const float top = float((1 << bits) - 1);
      for (size_t k = 0; k < w.size(); ++k) {
        const float s = scale[k / 64], z = zero[k / 64];
        EXPECT_EQ(z, std::nearbyint(z));
        ASSERT_TRUE(z >= 0 && z <= top && float(code[k]) <= top);
        // Half a step for the code, half for the zero; f16 shortens the range by 2^-11 of it.
        EXPECT_LE(std::abs(s * (float(code[k]) - z) - w[k]), s * (1.0f + top * 0x1p-11f)) << bits << " " << k;
      }
    }
  }
}

// RECIPES 9, 14: nothing divides by zero.
TEST(RoundToGrid, ZerosTinyAndLargeRows) {
  for (const float size : {0.0f, 1e-38f, 1e-10f, 1e30f, std::numeric_limits<float>::max()}) {
    const std::vector<float> w = {size, -size, 0, size / 2};
    std::vector<uint8_t> code(4);
    std::vector<float> scale(1), zero(1);
    for (const int bits : {2, 3, 4, 8}) {
      round_to_grid(bits, 0, w, {}, code, scale, zero);
      EXPECT_TRUE(std::isfinite(scale[0]) && std::isfinite(zero[0])) << size;
      std::vector<std::byte> out;
      EXPECT_NO_THROW(pack_grouped(get(Id::gq8), {1, 4}, {}, {code, scale, zero}, out)) << size;
      const std::vector<float> nothing(4, 0.0f);
      EXPECT_TRUE(size > 1e-8f || decode(get(Id::gq8), {1, 4}, {}, out) == nothing) << size;
    }
  }
  // Dropped weights do not stretch the grid.
  const std::vector<float> w = {100, 0.5f, -0.25f, 0.125f};
  const std::vector<uint8_t> keep = {0, 1, 1, 1};
  std::vector<uint8_t> code(4);
  std::vector<float> scale(1), zero(1);
  round_to_grid(4, 0, w, keep, code, scale, zero);
  EXPECT_EQ(scale[0], to_float(to_f16(0.05f)));
  EXPECT_EQ(code[0], 0);
}

// ---- lying bytes ----

TEST(Bm, EveryFieldIsChecked) {
  const Layout& layout = get(Id::bm4);
  const Shape shape{5, 77};
  const Solution s = random_solution(4, shape, 32, 0.5, 7);
  std::vector<std::byte> good;
  const Params params = pack_grouped(layout, shape, {.group_size = 32}, s.codes(), good);
  const BitmaskMap map(layout, shape, params);
  ASSERT_EQ(map.end, int64_t(good.size()));
  const auto expect_bad = [&](size_t at, int value, int64_t row, const std::string& what) {
    std::vector<std::byte> bytes = good;
    ASSERT_NE(bytes[at], std::byte(value)) << what;
    bytes[at] = std::byte(value);
    EXPECT_EQ(first_bad_row(layout, shape, bytes, params), row) << what;
    EXPECT_THAT([&] { check_bytes(layout, shape, bytes, params); },
                ThrowsMessage<Error>(AllOf(HasSubstr(fmt::format("row {} in bm4", row)), HasSubstr("damaged"))))
        << what;
    std::vector<float> out(size_t(shape.N * shape.K));
    try {  // decoding stays inside the bytes (sanitizers look on) or says so
      decode_rows(layout, shape, bytes, 0, shape.N, out.data(), params);
    } catch (const Error&) {
    }
  };
  expect_bad(0, 1, 0, "the first row starts late");
  expect_bad(4, 0xff, 0, "row 0 ends past the matrix");
  expect_bad(8, 0, 1, "starts go back");
  expect_bad(11, 0x80, 1, "a start beyond 2^31");
  expect_bad(20, 0, 4, "the last row ends early");
  expect_bad(size_t(4 * (shape.N + 1)), 1, 4, "padding after the starts");
  expect_bad(size_t(map.scale + 2 * 3 * map.groups + 1), 0x7c, 3, "an infinite scale");
  expect_bad(size_t(map.zero + 1), 0x7e, 0, "a zero that is NaN");
  expect_bad(size_t(map.mask + map.mask_row * 2 + 9), 0xff, 2, "mask bits past K");
  const auto first_mask = int(good[size_t(map.mask)]);
  expect_bad(size_t(map.mask), first_mask ^ 0xff, first_mask == 0x0f ? -1 : 0, "another number of kept weights");
  expect_bad(size_t(map.end - 1), 0xff, 4, "codes after the last kept one");

  for (Params lie : {Params{.group_size = 32, .octets = params.octets + 1, .nnz = params.nnz},
                     Params{.group_size = 32, .octets = params.octets, .nnz = params.nnz + 1000},
                     Params{.group_size = 32, .octets = params.octets, .nnz = 0},
                     Params{.group_size = 32, .octets = int64_t{1} << 31, .nnz = int64_t{1} << 34}}) {
    bool found = false;
    try {
      if (layout.size_bytes(shape, lie) != int64_t(good.size()))
        found = true;
      else
        found = first_bad_row(layout, shape, good, lie) >= 0;
    } catch (const Error&) {
      found = true;
    }
    EXPECT_TRUE(found) << lie.octets << " " << lie.nnz;
  }
  Params one_more = params;
  one_more.nnz += params.nnz % 8 == 0 ? -1 : 1;
  EXPECT_EQ(first_bad_row(layout, shape, good, one_more), 4) << "nnz is not what the masks say";
}

TEST(Gq, ScalesZerosAndPaddingAreChecked) {
  for (const Id id : {Id::gq2, Id::gq3, Id::gq4, Id::gq8}) {
    const Layout& layout = get(id);
    const Shape shape{3, 37};
    const Solution s = random_solution(layout.bits, shape, 16, 0, 2);
    std::vector<std::byte> good;
    const Params params = pack_grouped(layout, shape, {.group_size = 16}, s.codes(), good);
    const auto row = size_t(gq_row_bytes(layout.bits, 37, 16));
    EXPECT_EQ(first_bad_row(layout, shape, good, params), -1);
    for (const size_t at : {row + 1, row + 11, 2 * row - 1}) {
      std::vector<std::byte> bytes = good;
      bytes[at] |= std::byte(at == 2 * row - 1 ? 0x80 : 0x7c);
      EXPECT_EQ(first_bad_row(layout, shape, bytes, params), 1) << layout.name << " " << at;
    }
  }
}

TEST(Nm24Q4, PositionsAndScalesAreChecked) {
  const Layout& layout = get(Id::nm24_q4);
  std::vector<std::byte> bytes(3 * 26, std::byte{0});
  for (size_t i = 0; i < 24; ++i) bytes[26 * (i / 8) + 2 + i % 8] = std::byte{0x44};
  EXPECT_EQ(first_bad_row(layout, {3, 64}, bytes), -1);
  bytes[26 + 4] = std::byte{0x45};  // 1, 1
  EXPECT_EQ(first_bad_row(layout, {3, 64}, bytes), 1);
  bytes[1] = std::byte{0x7c};
  EXPECT_EQ(first_bad_row(layout, {3, 64}, bytes), 0);
}

// RECIPES 1: sizes that wrap 64 bits.
TEST(SizeBytesGrouped, RefusesWhatPasses64Bits) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const Layout& layout : all()) {
    if (layout.family == Family::rows || layout.zigzag) continue;
    EXPECT_THROW(layout.size_bytes({-1, 64}), Error) << layout.name;
    EXPECT_THROW(layout.size_bytes({1, -64}), Error) << layout.name;
    EXPECT_THROW(layout.size_bytes({int64_t{1} << 34, int64_t{1} << 32}), Error) << layout.name;
    EXPECT_THROW(layout.size_bytes({kMost, kMost / 64 * 64}), Error) << layout.name;
    if (layout.family == Family::two_of_four || layout.family == Family::tensor_core || layout.bits == 16) continue;
    EXPECT_THROW(layout.size_bytes({1, kMost / 64 * 64}, {.group_size = 1}), Error) << layout.name;
    EXPECT_THROW(layout.size_bytes({1152, (int64_t{1} << 52) + 64}, {.group_size = 1}), Error) << layout.name;
  }
}

}  // namespace
}  // namespace lacuna::layout
