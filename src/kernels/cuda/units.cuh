// src/kernels/cuda/units.cuh - the GEMV over units of group-sparse weights (units_form.h). Memory bound: records are
// read once, in order, several ahead of each warp.
//
// Inputs become integers: the 16 of a place have a scale that makes the largest 32767 (8-bit inputs: 127). A code is a
// byte, an integer its high byte and its low one, so that four products are one instruction (dp4a) for each; a unit's
// sum is exact. A lane keeps the f32 sum of its row's units; eight lanes add theirs at a quad's end. Every warp of the
// launch has as many records as every other, and adds what it has of a quad to its outputs. In a fixed order a block
// has whole quads instead, of which its warps have equally many records, and the sums of a quad that warps share are
// added in their order.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <span>
#include <type_traits>

#include "kernels/cuda/groups.h"
#include "kernels/cuda/inputs.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/units_form.h"

namespace lacuna::cuda {

/// GroupsArgs as the kernel wants them.
struct UnitsParams {
  GemvInputs inputs;
  const uint4* ready;  // the inputs as StagedPlaces; nullptr: every block makes them
  const std::byte* records;
  const Quad* quads;
  const uint32_t* quad_of;
  uint32_t record_count, quad_count;
  uint32_t of_warp, larger;  // records of a warp; so many warps have one more
  bool slices;               // blocks and warps have equally many quads, however long
  float *y, *zero;
  const float* start;  // of a fixed order
  unsigned zero_quads;
  Upcoming next;
};

/// What a lane has of a record.
template <int kBits>
struct LaneUnits {
  static constexpr UnitForm kForm{kBits};
  static constexpr int kWords = kForm.words;

  uint32_t code[kLaneUnits * kWords];
  uint32_t scale, index, output;

  __device__ __forceinline__ void load(const std::byte* record, int lane) {
    if constexpr (kWords == 2) {
      const uint4 v = load_stream(reinterpret_cast<const uint4*>(record) + lane);
      code[0] = v.x, code[1] = v.y, code[2] = v.z, code[3] = v.w;
    } else {
      const uint2 v = load_stream(reinterpret_cast<const uint2*>(record) + lane);
      code[0] = v.x, code[1] = v.y;
    }
    scale = load_stream(reinterpret_cast<const uint32_t*>(record + kForm.scale_at) + lane);
    index = load_stream(reinterpret_cast<const uint32_t*>(record + kForm.index_at) + lane);
    output = load_stream(reinterpret_cast<const uint32_t*>(record + kForm.output_at) + lane / kRowLanes);
  }
  /// Codes 4 i to 4 i + 3 of a unit as bytes.
  __device__ __forceinline__ uint32_t bytes(int unit, int i) const {
    constexpr int kPerWord = 8 / kForm.width;  // fours of codes
    constexpr uint32_t kCode = (1u << kForm.width) - 1;
    return code[unit * kWords + i / kPerWord] >> (kForm.width * (i % kPerWord)) & kCode * 0x01010101u;
  }
};

/// The inputs of a block in shared memory, or of all blocks in global memory; the place after the last holds zeros.
struct StagedPlaces {
  uint4 *high, *low;  // bytes of 16 integers, signed and unsigned
  uint2* of_place;    // what an integer means (f32), and the sum of the 16

  static constexpr int kBytes = 16 + 16 + 8;  // of a place

  __device__ __forceinline__ StagedPlaces(uint4* shared, int places)
      : high(shared), low(shared + places), of_place(reinterpret_cast<uint2*>(shared + 2 * places)) {}

  /// From global memory. All threads of the block.
  __device__ __forceinline__ void copy(const uint4* from, int places) {
    const int count = ((places + 1) * kBytes + 15) / 16;
    for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) high[i] = __ldcg(from + i);
  }

  /// Thread `thread` of `threads`, whole warps. places: of the inputs.
  template <bool kInt8>
  __device__ __forceinline__ void stage(const GemvInputs& inputs, int places, int thread, int threads) {
    constexpr float kTop = kInt8 ? 127 : 32767;
    for (int j = thread; j < (2 * places + 31) / 32 * 32; j += threads) {  // eight inputs
      float v[8] = {};
      if (j < 2 * places) load_inputs(inputs, 8 * j, v);
      uint32_t most = largest_bits(v);
      most = max(most, __shfl_xor_sync(~0u, most, 1));
      const float largest = __uint_as_float(most);
      const float factor = largest > 1e-30f ? kTop / largest : 0.0f;  // less counts as nothing
      uint32_t high_bytes[2] = {}, low_bytes[2] = {};
      int sum = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int value = __float2int_rn(v[i] * factor);
        sum += value;
        high_bytes[i / 4] |= (uint32_t(kInt8 ? value : value >> 8) & 0xffu) << (8 * (i % 4));
        low_bytes[i / 4] |= (uint32_t(value) & 0xffu) << (8 * (i % 4));
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      if (j >= 2 * places) continue;
      reinterpret_cast<uint2*>(high)[j] = make_uint2(high_bytes[0], high_bytes[1]);
      if (!kInt8) reinterpret_cast<uint2*>(low)[j] = make_uint2(low_bytes[0], low_bytes[1]);
      // Not a number where an input is not finite.
      const float step = most >= 0x7f800000u ? __uint_as_float(0x7fc00000u) : largest > 1e-30f ? largest / kTop : 0.0f;
      if (j % 2 == 0) of_place[j / 2] = make_uint2(__float_as_uint(step), uint32_t(sum));
    }
    if (thread == 0) {
      high[places] = low[places] = make_uint4(0, 0, 0, 0);
      of_place[places] = make_uint2(0, 0);
    }
  }

