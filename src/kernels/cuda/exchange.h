// src/kernels/cuda/exchange.h - devices of one process that write into each other's memory. Plain C++, in every build;
// communicator.h is what others use.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/cuda/device.h"

namespace lacuna::cuda {

/// Floats that a member gives in one launch: a share of 128Ki logits, prompts of 32 tokens of 4096 values. A launch
/// sends 8 bytes a float, so that NCCL is faster for large counts (docs/cuda.md, "Several devices").
inline constexpr int64_t kMostExchanged = 128 * 1024;
/// Members of an exchange, and blocks of its launches.
inline constexpr int kMostMembers = 16, kExchangeBlocks = 64;

/// Whether kernels of `device` can read and write the memory of `peer`; false for the device itself.
bool reaches(const Device& device, const Device& peer);
/// Gives kernels of `device` the memory of the peers, which it reaches, and loads what launch_exchange() launches: the
/// first launch would, and may wait for the device while its exchanges wait for others.
void prepare_exchange(const Device& device, std::span<const Device* const> peers);

/// A word of the host's memory that kernels of all devices read, 0 until it is raised. Must outlive them.
class StopFlag {
 public:
  StopFlag();
  ~StopFlag();
  StopFlag(const StopFlag&) = delete;
  StopFlag& operator=(const StopFlag&) = delete;
  /// From any thread, also while kernels run.
  void raise() noexcept;
  const uint32_t* word() const { return word_; }

 private:
  uint32_t* word_ = nullptr;
};

/// Bytes of what the others write to a member: for each half of the exchanges and each sender kMostExchanged floats.
constexpr int64_t staging_bytes(int64_t members) { return 2 * members * kMostExchanged * 8; }

struct ExchangeArgs {
  float* data = nullptr;               // of this member; entry m begins at m * stride
  int64_t stride = 0, count = 0;       // count: floats of an entry, at most kMostExchanged
  int members = 0, self = 0;           // self: this member's number
  std::byte* staging[kMostMembers]{};  // of all members, in the memory of each, zeros before the first exchange
  uint32_t* numbers = nullptr;         // [kExchangeBlocks] of this member, zeros before the first exchange
  const uint32_t* stop = nullptr;      // StopFlag::word
};

/// One member's part of an exchange: gives entry `self` to the others and waits for theirs. All members take part in
/// the same exchanges, of the same counts, in the same order; it may be recorded. Once the flag is raised nothing
/// waits, and what had not come by then stays as it was. The device must be in use.
void launch_exchange(const Device& device, Stream& stream, const ExchangeArgs& args);

}  // namespace lacuna::cuda
