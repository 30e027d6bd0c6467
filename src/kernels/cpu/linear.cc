// src/kernels/cpu/linear.cc - groups of weights on the CPU: choice of kernels, repacking, one parallel region a call.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <tuple>

#include "core/error.h"
#include "core/huge_buffer.h"
#include "core/mapped_file.h"
#include "kernels/cpu/linear_kernel.h"
#include "kernels/cpu/quantized_inputs.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/zigzag_group.h"
#include "kernels/e4m3_tokens.h"

namespace lacuna::cpu {

bool prefetches_far() {
#if LACUNA_HAVE_AVX2
  static const bool amd = __builtin_cpu_is("amd");
  return amd;
#else
  return false;
#endif
}

namespace {

using kernels::Activation;
using kernels::Output;
using kernels::WeightView;

/// Tokens quantized at once: bounds the scratch memory however long the prompt.
constexpr int64_t kChunk = 512;
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Items [first, end) of one worker. It takes them from the front, one after the other, so that the weights it asks for
/// ahead are its own next ones; a worker that has none left takes them from the back.
class alignas(64) Share {
 public:
  void set(int64_t first, int64_t end) { both_.store(pack(first, end), std::memory_order_relaxed); }
  int64_t take_front() {  // -1: none left
    return take([](int64_t first, int64_t end) { return std::tuple(first, first + 1, end); });
  }
  int64_t take_back() {
    return take([](int64_t first, int64_t end) { return std::tuple(end - 1, first, end - 1); });
  }

 private:
  static uint64_t pack(int64_t first, int64_t end) { return uint64_t(first) << 32 | uint64_t(end); }
  template <class Rule>
  int64_t take(Rule&& rule) {
    uint64_t both = both_.load(std::memory_order_relaxed);
    for (;;) {
      const auto first = int64_t(both >> 32), end = int64_t(both & 0xffffffff);
      if (first >= end) return -1;
      const auto [item, new_first, new_end] = rule(first, end);
      if (both_.compare_exchange_weak(both, pack(new_first, new_end), std::memory_order_relaxed)) return item;
    }
  }
  std::atomic<uint64_t> both_{0};
};

struct Part {
  WeightView view;
  const LinearKernel* kernel = nullptr;
  HugeBuffer prepared;
  const std::byte* weight = nullptr;
  int need = -1;    // of the quantized inputs
  int active = -1;  // of active_groups_, where the kernel leaves groups of inputs out
  int64_t read_bytes() const { return prepared.size() != 0 ? int64_t(prepared.size()) : int64_t(view.bytes.size()); }
};

/// Which groups of inputs have an active one.
struct ActiveGroups {
  int64_t group;
  std::vector<uint8_t> active;  // [groups]
  void find(const int32_t* inputs, int64_t count) {
    std::fill(active.begin(), active.end(), uint8_t{0});
    for (int64_t i = 0; i < count; ++i) active[size_t(inputs[i] / group)] = 1;
  }
};

/// Rows [row0, row1) of a part: what one worker takes at once.
struct Item {
  int32_t part;
  int64_t row0, row1;
};

class CpuLinearGroup final : public kernels::LinearGroup {
 public:
  CpuLinearGroup(Isa isa, std::span<const WeightView> views, ThreadPool& pool, kernels::Prepare prepare)
      : isa_(isa),
        table_(linear_table(isa)),
        pool_(pool),
        K_(kernels::check_weights(views)),
        inputs_(table_, K_),
        shares_(size_t(pool.size())) {
    parts_.reserve(views.size());
    for (const WeightView& view : views) add_part(view, prepare);
    const int64_t rows_per_worker_pass = int64_t{8} * pool_.size();
    int64_t bytes = 0;
    for (const Part& part : parts_) bytes += part.read_bytes();
    const int64_t one_bytes = std::clamp<int64_t>(bytes / rows_per_worker_pass, 8 << 10, 128 << 10);
    for (size_t p = 0; p < parts_.size(); ++p) {
      const int64_t N = parts_[p].view.shape.N;
      const int64_t row_bytes = std::max<int64_t>(1, parts_[p].read_bytes() / std::max<int64_t>(N, 1));
      if (parts_[p].kernel->work_before != nullptr)
        cut_evenly(int32_t(p), std::max<int64_t>(1, parts_[p].read_bytes() / one_bytes), one_items_);
      else
        cut(int32_t(p), std::max(kPanelRows, one_bytes / row_bytes / kPanelRows * kPanelRows), one_items_);
      cut(int32_t(p), 2 * kPanelRows, many_items_);
    }
  }

