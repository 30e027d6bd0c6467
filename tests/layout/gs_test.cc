// tests/layout/gs_test.cc - group-sparse rows: bytes, round trips, what is refused.
#include "layout/gs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "layout/octet.h"

namespace lacuna::layout {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr Id kCodes[] = {Id::gs2, Id::gs3, Id::gs4, Id::gs8};
constexpr int64_t kGroups[] = {8, 16, 32, 64, 128};

/// How many groups rows keep.
enum class Rows : uint8_t { mixed, full, empty, single };

/// A solution whose dropped weights carry codes that do not count.
struct Solution {
  Shape shape;
  std::vector<uint8_t> code, keep;
  std::vector<float> scale, zero, weight;  // weight: [N, K]
  int64_t kept_groups = 0;
  GroupedCodes codes() const { return {code, scale, zero, keep}; }
};

Solution random_solution(int bits, Shape shape, int64_t g, Rows rows, uint64_t seed, bool symmetric = false) {
  Rng rng(seed);
  const auto [N, K] = shape;
  const int64_t groups = group_count(K, g);
  const uint64_t levels = bits == 16 ? 1 : uint64_t{1} << bits;
  Solution out{shape, {}, {}, {}, {}, {}};
  for (int64_t n = 0; n < N; ++n) {
    const auto single = int64_t(rng.below(uint64_t(groups)));
    for (int64_t i = 0; i < groups; ++i) {
      // Rows of a mixed matrix are uneven: from nearly none to nearly all.
      const bool keep = rows == Rows::full || (rows == Rows::single && i == single) ||
                        (rows == Rows::mixed && rng.uniform() * double(N) < double(n) + 0.5);
      out.kept_groups += keep;
      out.scale.push_back(to_float(to_f16(float(rng.normal() * 0.01))));
      out.zero.push_back(symmetric ? float(levels / 2) : float(rng.below(levels)));
      for (int64_t k = i * g; k < std::min(K, (i + 1) * g); ++k) {
        out.keep.push_back(keep);
        out.code.push_back(uint8_t(keep ? rng.below(levels) : 255));
        const float value = bits == 16 ? to_float(to_f16(float(rng.normal())))
                                       : out.scale.back() * (float(out.code.back()) - out.zero.back());
        out.weight.push_back(keep ? value : 0.0f);
      }
    }
  }
  return out;
}

Params pack(const Layout& layout, const Solution& s, int64_t g, std::vector<std::byte>& out,
            ThreadPool* pool = nullptr) {
  return layout.bits == 16 ? pack_values(layout, s.shape, {.group_size = g}, s.weight, s.keep, out, pool)
                           : pack_grouped(layout, s.shape, {.group_size = g}, s.codes(), out, pool);
}

std::vector<float> decode(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes) {
  std::vector<float> out(size_t(shape.N * shape.K), 12345.0f);
  decode_rows(layout, shape, bytes, 0, shape.N, out.data(), params);
  return out;
}

/// Equal to the last bit, but for the sign of a kept zero.
void expect_same(std::span<const float> got, const Solution& s, const std::string& what) {
  ASSERT_EQ(got.size(), s.weight.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i], s.weight[i]) << what << " at " << i;
    ASSERT_FALSE(s.keep[i] == 0 && std::signbit(got[i])) << what << " at " << i;
  }
}

