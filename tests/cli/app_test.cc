// The program as a whole: help, version, exit codes, pure JSON, broken files, closed pipes.
#include <fmt/format.h>

#include <fstream>

#include "core/thread_pool.h"
#include "models.h"
#include "process.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

const std::vector<std::string> kCommands = {"pull",       "run",  "inspect", "tokenize", "quantize",
                                            "perplexity", "eval", "bench",   "synth"};
const std::string kModel = fixture("gguf_models/llama_tied.gguf");

TEST(App, EveryCommandExplainsItsFlags) {
  const std::string help = output_of({"--help"});
  for (const std::string& command : kCommands) {
    EXPECT_NE(help.find("\n  " + command), std::string::npos) << command;
    const std::string own = output_of({command, "--help"});
    for (const char* flag : {"--threads", "--device", "--json", "--help"})
      EXPECT_NE(own.find(flag), std::string::npos) << command << " " << flag;
    EXPECT_NE(own.find("lacuna " + command + " [OPTIONS]"), std::string::npos) << own;
  }
}

TEST(App, VersionNamesEverything) {
  const std::string version = output_of({"--version"});
  for (const char* word : {"lacuna ", "commit ", "compiler ", "SIMD ", "build "})
    EXPECT_NE(version.find(word), std::string::npos) << version;
}

TEST(App, WrongUsageExitsWith2AndOneLine) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{},
                                             {"frobnicate"},
                                             {"inspect"},
                                             {"inspect", kModel, "--nonsense"},
                                             {"run", kModel, "-n", "many"},
                                             {"inspect", kModel, "--threads", "0"},
                                             {"inspect", kModel, "--device", "tpu"},
                                             {"perplexity", kModel, "-f", kModel, "--protocol", "mine"},
                                             {"run", kModel, "--prompt-ids", ""},
                                             {"run", kModel, "--prompt-ids", "1,,2"},
                                             {"run", kModel, "--prompt-ids", "1,"},
                                             {"run", kModel, "--prompt-ids", "1,2x"},
                                             {"run", kModel, "-p", "a", "--seed", "-1"},
                                             {"run", kModel, "-p", "a", "--seed", ""},
                                             {"run", kModel, "-p", "a", "--seed", "18446744073709551616"},
                                             {"run", kModel, "-p", "a", "--temp", "-1"},
                                             {"run", kModel, "-p", "a", "--temp", "nan"},
                                             {"run", kModel, "-p", "a", "--temp", ""},
                                             {"run", kModel, "-p", "a", "--top-k", "-1"},
                                             {"run", kModel, "-p", "a", "--top-k", "99999999999999999999"},
                                             {"run", kModel, "-p", "a", "--top-p", "0"},
                                             {"run", kModel, "-p", "a", "--min-p", "-1"},
                                             {"run", kModel, "-p", "a", "--repeat-window", "99999999999999999999"},
                                             {"quantize", kModel, "-o", "/nonexistent/x", "--layout", "foo"},
                                             {"quantize", kModel, "-o", "/nonexistent/x", "--tile-rows", "100"},
                                             {"quantize", kModel, "-o", "/nonexistent/x", "--tile-rows", "1x"},
                                             {"synth", "llama-3.2-1b", "-o", "/nonexistent/x", "--layout", "foo"},
                                             {"synth", "llama-3.2-1b", "-o", "/nonexistent/x", "--tile-rows", "-256"},
                                             {"run", kModel, "-p", "a", "--repeat-penalty", "0"},
                                             {"run", kModel, "-p", "a", "--repeat-penalty", "nan"},
                                             {"tune", kModel, "--seconds", "nan"},
                                             {"pull", "x", "--retry-wait", "nan"},
                                             {"calibrate", kModel, "--text", "x", "--step", "nan"},
                                             {"run", kModel, "-p", "a", "--act-sparsity", "nan"},
                                             {"run", kModel, "-p", "a", "--gpu-memory", "nan"},
                                             {"run", kModel, "-p", "a", "--repeat-penalty", "101"},
                                             {"synth", "llama-3.2-1b", "-o", "/nonexistent/x", "--seed", "-1"},
                                             {"quantize", kModel}}) {
    const Finished done = run_lacuna(arguments);
    EXPECT_EQ(done.code, 2) << done.err;
    EXPECT_EQ(done.out, "");
    EXPECT_EQ(std::count(done.err.begin(), done.err.end(), '\n'), 1) << done.err;
    if (arguments.size() > 2 && arguments[arguments.size() - 2].starts_with("--")) {
      EXPECT_NE(done.err.find(arguments[arguments.size() - 2]), std::string::npos) << "names no flag: " << done.err;
    }
  }
  const Finished unknown = run_lacuna({"frobnicate"});
  for (const std::string& command : kCommands) EXPECT_NE(unknown.err.find(command), std::string::npos) << unknown.err;
}

