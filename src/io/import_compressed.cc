#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>

#include "core/error.h"
#include "core/scalar.h"
#include "io/compressed_config.h"
#include "io/import_bitmask.h"
#include "io/import_tensors.h"
#include "layout/grouped.h"
#include "layout/nm24_q4.h"

namespace lacuna::io {

namespace {

constexpr int64_t kRows = 16;  // that a worker takes at once
constexpr std::string_view kWeight[] = {"weight_packed", "weight_scale", "weight_zero_point",
                                        "weight_shape",  "weight_g_idx", "compressed",
                                        "bitmask",       "row_offsets",  "shape"};
constexpr std::string_view kActivations[] = {"input_scale",       "input_zero_point", "output_scale",
                                             "output_zero_point", "q_scale",          "k_scale",
                                             "v_scale",           "k_zero_point",     "v_zero_point"};

/// Whether codes lie in whole words, as the package packed them until 0.17, or are one string of bits, as since 0.18
/// (pull request 732). Where the bits divide 32 both are the same.
bool packed_whole(const FileTensor& tensor, int64_t words, int bits, int64_t count) {
  const bool string = words == words_of(bits, count, false), whole = words == words_of(bits, count, true);
  if (!string && !whole)
    throw Error("{}: {} codes of {} bits do not take {} words of 32 bits", tensor.where(), count, bits, words);
  if (string && whole && 32 % bits != 0)
    throw Error(
        "{}: {} codes of {} bits in {} words may be packed in two ways; start from the model before it was quantized",
        tensor.where(), count, bits, words);
  return whole;
}

class CompressedImporter : public Importer {
 public:
  explicit CompressedImporter(const QuantizationConfig& config) : config_(config.settings, config.where) {}

  PartUse use_of(std::string_view part) const override {
    if (part == "weight" || std::ranges::find(kWeight, part) != std::end(kWeight)) return PartUse::read;
    return std::ranges::find(kActivations, part) != std::end(kActivations) ? PartUse::drop : PartUse::keep;
  }
  bool takes(const ModuleTensors& module) const override {
    if (std::ranges::any_of(kWeight, [&](std::string_view part) { return module.has(part); })) return true;
    const FileTensor* weight = module.look("weight");
    return weight != nullptr && weight->entry.dtype == "I8";
  }

  std::vector<std::string> warnings() const override {
    std::vector<std::string> out;
    if (config_.rounds_activations())
      out.push_back(
          "the model asks for activations or key-value pairs of few bits, which is not done: they stay as they are");
    if (plain_rows_)
      out.push_back(
          "some pruned weights are not exact in f16 and take their full size in memory; lacuna quantize "
          "--layout bm16 rounds them and drops the zeros");
    return out;
  }

 private:
  ImportedMatrix read(const ModuleTensors& module, ThreadPool* pool) override {
    if (module.has("weight_packed")) return pack(module, read_packed(module, pool), pool);
    if (!module.has("bitmask") && !module.has("compressed")) return pack(module, read_bytes(module, pool), pool);
    const Bitmask mask = read_bitmask(module);
    if (module.need("compressed").entry.dtype == "I8") return pack(module, read_masked(module, mask, pool), pool);
    if (module.has("weight_scale"))
      throw Error("{}: the values under the mask are {} and not codes, but they have scales",
                  module.need("compressed").where(), module.need("compressed").entry.dtype);
    ImportedMatrix out = import_values(module.need("compressed"), mask, pool);
    plain_rows_ |= out.layout->family == layout::Family::rows;
    return out;
  }

  CodedMatrix read_packed(const ModuleTensors& module, ThreadPool* pool) const {
    const WeightScheme& scheme = config_.scheme_of(module);
    const FileTensor& tensor = module.need("weight_packed");
    if (!scheme.packed) throw Error("{}: packed codes, but config.json names another format", tensor.where());
    const WordMatrix words = word_matrix(tensor);
    const layout::Shape shape = read_shape(module.need("weight_shape"));
    if (shape.N != words.rows || shape.K > 32 * words.cols)
      throw Error("{}: [{}, {}] words do not hold the [{}, {}] codes that weight_shape says", tensor.where(),
                  words.rows, words.cols, shape.N, shape.K);
    const bool whole = packed_whole(tensor, words.cols, scheme.bits, shape.K);
    const Grid grid = read_grid(module, scheme, shape, whole);
    CodedMatrix out(scheme.bits, shape, scheme.group_size);
    grid.spread(out);
    for_pieces(pool, shape.N, kRows, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        unpack_codes(words.row(n), scheme.bits, whole,
                     std::span(out.code).subspan(size_t(n * shape.K), size_t(shape.K)));
    });
    return out;
  }

