// src/kernels/cpu/scratch.h - working memory of a thread that only grows and lives as long as the thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/huge_buffer.h"

namespace lacuna::cpu {

/// Each has memory of its own in each thread. One job runs at a time, so all groups and operations share it.
enum class Scratch : uint8_t {
  task,      // of the thread that runs a task
  partials,  // of the caller: tasks leave their partial results there
  inputs,    // of the caller: quantized or gathered inputs of a linear group
  masked,    // of the caller: inputs with zeros where they do not count
  rounded,   // of the caller: inputs rounded to E4M3
};

/// Never null, also for 0 bytes.
template <Scratch>
std::byte* scratch(size_t bytes) {
  thread_local HugeBuffer buffer;
  if (buffer.data() == nullptr || buffer.size() < bytes) buffer = HugeBuffer(std::max(bytes, size_t{1}));
  return buffer.data();
}

}  // namespace lacuna::cpu
