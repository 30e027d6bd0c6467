// src/kernels/cpu/linear.cc - groups of weights on the CPU: choice of kernels, repacking, one parallel region a call.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "core/error.h"
#include "core/huge_buffer.h"
#include "core/mapped_file.h"
#include "kernels/cpu/linear_kernel.h"
#include "kernels/cpu/zigzag_group.h"

namespace lacuna::cpu {
namespace {

using kernels::Activation;
using kernels::Output;
using kernels::WeightView;

/// Tokens quantized at once: bounds the scratch memory however long the prompt.
constexpr int64_t kChunk = 512;
/// Quantized inputs of a tile should stay in the second-level cache beside the weights that stream through.
constexpr int64_t kTileBytes = int64_t{1} << 20;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/// Scratch of the calling thread, shared by all groups: one job runs at a time.
std::byte* scratch(size_t size) {
  thread_local HugeBuffer buffer;
  if (buffer.size() < size) buffer = HugeBuffer(size);
  return buffer.data();
}

struct Part {
  WeightView view;
  const LinearKernel* kernel = nullptr;
  HugeBuffer prepared;
  const std::byte* weight = nullptr;
  int extra = -1;  // index into extras, or -1
  int64_t read_bytes() const { return prepared.size() != 0 ? int64_t(prepared.size()) : int64_t(view.bytes.size()); }
};

/// Rows [row0, row1) of a part: what one worker takes at once.
struct Item {
  int32_t part;
  int64_t row0, row1;
};

class CpuLinearGroup final : public kernels::LinearGroup {
 public:
  CpuLinearGroup(Isa isa, std::span<const WeightView> views, ThreadPool& pool, kernels::Prepare prepare)
      : isa_(isa), table_(linear_table(isa)), pool_(pool) {
    if (views.empty()) throw Error("a linear group needs at least one weight");
    K_ = views[0].shape.K;
    parts_.reserve(views.size());
    for (const WeightView& view : views) add_part(view, prepare);
    tile_ = std::clamp<int64_t>(kTileBytes / std::max<int64_t>(K_, 1) / 16 * 16, 16, kMaxTile);
    const int64_t rows_per_worker_pass = int64_t{8} * pool_.size();
    int64_t bytes = 0;
    for (const Part& part : parts_) bytes += part.read_bytes();
    const int64_t one_bytes = std::clamp<int64_t>(bytes / rows_per_worker_pass, 8 << 10, 128 << 10);
    for (size_t p = 0; p < parts_.size(); ++p) {
      const int64_t N = parts_[p].view.shape.N;
      const int64_t row_bytes = std::max<int64_t>(1, parts_[p].read_bytes() / std::max<int64_t>(N, 1));
      cut(int32_t(p), std::max(kPanelRows, one_bytes / row_bytes / kPanelRows * kPanelRows), one_items_);
      cut(int32_t(p), 2 * kPanelRows, many_items_);
    }
  }

  void run(const Activation& x, std::span<const Output> y) override {
    if (y.size() != parts_.size()) throw Error("linear group of {} weights got {} outputs", parts_.size(), y.size());
    if (!x.all()) return run(masked(x), y);
    for (int64_t m = 0; m < x.M; m += kChunk) run_chunk(x, y, m, std::min(kChunk, x.M - m));
  }

  /// Rows of weights read every input: those that do not count become zeros.
  Activation masked(const Activation& x) {
    if (int64_t(masked_.size()) < x.M * K_ * int64_t(sizeof(float)))
      masked_ = HugeBuffer(size_t(x.M * K_) * sizeof(float));
    auto* rows = reinterpret_cast<float*>(masked_.data());
    for (int64_t m = 0; m < x.M; ++m) {
      float* to = rows + m * K_;
      std::memset(to, 0, size_t(K_) * sizeof(float));
      for (int64_t i = 0; i < x.active_count; ++i) to[x.active[i]] = x.x[m * x.stride + x.active[i]];
    }
    return {rows, x.M, K_};
  }

  void reserve(int64_t M) override { scratch(size_t(chunk_layout(std::clamp<int64_t>(M, 2, kChunk)).total)); }

