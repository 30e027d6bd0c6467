// `report`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "io/atomic_file.h"
#include "process.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

using testing::HasSubstr;

constexpr const char* kCompress =
    R"({"tensor":"blk.0.attn_q.weight","loss":0.1,"curve":[0.5,0.25,0.125]}
{"path":"a.gguf","bytes":2097152,"method":"awp","effective_bits":3.25,"weight_sparsity":0.5,"solver_s":12.5}
)";

TEST(Report, OneRunIsPutTogetherFromSeveralCommands) {
  const TempDir folder;
  const std::string a = folder.file("small.json"), b = folder.file("dense.json");
  io::write_file_atomically(
      a, std::string(kCompress) + R"({"ppl":17.9,"text":"/data/heldout.txt","text_sha256":"0123456789"}
{"bench":"linear","tok_s":900.0}
{"bench":"decode","tok_s":55.5}
)");
  io::write_file_atomically(b, R"({"ppl":16.1,"text":"heldout.txt","text_sha256":"0123456789"}
{"ppl":null,"text":"other.txt","text_sha256":"0123456789"}
)");
  const auto rows = json_lines(output_of({"report", a, b, "--json"}));
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0]["run"], "small");
  EXPECT_EQ(rows[0]["bytes"], 2097152);
  EXPECT_EQ(rows[0]["method"], "awp");
  EXPECT_EQ(rows[0]["effective_bits"], 3.25);
  EXPECT_EQ(rows[0]["perplexity"]["heldout 01234567"], 17.9);
  EXPECT_EQ(rows[0]["tok_s"], 55.5);
  EXPECT_EQ(rows[0]["solver_s"], 12.5);
  EXPECT_EQ(rows[1]["perplexity"]["heldout 01234567"], 16.1);
  EXPECT_FALSE(rows[1].contains("bytes"));
  EXPECT_TRUE(rows[1]["perplexity"]["other 01234567"].is_null());
  const std::string table = output_of({"report", a, b});
  for (const char* words : {"2.0 MiB", "3.250", "50.0%", "17.9", "16.1", "55.5", "12.5", "heldout", "inf"})
    EXPECT_THAT(table, HasSubstr(words));
}

TEST(Report, DrawsErrorsByIterationAndPerplexityAgainstSize) {
  const TempDir folder;
  const std::string a = folder.file("a.json"), svg = folder.file("r.svg");
  io::write_file_atomically(a, std::string(kCompress) + R"({"ppl":17.9,"text":"heldout.txt"})");
  output_of({"report", a, "--svg", svg});
  const std::string drawn = read_text(svg);
  EXPECT_THAT(drawn, HasSubstr("blk.0.attn_q.weight"));
  EXPECT_THAT(drawn, HasSubstr("<polyline"));
  EXPECT_THAT(drawn, HasSubstr("<circle"));
  EXPECT_THAT(drawn, HasSubstr("Perplexity on heldout against size"));
  const Finished unknown = run_lacuna({"report", a, "--svg", svg, "--tensor", "nothing"});
  EXPECT_EQ(unknown.code, 1);
  EXPECT_THAT(unknown.err, HasSubstr("--tensor nothing: no run has a curve"));
  EXPECT_EQ(run_lacuna({"report", a, "--tensor", "nothing"}).code, 1);
}

/// The points of every line, in the order of the drawing.
std::vector<std::vector<std::pair<double, double>>> lines_of(const std::string& svg) {
  std::vector<std::vector<std::pair<double, double>>> out;
  const std::regex line("<polyline [^>]*points=\"([^\"]*)\""), point("([-0-9.e+]+),([-0-9.e+]+)");
  for (std::sregex_iterator at(svg.begin(), svg.end(), line), end; at != end; ++at) {
    const std::string points = (*at)[1];
    out.emplace_back();
    for (std::sregex_iterator p(points.begin(), points.end(), point), last; p != last; ++p)
      out.back().emplace_back(std::stod((*p)[1]), std::stod((*p)[2]));
  }
  return out;
}