  CodedMatrix read_bytes(const ModuleTensors& module, ThreadPool* pool) const {
    const FileTensor& tensor = module.need("weight");
    const auto& dims = tensor.entry.dims;
    if (tensor.entry.dtype != "I8" || dims.size() != 2 || tensor.entry.bytes.empty())
      throw Error(
          "{}: a matrix of I8 is expected beside scales, found {} [{}]; a model that was saved before its weights were "
          "compressed is to be saved again",
          tensor.where(), tensor.entry.dtype, fmt::join(dims, ", "));
    const WeightScheme& scheme = bytes_scheme(module, tensor);
    const layout::Shape shape{dims[0], dims[1]};
    const Grid grid = read_grid(module, scheme, shape, std::nullopt);
    CodedMatrix out(scheme.bits, shape, scheme.group_size);
    grid.spread(out);
    for_pieces(pool, shape.N, kRows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * shape.K; i < end * shape.K; ++i)
        out.code[size_t(i)] = code_of(tensor, int(int8_t(tensor.entry.bytes[size_t(i)])), scheme.bits);
    });
    return out;
  }

  /// Codes under a mask; those outside of it are 0 before the zero point is subtracted.
  CodedMatrix read_masked(const ModuleTensors& module, const Bitmask& mask, ThreadPool* pool) const {
    const FileTensor& tensor = module.need("compressed");
    const WeightScheme& scheme = bytes_scheme(module, tensor);
    const Grid grid = read_grid(module, scheme, mask.shape, std::nullopt);
    CodedMatrix out(scheme.bits, mask.shape, scheme.group_size);
    grid.spread(out);
    const int64_t K = mask.shape.K;
    for_pieces(pool, mask.shape.N, kRows, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const std::byte* value = tensor.entry.bytes.data() + mask.start[size_t(n)];
        for (size_t i = size_t(n * K); i < size_t((n + 1) * K); ++i)
          out.code[i] = code_of(tensor, mask.keep[i] != 0 ? int(int8_t(*value++)) : 0, scheme.bits);
      }
    });
    const float middle = float(1 << (scheme.bits - 1));
    if (std::ranges::all_of(grid.zero, [&](float zero) { return zero == middle; })) out.keep = mask.keep;
    return out;
  }

  const WeightScheme& bytes_scheme(const ModuleTensors& module, const FileTensor& tensor) const {
    const WeightScheme& scheme = config_.scheme_of(module);
    if (scheme.packed) throw Error("{}: a byte a code, but config.json says pack-quantized", tensor.where());
    return scheme;
  }

  static uint8_t code_of(const FileTensor& tensor, int value, int bits) {
    const int code = value + (1 << (bits - 1));
    if (code < 0 || code >= 1 << bits) throw Error("{}: the value {} is none of {} bits", tensor.where(), value, bits);
    return uint8_t(code);
  }

  /// Scales and zero points as they are stored: of each group, of each row, or one.
  struct Grid {
    std::vector<float> scale, zero;

    void spread(CodedMatrix& out) const {
      for (size_t i = 0; i < out.scale.size(); ++i) {
        out.scale[i] = scale[scale.size() == 1 ? 0 : i];
        out.zero[i] = zero[zero.size() == 1 ? 0 : i];
      }
    }
  };

  /// whole: how zero points are packed (unpack_codes); nullopt: they are not.
  static Grid read_grid(const ModuleTensors& module, const WeightScheme& scheme, layout::Shape shape,
                        std::optional<bool> whole) {
    const int64_t N = shape.N, groups = layout::group_count(shape.K, scheme.group_size);
    const bool one = scheme.scale_of == ScaleOf::tensor;
    const auto need_numbers = [&](const FileTensor& tensor, size_t count) {
      const auto& dims = tensor.entry.dims;
      const bool matrix = dims.size() == 2 && dims[0] == N && dims[1] == groups, list = dims.size() < 2 && groups == 1;
      if (int64_t(count) != (one ? 1 : N * groups) || (!one && !matrix && !list))
        throw Error("{}: {} of {} outputs in {} groups are expected, found shape [{}]", tensor.where(),
                    one ? "one number" : "the numbers", N, groups, fmt::join(dims, ", "));
    };
    const FileTensor& tensor = module.need("weight_scale");
    Grid out{read_scales(tensor), {}};
    need_numbers(tensor, out.scale.size());
    const FileTensor* g_idx = scheme.ordered ? &module.need("weight_g_idx") : module.find("weight_g_idx");
    if (g_idx != nullptr) check_group_order(*g_idx, shape.K, scheme.group_size);

    const int64_t middle = int64_t{1} << (scheme.bits - 1);  // the code of 0
    out.zero.assign(out.scale.size(), float(middle));
    const FileTensor* zeros = scheme.symmetric ? module.find("weight_zero_point") : &module.need("weight_zero_point");
    if (zeros == nullptr) return out;
    if (whole && !one && zeros->entry.dtype == "I32") {
      need_shape(*zeros, std::array{words_of(scheme.bits, N, *whole), groups},
                 "a zero point for each output and group");
      const WordMatrix words = word_matrix(*zeros);
      std::vector<uint8_t> zero(static_cast<size_t>(N));
      for (int64_t g = 0; g < groups; ++g) {
        unpack_codes(words.columns(g, 1), scheme.bits, *whole, zero);
        for (int64_t n = 0; n < N; ++n) out.zero[size_t(n * groups + g)] = float(zero[size_t(n)]);
      }
      return out;
    }
    const std::vector<int64_t> values = read_integers(*zeros);
    need_numbers(*zeros, values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i] < -middle || values[i] >= middle)
        throw Error("{}: the zero point {} is none of {} bits", zeros->where(), values[i], scheme.bits);
      out.zero[i] = float(values[i] + middle);
    }
    return out;
  }

  ImportedMatrix pack(const ModuleTensors& module, const CodedMatrix& matrix, ThreadPool* pool) const {
    return naming_file(module.need("weight_scale").where(), [&] {
      if (auto sparse = pack_two_of_four(matrix, pool)) return std::move(*sparse);
      return pack_coded(matrix, pool);
    });
  }

  /// nm24_q4, where the model is said to be 2:4 sparse and the matrix fits it.
  std::optional<ImportedMatrix> pack_two_of_four(const CodedMatrix& matrix, ThreadPool* pool) const {
    constexpr int64_t kCols = layout::Nm24Q4Block::kCols;
    const layout::Layout& to = layout::get(layout::Id::nm24_q4);
    const auto [N, K] = matrix.shape;
    const int64_t size = layout::whole_group(K, matrix.group_size), blocks = K / kCols;
    const float middle = float(1 << (to.bits - 1));
    if (!config_.two_of_four() || matrix.bits != to.bits || K % kCols != 0 || size % kCols != 0 ||
        std::ranges::any_of(matrix.zero, [&](float zero) { return zero != middle; }))
      return {};
    std::vector<uint8_t> keep(matrix.code.size());
    for (size_t four = 0; four < keep.size(); four += 4) {
      const auto code = std::span(matrix.code).subspan(four, 4);
      int64_t kept = 0;
      for (size_t i = 0; i < 4; ++i) kept += keep[four + i] = code[i] != uint8_t(middle);
      if (kept > 2) return {};
      for (size_t i = 0; i < 4 && kept < 2; ++i)
        if (keep[four + i] == 0) keep[four + i] = 1, ++kept;
    }
    std::vector<float> scale(size_t(N * blocks)), zero(scale.size(), middle);
    for (int64_t n = 0; n < N; ++n)
      for (int64_t b = 0; b < blocks; ++b)
        scale[size_t(n * blocks + b)] = matrix.scale[size_t(n * matrix.groups() + b * kCols / size)];
    ImportedMatrix out{&to, matrix.shape, {}, {}};
    out.params = layout::pack_grouped(to, matrix.shape, {.group_size = kCols}, {matrix.code, scale, zero, keep},
                                      out.bytes, pool);
    return out;
  }

  CompressedConfig config_;
  bool plain_rows_ = false;
};

}  // namespace

std::unique_ptr<Importer> make_compressed_importer(const QuantizationConfig& config) {
  return std::make_unique<CompressedImporter>(config);
}

}  // namespace lacuna::io
