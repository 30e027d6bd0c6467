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
constexpr int64_t kFew = kZigzagFewTokens;
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
      if (x.M > 0) run_few(x, y);
    } else {
      for (int64_t m = 0; m < x.M; m += kManyChunk) run_many(x, m, std::min(kManyChunk, x.M - m), y);
    }
  }

  void reserve(int64_t M) override {
    const int64_t many = M > kFew ? int64_t(inputs_.bytes(std::min(M, kManyChunk))) : 0;
    int64_t few = 0;  // one token may need more than several do: each worker has sums of its own
    for (int64_t tokens = 1; tokens <= std::clamp<int64_t>(M, 1, kFew); ++tokens)
      few = std::max(few, few_layout(tokens).total);
    scratch<Scratch::inputs>(size_t(std::max(few, many)));
  }

  int64_t weight_bytes() const override { return K_ * column_bytes_; }
  int64_t prepared_bytes() const override { return int64_t(prepared_.size()); }
  void set_plan(const kernels::Plan& plan) override {
    kernels::check_plan(plan);
    if (prepared_.size() != 0 && plan.tile_rows != plan_.tile_rows)
      throw Error("{}: prepared in tiles of {} outputs (0: all), the plan asks for {}", parts_[0].view.name,
                  plan_.tile_rows, plan.tile_rows);
    plan_ = plan;
  }
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

  /// Floats of the scratch memory of a few tokens.
  struct FewLayout {
    int64_t tokens = 0, inputs_step = 0;  // at the beginning: the inputs, [tokens]
    int64_t pieces = 0;                   // sets of sums, each of all tokens
    int64_t y = 0, y_step = 0, y_piece = 0, mins = 0, mins_step = 0, mins_piece = 0;
    int64_t total = 0;  // in bytes
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
      tile.stride = odd_lines(column);
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

  /// Sharing the outputs needs one set of sums; several tokens have it so wherever the workers' shares are even.
  bool shares_rows(int64_t tokens) const {
    if (plan_.split == kernels::Plan::Split::rows) return true;
    return tokens > 1 && 4 * rows_ >= 3 * round_up(rows_, pool_.size());
  }

  FewLayout few_layout(int64_t tokens) const {
    FewLayout at;
    at.tokens = tokens;
    at.inputs_step = round_up(K_, 16);
    at.pieces = shares_rows(tokens) ? 1 : pool_.size();
    at.y = tokens * at.inputs_step;
    at.y_step = rows_ * kSuper;
    at.y_piece = tokens * at.y_step;
    at.mins = at.y + at.pieces * at.y_piece;
    at.mins_step = rows_ * kZigzagMins;
    at.mins_piece = tokens * at.mins_step;
    at.total = (at.mins + at.pieces * at.mins_piece) * int64_t(sizeof(float));
    return at;
  }

  void run_few(const Activation& x, std::span<const Output> y) {
    const int64_t tokens = x.M;
    const FewLayout at = few_layout(tokens);
    Few few{at, reinterpret_cast<float*>(scratch<Scratch::inputs>(size_t(at.total))), all_.data(), K_, y};
    if (!x.all()) {
      few.columns = x.active;
      few.count = x.active_count;
    }
    if (x.all() && tokens == 1) {
      few.x = x.x;
    } else {
      few.x = few.memory;
      for (int64_t t = 0; t < tokens; ++t) {
        const float* row = x.x + t * x.stride;
        float* to = few.memory + t * at.inputs_step;
        if (x.all())
          std::memcpy(to, row, size_t(K_) * sizeof(float));
        else
          for (int64_t i = 0; i < few.count; ++i) to[i] = row[few.columns[i]];
      }
    }
    if (shares_rows(tokens))
      share_rows(few);
    else
      share_columns(few);
  }

  /// One call of the kernel for few tokens.
  struct Few {
    FewLayout at;
    float* memory;
    const int32_t* columns;
    int64_t count;  // of columns
    std::span<const Output> y;
    const float* x = nullptr;  // [tokens, count]
  };

  /// Adds columns [from, to) of the group's superblock rows [begin, end) to a piece's sums.
  void accumulate(const Few& few, int64_t from, int64_t to, int64_t begin, int64_t end, int64_t piece) const {
    const FewLayout& at = few.at;
    float* sums = few.memory + at.y + piece * at.y_piece;
    float* mins = few.memory + at.mins + piece * at.mins_piece;
    for (int64_t t = 0; t < at.tokens; ++t) {
      std::memset(sums + t * at.y_step + begin * kSuper, 0, size_t((end - begin) * kSuper) * sizeof(float));
      std::memset(mins + t * at.mins_step + begin * kZigzagMins, 0,
                  size_t((end - begin) * kZigzagMins) * sizeof(float));
    }
    for (const Run& run : runs_) {
      const int64_t first = std::max(begin, run.row0), last = std::min(end, run.row0 + run.columns.rows);
      if (first >= last) continue;
      ZigzagArgs a;
      a.run = {run.columns.base + (first - run.row0) * run.kernel->bytes, run.columns.stride, last - first};
      a.columns = few.columns + from;
      a.x = few.x + from;
      a.count = to - from;
      a.tokens = at.tokens;
      a.x_step = at.inputs_step;
      a.chunk = plan_.chunk;
      a.prefetch = plan_.prefetch;
      a.y = sums + first * kSuper;
      a.y_step = at.y_step;
      a.mins = mins + first * kZigzagMins;
      a.mins_step = at.mins_step;
      run.kernel->accumulate(a);
    }
  }

  /// Each worker takes every active column of its own superblock rows.
  void share_rows(const Few& few) {
    const int64_t shares = std::min<int64_t>(pool_.size(), rows_);
    pool_.parallel_for(shares, 1, [&](int64_t first, int64_t last) {
      const int64_t begin = rows_ * first / shares, end = rows_ * last / shares;
      accumulate(few, 0, few.count, begin, end, 0);
      finish(few, begin, end);
    });
  }

  /// Each worker takes a share of the active columns and has sums of its own.
  void share_columns(const Few& few) {
    const int64_t pieces = few.at.pieces, unit = 4, quads = ceil_div(few.count, unit);  // whole groups of four columns
    pool_.parallel_for(pieces, 1, [&](int64_t first, int64_t last) {
      for (int64_t piece = first; piece < last; ++piece)
        accumulate(few, std::min(few.count, quads * piece / pieces * unit),
                   std::min(few.count, quads * (piece + 1) / pieces * unit), 0, rows_, piece);
    });
    if (rows_ * pieces * few.at.tokens < 64)
      finish(few, 0, rows_);
    else
      pool_.parallel_for(rows_, 8, [&](int64_t begin, int64_t end) { finish(few, begin, end); });
  }

  /// Adds the pieces' sums of superblock rows [begin, end) and writes the outputs.
  void finish(const Few& few, int64_t begin, int64_t end) const {
    const FewLayout& at = few.at;
    for (int64_t r = begin; r < end; ++r) {
      const Part& part = part_of(r);
      const int64_t first = (r - part.row0) * kSuper, rows = std::min(kSuper, part.view.shape.N - first);
      const Output& out = few.y[size_t(&part - parts_.data())];
      const float* bias = part.view.bias.empty() ? nullptr : part.view.bias.data() + first;
      for (int64_t t = 0; t < at.tokens; ++t) {
        float* to = out.y + t * out.stride + first;
        float whole[kSuper];
        part.kernel->finish(few.memory + at.y + t * at.y_step + r * kSuper, at.y_piece,
                            few.memory + at.mins + t * at.mins_step + r * kZigzagMins, at.mins_piece, int(at.pieces),
                            whole);
        for (int64_t i = 0; i < rows; ++i) to[i] = bias == nullptr ? whole[i] : whole[i] + bias[i];
      }
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
      std::byte* panels = scratch<Scratch::task>(size_t(panels_.prepared_bytes({.shape = {kSuper, K}})));
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
