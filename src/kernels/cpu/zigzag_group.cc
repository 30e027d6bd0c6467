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

constexpr int64_t kSuper = layout::kSuperRows, kLine = 64;
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
              const kernels::Plan& plan)
      : isa_(isa),
        pool_(pool),
        plan_(plan),
        K_(kernels::check_weights(views)),
        panels_(panel_kernel(isa)),
        inputs_(linear_table(isa), padded_k()),
        panels_need_(inputs_.need(panels_.needs)) {
    kernels::check_plan(plan_);
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
      out += fmt::format("{} {}x{} {}: {}.{}{}, {} | {}.{} after conversion\n", part.view.name, part.view.shape.N, K_,
                         part.view.layout->name, isa_name(isa_), part.kernel->name,
                         prepared_.size() != 0 ? "" : " in place", kernels::describe(plan_), isa_name(isa_),
                         panels_.many_name);
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

  /// Copies the superblocks into tiles of plan_.tile_rows outputs, in which columns of all parts are contiguous.
  void lay_together() {
    struct Tile {
      std::vector<Piece> pieces;
      int64_t stride = 0;  // of its columns
    };
    std::vector<Tile> tiles;
    const int64_t height = plan_.tile_rows == 0 ? rows_ : std::min(rows_, plan_.tile_rows / kSuper);
    int64_t bytes = 0;
    for (int64_t begin = 0; begin < rows_; begin += height) {
      Tile& tile = tiles.emplace_back();
      tile.pieces = pieces_of(begin, std::min(rows_, begin + height));
      int64_t column = 0;
      for (const Piece& piece : tile.pieces) column += piece.rows * piece.part->kernel->bytes;
      tile.stride = column_stride(column);
      bytes += K_ * tile.stride;
    }
    prepared_ = HugeBuffer(size_t(bytes));
    std::byte* base = prepared_.data();
    for (const Tile& tile : tiles) {
      int64_t offset = 0;
      const size_t first_run = runs_.size();
      for (const Piece& piece : tile.pieces) {
        copy_piece(piece, base + offset, tile.stride);
        if (runs_.size() > first_run && runs_.back().kernel == piece.part->kernel)
          runs_.back().columns.rows += piece.rows;  // the next superblocks of the same columns
        else
          runs_.push_back(
              {piece.part->kernel, {base + offset, tile.stride, piece.rows}, piece.part->row0 + piece.first});
        offset += piece.rows * piece.part->kernel->bytes;
      }
      base += K_ * tile.stride;
    }
    for (const Part& part : parts_) MappedFile::release(part.view.bytes);
  }

  /// Columns begin at a cache line, and an odd number of lines apart: many columns are read side by side, and an even
  /// distance would put them into few sets of the cache.
  static int64_t column_stride(int64_t column) {
    const int64_t lines = ceil_div(column, kLine);
    return (lines + (lines + 1) % 2) * kLine;
  }

  /// Superblock rows [first, first + rows) of a part.
  struct Piece {
    const Part* part = nullptr;
    int64_t first = 0, rows = 0;
  };

  /// What the group's superblock rows [begin, end) are.
  std::vector<Piece> pieces_of(int64_t begin, int64_t end) const {
    std::vector<Piece> out;
    for (const Part& part : parts_) {
      const int64_t last = part.row0 + layout::super_rows(part.view.shape.N);
      const int64_t from = std::max(begin, part.row0), to = std::min(end, last);
      if (from < to) out.push_back({&part, from - part.row0, to - from});
    }
    return out;
  }

  /// Column k of the piece goes to `to` + k * stride.
  void copy_piece(const Piece& piece, std::byte* to, int64_t stride) {
    const WeightView& view = piece.part->view;
    const layout::ZigzagMap map(view.shape, view.params);
    const int64_t bytes = piece.part->kernel->bytes, last = piece.first + piece.rows;
    pool_.parallel_for(ceil_div(K_, 64), 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = piece.first / map.tile; t * map.tile < last; ++t) {
        const int64_t from = std::max(piece.first, t * map.tile);
        const int64_t rows = std::min(last, t * map.tile + map.tile_height(t)) - from;
        for (int64_t k = begin * 64; k < std::min(K_, end * 64); ++k)
          std::memcpy(to + k * stride + (from - piece.first) * bytes, view.bytes.data() + map.index(from, k) * bytes,
                      size_t(rows * bytes));
      }
    });
  }

  void read_in_place() {
    for (const Part& part : parts_) {
      const layout::ZigzagMap map(part.view.shape, part.view.params);
      for (int64_t t = 0; t < map.tiles(); ++t) {
        const int64_t height = map.tile_height(t), bytes = part.kernel->bytes;
        runs_.push_back({part.kernel,
                         {part.view.bytes.data() + map.index(t * map.tile, 0) * bytes, height * bytes, height},
                         part.row0 + t * map.tile});
      }
    }
  }

  /// Sets of sums.
  int pieces() const { return plan_.split == kernels::Plan::Split::rows ? 1 : pool_.size(); }

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
    if (plan_.split == kernels::Plan::Split::rows)
      share_rows(columns, inputs, count, memory, at, m, y);
    else
      share_columns(columns, inputs, count, memory, at, m, y);
  }

  /// Adds columns [0, count) of the group's superblock rows [begin, end) to sums and mins, which are of all rows.
  void accumulate(const int32_t* columns, const float* x, int64_t count, int64_t begin, int64_t end, float* sums,
                  float* mins) const {
    std::memset(sums + begin * kSuper, 0, size_t((end - begin) * kSuper) * sizeof(float));
    std::memset(mins + begin * kZigzagMins, 0, size_t((end - begin) * kZigzagMins) * sizeof(float));
    for (const Run& run : runs_) {
      const int64_t from = std::max(begin, run.row0), to = std::min(end, run.row0 + run.columns.rows);
      if (from >= to) continue;
      ZigzagArgs a;
      a.run = {run.columns.base + (from - run.row0) * run.kernel->bytes, run.columns.stride, to - from};
      a.columns = columns;
      a.x = x;
      a.count = count;
      a.chunk = plan_.chunk;
      a.prefetch = plan_.prefetch;
      a.y = sums + from * kSuper;
      a.mins = mins + from * kZigzagMins;
      run.kernel->accumulate(a);
    }
  }

  /// Each worker takes every active column of its own superblock rows.
  void share_rows(const int32_t* columns, const float* x, int64_t count, float* memory, const OneLayout& at, int64_t m,
                  std::span<const Output> y) {
    const int64_t shares = std::min<int64_t>(pool_.size(), rows_);
    pool_.parallel_for(shares, 1, [&](int64_t first, int64_t last) {
      const int64_t begin = rows_ * first / shares, end = rows_ * last / shares;
      accumulate(columns, x, count, begin, end, memory + at.y, memory + at.mins);
      finish(memory, at, begin, end, m, y);
    });
  }

  /// Each worker takes a share of the active columns and has sums of its own.
  void share_columns(const int32_t* columns, const float* x, int64_t count, float* memory, const OneLayout& at,
                     int64_t m, std::span<const Output> y) {
    const int64_t unit = 4, quads = ceil_div(count, unit);  // shares are whole groups of four columns
    pool_.parallel_for(at.pieces, 1, [&](int64_t first, int64_t last) {
      for (int64_t piece = first; piece < last; ++piece) {
        const int64_t from = std::min(count, quads * piece / at.pieces * unit);
        const int64_t to = std::min(count, quads * (piece + 1) / at.pieces * unit);
        accumulate(columns + from, x + from, to - from, 0, rows_, memory + at.y + piece * at.y_step,
                   memory + at.mins + piece * at.mins_step);
      }
    });
    if (rows_ * at.pieces < 64)
      finish(memory, at, 0, rows_, m, y);
    else
      pool_.parallel_for(rows_, 8, [&](int64_t begin, int64_t end) { finish(memory, at, begin, end, m, y); });
  }

  /// Adds the pieces' sums of superblock rows [begin, end) and writes the outputs of token m.
  void finish(const float* memory, const OneLayout& at, int64_t begin, int64_t end, int64_t m,
              std::span<const Output> y) const {
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
  kernels::Plan plan_;
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
                                                        kernels::Prepare prepare, const kernels::Plan& plan) {
  return std::make_unique<ZigzagGroup>(isa, parts, pool, prepare, plan);
}

}  // namespace lacuna::cpu
