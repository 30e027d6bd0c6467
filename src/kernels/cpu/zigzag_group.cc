#include "kernels/cpu/zigzag_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/huge_buffer.h"
#include "core/mapped_file.h"
#include "kernels/cpu/linear_kernel.h"
#include "layout/zigzag.h"

namespace lacuna::cpu {
namespace {

using kernels::Activation;
using kernels::Output;
using kernels::WeightView;

constexpr int64_t kSuper = layout::kSuperRows;
/// Tokens that go one by one through the kernel for one token; more are multiplied as panels, whose making costs as
/// much as about this many tokens.
constexpr int64_t kFew = 12;
/// Tokens quantized at once on the way through panels.
constexpr int64_t kManyChunk = 512;

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
  const ZigzagKernel* kernel = nullptr;
  int64_t row0 = 0;  // of its first superblock row among the group's
};

/// Columns of one kernel that are contiguous: a part, several parts of one layout laid together, or a tile.
struct Run {
  const ZigzagKernel* kernel = nullptr;
  ZigzagRun columns;
  int64_t row0 = 0;  // first superblock row among the group's
};

class ZigzagGroup final : public kernels::LinearGroup {
 public:
  ZigzagGroup(Isa isa, std::span<const WeightView> views, ThreadPool& pool, kernels::Prepare prepare,
              const ZigzagPlan& plan)
      : isa_(isa), pool_(pool), plan_(plan), linear_(linear_table(isa)) {
    if (views.empty()) throw Error("a linear group needs at least one weight");
    K_ = views[0].shape.K;
    for (const WeightView& view : views) add_part(view);
    for (const Part& part : parts_) column_bytes_ += layout::super_rows(part.view.shape.N) * part.kernel->bytes;
    if (prepare == kernels::Prepare::automatic)
      lay_together();
    else
      read_in_place();
    for (int i = 0; i < linear_.count && panels_ == nullptr; ++i)
      if (linear_.kernels[i].can_run({layout::Id::q8_0, {16, 32}, kernels::Prepare::automatic}))
        panels_ = &linear_.kernels[i];
    if (panels_ == nullptr || panels_->prepared_bytes == nullptr)
      throw Error("no kernel for several tokens of zigzag weights on cpu/{}", isa_name(isa_));
    all_.resize(size_t(K_));
    std::iota(all_.begin(), all_.end(), 0);
  }

  void run(const Activation& x, std::span<const Output> y) override {
    if (y.size() != parts_.size()) throw Error("linear group of {} weights got {} outputs", parts_.size(), y.size());
    if (x.M <= kFew) {
      for (int64_t m = 0; m < x.M; ++m) run_one(x, m, y);
    } else {
      for (int64_t m = 0; m < x.M; m += kManyChunk) run_many(x, m, std::min(kManyChunk, x.M - m), y);
    }
  }

  void reserve(int64_t M) override {
    scratch(size_t(std::max(one_layout().total, many_bytes(std::min(M, kManyChunk)))));
  }

  int64_t weight_bytes() const override { return K_ * column_bytes_; }
  int64_t prepared_bytes() const override { return int64_t(prepared_.size()); }
  std::string explain() const override {
    std::string out;
    for (const Part& part : parts_)
      out += fmt::format("{} {}x{} {}: {}.{}, columns of {} bytes{} | {}.{} after conversion\n", part.view.name,
                         part.view.shape.N, K_, part.view.layout->name, isa_name(isa_), part.kernel->name,
                         runs_.front().columns.rows * part.kernel->bytes, prepared_.size() != 0 ? "" : " in place",
                         isa_name(isa_), panels_->many_name);
    return out;
  }

 private:
  /// Floats of the scratch memory of one token.
  struct OneLayout {
    int64_t inputs = 0, pieces = 0, y = 0, y_step = 0, mins = 0, mins_step = 0, total = 0;  // total in bytes
  };

