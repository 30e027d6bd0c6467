#include <algorithm>
#include <array>

#include "core/error.h"
#include "io/import_tensors.h"
#include "io/json.h"
#include "io/module_rules.h"
#include "layout/grouped.h"

namespace lacuna::io {

namespace {

constexpr int kBits[] = {4};
constexpr int64_t kPerWord = 8;
constexpr int64_t kPlace[kPerWord] = {0, 4, 1, 5, 2, 6, 3, 7};  // of output i of eight, in a word of version gemm
constexpr int64_t kColumns = 16;  // of words, which a worker takes at once: a cache line; or rows

class AwqImporter : public Importer {
 public:
  explicit AwqImporter(const QuantizationConfig& config)
      : whole_(read_setting(config.settings, config.where)), rules_(config) {
    for (const nlohmann::json& merged : rules_.settings())
      exceptions_.push_back(read_setting(merged, config.where + ": dynamic"));
  }

  PartUse use_of(std::string_view part) const override {
    return std::ranges::find(kParts, part) != std::end(kParts) ? PartUse::read : PartUse::keep;
  }
  bool takes(const ModuleTensors& module) const override {
    return std::ranges::any_of(kParts, [&](std::string_view part) { return module.has(part); });
  }

 private:
  static constexpr std::string_view kParts[] = {"qweight", "qzeros", "scales"};

  struct Setting {
    int64_t group_size;  // -1: whole rows
    bool by_rows;        // version gemv
  };

  static Setting read_setting(const nlohmann::json& config, const std::string& where) {
    const JsonObject in(config, where);
    const auto either = [&](const char* name, const char* other) {
      return in.find(name) != nullptr ? in.need_integer(name) : in.need_integer(other);
    };
    check_bits(either("bits", "w_bit"), kBits, where);
    const int64_t group_size = either("group_size", "q_group_size");
    if (group_size < 1 && group_size != -1)
      throw Error("{}: group_size is {}; it must be 1 or more, or -1 for whole rows", where, group_size);
    // GPTQModel names it as it names its own formats.
    std::string version = in.string("version").value_or(in.string("checkpoint_format").value_or("gemm"));
    std::ranges::transform(version, version.begin(), [](unsigned char c) { return char(std::tolower(c)); });
    if (version != "gemm" && version != "gemv")
      throw Error("{}: version \"{}\" of AWQ is not read; known are gemm and gemv", where, version);
    return {group_size, version == "gemv"};
  }

  ImportedMatrix read(const ModuleTensors& module, ThreadPool* pool) override {
    const int rule = rules_.rule_of(module.name());
    const Setting& setting = rule < 0 ? whole_ : exceptions_[size_t(rule)];
    const FileTensor& qweight = module.need("qweight");
    const CodedMatrix out =
        setting.by_rows ? read_gemv(module, setting.group_size, pool) : read_gemm(module, setting.group_size, pool);
    return naming_file(qweight.where(), [&] { return pack_coded(out, pool); });
  }

  static CodedMatrix read_gemm(const ModuleTensors& module, int64_t group_size, ThreadPool* pool) {
    const WordMatrix codes = word_matrix(module.need("qweight"));
    const int64_t N = codes.cols * kPerWord, K = codes.rows, groups = layout::group_count(K, group_size);
    const FileTensor &qzeros = module.need("qzeros"), &scales = module.need("scales");
    const WordMatrix zeros = word_matrix(qzeros);
    need_shape(qzeros, std::array{groups, codes.cols}, "a zero point for each group and output");
    need_shape(scales, std::array{groups, N}, "a scale for each group and output");
    const std::vector<float> scale = read_scales(scales);
    CodedMatrix out(4, {N, K}, group_size);
    for (int64_t g = 0; g < groups; ++g) {
      const std::vector<uint32_t> zero = zeros.row(g);
      for (int64_t n = 0; n < N; ++n) {
        out.scale[size_t(n * groups + g)] = scale[size_t(g * N + n)];
        out.zero[size_t(n * groups + g)] = float(zero[size_t(n / kPerWord)] >> (4 * kPlace[n % kPerWord]) & 15);
      }
    }
    for_pieces(pool, codes.cols, kColumns, [&](int64_t begin, int64_t end) {
      for (int64_t first = begin; first < end; first += kColumns) {
        const int64_t count = std::min(kColumns, end - first);
        const std::vector<uint32_t> words = codes.columns(first, count);
        for (int64_t n = 0; n < count * kPerWord; ++n) {
          const uint32_t* word = &words[size_t(n / kPerWord * K)];
          uint8_t* code = &out.code[size_t((first * kPerWord + n) * K)];
          for (int64_t k = 0; k < K; ++k) code[k] = uint8_t(word[k] >> (4 * kPlace[n % kPerWord]) & 15);
        }
      }
    });
    return out;
  }

  static CodedMatrix read_gemv(const ModuleTensors& module, int64_t group_size, ThreadPool* pool) {
    const WordMatrix codes = word_matrix(module.need("qweight"));
    const int64_t N = codes.rows, K = codes.cols * kPerWord, groups = layout::group_count(K, group_size);
    const FileTensor &qzeros = module.need("qzeros"), &scales = module.need("scales");
    const WordMatrix zeros = word_matrix(qzeros);
    if (zeros.rows != N || zeros.cols < (groups + kPerWord - 1) / kPerWord)
      throw Error("{}: {} rows of {} zero points are expected, found {} of {}", qzeros.where(), N, groups, zeros.rows,
                  zeros.cols * kPerWord);
    need_shape(scales, std::array{N, zeros.cols * kPerWord}, "a scale for each zero point");
    const std::vector<float> scale = read_scales(scales);
    CodedMatrix out(4, {N, K}, group_size);
    for_pieces(pool, N, kColumns, [&](int64_t begin, int64_t end) {
      std::vector<uint8_t> zero(static_cast<size_t>(groups));
      for (int64_t n = begin; n < end; ++n) {
        unpack_codes(codes.row(n), 4, true, std::span(out.code).subspan(size_t(n * K), size_t(K)));
        unpack_codes(zeros.row(n), 4, true, zero);
        for (int64_t g = 0; g < groups; ++g) {
          out.scale[size_t(n * groups + g)] = scale[size_t(n * zeros.cols * kPerWord + g)];
          out.zero[size_t(n * groups + g)] = float(zero[size_t(g)]);
        }
      }
    });
    return out;
  }

  Setting whole_;
  ModuleRules rules_;
  std::vector<Setting> exceptions_;  // of the rules
};

}  // namespace

std::unique_ptr<Importer> make_awq_importer(const QuantizationConfig& config) {
  return std::make_unique<AwqImporter>(config);
}

}  // namespace lacuna::io
