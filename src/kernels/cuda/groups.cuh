// src/kernels/cuda/groups.cuh - the GEMV over prepared group-sparse weights (groups_form.h). Memory bound: every byte
// of a chunk is read once, in order.
//
// The tensor cores multiply the 16 slots of a tile with the inputs of its two places. Of the 8 columns of a product's
// second operand tile q of a chunk has columns 2 (q % 4) and the next to itself, one for each place, so that the sums
// of a chunk's 128 slots end in two accumulators, one for each four tiles: lane l has those of slots l / 4 and l / 4 +
// 8 of tiles l % 4 and l % 4 + 4, and takes the column of the slot's place. Codes are read as subnormal halves, so that
// no instruction converts them; where a code's bits lie higher in their half, the input it meets is so much smaller, or
// the tile's factor. Sums of the groups of a row are integers in shared memory: additions without an answer that come
// in any order and give the same bits.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/groups.h"
#include "kernels/cuda/inputs.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {

/// GroupsArgs as the kernel wants them.
struct GroupsParams {
  const std::byte* chunks;
  const uint32_t* start;
  const float* bound;
  GemvInputs inputs;
  float *y, *zero;
  Workspace workspace;
  uint32_t slices;            // blocks of a panel; 0: stream-K
  uint32_t of_block, larger;  // stream-K: chunks of a block; so many blocks have one more
  int panels;
  unsigned zero_quads;
  bool int8;
  Upcoming next;
};

/// What a lane reads of a chunk beside its words.
struct GroupTail {
  uint2 scale;         // of its four slots
  uint32_t row, zero;  // likewise
  uint2 places;        // of tiles lane % 4 and lane % 4 + 4, where its slots are
  uint2 own;           // of tiles lane / 8 and lane / 8 + 4, whose inputs it has in products
};

template <int kBits, int kGroup>
struct GroupChunk {
  static constexpr GroupForm kForm{kBits, kGroup};
  static constexpr int kWords = kForm.words;
  using Words = uint32_t[kWords];

  static __device__ __forceinline__ void load(const std::byte* chunk, int piece, int lane, Words& words) {
    if constexpr (kWords % 4 == 0) {
      const auto* const from = reinterpret_cast<const uint4*>(chunk) + piece * kWords / 4 * 32 + lane;
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 v = load_stream(from + 32 * i);
        words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
      }
    } else {
      static_assert(kWords == 2);
      const uint2 v = load_stream(reinterpret_cast<const uint2*>(chunk) + piece * 32 + lane);
      words[0] = v.x, words[1] = v.y;
    }
  }

  static __device__ __forceinline__ GroupTail load_tail(const std::byte* chunk, int lane) {
    GroupTail tail{};
    tail.row = load_stream(reinterpret_cast<const uint32_t*>(chunk + kForm.row_at) + lane);
    if constexpr (kForm.coded) {
      tail.scale = load_stream(reinterpret_cast<const uint2*>(chunk + kForm.scale_at) + lane);
      const std::byte* const zeros = chunk + kForm.zero_at;
      if constexpr (kForm.width == 2)
        tail.zero = load_stream(reinterpret_cast<const uint8_t*>(zeros) + lane);
      else if constexpr (kForm.width == 4)
        tail.zero = load_stream(reinterpret_cast<const uint16_t*>(zeros) + lane);
      else
        tail.zero = load_stream(reinterpret_cast<const uint32_t*>(zeros) + lane);
    }
    const auto* const places = reinterpret_cast<const uint2*>(chunk + kForm.place_at);
    tail.places = load_stream(places + lane % 4);
    tail.own = load_stream(places + lane / 8);
    return tail;
  }

  /// Halves of a half-step of the piece: of slot lane / 4, and of slot lane / 4 + 8.
  static __device__ __forceinline__ uint2 halves(const Words& words, int step) {
    if constexpr (kForm.coded) {
      constexpr uint32_t kCode = (1u << kForm.width) - 1;
      const uint32_t word = words[step / kForm.positions];
      const uint32_t mask = (kCode | kCode << 16) << (kForm.width * (step % kForm.positions));
      return make_uint2(word & mask, word >> 8 & mask);
    } else {
      return make_uint2(words[2 * step], words[2 * step + 1]);
    }
  }

  /// What the inputs of half-step `step` of a place are multiplied with.
  static __device__ __forceinline__ float input_factor(int step) {
    if constexpr (!kForm.coded) return 1;
    const int bits = kForm.width * (step % kForm.half % (kForm.coded ? kForm.positions : 1));
    return __uint_as_float(uint32_t(127 - bits) << 23);
  }
  /// What the sums of a tile are multiplied with, likewise.
  static __device__ __forceinline__ float tile_factor(int tile) {
    if constexpr (!kForm.coded) return 1;
    const int bits = kForm.width * (tile * kForm.half % (kForm.coded ? kForm.positions : 1));
    return __uint_as_float(uint32_t(127 - bits) << 23);
  }
};

