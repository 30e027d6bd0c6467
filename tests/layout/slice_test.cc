// tests/layout/slice_test.cc - parts of a matrix in every layout: the same weights, and sound bytes.
#include "layout/slice.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "matrices.h"

namespace lacuna::layout {
namespace {

using test::Matrix;

Matrix part_of(const Matrix& whole, const Slice& s, ThreadPool* pool) {
  return {whole.layout,
          {s.rows, s.columns},
          slice_params(*whole.layout, whole.shape, whole.params, whole.bytes, s),
          slice_bytes(*whole.layout, whole.shape, whole.params, whole.bytes, s, pool)};
}

/// Cuts of [0, count) at multiples of `unit`, in `parts` of about the same size.
std::vector<int64_t> cuts(int64_t count, int64_t unit, int64_t parts) {
  const int64_t units = (count + unit - 1) / unit;
  std::vector<int64_t> out;
  for (int64_t part = 0; part <= parts; ++part) out.push_back(std::min(count, units * part / parts * unit));
  return out;
}

/// Every weight of the parts is that of the whole, bit for bit.
void expect_parts(const Matrix& whole, int64_t row_parts, int64_t column_parts, ThreadPool* pool) {
  const std::vector<float> expected = whole.decoded();
  const auto rows = cuts(whole.shape.N, row_unit(*whole.layout), row_parts);
  const auto columns = cuts(whole.shape.K, column_unit(*whole.layout, whole.shape, whole.params), column_parts);
  int64_t nnz = 0;
  for (size_t i = 0; i + 1 < rows.size(); ++i) {
    for (size_t j = 0; j + 1 < columns.size(); ++j) {
      const Slice slice{rows[i], rows[i + 1] - rows[i], columns[j], columns[j + 1] - columns[j]};
      ASSERT_GT(slice.rows, 0);
      ASSERT_GT(slice.columns, 0);
      const Matrix part = part_of(whole, slice, pool);
      ASSERT_EQ(first_bad_row(*part.layout, part.shape, part.bytes, part.params), -1);
      nnz += part.params.nnz;
      const std::vector<float> got = part.decoded();
      for (int64_t n = 0; n < slice.rows; ++n)
        for (int64_t k = 0; k < slice.columns; ++k)
          ASSERT_EQ(std::bit_cast<uint32_t>(got[size_t(n * slice.columns + k)]),
                    std::bit_cast<uint32_t>(expected[size_t((slice.row0 + n) * whole.shape.K + slice.column0 + k)]))
              << "row " << slice.row0 + n << ", column " << slice.column0 + k;
    }
  }
  EXPECT_EQ(nnz, whole.params.nnz);
}

class EachLayout : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Slice, EachLayout, testing::Range(size_t{0}, all().size()),
                         [](const auto& each) { return std::string(all()[each.param].name); });

TEST_P(EachLayout, PartsAreTheSameWeights) {
  const Layout& layout = all()[GetParam()];
  ThreadPool pool(2);
  std::vector<Params> params = {{}};
  if (layout.zigzag) params = {{}, {.tile_rows = 256}, {.tile_rows = 512}};
  if (layout.family == Family::grouped || layout.family == Family::bitmask)
    params = {{.group_size = 0}, {.group_size = 16}, {.group_size = 128}, {.group_size = 12}};
  if (layout.family == Family::group_sparse) params = {{.group_size = 8}, {.group_size = 16}, {.group_size = 128}};
  // The last shape ends inside a superblock of outputs, and inside a group where the layout has uneven ends.
  const bool blocks = layout.family == Family::rows || layout.family == Family::two_of_four;
  const int64_t K = blocks && layout.block_cols > 1 ? 3 * layout.block_cols : 392;
  for (const Params& p : params) {
    const Matrix whole = test::random_matrix(layout.id, {layout.zigzag ? 1000 : 37, K}, p);
    for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{1, 1}, {2, 1}, {1, 2}, {3, 3}, {2, 3}}) {
      SCOPED_TRACE(fmt::format("group {}, tile {}, {} x {} parts", p.group_size, p.tile_rows, rows, columns));
      expect_parts(whole, rows, columns, rows == 2 ? &pool : nullptr);
    }
  }
}

TEST(Slice, UnitsAreWhatLiesTogether) {
  EXPECT_EQ(row_unit(get(Id::zz4_k)), 256);
  EXPECT_EQ(row_unit(get(Id::q4_K)), 1);
  EXPECT_EQ(row_unit(get(Id::gs4)), 1);
  const Shape shape{64, 1024};
  EXPECT_EQ(column_unit(get(Id::zz4_k), shape, {}), 1);
  EXPECT_EQ(column_unit(get(Id::f16), shape, {}), 1);
  EXPECT_EQ(column_unit(get(Id::q4_K), shape, {}), 256);
  EXPECT_EQ(column_unit(get(Id::q8_0), shape, {}), 32);
  EXPECT_EQ(column_unit(get(Id::nm24_q4), shape, {}), 64);
  EXPECT_EQ(column_unit(get(Id::gq4), shape, {.group_size = 128}), 128);
  EXPECT_EQ(column_unit(get(Id::gq4), shape, {.group_size = 0}), 8);
  EXPECT_EQ(column_unit(get(Id::bm4), shape, {.group_size = 12}), 24);
  EXPECT_EQ(column_unit(get(Id::bm16), shape, {}), 8);
  EXPECT_EQ(column_unit(get(Id::gs4), shape, {.group_size = 16}), 16);
  EXPECT_EQ(column_unit(get(Id::f8), shape, {}), 1);
  EXPECT_EQ(column_unit(get(Id::nm24_f8), shape, {}), 8);
}

}  // namespace
}  // namespace lacuna::layout
