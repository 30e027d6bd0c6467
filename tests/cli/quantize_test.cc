// `quantize`, `synth`, `perplexity`, `bench`: files that are made and numbers that are measured. RECIPES 4-8 and 28.
#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "models.h"
#include "process.h"

namespace lacuna::test {
namespace {

std::vector<int64_t> greedy(const std::string& model, const std::string& prompt_ids = "1,7,9,11,5,20") {
  return json_of(
             {"run", model, "--prompt-ids", prompt_ids, "-n", "8", "--temp", "0", "--ignore-eos", "--kv", "f32"})["ids"]
      .get<std::vector<int64_t>>();
}

std::vector<std::filesystem::path> files_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) out.push_back(entry.path().filename());
  std::sort(out.begin(), out.end());
  return out;
}

TEST(Quantize, FoldersBecomeFilesThatComputeTheSame) {
  const TempDir dir;
  int checkpoints = 0;
  for (const auto& entry : std::filesystem::directory_iterator(fixture("hf"))) {
    const std::string out = dir.file("out.gguf");
    output_of({"quantize", entry.path().string(), "-o", out, "--layout", "f32"});
    const auto expected = nlohmann::json::parse(read_text(entry.path() / "logits.json"));
    std::string prompt;
    for (const auto& id : expected["input_ids"]) {
      if (!prompt.empty()) prompt += ',';
      prompt += std::to_string(id.get<int>());
    }
    const auto ids = expected["greedy_ids"].get<std::vector<int64_t>>();
    auto found = greedy(out, prompt);
    found.resize(ids.size());
    EXPECT_EQ(found, ids) << entry.path();
    ++checkpoints;
  }
  EXPECT_GE(checkpoints, 18);
}

// RECIPES 7: tied; a head that equals the embedding; one that differs.
TEST(Quantize, HeadsSurviveARoundTrip) {
  const TempDir dir;
  for (const char* name : {"llama_tied", "llama_mha"}) {
    const std::string source = fixture("hf/" + std::string(name)), out = dir.file("out.gguf"),
                      again = dir.file("again.gguf");
    output_of({"quantize", source, "-o", out, "--layout", "f32"});
    output_of({"quantize", out, "-o", again, "--layout", "f32"});
    EXPECT_EQ(json_of({"inspect", out})["params"], json_of({"inspect", source})["params"]);
    EXPECT_EQ(std::filesystem::file_size(out), std::filesystem::file_size(again));
    EXPECT_EQ(greedy(out), greedy(again));
    EXPECT_EQ(greedy(source), greedy(again));
  }
  std::vector<std::byte> embedding;
  const std::string untied = fixture("gguf_models/llama_mha.gguf"), equal = dir.file("equal.gguf"),
                    out = dir.file("o.gguf");
  {
    const io::Checkpoint source = io::Checkpoint::open(untied);
    const auto bytes = source.require("token_embd.weight").bytes;
    embedding.assign(bytes.begin(), bytes.end());
  }
  rewrite(
      untied, equal, [](io::Metadata&) {},
      [&](const std::string& name, std::vector<std::byte>& bytes) {
        if (name == "output.weight") bytes = embedding;
      });
  output_of({"quantize", equal, "-o", out, "--layout", "f32"});
  EXPECT_EQ(json_of({"inspect", equal})["params"], json_of({"inspect", out})["params"]);
  EXPECT_EQ(greedy(equal), greedy(out));
  EXPECT_NE(greedy(untied), greedy(equal)) << "the fixture's head does not matter";
}

