// tests/simt/simt.h - CUDA kernels on the CPU, for tests where there is no card: the threads of a block are fibers of
// one thread, blocks run one after the other. What the kernels under test use of the language and its functions, no
// more; headers in kernels/cuda beside this file stand in for those that hold machine instructions. Slow: a launch of a
// few blocks takes milliseconds. It finds wrong arithmetic, places and synchronisation that threads wait for; not
// races.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#undef __global__
#undef __device__
#undef __shared__
#undef __forceinline__
#undef __grid_constant__
#undef __launch_bounds__
#undef __align__
#define __global__
#define __device__
#define __shared__ static  // blocks do not run at the same time
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx lacuna::simt::thread_index()
#define blockIdx lacuna::simt::block_index()
#define blockDim lacuna::simt::block_size()
#define gridDim lacuna::simt::grid_size()

namespace lacuna::simt {

uint3 thread_index();
uint3 block_index();
dim3 block_size();
dim3 grid_size();
/// The block's dynamic shared memory.
std::byte* dynamic_shared();

/// Runs `kernel` for every thread of every block. Kernels without shared memory may run in several threads of the host
/// at the same time. Throws Error where threads wait for each other for ever, and for more
/// shared memory than a card has.
void launch(dim3 blocks, unsigned threads, int64_t shared, const std::function<void()>& kernel);
/// While it is true, launches are not done.
bool& recording();

/// Lets the other threads of the block run, and now and then those of the host.
void wait_for_another_launch();
void sync_block();
void sync_warp();
/// A barrier of `threads` threads.
void sync_named(unsigned id, unsigned threads);
/// Memory of the warp that calls, 32 * 64 bytes.
std::byte* warp_memory();

/// All lanes of the warp give a value and see those of all, [32].
template <class T, class Use>
auto with_all(const T& mine, const Use& use) {
  static_assert(sizeof(T) <= 64);
  std::byte* const memory = warp_memory();
  std::memcpy(memory + 64 * (thread_index().x % 32), &mine, sizeof(T));
  sync_warp();
  T all[32];
  for (int lane = 0; lane < 32; ++lane) std::memcpy(&all[lane], memory + 64 * lane, sizeof(T));
  sync_warp();
  return use(all);
}

}  // namespace lacuna::simt

// ---- functions of CUDA C++ that the kernels call ----

inline void __syncthreads() { lacuna::simt::sync_block(); }
inline void __syncwarp() { lacuna::simt::sync_warp(); }
inline void __threadfence() {}
template <class T>
T __shfl_sync(unsigned, T v, int from) {
  return lacuna::simt::with_all(v, [&](const T* all) { return all[from % 32]; });
}
template <class T>
T __shfl_xor_sync(unsigned, T v, int mask) {
  return __shfl_sync(~0u, v, int(threadIdx.x % 32) ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T v, int by) {
  const int lane = int(threadIdx.x % 32);
  return __shfl_sync(~0u, v, lane < by ? lane : lane - by);
}
inline unsigned __match_any_sync(unsigned, int v) {
  return lacuna::simt::with_all(v, [&](const int* all) {
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane] == v) << lane;
    return bits;
  });
}
inline unsigned __ballot_sync(unsigned, bool v) {
  return lacuna::simt::with_all(v, [](const bool* all) {
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= unsigned(all[lane]) << lane;
    return bits;
  });
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  return lacuna::simt::with_all(v, [](const unsigned* all) { return *std::max_element(all, all + 32); });
}
template <class T>
T __reduce_add_sync(unsigned, T v) {
  return lacuna::simt::with_all(v, [](const T* all) {
    T sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += all[lane];
    return sum;
  });
}
template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
T atomicAdd(T* to, T v) {
  const T before = *to;
  *to += v;
  return before;
}
template <class T>
T atomicMin(T* to, T v) {
  const T before = *to;
  *to = std::min(*to, v);
  return before;
}
template <class To, class From>
To lacuna_bits_as(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  std::memcpy(static_cast<void*>(&to), &from, sizeof(to));
  return to;
}
inline float __uint_as_float(unsigned v) { return lacuna_bits_as<float>(v); }
inline float __int_as_float(int v) { return lacuna_bits_as<float>(v); }
inline unsigned __float_as_uint(float v) { return lacuna_bits_as<unsigned>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __float2int_rn(float v) { return std::isnan(v) ? 0 : int(std::lrintf(v)); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= unsigned(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return out;
}
/// Rounds once: products of halves are exact in double.
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const auto fma = [](__half x, __half y, __half z) {
    return __double2half(std::fma(double(__half2float(x)), double(__half2float(y)), double(__half2float(z))));
  };
  return __halves2half2(fma(__low2half(a), __low2half(b), __low2half(c)),
                        fma(__high2half(a), __high2half(b), __high2half(c)));
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1 / v; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return std::exp(v); }
using std::max;
using std::min;
inline unsigned max(unsigned a, int b) { return std::max(a, unsigned(b)); }
