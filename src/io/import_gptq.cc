#include <algorithm>
#include <array>
#include <charconv>

#include "core/error.h"
#include "io/import_tensors.h"
#include "io/json.h"
#include "io/module_rules.h"
#include "layout/grouped.h"

namespace lacuna::io {

namespace {

constexpr int kBits[] = {2, 3, 4, 8};
constexpr int64_t kColumns = 16;  // outputs that a worker takes at once: a cache line of words

class GptqImporter : public Importer {
 public:
  explicit GptqImporter(const QuantizationConfig& config)
      : whole_(read_setting(config.settings, config.where)), rules_(config) {
    for (const nlohmann::json& merged : rules_.settings())
      exceptions_.push_back(read_setting(merged, config.where + ": dynamic"));
    read_maker(config);
  }

  PartUse use_of(std::string_view part) const override {
    return std::ranges::find(kParts, part) != std::end(kParts) ? PartUse::read : PartUse::keep;
  }
  bool takes(const ModuleTensors& module) const override {
    return std::ranges::any_of(kParts, [&](std::string_view part) { return module.has(part); });
  }

  std::vector<std::string> warnings() const override {
    if (!zeros_differ_) return {};
    return {
        "checkpoint_format gptq stores zero points of 2^bits - 1, which are read as 0, but programs disagree about "
        "them; to be sure, make the model again as gptq_v2"};
  }

 private:
  static constexpr std::string_view kParts[] = {"qweight", "qzeros", "scales", "g_idx"};

  struct Setting {
    int bits;
    int64_t group_size;  // 0: whole rows
    bool less_one;       // a stored zero is the zero less one
    bool ordered;        // g_idx has to say that it is not
  };

  static Setting read_setting(const nlohmann::json& config, const std::string& where) {
    const JsonObject in(config, where);
    const int64_t bits = in.need_integer("bits"), group_size = in.need_integer("group_size");
    check_bits(bits, kBits, where);
    if (group_size < 1 && group_size != -1)
      throw Error("{}: group_size is {}; it must be 1 or more, or -1 for whole rows", where, group_size);
    std::string format = in.string("checkpoint_format").value_or(in.string("format").value_or("gptq"));
    if (in.boolean("is_marlin_format").value_or(false)) format = "marlin";
    if (format != "gptq" && format != "gptq_v2")
      throw Error("{}: checkpoint_format \"{}\" is not read; known are gptq and gptq_v2", where, format);
    if (const std::string words = in.string("pack_dtype").value_or("int32"); words != "int32")
      throw Error("{}: pack_dtype \"{}\" is not read; known is int32", where, words);
    if (in.find("rotation") != nullptr)
      throw Error("{}: \"rotation\" is set, which needs inputs to be rotated as the model runs", where);
    return {int(bits), std::max(int64_t{0}, group_size), format == "gptq", in.boolean("desc_act").value_or(false)};
  }

  /// meta.quantizer is "gptqmodel:7.0.0" or a list of such.
  void read_maker(const QuantizationConfig& config) {
    const nlohmann::json* meta = JsonObject(config.settings, config.where).object("meta");
    if (meta == nullptr) return;
    const nlohmann::json* makers = JsonObject(*meta, config.where + ": meta").find("quantizer");
    if (makers == nullptr) return;
    const auto read_one = [&](const nlohmann::json& maker) {
      constexpr std::string_view kName = "gptqmodel:";
      if (!maker.is_string()) return;
      std::string name = maker.get<std::string>();
      std::ranges::transform(name, name.begin(), [](unsigned char c) { return char(std::tolower(c)); });
      if (!name.starts_with(kName)) return;
      by_words_ = true;
      int version = 0;
      const char* end = name.data() + name.size();
      const auto [rest, failed] = std::from_chars(name.data() + kName.size(), end, version);
      old_ = failed == std::errc{} && rest != end && *rest == '.' && version < 7;
    };
    if (makers->is_array())
      std::ranges::for_each(*makers, read_one);
    else
      read_one(*makers);
  }