// RECIPES 8 in the small: rows of 32 and 64 fit 32-wide blocks only, those of 10 and 25 none.
TEST(Quantize, SaysWhatFellBackAndStrictRefuses) {
  const TempDir dir;
  const std::string out = dir.file("out.gguf");
  const auto report = json_of({"quantize", fixture("gguf_models/llama_mha.gguf"), "-o", out, "--layout", "q4_K"});
  EXPECT_GT(report["fell_back"].size(), 0u);
  for (const auto& tensor : report["fell_back"])
    EXPECT_EQ(tensor["stored"], tensor["wanted"] == "q6_K" ? "q8_0" : "q5_0") << tensor;
  EXPECT_EQ(report["bytes"].get<uint64_t>(), std::filesystem::file_size(out));
  EXPECT_NEAR(report["effective_bits"].get<double>(), json_of({"inspect", out})["effective_bits"].get<double>(), 1e-9);
  EXPECT_NE(
      output_of({"quantize", fixture("gguf_models/llama_mha.gguf"), "-o", out}).find("fell back: blk.0.attn_q.weight"),
      std::string::npos);

  const std::string odd = dir.file("odd.gguf");
  const auto odd_report = json_of({"quantize", fixture("hf/llama_odd_heads"), "-o", odd, "--layout", "q8_0"});
  EXPECT_GT(odd_report["fell_back"].size(), 0u);
  EXPECT_EQ(greedy(odd).size(), 8u);

  const std::string refused = dir.file("refused.gguf");
  expect_error({"quantize", fixture("gguf_models/llama_mha.gguf"), "-o", refused, "--strict"}, "--strict");
  expect_error({"quantize", fixture("gguf_models/llama_mha.gguf"), "-o", refused, "--layout", "q4_K", "--strict"},
               std::to_string(report["fell_back"].size()) + " of ");
  std::map<std::string, int> wanted;
  for (const auto& tensor : report["fell_back"]) ++wanted[tensor["wanted"]];
  EXPECT_EQ(wanted.size(), 2u);
  for (const auto& [layout, count] : wanted)
    expect_error({"quantize", fixture("gguf_models/llama_mha.gguf"), "-o", refused, "--layout", "q4_K", "--strict"},
                 std::to_string(count) + " do not fit " + layout);
  EXPECT_FALSE(std::filesystem::exists(refused));
}

TEST(Quantize, ItsOwnSourceIsNotReplaced) {
  const TempDir dir;
  const std::string model = dir.file("model.gguf"), link = dir.file("link.gguf");
  std::filesystem::copy_file(fixture("gguf_models/llama_mha.gguf"), model);
  std::filesystem::create_symlink("model.gguf", link);
  const std::string before = read_text(model);
  for (const auto& [from, to] : {std::pair{model, model}, {model, link}, {link, model}})
    expect_error({"quantize", from, "-o", to}, "is the model that is read");
  EXPECT_TRUE(read_text(model) == before);
}