  /// scale * (code - zero) times the inputs of a unit.
  template <int kBits, bool kInt8>
  __device__ __forceinline__ void add(const LaneUnits<kBits>& units, int unit, float& sum) const {
    const uint32_t index = unit == 0 ? units.index & 0xffffu : units.index >> 16;
    const int place = int(index & 0xfffu), zero = int(index >> 12);
    const uint4 x = high[place];
    const uint2 of = of_place[place];
    int dot = dot_bytes(units.bytes(unit, 0), int(x.x), 0);
    dot = dot_bytes(units.bytes(unit, 1), int(x.y), dot);
    dot = dot_bytes(units.bytes(unit, 2), int(x.z), dot);
    dot = dot_bytes(units.bytes(unit, 3), int(x.w), dot);
    if constexpr (!kInt8) {
      const uint4 l = low[place];
      uint32_t rest = dot_bytes(units.bytes(unit, 0), l.x, 0u);
      rest = dot_bytes(units.bytes(unit, 1), l.y, rest);
      rest = dot_bytes(units.bytes(unit, 2), l.z, rest);
      rest = dot_bytes(units.bytes(unit, 3), l.w, rest);
      dot = dot * 256 + int(rest);
    }
    dot -= zero * int(of.y);
    const __half2 scales = as_half2(units.scale);
    const float scale = unit == 0 ? __low2float(scales) : __high2float(scales);
    sum = fmaf(float(dot) * __uint_as_float(of.x), scale, sum);
  }
};

/// Records of a warp or block.
struct RecordRange {
  uint32_t begin, end;
};

/// Of the warp, where blocks have whole quads.
template <int kWarps>
__device__ __forceinline__ RecordRange records_of_whole_quads(const UnitsParams& p, uint32_t warp) {
  const auto first_of = [&](uint32_t q) { return q < p.quad_count ? __ldg(&p.quads[q].first) : p.record_count; };
  // The first quad that begins at a share of the records, or of the quads, or later.
  const auto quad_at = [&](uint32_t block) {
    if (p.slices) return uint32_t(uint64_t(p.quad_count) * block / gridDim.x);
    const auto record = uint32_t(uint64_t(p.record_count) * block / gridDim.x);
    if (record >= p.record_count) return p.quad_count;
    const uint32_t q = __ldg(p.quad_of + record);
    return first_of(q) < record ? q + 1 : q;
  };
  const uint32_t begin = quad_at(blockIdx.x), end = quad_at(blockIdx.x + 1);
  if (p.slices)
    return {first_of(begin + (end - begin) * warp / kWarps), first_of(begin + (end - begin) * (warp + 1) / kWarps)};
  const uint32_t first = first_of(begin), records = first_of(end) - first;
  return {first + records * warp / kWarps, first + records * (warp + 1) / kWarps};
}

/// Sums of quads that warps share: of each warp's first quad, where an earlier one begins it, and of its last, where a
/// later one ends it.
template <int kWarps>
struct SharedSums {
  enum State : uint8_t { none, goes_on, ends };
  float first[kWarps][kQuadRows], last[kWarps][kQuadRows];
  uint32_t output[kWarps][kQuadRows];  // of the last
  State first_is[kWarps];
  bool has_last[kWarps];

  /// Outputs of the quads that the block's warps share. All threads, after a barrier.
  template <class Store>
  __device__ __forceinline__ void add_up(const Store& store) const {
    const uint32_t w = threadIdx.x / kQuadRows;
    if (w >= kWarps || !has_last[w]) return;
    const int row = int(threadIdx.x) % kQuadRows;
    float sum = last[w][row];
    for (uint32_t next = w + 1; next < kWarps; ++next) {
      if (first_is[next] == none) continue;  // it has no records
      sum += first[next][row];
      if (first_is[next] == ends) break;
    }
    store(output[w][row], sum);
  }
};

