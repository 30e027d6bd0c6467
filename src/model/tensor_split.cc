#include "model/tensor_split.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "core/error.h"

namespace lacuna::model {
namespace {

using kernels::WeightView;

/// Inputs of down, and outputs of gate and up, are parted at multiples of this in every layout: loads stay whole.
constexpr int64_t kLeastInputs = 8;

/// Heads or values of which whole `unit`s go to a shard, and the tensor that asks for it.
struct Unit {
  int64_t size = 1;
  int64_t largest = 1;
  std::string why;

  /// A tensor with `each` rows or columns for every head or value, of which `together` cannot be parted.
  void need(const WeightView& weight, int64_t each, int64_t together, const char* what) {
    const int64_t of_tensor = together / std::gcd(together, each);
    size = std::lcm(size, of_tensor);
    if (of_tensor <= largest) return;
    largest = of_tensor;
    why = fmt::format("{}: {} {} of {} lie together", weight.name, together, what, weight.layout->name);
  }

  /// [0, all) in `shards` shares.
  std::vector<Share> shares(int64_t all, int64_t shards, const char* of) const {
    const int64_t units = (all + size - 1) / size;
    if (units < shards)
      throw Error("{}{} {} can be split over 1 to {} shards, not {}; ask for fewer", why,
                  why.empty() ? "the" : ", so that", fmt::format("{} {}", all, of), units, shards);
    std::vector<Share> out;
    for (int64_t shard = 0; shard < shards; ++shard) {
      const int64_t first = units * shard / shards * size, end = std::min(all, units * (shard + 1) / shards * size);
      out.push_back({first, end - first});
    }
    return out;
  }
};

}  // namespace

TensorSplit::TensorSplit(const Config& config, std::span<const LayerWeights> layers, int64_t shards)
    : n_embd_(config.n_embd), heads_of_kv_(config.n_heads / config.n_kv_heads), head_dim_(config.head_dim) {
  if (shards < 1) throw Error("{} shards were asked for; at least 1 is needed", shards);
  if (shards == 1) {
    kv_heads_ = {{0, config.n_kv_heads}};
    ff_ = {{0, config.n_ff}};
    return;
  }
  Unit heads, values;
  values.size = kLeastInputs;
  for (const LayerWeights& layer : layers) {
    for (size_t input = 0; input < size_t(kInputs); ++input) {
      for (size_t part = 0; part < layer[input].size(); ++part) {
        const WeightView& weight = layer[input][part];
        const int64_t rows = layout::row_unit(*weight.layout);
        const int64_t columns = layout::column_unit(*weight.layout, weight.shape, weight.params);
        switch (Input(input)) {
          case Input::attn_in:
            heads.need(weight, part == 0 ? heads_of_kv_ * head_dim_ : head_dim_, rows, "outputs");
            break;
          case Input::attn_out:
            heads.need(weight, heads_of_kv_ * head_dim_, columns, "inputs");
            break;
          case Input::ffn_in:
            values.need(weight, 1, rows, "outputs");
            break;
          case Input::ffn_down:
            values.need(weight, 1, columns, "inputs");
            break;
        }
      }
    }
  }
  kv_heads_ = heads.shares(config.n_kv_heads, shards, "key-value heads");
  ff_ = values.shares(config.n_ff, shards, "feed-forward values");
}

Share TensorSplit::inputs(int64_t shard, Input input) const {
  if (input == Input::attn_out) return scaled(heads(shard), head_dim_);
  if (input == Input::ffn_down) return ff(shard);
  return {0, n_embd_};
}

Share TensorSplit::rows(int64_t shard, int64_t N) const {
  const int64_t share = ((N + shards() - 1) / shards() + 3) / 4 * 4;
  const int64_t first = std::min(N, shard * share);
  return {first, std::min(N, first + share) - first};
}

layout::Slice TensorSplit::slice(const WeightView& weight, size_t part, Input input, int64_t shard) const {
  const auto [N, K] = weight.shape;
  Share outputs = {0, N}, columns = {0, K};
  switch (input) {
    case Input::attn_in:
      outputs = scaled(part == 0 ? heads(shard) : kv_heads(shard), head_dim_);
      break;
    case Input::ffn_in:
      outputs = ff(shard);
      break;
    case Input::attn_out:
    case Input::ffn_down:
      columns = inputs(shard, input);
      break;
  }
  return {outputs.first, outputs.count, columns.first, columns.count};
}

std::vector<WeightView> TensorSplit::outline(const LayerWeights& layer, Input input, int64_t shard) const {
  std::vector<WeightView> out = layer[size_t(input)];
  if (shards() == 1) return out;
  for (size_t part = 0; part < out.size(); ++part) {
    WeightView& weight = out[part];
    const layout::Slice s = slice(weight, part, input, shard);
    const bool by_inputs = input == Input::attn_out || input == Input::ffn_down;
    if (!by_inputs && !weight.bias.empty()) weight.bias = weight.bias.subspan(size_t(s.row0), size_t(s.rows));
    if (by_inputs && shard > 0) weight.bias = {};
    weight.params = layout::slice_params(*weight.layout, weight.shape, weight.params, weight.bytes, s);
    weight.shape = {s.rows, s.columns};
    weight.bytes = {};
  }
  return out;
}

std::vector<ShardWeight> TensorSplit::cut(const LayerWeights& layer, Input input, int64_t shard,
                                          ThreadPool& pool) const {
  std::vector<ShardWeight> out;
  for (const WeightView& view : outline(layer, input, shard)) {
    ShardWeight& weight = out.emplace_back(ShardWeight{view, {}});
    if (shards() == 1) continue;
    const size_t part = out.size() - 1;
    const WeightView& whole = layer[size_t(input)][part];
    weight.bytes = layout::slice_bytes(*whole.layout, whole.shape, whole.params, whole.bytes,
                                       slice(whole, part, input, shard), &pool);
    weight.view.bytes = weight.bytes;
  }
  return out;
}

ShardWeight TensorSplit::cut_rows(const WeightView& weight, Share rows, ThreadPool& pool) const {
  ShardWeight out{weight, {}};
  if (shards() == 1) return out;
  const auto& [N, K] = weight.shape;
  const layout::Slice slice = {rows.first, rows.count, 0, K};
  out.bytes = layout::slice_bytes(*weight.layout, {N, K}, weight.params, weight.bytes, slice, &pool);
  out.view.params = layout::slice_params(*weight.layout, {N, K}, weight.params, weight.bytes, slice);
  out.view.shape = {rows.count, K};
  out.view.bytes = out.bytes;
  if (!weight.bias.empty()) out.view.bias = weight.bias.subspan(size_t(rows.first), size_t(rows.count));
  return out;
}

}  // namespace lacuna::model