TEST(Quantize, EveryLayoutLoadsAndRuns) {
  const TempDir dir;
  for (const char* layout :
       {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"}) {
    const std::string out = dir.file(std::string(layout) + ".gguf");
    const auto report =
        json_of({"quantize", fixture("gguf_models/llama_mha.gguf"), "-o", out, "--layout", layout, "--pure"});
    EXPECT_EQ(greedy(out).size(), 8u) << layout;
    EXPECT_EQ(report["requantized"].size(), 0u);
  }
  const Finished again =
      run_lacuna({"quantize", dir.file("q8_0.gguf"), "-o", dir.file("again.gguf"), "--layout", "q4_0"});
  EXPECT_EQ(again.code, 0);
  EXPECT_NE(again.err.find("q8_0"), std::string::npos) << "quantizing a second time is not told: " << again.err;
  for (const char* wider : {"f32", "f16", "bf16"})
    EXPECT_EQ(
        json_of({"quantize", dir.file("q8_0.gguf"), "-o", dir.file("again.gguf"), "--layout", wider})["requantized"]
            .size(),
        0u)
        << wider;
}

TEST(Quantize, RefusesNanAndWhatDoesNotFit) {
  const TempDir dir;
  const std::string source = fixture("gguf_models/llama_tied.gguf"), bad = dir.file("bad.gguf"),
                    out = dir.file("out.gguf");
  const auto with_value = [&](float value) {
    rewrite(
        source, bad, [](io::Metadata&) {},
        [&](const std::string& name, std::vector<std::byte>& bytes) {
          if (name == "blk.0.ffn_up.weight") std::memcpy(bytes.data() + 40, &value, sizeof(value));
        });
  };
  for (const float value : {NAN, INFINITY, -INFINITY}) {
    with_value(value);
    expect_error({"quantize", bad, "-o", out, "--layout", "q8_0"}, "blk.0.ffn_up.weight");
    EXPECT_FALSE(std::filesystem::exists(out));
  }
  with_value(1e5f);
  expect_error({"quantize", bad, "-o", out, "--layout", "f16"}, "bf16");
  output_of({"quantize", bad, "-o", out, "--layout", "bf16"});
  expect_error({"quantize", fixture("gguf/vocabulary.gguf"), "-o", dir.file("v.gguf")}, "has no weights");
}

// RECIPES 6.
TEST(Quantize, AFullDiskLeavesNothing) {
  const TempDir dir;
  const std::string source = fixture("gguf_models/llama_mha.gguf"), out = dir.file("out.gguf");
  const Finished full = run_lacuna({"quantize", source, "-o", "/dev/full"});
  EXPECT_EQ(full.code, 1) << full.err;
  EXPECT_EQ(full.signal, 0);
  expect_error({"quantize", source, "-o", out, "--layout", "f32"}, "out.gguf", {.file_size_limit = 20000});
  EXPECT_EQ(files_in(dir.path()).size(), 0u);
  expect_error({"quantize", source, "-o", dir.file("no/such/folder/out.gguf")}, "no/such/folder");
}

TEST(Quantize, KilledHalfWayLeavesNoPlausibleFile) {
  const TempDir dir;
  const std::string source = dir.file("source.gguf"), out = dir.file("out.gguf");
  output_of({"synth", "qwen2.5-1.5b", "-o", source, "--layers", "1", "--layout", "q8_0", "--head-layout", "q8_0"});
  const Finished killed =
      run_lacuna({"quantize", source, "-o", out, "--layout", "q6_K", "--threads", "1"}, {.kill_after_ms = 300});
  ASSERT_EQ(killed.signal, SIGKILL) << "the run ended before it was killed";
  EXPECT_FALSE(std::filesystem::exists(out));
  for (const auto& name : files_in(dir.path()))
    EXPECT_TRUE(name == "source.gguf" || name.extension() != ".gguf") << name << " looks finished";
  output_of({"quantize", source, "-o", out, "--layout", "q8_0"});
  EXPECT_EQ(json_of({"inspect", source})["params"], json_of({"inspect", out})["params"]);
}

// RECIPES 4.
TEST(Quantize, AMissingShardIsNamed) {
  const TempDir dir;
  std::filesystem::copy(fixture("hf/llama_sharded"), dir.path() / "m");
  std::filesystem::remove(dir.path() / "m" / "model-00002-of-00002.safetensors");
  expect_error({"quantize", dir.file("m"), "-o", dir.file("out.gguf")}, "model-00002-of-00002.safetensors");
  expect_error({"inspect", dir.file("m")}, "model-00002-of-00002.safetensors");
}

TEST(QuantizeSource, KeepsEveryMatrixAsItIs) {
  const TempDir dir;
  const std::string mixed = dir.file("mixed.gguf"), out = dir.file("out.gguf"), none = dir.file("none.gguf");
  for (const char* layout : {"q5_1", "zz8", "gq4"}) {
    output_of({"quantize", fixture("gguf_models/llama_mha.gguf"), "-o", mixed, "--layout", layout, "--head-layout",
               "q8_0", "--embedding-layout", "f16"});
    const auto report = json_of({"quantize", mixed, "-o", out, "--layout", "source", "--strict"});
    EXPECT_EQ(report["requantized"].size(), 0u);
    EXPECT_EQ(json_of({"inspect", out})["tensors"], json_of({"inspect", mixed})["tensors"]);
    EXPECT_EQ(greedy(out), greedy(mixed));
  }
  output_of({"quantize", fixture("hf/llama_bf16"), "-o", out, "--layout", "source"});
  EXPECT_EQ(greedy(out), greedy(fixture("hf/llama_bf16")));
  for (const std::vector<std::string>& flags : {std::vector<std::string>{"--tile-rows", "256"},
                                                {"--group-size", "32"},
                                                {"--pure"},
                                                {"--head-layout", "q6_K"}}) {
    std::vector<std::string> command{"quantize", mixed, "-o", none, "--layout", "source"};
    command.insert(command.end(), flags.begin(), flags.end());
    expect_error(command, "--layout source");
  }
  EXPECT_FALSE(std::filesystem::exists(none));
}

// A folder that another program has quantized is a model like any other.
TEST(QuantizeSource, FoldersOfOtherPrograms) {
  const TempDir dir;
  for (const char* name : {"gptq_4", "awq_gemm", "packed_2_of_4", "bitmask"}) {
    const std::string source = fixture("quantized/" + std::string(name)), out = dir.file("out.gguf");
    const auto inspected = json_of({"inspect", source}),
               made = json_of({"quantize", source, "-o", out, "--layout", "source"});
    EXPECT_EQ(inspected["params"], made["params"]) << name;
    EXPECT_EQ(greedy(source, "1,7,9,11,5,20"), greedy(out, "1,7,9,11,5,20")) << name;
    const Finished again = run_lacuna({"quantize", source, "-o", out, "--layout", "q8_0"});
    EXPECT_EQ(again.code, 0) << again.err;
  }
  const std::string rounded = fixture("quantized/int_8"), warning = "asks for activations";
  for (const std::vector<std::string>& command : {std::vector<std::string>{"inspect", rounded},
                                                  {"inspect", rounded, "--json"},
                                                  {"run", rounded, "--prompt-ids", "1,7,9", "-n", "2"}}) {
    const Finished warned = run_lacuna(command);
    EXPECT_EQ(warned.code, 0) << warned.err;
    EXPECT_EQ(warned.out.find(warning), std::string::npos) << warned.out;
    const size_t at = warned.err.find(warning);
    ASSERT_NE(at, std::string::npos) << warned.err;
    EXPECT_EQ(warned.err.find(warning, at + 1), std::string::npos) << "once";
  }
}

TEST(QuantizeZigzag, TilesDoNotChangeTheText) {
  const TempDir dir;
  for (const char* source : {"gguf_models/llama_mha.gguf", "hf/llama_gqa_rope_llama3", "hf/qwen2", "hf/opt"}) {
    const std::string whole = dir.file("whole.gguf"), tiled = dir.file("tiled.gguf"), moved = dir.file("moved.gguf");
    output_of({"quantize", fixture(source), "-o", whole, "--layout", "zz8"});
    output_of({"quantize", fixture(source), "-o", tiled, "--layout", "zz8", "--tile-rows", "256"});
    const auto found = greedy(whole);
    EXPECT_EQ(found.size(), 8u);
    EXPECT_EQ(greedy(tiled), found) << source;
    const Finished again = run_lacuna({"quantize", whole, "-o", moved, "--layout", "zz8", "--tile-rows", "256"});
    EXPECT_EQ(again.code, 0) << again.err;
    EXPECT_EQ(again.err.find("quantized already"), std::string::npos) << "moving superblocks loses nothing";
    EXPECT_EQ(greedy(moved), found);
  }
}

TEST(QuantizeZigzag, EveryLayoutIsListedAndRuns) {
  const TempDir dir;
  for (const char* layout : {"zz2_k", "zz3_k", "zz4_k", "zz5_k", "zz6_k", "zz8"}) {
    const std::string out = dir.file("z.gguf");
    const auto report = json_of({"quantize", fixture("gguf_models/llama_mha.gguf"), "-o", out, "--layout", layout});
    EXPECT_EQ(report["bytes"].get<uint64_t>(), std::filesystem::file_size(out));
    EXPECT_GT(report["seconds"].get<double>(), 0.0);
    EXPECT_GT(report["peak_memory_bytes"].get<int64_t>(), 1 << 20);
    int zigzag = 0;
    const auto inspected = json_of({"inspect", out});
    for (const auto& tensor : inspected["tensors"]) {
      if (tensor["layout"] != layout) {
        EXPECT_FALSE(tensor.contains("tile_rows"));
        continue;
      }
      EXPECT_EQ(tensor["tile_rows"], 0);
      ++zigzag;
    }
    EXPECT_EQ(zigzag, 14);
    EXPECT_NE(output_of({"inspect", out}).find("whole columns"), std::string::npos);
    EXPECT_EQ(greedy(out).size(), 8u) << layout;
  }
}

// llama.cpp's _M mixes hold some matrices in more bits than others: --layout zigzag keeps that.
TEST(QuantizeZigzag, AMixKeepsItsBits) {
  const TempDir dir;
  const std::string source = fixture("gguf_models/llama_mha.gguf"), mixed = dir.file("mixed.gguf");
  output_of(
      {"quantize", source, "-o", mixed, "--layout", "q5_1", "--head-layout", "q8_0", "--embedding-layout", "f16"});
  const auto expected = json_of({"inspect", mixed})["tensors"];
  const std::string out = dir.file("out.gguf");
  output_of({"quantize", mixed, "-o", out, "--layout", "zigzag"});
  const auto found = json_of({"inspect", out})["tensors"];
  ASSERT_EQ(found.size(), expected.size());
  int zigzag = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const bool matrix = expected[i]["layout"] == "q5_1";
    EXPECT_EQ(found[i]["layout"], matrix ? nlohmann::json("zz6_k") : expected[i]["layout"]) << found[i]["name"];
    zigzag += matrix;
  }
  EXPECT_EQ(zigzag, 14);
  EXPECT_EQ(greedy(out).size(), 8u);
  output_of({"quantize", out, "-o", dir.file("again.gguf"), "--layout", "zigzag"});
  EXPECT_EQ(json_of({"inspect", dir.file("again.gguf")})["tensors"], found) << "what is zigzag already stays as it is";
  EXPECT_EQ(greedy(dir.file("again.gguf")), greedy(out));

  const std::string none = dir.file("none.gguf");
  expect_error({"quantize", source, "-o", none, "--layout", "zigzag"}, "no zigzag layout matches");
  expect_error({"quantize", mixed, "-o", none, "--layout", "zigzag", "--pure"}, "mix");
  EXPECT_FALSE(std::filesystem::exists(none));
}