TEST(App, WhatCudaCannotDoIsRefusedInASentence) {
  expect_error({"inspect", kModel, "--device", "cuda", "--json"}, "leave it out here");
  for (const auto& [flag, value] : {std::pair{"--beams", "5"}, {"--kv", "q8_0"}, {"--prepare", "in_place"}})
    expect_error({"run", kModel, "-p", "a", "--device", "cuda", flag, value}, flag);
  for (const char* flag : {"--gpu-layers", "--gpus", "--gpu-split"})
    expect_error({"run", kModel, "-p", "a", "--device", "cuda", "--beams", "2", flag, "2"}, flag);
  expect_error({"perplexity", kModel, "-f", kModel, "--device", "cuda", "--kv", "f32"}, "--kv");
  const std::vector<std::string> bench = {"bench", "--device", "cuda", "--json", "--synthetic", "llama-3.2-1b"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), bench.begin(), bench.end());
    return more;
  };
  expect_error({"bench", "--device", "cuda", "--spqt", "--deterministic"}, "--deterministic");
  expect_error(with({"--what", "linear", "--tune"}), "--tune");
  expect_error(with({"--spqt", "--tune"}), "--tune");
  expect_error(with({"--spqt", "--gpu-layers", "1"}), "--gpu-layers");
  expect_error(with({"--spqt", "--gpus", "2"}), "--gpus");
  expect_error(with({"--spqt", "--parts", "fig8", "--thresholds", "t.gguf"}), "--thresholds is of table2");
  expect_error(with({"--what", "linear", "--gpu-layers", "1"}), "--gpu-layers");
  expect_error(with({"--what", "linear", "--gpu-split", "2"}), "--gpu-split");
  expect_error(with({"--what", "decode", "--tune", "--gpus", "2"}), "--tune runs on one device");
  expect_error(with({"--what", "decode", "--tune", "--gpu-layers", "1"}), "--gpu-layers");
  for (const char* flag : {"--gpu-layers", "--gpus", "--gpu-split"})
    expect_usage_error({"tune", kModel, "--device", "cuda", flag, "1"}, flag);
  expect_error(with({"--what", "linear", "--profile", "p.json"}), "--profile");
  expect_error(with({"--what", "prefill,decode", "--act-sparsity", "50"}), "a prompt runs dense");
  expect_error({"bench", kModel, "--tune"}, "--tune");
  expect_error({"bench", kModel, "--what", "decode", "--beside-dense"}, "--beside-dense needs --act-sparsity");
  expect_error(with({"--what", "linear", "--layout", "zz4_k", "--act-sparsity", "50", "--beside-dense"}),
               "--beside-dense is of --what decode");
  expect_error({"bench", "--device", "cuda", "--synthetic", "nope", "--what", "decode"}, "unknown shape 'nope'");
  expect_error({"tune", kModel, "--device", "cuda", "--quick"}, "--quick");
  expect_error({"tune", kModel, "--thresholds", "t.gguf"}, "--thresholds");
  const std::vector<std::string> run = {"run", kModel, "-p", "a"}, perplexity = {"perplexity", kModel, "-f", kModel},
                                 eval = {"eval", kModel, "--task", "lambada", "--data", kModel};
  for (std::vector<std::string> command : {run, perplexity, eval, std::vector<std::string>{"bench", kModel}}) {
    const auto refused = [&](const std::vector<std::string>& flags, const std::string& needs) {
      std::vector<std::string> arguments = command;
      arguments.insert(arguments.end(), flags.begin(), flags.end());
      expect_error(arguments, flags[0] + " needs " + needs);
    };
    refused({"--gpu", "1"}, "--device cuda");
    refused({"--gpu-memory", "3"}, "--device cuda");
    refused({"--gpu-layers", "3"}, "--device cuda");
    refused({"--gpus", "2"}, "--device cuda");
    refused({"--gpu-split", "2"}, "--device cuda");
    refused({"--act-mode", "greedy"}, "--act-sparsity");
    refused({"--criterion", "wina"}, "--act-sparsity");
    refused({"--thresholds", "none.gguf"}, "--act-sparsity");
    refused({"--dense-prefix", "3"}, "--act-sparsity");
  }
  expect_error({"tune", kModel, "--gpu", "1"}, "--gpu needs --device cuda");
  for (const char* flag : {"--gpu", "--gpu-memory"})
    expect_error({"calibrate", kModel, "--text", kModel, flag, "1"}, std::string(flag) + " needs --device cuda");
  expect_error({"calibrate", kModel, "--text", kModel, "--device", "cuda", "--group", "16"}, "--group");
  expect_error(with({"--what", "prefill", "--act-sparsity", "50"}), "a prompt runs dense");
  expect_error(with({"--what", "linear", "--tokens", "2"}), "of one token of --synthetic SHAPE");
  expect_error({"bench", kModel, "--device", "cuda", "--what", "linear"}, "of one token of --synthetic SHAPE");
  expect_error(with({"--what", "linear", "--layout", "q4_K", "--act-sparsity", "50"}),
               "the kernels of q4_K skip nothing");
  expect_error(with({"--what", "linear", "--layout", "zz4_k", "--uneven-rows"}),
               "--uneven-rows is of layouts that drop");
}