  int64_t weight_bytes() const override {
    int64_t bytes = 0;
    for (const Part& part : parts_) bytes += part.read_bytes();
    return bytes;
  }
  int64_t prepared_bytes() const override {
    int64_t bytes = 0;
    for (const Part& part : parts_) bytes += int64_t(part.prepared.size());
    return bytes;
  }
  std::string explain() const override {
    std::string out;
    for (const Part& part : parts_)
      out += fmt::format("{} {}x{} {}: {}.{} | {}.{}\n", part.view.name, part.view.shape.N, part.view.shape.K,
                         part.view.layout->name, isa_name(isa_), part.kernel->one_name, isa_name(isa_),
                         part.kernel->many_name);
    return out;
  }

 private:
  /// Where the parts of a chunk's quantized inputs lie in the scratch memory. Every tile is a contiguous piece of each.
  struct ChunkLayout {
    int64_t codes = 0, scale = 0, total = 0;
    int64_t start[8] = {}, sum[8] = {};
  };

  void add_part(const WeightView& view, kernels::Prepare prepare) {
    const auto [N, K] = view.shape;
    if (K != K_)
      throw Error("{}: K = {}, but the first weight of its group has K = {}; weights of a group read one input",
                  view.name, K, K_);
    const int64_t bytes = view.layout->size_bytes(*view.layout, view.shape);
    if (int64_t(view.bytes.size()) != bytes)
      throw Error("{}: {} bytes for {} [{}, {}], expected {}", view.name, view.bytes.size(), view.layout->name, N, K,
                  bytes);
    if (!view.bias.empty() && int64_t(view.bias.size()) != N)
      throw Error("{}: bias of {} values for N = {}", view.name, view.bias.size(), N);
    Part part;
    part.view = view;
    const Problem problem{view.layout->id, view.shape, prepare};
    for (int i = 0; i < table_.count && part.kernel == nullptr; ++i)
      if (table_.kernels[i].can_run(problem)) part.kernel = &table_.kernels[i];
    if (part.kernel == nullptr)
      throw Error("{}: no kernel for {} with N = {}, K = {} on cpu/{}; use another layout", view.name,
                  view.layout->name, N, K, isa_name(isa_));
    part.weight = view.bytes.data();
    if (part.kernel->prepared_bytes != nullptr) {
      part.prepared = HugeBuffer(size_t(part.kernel->prepared_bytes(view.shape)));
      pool_.parallel_for(ceil_div(N, 4 * kPanelRows), 1, [&](int64_t begin, int64_t end) {
        part.kernel->prepare(view.bytes.data(), view.shape, begin * 4 * kPanelRows,
                             std::min(view.shape.N, end * 4 * kPanelRows), part.prepared.data());
      });
      part.weight = part.prepared.data();
      MappedFile::release(view.bytes);
    }
    const ActivationNeeds& needs = part.kernel->needs;
    if (needs.quantized) {
      quantized_ = true;
      if (needs.offset != 0 || needs.sums) {
        const auto same = [&](const QuantizeArgs::Extra& extra) { return extra.needs == needs; };
        auto found = std::find_if(extras_.begin(), extras_.end(), same);
        if (found == extras_.end()) found = extras_.insert(extras_.end(), {needs, nullptr, nullptr});
        part.extra = int(found - extras_.begin());
      }
    }
    parts_.push_back(std::move(part));
  }

  void cut(int32_t part, int64_t rows, std::vector<Item>& items) const {
    const int64_t N = parts_[size_t(part)].view.shape.N;
    for (int64_t n = 0; n < N; n += rows) items.push_back({part, n, std::min(N, n + rows)});
  }