  /// Of one group. words: a row of qzeros.
  void read_zeros(const FileTensor& qzeros, std::vector<uint32_t> words, const Setting& setting,
                  std::span<uint8_t> zero) {
    const uint32_t top = (uint32_t{1} << setting.bits) - 1;
    if (setting.less_one && by_words_ && setting.bits != 3) {
      for (uint32_t& word : words) word += UINT32_MAX / top;  // a one in every field
      unpack_codes(words, setting.bits, false, zero);
      return;
    }
    unpack_codes(words, setting.bits, false, zero);
    if (!setting.less_one) return;
    if (by_words_ && old_)
      throw Error(
          "{}: GPTQModel before version 7 stores 3-bit zero points in checkpoint_format gptq in a way of its own, "
          "which is not read; make the model again as gptq_v2",
          qzeros.where());
    zeros_differ_ |= !by_words_ && std::ranges::find(zero, top) != zero.end();
    for (uint8_t& one : zero) one = uint8_t((one + 1u) & top);
  }

  ImportedMatrix read(const ModuleTensors& module, ThreadPool* pool) override {
    const int rule = rules_.rule_of(module.name());
    const Setting& setting = rule < 0 ? whole_ : exceptions_[size_t(rule)];
    const int bits = setting.bits;
    const int64_t group_size = setting.group_size;
    const FileTensor& qweight = module.need("qweight");
    const WordMatrix codes = word_matrix(qweight);
    const FileTensor* g_idx = setting.ordered && group_size > 0 ? &module.need("g_idx") : module.find("g_idx");
    const int64_t N = codes.cols, K = inputs(qweight, codes, bits, g_idx);
    if (g_idx != nullptr) check_group_order(*g_idx, K, group_size);
    const int64_t groups = layout::group_count(K, group_size);
    const FileTensor &qzeros = module.need("qzeros"), &scales = module.need("scales");
    const WordMatrix zeros = word_matrix(qzeros);
    need_shape(qzeros, std::array{groups, words_of(bits, N, false)}, "a zero point for each group and output");
    need_shape(scales, std::array{groups, N}, "a scale for each group and output");
    const std::vector<float> scale = read_scales(scales);

    CodedMatrix out(bits, {N, K}, group_size);
    std::vector<uint8_t> zero(static_cast<size_t>(N));
    for (int64_t g = 0; g < groups; ++g) {
      read_zeros(qzeros, zeros.row(g), setting, zero);
      for (int64_t n = 0; n < N; ++n) {
        out.scale[size_t(n * groups + g)] = scale[size_t(g * N + n)];
        out.zero[size_t(n * groups + g)] = float(zero[size_t(n)]);
      }
    }
    for_pieces(pool, N, kColumns, [&](int64_t begin, int64_t end) {
      for (int64_t first = begin; first < end; first += kColumns) {
        const int64_t count = std::min(kColumns, end - first);
        const std::vector<uint32_t> words = codes.columns(first, count);
        for (int64_t i = 0; i < count; ++i)
          unpack_codes(std::span(words).subspan(size_t(i * codes.rows), size_t(codes.rows)), bits, false,
                       std::span(out.code).subspan(size_t((first + i) * K), size_t(K)));
      }
    });
    return naming_file(qweight.where(), [&] { return pack_coded(out, pool); });
  }

  /// K, which g_idx tells; without it the words are full.
  static int64_t inputs(const FileTensor& qweight, const WordMatrix& codes, int bits, const FileTensor* g_idx) {
    const int64_t places = codes.rows * 32;
    if (g_idx == nullptr) {
      if (places % bits != 0)
        throw Error("{}: {} rows of 32-bit words hold no whole number of {}-bit codes", qweight.where(), codes.rows,
                    bits);
      return places / bits;
    }
    const int64_t K = g_idx->entry.dims.size() == 1 ? g_idx->entry.dims[0] : 0;
    if (K < 1 || K > places / bits || words_of(bits, K, false) != codes.rows)
      throw Error("{}: {} rows of 32-bit words do not hold the {}-bit codes of {} inputs, which g_idx says there are",
                  qweight.where(), codes.rows, bits, K);
    return K;
  }

  Setting whole_;
  ModuleRules rules_;
  std::vector<Setting> exceptions_;  // of the rules
  bool by_words_ = false;            // GPTQModel has made it
  bool old_ = false;                 // before its version 7
  bool zeros_differ_ = false;
};

}  // namespace

std::unique_ptr<Importer> make_gptq_importer(const QuantizationConfig& config) {
  return std::make_unique<GptqImporter>(config);
}

}  // namespace lacuna::io