// Without CUDA in the build, without a driver, without a device or on too small a card: one sentence.
TEST(App, CudaThatCannotRunSaysWhy) {
  const std::vector<std::vector<std::string>> calls = {
      {"bench", "--device", "cuda", "--synthetic", "llama-3.2-1b", "--what", "linear", "--layout", "zz4_k"},
      {"bench", kModel, "--device", "cuda", "--what", "decode"},
      {"bench", "--device", "cuda", "--spqt"},
      {"tune", kModel, "--device", "cuda"},
      {"run", kModel, "-p", "a", "--device", "cuda"},
      {"perplexity", kModel, "-f", kModel, "--device", "cuda", "--ctx", "16"},
      {"eval", kModel, "--task", "lambada", "--data", fixture("zero_shot/lambada.jsonl"), "--device", "cuda"}};
  for (std::vector<std::string> arguments : calls) {
    arguments.insert(arguments.end(), {"--gpu-memory", "0.01"});
    const Finished done = run_lacuna(arguments);
    EXPECT_EQ(done.code, 1);
    EXPECT_EQ(done.out, "");
    EXPECT_EQ(std::count(done.err.begin(), done.err.end(), '\n'), 1) << done.err;
    const bool said = std::ranges::any_of(
        std::vector<std::string>{"this build has no CUDA backend; build with scripts/build.sh --cuda",
                                 "this machine has no NVIDIA driver", "the driver finds no NVIDIA device",
                                 "update the driver", "0.01 GiB left of the limit that was given"},
        [&](const std::string& words) { return done.err.find(words) != std::string::npos; });
    EXPECT_TRUE(said) << done.err;
  }
}

TEST(App, JsonHasTheStableKeys) {
  const auto keys_of = [](const nlohmann::json& object) {
    std::vector<std::string> keys;
    for (const auto& [key, value] : object.items()) keys.push_back(key);
    return keys;
  };
  const auto inspected = json_of({"inspect", kModel});
  EXPECT_EQ(keys_of(inspected), (std::vector<std::string>{"arch", "bytes", "effective_bits", "params", "tensors"}));
  EXPECT_EQ(keys_of(inspected["tensors"][0]), (std::vector<std::string>{"bits", "bytes", "layout", "name", "shape"}));
  EXPECT_EQ(keys_of(json_of({"tokenize", kModel, "-p", "ab"})), (std::vector<std::string>{"ids"}));
  const auto ran = json_of({"run", kModel, "-p", "ab", "-n", "2", "--temp", "0"});
  for (const char* key : {"text", "prompt_ids", "ids", "load_s", "prefill_tok_s", "decode_tok_s", "act_sparsity"})
    EXPECT_TRUE(ran.contains(key)) << key;
}

