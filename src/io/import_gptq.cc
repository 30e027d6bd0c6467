#include <algorithm>
#include <array>
#include <optional>

#include "core/error.h"
#include "io/import_tensors.h"
#include "io/json.h"
#include "io/name_pattern.h"
#include "layout/grouped.h"

namespace lacuna::io {

namespace {

constexpr int kBits[] = {2, 3, 4, 8};
constexpr int64_t kColumns = 16;  // outputs that a worker takes at once: a cache line of words

class GptqImporter : public Importer {
 public:
  GptqImporter(const nlohmann::json& config, const std::string& where) : whole_(read_setting(config, where)) {
    const JsonObject in(config, where);
    std::string format = in.string("checkpoint_format").value_or(in.string("format").value_or("gptq"));
    if (in.boolean("is_marlin_format").value_or(false)) format = "marlin";
    if (format != "gptq" && format != "gptq_v2")
      throw Error("{}: checkpoint_format \"{}\" is not read; known are gptq and gptq_v2", where, format);
    ordered_ = in.boolean("desc_act").value_or(false);
    zero_offset_ = format == "gptq" ? 1 : 0;
    if (const std::string words = in.string("pack_dtype").value_or("int32"); words != "int32")
      throw Error("{}: pack_dtype \"{}\" is not read; known is int32", where, words);
    if (in.find("rotation") != nullptr)
      throw Error("{}: \"rotation\" is set, which needs inputs to be rotated as the model runs", where);
    if (const nlohmann::json* dynamic = in.object("dynamic")) read_dynamic(*dynamic, where + ": dynamic");
  }

  PartUse use_of(std::string_view part) const override {
    return std::ranges::find(kParts, part) != std::end(kParts) ? PartUse::read : PartUse::keep;
  }
  bool takes(const ModuleTensors& module) const override {
    return std::ranges::any_of(kParts, [&](std::string_view part) { return module.has(part); });
  }

  ImportedMatrix import(const ModuleTensors& module, ThreadPool* pool) override {
    const Setting setting = setting_of(module);
    const int bits = setting.bits;
    const int64_t group_size = setting.group_size;
    const FileTensor& qweight = module.need("qweight");
    const WordMatrix codes = word_matrix(qweight);
    const FileTensor* g_idx = ordered_ && group_size > 0 ? &module.need("g_idx") : module.find("g_idx");
    const int64_t N = codes.cols, K = inputs(qweight, codes, bits, g_idx);
    if (g_idx != nullptr) check_group_order(*g_idx, K, group_size);
    const int64_t groups = layout::group_count(K, group_size);
    const FileTensor &qzeros = module.need("qzeros"), &scales = module.need("scales");
    const WordMatrix zeros = word_matrix(qzeros);
    need_shape(qzeros, std::array{groups, words_of(bits, N, false)}, "a zero point for each group and output");
    need_shape(scales, std::array{groups, N}, "a scale for each group and output");
    const std::vector<float> scale = read_scales(scales);

    CodedMatrix out(bits, {N, K}, group_size);
    const uint32_t top = (uint32_t{1} << bits) - 1;
    std::vector<uint8_t> zero(static_cast<size_t>(N));
    for (int64_t g = 0; g < groups; ++g) {
      unpack_codes(zeros.row(g), bits, false, zero);
      for (int64_t n = 0; n < N; ++n) {
        out.scale[size_t(n * groups + g)] = scale[size_t(g * N + n)];
        out.zero[size_t(n * groups + g)] = float((zero[size_t(n)] + zero_offset_) & top);
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

 private:
  static constexpr std::string_view kParts[] = {"qweight", "qzeros", "scales", "g_idx"};

  struct Setting {
    int bits;
    int64_t group_size;  // 0: whole rows
    friend bool operator==(const Setting&, const Setting&) = default;
  };

  static Setting read_setting(const nlohmann::json& config, const std::string& where) {
    const JsonObject in(config, where);
    const int64_t bits = in.need_integer("bits"), group_size = in.need_integer("group_size");
    check_bits(bits, kBits, where);
    if (group_size < 1 && group_size != -1)
      throw Error("{}: group_size is {}; it must be 1 or more, or -1 for whole rows", where, group_size);
    return {int(bits), std::max(int64_t{0}, group_size)};
  }

  /// Keys that begin with "-:" leave modules as they were, which the tensors show too.
  void read_dynamic(const nlohmann::json& dynamic, const std::string& where) {
    for (const auto& [key, changes] : dynamic.items()) {
      if (key.starts_with("-:")) continue;
      nlohmann::json merged{{"bits", whole_.bits}, {"group_size", whole_.group_size == 0 ? -1 : whole_.group_size}};
      const JsonObject checked(changes, where);
      for (const char* name : {"bits", "group_size"})
        if (const nlohmann::json* value = checked.find(name)) merged[name] = *value;
      const std::string_view regex = std::string_view(key).substr(key.starts_with("+:") ? 2 : 0);
      exceptions_.emplace_back(NamePattern(regex, where), read_setting(merged, where));
    }
  }

  /// JSON's objects have no order, so that two rules for one module must say the same.
  Setting setting_of(const ModuleTensors& module) const {
    std::optional<Setting> found;
    for (const auto& [pattern, setting] : exceptions_) {
      if (!pattern.matches(module.name())) continue;
      if (found && *found != setting)
        throw Error(
            "{}: \"dynamic\" of config.json says two things of {}: {} bits in groups of {} and {} in groups of {}",
            module.need("qweight").where(), module.name(), found->bits, found->group_size, setting.bits,
            setting.group_size);
      found = setting;
    }
    return found.value_or(whole_);
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
  bool ordered_ = false;  // g_idx has to say that it is not
  uint32_t zero_offset_ = 0;
  std::vector<std::pair<NamePattern, Setting>> exceptions_;  // GPTQModel's "dynamic"
};

}  // namespace

std::unique_ptr<Importer> make_gptq_importer(const nlohmann::json& config, const std::string& where) {
  return std::make_unique<GptqImporter>(config, where);
}

}  // namespace lacuna::io