// Golden bytes: these never change.
TEST(Gs, BytesMatchGolden) {
  // Two rows of 20 inputs in groups of 8, the last of 4: the first row keeps the groups 0 and 2, the second the
  // group 1.
  std::vector<uint8_t> keep(40, 0), code(40, 9);
  for (const int group : {0, 2, 3, 4, 5})
    if (group != 3 && group != 5 && group != 1)
      for (int k = 0; k < (group == 2 ? 4 : 8); ++k)
        keep[size_t((group < 3 ? 8 * group : 20 + 8 * (group - 3)) + k)] = 1;
  for (size_t k = 0; k < 8; ++k) code[k] = uint8_t(k), code[28 + k] = uint8_t(15 - k);
  for (size_t k = 0; k < 4; ++k) code[16 + k] = uint8_t(k + 1);
  const std::vector<float> scale = {1, 7, 0.5f, 7, -2, 7}, zero = {8, 7, 2, 7, 15, 7};
  std::vector<std::byte> out;
  const Params params = pack_grouped(get(Id::gs4), {2, 20}, {.group_size = 8}, {code, scale, zero, keep}, out);
  EXPECT_EQ(params, (Params{.group_size = 8, .kept_groups = 3, .nnz = 20}));
  std::vector<std::byte> expected(128 + 12);
  const auto put = [&](size_t at, std::initializer_list<int> values) {
    for (const int value : values) expected[at++] = std::byte(value);
  };
  put(4, {2, 0, 0, 0, 3});
  put(32, {0x05, 0x02});
  put(64, {0x00, 0x3c, 0x00, 0x38, 0x00, 0xc0});
  put(96, {0x28, 0x0f});
  put(128, {0x10, 0x32, 0x54, 0x76, 0x21, 0x43, 0, 0, 0xef, 0xcd, 0xab, 0x89});
  EXPECT_EQ(out, expected);
  EXPECT_EQ(decode(get(Id::gs4), {2, 20}, params, out),
            (std::vector<float>{-8, -7, -6, -5, -4, -3, -2, -1, 0, 0, 0, 0, 0, 0,  0,  0,  -0.5f, 0, 0.5f, 1,  //
                                0,  0,  0,  0,  0,  0,  0,  0,  0, 2, 4, 6, 8, 10, 12, 14, 0,     0, 0,    0}));

  const std::vector<float> values = {1, -2, 0.5f, 4, 0, 0, 0, 0, 7, 7};
  const std::vector<uint8_t> mask = {1, 1, 1, 1, 1, 1, 1, 1, 0, 0};
  const Params plain = pack_values(get(Id::gs16), {1, 10}, {.group_size = 8}, values, mask, out);
  EXPECT_EQ(plain, (Params{.group_size = 8, .kept_groups = 1, .nnz = 8}));
  expected.assign(64 + 16, std::byte{0});
  put(4, {1});
  put(32, {0x01});
  put(64, {0x00, 0x3c, 0x00, 0xc0, 0x00, 0x38, 0x00, 0x44});
  EXPECT_EQ(out, expected);
}

// RECIPES 8, 15: every group size with every row length, odd numbers of rows, rows of every kind.
TEST(Gs, EveryShapeAndGroupComesBack) {
  for (const Layout& layout : all()) {
    if (layout.family != Family::group_sparse) continue;
    for (const int64_t g : kGroups) {
      for (const int64_t K : {1, 8, 192, 255, 257, 288, 576, 4304, 4544}) {
        for (const int64_t N : {1, 7}) {
          for (const Rows rows : {Rows::mixed, Rows::full, Rows::empty, Rows::single}) {
            const std::string what = fmt::format("{} [{}, {}] g{} rows {}", layout.name, N, K, g, int(rows));
            const Solution s = random_solution(layout.bits, {N, K}, g, rows, uint64_t(N * K + g));
            std::vector<std::byte> bytes;
            const Params params = pack(layout, s, g, bytes);
            ASSERT_EQ(params.kept_groups, s.kept_groups) << what;
            ASSERT_EQ(kept_weights(layout, s.shape, params), std::count(s.keep.begin(), s.keep.end(), 1)) << what;
            ASSERT_EQ(int64_t(bytes.size()), layout.size_bytes(s.shape, params)) << what;
            ASSERT_NO_FATAL_FAILURE(expect_same(decode(layout, s.shape, params, bytes), s, what));
            ASSERT_EQ(first_bad_row(layout, s.shape, bytes, params), -1) << what;
            // The arithmetic of the header.
            const auto up = [](int64_t size) { return (size + 31) / 32 * 32; };
            int64_t size =
                up(4 * (N + 1)) + up(N * ((group_count(K, g) + 7) / 8)) + s.kept_groups * g * layout.bits / 8;
            if (layout.bits < 16) size += up(2 * s.kept_groups) + up((s.kept_groups * layout.bits + 7) / 8);
            ASSERT_EQ(int64_t(bytes.size()), size) << what;
          }
        }
      }
    }
  }
}

