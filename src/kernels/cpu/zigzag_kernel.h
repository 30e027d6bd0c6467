// src/kernels/cpu/zigzag_kernel.h - the CPU's kernels for zigzag layouts (layout/zigzag.h), one table per instruction
// set.
//
// A few tokens: columns are taken four at a time, so that the four codes of one output form a dword and one instruction
// multiplies them with four factors x * scale. The factors of a chunk of columns are rounded to 16 bits against their
// largest in each block of outputs and split into two bytes; the integer sums of a chunk go into float accumulators.
// Minima need no codes: sums of x * min are kept for each block of outputs. Tokens after the first use the codes that
// the first one unpacked. Where scales are six-bit numbers times a float d of the superblock, and dot products of bytes
// are an instruction, x * d is rounded instead of x * scale, and its products with the numbers are integers.
//
// Many tokens: 256 outputs at a time become int8 panels with one scale per 32 inputs of an output, which the q8_0
// kernels multiply.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/dispatch.h"
#include "layout/layout.h"

namespace lacuna::cpu {

/// Most columns that share the rounding of their factors (Plan::chunk).
inline constexpr int64_t kZigzagMostColumns = 64;
/// Largest magnitude of a factor in steps: its high byte is at most 127.
inline constexpr float kZigzagSteps = 32512;
/// Floats of min sums for a superblock row: at most 16 blocks of outputs, 4 columns side by side.
inline constexpr int64_t kZigzagMins = 64;

/// Columns of superblocks `stride` bytes apart, each `rows` superblocks long.
struct ZigzagRun {
  const std::byte* base = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
};

struct ZigzagArgs {
  ZigzagRun run;
  const int32_t* columns = nullptr;  // [count] ascending or not
  const float* x = nullptr;          // [tokens, count] the inputs of these columns, rows x_step apart
  int64_t count = 0, tokens = 1, x_step = 0;
  int64_t chunk = 32;     // columns that share the rounding of their factors; a multiple of 4, up to kZigzagMostColumns
  int64_t prefetch = 4;   // superblocks ahead (Plan::prefetch)
  float* y = nullptr;     // [tokens, rows, 256] added to; the order of outputs is the kernel's own, finish() undoes it
  float* mins = nullptr;  // [tokens, rows, kZigzagMins] added to
  int64_t y_step = 0, mins_step = 0;  // from a token to the next
};

struct ZigzagKernel {
  layout::Id id;
  const char* name;  // as explain() shows it
  int64_t bytes;     // of a superblock
  void (*accumulate)(const ZigzagArgs&);
  /// out: [256] = the sum over pieces of y - mins of one superblock row, in the order of the outputs. y, mins: the
  /// first piece's superblock row, the next pieces' lie y_step and mins_step floats further on.
  void (*finish)(const float* y, int64_t y_step, const float* mins, int64_t mins_step, int pieces, float* out);
  /// Superblock row r of all K columns as 16 prepared panels of q8_0 (K rounded up to 32; linear_panels.cc).
  void (*to_panels)(const ZigzagRun& run, int64_t r, int64_t K, std::byte* panels);
};

struct ZigzagTable {
  const ZigzagKernel* kernels;
  int count;
};

LACUNA_CPU_DECLARE(const ZigzagTable& zigzag_table())

/// The table of an instruction set that this CPU has.
const ZigzagTable& zigzag_table(Isa isa);

}  // namespace lacuna::cpu
