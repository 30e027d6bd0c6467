// Checkpoints of other programs: modules made here bit by bit, as their formats are described.
#include "io/import.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>

#include "core/rng.h"
#include "core/scalar.h"
#include "gguf_bytes.h"
#include "hf_folder.h"
#include "io/json.h"
#include "layout/grouped.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

using layout::Id;
using nlohmann::json;

/// The tensors of one module.
class Module {
 public:
  template <class T>
  Module& add(const std::string& part, const char* dtype, std::vector<int64_t> dims, const std::vector<T>& numbers) {
    bytes_.push_back(test::bytes_of(numbers));
    const std::string name = tensors_.name() + "." + part;
    files_.push_back({{name, dtype, std::move(dims), test::as_span(bytes_.back())}, "x.safetensors"});
    tensors_.add(part, files_.back());
    return *this;
  }
  const ModuleTensors& tensors() const { return tensors_; }
  SafetensorsEntry& entry(size_t i) { return files_[i].entry; }
  const SafetensorsEntry& entry(size_t i) const { return files_[i].entry; }

 private:
  ModuleTensors tensors_{"model.layers.0.mlp.up_proj"};
  std::deque<std::string> bytes_;
  std::deque<FileTensor> files_;
};

std::unique_ptr<Importer> importer_of(const std::string& config) {
  return make_importer(
      {json::parse(config), "config.json", json_keys(config, std::array<std::string_view, 1>{"dynamic"})});
}

ImportedMatrix import(const std::string& config, const Module& module, ThreadPool* pool = nullptr) {
  const auto importer = importer_of(config);
  EXPECT_TRUE(importer->takes(module.tensors()));
  return importer->import(module.tensors(), pool);
}

std::vector<float> decoded(const ImportedMatrix& m) {
  EXPECT_EQ(int64_t(m.bytes.size()), m.layout->size_bytes(m.shape, m.params));
  layout::check_bytes(*m.layout, m.shape, m.bytes, m.params);
  std::vector<float> out(size_t(m.shape.N * m.shape.K));
  layout::decode_rows(*m.layout, m.shape, m.bytes, 0, m.shape.N, out.data(), m.params);
  return out;
}

uint16_t half(float x) { return to_f16(x).bits; }

/// A string of bits, cut into words of 32.
class BitString {
 public:
  void append(uint32_t code, int bits) {
    for (int b = 0; b < bits; ++b) bits_.push_back(code >> b & 1);
  }
  void fill_word() {
    while (bits_.size() % 32 != 0) bits_.push_back(false);
  }
  std::vector<uint32_t> words() const {
    std::vector<uint32_t> out((bits_.size() + 31) / 32);
    for (size_t i = 0; i < bits_.size(); ++i) out[i / 32] |= uint32_t(bits_[i]) << (i % 32);
    return out;
  }

 private:
  std::vector<bool> bits_;
};

/// Random codes in groups.
struct Codes {
  int bits;
  int64_t N, K, group_size, G;
  std::vector<uint32_t> code, zero;  // [N, K], [N, G]
  std::vector<float> scale;          // [N, G], exact in f16

  Codes(int bits_of_code, int64_t outputs, int64_t inputs, int64_t group)
      : bits(bits_of_code), N(outputs), K(inputs), group_size(group), G(layout::group_count(inputs, group)) {
    Rng rng(uint64_t(1000 * bits + N + K));
    for (int64_t i = 0; i < N * K; ++i) code.push_back(uint32_t(rng.below(uint64_t{1} << bits)));
    for (int64_t i = 0; i < N * G; ++i) {
      zero.push_back(uint32_t(rng.below(uint64_t{1} << bits)));
      scale.push_back(to_float(to_f16(float(0.01 + 0.1 * rng.uniform()))));
    }
  }
  std::vector<float> weights() const {
    std::vector<float> out;
    for (int64_t i = 0; i < N * K; ++i) {
      const auto g = size_t(i / K * G + i % K / layout::whole_group(K, group_size));
      out.push_back(scale[g] * (float(code[size_t(i)]) - float(zero[g])));
    }
    return out;
  }
};

/// [rows, cols] words from one string of bits for each column.
std::vector<uint32_t> down_columns(int64_t cols, const std::function<BitString(int64_t)>& column) {
  std::vector<std::vector<uint32_t>> words;
  for (int64_t c = 0; c < cols; ++c) words.push_back(column(c).words());
  std::vector<uint32_t> out;
  for (size_t r = 0; r < words[0].size(); ++r)
    for (const auto& one : words) out.push_back(one[r]);
  return out;
}
std::vector<uint32_t> along_rows(int64_t rows, const std::function<BitString(int64_t)>& row) {
  std::vector<uint32_t> out;
  for (int64_t r = 0; r < rows; ++r) {
    const auto words = row(r).words();
    out.insert(out.end(), words.begin(), words.end());
  }
  return out;
}

std::vector<uint16_t> transposed_halves(const Codes& c) {
  std::vector<uint16_t> out;
  for (int64_t g = 0; g < c.G; ++g)
    for (int64_t n = 0; n < c.N; ++n) out.push_back(half(c.scale[size_t(n * c.G + g)]));
  return out;
}

// ---- GPTQ ----

Module gptq(const Codes& c, bool v2, bool with_order) {
  const auto words = down_columns(c.N, [&](int64_t n) {
    BitString out;
    for (int64_t k = 0; k < c.K; ++k) out.append(c.code[size_t(n * c.K + k)], c.bits);
    return out;
  });
  const auto zeros = along_rows(c.G, [&](int64_t g) {
    BitString out;
    for (int64_t n = 0; n < c.N; ++n) out.append(c.zero[size_t(n * c.G + g)] - (v2 ? 0 : 1), c.bits);
    return out;
  });
  Module m;
  m.add("qweight", "I32", {int64_t(words.size()) / c.N, c.N}, words);
  m.add("qzeros", "I32", {c.G, int64_t(zeros.size()) / c.G}, zeros);
  m.add("scales", "F16", {c.G, c.N}, transposed_halves(c));
  std::vector<int32_t> order;
  for (int64_t k = 0; k < c.K; ++k) order.push_back(int32_t(k / layout::whole_group(c.K, c.group_size)));
  if (with_order) m.add("g_idx", "I32", {c.K}, order);
  return m;
}