  void run(const Activation& x, std::span<const Output> y) override {
    if (y.size() != parts_.size()) throw Error("linear group of {} weights got {} outputs", parts_.size(), y.size());
    const Activation rows = x.all() ? x : masked(x);
    const int32_t* active = x.M == 1 && !x.all() ? x.active : nullptr;
    if (active != nullptr)
      for (ActiveGroups& groups : active_groups_) groups.find(active, x.active_count);
    skips_ = active != nullptr;
    for (int64_t m = 0; m < x.M; m += kChunk) run_chunk(rows, y, m, std::min(kChunk, x.M - m));
  }

  /// Most kernels read every input: those that do not count become zeros.
  Activation masked(const Activation& x) {
    auto* rows = reinterpret_cast<float*>(scratch<Scratch::masked>(size_t(x.M * K_) * sizeof(float)));
    for (int64_t m = 0; m < x.M; ++m) {
      float* to = rows + m * K_;
      std::memset(to, 0, size_t(K_) * sizeof(float));
      for (int64_t i = 0; i < x.active_count; ++i) to[x.active[i]] = x.x[m * x.stride + x.active[i]];
    }
    return {rows, x.M, K_};
  }

  void reserve(int64_t M) override {
    scratch<Scratch::inputs>(inputs_.bytes(std::clamp<int64_t>(M, 2, kChunk)));
    scratch<Scratch::masked>(size_t(K_) * sizeof(float));
    if (rounds_) scratch<Scratch::rounded>(size_t(std::min(M, kChunk) * K_) * sizeof(float));
  }

  int64_t weight_bytes() const override {
    int64_t bytes = 0;
    for (const Part& part : parts_) bytes += int64_t(part.view.bytes.size());  // prepared forms add padding only
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
      out += fmt::format(
          "{} {}x{} {}: {}.{} | {}.{}{}\n", part.view.name, part.view.shape.N, part.view.shape.K,
          part.view.layout->name, isa_name(isa_), part.kernel->one_name, isa_name(isa_), part.kernel->many_name,
          part.kernel->skips > 0 ? fmt::format(", skips {} inputs together", part.kernel->skips) : std::string());
    return out;
  }

 private:
  void add_part(const WeightView& view, kernels::Prepare prepare) {
    const int64_t N = view.shape.N, K = view.shape.K;
    Part part;
    part.view = view;
    const Problem problem{view.layout->id, view.shape, prepare, view.params, view.bytes};
    for (int i = 0; i < table_.count && part.kernel == nullptr; ++i)
      if (table_.kernels[i].can_run(problem)) part.kernel = &table_.kernels[i];
    if (part.kernel == nullptr)
      throw Error("{}: no kernel for {} with N = {}, K = {} on cpu/{}; use another layout", view.name,
                  view.layout->name, N, K, isa_name(isa_));
    part.weight = view.bytes.data();
    if (part.kernel->prepared_bytes != nullptr) {
      part.prepared = HugeBuffer(size_t(part.kernel->prepared_bytes(problem)));
      if (part.kernel->place != nullptr) part.kernel->place(problem, part.prepared.data());
      pool_.parallel_for(ceil_div(N, 4 * kPanelRows), 1, [&](int64_t begin, int64_t end) {
        part.kernel->prepare(problem, begin * 4 * kPanelRows, std::min(view.shape.N, end * 4 * kPanelRows),
                             part.prepared.data());
      });
      part.weight = part.prepared.data();
      MappedFile::release(view.bytes);
    }
    part.need = inputs_.need(part.kernel->needs);
    rounds_ = rounds_ || part.kernel->needs.e4m3;
    if (const int64_t skips = part.kernel->skips; skips > 0) {
      const auto same = [&](const ActiveGroups& groups) { return groups.group == skips; };
      const auto found = std::find_if(active_groups_.begin(), active_groups_.end(), same);
      part.active = int(found - active_groups_.begin());
      if (found == active_groups_.end())
        active_groups_.push_back({skips, std::vector<uint8_t>(size_t(ceil_div(K, skips)))});
    }
    parts_.push_back(std::move(part));
  }

  void cut(int32_t part, int64_t rows, std::vector<Item>& items) const {
    const int64_t N = parts_[size_t(part)].view.shape.N;
    for (int64_t n = 0; n < N; n += rows) items.push_back({part, n, std::min(N, n + rows)});
  }

