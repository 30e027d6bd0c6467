// `compress` as a user runs it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "cli/process.h"
#include "io/checkpoint.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

using testing::HasSubstr;

std::vector<std::string> command(const std::string& model, const TempDir& folder, std::vector<std::string> flags) {
  std::vector<std::string> out = {
      "compress", model, "-o", folder.file("out.gguf"), "--calib", fixture("text_model/sample.txt")};
  out.insert(out.end(), flags.begin(), flags.end());
  return out;
}

TEST(CompressCommand, RefusesFlagsThatWouldChangeNothing) {
  struct Case {
    std::vector<std::string> flags;
    std::string says;
    int code = 1;
  };
  const std::vector<Case> cases = {
      {{"--method", "gptq", "--bits", "4", "--order", "quantize-first"}, "--order needs --method awp"},
      {{"--method", "awp", "--bits", "4", "--order", "quantize-first"}, "--order needs --method awp"},
      {{"--method", "rtn", "--bits", "4", "--damping", "0.1"}, "--damping needs --method gptq"},
      {{"--method", "gptq", "--bits", "4", "--ranges", "whole"}, "--ranges needs --method awp+"},
      {{"--sparsity", "50", "--ranges", "whole"}, "--ranges needs --method awp+"},
      {{"--sparsity", "50", "--damping", "0.1"}, "--damping needs --method gptq"},
      {{"--bits", "4", "--bqpo-lr", "1e-4"}, "--bqpo-lr needs --bqpo-epochs"},
      {{"--drop-layers", "1", "--method", "gptq"}, "--method needs --bits or --sparsity"},
      {{"--drop-layers", "2"}, "the model has 2 layers, of which one must stay"},
      {{"--drop-layers", "1.5"}, "a number of layers, or a percentage"},
      {{"--drop-layers", "10%"}, "is less than half of one of 2 layers"},
      {{"--bits", "4", "--figure-share", "2"}, "--figure-share needs --figures"},
      {{"--bits", "4", "--omniquant-epochs", "3"}, "--omniquant-epochs needs --method omniquant"},
      {{"--method", "omniquant", "--bits", "4", "--omniquant-epochs", "0", "--omniquant-lr", "1e-2"},
       "--omniquant-lr needs --method omniquant"},
      {{"--method", "omniquant", "--bits", "4", "--sparsity", "50"}, "rounds weights and drops none"},
      {{"--bits", "4", "--e2e-batch", "2"}, "--e2e-batch needs --e2e-epochs"},
      {{"--sparsity", "50", "--e2e-epochs", "1"}, "--e2e-epochs needs --bits"},
      {{"--method", "gqsa", "--sparsity", "50", "--pattern", "row"}, "drops whole groups"},
      {{"--method", "wanda", "--sparsity", "50", "--symmetric"}, "--symmetric needs --bits"},
      {{"--method", "wanda", "--sparsity", "50", "--group-size", "64"}, "--group-size needs --bits"},
      {{"--bits", "4", "--gpu", "1"}, "--gpu needs --device cuda"},
      {{"--bits", "4", "--pattern", "2:4", "--layout", "nm24_q4", "--group-size", "128"}, "leave --group-size out"},
      {{"--bits", "4", "--layout", "nm24_q4"}, "it needs --bits 4 --pattern 2:4"},
      {{"--bits", "4", "--token-clip", "nan"}, "is not a number from 0", 2},
      {{"--bits", "4", "--first-weight", "0"}, "is not a number above 0", 2},
      {{"--bits", "4", "--damping", "11"}, "is not a number from 0 to 10", 2}};
  for (const Case& one : cases) {
    const TempDir folder;
    const Finished done = run_lacuna(command(fixture("text_model"), folder, one.flags));
    EXPECT_EQ(done.code, one.code) << one.says;
    EXPECT_THAT(done.err, HasSubstr(one.says));
    EXPECT_TRUE(std::filesystem::is_empty(std::filesystem::path(folder.file("out.gguf")).parent_path())) << one.says;
  }
}