std::string gptq_config(int bits, int64_t group_size, const char* more = "") {
  return fmt::format(R"({{"quant_method":"gptq","bits":{},"group_size":{}{}}})", bits, group_size, more);
}

TEST(ImportGptq, EveryWidthAndGroup) {
  ThreadPool pool(2);
  for (const int bits : {2, 3, 4, 8}) {
    for (const auto& [N, K] : {std::pair<int64_t, int64_t>{32, 64}, {1, 32}, {96, 288}, {33, 100}, {7, 31}}) {
      for (const int64_t group_size : {-1, 16, 32, 128}) {
        const Codes c(bits, N, K, group_size);
        for (const bool v2 : {false, true}) {
          const char* format = v2 ? R"(,"checkpoint_format":"gptq_v2","desc_act":true)" : R"(,"desc_act":false)";
          const ImportedMatrix m =
              import(gptq_config(bits, group_size, format), gptq(c, v2, true), v2 ? &pool : nullptr);
          EXPECT_EQ(m.layout->name, fmt::format("gq{}", bits));
          EXPECT_EQ(m.shape, (layout::Shape{N, K}));
          EXPECT_EQ(m.params.group_size, group_size < K && group_size > 0 ? group_size : 0);
          ASSERT_EQ(decoded(m), c.weights()) << bits << " " << N << " " << K << " " << group_size << " " << v2;
        }
      }
    }
  }
  const Codes c(3, 32, 64, -1);
  EXPECT_EQ(decoded(import(gptq_config(3, -1), gptq(c, false, false))), c.weights()) << "without g_idx";
}

TEST(ImportGptq, ScalesMayBeWiderWhereF16HoldsThem) {
  for (const bool brain : {false, true}) {
    Codes c(4, 8, 32, 16);
    if (brain)
      for (float& scale : c.scale) scale = to_float(to_bf16(scale));  // 8 bits, which f16 holds too
    Module m = gptq(c, false, true);
    std::vector<uint16_t> brains;
    std::vector<float> floats;
    for (const uint16_t h : transposed_halves(c)) {
      brains.push_back(to_bf16(to_float(f16{h})).bits);
      floats.push_back(to_float(f16{h}));
    }
    const std::string bytes = brain ? test::bytes_of(brains) : test::bytes_of(floats);
    m.entry(2).dtype = brain ? "BF16" : "F32";
    m.entry(2).bytes = test::as_span(bytes);
    EXPECT_EQ(decoded(import(gptq_config(4, 16), m)), c.weights()) << brain;
    floats[9] = 0.1f;
    brains[9] = to_bf16(1e-9f).bits;
    const std::string bad = brain ? test::bytes_of(brains) : test::bytes_of(floats);
    m.entry(2).bytes = test::as_span(bad);
    EXPECT_ERROR(import(gptq_config(4, 16), m), "x.safetensors: tensor model.layers.0.mlp.up_proj.scales: scale 9 is ");
    EXPECT_ERROR(import(gptq_config(4, 16), m), "do not hold exactly; store the model's scales as F16");
  }
}

/// As GPTQModel stores zeros in checkpoint_format gptq: as gptq_v2, less a one in every field, by words with a borrow.
Module gptq_by_words(const Codes& c, std::string& bytes) {
  Module m = gptq(c, true, true);
  std::vector<uint32_t> words(m.entry(1).bytes.size() / 4);
  std::memcpy(words.data(), m.entry(1).bytes.data(), 4 * words.size());
  const uint32_t ones = c.bits == 2 ? 0x55555555 : c.bits == 4 ? 0x11111111 : 0x01010101;
  for (uint32_t& word : words) word -= ones;
  bytes = test::bytes_of(words);
  m.entry(1).bytes = test::as_span(bytes);
  return m;
}

constexpr const char* kGptqModel =
    R"(,"checkpoint_format":"gptq","meta":{"quantizer":["gptqmodel:7.3.4","other:1.0"]})";

TEST(ImportGptq, GptqModelSubtractsFromWords) {
  // The zeros of one group of eight outputs: each 0 borrows from the next.
  Codes few(4, 8, 16, 16);
  few.zero = {0, 5, 8, 15, 3, 0, 7, 9};
  std::string bytes;
  const Module one = gptq_by_words(few, bytes);
  uint32_t word = 0;
  std::memcpy(&word, one.entry(1).bytes.data(), sizeof word);
  EXPECT_EQ(word, 0x9703f850u - 0x11111111u);
  EXPECT_EQ(decoded(import(gptq_config(4, 16, kGptqModel), one)), few.weights());
  EXPECT_NE(decoded(import(gptq_config(4, 16), one)), few.weights()) << "modulo 16, as other programs have it";

  for (const int bits : {2, 4, 8}) {
    for (const int64_t N : {int64_t{32}, int64_t{5}}) {
      Codes c(bits, N, 64, 16);
      for (size_t i = 0; i < c.zero.size(); i += 3) c.zero[i] = 0;
      const Module m = gptq_by_words(c, bytes);
      for (const char* makers : {R"("gptqmodel:1.2.0")", R"(["other:1","GPTQModel:7.0.0"])"}) {
        const std::string more = fmt::format(R"(,"meta":{{"quantizer":{}}})", makers);
        const auto importer = importer_of(gptq_config(bits, 16, more.c_str()));
        EXPECT_EQ(decoded(importer->import(m.tensors(), nullptr)), c.weights()) << bits << " " << N;
        EXPECT_TRUE(importer->warnings().empty());
      }
    }
  }
  // 3 bits are subtracted one by one, and were not before version 7.
  Codes c(3, 32, 64, 16);
  c.zero[4] = c.zero[5] = 0;
  const Module m = gptq(c, false, true);
  EXPECT_EQ(decoded(import(gptq_config(3, 16, kGptqModel), m)), c.weights());
  const char* old = R"(,"meta":{"quantizer":["gptqmodel:6.0.3"]})";
  EXPECT_ERROR(import(gptq_config(3, 16, old), m), "qzeros: GPTQModel before version 7 stores 3-bit zero points in");
  const char* old_v2 = R"(,"meta":{"quantizer":["gptqmodel:6.0.3"]},"checkpoint_format":"gptq_v2")";
  EXPECT_EQ(decoded(import(gptq_config(3, 16, old_v2), gptq(c, true, true))), c.weights());
}