  /// At most `count` items of about equal work.
  void cut_evenly(int32_t part, int64_t count, std::vector<Item>& items) const {
    const Part& of = parts_[size_t(part)];
    const int64_t N = of.view.shape.N;
    const Problem problem{of.view.layout->id, of.view.shape, kernels::Prepare::automatic, of.view.params,
                          of.view.bytes};
    const int64_t all = of.kernel->work_before(problem, N);
    for (int64_t i = 1, n = 0; n < N; ++i) {
      int64_t low = n + 1, high = N;  // the first row before which there is share i of the work
      while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (of.kernel->work_before(problem, middle) < double(all) / double(count) * double(i))
          low = middle + 1;
        else
          high = middle;
      }
      low = std::min(N, ceil_div(low, of.kernel->row_step) * of.kernel->row_step);
      items.push_back({part, n, low});
      n = low;
    }
  }

  void run_chunk(const Activation& x, std::span<const Output> y, int64_t m0, int64_t M) {
    const bool planes = inputs_.any() && M == 1;  // a single token is quantized into two planes
    const int64_t quantized = planes ? 2 : M;     // tokens as the kernels see them
    std::byte* memory = inputs_.any() ? scratch<Scratch::inputs>(inputs_.bytes(quantized)) : nullptr;
    const float* rows = x.x + m0 * x.stride;
    const float* rounded = rounds_ ? round_tokens(rows, x.stride, M) : nullptr;
    if (planes)
      inputs_.quantize_planes(rows, memory);
    else if (inputs_.any())
      inputs_.quantize(pool_, rows, x.stride, M, memory);
    const int64_t tile = inputs_.tile_size();
    const std::vector<Item>& items = M == 1 ? one_items_ : many_items_;
    const auto run_item = [&](int64_t index) {
      const int64_t first = index / int64_t(items.size()) * tile;
      const Item& item = items[size_t(index % int64_t(items.size()))];
      const Part& part = parts_[size_t(item.part)];
      LinearArgs a;
      a.far = prefetches_far();
      a.weight = part.weight;
      a.N = part.view.shape.N;
      a.K = K_;
      a.view = &part.view;
      if (part.kernel->scratch_bytes != nullptr)
        a.scratch = scratch<Scratch::task>(size_t(part.kernel->scratch_bytes(K_)));
      a.bias = part.view.bias.empty() ? nullptr : part.view.bias.data();
      if (part.kernel->needs.quantized)
        a.x = inputs_.tile(memory, quantized, first, planes ? 2 : std::min(tile, M - first), part.need);
      else
        a.x.tokens = std::min(tile, M - first);
      a.x.x = part.kernel->needs.e4m3 ? rounded + first * K_ : rows + first * x.stride;
      a.x.x_stride = part.kernel->needs.e4m3 ? K_ : x.stride;
      const Output& out = y[size_t(item.part)];
      a.y = out.y + (m0 + first) * out.stride;
      a.y_stride = out.stride;
      if (skips_ && part.active >= 0) a.active = active_groups_[size_t(part.active)].active.data();
      a.row0 = item.row0;
      a.row1 = item.row1;
      (M == 1 ? part.kernel->run_one : part.kernel->run_many)(a);
    };
    const int64_t count = ceil_div(M, tile) * int64_t(items.size());
    if (M == 1 && pool_.size() > 1 && count > 1) return run_shares(count, run_item);
    pool_.parallel_for(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) run_item(i);
    });
  }

  /// M tokens as their E4M3 codes and scales stand for them: [M, K].
  const float* round_tokens(const float* rows, int64_t stride, int64_t M) {
    auto* rounded = reinterpret_cast<float*>(scratch<Scratch::rounded>(size_t(M * K_) * sizeof(float)));
    pool_.parallel_for(M, 1, [&](int64_t begin, int64_t end) {
      kernels::project_per_token(rows + begin * stride, stride, end - begin, K_, rounded + begin * K_);
    });
    return rounded;
  }

  /// Each worker has a contiguous share of the items, and helps the others once it has none left.
  void run_shares(int64_t count, const auto& run_item) {
    const int workers = pool_.size();
    for (int w = 0; w < workers; ++w) shares_[size_t(w)].set(count * w / workers, count * (w + 1) / workers);
    pool_.run([&](int worker) {
      for (int64_t item; (item = shares_[size_t(worker)].take_front()) >= 0;) run_item(item);
      for (int w = 1; w < workers; ++w)
        for (int64_t item; (item = shares_[size_t((worker + w) % workers)].take_back()) >= 0;) run_item(item);
    });
  }

  Isa isa_;
  const LinearTable& table_;
  ThreadPool& pool_;
  int64_t K_;
  QuantizedInputs inputs_;
  std::vector<Part> parts_;
  std::vector<Item> one_items_, many_items_;
  std::vector<Share> shares_;  // one a worker
  std::vector<ActiveGroups> active_groups_;
  bool skips_ = false;   // they are those of the token that runs
  bool rounds_ = false;  // some part's kernel wants tokens rounded to E4M3
};

