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
#include "kernels/cpu/quantized_inputs.h"
#include "kernels/cpu/scratch.h"
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
      : isa_(isa),
        pool_(pool),
        plan_(plan),
        K_(kernels::check_weights(views)),
        panels_(panel_kernel(isa)),
        inputs_(linear_table(isa), padded_k()),
        panels_need_(inputs_.need(panels_.needs)) {
    if (K_ > INT32_MAX) throw Error("{}: K = {} is more than zigzag kernels take", views[0].name, K_);
    for (const WeightView& view : views) add_part(view);
    for (const Part& part : parts_) column_bytes_ += layout::super_rows(part.view.shape.N) * part.kernel->bytes;
    if (prepare == kernels::Prepare::automatic)
      lay_together();
    else
      read_in_place();
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
    const int64_t many = M > kFew ? int64_t(inputs_.bytes(std::min(M, kManyChunk))) : 0;
    scratch<Scratch::inputs>(size_t(std::max(one_layout().total, many)));
  }

  int64_t weight_bytes() const override { return K_ * column_bytes_; }
  int64_t prepared_bytes() const override { return int64_t(prepared_.size()); }
  std::string explain() const override {
    std::string out;
    for (const Part& part : parts_)
      out += fmt::format("{} {}x{} {}: {}.{}, columns of {} bytes{} | {}.{} after conversion\n", part.view.name,
                         part.view.shape.N, K_, part.view.layout->name, isa_name(isa_), part.kernel->name,
                         runs_.front().columns.rows * part.kernel->bytes, prepared_.size() != 0 ? "" : " in place",
                         isa_name(isa_), panels_.many_name);
    return out;
  }

 private:
  /// The kernel that multiplies the panels of several tokens.
  static const LinearKernel& panel_kernel(Isa isa) {
    const LinearTable& table = linear_table(isa);
    for (int i = 0; i < table.count; ++i)
      if (table.kernels[i].prepared_bytes != nullptr &&
          table.kernels[i].can_run({layout::Id::q8_0, {kPanelRows, kBlock}, kernels::Prepare::automatic}))
        return table.kernels[i];
    throw Error("no kernel for several tokens of zigzag weights on cpu/{}", isa_name(isa));
  }

  /// Floats of the scratch memory of one token.
  struct OneLayout {
    int64_t inputs = 0, pieces = 0, y = 0, y_step = 0, mins = 0, mins_step = 0, total = 0;  // total in bytes
  };

  void add_part(const WeightView& view) {
    const int64_t N = view.shape.N;
    Part part;
    part.view = view;
    const ZigzagTable& table = zigzag_table(isa_);
    for (int i = 0; i < table.count && part.kernel == nullptr; ++i)
      if (table.kernels[i].id == view.layout->id) part.kernel = &table.kernels[i];
    if (part.kernel == nullptr)
      throw Error("{}: no kernel for {} with N = {}, K = {} on cpu/{}; use another layout", view.name,
                  view.layout->name, N, K_, isa_name(isa_));
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
    auto* memory = reinterpret_cast<float*>(scratch<Scratch::inputs>(size_t(at.total)));
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

  void run_many(const Activation& x, int64_t m0, int64_t M, std::span<const Output> y) {
    std::byte* memory = scratch<Scratch::inputs>(inputs_.bytes(M));
    const int64_t K = padded_k(), tile = inputs_.tile_size();
    const float* rows = x.x + m0 * x.stride;
    int64_t stride = x.stride;
    if (K != K_ || !x.all()) {  // zeros where no input is, or where it does not count
      auto* padded = reinterpret_cast<float*>(scratch<Scratch::masked>(size_t(M * K) * sizeof(float)));
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
    inputs_.quantize(pool_, rows, stride, M, memory);
    pool_.parallel_for(rows_, 1, [&](int64_t begin, int64_t end) {
      std::byte* panels = scratch<Scratch::task>(size_t(panels_.prepared_bytes({kSuper, K})));
      for (int64_t r = begin; r < end; ++r) {
        const Run& run = run_of(r);
        run.kernel->to_panels(run.columns, r - run.row0, K_, panels);
        const Part& part = part_of(r);
        const int64_t first_row = (r - part.row0) * kSuper;
        const Output& out = y[size_t(&part - parts_.data())];
        for (int64_t first = 0; first < M; first += tile) {
          LinearArgs a;
          a.weight = panels;
          a.N = std::min(kSuper, part.view.shape.N - first_row);
          a.K = K;
          a.bias = part.view.bias.empty() ? nullptr : part.view.bias.data() + first_row;
          a.x = inputs_.tile(memory, M, first, std::min(tile, M - first), panels_need_);
          a.y = out.y + (m0 + first) * out.stride + first_row;
          a.y_stride = out.stride;
          a.row0 = 0;
          a.row1 = a.N;
          panels_.run_many(a);
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
  int64_t K_, rows_ = 0, column_bytes_ = 0;
  const LinearKernel& panels_;  // q8_0
  QuantizedInputs inputs_;      // of the panels
  int panels_need_;
  std::vector<Part> parts_;
  std::vector<Run> runs_;
  HugeBuffer prepared_;
  std::vector<int32_t> all_;
};

}  // namespace

const ZigzagTable& zigzag_table(Isa isa) { return LACUNA_CPU_SELECT_FOR(isa, zigzag_table)(); }

std::unique_ptr<kernels::LinearGroup> make_zigzag_group(Isa isa, std::span<const WeightView> parts, ThreadPool& pool,
                                                        kernels::Prepare prepare, const ZigzagPlan& plan) {
  return std::make_unique<ZigzagGroup>(isa, parts, pool, prepare, plan);
}

}  // namespace lacuna::cpu