TEST(QuantizeZigzag, SaysWhatItRefusesAndWhatWasQuantized) {
  const TempDir dir;
  const std::string source = fixture("gguf_models/llama_mha.gguf"), out = dir.file("out.gguf");
  expect_usage_error({"quantize", source, "-o", out, "--layout", "zz4_k", "--tile-rows", "100"}, "multiple of 256");
  expect_error({"quantize", source, "-o", out, "--layout", "q4_K", "--tile-rows", "256"}, "q4_K has no tile_rows");
  expect_error({"quantize", source, "-o", out, "--layout", "zz4_k", "--head-layout", "zz4_k"}, "output head");
  expect_usage_error({"quantize", source, "-o", out, "--layout", "zz4_K"}, "zz4_k");
  EXPECT_FALSE(std::filesystem::exists(out));
  output_of({"quantize", source, "-o", out, "--layout", "q8_0"});
  const Finished again = run_lacuna({"quantize", out, "-o", dir.file("z.gguf"), "--layout", "zz4_k"});
  EXPECT_EQ(again.code, 0);
  EXPECT_NE(again.err.find("was quantized already (q8_0)"), std::string::npos) << again.err;
}

// RECIPES 6: the digests are filled in after the weights; a killed or full run leaves nothing all the same.
TEST(QuantizeZigzag, AFullDiskLeavesNothing) {
  const TempDir dir;
  const std::string source = fixture("gguf_models/llama_mha.gguf");
  expect_error({"quantize", source, "-o", dir.file("out.gguf"), "--layout", "zz4_k"}, "out.gguf",
               {.file_size_limit = 20000});
  EXPECT_EQ(files_in(dir.path()).size(), 0u);
}