TEST(ImportGptq, AWarningWhereProgramsDisagree) {
  Codes c(4, 8, 32, 16);
  std::ranges::replace(c.zero, 0u, 1u);
  const auto warnings = [&](bool v2) {
    const auto importer = importer_of(gptq_config(4, 16, v2 ? R"(,"checkpoint_format":"gptq_v2")" : ""));
    EXPECT_EQ(decoded(importer->import(gptq(c, v2, true).tensors(), nullptr)), c.weights());
    return importer->warnings();
  };
  EXPECT_TRUE(warnings(false).empty());
  c.zero[3] = c.zero[9] = 0;  // stored as 15
  ASSERT_EQ(warnings(false).size(), 1u);
  EXPECT_NE(warnings(false)[0].find("programs disagree"), std::string::npos);
  EXPECT_TRUE(warnings(true).empty());
}

TEST(ImportGptq, ActivationOrderIsRefused) {
  const Codes c(4, 8, 64, 16);
  Module m = gptq(c, false, true);
  std::vector<int32_t> order(64);
  for (size_t k = 0; k < 64; ++k) order[k] = int32_t(k / 16);
  order[5] = 3;
  const std::string bytes = test::bytes_of(order);
  m.entry(3).bytes = test::as_span(bytes);
  EXPECT_ERROR(import(gptq_config(4, 16, R"(,"desc_act":true)"), m),
               "up_proj.g_idx: input 5 is in group 3 and not in 0: the weights were quantized in the order of "
               "activations");
  EXPECT_ERROR(import(gptq_config(4, 16), m), "desc_act false or with static groups");
  EXPECT_ERROR(import(gptq_config(4, 16, R"(,"desc_act":true)"), gptq(c, false, false)), "up_proj.g_idx is missing");
}

TEST(ImportGptq, SizesMustAgree) {
  const Codes c(4, 32, 64, 16);
  const auto refuse = [&](size_t part, std::vector<int64_t> dims, const char* dtype, const char* expected,
                          bool with_order = true) {
    Module m = gptq(c, false, with_order);
    m.entry(part).dims = std::move(dims);
    m.entry(part).dtype = dtype;
    EXPECT_ERROR(import(gptq_config(4, 16), m), expected);
  };
  refuse(0, {4, 64}, "I32", "4 rows of 32-bit words do not hold the 4-bit codes of 64 inputs");
  refuse(0, {256}, "I32", "qweight: a matrix of I32 is expected, found I32 [256]");
  refuse(0, {8, 32}, "F32", "qweight: a matrix of I32 is expected, found F32");
  refuse(1, {2, 8}, "I32", "qzeros: shape [4, 4] is expected for a zero point for each group and output, found [2, 8]");
  refuse(2, {32, 4}, "F16", "scales: shape [4, 32] is expected");
  refuse(2, {4, 32}, "I16", "scales of dtype I16 are not read");
  refuse(3, {32}, "I64", "do not hold the 4-bit codes of 32 inputs");
  refuse(3, {2, 32}, "I32", "do not hold the 4-bit codes of 0 inputs");
  refuse(3, {64}, "F32", "g_idx: integers are expected, found dtype F32");
  Module empty = gptq(c, false, false);
  empty.entry(0).dims = {0, 32};
  empty.entry(0).bytes = {};
  EXPECT_ERROR(import(gptq_config(4, 16), empty), "a matrix of I32 is expected, found I32 [0, 32]");
  Module partial;
  partial.add("scales", "F16", {4, 32}, transposed_halves(c));
  EXPECT_ERROR(import(gptq_config(4, 16), partial), "but model.layers.0.mlp.up_proj.qweight is missing");
  const Codes odd(8, 32, 4, -1);  // one row of words; as 3 bits 32 places hold no whole number of codes
  EXPECT_ERROR(import(gptq_config(3, -1), gptq(odd, false, false)), "hold no whole number of 3-bit codes");
}

TEST(ImportGptq, NonFiniteScalesAreDamage) {
  const Codes c(4, 8, 32, 16);
  Module m = gptq(c, false, true);
  std::vector<uint16_t> scales = transposed_halves(c);
  scales[3] = 0x7c00;
  const std::string bytes = test::bytes_of(scales);
  m.entry(2).bytes = test::as_span(bytes);
  EXPECT_ERROR(import(gptq_config(4, 16), m), "scales: scale 3 is inf; the file is damaged");
}

