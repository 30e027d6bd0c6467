// src/kernels/cuda/exchange.cuh - both halves of an exchange. A float travels in a word of 8 bytes together with the
// exchange's number, so that who finds the number has the value: no flags, no fences, one way over the link
// (NCCL's LL protocol does the same: "Demystifying NCCL", arXiv:2507.04786). For .cu files and tests/simt.
#pragma once

#include "kernels/cuda/exchange.h"
#include "kernels/cuda/exchange_ptx.cuh"
#include "kernels/cuda/share.h"

namespace lacuna::cuda {

inline constexpr int kExchangeThreads = 256;
/// Units, two floats, that a thread moves at once.
inline constexpr int kUnitsAtOnce = 4;
/// Looks at what has not come between two at the flag, which is in the host's memory: some tenths of a millisecond.
inline constexpr unsigned kLooks = 512;

/// count: at most kMostExchanged.
LACUNA_HOST_DEVICE constexpr int units_of(int64_t count) { return int(count + 1) / 2; }

/// Numbers alternate between odd and even; 0 is that of a word that nobody has written, or that was read.
__device__ __forceinline__ uint32_t next_number(uint32_t number) { return number == 0xffffffffu ? 2 : number + 1; }

/// Where `sender` writes for `receiver`. There are two such places, by turns: a member begins exchange n + 1 when its n
/// has ended, with all of n read and cleared, and n + 2 when it has read n + 1 of all others. So nothing of n + 2 comes
/// to a place in which something of n is still to be read.
__device__ __forceinline__ ulonglong2* place_of(const ExchangeArgs& a, int receiver, int sender, uint32_t number) {
  return reinterpret_cast<ulonglong2*>(a.staging[receiver]) +
         (int(number & 1) * a.members + sender) * units_of(kMostExchanged);
}

__device__ __forceinline__ unsigned long long word_of(float v, uint32_t number) {
  return (unsigned long long)(number) << 32 | __float_as_uint(v);
}

/// Writes this member's entry to all others.
__device__ __forceinline__ void send_entry(const ExchangeArgs& a, uint32_t number) {
  const float* const from = a.data + a.self * a.stride;
  const int count = int(a.count), units = units_of(count), step = int(gridDim.x * blockDim.x);
  for (int first = int(blockIdx.x * blockDim.x + threadIdx.x); first < units; first += kUnitsAtOnce * step) {
    ulonglong2 unit[kUnitsAtOnce];
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i) {
      const int k = 2 * (first + i * step);
      unit[i].x = word_of(k < count ? __ldcg(from + k) : 0.0f, number);
      unit[i].y = word_of(k + 1 < count ? __ldcg(from + k + 1) : 0.0f, number);
    }
#pragma unroll 1
    for (int next = 1, receiver = a.self; next < a.members; ++next) {  // each begins with the member after it
      if (++receiver == a.members) receiver = 0;
      ulonglong2* const to = place_of(a, receiver, a.self, number) + first;
#pragma unroll
      for (int i = 0; i < kUnitsAtOnce; ++i)
        if (first + i * step < units) store_words(to + i * step, unit[i]);
    }
  }
}

/// Waits for the entries of all others, in the order in which they send to this one, and clears where they came.
__device__ __forceinline__ void receive_entries(const ExchangeArgs& a, uint32_t number) {
  const int count = int(a.count), units = units_of(count), step = int(gridDim.x * blockDim.x);
  const int last = a.self == 0 ? a.members - 1 : a.self - 1;  // sends to this one first
  int sender = last, k = int(blockIdx.x * blockDim.x + threadIdx.x);
  unsigned looks = 0;
  while (k < units) {
    ulonglong2* at[kUnitsAtOnce];
    float* to[kUnitsAtOnce];
    bool whole[kUnitsAtOnce];
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i) {
      at[i] = nullptr;
      if (k >= units) continue;
      at[i] = place_of(a, a.self, sender, number) + k;
      to[i] = a.data + sender * a.stride + 2 * k;
      whole[i] = 2 * k + 1 < count;
      sender = sender == 0 ? a.members - 1 : sender - 1;
      if (sender == a.self) sender = last, k += step;
    }
    ulonglong2 unit[kUnitsAtOnce];
    for (bool come = false; !come;) {
      come = true;
#pragma unroll
      for (int i = 0; i < kUnitsAtOnce; ++i) {
        if (at[i] == nullptr) continue;
        unit[i] = load_words(at[i]);
        come = come && uint32_t(unit[i].x >> 32) == number && uint32_t(unit[i].y >> 32) == number;
      }
      if (!come && ++looks % kLooks == 0 && load_flag(a.stop) != 0) return;
    }
#pragma unroll
    for (int i = 0; i < kUnitsAtOnce; ++i) {
      if (at[i] == nullptr) continue;
      to[i][0] = __uint_as_float(uint32_t(unit[i].x));
      if (whole[i]) to[i][1] = __uint_as_float(uint32_t(unit[i].y));
      store_words(at[i], {0, 0});
    }
  }
}

/// Of the exchange that this block does.
__device__ __forceinline__ uint32_t read_number(const ExchangeArgs& a) {
  return next_number(__ldcg(a.numbers + blockIdx.x));
}
/// For the exchanges that follow. All threads of the block have read it. A launch of fewer blocks does it for all.
__device__ __forceinline__ void keep_number(const ExchangeArgs& a, uint32_t number) {
  const unsigned block = blockIdx.x + threadIdx.x * gridDim.x;
  if (block < kExchangeBlocks) a.numbers[block] = number;
}

}  // namespace lacuna::cuda