TEST(Gs, BitsAWeightFollowTheArithmetic) {
  const Solution s = random_solution(4, {256, 4096}, 16, Rows::mixed, 1);
  std::vector<std::byte> bytes;
  const Params params = pack(get(Id::gs4), s, 16, bytes);
  const double kept = double(params.nnz) / double(256 * 4096);
  const double bits = 1.0 / 16 + kept * (4 + (16.0 + 4) / 16) + 32.0 / 4096;
  EXPECT_NEAR(8.0 * double(bytes.size()) / double(256 * 4096), bits, 0.001);
  EXPECT_EQ(get(Id::gs4).bits_per_weight(), 4 + (16.0 + 4 + 1) / 16);
}

TEST(Gs, RowsAloneAndThreadsGiveTheSameBytes) {
  ThreadPool pool(3);
  for (const Layout& layout : all()) {
    if (layout.family != Family::group_sparse) continue;
    const Solution s = random_solution(layout.bits, {67, 257}, 16, Rows::mixed, 3);
    std::vector<std::byte> one, two;
    const Params params = pack(layout, s, 16, one);
    EXPECT_EQ(pack(layout, s, 16, two, &pool), params);
    EXPECT_EQ(one, two) << layout.name;
    std::vector<float> part(5 * 257);
    decode_rows(layout, s.shape, one, 60, 5, part.data(), params);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), s.weight.begin() + 60 * 257)) << layout.name;
  }
}

TEST(Gs, AllAreKeptWithoutAMask) {
  Solution s = random_solution(4, {3, 100}, 32, Rows::full, 3);
  std::vector<std::byte> with, without;
  pack(get(Id::gs4), s, 32, with);
  s.keep.clear();
  EXPECT_EQ(pack(get(Id::gs4), s, 32, without), (Params{.group_size = 32, .kept_groups = 12, .nnz = 300}));
  EXPECT_EQ(with, without);
}

// RECIPES 13, 14: prune whole groups, round what is left (symmetric or not), change the scales: dropped weights stay 0
// and nothing divides by zero, whatever groups and rows hold.
TEST(Gs, PruneThenRoundThenScaleKeepsThePattern) {
  const int64_t N = 5, K = 200, g = 16, groups = group_count(K, g);
  Rng rng(4);
  for (const int bits : {2, 4, 8}) {
    for (const bool symmetric : {false, true}) {
      std::vector<float> w(size_t(N * K)), scale(size_t(N * groups)), zero(scale.size());
      std::vector<uint8_t> keep(w.size(), 0), code(w.size());
      for (float& x : w) x = float(rng.normal() * 0.02);
      std::fill_n(w.begin() + 2 * K, K, 0.0f);      // one row of zeros
      std::fill_n(w.begin() + 3 * K + g, g, 0.0f);  // one group of zeros, which is kept
      for (int64_t n = 0; n < N; ++n)
        for (int64_t i = 0; i < groups; ++i)
          if (n != 1 && (i + n) % 2 == 0) std::fill_n(&keep[size_t(n * K + i * g)], std::min(g, K - i * g), uint8_t{1});
      for (int64_t n = 0; n < N; ++n) {
        const auto row = [&](auto& all, int64_t width) {
          return std::span(all).subspan(size_t(n * width), size_t(width));
        };
        round_to_grid(bits, g, row(w, K), row(keep, K), row(code, K), row(scale, groups), row(zero, groups));
      }
      for (size_t i = 0; symmetric && i < zero.size(); ++i) zero[i] = float(1 << (bits - 1));
      const Layout& layout = *find(fmt::format("gs{}", bits));
      for (const float factor : {1.0f, 0.5f, -2.0f, 0.0f}) {  // fine-tuned scales
        std::vector<float> tuned = scale;
        for (float& s : tuned) s = to_float(to_f16(s * factor));
        std::vector<std::byte> bytes;
        const Params params = pack_grouped(layout, {N, K}, {.group_size = g}, {code, tuned, zero, keep}, bytes);
        EXPECT_EQ(first_bad_row(layout, {N, K}, bytes, params), -1);
        const std::vector<float> got = decode(layout, {N, K}, params, bytes);
        for (size_t i = 0; i < got.size(); ++i) {
          ASSERT_TRUE(std::isfinite(got[i]));
          if (keep[i] != 0) continue;
          ASSERT_EQ(got[i], 0.0f);
          ASSERT_FALSE(std::signbit(got[i]));
        }
      }
    }
  }
}

