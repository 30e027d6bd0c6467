// src/kernels/cuda/communicator.h - devices of one process give each other what they computed. Plain C++, in every
// build.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kernels/cuda/device.h"

namespace lacuna::cuda {

class Communicator {
 public:
  /// A device and the stream that its part of an exchange is work of.
  struct Member {
    Device* device = nullptr;
    Stream* stream = nullptr;
  };

  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// data[d], on device d: [members][count]. Entry d is read and becomes entry d of all others: then all are the same
  /// bits. Launches on all streams and does not wait; all of them may be in capture (Graph::together), unless it is the
  /// first exchange of this count. May leave another device in use. Throws Error where a launch fails: then some
  /// members may have begun, and abort() has to follow.
  virtual void gather(std::span<float* const> data, int64_t count) = 0;
  /// Waits for the work of all streams. Throws Error when any of it failed, or an exchange, instead of waiting for ever
  /// for the others, whose exchange then never ends: abort() has to follow.
  virtual void wait() = 0;
  /// Exchanges that have begun end without result. Afterwards nothing can be exchanged. Does not wait.
  virtual void abort() noexcept = 0;
  /// "one device"; "2 devices, peer memory", "... and NCCL 2.28.3", "2 devices, NCCL 2.28.3".
  virtual std::string describe() const = 0;

 protected:
  Communicator() = default;
};

/// One device exchanges nothing. Devices that all reach each other's memory write into it (exchange.h); NCCL, where it
/// can be loaded, takes counts above kMostExchanged. Others need NCCL. libnccl.so.2 is loaded from the folder that the
/// environment variable LACUNA_NCCL names or from where the system looks. LACUNA_EXCHANGE=peer or =nccl: one of the two
/// alone. Throws Error where neither can be used, the one that was asked for cannot, or LACUNA_NCCL's folder has no
/// NCCL. NVLink's multicast (NCCL_NVLS_ENABLE) stays off unless the user has set it.
std::unique_ptr<Communicator> make_communicator(std::span<const Communicator::Member> members);

}  // namespace lacuna::cuda