TEST(CompressCommand, FindsOutBeforeItsWorkThatItCannotWrite) {
  const TempDir folder;
  for (const std::string& out : {folder.file(""), folder.file("missing/out.gguf")}) {
    auto args = command(fixture("text_model"), folder, {"--bits", "4", "--work", folder.file("work")});
    args[3] = out;
    const Finished done = run_lacuna(args);
    EXPECT_EQ(done.code, 1) << out;
    EXPECT_FALSE(std::filesystem::exists(folder.file("work"))) << out;
  }
}

TEST(CompressCommand, GqsaTrainsLayersAndThenScales) {
  const TempDir folder;
  const auto rows = json_lines(
      output_of(command(fixture("text_model"), folder,
                        {"--method", "gqsa", "--bits", "4", "--sparsity", "50", "--samples", "4", "--seq-len", "64",
                         "--bqpo-epochs", "2", "--bqpo-lr", "1e-3", "--e2e-lr", "1e-3", "--json"})));
  size_t layers = 0, matrices = 0, tuned = 0;
  for (const auto& row : rows) {
    if (row.contains("bqpo")) {
      ++layers;
      EXPECT_LE(row["bqpo"]["after"], row["bqpo"]["before"]);
      EXPECT_EQ(row["bqpo"]["epochs"].size(), 2u);
    } else if (row.contains("e2e")) {
      ++tuned;
      EXPECT_LT(row["e2e"]["after"], row["e2e"]["before"]);
      EXPECT_EQ(row["e2e"]["epochs"].size(), 2u);
    } else if (row.contains("tensor")) {
      ++matrices;
      EXPECT_EQ(row["layout"], "gs4");
      EXPECT_NEAR(row["sparsity"].get<double>(), 0.5, 0.02);
    }
  }
  EXPECT_EQ(layers, 2u);
  EXPECT_EQ(matrices, 2u * 7);
  EXPECT_EQ(tuned, 1u);
  EXPECT_FALSE(std::filesystem::exists(folder.file("out.gguf.work")));
  output_of({"run", folder.file("out.gguf"), "-p", "a", "-n", "2"});
}

TEST(CompressCommand, DropsTheLayersThatDoLeast) {
  const TempDir folder;
  const auto rows = json_lines(output_of(
      command(fixture("text_model"), folder, {"--drop-layers", "1", "--samples", "4", "--seq-len", "64", "--json"})));
  ASSERT_EQ(rows.size(), 2u);
  const auto influence = rows[0]["block_influence"].get<std::vector<double>>();
  ASSERT_EQ(influence.size(), 2u);
  const int least = influence[1] <= influence[0] ? 1 : 0;
  EXPECT_EQ(rows[0]["dropped_layers"], std::vector<int>{least});
  EXPECT_EQ(rows[1]["method"], "shortgpt");
  EXPECT_EQ(rows[1]["layers"], 2);
  output_of({"run", folder.file("out.gguf"), "-p", "a", "-n", "2"});
  const io::Checkpoint source = io::Checkpoint::open(fixture("text_model")),
                       out = io::Checkpoint::open(folder.file("out.gguf"));
  EXPECT_EQ(out.metadata().need_integer(out.architecture() + ".block_count"), 1);
  EXPECT_EQ(out.find("blk.1.attn_q.weight"), nullptr);
  // The layer that stays, under its new number; its norms do not depend on the order of rows.
  const auto kept = source.require(fmt::format("blk.{}.ffn_up.weight", 1 - least)).bytes,
             found = out.require("blk.0.ffn_up.weight").bytes;
  EXPECT_TRUE(std::equal(kept.begin(), kept.end(), found.begin(), found.end()));
}

TEST(CompressCommand, DropsLayersAndCompressesTheRest) {
  const TempDir folder;
  const auto rows =
      json_lines(output_of(command(fixture("text_model"), folder,
                                   {"--drop-layers", "50%", "--method", "rtn", "--bits", "4", "--group-size", "32",
                                    "--samples", "4", "--seq-len", "64", "--json"})));
  ASSERT_EQ(rows.size(), 1u + 7 + 1);
  EXPECT_EQ(rows[1]["tensor"], "blk.0.attn_q.weight");
  EXPECT_EQ(rows.back()["method"], "rtn");
  EXPECT_EQ(rows.back()["dropped_layers"].size(), 1u);
  output_of({"run", folder.file("out.gguf"), "-p", "a", "-n", "2"});
}

