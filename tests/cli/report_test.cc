// `report`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
  refused("{\n \"columns\": []\n}\n", "rows");
  EXPECT_NE(run_lacuna({"report", folder.file("absent.json")}).code, 0);
}

}  // namespace
}  // namespace lacuna::test
