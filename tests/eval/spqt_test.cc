// eval/spqt.h
#include "eval/spqt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace lacuna::eval {
namespace {

using Kind = GemvVariant::Kind;

constexpr GemvVariant kAll[] = {
    {Kind::rows},           {Kind::zigzag}, {Kind::sparse, 0.25}, {Kind::sparse, 0.5}, {Kind::skipping_rows, 0.5},
    {Kind::unbalanced, 0.5}};

std::vector<std::string> names(const std::vector<GemvRow>& rows) {
  std::vector<std::string> out;
  for (const GemvRow& row : rows) out.push_back(row.variant.name());
  return out;
}

// What is timed is 150 x 512, whose superblock row is padded to 256 outputs.
TEST(Spqt, EveryVariantIsCheckedTimedAndCounted) {
  ThreadPool pool(2);
  GemvBench bench(pool, {.runs = 3, .ceilings = false});
  const std::vector<GemvRow> rows = bench.run("w", {150, 512}, kAll);
  EXPECT_THAT(names(rows), testing::ElementsAre("q4_K", "zz4_k dense", "zz4_k 25%", "zz4_k 50%", "B1 50%", "B2 50%"));
  const std::vector<int64_t> bytes = {150 * 2 * 144, 512 * 144, 384 * 144, 256 * 144, 150 * 2 * 144, 256 * 144};
  const std::vector<double> sparsity = {0, 0, 0.25, 0.5, 0.5, 0.5};
  for (size_t i = 0; i < rows.size(); ++i) {
    SCOPED_TRACE(rows[i].variant.name());
    const BenchRow& row = rows[i].row;
    EXPECT_TRUE(row.checked);
    EXPECT_GT(row.deviation, 0);  // 8-bit inputs, or factors of 16 bits: not exact
    EXPECT_LT(row.deviation, 0.02);
    EXPECT_EQ(row.runs, 3);
    EXPECT_EQ(row.bytes, bytes[i]);
    EXPECT_DOUBLE_EQ(row.act_sparsity, sparsity[i]);
    EXPECT_LE(row.min_ms, row.median_ms);
    EXPECT_LE(row.median_ms, row.max_ms);
    EXPECT_GT(row.min_ms, 0);
    EXPECT_DOUBLE_EQ(rows[i].gflops, 2e-6 * 150 * 512 / row.median_ms);
    EXPECT_LE(rows[i].speedup.min, rows[i].speedup.median);
    EXPECT_LE(rows[i].speedup.median, rows[i].speedup.max);
    EXPECT_FALSE(row.access_ceiling_gb_s.has_value());
  }
  EXPECT_EQ(rows[0].speedup.min, 1);
  EXPECT_EQ(rows[0].speedup.max, 1);
}

TEST(Spqt, SkippingRowsNeedBlocksOf256Inputs) {
  ThreadPool pool(1);
  GemvBench bench(pool, {.runs = 1, .ceilings = false});
  const std::vector<GemvRow> rows = bench.run("w", {64, 96}, kAll);
  EXPECT_THAT(names(rows), testing::ElementsAre("q4_K", "zz4_k dense", "zz4_k 25%", "zz4_k 50%", "B2 50%"));
  EXPECT_EQ(rows[0].row.layout, "q5_0");  // where 96 inputs fall back to
}

TEST(Spqt, ShapesOfALayer) {
  const model::ModelShape& shape = model::find_shape("llama-3-8b");
  const std::vector<NamedShape> layer = layer_shapes(shape);
  ASSERT_EQ(layer.size(), 4u);
  EXPECT_EQ(layer[0].shape, (layout::Shape{6144, 4096}));
  EXPECT_EQ(layer[2].shape, (layout::Shape{28672, 4096}));
  const std::vector<NamedShape> matrices = matrix_shapes(shape);
  ASSERT_EQ(matrices.size(), 4u);
  EXPECT_EQ(matrices[0].name, "q, o");
  EXPECT_EQ(matrices[1].name, "k, v");
  EXPECT_EQ(matrices[1].shape, (layout::Shape{1024, 4096}));
  EXPECT_EQ(matrices[3].shape, (layout::Shape{4096, 14336}));
  EXPECT_EQ(layer_shapes(model::find_shape("opt-6.7b"))[2].name, "up");
}

TEST(Spqt, ProductsAddUp) {
  const auto row = [](Kind kind, double ms, int64_t n) {
    GemvRow out;
    out.variant = {kind};
    out.row.median_ms = ms;
    out.row.min_ms = ms / 2;
    out.row.max_ms = ms * 2;
    out.row.bytes = 100;
    out.row.n = n;
    out.row.k = 10;
    out.row.act_sparsity = kind == Kind::zigzag ? 0.5 : 0;
    out.gflops = 2e-6 * double(n) * 10 / ms;
    return out;
  };
  const std::vector<std::vector<GemvRow>> products = {
      {row(Kind::rows, 4, 30), row(Kind::skipping_rows, 9, 30), row(Kind::zigzag, 1, 30)},
      {row(Kind::rows, 2, 10), row(Kind::zigzag, 1, 10)}};
  const std::vector<GemvRow> sum = add_up("model", products, 3);
  ASSERT_EQ(names(sum), (std::vector<std::string>{"q4_K", "zz4_k dense"}));  // B1 is not everywhere
  EXPECT_DOUBLE_EQ(sum[0].row.median_ms, 18);
  EXPECT_DOUBLE_EQ(sum[1].row.median_ms, 6);
  EXPECT_DOUBLE_EQ(sum[1].row.min_ms, 3);
  EXPECT_DOUBLE_EQ(sum[1].row.max_ms, 12);
  EXPECT_EQ(sum[1].row.bytes, 600);
  EXPECT_DOUBLE_EQ(sum[1].row.act_sparsity, 0.5);
  EXPECT_DOUBLE_EQ(sum[1].speedup.median, 3);
  EXPECT_DOUBLE_EQ(sum[1].speedup.min, 9.0 / 12);
  EXPECT_DOUBLE_EQ(sum[1].speedup.max, 36.0 / 3);
  EXPECT_DOUBLE_EQ(sum[0].gflops, 2e-6 * 400 * 3 / 18);
}

}  // namespace
}  // namespace lacuna::eval
