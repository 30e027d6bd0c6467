#include "simt.h"

#include <memory>
#include <thread>

#include "core/error.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace lacuna::simt {
namespace {

constexpr int64_t kMostShared = 227 * 1024;
constexpr size_t kStack = size_t{128} << 10;

struct Barrier {
  unsigned arrived = 0, round = 0;
};
struct Fiber {
  ucontext_t context;
  bool done = false;
};

/// The stack of each thread of a block; they are kept, since making them takes longer than most blocks run.
std::byte* stack_of(unsigned thread) {
  static thread_local std::vector<std::unique_ptr<std::byte[]>> stacks;
  while (stacks.size() <= thread) stacks.push_back(std::make_unique_for_overwrite<std::byte[]>(kStack));
  return stacks[thread].get();
}

/// The block that runs in this thread of the host.
struct Block {
  dim3 blocks, threads, index;
  std::vector<Fiber> fibers;
  std::vector<Barrier> warps;
  std::vector<std::byte> warp_memory;  // [warps][32][64]
  Barrier all, named[16];
  unsigned current = 0;
  bool moved = false;  // since the last look at every fiber
  ucontext_t scheduler;
  const std::function<void()>* kernel = nullptr;
};
thread_local Block* block = nullptr;
alignas(128) std::byte shared_memory[kMostShared];

void yield() {
  Fiber& fiber = block->fibers[block->current];
  swapcontext(&fiber.context, &block->scheduler);
}

void wait(Barrier& barrier, unsigned threads) {
  block->moved = true;
  const unsigned round = barrier.round;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.round;
    return;
  }
  while (barrier.round == round) yield();
}

void run_fiber() {
  (*block->kernel)();
  block->moved = block->fibers[block->current].done = true;
  yield();
}

void begin(Fiber& fiber, unsigned thread) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack_of(thread);
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, run_fiber, 0);
}

}  // namespace

uint3 thread_index() { return {block->current, 0, 0}; }
uint3 block_index() { return {block->index.x, block->index.y, block->index.z}; }
dim3 block_size() { return block->threads; }
dim3 grid_size() { return block->blocks; }
std::byte* dynamic_shared() { return shared_memory; }
std::byte* warp_memory() { return block->warp_memory.data() + size_t{block->current / 32} * 32 * 64; }

void sync_block() { wait(block->all, block->threads.x); }
void sync_warp() { wait(block->warps[block->current / 32], 32); }
void sync_named(unsigned id, unsigned threads) { wait(block->named[id], threads); }

void wait_for_another_launch() {
  static thread_local unsigned calls = 0;
  if (++calls % 256 == 0) std::this_thread::yield();
  block->moved = true;
  yield();
}

bool& recording() {
  static bool value = false;
  return value;
}

void launch(dim3 blocks, unsigned threads, int64_t shared, const std::function<void()>& kernel) {
  if (threads % 32 != 0 || threads == 0 || threads > 1024) throw Error("{} threads in a block", threads);
  if (shared > kMostShared) throw Error("{} bytes of shared memory", shared);
  if (recording()) return;
  for (unsigned b = 0; b < blocks.x * blocks.y * blocks.z; ++b) {
    Block now;
    now.blocks = blocks, now.threads = dim3(threads);
    now.index = dim3(b % blocks.x, b / blocks.x % blocks.y, b / (blocks.x * blocks.y));
    now.fibers.resize(threads);
    now.warps.resize(threads / 32);
    now.warp_memory.resize(size_t{threads} * 64);
    now.kernel = &kernel;
    block = &now;
    for (unsigned thread = 0; thread < threads; ++thread) begin(now.fibers[thread], thread);
    for (bool left = true; left;) {
      left = now.moved = false;
      for (now.current = 0; now.current < threads; ++now.current) {
        if (now.fibers[now.current].done) continue;
        left = true;
        swapcontext(&now.scheduler, &now.fibers[now.current].context);
      }
      if (left && !now.moved) throw Error("block {}: its threads wait for each other for ever", b);
    }
    block = nullptr;
  }
}

}  // namespace lacuna::simt