  ChunkLayout chunk_layout(int64_t M) const {
    ChunkLayout at;
    if (!quantized_) return at;
    const int64_t blocks = M * (K_ / kBlock);
    const auto place = [&](int64_t bytes) {
      const int64_t begin = at.total;
      at.total += round_up(bytes, 64);
      return begin;
    };
    at.codes = place(blocks * kBlock);
    at.scale = place(blocks * 4);
    for (size_t e = 0; e < extras_.size(); ++e) {
      const int64_t bytes = blocks * 4 * (32 / extras_[e].needs.group);
      at.start[e] = extras_[e].needs.offset != 0 ? place(bytes) : -1;
      at.sum[e] = extras_[e].needs.sums ? place(bytes) : -1;
    }
    return at;
  }

  /// Arguments that quantize the tile of `tokens` tokens at token m of the chunk.
  QuantizeArgs tile_pointers(std::byte* base, const ChunkLayout& at, int64_t m, int64_t tokens,
                             QuantizeArgs::Extra* extras) const {
    const int64_t blocks = m * (K_ / kBlock);
    QuantizeArgs q;
    q.K = K_;
    q.tokens = tokens;
    q.codes = reinterpret_cast<int8_t*>(base + at.codes) + blocks * kBlock;
    q.scale = reinterpret_cast<float*>(base + at.scale) + blocks;
    for (size_t e = 0; e < extras_.size(); ++e) {
      extras[e] = extras_[e];
      const int64_t groups = blocks * (32 / extras_[e].needs.group);
      if (at.start[e] >= 0) extras[e].start = reinterpret_cast<int32_t*>(base + at.start[e]) + groups;
      if (at.sum[e] >= 0) extras[e].sum = reinterpret_cast<float*>(base + at.sum[e]) + groups;
    }
    q.extras = extras;
    q.extra_count = int(extras_.size());
    return q;
  }

  void run_chunk(const Activation& x, std::span<const Output> y, int64_t m0, int64_t M) {
    const bool planes = quantized_ && M == 1;  // a single token is quantized into two planes, laid out as two tokens
    const ChunkLayout at = chunk_layout(planes ? 2 : M);
    std::byte* base = quantized_ ? scratch(size_t(at.total)) : nullptr;
    const float* rows = x.x + m0 * x.stride;
    const int64_t tiles = ceil_div(M, tile_);
    if (planes) {
      QuantizeArgs::Extra extras[8];
      QuantizeArgs q = tile_pointers(base, at, 0, 2, extras);
      q.planes = true;
      q.x = rows;
      table_.quantize(q);
    } else if (quantized_) {
      constexpr int64_t kGrain = 8;
      pool_.parallel_for(ceil_div(M, kGrain), 1, [&](int64_t begin, int64_t end) {
        for (int64_t m = begin * kGrain, last = std::min(M, end * kGrain); m < last;) {
          const int64_t tile = m / tile_, first = tile * tile_, tokens = std::min(tile_, M - first);
          QuantizeArgs::Extra extras[8];
          QuantizeArgs q = tile_pointers(base, at, first, tokens, extras);
          q.x = rows + first * x.stride;
          q.x_stride = x.stride;
          q.token0 = m - first;
          q.token1 = std::min(last - first, tokens);
          table_.quantize(q);
          m = first + q.token1;
        }
      });
    }
    const std::vector<Item>& items = M == 1 ? one_items_ : many_items_;
    const auto run_item = [&](int64_t index) {
      const int64_t first = index / int64_t(items.size()) * tile_;
      const Item& item = items[size_t(index % int64_t(items.size()))];
      const Part& part = parts_[size_t(item.part)];
      LinearArgs a;
      a.weight = part.weight;
      a.N = part.view.shape.N;
      a.K = K_;
      a.bias = part.view.bias.empty() ? nullptr : part.view.bias.data();
      a.x.tokens = std::min(tile_, M - first);
      a.x.x = rows + first * x.stride;
      a.x.x_stride = x.stride;
      if (part.kernel->needs.quantized) {
        if (planes) a.x.tokens = 2;
        QuantizeArgs::Extra extras[8];
        const QuantizeArgs q = tile_pointers(base, at, first, a.x.tokens, extras);
        a.x.codes = q.codes;
        a.x.scale = q.scale;
        if (part.extra >= 0) {
          a.x.start = extras[part.extra].start;
          a.x.sum = extras[part.extra].sum;
        }
      }
      const Output& out = y[size_t(item.part)];
      a.y = out.y + (m0 + first) * out.stride;
      a.y_stride = out.stride;
      a.row0 = item.row0;
      a.row1 = item.row1;
      (M == 1 ? part.kernel->run_one : part.kernel->run_many)(a);
    };
    const int64_t count = tiles * int64_t(items.size());
    pool_.parallel_for(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) run_item(i);
    });
  }