__device__ __forceinline__ int first_place(uint32_t places) { return int(places & 0xffffu); }
__device__ __forceinline__ int second_place(uint32_t places) {
  return int((places & 0xffffu) + (places >> 16 & 2047u));
}
/// Of slot 0 to 15 of a tile.
__device__ __forceinline__ int place_of(uint32_t places, int slot) {
  return slot < int(places >> 27) ? first_place(places) : second_place(places);
}

/// A block's inputs of a range of places in shared memory: halves in order, and for each place their sum and factor.
template <int kBits, int kGroup, int kWarps>
struct StagedInputs {
  using Chunk = GroupChunk<kBits, kGroup>;
  static constexpr int kEights = kGroup / 8;  // of a place
  static constexpr int kTop = 15;             // inputs are below 2^15 after the multiplication

  uint4* x;
  float2* of_place;
  float back;  // 1 / what inputs are multiplied with; not a number where one is not finite

  /// All threads, after the block has read what was staged before.
  __device__ __forceinline__ void stage(const GroupsParams& p, int first, int last) {
    constexpr int kThreads = kWarps * 32;
    __shared__ uint32_t most_of_warp[kWarps];
    const int eights = (last - first + 1) * kEights, padded = (eights + 31) / 32 * 32;
    const int k0 = first * kGroup;
    float kept[8] = {};  // a thread's first eight; others are read again
    uint32_t most = 0;
#pragma unroll 1
    for (int j = int(threadIdx.x); j < eights; j += kThreads) {
      float v[8];
      load_inputs(p.inputs, k0 + 8 * j, v);
      most = max(most, largest_bits(v));
#pragma unroll
      for (int i = 0; i < 8; ++i) kept[i] = j < kThreads ? v[i] : kept[i];
    }
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0) most_of_warp[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) most = max(most, most_of_warp[w]);

    const int exponent = int(most >> 23);
    const int clamped = min(max(exponent, kTop), 254);  // both factors are normal numbers
    const float norm = __uint_as_float(uint32_t(254 + kTop - 1 - clamped) << 23);
    back = exponent == 255 ? __uint_as_float(0x7fc00000u) : __uint_as_float(uint32_t(clamped - kTop + 1) << 23);
#pragma unroll 1
    for (int j = int(threadIdx.x); j < padded; j += kThreads) {
      if (j >= kThreads) {
#pragma unroll
        for (float& v : kept) v = 0;
        if (j < eights) load_inputs(p.inputs, k0 + 8 * j, kept);
      }
      write(p, j, eights, kept, norm);
    }
  }

 private:
  /// Eight inputs as halves. Whole warps: the lanes of a place add up.
  __device__ __forceinline__ void write(const GroupsParams& p, int j, int eights, const float (&v)[8], float norm) {
    const float factor = Chunk::input_factor(j % kEights);
    const float undo = __uint_as_float((254u << 23) - __float_as_uint(factor));
    float step = 1;  // of 8-bit inputs
    float times = norm * factor, of_place_factor = 1;
    if (p.int8) {
      uint32_t most = largest_bits(v);
#pragma unroll
      for (int lanes = 1; lanes < kEights; lanes *= 2) most = max(most, __shfl_xor_sync(~0u, most, lanes));
      step = __uint_as_float(most) * norm * (1.0f / 127);
      of_place_factor = step;
      step = step > 0 ? __fdividef(1.0f, step) : 0.0f;
    }
    uint32_t pairs[4];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      float a = v[i] * times, b = v[i + 1] * times;
      if (p.int8) a = rintf(v[i] * norm * step) * factor, b = rintf(v[i + 1] * norm * step) * factor;
      const __half2 pair = __floats2half2_rn(a, b);
      pairs[i / 2] = as_bits(pair);
      const float2 rounded = __half22float2(pair);
      sum += (rounded.x + rounded.y) * undo;
    }