// RECIPES 5: cut files, and files that are nothing.
TEST(App, BrokenFilesAreErrorsOfOneSentence) {
  const TempDir dir;
  const std::string whole = read_text(kModel);
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{4}, size_t{23}, size_t{25}, whole.size() / 2, whole.size() - 1}) {
    const std::string path = dir.file("cut.gguf");
    std::ofstream(path, std::ios::binary | std::ios::trunc) << whole.substr(0, size);
    expect_error({"inspect", path, "--json"}, "cut.gguf");
    expect_error({"run", path, "-p", "a", "--json"}, "cut.gguf");
    expect_error({"quantize", path, "-o", dir.file("out.gguf")}, "cut.gguf");
    EXPECT_FALSE(std::filesystem::exists(dir.file("out.gguf")));
  }
  expect_error({"inspect", dir.file("absent.gguf")}, "absent.gguf");
  expect_error({"inspect", dir.path().string()}, "config.json");
  expect_error({"inspect", "/dev/null"}, "/dev/null");
  for (const char* refused : {"gguf/refused_big_endian.gguf", "gguf/refused_nested_array.gguf"})
    expect_error({"inspect", fixture(refused)}, "refused");
}

// Flipped bytes anywhere in the header may be an error or an odd model, never a signal.
TEST(App, DamagedHeadersNeverCrash) {
  const TempDir dir;
  const std::string whole = read_text(kModel);
  for (size_t at = 0; at < 1200; at += 13) {
    std::string damaged = whole;
    damaged[at] = char(damaged[at] ^ 0xff);
    const std::string path = dir.file("damaged.gguf");
    std::ofstream(path, std::ios::binary | std::ios::trunc) << damaged;
    for (const std::vector<std::string>& arguments :
         {std::vector<std::string>{"inspect", path}, {"run", path, "-p", "ab", "-n", "1", "--ctx", "8"}}) {
      const Finished done = run_lacuna(arguments);
      EXPECT_TRUE(done.code == 0 || done.code == 1)
          << arguments[0] << ", byte " << at << ": signal " << done.signal << "\n"
          << done.err;
    }
  }
}

TEST(App, ControlCharactersOfAFileStayOffTheTerminal) {
  const TempDir dir;
  const std::string path = dir.file("hostile.gguf");
  rewrite(kModel, path, [](io::Metadata& m) {
    m.set("evil.\x1b[2Jkey", std::string("a\x1b]0;title\x07 b\r\n\x7f"));
    m.set("general.name", std::string("\xc3\xa9"));
  });
  const std::string shown = output_of({"inspect", path});
  for (const char* text : {"evil.\\x1b[2Jkey", "a\\x1b]0;title\\x07 b\\x0d\\x0a\\x7f", "\xc3\xa9"})
    EXPECT_NE(shown.find(text), std::string::npos) << text;
  for (const char c : shown) EXPECT_TRUE(c == '\n' || (static_cast<unsigned char>(c) >= 0x20 && c != 0x7f)) << int(c);

  expect_error({"inspect", dir.file("a\x1b[31m\x07.gguf")}, "a\\x1b[31m\\x07.gguf");
  EXPECT_EQ(run_lacuna({"inspect", dir.file("a\x1b[31m\x07.gguf")}).err.find('\x1b'), std::string::npos);
}

TEST(App, AnEmptyNameOfAnOutputIsRefused) {
  expect_error({"quantize", kModel, "-o", ""}, "-o needs the name of the file to write");
  expect_error({"synth", "llama-3.2-1b", "-o", ""}, "-o needs the name of the file to write");
  expect_error({"perplexity", kModel, "-f", kModel, "--logits-out", ""}, "--logits-out needs the name");
}

TEST(App, AReaderThatGoesAwayEndsItQuietly) {
  const Finished done = run_lacuna({"inspect", kModel}, {.close_out_early = true});
  EXPECT_EQ(done.signal, 0);
  EXPECT_EQ(done.code, 0);
  EXPECT_EQ(done.err, "");
}

