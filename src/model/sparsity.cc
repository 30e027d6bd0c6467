#include "model/sparsity.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "io/checkpoint.h"
#include "kernels/active.h"

namespace lacuna::model {
namespace {

const std::string kPrefix(io::kThresholdPrefix);
constexpr int64_t kVersion = 1;
constexpr std::array<Mode, 3> kModes = {Mode::uniform, Mode::greedy, Mode::layered};
constexpr std::array<Criterion, 2> kCriteria = {Criterion::magnitude, Criterion::wina};

std::string key_of(Mode mode, Criterion criterion) {
  return fmt::format("{}{}.{}", kPrefix, name_of(mode), name_of(criterion));
}

std::string percent(double share) { return fmt::format("{:.4g}%", 100 * share); }

/// A metadata array of exactly `count` values from 0 to `most`.
std::vector<float> read_values(const io::Metadata& metadata, const std::string& key, size_t count, float most,
                               const std::string& where) {
  const auto values = metadata.numbers(key);
  if (!values) throw Error("{}: {} is missing; calibrate the model again", where, key);
  if (values->size() != count) throw Error("{}: {} has {} values, expected {}", where, key, values->size(), count);
  for (size_t i = 0; i < count; ++i)
    if (!((*values)[i] >= 0 && (*values)[i] <= most))
      throw Error("{}: {}[{}] is {}, expected 0 to {}", where, key, i, (*values)[i], most);
  return *values;
}

std::vector<PerInput> cut(const std::vector<float>& values, size_t levels, int64_t n_layers) {
  std::vector<PerInput> out(levels, PerInput(static_cast<size_t>(n_layers)));
  auto next = values.begin();
  for (PerInput& level : out)
    for (auto& layer : level)
      for (float& value : layer) value = *next++;
  return out;
}

std::vector<float> joined(const std::vector<PerInput>& levels) {
  std::vector<float> out;
  for (const PerInput& level : levels)
    for (const auto& layer : level) out.insert(out.end(), layer.begin(), layer.end());
  return out;
}

int64_t need(const io::Metadata& metadata, const char* key, int64_t low, int64_t high, const std::string& where) {
  const int64_t value = metadata.need_integer(kPrefix + key);
  if (value < low || value > high)
    throw Error("{}: {}{} is {}, expected {} to {}", where, kPrefix, key, value, low, high);
  return value;
}

}  // namespace

std::string_view name_of(Input input) {
  constexpr std::string_view kNames[] = {"attn_in", "attn_out", "ffn_in", "ffn_down"};
  return kNames[size_t(input)];
}

std::string_view name_of(Mode mode) {
  constexpr std::string_view kNames[] = {"uniform", "greedy", "layered"};
  return kNames[size_t(mode)];
}

std::string_view name_of(Criterion criterion) { return criterion == Criterion::magnitude ? "magnitude" : "wina"; }

Mode mode_named(std::string_view name) {
  for (const Mode mode : kModes)
    if (name == name_of(mode)) return mode;
  throw Error("unknown mode of activation sparsity '{}'; known: uniform, greedy, layered", name);
}

Criterion criterion_named(std::string_view name) {
  for (const Criterion criterion : kCriteria)
    if (name == name_of(criterion)) return criterion;
  throw Error("unknown criterion of activation sparsity '{}'; known: magnitude, wina", name);
}

std::array<int64_t, kInputs> input_widths(const Config& config) {
  return {config.n_embd, config.n_heads * config.head_dim, config.n_embd, config.n_ff};
}

double skipped_share(const std::array<float, kInputs>& share, const std::array<int64_t, kInputs>& bytes) {
  double skipped = 0, all = 0;
  for (size_t i = 0; i < size_t(kInputs); ++i) {
    skipped += double(share[i]) * double(bytes[i]);
    all += double(bytes[i]);
  }
  return all > 0 ? skipped / all : 0;
}

double skipped_share(const PerInput& share, const InputBytes& bytes) {
  double skipped = 0, all = 0;
  for (size_t l = 0; l < share.size(); ++l) {
    double size = 0;
    for (const int64_t part : bytes[l]) size += double(part);
    skipped += skipped_share(share[l], bytes[l]) * size;
    all += size;
  }
  return all > 0 ? skipped / all : 0;
}

bool same_level(double a, double b) { return std::abs(a - b) < 1e-4; }

int64_t mask_inactive(const float* x, const float* norms, float t, int64_t K, float* y, int64_t group) {
  int64_t inactive = 0;
  for (int64_t k = 0; group > 1 && k < K; k += group) {
    const int64_t n = std::min(group, K - k);
    const bool skip = kernels::group_size(x + k, norms ? norms + k : nullptr, n) < t;
    for (int64_t i = k; i < k + n; ++i) y[i] = skip ? 0.0f : x[i];
    inactive += skip ? n : 0;
  }
  if (group > 1) return inactive;
  for (int64_t k = 0; k < K; ++k) {
    const float size = norms ? std::abs(x[k]) * norms[k] : std::abs(x[k]);
    const bool skip = size < t;
    y[k] = skip ? 0.0f : x[k];
    inactive += skip;
  }
  return inactive;
}

std::optional<ThresholdSet> ThresholdSet::read(const io::Metadata& metadata, const std::string& where) {
  if (!metadata.contains(kPrefix + "version")) return std::nullopt;
  if (const int64_t version = metadata.need_integer(kPrefix + "version"); version != kVersion)
    throw Error("{}: thresholds of version {}, this program reads version {}; calibrate the model again", where,
                version, kVersion);
  constexpr int64_t kMost = int64_t{1} << 31;
  constexpr float kLargest = std::numeric_limits<float>::max();
  ThresholdSet set;
  set.n_layers = need(metadata, "layers", 1, 1 << 20, where);
  const auto widths = metadata.integers(kPrefix + "widths");
  if (!widths || widths->size() != kInputs) throw Error("{}: {}widths must hold {} integers", where, kPrefix, kInputs);
  for (size_t i = 0; i < kInputs; ++i) {
    set.widths[i] = (*widths)[i];
    if (set.widths[i] < 1 || set.widths[i] > kMost)
      throw Error("{}: {}widths[{}] is {}, expected 1 to {}", where, kPrefix, i, set.widths[i], kMost);
  }
  const auto levels = metadata.numbers(kPrefix + "levels");
  if (!levels || levels->empty()) throw Error("{}: {}levels is missing or empty", where, kPrefix);
  for (const float level : *levels) {
    if (!(level > 0 && level < 1) || (!set.levels.empty() && level <= set.levels.back()))
      throw Error("{}: {}levels must ascend between 0 and 1, found {}", where, kPrefix, level);
    set.levels.push_back(level);
  }
  set.text_sha256 = metadata.need_string(kPrefix + "text_sha256");
  set.tokens = need(metadata, "tokens", 0, std::numeric_limits<int64_t>::max(), where);
  set.ctx = need(metadata, "ctx", 1, kMost, where);
  set.skipped = need(metadata, "skipped", 0, kMost, where);
  if (metadata.contains(kPrefix + "group")) set.group = need(metadata, "group", 1, kMost, where);
  const size_t count = set.levels.size() * size_t(set.n_layers) * kInputs;
  bool wina = false;
  for (const Mode mode : kModes) {
    for (const Criterion criterion : kCriteria) {
      const std::string key = key_of(mode, criterion);
      if (!metadata.contains(key)) continue;
      wina |= criterion == Criterion::wina;
      set.entries.push_back(
          {mode, criterion, cut(read_values(metadata, key, count, kLargest, where), set.levels.size(), set.n_layers),
           cut(read_values(metadata, key + ".realised", count, 1, where), set.levels.size(), set.n_layers)});
    }
  }
  if (wina) {
    int64_t total = 0;
    for (const int64_t width : set.widths) total += width;
    const auto values = read_values(metadata, kPrefix + "wina.norms", size_t(total * set.n_layers), kLargest, where);
    auto next = values.begin();
    set.norms.resize(size_t(set.n_layers));
    for (auto& layer : set.norms) {
      for (size_t i = 0; i < kInputs; ++i) {
        layer[i].assign(next, next + set.widths[i]);
        next += set.widths[i];
      }
    }
  }
  return set;
}

void ThresholdSet::write(io::Metadata& metadata) const {
  std::vector<std::string> old;
  for (const auto& [key, value] : metadata.entries())
    if (key.starts_with(kPrefix)) old.push_back(key);
  for (const std::string& key : old) metadata.erase(key);
  metadata.set(kPrefix + "version", uint32_t(kVersion));
  metadata.set(kPrefix + "layers", uint32_t(n_layers));
  metadata.set(kPrefix + "widths", std::vector<uint32_t>(widths.begin(), widths.end()));
  metadata.set(kPrefix + "levels", std::vector<float>(levels.begin(), levels.end()));
  metadata.set(kPrefix + "text_sha256", text_sha256);
  metadata.set(kPrefix + "tokens", uint64_t(tokens));
  metadata.set(kPrefix + "ctx", uint32_t(ctx));
  metadata.set(kPrefix + "skipped", uint32_t(skipped));
  if (group > 1) metadata.set(kPrefix + "group", uint32_t(group));
  for (const Entry& entry : entries) {
    metadata.set(key_of(entry.mode, entry.criterion), joined(entry.t));
    metadata.set(key_of(entry.mode, entry.criterion) + ".realised", joined(entry.realised));
  }
  if (norms.empty()) return;
  std::vector<float> all;
  for (const auto& layer : norms)
    for (const auto& input : layer) all.insert(all.end(), input.begin(), input.end());
  metadata.set(kPrefix + "wina.norms", std::move(all));
}

void ThresholdSet::check_fits(const Config& config, const std::string& where) const {
  const auto expected = input_widths(config);
  if (n_layers == config.n_layers && widths == expected) return;
  throw Error(
      "{}: thresholds for {} layers with inputs of {}, {}, {} and {}, but the model has {} layers with {}, {}, {} and "
      "{}; calibrate this model",
      where, n_layers, widths[0], widths[1], widths[2], widths[3], config.n_layers, expected[0], expected[1],
      expected[2], expected[3]);
}

std::string ThresholdSet::stored() const {
  std::string out;
  for (const Entry& entry : entries) {
    if (!out.empty()) out += "; ";
    out += fmt::format("{} {}", name_of(entry.mode), name_of(entry.criterion));
    for (size_t i = 0; i < levels.size(); ++i) out += (i ? ", " : " ") + percent(levels[i]);
  }
  return out.empty() ? "none" : out;
}

Thresholds ThresholdSet::select(double level, std::optional<Mode> mode, Criterion criterion,
                                const std::string& where) const {
  const Entry* found = nullptr;
  for (const Entry& entry : entries)  // in the order of kModes
    if (entry.criterion == criterion && (!mode || entry.mode == *mode)) found = &entry;
  for (size_t i = 0; found && i < levels.size(); ++i)
    if (same_level(levels[i], level))
      return {levels[i],
              found->mode,
              criterion,
              group,
              found->t[i],
              found->realised[i],
              criterion == Criterion::wina ? norms : decltype(norms){}};
  throw Error("{}: no thresholds for an activation sparsity of {}, {}{}; stored are: {}", where, percent(level),
              mode ? fmt::format("mode {}, ", name_of(*mode)) : "", fmt::format("criterion {}", name_of(criterion)),
              stored());
}

}  // namespace lacuna::model