#pragma unroll
    for (int lanes = 1; lanes < kEights; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (j >= eights) return;
    x[j] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    // Codes are 2^-24 of what they mean.
    if (j % kEights == 0) of_place[j / kEights] = make_float2(sum * 0x1p-24f, of_place_factor);
  }
};

/// The chunks of a panel that a block has.
struct Segment {
  int panel;
  uint32_t begin, end;
};

/// Sums of a segment, in units of a panel, become results. All threads; sums are zeros afterwards.
__device__ __forceinline__ void store_segment(const GroupsParams& p, const Segment& segment, float unit,
                                              int32_t* sums) {
  __shared__ bool last;
  const uint32_t first = __ldg(p.start + segment.panel), end = __ldg(p.start + segment.panel + 1);
  const int r = int(threadIdx.x) * 4;
  float4 v = make_float4(0, 0, 0, 0);
  if (r < kPanelRows) {
    int4* const mine = reinterpret_cast<int4*>(sums + r);
    const int4 s = *mine;
    *mine = make_int4(0, 0, 0, 0);
    v = make_float4(float(s.x) * unit, float(s.y) * unit, float(s.z) * unit, float(s.w) * unit);
  }
  float* const y = p.y + int64_t(segment.panel) * kPanelRows + r;
  if (p.workspace.partial == nullptr) {
    if (r < kPanelRows) reduce_add(y, v);
    return;
  }

  // Which of the panel's sums this is, where the first one lies, and how many there are.
  const uint32_t chunks = end - first;
  uint32_t at, parts;
  int64_t base;
  if (p.slices > 0) {
    parts = min(chunks, p.slices);
    base = int64_t(segment.panel) * p.slices;
    at = blockIdx.x % p.slices;  // where there are fewer chunks than slices, the first ones have them
  } else {
    // Block b begins at chunk count b / blocks, rounded down; each has one at least.
    const auto block_of = [&](uint32_t chunk) {  // the inverse of chunks_of_block()
      const uint32_t of_larger = p.larger * (p.of_block + 1);
      return chunk < of_larger ? chunk / (p.of_block + 1) : p.larger + (chunk - of_larger) / p.of_block;
    };
    const uint32_t from = block_of(first);
    parts = block_of(end - 1) - from + 1;
    base = int64_t(from) + segment.panel;  // two blocks share a panel at most once, so that none has another's place
    at = blockIdx.x - from;
  }
  float4 sum = make_float4(0, 0, 0, 0);
  if (p.workspace.start != nullptr && r < kPanelRows)
    sum = __ldg(reinterpret_cast<const float4*>(p.workspace.start + int64_t(segment.panel) * kPanelRows + r));
  if (parts == 1) {
    if (r < kPanelRows) *reinterpret_cast<float4*>(y) = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    return;
  }
  float* const partial = p.workspace.partial + base * kPanelRows + r;
  if (r < kPanelRows) {
    *reinterpret_cast<float4*>(partial + int64_t(at) * kPanelRows) = v;
    __threadfence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(p.workspace.arrived + segment.panel, 1u) == parts - 1;
    if (last) p.workspace.arrived[segment.panel] = 0;
  }
  __syncthreads();
  if (!last || r >= kPanelRows) return;
  __threadfence();
  for (uint32_t i = 0; i < parts; ++i) {
    const float4 part = __ldcg(reinterpret_cast<const float4*>(partial + int64_t(i) * kPanelRows));
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  *reinterpret_cast<float4*>(y) = sum;
}

/// The block's chunks: where they begin and end, and the panel of the first.
__device__ __forceinline__ Segment chunks_of_block(const GroupsParams& p) {
  if (p.slices > 0) {
    const int panel = int(blockIdx.x / p.slices);
    const uint32_t slice = blockIdx.x % p.slices, first = __ldg(p.start + panel);
    const uint32_t chunks = __ldg(p.start + panel + 1) - first;
    const uint32_t of_slice = chunks / p.slices, larger = chunks % p.slices;  // the first ones have one more
    const uint32_t begin = first + of_slice * slice + min(slice, larger);
    return {panel, begin, begin + of_slice + (slice < larger ? 1 : 0)};
  }
  const uint32_t b = blockIdx.x, begin = p.of_block * b + min(b, p.larger);
  const uint32_t end = begin + p.of_block + (b < p.larger ? 1 : 0);
  int panel = -1;  // how many panels begin at or before `begin`, less one
  for (int i = 0; i < p.panels; i += 32) {
    const int of_lane = i + int(threadIdx.x) % 32;
    panel += __popc(__ballot_sync(~0u, of_lane < p.panels && __ldg(p.start + of_lane) <= begin));
  }
  return {panel, begin, end};
}

template <int kBits, int kGroup, Math kMath, int kWarps, int kResident>
__global__ void __launch_bounds__(kWarps * 32, kResident / kWarps)
    multiply_groups(const __grid_constant__ GroupsParams p) {
  using Chunk = GroupChunk<kBits, kGroup>;
  constexpr GroupForm kForm = Chunk::kForm;
  constexpr bool kMma = kMath == Math::mma;
  uint4* const staged = dynamic_shared<uint4>();
  __shared__ __align__(16) int32_t sums[kPanelRows];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, t = lane % 4;
  launch_dependents();

  Segment all = chunks_of_block(p);
  uint32_t mine = all.begin + uint32_t(warp);  // the warp's chunk: every kWarps-th one
  const auto at = [&](uint32_t chunk) { return p.chunks + size_t(chunk) * kForm.bytes; };
  typename Chunk::Words words;
  GroupTail tail{};
  if (mine < all.end) {  // weights do not depend on earlier kernels
    Chunk::load(at(mine), 0, lane, words);
    tail = Chunk::load_tail(at(mine), lane);
  }
  for (int r = int(threadIdx.x); r < kPanelRows; r += kWarps * 32) sums[r] = 0;
  StagedInputs<kBits, kGroup, kWarps> inputs;
  inputs.x = staged;
  inputs.of_place = reinterpret_cast<float2*>(staged + (p.inputs.K + kGroup - 1) / kGroup * (kGroup / 8));
  const auto* const x_pairs = reinterpret_cast<const uint32_t*>(staged);

  const auto ask = [&] { ask_for(p.next, blockIdx.x * kWarps + uint32_t(warp), gridDim.x * kWarps); };
  if (lane == 0 && mine >= all.end) ask();
  bool waited = false;
  for (Segment segment{all.panel, all.begin, all.begin}; segment.begin < all.end; ++segment.panel) {
    segment.end = min(all.end, __ldg(p.start + segment.panel + 1));
    const float bound = __ldg(p.bound + segment.panel);
    const auto places_at = [&](uint32_t chunk) {
      return reinterpret_cast<const uint32_t*>(at(chunk) + kForm.place_at);
    };
    const int first = first_place(load_stream(places_at(segment.begin)));
    const int last = second_place(load_stream(places_at(segment.end - 1) + kChunkTiles - 1));
    if (!waited) wait_for_predecessors();
    waited = true;
    inputs.stage(p, first, last);
    // Integers: 2^30 for a sum of `bound` times the largest input that there can be.
    const bool counts = bound > 0 && bound <= 3.4e38f;
    const float to_integer = counts ? (kForm.coded ? 0x1p39f : 0x1p15f) / bound : 0.0f;
    __syncthreads();

    while (mine < segment.end) {
      if (lane == 0 && mine + kWarps >= all.end) ask();
      float d[2][4] = {};  // of tiles 0 to 3, and 4 to 7
      float of_lane[kMma ? 1 : kChunkTiles][2] = {};
      const GroupTail now = tail;
#pragma unroll 1
      for (int piece = 0; piece < kForm.pieces; ++piece) {
        typename Chunk::Words current;
#pragma unroll
        for (int i = 0; i < Chunk::kWords; ++i) current[i] = words[i];
        if (piece + 1 < kForm.pieces) {
          Chunk::load(at(mine), piece + 1, lane, words);
        } else if (mine + kWarps < all.end) {
          Chunk::load(at(mine + kWarps), 0, lane, words);
          tail = Chunk::load_tail(at(mine + kWarps), lane);
        }
        const auto x_at = [&](int place, int step) {
          return x_pairs[(place - first) * (kGroup / 2) + (piece * kForm.half + step) * 4 + t];
        };
        if constexpr (kMma) {
          uint32_t x[2][kForm.half];
#pragma unroll
          for (int set = 0; set < 2; ++set) {
            const uint32_t places = set == 0 ? now.own.x : now.own.y;
            const int place = lane / 4 % 2 == 0 ? first_place(places) : second_place(places);
#pragma unroll
            for (int s = 0; s < kForm.half; ++s) x[set][s] = x_at(place, s);
          }
#pragma unroll
          for (int i = 0; i < kChunkTiles; ++i) {
            const int q = i / 2 + i % 2 * 4;  // the accumulators in turn: a product waits for the one before
            const bool own = lane / 8 == q % 4;
            const auto input = [&](int step) { return own ? x[q / 4][step] : 0u; };
#pragma unroll
            for (int s = 0; s < kForm.half; s += 2) {
              const uint2 low = Chunk::halves(current, q * kForm.half + s);
              if constexpr (kForm.half == 1) {
                multiply_half(d[q / 4], {{low.x, low.y}}, {{input(s)}});
              } else {
                const uint2 high = Chunk::halves(current, q * kForm.half + s + 1);
                multiply(d[q / 4], {{low.x, low.y, high.x, high.y}}, {{input(s), input(s + 1)}});
              }
            }
          }
        } else {
#pragma unroll
          for (int q = 0; q < kChunkTiles; ++q) {
            const uint32_t places = __shfl_sync(~0u, q < 4 ? now.places.x : now.places.y, q % 4);
#pragma unroll
            for (int s = 0; s < kForm.half; ++s) {
              const uint2 halves = Chunk::halves(current, q * kForm.half + s);
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const float2 x = __half22float2(as_half2(x_at(place_of(places, lane / 4 + 8 * half), s)));
                const float2 w = __half22float2(as_half2(half == 0 ? halves.x : halves.y));
                of_lane[q][half] = fmaf(w.x, x.x, fmaf(w.y, x.y, of_lane[q][half]));
              }
            }
          }
        }
      }
      if constexpr (!kMma) {
#pragma unroll
        for (int q = 0; q < kChunkTiles; ++q)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float v = of_lane[q][half];
            v += __shfl_xor_sync(~0u, v, 1);
            v += __shfl_xor_sync(~0u, v, 2);
            if (q % 4 == t) d[q / 4][2 * half] = d[q / 4][2 * half + 1] = v;
          }
      }

      const float tile = Chunk::tile_factor(t);  // that of t + 4 too
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int slot = lane / 4 + e % 2 * 8, set = e / 2;
        const uint32_t places = set == 0 ? now.places.x : now.places.y;
        const bool is_first = slot < int(places >> 27);
        const float2 input = inputs.of_place[(is_first ? first_place(places) : second_place(places)) - first];
        const float sum = is_first ? d[set][e % 2 * 2] : d[set][e % 2 * 2 + 1];
        float v = sum * (input.y * to_integer);
        if constexpr (kForm.coded) {
          constexpr uint32_t kCode = (1u << kForm.width) - 1;
          const float zero = float(now.zero >> (kForm.width * e) & kCode);
          const __half2 scales = as_half2(set == 0 ? now.scale.x : now.scale.y);
          const float scale = e % 2 == 0 ? __low2float(scales) : __high2float(scales);
          v = fmaf(sum, tile, -zero * input.x) * (scale * (input.y * to_integer));
        }
        atomicAdd(&sums[now.row >> (8 * e) & 0xffu], __float2int_rn(v));
      }
      mine += kWarps;
    }
    __syncthreads();
    const bool is_number = bound <= 3.4e38f;
    const float unit = is_number ? bound * 0x1p-15f * inputs.back : __uint_as_float(0x7fc00000u);
    store_segment(p, segment, unit, sums);
    segment.begin = segment.end;
  }
  if (!waited) wait_for_predecessors();
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < p.zero_quads; i += gridDim.x * blockDim.x)
    reinterpret_cast<float4*>(p.zero)[i] = make_float4(0, 0, 0, 0);
}

/// One instance.
struct GroupsKernel {
  int width, group;  // of its codes
  GroupsPlan plan;   // without split and blocks
  void (*kernel)(GroupsParams);
};
/// The instances of one width of codes; one function a file, so that they compile at the same time.
std::span<const GroupsKernel> groups_kernels_2();
std::span<const GroupsKernel> groups_kernels_4();
std::span<const GroupsKernel> groups_kernels_8();
std::span<const GroupsKernel> groups_kernels_16();

template <int kBits, int kGroup, Math kMath, int kWarps, int kResident>
constexpr GroupsKernel groups_kernel() {
  return {kBits,
          kGroup,
          {kWarps, kResident, Split::stream, kMath, 0},
          multiply_groups<kBits, kGroup, kMath, kWarps, kResident>};
}

}  // namespace lacuna::cuda