TEST(App, AFullDiskUnderStdoutIsAnError) {
  const Finished done = run_lacuna({"inspect", kModel}, {.out_path = "/dev/full"});
  EXPECT_EQ(done.code, 1);
  EXPECT_NE(done.err.find("standard output"), std::string::npos) << done.err;
}

TEST(App, ThreadsThatCannotBeStartedAreAnError) {
  const TempDir dir;
  const RunOptions little{.memory_limit = 2'000'000'000};
  for (std::vector<std::string> arguments :
       std::vector<std::vector<std::string>>{{"run", kModel, "-p", "a", "-n", "2"},
                                             {"quantize", kModel, "-o", dir.file("q.gguf")},
                                             {"synth", "llama-3.2-1b", "-o", dir.file("s.gguf"), "--layers", "1"},
                                             {"bench", kModel}}) {
    arguments.insert(arguments.end(), {"--threads", "1000"});
    const Finished done = run_lacuna(arguments, little);
    EXPECT_EQ(done.code, 1) << arguments[0] << " signal " << done.signal;
    for (const char* words : {"cannot start thread", "use fewer --threads"})
      EXPECT_NE(done.err.find(words), std::string::npos) << arguments[0] << "\n" << done.err;
  }
  EXPECT_FALSE(std::filesystem::exists(dir.file("q.gguf")));
}

TEST(App, AFullOrClosedStderrLosesOnlyWhatItSays) {
  const TempDir dir;
  const std::vector<std::string> ran = {"run", kModel, "-p", "ab", "-n", "2", "--temp", "0", "--ignore-eos"};
  const std::string text = output_of(ran);
  for (const RunOptions& options :
       {RunOptions{.err_path = "/dev/full"}, RunOptions{.closed = {2}}, RunOptions{.closed = {0, 2}}}) {
    EXPECT_EQ(output_of(ran, options), text);
    const Finished unknown = run_lacuna({"foo"}, options);
    EXPECT_EQ(unknown.code, 2) << "signal " << unknown.signal;
    const std::string out = dir.file("out.gguf"), again = dir.file("again.gguf");
    output_of({"quantize", kModel, "-o", out, "--layout", "q8_0"}, options);
    output_of({"quantize", out, "-o", again, "--layout", "q4_0"}, options);  // warns
    output_of({"inspect", again}, options);
  }
}

TEST(App, AClosedStdoutOrStdinIsAnError) {
  const Finished done = run_lacuna({"inspect", kModel}, {.closed = {1}});
  EXPECT_EQ(done.code, 1);
  EXPECT_NE(done.err.find("standard output"), std::string::npos) << done.err;
  expect_error({"tokenize", kModel, "-f", "-"}, "cannot be read", {.closed = {0}});
}

TEST(App, MoreThreadsThanCoresAreWarnedOf) {
  const std::vector<std::string> command = {"tokenize", kModel, "-p", "a", "--threads"};
  const auto with = [&](const std::string& threads) {
    std::vector<std::string> arguments = command;
    arguments.push_back(threads);
    const Finished done = run_lacuna(arguments);
    EXPECT_EQ(done.code, 0);
    return done.err;
  };
  EXPECT_EQ(with(std::to_string(usable_cores())), "");
  EXPECT_NE(with(std::to_string(usable_cores() + 1)).find("more threads than cores"), std::string::npos);
  EXPECT_NE(with(fmt::format("{:#x}", usable_cores() + 1)).find("more threads than cores"), std::string::npos);
}

TEST(App, ErrorsNameTheFile) {
  const TempDir dir;
  const std::string bare = dir.file("bare.gguf"), merges = dir.file("merges.gguf"), no_pre = dir.file("no_pre.gguf");
  rewrite(kModel, bare, [](io::Metadata& m) { m.erase("llama.block_count"); });
  expect_error({"run", bare, "-p", "a"}, bare + ": metadata key llama.block_count is missing");
  const std::string vocabulary = fixture("gguf/vocabulary.gguf");
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"run", vocabulary, "-p", "a"},
        {"perplexity", vocabulary, "-f", kModel},
        {"eval", vocabulary, "--task", "lambada", "--data", fixture("zero_shot/lambada.jsonl")},
        {"bench", vocabulary},
        {"tune", vocabulary},
        {"quantize", vocabulary, "-o", dir.file("out.gguf")}})
    expect_error(command, vocabulary + ": has no weights, a vocabulary only");
  rewrite(kModel, merges,
          [](io::Metadata& m) { m.set("tokenizer.ggml.merges", std::vector<std::string>{std::string("x\0 y", 4)}); });
  expect_error({"tokenize", merges, "-p", "a"}, merges + ": tokenizer merge 0");
  expect_error({"tokenize", merges, "-p", "a"}, "which the vocabulary lacks");  // behind the NUL
  std::filesystem::create_directory(dir.file("loop"));
  std::filesystem::create_symlink("config.json", dir.file("loop/config.json"));
  expect_error({"inspect", dir.file("loop")}, dir.file("loop/config.json") + ": cannot be looked at: Too many levels");

  rewrite(kModel, no_pre, [](io::Metadata& m) { m.erase("tokenizer.ggml.pre"); });
  const Finished done = run_lacuna({"tokenize", no_pre, "-p", "a"});
  EXPECT_EQ(done.code, 0) << done.err;
  EXPECT_NE(done.err.find("tokenizer.ggml.pre"), std::string::npos) << done.err;
  EXPECT_EQ(std::count(done.err.begin(), done.err.end(), '\n'), 1) << done.err;
  EXPECT_EQ(run_lacuna({"tokenize", kModel, "-p", "a"}).err, "");
}