  Isa isa_;
  const LinearTable& table_;
  ThreadPool& pool_;
  int64_t K_ = 0, tile_ = kMaxTile;
  bool quantized_ = false;
  HugeBuffer masked_;
  std::vector<Part> parts_;
  std::vector<QuantizeArgs::Extra> extras_;  // at most one for each layout that needs one
  std::vector<Item> one_items_, many_items_;
};

/// Zigzag and row weights that read one input.
class MixedLinearGroup final : public kernels::LinearGroup {
 public:
  MixedLinearGroup(Isa isa, std::span<const WeightView> views, ThreadPool& pool, kernels::Prepare prepare) {
    std::vector<WeightView> kinds[2];
    for (size_t i = 0; i < views.size(); ++i) {
      const bool zigzag = views[i].layout->zigzag;
      kinds[zigzag].push_back(views[i]);
      places_[zigzag].push_back(i);
    }
    groups_[0] = std::make_unique<CpuLinearGroup>(isa, kinds[0], pool, prepare);
    groups_[1] = make_zigzag_group(isa, kinds[1], pool, prepare);
  }
  void run(const Activation& x, std::span<const Output> y) override {
    for (size_t g = 0; g < 2; ++g) {
      Output own[kMostParts];
      for (size_t i = 0; i < places_[g].size(); ++i) own[i] = y[places_[g][i]];
      groups_[g]->run(x, {own, places_[g].size()});
    }
  }
  void reserve(int64_t M) override {
    for (const auto& group : groups_) group->reserve(M);
  }
  int64_t weight_bytes() const override { return groups_[0]->weight_bytes() + groups_[1]->weight_bytes(); }
  int64_t prepared_bytes() const override { return groups_[0]->prepared_bytes() + groups_[1]->prepared_bytes(); }
  std::string explain() const override { return groups_[0]->explain() + groups_[1]->explain(); }

  static constexpr size_t kMostParts = 8;

 private:
  std::vector<size_t> places_[2];
  std::unique_ptr<kernels::LinearGroup> groups_[2];  // rows, zigzag
};

}  // namespace

const LinearTable& linear_table(Isa isa) {
  switch (isa) {
#if LACUNA_HAVE_AVX2
    case Isa::avx2:
      return avx2::linear_table();
    case Isa::avx512:
      return avx512::linear_table();
    case Isa::avx512vnni:
      return avx512vnni::linear_table();
#endif
    default:
      return generic::linear_table();
  }
}

std::unique_ptr<kernels::LinearGroup> make_linear_group(Isa isa, std::span<const WeightView> parts, ThreadPool& pool,
                                                        kernels::Prepare prepare) {
  const auto zigzag = std::count_if(parts.begin(), parts.end(), [](const WeightView& w) { return w.layout->zigzag; });
  if (zigzag == 0) return std::make_unique<CpuLinearGroup>(isa, parts, pool, prepare);
  if (size_t(zigzag) == parts.size()) return make_zigzag_group(isa, parts, pool, prepare);
  if (parts.size() > MixedLinearGroup::kMostParts)
    throw Error("a linear group of {} weights, at most {} may be mixed", parts.size(), MixedLinearGroup::kMostParts);
  return std::make_unique<MixedLinearGroup>(isa, parts, pool, prepare);
}

}  // namespace lacuna::cpu

namespace lacuna::kernels {

std::unique_ptr<LinearGroup> make_cpu_linear_group(std::span<const WeightView> parts, ThreadPool& pool,
                                                   Prepare prepare) {
  return cpu::make_linear_group(cpu::isa(), parts, pool, prepare);
}

}  // namespace lacuna::kernels