TEST(Synth, ZigzagDiffersFromRowsInTheMatricesOnly) {
  const TempDir dir;
  const std::string out = dir.file("s.gguf"), again = dir.file("t.gguf"), rows = dir.file("q.gguf");
  output_of({"synth", "llama-2-7b", "-o", out, "--layers", "1", "--layout", "zz4_k", "--tile-rows", "512"});
  output_of({"synth", "llama-2-7b", "-o", again, "--layers", "1", "--layout", "zz4_k", "--tile-rows", "512",
             "--threads", "1"});
  output_of({"synth", "llama-2-7b", "-o", rows, "--layers", "1"});
  EXPECT_TRUE(read_text(out) == read_text(again)) << "the bytes depend on the number of threads";
  const auto found = json_of({"inspect", out})["tensors"], expected = json_of({"inspect", rows})["tensors"];
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i]["name"], expected[i]["name"]);
    EXPECT_EQ(found[i]["shape"], expected[i]["shape"]);
    EXPECT_EQ(found[i]["bytes"], expected[i]["bytes"]) << found[i];
    const std::string name = found[i]["name"];
    const bool zigzag = name.starts_with("blk.") && found[i]["shape"].size() == 2;
    EXPECT_EQ(found[i]["layout"], zigzag ? nlohmann::json("zz4_k") : expected[i]["layout"]) << name;
  }
  EXPECT_EQ(json_of({"run", out, "-p", "Hi", "-n", "2", "--temp", "0", "--ignore-eos"})["ids"].size(), 2u);
  expect_error({"synth", "llama-2-7b", "-o", again, "--tile-rows", "256"}, "q4_K has no tile_rows");
  expect_error({"synth", "llama-2-7b", "-o", again, "--head-layout", "zz4_k"}, "output head");
}