  void add_part(const WeightView& view) {
    const auto [N, K] = view.shape;
    if (K != K_)
      throw Error("{}: K = {}, but the first weight of its group has K = {}; weights of a group read one input",
                  view.name, K, K_);
    if (K > INT32_MAX) throw Error("{}: K = {} is more than zigzag kernels take", view.name, K);
    const int64_t bytes = view.layout->size_bytes(*view.layout, view.shape);
    if (int64_t(view.bytes.size()) != bytes)
      throw Error("{}: {} bytes for {} [{}, {}], expected {}", view.name, view.bytes.size(), view.layout->name, N, K,
                  bytes);
    if (!view.bias.empty() && int64_t(view.bias.size()) != N)
      throw Error("{}: bias of {} values for N = {}", view.name, view.bias.size(), N);
    layout::check_zigzag_params(view.params);
    Part part;
    part.view = view;
    const ZigzagTable& table = zigzag_table(isa_);
    for (int i = 0; i < table.count && part.kernel == nullptr; ++i)
      if (table.kernels[i].id == view.layout->id) part.kernel = &table.kernels[i];
    if (part.kernel == nullptr)
      throw Error("{}: no kernel for {} with N = {}, K = {} on cpu/{}; use another layout", view.name,
                  view.layout->name, N, K, isa_name(isa_));
    part.row0 = rows_;
    rows_ += layout::super_rows(N);
    parts_.push_back(std::move(part));
  }

  void add_run(const Run& run) {
    if (run.columns.rows == 0) return;
    if (!runs_.empty()) {  // the next superblocks of the same columns
      Run& last = runs_.back();
      if (last.kernel == run.kernel && last.columns.stride == run.columns.stride &&
          last.columns.base + last.columns.rows * last.kernel->bytes == run.columns.base &&
          last.columns.stride == column_bytes_) {
        last.columns.rows += run.columns.rows;
        return;
      }
    }
    runs_.push_back(run);
  }

  void lay_together() {
    prepared_ = HugeBuffer(size_t(K_ * column_bytes_));
    int64_t offset = 0;
    for (const Part& part : parts_) {
      const layout::ZigzagMap map(part.view.shape, part.view.params);
      const int64_t bytes = part.kernel->bytes, height = map.rows * bytes;
      pool_.parallel_for(ceil_div(K_, 64), 1, [&, offset](int64_t begin, int64_t end) {
        for (int64_t t = 0; t < map.tiles(); ++t) {
          const int64_t rows = map.tile_height(t), at = t * map.tile;
          for (int64_t k = begin * 64; k < std::min(K_, end * 64); ++k)
            std::memcpy(prepared_.data() + k * column_bytes_ + offset + at * bytes,
                        part.view.bytes.data() + map.index(at, k) * bytes, size_t(rows * bytes));
        }
      });
      MappedFile::release(part.view.bytes);
      add_run({part.kernel, {prepared_.data() + offset, column_bytes_, map.rows}, part.row0});
      offset += height;
    }
  }

  void read_in_place() {
    for (const Part& part : parts_) {
      const layout::ZigzagMap map(part.view.shape, part.view.params);
      for (int64_t t = 0; t < map.tiles(); ++t)
        add_run({part.kernel,
                 {part.view.bytes.data() + map.index(t * map.tile, 0) * part.kernel->bytes,
                  map.tile_height(t) * part.kernel->bytes, map.tile_height(t)},
                 part.row0 + t * map.tile});
    }
  }

  int pieces() const { return plan_.pieces > 0 ? plan_.pieces : pool_.size(); }

  OneLayout one_layout() const {
    OneLayout at;
    at.pieces = pieces();
    at.y = round_up(K_, 16);
    at.y_step = rows_ * kSuper;
    at.mins = at.y + at.pieces * at.y_step;
    at.mins_step = rows_ * kZigzagMins;
    at.total = (at.mins + at.pieces * at.mins_step) * int64_t(sizeof(float));
    return at;
  }