TEST(Report, DrawsWhatTrainingLostByEpoch) {
  const TempDir folder;
  const std::string a = folder.file("a.json"), svg = folder.file("r.svg");
  io::write_file_atomically(a, R"({"figure":"f.svg","of":"blk.0.attn_q.weight"}
{"layer":0,"bqpo":{"before":0.4,"after":0.1,"epochs":[0.3,0.2],"kept":true,"seconds":1}}
{"layer":1,"bqpo":{"before":0.2,"after":0.1,"epochs":[0.15,0.12],"kept":true,"seconds":1}}
{"e2e":{"before":3,"after":2,"epochs":[2.5],"steps":4,"resumed_steps":0,"kept":true,"seconds":1}}
)");
  output_of({"report", a, "--svg", svg});
  const std::string drawn = read_text(svg);
  EXPECT_THAT(drawn, HasSubstr("a: weights trained layer by layer (bqpo)"));
  EXPECT_THAT(drawn, HasSubstr("a: scales and zero points trained end to end (e2e)"));
  EXPECT_THAT(drawn, HasSubstr(">layer 1<"));
  const auto lines = lines_of(drawn);
  ASSERT_EQ(lines.size(), 3u);
  ASSERT_EQ(lines[0].size(), 4u);  // before, two epochs, after
  // Epochs 0, 0.5, 1.5, 2 across; the loss linear upwards: 0.4 at the top, and 0.2 as far from 0.3 as that from it.
  EXPECT_NEAR((lines[0][1].first - lines[0][0].first) / (lines[0][3].first - lines[0][0].first), 0.25, 1e-3);
  EXPECT_NEAR(lines[0][1].second - lines[0][0].second, lines[0][2].second - lines[0][1].second, 0.01);
  EXPECT_NEAR(lines[1][0].second, lines[0][2].second, 0.01);
  EXPECT_NEAR(lines[1][3].second, lines[0][3].second, 0.01);
  ASSERT_EQ(lines[2].size(), 3u);
}

TEST(Report, CountsWholeLayersAsDropped) {
  const TempDir folder;
  const std::string a = folder.file("a.json"), svg = folder.file("r.svg");
  io::write_file_atomically(a, R"({"block_influence":[0.5,0.01,0.02,0.4],"dropped_layers":[1]}
{"path":"a.gguf","bytes":2097152,"method":"awp","effective_bits":3.25,"weight_sparsity":0.5,"solver_s":1,"layers":4,"dropped_layers":[1]}
)");
  const auto rows = json_lines(output_of({"report", a, "--svg", svg, "--json"}));
  EXPECT_DOUBLE_EQ(rows[0]["weight_sparsity"].get<double>(), 1 - 0.5 * 0.75);
  EXPECT_THAT(read_text(svg), HasSubstr("influence of the source"));
}

TEST(Report, ReadsTables) {
  const TempDir folder;
  const std::string path = folder.file("table.json");
  io::write_file_atomically(path, R"({
 "commit": "0",
 "rows": [
  {"key": "dense", "perplexity": {"heldout": {"ppl": 16.1}}},
  {"key": "joint awp+", "method": "awp+", "bytes": 1048576, "perplexity": {"heldout": {"ppl": 17.9}, "b": {"ppl": 20}}}
 ]
})");
  const auto rows = json_lines(output_of({"report", path, "--json"}));
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[1]["run"], "joint awp+");
  EXPECT_EQ(rows[1]["perplexity"]["b"], 20.0);
}

TEST(Report, SaysWhatItCannotRead) {
  const TempDir folder;
  const std::string path = folder.file("x.json");
  const auto refused = [&](const std::string& text, const char* words) {
    io::write_file_atomically(path, text);
    const Finished done = run_lacuna({"report", path});
    EXPECT_EQ(done.code, 1) << text;
    EXPECT_THAT(done.err, HasSubstr(words)) << text;
  };
  refused("", "is empty");
  refused("{\"a\": 1}\n", "line 1: neither of `compress`");
  refused("{\"ppl\": 1}\nnot json\n", "line 2");
  refused("{\"ppl\": \"x\"}\n", "ppl");
  refused("{\"ppl\": 1, \"text\": \"a\"}\n{\"ppl\": 2, \"text\": \"a\"}\n", "line 2: a has a perplexity already");
  refused("{\"ppl\": 1, \"act_sparsity\": 0.5}\n", "run dense");
  refused("{\"layer\": 0, \"bqpo\": {\"before\": 1, \"epochs\": []}}\n", "\"after\" of \"bqpo\" is missing");
  refused("{\n \"columns\": []\n}\n", "rows");
  EXPECT_NE(run_lacuna({"report", folder.file("absent.json")}).code, 0);
}

}  // namespace
}  // namespace lacuna::test