TEST(QuantizeGrouped, EveryLayoutIsListedAndRuns) {
  const TempDir dir;
  const std::string source = fixture("gguf_models/llama_mha.gguf"), out = dir.file("g.gguf");
  for (const char* layout :
       {"gq2", "gq3", "gq4", "gq8", "bm2", "bm4", "bm8", "bm16", "gs2", "gs3", "gs4", "gs8", "gs16"}) {
    std::vector<std::string> arguments = {"quantize", source, "-o", out, "--layout", layout};
    const bool grouped = std::string(layout) != "bm16";
    if (grouped) arguments.insert(arguments.end(), {"--group-size", "32"});
    const auto report = json_of(arguments);
    EXPECT_EQ(report["bytes"].get<uint64_t>(), std::filesystem::file_size(out));
    int found = 0;
    const auto inspected = json_of({"inspect", out});
    for (const auto& tensor : inspected["tensors"]) {
      if (tensor["layout"] != layout) continue;
      ++found;
      EXPECT_EQ(tensor.contains("group_size"), grouped);
      EXPECT_EQ(tensor.value("group_size", 32), 32);
    }
    EXPECT_EQ(found, 14) << layout;
    EXPECT_EQ(greedy(out).size(), 8u) << layout;
  }
  output_of({"quantize", source, "-o", out, "--layout", "gq4"});
  EXPECT_NE(output_of({"inspect", out}).find("group_size 128"), std::string::npos);
  output_of({"quantize", source, "-o", out, "--layout", "gs4"});
  EXPECT_NE(output_of({"inspect", out}).find("group_size 16"), std::string::npos);
}

TEST(QuantizeGrouped, SaysWhatItRefuses) {
  const TempDir dir;
  const std::string source = fixture("gguf_models/llama_mha.gguf"), out = dir.file("out.gguf");
  expect_usage_error({"quantize", source, "-o", out, "--layout", "gq4", "--group-size", "-1"}, "not a whole number");
  expect_error({"quantize", source, "-o", out, "--layout", "q4_K", "--group-size", "64"}, "q4_K has no groups");
  expect_error({"quantize", source, "-o", out, "--layout", "nm24_q4", "--group-size", "64"}, "nm24_q4 has no groups");
  expect_error({"quantize", source, "-o", out, "--layout", "gq4", "--head-layout", "gq4"}, "output head");
  expect_error({"quantize", source, "-o", out, "--layout", "gs4", "--group-size", "24"},
               "group_size is 24, but gs4 has groups of 8, 16, 32, 64 or 128");
  EXPECT_FALSE(std::filesystem::exists(out));
  output_of({"quantize", source, "-o", out, "--layout", "bm4"});
  expect_error({"run", out, "-p", "Hi", "-n", "1", "--act-sparsity", "50"}, "is bm4, of which no kernel leaves inputs");
}

