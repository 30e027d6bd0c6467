// src/kernels/cuda/device.h - an NVIDIA card: opened and checked, its memory, streams, graphs and clocks. Plain C++; in
// a build without CUDA opening a device is an error that says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"

struct CUstream_st;
struct CUgraphExec_st;
struct CUevent_st;

namespace lacuna::cuda {

/// More memory was asked for than the device has left.
class DoesNotFit : public Error {
 public:
  using Error::Error;
  int64_t layers = 0;     // of a model: how many of the last would fit, fewer than all; 0: none, or it is no model
  int64_t positions = 0;  // of a model: a context that would fit, shorter than the one asked for; 0: none, or no model
};

struct DeviceOptions {
  int index = 0;
  /// Bytes of memory that may be used; 0: all that is free. A small limit behaves as a small card.
  int64_t memory_limit = 0;
};

struct DeviceInfo {
  std::string name;    // "NVIDIA H100 80GB HBM3"
  std::string driver;  // CUDA version that the driver supports: "13.0"
  int index = 0;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int64_t memory_bytes = 0, cache_bytes = 0;  // of the card; its last-level cache
};

class Device {
 public:
  /// Throws Error when this build has no CUDA backend, the machine no NVIDIA driver or no such device, or the device is
  /// older than compute capability 8.0.
  explicit Device(const DeviceOptions& options = {});

  const DeviceInfo& info() const { return info_; }
  /// From now on what this thread launches, and the events and stopwatches that it makes, are this device's: the one
  /// opened last where it is never called.
  void use() const;
  /// Bytes that can still be taken.
  int64_t free_bytes() const;
  /// Throws DoesNotFit, naming `what`, the bytes needed and those free, unless `bytes` fit.
  void require(int64_t bytes, std::string_view what) const;

 private:
  friend class Buffer;
  DeviceInfo info_;
  int64_t limit_ = 0, used_ = 0;
};

/// Memory of a device, aligned to 256 bytes. Must not outlive the device.
class Buffer {
 public:
  Buffer() = default;
  /// Not cleared. Throws DoesNotFit, naming `what`, where it does not fit.
  Buffer(Device& device, int64_t bytes, std::string_view what);
  ~Buffer();
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(device_, other.device_), std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }
  /// Copies wait for the device; the ranges must lie inside the buffer.
  void upload(std::span<const std::byte> from, int64_t at = 0);
  void download(std::span<std::byte> to, int64_t at = 0) const;
  /// Copies `bytes` of the buffer to another place in it.
  void copy_within(int64_t from, int64_t to, int64_t bytes);
  void fill(uint8_t byte);

 private:
  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

class Event;

/// Work in order.
class Stream {
 public:
  /// Where two streams have work for a multiprocessor, that of the urgent one comes first.
  explicit Stream(Device& device, bool urgent = false);
  /// One that others made and keep; nullptr: the device's own.
  explicit Stream(CUstream_st* borrowed) : handle_(borrowed), borrowed_(true) {}
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  CUstream_st* handle() const { return handle_; }
  /// Waits for the work; throws Error when any of it failed.
  void synchronize();
  /// Whether the work has ended; throws Error when any of it failed.
  bool idle() const;
  /// What is launched after this begins when the event has come; at once where it was never recorded.
  void wait(const Event& event);

 private:
  CUstream_st* handle_ = nullptr;
  bool borrowed_ = false;
};

/// A point in a stream's work.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  /// Comes when what was launched so far has ended.
  void record(Stream& stream);

 private:
  friend class Stream;
  CUevent_st* handle_ = nullptr;
};

/// A point in a graph's launches whose time is taken in each run.
class Mark {
 public:
  Mark();
  ~Mark();
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  /// Inside Graph's record: what follows on the stream begins when what was launched before has ended.
  void record(Stream& stream);
  /// Between the two in the graph's last run, which has ended.
  double ms_to(const Mark& later) const;

 private:
  CUevent_st* handle_ = nullptr;
};

/// Launches recorded once and replayed as one.
class Graph {
 public:
  /// record: launches on `stream`, nothing else.
  Graph(Stream& stream, const std::function<void()>& record);
  ~Graph();
  Graph(Graph&& other) noexcept { std::swap(handle_, other.handle_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(Stream& stream);

  /// One graph a stream, each of a device of its own. record: launches on all of them, and what joins them
  /// (communicator.h). Such graphs are launched together.
  static std::vector<Graph> together(std::span<Stream* const> streams, const std::function<void()>& record);

 private:
  Graph() = default;
  CUgraphExec_st* handle_ = nullptr;
};

/// Time between two points of a stream.
class Stopwatch {
 public:
  Stopwatch();
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  void start(Stream& stream);
  /// Waits for the work since start().
  double stop_ms(Stream& stream);

 private:
  CUevent_st *begin_ = nullptr, *end_ = nullptr;
};

/// The best of several sequential reads of `buffer`, which must be larger than the device's cache. GB/s (10^9 bytes).
double measure_read_gb_s(Device& device, Stream& stream, const Buffer& buffer);
/// The same of a buffer made for it.
double measure_read_gb_s(Device& device);

}  // namespace lacuna::cuda