  void run_one(const Activation& x, int64_t m, std::span<const Output> y) {
    const OneLayout at = one_layout();
    auto* memory = reinterpret_cast<float*>(scratch(size_t(at.total)));
    const float* row = x.x + m * x.stride;
    const int32_t* columns = all_.data();
    const float* inputs = row;
    int64_t count = K_;
    if (!x.all()) {
      columns = x.active;
      count = x.active_count;
      for (int64_t i = 0; i < count; ++i) memory[i] = row[columns[i]];
      inputs = memory;
    }
    const int64_t piece_count = at.pieces, unit = 4;  // pieces are whole groups of four columns
    pool_.parallel_for(piece_count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t quads = ceil_div(count, unit);
        const int64_t from = std::min(count, quads * piece / piece_count * unit);
        const int64_t to = std::min(count, quads * (piece + 1) / piece_count * unit);
        float* sums = memory + at.y + piece * at.y_step;
        float* mins = memory + at.mins + piece * at.mins_step;
        std::memset(sums, 0, size_t(at.y_step) * sizeof(float));
        std::memset(mins, 0, size_t(at.mins_step) * sizeof(float));
        for (const Run& run : runs_) {
          ZigzagArgs a;
          a.run = run.columns;
          a.columns = columns + from;
          a.x = inputs + from;
          a.count = to - from;
          a.y = sums + run.row0 * kSuper;
          a.mins = mins + run.row0 * kZigzagMins;
          a.prefetch = plan_.prefetch;
          run.kernel->accumulate(a);
        }
      }
    });
    const auto finish = [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const Part& part = part_of(r);
        const int64_t first = (r - part.row0) * kSuper, rows = std::min(kSuper, part.view.shape.N - first);
        const Output& out = y[size_t(&part - parts_.data())];
        float* to = out.y + m * out.stride + first;
        float whole[kSuper];
        part.kernel->finish(memory + at.y + r * kSuper, at.y_step, memory + at.mins + r * kZigzagMins, at.mins_step,
                            int(at.pieces), whole);
        const float* bias = part.view.bias.empty() ? nullptr : part.view.bias.data() + first;
        for (int64_t i = 0; i < rows; ++i) to[i] = bias == nullptr ? whole[i] : whole[i] + bias[i];
      }
    };
    if (rows_ * at.pieces < 64)
      finish(0, rows_);
    else
      pool_.parallel_for(rows_, 8, finish);
  }

  const Part& part_of(int64_t row) const {
    size_t part = parts_.size() - 1;
    while (parts_[part].row0 > row) --part;
    return parts_[part];
  }

  // ---- several tokens ----

  int64_t padded_k() const { return round_up(std::max<int64_t>(K_, 1), kBlock); }
  int64_t tile() const { return std::clamp<int64_t>((int64_t{1} << 20) / padded_k() / 16 * 16, 16, kMaxTile); }
  int64_t panel_bytes() const { return panels_->prepared_bytes({kSuper, padded_k()}); }

  struct ManyLayout {
    int64_t codes = 0, scale = 0, start = 0, padded = 0, total = 0;
  };
  ManyLayout many_layout(int64_t M) const {
    ManyLayout at;
    const int64_t blocks = M * (padded_k() / kBlock);
    const auto place = [&](int64_t bytes) {
      const int64_t begin = at.total;
      at.total += round_up(bytes, 64);
      return begin;
    };
    at.codes = place(blocks * kBlock);
    at.scale = place(blocks * 4);
    at.start = place(blocks * 4);
    at.padded = place(M * padded_k() * 4);
    return at;
  }
  int64_t many_bytes(int64_t M) const { return many_layout(M).total; }

  void run_many(const Activation& x, int64_t m0, int64_t M, std::span<const Output> y) {
    const ManyLayout at = many_layout(M);
    std::byte* memory = scratch(size_t(at.total));
    const int64_t K = padded_k(), blocks = K / kBlock, tile_size = tile(), tiles = ceil_div(M, tile_size);
    const float* rows = x.x + m0 * x.stride;
    int64_t stride = x.stride;
    if (K != K_ || !x.all()) {  // zeros where no input is, or where it does not count
      auto* padded = reinterpret_cast<float*>(memory + at.padded);
      pool_.parallel_for(M, 8, [&, rows](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; ++m) {
          float* to = padded + m * K;
          const float* from = rows + m * x.stride;
          if (x.all()) {
            std::memcpy(to, from, size_t(K_) * sizeof(float));
            std::memset(to + K_, 0, size_t(K - K_) * sizeof(float));
          } else {
            std::memset(to, 0, size_t(K) * sizeof(float));
            for (int64_t i = 0; i < x.active_count; ++i) to[x.active[i]] = from[x.active[i]];
          }
        }
      });
      rows = padded;
      stride = K;
    }
    const auto quantize_tile = [&](int64_t first, int64_t token0, int64_t token1) {
      QuantizeArgs::Extra extra{panels_->needs, nullptr, nullptr};
      extra.start = reinterpret_cast<int32_t*>(memory + at.start) + first * blocks;
      QuantizeArgs q;
      q.K = K;
      q.tokens = std::min(tile_size, M - first);
      q.codes = reinterpret_cast<int8_t*>(memory + at.codes) + first * K;
      q.scale = reinterpret_cast<float*>(memory + at.scale) + first * blocks;
      q.x = rows + first * stride;
      q.x_stride = stride;
      q.token0 = token0;
      q.token1 = token1;
      q.extras = &extra;
      q.extra_count = 1;
      linear_.quantize(q);
    };
    constexpr int64_t kGrain = 8;
    pool_.parallel_for(ceil_div(M, kGrain), 1, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin * kGrain, last = std::min(M, end * kGrain); m < last;) {
        const int64_t first = m / tile_size * tile_size, until = std::min(last, first + tile_size);
        quantize_tile(first, m - first, until - first);
        m = until;
      }
    });
    pool_.parallel_for(rows_, 1, [&](int64_t begin, int64_t end) {
      thread_local HugeBuffer panel_memory;
      if (int64_t(panel_memory.size()) < panel_bytes()) panel_memory = HugeBuffer(size_t(panel_bytes()));
      for (int64_t r = begin; r < end; ++r) {
        const Run& run = run_of(r);
        run.kernel->to_panels(run.columns, r - run.row0, K_, panel_memory.data());
        const Part& part = part_of(r);
        const int64_t first_row = (r - part.row0) * kSuper;
        const Output& out = y[size_t(&part - parts_.data())];
        for (int64_t t = 0; t < tiles; ++t) {
          const int64_t first = t * tile_size;
          LinearArgs a;
          a.weight = panel_memory.data();
          a.N = std::min(kSuper, part.view.shape.N - first_row);
          a.K = K;
          a.bias = part.view.bias.empty() ? nullptr : part.view.bias.data() + first_row;
          a.x.tokens = std::min(tile_size, M - first);
          a.x.codes = reinterpret_cast<const int8_t*>(memory + at.codes) + first * K;
          a.x.scale = reinterpret_cast<const float*>(memory + at.scale) + first * blocks;
          a.x.start = reinterpret_cast<const int32_t*>(memory + at.start) + first * blocks;
          a.y = out.y + (m0 + first) * out.stride + first_row;
          a.y_stride = out.stride;
          a.row0 = 0;
          a.row1 = a.N;
          panels_->run_many(a);
        }
      }
    });
  }

  const Run& run_of(int64_t row) const {
    size_t run = runs_.size() - 1;
    while (runs_[run].row0 > row) --run;
    return runs_[run];
  }

  Isa isa_;
  ThreadPool& pool_;
  ZigzagPlan plan_;
  const LinearTable& linear_;
  const LinearKernel* panels_ = nullptr;  // q8_0
  int64_t K_ = 0, rows_ = 0, column_bytes_ = 0;
  std::vector<Part> parts_;
  std::vector<Run> runs_;
  HugeBuffer prepared_;
  std::vector<int32_t> all_;
};

}  // namespace

const ZigzagTable& zigzag_table(Isa isa) {
  switch (isa) {
#if LACUNA_HAVE_AVX2
    case Isa::avx2:
      return avx2::zigzag_table();
    case Isa::avx512:
      return avx512::zigzag_table();
    case Isa::avx512vnni:
      return avx512vnni::zigzag_table();
#endif
    default:
      return generic::zigzag_table();
  }
}

std::unique_ptr<kernels::LinearGroup> make_zigzag_group(Isa isa, std::span<const WeightView> parts, ThreadPool& pool,
                                                        kernels::Prepare prepare, const ZigzagPlan& plan) {
  return std::make_unique<ZigzagGroup>(isa, parts, pool, prepare, plan);
}

}  // namespace lacuna::cpu