TEST(CompressCommand, DrawsWhereSalientWeightsLie) {
  const TempDir folder;
  const auto rows = json_lines(
      output_of(command(fixture("text_model"), folder,
                        {"--method", "rtn", "--bits", "4", "--group-size", "32", "--samples", "4", "--seq-len", "64",
                         "--figures", folder.file("figures"), "--figure-share", "5", "--json"})));
  size_t figures = 0;
  for (const auto& row : rows) {
    if (!row.contains("figure")) continue;
    ++figures;
    EXPECT_NEAR(row["salient_share"].get<double>(), 0.05, 0.002);
    EXPECT_LE(row["row_groups"].get<double>(), 1);
    EXPECT_GE(row["row_groups"].get<double>(), row["salient_share"].get<double>());
    EXPECT_THAT(read_text(row["figure"].get<std::string>()), HasSubstr(row["of"].get<std::string>()));
  }
  EXPECT_EQ(figures, 2u * 7);
}

TEST(CompressCommand, OmniquantLearnsRangesLayerByLayer) {
  const TempDir folder;
  const auto rows = json_lines(
      output_of(command(fixture("text_model"), folder,
                        {"--method", "omniquant", "--bits", "2", "--group-size", "32", "--samples", "4", "--seq-len",
                         "64", "--omniquant-epochs", "8", "--omniquant-lr", "5e-2", "--json"})));
  size_t layers = 0;
  for (const auto& row : rows) {
    if (!row.contains("omniquant")) continue;
    ++layers;
    EXPECT_LT(row["omniquant"]["after"], row["omniquant"]["before"]);
    EXPECT_EQ(row["omniquant"]["epochs"].size(), 8u);
  }
  EXPECT_EQ(layers, 2u);
  EXPECT_EQ(rows.size(), 2u + 2 * 7 + 1);
  EXPECT_EQ(rows.back()["method"], "omniquant");
  output_of({"run", folder.file("out.gguf"), "-p", "a", "-n", "2"});
}

TEST(CompressCommand, WritesAModelThatRunsAndARowForEachMatrix) {
  const TempDir folder;
  const auto rows = json_lines(output_of(command(
      fixture("text_model"), folder,
      {"--bits", "4", "--sparsity", "50", "--group-size", "16", "--samples", "4", "--seq-len", "64", "--json"})));
  ASSERT_EQ(rows.size(), 2 * 7 + 1u);
  for (size_t i = 0; i + 1 < rows.size(); ++i) {
    EXPECT_EQ(rows[i]["layout"], "bm4");
    EXPECT_GE(rows[i]["outlier_share"], 0);
    EXPECT_LE(rows[i]["outlier_share"], 1);
    EXPECT_LT(rows[i]["loss"], rows[i]["loss_before"]);
  }
  EXPECT_EQ(rows.back()["method"], "awp+");
  EXPECT_EQ(rows.back()["calibration"]["windows"], 4);
  EXPECT_EQ(json_lines(output_of({"run", folder.file("out.gguf"), "-p", "The", "-n", "3", "--json"})).size(), 1u);
}

TEST(CompressCommand, EachMethodDropsAsItsPaperWherePatternIsNotGiven) {
  // Magnitude drops in the whole matrix, Wanda the same number in every row.
  for (const bool rows_alike : {false, true}) {
    const TempDir folder;
    output_of(command(
        fixture("text_model"), folder,
        {"--method", rows_alike ? "wanda" : "magnitude", "--sparsity", "50", "--samples", "2", "--seq-len", "64"}));
    const io::Checkpoint out = io::Checkpoint::open(folder.file("out.gguf"));
    const io::Tensor& tensor = out.require("blk.0.ffn_up.weight");
    std::vector<float> w(size_t(tensor.shape.N * tensor.shape.K));
    layout::decode_rows(*tensor.layout, tensor.shape, tensor.bytes, 0, tensor.shape.N, w.data(), tensor.params);
    bool alike = true;
    for (int64_t n = 0; n < tensor.shape.N; ++n) {
      const auto row = std::span(w).subspan(size_t(n * tensor.shape.K), size_t(tensor.shape.K));
      alike = alike && 2 * std::count(row.begin(), row.end(), 0.0f) == tensor.shape.K;
    }
    EXPECT_EQ(alike, rows_alike);
  }
}

}  // namespace
}  // namespace lacuna::test