TEST(Gs, RefusesWhatDoesNotFit) {
  std::vector<std::byte> out;
  for (const Id id : kCodes) {
    const Layout& layout = get(id);
    const Solution good = random_solution(layout.bits, {3, 40}, 16, Rows::full, 1);
    const auto packing = [&layout, &out](const Solution& s, int64_t g = 16) {
      return [&layout, &out, s, g] { pack_grouped(layout, s.shape, {.group_size = g}, s.codes(), out); };
    };
    EXPECT_NO_THROW(packing(good)());
    Solution bad = good;
    bad.keep[45] = 0;
    EXPECT_THAT(packing(bad), ThrowsMessage<Error>(AllOf(HasSubstr("row 1: input 5 is dropped"),
                                                         HasSubstr("its group of 16"), HasSubstr("bm layouts"))));
    bad = good;
    bad.scale[4] = 0.1f;  // no f16
    EXPECT_THAT(packing(bad), ThrowsMessage<Error>(HasSubstr("row 1: the scale of group 1 is 0.1")));
    for (const float value : {0.5f, -1.0f, float(1 << layout.bits), std::numeric_limits<float>::quiet_NaN()}) {
      bad = good;
      bad.zero[8] = value;
      EXPECT_THAT(packing(bad), ThrowsMessage<Error>(HasSubstr("row 2: the zero of group 2")));
      std::fill_n(bad.keep.begin() + 80 + 32, 8, uint8_t{0});
      EXPECT_NO_THROW(packing(bad)()) << "a dropped group's zero does not count";
    }
    if (layout.bits < 8) {
      bad = good;
      bad.code[45] = uint8_t(1 << layout.bits);
      EXPECT_THAT(packing(bad), ThrowsMessage<Error>(HasSubstr("row 1: the code of input 5 is")));
    }
    for (const int64_t g : {0, -1, 4, 24, 256})
      EXPECT_THAT(packing(good, g), ThrowsMessage<Error>(AllOf(HasSubstr(fmt::format("group_size is {}", g)))));
    EXPECT_THAT(packing(good, 8), ThrowsMessage<Error>(HasSubstr("with 5 groups a row")));
  }
  const std::vector<float> large = {1, 65520, 2, 3, 4, 5, 6, 7, 65520};
  const std::vector<uint8_t> keep = {1, 1, 1, 1, 1, 1, 1, 1, 0};
  EXPECT_THAT(
      [&] {
        pack_values(get(Id::gs16), {1, 9}, {.group_size = 8}, large, keep, out);
      },
      ThrowsMessage<Error>(HasSubstr("row 0: the weight of input 1 is 65520")));
  EXPECT_THAT(
      [&] {
        pack_values(get(Id::gs16), {1, 9}, {}, large, keep, out);
      },
      ThrowsMessage<Error>(HasSubstr("group_size is 0")));
}

