// src/model/sparsity.h - activation sparsity: which inputs of a layer's matrices a token leaves out (SpQt,
// section 3.2).
//
// A layer has four thresholded inputs, each read by all matrices that share it: attn_in (q, k, v), attn_out (o), ffn_in
// (gate, up), ffn_down (down). Input j of a token is inactive if and only if |x_j| < t (criterion magnitude) or |x_j| *
// norm_j < t (wina), norm_j the L2 norm of column j of the group's concatenated weights. So equality, NaN and infinity
// stay active, and t = 0 leaves nothing out. With groups of G inputs neighbours are left out together: the size of a
// group is the root of the mean square of its inputs (times their norms with wina), and is compared with t.
//
// In a file (the model's own, or a GGUF file without tensors beside it) the thresholds are metadata:
//   lacuna.threshold.version      u32     1
//   lacuna.threshold.layers       u32     layers of the model
//   lacuna.threshold.widths       u32[4]  K of the four inputs
//   lacuna.threshold.levels       f32[L]  shares of inputs to leave out, ascending, each in (0, 1)
//   lacuna.threshold.text_sha256  string  of the calibration text
//   lacuna.threshold.tokens       u64     tokens that the statistics come from
//   lacuna.threshold.ctx          u32     tokens of a calibration window
//   lacuna.threshold.skipped      u32     first positions of each window that are not in the statistics
//   lacuna.threshold.group        u32     G; absent: 1, single inputs
//   lacuna.threshold.MODE.CRITERION            f32[L][layers][4]  t
//   lacuna.threshold.MODE.CRITERION.realised   f32[L][layers][4]  share of inactive inputs in the calibration text
//   lacuna.threshold.wina.norms   f32     [layers] x {attn_in, attn_out, ffn_in, ffn_down}, K values each
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/metadata.h"
#include "model/config.h"

namespace lacuna::model {

enum class Input : uint8_t { attn_in, attn_out, ffn_in, ffn_down };
inline constexpr int64_t kInputs = 4;
std::string_view name_of(Input input);
/// K of each input.
std::array<int64_t, kInputs> input_widths(const Config& config);

enum class Mode : uint8_t {
  uniform,  // one share everywhere
  greedy,   // TEAL's search inside each block (arXiv:2408.14690, Alg. 1)
  layered,  // the same search, and the layers share the whole model's budget by how much each one matters
};
enum class Criterion : uint8_t { magnitude, wina };
std::string_view name_of(Mode mode);
std::string_view name_of(Criterion criterion);
/// Throw Error that lists the known names.
Mode mode_named(std::string_view name);
Criterion criterion_named(std::string_view name);

/// One value for each layer and input.
using PerInput = std::vector<std::array<float, kInputs>>;

/// Bytes of the weights that read each input.
using InputBytes = std::vector<std::array<int64_t, kInputs>>;

/// Share of one layer's weight bytes that stay unread when these shares of its inputs are left out; and of all layers'.
double skipped_share(const std::array<float, kInputs>& share, const std::array<int64_t, kInputs>& bytes);
double skipped_share(const PerInput& share, const InputBytes& bytes);

/// Whether two levels are the same one: files store them as floats.
bool same_level(double a, double b);

/// What a decoder needs to leave inputs out.
struct Thresholds {
  double level = 0;
  Mode mode = Mode::uniform;
  Criterion criterion = Criterion::magnitude;
  int64_t group = 1;  // inputs that are left out together
  PerInput t;
  PerInput realised;                                           // on the calibration text
  std::vector<std::array<std::vector<float>, kInputs>> norms;  // [layers][inputs][K]; empty for magnitude
};

/// Writes x with its inactive inputs as zeros into y (may be x) and returns how many there are. group: inputs that are
/// left out together.
int64_t mask_inactive(const float* x, const float* norms, float t, int64_t K, float* y, int64_t group = 1);

/// All levels, modes and criteria of one calibration.
struct ThresholdSet {
  struct Entry {
    Mode mode = Mode::uniform;
    Criterion criterion = Criterion::magnitude;
    std::vector<PerInput> t, realised;  // [levels]
  };
  std::array<int64_t, kInputs> widths = {};
  int64_t n_layers = 0;
  std::vector<double> levels;
  std::vector<Entry> entries;
  std::vector<std::array<std::vector<float>, kInputs>> norms;  // empty where no entry is wina
  std::string text_sha256;
  int64_t tokens = 0, ctx = 0, skipped = 0;
  int64_t group = 1;  // inputs that are left out together

  /// nullopt: the file holds no thresholds. Throws Error (starting with `where`) for anything that is not as above.
  static std::optional<ThresholdSet> read(const io::Metadata& metadata, const std::string& where);
  void write(io::Metadata& metadata) const;

  /// Throws Error when the model has other layers or widths.
  void check_fits(const Config& config, const std::string& where) const;
  /// mode: nullopt takes the best one stored for the criterion (layered, greedy, uniform). Throws Error naming what is
  /// stored when this is not.
  Thresholds select(double level, std::optional<Mode> mode, Criterion criterion, const std::string& where) const;
  /// "uniform magnitude 25%, 40%; greedy ...".
  std::string stored() const;
};

}  // namespace lacuna::model