/// Zigzag and row weights that read one input.
class MixedLinearGroup final : public kernels::LinearGroup {
 public:
  MixedLinearGroup(Isa isa, std::span<const WeightView> views, ThreadPool& pool, kernels::Prepare prepare,
                   const kernels::Plan& plan) {
    std::vector<WeightView> kinds[2];
    for (size_t i = 0; i < views.size(); ++i) {
      const bool zigzag = views[i].layout->zigzag;
      kinds[zigzag].push_back(views[i]);
      places_[zigzag].push_back(i);
    }
    groups_[0] = std::make_unique<CpuLinearGroup>(isa, kinds[0], pool, prepare);
    groups_[1] = make_zigzag_group(isa, kinds[1], pool, prepare, plan);
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
  void set_plan(const kernels::Plan& plan) override { groups_[1]->set_plan(plan); }
  std::string explain() const override { return groups_[0]->explain() + groups_[1]->explain(); }

  static constexpr size_t kMostParts = 8;

 private:
  std::vector<size_t> places_[2];
  std::unique_ptr<kernels::LinearGroup> groups_[2];  // rows, zigzag
};

}  // namespace

void decode_rows(const WeightView& view, int64_t row0, int64_t rows, float* out) {
  layout::decode_rows(*view.layout, view.shape, view.bytes, row0, rows, out, view.params);
}

const LinearTable& linear_table(Isa isa) { return LACUNA_CPU_SELECT_FOR(isa, linear_table)(); }

std::unique_ptr<kernels::LinearGroup> make_linear_group(Isa isa, std::span<const WeightView> parts, ThreadPool& pool,
                                                        kernels::Prepare prepare, const kernels::Plan& plan) {
  const auto zigzag = std::count_if(parts.begin(), parts.end(), [](const WeightView& w) { return w.layout->zigzag; });
  if (zigzag == 0) return std::make_unique<CpuLinearGroup>(isa, parts, pool, prepare);
  if (size_t(zigzag) == parts.size()) return make_zigzag_group(isa, parts, pool, prepare, plan);
  if (parts.size() > MixedLinearGroup::kMostParts)
    throw Error("a linear group of {} weights, at most {} may be mixed", parts.size(), MixedLinearGroup::kMostParts);
  return std::make_unique<MixedLinearGroup>(isa, parts, pool, prepare, plan);
}

}  // namespace lacuna::cpu

namespace lacuna::kernels {

int64_t check_weights(std::span<const WeightView> parts) {
  if (parts.empty()) throw Error("a linear group needs at least one weight");
  for (const WeightView& view : parts) {
    const auto& [N, K] = view.shape;
    if (K != parts[0].shape.K)
      throw Error("{}: K = {}, but the first weight of its group has K = {}; weights of a group read one input",
                  view.name, K, parts[0].shape.K);
    layout::check_params(*view.layout, view.params);
    const int64_t bytes = view.layout->size_bytes(view.shape, view.params);
    if (int64_t(view.bytes.size()) != bytes)
      throw Error("{}: {} bytes for {} [{}, {}], expected {}", view.name, view.bytes.size(), view.layout->name, N, K,
                  bytes);
    if (!view.bias.empty() && int64_t(view.bias.size()) != N)
      throw Error("{}: bias of {} values for N = {}", view.name, view.bias.size(), N);
    // Of these layouts kernels follow what the bytes say of places.
    if (view.layout->family != layout::Family::rows && !view.layout->zigzag)
      naming_file(view.name, [&] { layout::check_bytes(*view.layout, view.shape, view.bytes, view.params); });
  }
  return parts[0].shape.K;
}

std::unique_ptr<LinearGroup> make_cpu_linear_group(std::span<const WeightView> parts, ThreadPool& pool, Prepare prepare,
                                                   const Plan& plan) {
  return cpu::make_linear_group(cpu::isa(), parts, pool, prepare, plan);
}

}  // namespace lacuna::kernels