// Every field that a file could lie about.
TEST(Gs, EveryFieldIsChecked) {
  const Layout& layout = get(Id::gs4);
  const Shape shape{5, 77};
  Solution s = random_solution(4, shape, 8, Rows::mixed, 7);
  std::fill_n(s.keep.begin() + 2 * 77 + 72, 5, uint8_t{1});  // row 2 keeps the last, shorter group
  std::vector<std::byte> good;
  for (uint8_t& code : s.code) code &= 15;
  const Params params = pack(layout, s, 8, good);
  ASSERT_EQ(first_bad_row(layout, shape, good, params), -1);
  const GroupSparseMap map(layout, shape, params);
  ASSERT_EQ(map.end, int64_t(good.size()));
  const auto first_of = [&](int64_t n) { return group_sparse_row(map, shape, params, good, n).first; };
  const auto expect_bad = [&](int64_t at, int flip, int64_t row, const std::string& what) {
    std::vector<std::byte> bytes = good;
    bytes[size_t(at)] ^= std::byte(flip);
    EXPECT_EQ(first_bad_row(layout, shape, bytes, params), row) << what;
    EXPECT_THAT([&] { check_bytes(layout, shape, bytes, params); },
                ThrowsMessage<Error>(AllOf(HasSubstr(fmt::format("row {} in gs4", row)), HasSubstr("damaged"))))
        << what;
    std::vector<float> out(size_t(shape.N * shape.K));
    try {  // decoding stays inside the bytes (sanitizers look on) or says so
      decode_rows(layout, shape, bytes, 0, shape.N, out.data(), params);
    } catch (const Error&) {
    }
  };
  expect_bad(0, 1, 0, "the first row starts late");
  expect_bad(4, 0xf0, 0, "row 0 ends past its groups");
  expect_bad(11, 0x80, 1, "a start beyond 2^31");
  expect_bad(20, 1, 4, "the last row ends elsewhere");
  expect_bad(4 * (shape.N + 1), 1, 4, "padding after the starts");
  expect_bad(map.mask + 2 * map.mask_row, 1, 2, "another number of kept groups");
  expect_bad(map.mask + 2 * map.mask_row + 1, 0x80, 2, "mask bits past the last group");
  expect_bad(map.scale + 2 * first_of(3) + 1, 0x7c ^ int(good[size_t(map.scale + 2 * first_of(3) + 1)]), 3,
             "an infinite scale");
  expect_bad(map.code + first_of(3) * map.group_bytes - 1, 0x80, 2, "codes past the last input");
  expect_bad(map.zero - 1, 1, 4, "padding after the scales");
  expect_bad(map.code - 1, 1, 4, "padding after the zeros");

  for (const Params& lie : {Params{.group_size = 8, .kept_groups = params.kept_groups + 1, .nnz = params.nnz},
                            Params{.group_size = 16, .kept_groups = params.kept_groups, .nnz = params.nnz},
                            Params{.group_size = 8, .kept_groups = params.kept_groups, .nnz = params.nnz + 1},
                            Params{.group_size = 8, .kept_groups = params.kept_groups, .nnz = 0},
                            Params{.group_size = 8, .kept_groups = int64_t{1} << 31, .nnz = int64_t{1} << 34}}) {
    bool found = false;
    try {
      found = layout.size_bytes(shape, lie) != int64_t(good.size()) || first_bad_row(layout, shape, good, lie) >= 0;
    } catch (const Error&) {
      found = true;
    }
    EXPECT_TRUE(found) << lie.group_size << " " << lie.kept_groups << " " << lie.nnz;
  }
}

// Any single byte of the file may be wrong: what is accepted decodes to finite weights inside the bytes.
TEST(Gs, NoByteLeadsOutside) {
  for (const Id id : {Id::gs3, Id::gs16}) {
    const Layout& layout = get(id);
    const Shape shape{3, 37};
    const Solution s = random_solution(layout.bits, shape, 16, Rows::mixed, 5);
    std::vector<std::byte> bytes;
    const Params params = pack(layout, s, 16, bytes);
    std::vector<float> out(size_t(shape.N * shape.K));
    for (size_t at = 0; at < bytes.size(); ++at) {
      for (const int flip : {1, 0x80, 0xff}) {
        bytes[at] ^= std::byte(flip);
        if (first_bad_row(layout, shape, bytes, params) < 0) {
          decode_rows(layout, shape, bytes, 0, shape.N, out.data(), params);
          EXPECT_EQ(find_non_finite(out), -1) << at;
        } else {
          try {
            decode_rows(layout, shape, bytes, 0, shape.N, out.data(), params);
          } catch (const Error&) {
          }
        }
        bytes[at] ^= std::byte(flip);
      }
    }
  }
}

}  // namespace
}  // namespace lacuna::layout