TEST(Inspect, CountsWhatTheFileHolds) {
  const auto found = json_of({"inspect", kModel});
  EXPECT_EQ(found["arch"], "llama");
  int64_t params = 0, bytes = 0;
  for (const auto& tensor : found["tensors"]) {
    int64_t count = 1;
    for (const auto& dim : tensor["shape"]) count *= dim.get<int64_t>();
    EXPECT_EQ(tensor["bytes"].get<int64_t>(), 4 * count) << tensor;  // the fixture is f32
    EXPECT_DOUBLE_EQ(tensor["bits"].get<double>(), 32.0);
    params += count;
    bytes += tensor["bytes"].get<int64_t>();
  }
  EXPECT_GT(params, 0);
  EXPECT_EQ(found["params"], params);
  EXPECT_EQ(found["bytes"], bytes);
  EXPECT_DOUBLE_EQ(found["effective_bits"].get<double>(), 32.0);
  EXPECT_EQ(json_of({"inspect", fixture("hf/llama_tied")})["params"], params) << "the same model as a folder";
}

TEST(Inspect, AVocabularyAloneWorks) {
  const auto found = json_of({"inspect", fixture("gguf/vocabulary.gguf")});
  EXPECT_EQ(found["params"], 0);
  EXPECT_EQ(found["tensors"].size(), 0u);
  EXPECT_NE(output_of({"inspect", fixture("gguf/vocabulary.gguf")}).find("no tensors"), std::string::npos);
}

TEST(Tokenize, TextFileAndFlags) {
  const TempDir dir;
  const std::string path = dir.file("text.txt");
  std::ofstream(path) << "abc a";
  const auto ids = json_of({"tokenize", kModel, "-p", "abc a"})["ids"];
  EXPECT_EQ(ids, (std::vector<int>{3, 4, 5, 46}));  // a, b, c and the one merge, "_a"
  EXPECT_EQ(json_of({"tokenize", kModel, "-f", path})["ids"], ids);
  EXPECT_EQ(json_of({"tokenize", kModel, "-f", "-"}, {.input = "abc a"})["ids"], ids);
  EXPECT_EQ(output_of({"tokenize", kModel, "-p", "abc"}), "3 4 5\n");
  EXPECT_EQ(json_of({"tokenize", kModel, "-p", ""})["ids"].size(), 0u);
  expect_error({"tokenize", kModel}, "-p TEXT");
  expect_error({"tokenize", fixture("hf/llama_mha"), "-p", "a"}, "no tokenizer");
}

}  // namespace
}  // namespace lacuna::test