TEST(Synth, DropsTheShareOfTheWeightsThatWasAskedFor) {
  const TempDir dir;
  const std::string out = dir.file("s.gguf"), again = dir.file("t.gguf");
  output_of({"synth", "llama-2-7b", "-o", out, "--layers", "1", "--layout", "bm4", "--weight-sparsity", "75"});
  output_of({"synth", "llama-2-7b", "-o", again, "--layers", "1", "--layout", "bm4", "--weight-sparsity", "0.75",
             "--threads", "1"});
  EXPECT_TRUE(read_text(out) == read_text(again)) << "the bytes depend on the number of threads";
  int masked = 0;
  const auto inspected = json_of({"inspect", out});
  for (const auto& tensor : inspected["tensors"]) {
    if (tensor["layout"] != "bm4") continue;
    ++masked;
    EXPECT_EQ(tensor["nnz"].get<int64_t>(), tensor["shape"][0].get<int64_t>() * tensor["shape"][1].get<int64_t>() / 4);
    EXPECT_NEAR(tensor["bits"].get<double>(), 1 + 4 * 0.25 + 0.25, 0.02);
  }
  EXPECT_EQ(masked, 7);
  EXPECT_EQ(json_of({"run", out, "-p", "Hi", "-n", "2", "--temp", "0", "--ignore-eos"})["ids"].size(), 2u);
  expect_error({"synth", "llama-2-7b", "-o", again, "--layout", "gq4", "--weight-sparsity", "50"},
               "gq4 cannot have a weight sparsity of 0.5");
  expect_usage_error({"synth", "llama-2-7b", "-o", again, "--layout", "bm4", "--weight-sparsity", "100"}, "percentage");
}

TEST(Synth, DropsWholeGroups) {
  const TempDir dir;
  const std::string out = dir.file("s.gguf");
  output_of({"synth", "llama-3.2-1b", "-o", out, "--layers", "1", "--layout", "gs4", "--weight-sparsity", "50"});
  int sparse = 0;
  const auto inspected = json_of({"inspect", out});
  for (const auto& tensor : inspected["tensors"]) {
    if (tensor["layout"] != "gs4") continue;
    ++sparse;
    const auto weights = tensor["shape"][0].get<int64_t>() * tensor["shape"][1].get<int64_t>();
    EXPECT_EQ(tensor["nnz"].get<int64_t>(), weights / 2);
    EXPECT_EQ(tensor["kept_groups"].get<int64_t>(), weights / 32);
    EXPECT_NEAR(tensor["bits"].get<double>(), 1.0 / 16 + (4 + 20.0 / 16) / 2, 0.02);
  }
  EXPECT_EQ(sparse, 7);
  EXPECT_EQ(json_of({"run", out, "-p", "Hi", "-n", "2", "--temp", "0", "--ignore-eos"})["ids"].size(), 2u);
}

TEST(Synth, WritesWhatInspectAndRunRead) {
  const TempDir dir;
  const std::string out = dir.file("s.gguf"), again = dir.file("t.gguf");
  const auto made = json_of({"synth", "llama-3.2-1b", "-o", out, "--layers", "2"});
  EXPECT_EQ(made["path"], out);
  EXPECT_EQ(made["bytes"].get<uint64_t>(), std::filesystem::file_size(out));
  const auto found = json_of({"inspect", out});
  EXPECT_EQ(found["arch"], "llama");
  const int64_t layer = 2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048 + 2 * 2048;
  EXPECT_EQ(found["params"], int64_t{128256} * 2048 + 2 * layer + 2048 + 32);
  const auto ran = json_of({"run", out, "-p", "Hi", "-n", "3", "--temp", "0", "--ignore-eos"});
  EXPECT_EQ(ran["prompt_ids"].size(), 2u);
  EXPECT_EQ(ran["ids"].size(), 3u);
  output_of({"synth", "llama-3.2-1b", "-o", again, "--layers", "2", "--threads", "1"});
  EXPECT_TRUE(read_text(out) == read_text(again)) << "the bytes depend on the number of threads";
  expect_error({"synth", "gpt-5", "-o", out}, "llama-2-70b");
}

TEST(Synth, LearnedPositionsRunToo) {
  const TempDir dir;
  const std::string out = dir.file("opt.gguf");
  output_of({"synth", "opt-6.7b", "-o", out, "--layers", "1"});
  EXPECT_EQ(json_of({"run", out, "-p", "Hi", "-n", "2", "--temp", "0", "--ignore-eos"})["ids"].size(), 2u);
}