template <int kBits, bool kInt8, bool kOrdered, int kWarps, int kResident>
__global__ void __launch_bounds__(kWarps * 32, kResident / kWarps)
    multiply_units(const __grid_constant__ UnitsParams p) {
  constexpr UnitForm kForm = LaneUnits<kBits>::kForm;
  constexpr int kAhead = 4;  // records of a warp on their way
  struct Nothing {};
  __shared__ std::conditional_t<kOrdered, SharedSums<kWarps>, Nothing> shared;
  const int places = (p.inputs.K + kUnit - 1) / kUnit;
  StagedPlaces staged(dynamic_shared<uint4>(), places + 1);
  const int lane = int(threadIdx.x) % 32;
  const uint32_t warp = threadIdx.x / 32;
  launch_dependents();

  RecordRange mine;
  if (kOrdered || p.slices) {
    mine = records_of_whole_quads<kWarps>(p, warp);
  } else {
    const uint32_t w = blockIdx.x * kWarps + warp;
    mine.begin = p.of_warp * w + min(w, p.larger);
    mine.end = mine.begin + p.of_warp + (w < p.larger ? 1 : 0);
  }
  const auto at = [&](uint32_t record) { return p.records + size_t(record) * kForm.bytes; };
  LaneUnits<kBits> ring[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i)  // weights do not depend on earlier kernels
    if (mine.begin + i < mine.end) ring[i].load(at(mine.begin + i), lane);
  if constexpr (kOrdered)
    if (lane == 0) shared.first_is[warp] = SharedSums<kWarps>::none, shared.has_last[warp] = false;

  wait_for_predecessors();
  if (p.ready != nullptr)
    staged.copy(p.ready, places);
  else
    staged.stage<kInt8>(p.inputs, places, int(threadIdx.x), int(blockDim.x));
  __syncthreads();

  float sum = 0;
  bool begins = false;  // the quad, in this warp
  const auto store = [&](uint32_t output, float v) {
    p.y[output] = v + (p.start == nullptr ? 0.0f : __ldg(p.start + output));
  };
  const auto finish_quad = [&](uint32_t output, bool ends) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    sum += __shfl_xor_sync(~0u, sum, 4);
    output &= kOutput;
    if constexpr (kOrdered) {
      using Sums = SharedSums<kWarps>;
      if (lane % kRowLanes == 0) {
        const int row = lane / kRowLanes;
        if (begins && ends)
          store(output, sum);
        else if (begins)
          shared.last[warp][row] = sum, shared.output[warp][row] = output;
        else
          shared.first[warp][row] = sum;
      }
      if (lane == 0 && begins && !ends) shared.has_last[warp] = true;
      if (lane == 0 && !begins) shared.first_is[warp] = ends ? Sums::ends : Sums::goes_on;
    } else if (lane % kRowLanes == 0) {
      atomicAdd(p.y + output, sum);
    }
    sum = 0;
  };
  const auto ask = [&] {
    if (lane == 0) ask_for(p.next, blockIdx.x * kWarps + warp, gridDim.x * kWarps);
  };
  if (mine.begin >= mine.end) ask();
  for (uint32_t base = mine.begin; base < mine.end; base += kAhead) {
    if (base + kAhead >= mine.end) ask();  // all of the warp's own are under way
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t next = base + i + 1;
      if (next > mine.end) break;
      const uint32_t output = ring[i].output;
      if (kOrdered && (output & kQuadBegins) != 0) begins = true;
#pragma unroll
      for (int unit = 0; unit < kLaneUnits; ++unit) staged.add<kBits, kInt8>(ring[i], unit, sum);
      if (next + kAhead <= mine.end) ring[i].load(at(next + kAhead - 1), lane);
      if ((output & kQuadEnds) != 0 || next == mine.end) finish_quad(output, (output & kQuadEnds) != 0);
    }
  }
  if constexpr (kOrdered) {
    __syncthreads();
    shared.add_up(store);
  }
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < p.zero_quads; i += gridDim.x * blockDim.x)
    reinterpret_cast<float4*>(p.zero)[i] = make_float4(0, 0, 0, 0);
}

/// One instance.
struct UnitsKernel {
  int width;
  InputBits inputs;
  bool ordered;  // a fixed order of sums
  int warps, resident;
  void (*kernel)(UnitsParams);
};
/// The instances of one width of codes; one function a file, so that they compile at the same time.
std::span<const UnitsKernel> units_kernels_2();
std::span<const UnitsKernel> units_kernels_4();

template <int kBits, bool kInt8, bool kOrdered, int kWarps, int kResident>
constexpr UnitsKernel units_kernel() {
  return {kBits,     kInt8 ? InputBits::int8 : InputBits::half,
          kOrdered,  kWarps,
          kResident, multiply_units<kBits, kInt8, kOrdered, kWarps, kResident>};
}

}  // namespace lacuna::cuda
