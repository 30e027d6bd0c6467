// src/kernels/cpu/linear_kernel.h - the CPU's kernel table for y[M,N] = x[M,K] W[N,K]^T: one table per instruction set.
//
// Block layouts run on integers: x is quantized once per group to int8 with one scale per 32 inputs, the codes of W are
// unsigned bytes, and a dot product of 4 bytes adds into int32. A layout whose codes are stored with an offset starts
// its int32 sums at -offset * sum(x), which is exact. Float layouts multiply the float inputs themselves.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/dispatch.h"
#include "kernels/linear.h"
#include "layout/layout.h"

namespace lacuna::cpu {

/// Inputs quantized together; every block layout has blocks of a multiple of this.
inline constexpr int64_t kBlock = 32;
/// Rows of a prepared panel: the int32 lanes of the widest register.
inline constexpr int64_t kPanelRows = 16;
/// Rounded up to an odd number of cache lines: what lies this far apart and is read or written side by side spreads
/// over the sets of a cache. Always inlined, since it is used under the flags of every instruction set.
__attribute__((always_inline)) constexpr int64_t odd_lines(int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }
/// Most tokens that a kernel takes at once: their partial sums for 32 rows fill 16 KiB of the first-level cache.
inline constexpr int64_t kMaxTile = 128;
/// Zeros after the scales and sums of the inputs of a group-sparse layout.
inline constexpr int64_t kReadPast = 32;
/// Steps of the second plane of a single token in one step of the first: its codes span half a step either way.
inline constexpr float kPlaneRatio = 254;

struct Problem {
  layout::Id layout = layout::Id::f32;
  layout::Shape shape = {};
  kernels::Prepare prepare = kernels::Prepare::automatic;
  layout::Params params = {};
  std::span<const std::byte> bytes = {};  // canonical; they were checked
};

/// What a kernel wants to know of the quantized inputs beside codes and scales.
struct ActivationNeeds {
  bool quantized = false;
  int offset = 0;     // of the weight codes; 0: none
  int group = 32;     // inputs that share one weight scale: 8, 16 or 32
  bool sums = false;  // the layout has mins: scaled sums per `group`
  /// gs layouts: inputs of a group; a single token is given by units and groups too (ActivationTile). 0: not
  int sparse_group = 0;
  bool e4m3 = false;  // float inputs, each token rounded to E4M3 first (kernels/e4m3_tokens.h)
  bool operator==(const ActivationNeeds&) const = default;
};

/// A tile of tokens, quantized or as floats. Blocks come first, so that all tokens of one block lie together.
///
/// A single token is quantized to 15 bits, since reading the weights hides the arithmetic: its two planes lie where a
/// tile of two tokens would have them, `tokens` is 2, x = scale[0] * code[0] + scale[1] * code[1] with
/// scale[1] = scale[0] / kPlaneRatio, and `sum` of the first plane is that of both.
struct ActivationTile {
  int64_t tokens = 0;
  const int8_t* codes = nullptr;   // [K/32, tokens, 32]
  const float* scale = nullptr;    // [K/32, tokens]; NaN where the block holds a NaN or an infinity
  const int32_t* start = nullptr;  // [K/32, tokens, 32/group]: -offset * sum of the codes
  const float* sum = nullptr;      // [K/32, tokens, 32/group]: scale * sum of the codes
  const float* x = nullptr;        // [tokens, K] rows x_stride apart
  int64_t x_stride = 0;
  /// A single token where needs.sparse_group is not 0: units of U = min(group, 32) inputs, padded with zeros to whole
  /// groups and one more; scales and sums with kReadPast zeros.
  const int8_t* unit_codes = nullptr;  // [units, 2, U]: coarse and fine codes of a unit
  const float* unit_scale = nullptr;   // [units]: the coarse scale
  const float* group_sum = nullptr;    // [groups]: sum of the inputs as quantized
};

/// Whether a stream of weights is asked for far ahead and into the second-level cache (true) or shortly before its use
/// and into the first (false). True on AMD's CPUs, where a core has few requests of its first-level cache under way:
/// two cores of an EPYC with AVX-512 read one token's q4_K panels at 30 GB/s, all that memory gives, and at 18 with
/// false.
bool prefetches_far();

struct LinearArgs {
  const std::byte* weight = nullptr;  // prepared or canonical bytes of the whole matrix
  int64_t N = 0, K = 0;
  const kernels::WeightView* view = nullptr;  // for kernels that need the layout's parameters or its decode
  std::byte* scratch = nullptr;               // as many bytes as the kernel's scratch_bytes says
  const float* bias = nullptr;                // [N] or nullptr
  bool far = false;                           // prefetches_far()
  ActivationTile x;
  float* y = nullptr;  // [tokens, N] rows y_stride apart
  int64_t y_stride = 0;
  /// One token of a kernel with `skips`: whether the groups of so many inputs have an active one. nullptr: all have.
  const uint8_t* active = nullptr;
  int64_t row0 = 0, row1 = 0;  // multiples of 16, row1 also N; one token of a kernel with work_before: any rows
};

struct LinearKernel {
  const char* name;
  bool (*can_run)(const Problem&);
  ActivationNeeds needs;
  /// Bytes of the prepared form; nullptr: the kernel reads canonical bytes.
  int64_t (*prepared_bytes)(const Problem&);
  /// Writes the panels of rows [row0, row1) (multiples of 16, or N) into memory that was zero.
  void (*prepare)(const Problem&, int64_t row0, int64_t row1, std::byte* prepared);
  const char* one_name;  // how the kernels for one and for many tokens are called in explain()
  const char* many_name;
  void (*run_one)(const LinearArgs&);                            // one token in two planes (float layouts: one token)
  void (*run_many)(const LinearArgs&);                           // 1 <= tokens <= kMaxTile
  int64_t (*scratch_bytes)(int64_t K) = nullptr;                 // working memory of a task; nullptr: none
  void (*place)(const Problem&, std::byte* prepared) = nullptr;  // runs once, before prepare; nullptr: nothing to do
  /// Work on the rows before `row`, in any unit: where rows are uneven, one token's are cut into pieces of equal work.
  /// nullptr: rows are alike.
  int64_t (*work_before)(const Problem&, int64_t row) = nullptr;
  int64_t row_step = 1;  // such pieces begin at multiples of this
  int64_t skips = 0;     // one token does not read groups of so many inputs of which none is active; 0: reads all
};

/// layout::decode_rows of a weight, for kernels that multiply decoded rows. out: [rows, K].
void decode_rows(const kernels::WeightView& view, int64_t row0, int64_t rows, float* out);

/// Quantizes tokens [token0, token1) of a tile, or with `planes` one token into its two planes (tokens = 2, token0 =
/// 0). Each `start`/`sum` array is written where the pointer is given.
struct QuantizeArgs {
  bool planes = false;
  const float* x = nullptr;  // [tokens, K] rows x_stride apart
  int64_t x_stride = 0, K = 0, tokens = 0, token0 = 0, token1 = 0;
  int8_t* codes = nullptr;
  float* scale = nullptr;
  struct Extra {
    ActivationNeeds needs;
    int32_t* start = nullptr;
    float* sum = nullptr;
    int8_t* unit_codes = nullptr;  // and the other two; written with `planes`
    float *unit_scale = nullptr, *group_sum = nullptr;
  };
  const Extra* extras = nullptr;
  int extra_count = 0;
};

struct LinearTable {
  const LinearKernel* kernels;
  int count;
  void (*quantize)(const QuantizeArgs&);
};

LACUNA_CPU_DECLARE(const LinearTable& linear_table())

/// The table of an instruction set that this CPU has; rows in order of preference, the first that can run wins.
const LinearTable& linear_table(Isa isa);

/// make_cpu_linear_group on a given instruction set.
std::unique_ptr<kernels::LinearGroup> make_linear_group(Isa isa, std::span<const kernels::WeightView> parts,
                                                        ThreadPool& pool, kernels::Prepare prepare,
                                                        const kernels::Plan& plan = kernels::default_plan());

}  // namespace lacuna::cpu