TEST(ImportGptq, RulesForModules) {
  const Codes c(8, 32, 64, 32);
  const auto read = [&](const char* dynamic) {
    return import(gptq_config(4, 128, fmt::format(R"(,"dynamic":{})", dynamic).c_str()), gptq(c, false, true));
  };
  EXPECT_EQ(decoded(read(R"({"-:.*k_proj":{},"+:.*\\.up_proj$":{"bits":8,"group_size":32},".*lm_head":{"bits":2}})")),
            c.weights());
  // The first in the order of the file, not of the alphabet.
  EXPECT_EQ(decoded(read(R"({"model.*up_proj":{"bits":8,"group_size":32},".*up_proj":{"bits":2}})")), c.weights());
  EXPECT_ERROR(read(R"({".*up_proj":{"bits":2},"model.*up_proj":{"bits":8,"group_size":32}})"),
               "16 rows of 32-bit words do not hold the 2-bit codes of 64 inputs");
  const Codes v2(8, 32, 64, 128);
  EXPECT_EQ(decoded(import(gptq_config(8, 128, R"(,"format":"gptq","dynamic":{".*up_proj":{"format":"gptq_v2"}})"),
                           gptq(v2, true, true))),
            v2.weights());
  EXPECT_ERROR(read(R"({".*":{"format":"marlin"}})"), "config.json: dynamic: checkpoint_format \"marlin\"");
  EXPECT_ERROR(read(R"({"(":{}})"), "config.json: dynamic: regular expression '('");
  EXPECT_ERROR(read(R"({"(([a-z.0-9_]+)+)+[!?]":{}})"), "match limit exceeded");
  EXPECT_ERROR(read(R"({".*":4})"), "config.json: dynamic: expected a JSON object");
}

// ---- AWQ ----

Module awq(const Codes& c) {
  constexpr int kOrder[] = {0, 2, 4, 6, 1, 3, 5, 7};
  std::vector<uint32_t> words(size_t(c.K * c.N / 8)), zeros(size_t(c.G * c.N / 8));
  for (int64_t word = 0; word < c.N / 8; ++word) {
    for (int i = 0; i < 8; ++i) {
      const int64_t n = 8 * word + kOrder[i];
      for (int64_t k = 0; k < c.K; ++k) words[size_t(k * c.N / 8 + word)] |= c.code[size_t(n * c.K + k)] << (4 * i);
      for (int64_t g = 0; g < c.G; ++g) zeros[size_t(g * c.N / 8 + word)] |= c.zero[size_t(n * c.G + g)] << (4 * i);
    }
  }
  Module m;
  m.add("qweight", "I32", {c.K, c.N / 8}, words).add("qzeros", "I32", {c.G, c.N / 8}, zeros);
  m.add("scales", "F16", {c.G, c.N}, transposed_halves(c));
  return m;
}

TEST(ImportAwq, Gemm) {
  for (const int64_t group_size : {int64_t{32}, int64_t{-1}}) {
    const Codes c(4, 48, 96, group_size);
    Module m = awq(c);
    const std::string config = fmt::format(
        R"({{"quant_method":"awq","bits":4,"group_size":{},"zero_point":true,"version":"GEMM"}})", group_size);
    const ImportedMatrix matrix = import(config, m);
    EXPECT_EQ(matrix.layout->id, Id::gq4);
    EXPECT_EQ(decoded(matrix), c.weights());
    m.entry(1).dims = {c.G, c.N / 16};
    EXPECT_ERROR(import(config, m), "qzeros: shape [");
  }
}

TEST(ImportAwq, RulesForModules) {  // GPTQModel writes them here too
  const Codes c(4, 48, 96, 32);
  const auto read = [&](const char* dynamic) {
    return import(
        fmt::format(R"({{"quant_method":"awq","bits":4,"group_size":96,"checkpoint_format":"gemm","dynamic":{}}})",
                    dynamic),
        awq(c));
  };
  EXPECT_EQ(decoded(read(R"({"+:.*up_proj":{"group_size":32},".*":{"group_size":16}})")), c.weights());
  EXPECT_ERROR(read(R"({".*up_proj":{"group_size":48},"+:.*":{"group_size":32}})"), "qzeros: shape [2, 6] is expected");
  EXPECT_ERROR(read(R"({".*up_proj":{"bits":8}})"), "config.json: dynamic: weights of 8 bits are not read");
  EXPECT_ERROR(read(R"({".*up_proj":{"format":"gemv_fast"}})"), "config.json: dynamic: version \"gemv_fast\" of AWQ");
}

TEST(ImportAwq, GemvPadsItsGroups) {
  const Codes c(4, 24, 96, 32);
  const int64_t Z = 4;  // words a row: 3 groups in 8 places, padded to 4 words as groups of 32 are
  const auto words = along_rows(c.N, [&](int64_t n) {
    BitString out;
    for (int64_t k = 0; k < c.K; ++k) out.append(c.code[size_t(n * c.K + k)], 4);
    return out;
  });
  const auto zeros = along_rows(c.N, [&](int64_t n) {
    BitString out;
    for (int64_t g = 0; g < 8 * Z; ++g) out.append(g < c.G ? c.zero[size_t(n * c.G + g)] : 0, 4);
    return out;
  });
  std::vector<uint16_t> scales;
  for (int64_t n = 0; n < c.N; ++n)
    for (int64_t g = 0; g < 8 * Z; ++g) scales.push_back(g < c.G ? half(c.scale[size_t(n * c.G + g)]) : uint16_t{0});
  Module m;
  m.add("qweight", "I32", {c.N, c.K / 8}, words).add("qzeros", "I32", {c.N, Z}, zeros);
  m.add("scales", "F16", {c.N, 8 * Z}, scales);
  const std::string config = R"({"quant_method":"awq","w_bit":4,"q_group_size":32,"version":"gemv"})";
  EXPECT_EQ(decoded(import(config, m)), c.weights());
  m.entry(2).dims = {c.N, 4 * Z};
  EXPECT_ERROR(import(config, m), "scales: shape [24, 32] is expected");
  m.entry(1).dims = {c.N / 2, 2 * Z};
  EXPECT_ERROR(import(config, m), "qzeros: 24 rows of 3 zero points are expected, found 12 of 64");
}

// ---- compressed-tensors ----

struct Compressed {
  int bits = 4;
  bool symmetric = true;
  std::string strategy = "group";
  int64_t group_size = 32;
  std::string format = "pack-quantized";
  std::string more = "";  // of quantization_config

  std::string config() const {
    return fmt::format(
        R"({{"quant_method":"compressed-tensors","format":"{}","config_groups":{{"group_0":{{"targets":["Linear"],)"
        R"("weights":{{"num_bits":{},"type":"int","symmetric":{},"strategy":"{}"{}}}}}}}{}}})",
        format, bits, symmetric, strategy, strategy == "group" ? fmt::format(R"(,"group_size":{})", group_size) : "",
        more);
  }
};

std::vector<uint16_t> halves(const std::vector<float>& x) {
  std::vector<uint16_t> out;
  for (const float v : x) out.push_back(half(v));
  return out;
}

/// As many codes as fit whole into a word, or one string of bits.
void append_codes(BitString& out, const std::function<uint32_t(int64_t)>& code, int64_t count, int bits, bool whole) {
  for (int64_t i = 0; i < count; ++i) {
    if (whole && i > 0 && i % (32 / bits) == 0) out.fill_word();
    out.append(code(i), bits);
  }
}

Module packed(const Codes& c, bool symmetric, bool whole) {
  const auto words = along_rows(c.N, [&](int64_t n) {
    BitString out;
    append_codes(
        out, [&](int64_t k) { return c.code[size_t(n * c.K + k)]; }, c.K, c.bits, whole);
    return out;
  });
  Module m;
  m.add("weight_packed", "I32", {c.N, int64_t(words.size()) / c.N}, words);
  m.add("weight_scale", "F16", {c.N, c.G}, halves(c.scale));
  m.add("weight_shape", "I64", {2}, std::vector<int64_t>{c.N, c.K});
  if (symmetric) return m;
  const auto zeros = down_columns(c.G, [&](int64_t g) {
    BitString out;
    append_codes(
        out, [&](int64_t n) { return c.zero[size_t(n * c.G + g)]; }, c.N, c.bits, whole);
    return out;
  });
  m.add("weight_zero_point", "I32", {int64_t(zeros.size()) / c.G, c.G}, zeros);
  return m;
}

Codes symmetric_codes(int bits, int64_t N, int64_t K, int64_t group_size) {
  Codes c(bits, N, K, group_size);
  std::fill(c.zero.begin(), c.zero.end(), uint32_t{1} << (bits - 1));
  return c;
}

TEST(ImportCompressed, PackedIntegers) {
  ThreadPool pool(2);
  for (const int bits : {2, 3, 4, 5, 6, 7, 8}) {
    for (const bool symmetric : {true, false}) {
      for (const bool whole : {false, true}) {
        for (const int64_t group_size : {int64_t{32}, int64_t{0}}) {
          const Codes c = symmetric ? symmetric_codes(bits, 161, 320, group_size) : Codes(bits, 161, 320, group_size);
          const Compressed how{.bits = bits,
                               .symmetric = symmetric,
                               .strategy = group_size == 0 ? "channel" : "group",
                               .group_size = group_size};
          const ImportedMatrix m = import(how.config(), packed(c, symmetric, whole), whole ? &pool : nullptr);
          EXPECT_EQ(m.layout->name, fmt::format("gq{}", bits > 4 ? 8 : bits));
          ASSERT_EQ(decoded(m), c.weights()) << bits << symmetric << whole << group_size;
        }
      }
    }
  }
}

TEST(ImportCompressed, PackingsThatCannotBeToldApart) {
  const Codes c = symmetric_codes(3, 4, 20, 0);  // two words either way
  EXPECT_ERROR(import(Compressed{.bits = 3, .strategy = "channel"}.config(), packed(c, true, true)),
               "20 codes of 3 bits in 2 words may be packed in two ways");
}

TEST(ImportCompressed, OneScaleForTheMatrix) {
  Codes c = symmetric_codes(8, 6, 40, 0);
  std::fill(c.scale.begin(), c.scale.end(), 0.5f);
  std::vector<int8_t> weight;
  for (const uint32_t code : c.code) weight.push_back(int8_t(int(code) - 128));
  for (const std::vector<int64_t>& dims : {std::vector<int64_t>{}, {1}, {1, 1}}) {
    Module m;
    m.add("weight", "I8", {c.N, c.K}, weight).add("weight_scale", "F16", dims, std::vector<uint16_t>{half(0.5f)});
    EXPECT_EQ(decoded(import(Compressed{.bits = 8, .strategy = "tensor", .format = "int-quantized"}.config(), m)),
              c.weights());
  }
}

TEST(ImportCompressed, BytesAndTheirZeroPoints) {
  const Codes c(8, 9, 70, 0);
  std::vector<int8_t> weight, zero;
  for (const uint32_t code : c.code) weight.push_back(int8_t(int(code) - 128));
  for (const uint32_t z : c.zero) zero.push_back(int8_t(int(z) - 128));
  Module m;
  m.add("weight", "I8", {c.N, c.K}, weight).add("weight_scale", "F16", {c.N, 1}, halves(c.scale));
  Compressed how{.bits = 8, .symmetric = false, .strategy = "channel", .format = "naive-quantized"};
  EXPECT_ERROR(import(how.config(), m), "up_proj.weight_zero_point is missing");
  m.add("weight_zero_point", "I8", {c.N, 1}, zero);
  const ImportedMatrix matrix = import(how.config(), m);
  EXPECT_EQ(matrix.layout->id, Id::gq8);
  EXPECT_EQ(decoded(matrix), c.weights());
  how.bits = 4;
  EXPECT_ERROR(import(how.config(), m), "is none of 4 bits");
  how.bits = 8;
  how.format = "pack-quantized";
  EXPECT_ERROR(import(how.config(), m), "up_proj.weight: a byte a code, but config.json says pack-quantized");
  m.entry(1).dims = {1, c.N};
  how.format = "int-quantized";
  EXPECT_ERROR(import(how.config(), m), "weight_scale: the numbers of 9 outputs in 1 groups are expected");
}

TEST(ImportCompressed, SizesMustAgree) {
  const Codes c = symmetric_codes(4, 8, 64, 32);
  const auto refuse = [&](const std::function<void(Module&)>& change, const char* expected) {
    Module m = packed(c, true, false);
    change(m);
    EXPECT_ERROR(import(Compressed().config(), m), expected);
  };
  std::string shape;
  const auto claim = [&](std::vector<int64_t> dims) {
    shape = test::bytes_of(dims);
    return [&, n = int64_t(dims.size())](Module& m) {
      m.entry(2).bytes = test::as_span(shape);
      m.entry(2).dims = {n};
    };
  };
  refuse(claim({8, 65}), "65 codes of 4 bits do not take 8 words");
  refuse(claim({9, 64}), "[8, 8] words do not hold the [9, 64] codes");
  refuse(claim({8, INT64_MAX}), "do not hold the [8, 9223372036854775807] codes");
  refuse(claim({-8, -64}), "outputs and inputs of a matrix are expected, found [-8, -64]");
  refuse(claim({8, 0}), "outputs and inputs of a matrix are expected, found [8, 0]");
  refuse(claim({8}), "weight_shape: two numbers are expected, found 1");
  refuse([](Module& m) { m.entry(1).dims = {2, 8}; }, "weight_scale: the numbers of 8 outputs in 2 groups");
  refuse([](Module& m) { m.entry(0).dtype = "F32"; }, "weight_packed: a matrix of I32 is expected, found F32");
  std::vector<int32_t> order(64, -1);
  Module none = packed(c, true, false);
  none.add("weight_g_idx", "I32", {64}, order);
  EXPECT_EQ(decoded(import(Compressed().config(), none)), c.weights());
  order.assign(64, 0);
  Module ordered = packed(c, true, false);
  ordered.add("weight_g_idx", "I32", {64}, order);
  EXPECT_ERROR(import(Compressed().config(), ordered), "weight_g_idx: input 32 is in group 0 and not in 1");
  EXPECT_ERROR(
      import(
          R"({"config_groups":{"g":{"targets":["Linear"],"weights":{"num_bits":4,"group_size":32,"actorder":"group"}}},"format":"pack-quantized"})",
          packed(c, true, false)),
      "up_proj.weight_g_idx is missing");
}

TEST(ImportCompressed, GroupsAreFoundByTheirTargets) {
  const Codes c = symmetric_codes(4, 8, 64, 32);
  const auto config = [&](const std::string& targets, int bits, const std::string& other, int other_bits) {
    const auto group = [](const std::string& names, int width) {
      return fmt::format(
          R"({{"targets":[{}],"weights":{{"num_bits":{},"group_size":32,"type":"int","dynamic":false}}}})", names,
          width);
    };
    return fmt::format(R"({{"config_groups":{{"a":{},"b":{}}},"format":"pack-quantized","ignore":["lm_head"]}})",
                       group(targets, bits), group(other, other_bits));
  };
  const Module m = packed(c, true, false);
  const std::string own = R"("model.layers.0.mlp.up_proj")", regex = R"("re:.*up_proj")", kind = R"("Linear")";
  for (const auto& [better, worse] : {std::pair{own, regex}, {own, kind}, {regex, kind}}) {
    EXPECT_EQ(decoded(import(config(better, 4, worse, 8), m)), c.weights()) << better << worse;
    EXPECT_EQ(decoded(import(config(worse, 8, better, 4), m)), c.weights()) << better << worse;
  }
  EXPECT_EQ(decoded(import(config(regex, 4, R"("re:model")", 4), m)), c.weights()) << "they say the same";
  EXPECT_ERROR(import(config(regex, 4, R"("re:model")", 8), m), "two config_groups that differ are for module");
  EXPECT_ERROR(import(config(R"("re:mlp")", 4, R"("Embedding")", 4), m), "no config_groups say how");
  EXPECT_ERROR(import(config(R"("re:[")", 4, kind, 4), m), "config_groups.a: regular expression '['");
}

/// A mask [N, K] and its values.
struct Masked {
  int64_t N, K;
  std::vector<float> w;
  Masked(int64_t outputs, int64_t inputs, bool two_of_four) : N(outputs), K(inputs), w(size_t(N * K)) {
    Rng rng(uint64_t(N + K));
    for (size_t i = 0; i < w.size(); ++i) {
      const bool keep = two_of_four ? i % 4 == i / 4 % 3 || i % 4 == 3 : rng.uniform() < 0.4;
      if (keep) w[i] = to_float(to_bf16(float(0.1 + rng.uniform())));
    }
  }
  template <class T>
  Module module(const char* dtype, const std::function<T(float)>& number, bool offsets) const {
    const int64_t stride = (K + 7) / 8;
    std::vector<uint8_t> mask(size_t(N * stride));
    std::vector<T> values;
    std::vector<int64_t> start;
    for (int64_t n = 0; n < N; ++n) {
      start.push_back(int64_t(values.size()));
      for (int64_t k = 0; k < K; ++k) {
        if (w[size_t(n * K + k)] == 0) continue;
        mask[size_t(n * stride + k / 8)] |= uint8_t(1 << (k % 8));
        values.push_back(number(w[size_t(n * K + k)]));
      }
    }
    Module m;
    m.add("bitmask", "U8", {N, stride}, mask);
    m.add("shape", "I64", offsets ? std::vector<int64_t>{2} : std::vector<int64_t>{2, 1}, std::vector<int64_t>{N, K});
    const auto count = int64_t(values.size());
    m.add("compressed", dtype, offsets ? std::vector<int64_t>{count} : std::vector<int64_t>{N, count / N}, values);
    if (offsets) m.add("row_offsets", "I64", {N}, start);
    return m;
  }
};

constexpr const char* kSparse =
    R"({"quant_method":"compressed-tensors","sparsity_config":{"format":"sparse-bitmask","sparsity_structure":"unstructured"}})";

TEST(ImportCompressed, PrunedFloats) {
  ThreadPool pool(2);
  for (const bool offsets : {true, false}) {
    for (const auto& [N, K] : {std::pair<int64_t, int64_t>{37, 60}, {1, 4}, {64, 128}}) {
      const Masked masked(N, K, !offsets);
      for (ThreadPool* workers : {static_cast<ThreadPool*>(nullptr), &pool}) {
        for (const Module& m : {masked.module<uint16_t>(
                                    "BF16", [](float x) { return to_bf16(x).bits; }, offsets),
                                masked.module<uint16_t>(
                                    "F16", [](float x) { return half(x); }, offsets),
                                masked.module<float>(
                                    "F32", [](float x) { return x; }, offsets)}) {
          const ImportedMatrix matrix = import(kSparse, m, workers);
          EXPECT_EQ(matrix.layout->id, Id::bm16);
          EXPECT_EQ(matrix.params.nnz, N * K - std::count(masked.w.begin(), masked.w.end(), 0.0f));
          EXPECT_EQ(decoded(matrix), masked.w);
        }
      }
    }
  }
}

TEST(ImportCompressed, ValuesBeyondF16StayPlainRows) {
  Masked masked(5, 24, false);
  for (const float large : {1e6f, 1e-9f}) {
    masked.w[7] = to_float(to_bf16(large));
    const auto importer = importer_of(kSparse);
    const Module brain = masked.module<uint16_t>(
        "BF16", [](float x) { return to_bf16(x).bits; }, true);
    const ImportedMatrix matrix = importer->import(brain.tensors(), nullptr);
    EXPECT_EQ(matrix.layout->id, Id::bf16);
    EXPECT_EQ(decoded(matrix), masked.w);
    ASSERT_EQ(importer->warnings().size(), 1u);
    EXPECT_NE(importer->warnings()[0].find("--layout bm16"), std::string::npos);
    EXPECT_EQ(import(kSparse, masked.module<float>(
                                  "F32", [](float x) { return x; }, true))
                  .layout->id,
              Id::f32);
  }
}

TEST(ImportCompressed, PrunedFloatsThatAreNotFinite) {
  const Masked masked(5, 24, false);
  for (const uint16_t bits : {0x7c00, 0x7e01})
    EXPECT_ERROR(import(kSparse, masked.module<uint16_t>(
                                     "F16", [&](float) { return bits; }, true)),
                 "up_proj.compressed: a weight of row 0 is not finite; the file is damaged");
}

TEST(ImportCompressed, AnExplicitZeroIsKept) {
  Masked masked(2, 8, false);
  const float zero = 0.5f;  // stored as 0
  masked.w[3] = zero;
  const ImportedMatrix m =
      import(kSparse, masked.module<uint16_t>(
                          "F16", [&](float x) { return x == zero ? uint16_t{0} : half(x); }, true));
  const std::vector<float> got = decoded(m);
  EXPECT_EQ(got[3], 0.0f);
  EXPECT_EQ(m.params.nnz, 16 - std::count(masked.w.begin(), masked.w.end(), 0.0f));
}

TEST(ImportCompressed, MasksMustAgree) {
  const Masked masked(6, 20, false);
  const auto refuse = [&](const std::function<void(Module&)>& change, const char* expected) {
    Module m = masked.module<uint16_t>(
        "F16", [](float x) { return half(x); }, true);
    change(m);
    EXPECT_ERROR(import(kSparse, m), expected);
  };
  std::string bytes;
  const auto numbers = [&](size_t part, std::vector<int64_t> values) {
    bytes = test::bytes_of(values);
    return [&, part](Module& m) { m.entry(part).bytes = test::as_span(bytes); };
  };
  refuse(numbers(1, {6, 17}), "keeps inputs beyond its 17");
  refuse(numbers(1, {5, 20}), "bitmask: shape [5, 3] is expected");
  refuse(numbers(1, {6, -20}), "found [6, -20]");
  refuse(numbers(1, {6, INT64_MAX}), "bitmask: shape [6, 1152921504606846976] is expected");
  refuse(numbers(1, {int64_t{1} << 62, 20}), "bitmask: shape [4611686018427387904, 3] is expected");
  refuse(numbers(1, {6, 20, 1}), "shape: two numbers are expected, found 3");
  refuse(numbers(3, {0, 5, 4, 20, 21, 22}), "row_offsets: the rows' first values do not follow from the mask");
  refuse(numbers(3, {0}), "row_offsets: the rows' first values do not follow from the mask");
  refuse([](Module& m) { m.entry(2).dims = {int64_t(m.entry(2).bytes.size()) / 2 + 1}; }, "compressed: shape [");
  refuse([](Module& m) { m.entry(2).dtype = "F64"; }, "values of dtype F64 under a mask are not read");
  refuse([](Module& m) { m.entry(0).dtype = "I8"; }, "bitmask: U8 is expected, found I8");
  std::string mask(18, '\xff');
  refuse([&](Module& m) { m.entry(0).bytes = test::as_span(mask); }, "row 0 keeps inputs beyond its 20");
  Module lost = Masked(6, 20, false)
                    .module<uint16_t>(
                        "F16", [](float x) { return half(x); }, false);
  EXPECT_ERROR(import(kSparse, lost), "2 are to be kept of every 4");
  Module odd = Masked(4, 6, true)
                   .module<uint16_t>(
                       "F16", [](float x) { return half(x); }, false);
  EXPECT_THROW(import(kSparse, odd), Error);
}

TEST(ImportCompressed, IntegersUnderAMask) {
  Masked masked(16, 64, true);
  std::vector<float> scale(16), expected = masked.w;
  for (size_t i = 0; i < expected.size(); ++i) {
    expected[i] = expected[i] == 0 ? 0.0f : float(int(100 * (expected[i] - 0.6f)));
    masked.w[i] = expected[i] == 0 ? 0.0f : expected[i];
    scale[i / 64] = to_float(to_f16(0.01f * float(1 + i / 64)));
  }
  const auto number = [](float x) { return int8_t(x); };
  // Values that became 0 are not in the mask, so that it is not 2:4 any more.
  Module m = masked.module<int8_t>("I8", number, true);
  m.add("weight_scale", "F16", {16, 1}, halves(scale));
  const Compressed how{.bits = 8, .strategy = "channel", .format = "int-quantized"};
  for (size_t i = 0; i < expected.size(); ++i) expected[i] *= scale[i / 64];
  const ImportedMatrix matrix = import(how.config(), m);
  EXPECT_EQ(matrix.layout->id, Id::bm8);
  EXPECT_EQ(decoded(matrix), expected);
  // A zero point makes what the mask drops other than 0.
  m.add("weight_zero_point", "I8", {16, 1}, std::vector<int8_t>(16, 3));
  for (size_t i = 0; i < expected.size(); ++i) expected[i] = scale[i / 64] * (masked.w[i] - 3);
  const ImportedMatrix shifted = import(how.config(), m);
  EXPECT_EQ(shifted.layout->id, Id::gq8);
  EXPECT_EQ(decoded(shifted), expected);
}

TEST(ImportCompressed, TwoOfFour) {
  for (const int64_t group_size : {int64_t{128}, int64_t{64}, int64_t{0}, int64_t{32}}) {
    Codes c = symmetric_codes(4, 6, 256, group_size);
    for (size_t i = 0; i < c.code.size(); ++i)
      if (i % 4 != i / 4 % 3 && i % 4 != 3) c.code[i] = 8;
    c.code[4] = c.code[5] = c.code[6] = c.code[7] = 8;  // none
    Compressed how{.strategy = group_size == 0 ? "channel" : "group", .group_size = group_size};
    how.more = R"(,"sparsity_config":{"format":"dense","sparsity_structure":"2:4"})";
    const ImportedMatrix m = import(how.config(), packed(c, true, false));
    EXPECT_EQ(m.layout->id, group_size == 32 ? Id::gq4 : Id::nm24_q4);
    EXPECT_EQ(decoded(m), c.weights());
    c.code[8] = c.code[9] = c.code[10] = 1;
    const ImportedMatrix dense = import(how.config(), packed(c, true, false));
    EXPECT_EQ(dense.layout->id, Id::gq4);
    EXPECT_EQ(decoded(dense), c.weights());
  }
}

// ---- what is not read ----

TEST(Import, PartsWithoutAPlaceAreNamed) {
  const Codes c = symmetric_codes(4, 8, 64, 32);
  const auto refuse = [](const std::string& config, const Module& m, const char* expected) {
    EXPECT_ERROR(import(config, m), expected);
  };
  const auto with = [&](const char* part, const char* dtype) {
    Module m = packed(c, true, false);
    m.add(part, dtype, {1}, std::vector<int8_t>(dtype[1] == '8' ? 1 : 4));
    return m;
  };
  const std::string config = Compressed().config();
  refuse(config, with("weight", "F32"),
         "x.safetensors: tensor model.layers.0.mlp.up_proj.weight: the weight of model.layers.0.mlp.up_proj comes from "
         "weight_packed, weight_scale, weight_shape, which leave no place for this tensor");
  for (const char* part : {"compressed", "bitmask", "row_offsets", "shape"})
    refuse(config, with(part, "I8"), fmt::format("up_proj.{}: the weight of", part).c_str());
  const Masked masked(6, 20, false);
  Module m = masked.module<float>(
      "F32", [](float x) { return x; }, true);
  m.add("weight", "F32", {1}, std::vector<float>{1});
  refuse(kSparse, m, "up_proj.weight: the weight of model.layers.0.mlp.up_proj comes from bitmask, compressed");
  Module bytes;
  bytes.add("weight", "I8", {1, 8}, std::vector<int8_t>(8, 1)).add("weight_scale", "F16", {1, 1}, halves({0.5f}));
  bytes.add("weight_shape", "I64", {2}, std::vector<int64_t>{1, 8});
  refuse(Compressed{.bits = 8, .strategy = "channel", .format = "int-quantized"}.config(), bytes,
         "up_proj.weight_shape: the weight of model.layers.0.mlp.up_proj comes from weight, weight_scale");
}

TEST(Import, RefusesByName) {
  const auto refuse = [](const char* config, const char* expected) { EXPECT_ERROR(importer_of(config), expected); };
  refuse(R"({"quant_method":"bitsandbytes"})",
         "quant_method \"bitsandbytes\" is not read; known are gptq, awq and compressed-tensors");
  refuse(R"({"quant_method":"fp8"})", "\"fp8\" is not read");
  refuse(R"({})", "quant_method \"\" is not read");
  refuse(R"({"quant_method":4})", "\"quant_method\" must be a string");
  refuse(R"({"quant_method":"gptq","bits":5,"group_size":128})",
         "weights of 5 bits are not read; known are 2, 3, 4, 8");
  refuse(R"({"quant_method":"gptq","bits":4,"group_size":0})", "group_size is 0");
  refuse(R"({"quant_method":"gptq","bits":4})", "\"group_size\" is missing");
  refuse(R"({"quant_method":"gptq","bits":4,"group_size":128,"checkpoint_format":"marlin"})",
         "checkpoint_format \"marlin\" is not read; known are gptq and gptq_v2");
  refuse(R"({"quant_method":"gptq","bits":4,"group_size":128,"is_marlin_format":true})", "\"marlin\" is not read");
  refuse(R"({"quant_method":"gptq","bits":4,"group_size":128,"pack_dtype":"int8"})", "pack_dtype \"int8\"");
  refuse(R"({"quant_method":"gptq","bits":4,"group_size":128,"rotation":"hadamard"})", "\"rotation\" is set");
  refuse(R"({"quant_method":"awq","bits":8,"group_size":128})", "weights of 8 bits are not read; known are 4");
  refuse(R"({"quant_method":"awq","bits":4,"group_size":128,"version":"gemv_fast"})",
         "version \"gemv_fast\" of AWQ is not read; known are gemm and gemv");
  refuse(R"({"quant_method":"awq","bits":4,"group_size":128,"checkpoint_format":"llm-awq"})", "version \"llm-awq\"");
  const auto compressed = [&](const std::string& format, const std::string& weights, const char* expected) {
    refuse(fmt::format(R"({{"quant_method":"compressed-tensors","format":"{}","config_groups":{{"group_0":{{)"
                       R"("targets":["Linear"],"weights":{{{}}}}}}}}})",
                       format, weights)
               .c_str(),
           expected);
  };
  for (const char* format : {"float-quantized", "nvfp4-pack-quantized", "marlin-24", "mxfp4-pack-quantized"})
    compressed(
        format, R"("num_bits":4)",
        fmt::format("format \"{}\" is not read; known for quantized weights are pack-quantized", format).c_str());
  compressed("naive-quantized", R"("num_bits":8,"type":"float")", "weights of type \"float\" are not read");
  compressed("pack-quantized", R"("num_bits":16)", "weights of 16 bits are not read");
  compressed("pack-quantized", R"("num_bits":4,"strategy":"block")", "strategy \"block\" is not read");
  compressed("pack-quantized", R"("num_bits":4,"strategy":"group")", "group_size is 0");
  compressed("pack-quantized", R"("num_bits":4,"dynamic":true)", "\"dynamic\"");
  refuse(R"({"config_groups":{"W4A16":["Linear"]},"format":"pack-quantized"})", "names a preset");
  refuse(R"({"sparsity_config":{"format":"sparse-csr"}})", "format \"sparse-csr\" is not read");
  refuse(R"({"config_groups":{},"transform_config":{"config_groups":{"u":{}}}})", "transform_config is set");
}

TEST(Import, ActivationsAreLeftAloneWithAWarning) {
  const auto warnings = [](const char* config) { return importer_of(config)->warnings().size(); };
  EXPECT_EQ(
      warnings(
          R"({"config_groups":{"group_0":{"targets":["Linear"],"weights":{"num_bits":8},"input_activations":null}},"format":"int-quantized"})"),
      0u);
  EXPECT_EQ(
      warnings(
          R"({"config_groups":{"group_0":{"targets":["Linear"],"weights":{"num_bits":8},"input_activations":{"num_bits":8}}},"format":"int-quantized"})"),
      1u);
  EXPECT_EQ(warnings(R"({"config_groups":{},"kv_cache_scheme":{"num_bits":8}})"), 1u);
}

}  // namespace
}  // namespace lacuna::io