TEST(Perplexity, ProtocolsCountTheirTokens) {
  const TempDir dir;
  const std::string model = dir.file("tiny.gguf"), text = dir.file("text.txt"), logits = dir.file("logits.bin");
  write_tiny_model(model);
  std::ofstream(text) << std::string(100, 'q');
  const auto hf = json_of({"perplexity", model, "-f", text, "--ctx", "32", "--logits-out", logits});
  EXPECT_EQ(hf["tokens"], 3 * 31);  // three whole windows
  EXPECT_EQ(hf["ctx"], 32);
  EXPECT_EQ(hf["protocol"], "hf");
  EXPECT_EQ(hf["bos"], false);
  EXPECT_EQ(hf["act_sparsity"], 0.0);
  EXPECT_EQ(hf["text_sha256"].get<std::string>().size(), 64u);
  // The logits file gives the same perplexity; every token is 'q', byte token 113.
  const std::string raw = read_text(logits);
  int32_t header[2];
  std::memcpy(header, raw.data(), sizeof(header));
  EXPECT_EQ(header[0], 300);
  ASSERT_EQ(header[1], 93);
  ASSERT_EQ(raw.size(), sizeof(header) + size_t(93 * 300) * sizeof(float));
  double loss = 0;
  for (int row = 0; row < 93; ++row) {
    std::vector<float> values(300);
    std::memcpy(values.data(), raw.data() + sizeof(header) + size_t(row) * 1200, 1200);
    double sum = 0;
    for (const float v : values) sum += std::exp(double(v));
    loss += std::log(sum) - double(values['q']);
  }
  EXPECT_NEAR(hf["ppl"].get<double>() / std::exp(loss / 93), 1.0, 1e-5);

  const auto llama =
      json_of({"perplexity", model, "-f", text, "--ctx", "32", "--protocol", "llama.cpp", "--chunks", "2"});
  EXPECT_EQ(llama["windows"], 2);
  EXPECT_EQ(llama["protocol"], "llama.cpp");
}

// RECIPES 28.
TEST(Perplexity, ShortTextsAndNanAreRefused) {
  const TempDir dir;
  const std::string model = dir.file("tiny.gguf"), text = dir.file("text.txt"), bad = dir.file("bad.gguf");
  write_tiny_model(model);
  for (const size_t count : {size_t{0}, size_t{1}, size_t{10}}) {
    std::ofstream(text, std::ios::trunc) << std::string(count, 'q');
    expect_error({"perplexity", model, "-f", text, "--ctx", "128", "--json"}, "needs 128 tokens");
  }
  std::ofstream(text, std::ios::trunc) << std::string(300, 'q');
  rewrite(
      model, bad, [](io::Metadata&) {},
      [](const std::string& name, std::vector<std::byte>& bytes) {
        const float nan = NAN;
        if (name == "output.weight") std::memcpy(bytes.data() + 40 * 32 * 4, &nan, sizeof(nan));
      });
  const Finished failed = run_lacuna({"perplexity", bad, "-f", text, "--ctx", "64"});
  EXPECT_EQ(failed.code, 1);
  EXPECT_NE(failed.err.find("NaN"), std::string::npos) << failed.err;
}

TEST(Bench, RowsHaveTheStableKeysAndAreChecked) {
  const TempDir dir;
  const std::string model = dir.file("tiny.gguf");
  write_tiny_model(model, layout::Id::q8_0);
  const std::string out = output_of({"bench", model, "--what", "decode,prefill", "--runs", "2", "--prompt", "16",
                                     "--gen", "4", "--context", "8", "--json"});
  const auto rows = json_lines(out);
  ASSERT_EQ(rows.size(), 2u);
  for (const auto& row : rows) {
    for (const char* key :
         {"bench", "shape", "layout", "act_sparsity", "device", "threads", "median_ms", "min_ms", "max_ms", "runs",
          "bytes", "gb_s", "ceiling_gb_s", "tok_s", "checked", "load_s", "peak_memory_bytes"})
      EXPECT_TRUE(row.contains(key)) << key;
    EXPECT_EQ(row["checked"], true);
    EXPECT_GT(row["ceiling_gb_s"].get<double>(), 0.1);
    EXPECT_LE(row["min_ms"].get<double>(), row["median_ms"].get<double>());
    EXPECT_LE(row["median_ms"].get<double>(), row["max_ms"].get<double>());
  }
  expect_error({"bench", model, "--act-sparsity", "0.5"}, "ask for --what decode");
  expect_error({"bench", model, "--act-sparsity", "0.5", "--what", "decode"}, "holds no thresholds");
  expect_error({"bench"}, "MODEL");
  EXPECT_EQ(run_lacuna({"bench", model, "--layout", "q4_K"}).code, 2) << "--layout is for random weights only";
}

}  // namespace
}  // namespace lacuna::test
