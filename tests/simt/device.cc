// tests/simt/device.cc - a device that is the host.
#include "kernels/cuda/device.h"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>

#include "simt.h"

namespace lacuna::cuda {

Device::Device(const DeviceOptions&) {
  info_.name = "emulated";
  info_.major = 9;
  info_.multiprocessors = 3;
  info_.memory_bytes = int64_t{1} << 32;
}
void Device::use() const {}
int64_t Device::free_bytes() const { return info_.memory_bytes; }
void Device::require(int64_t, std::string_view) const {}
Buffer::Buffer(Device& device, int64_t bytes, std::string_view)
    : device_(&device),
      data_(static_cast<std::byte*>(::operator new (size_t(bytes), std::align_val_t{256}))),
      bytes_(bytes) {}
Buffer::~Buffer() {
  if (data_ != nullptr) ::operator delete (data_, std::align_val_t{256});
}
void Buffer::upload(std::span<const std::byte> from, int64_t at) {
  if (!from.empty()) std::memcpy(data_ + at, from.data(), from.size());
}
void Buffer::download(std::span<std::byte> to, int64_t at) const {
  if (!to.empty()) std::memcpy(to.data(), data_ + at, to.size());
}
void Buffer::copy_within(int64_t from, int64_t to, int64_t bytes) {
  std::memmove(data_ + to, data_ + from, size_t(bytes));
}
void Buffer::fill(uint8_t byte) { std::memset(data_, byte, size_t(bytes_)); }
Stream::Stream(Device&, bool) {}
Stream::~Stream() = default;
void Stream::synchronize() {}
Mark::Mark() = default;
Mark::~Mark() = default;
void Mark::record(Stream&) {}
double Mark::ms_to(const Mark&) const { return 1; }
// What records it runs again at each launch.
Graph::Graph(Stream&, const std::function<void()>& record)
    : handle_(reinterpret_cast<CUgraphExec_st*>(new std::function<void()>(record))) {
  simt::recording() = true;
  record();
  simt::recording() = false;
}
Graph::~Graph() { delete reinterpret_cast<std::function<void()>*>(handle_); }
void Graph::launch(Stream&) { (*reinterpret_cast<std::function<void()>*>(handle_))(); }
Stopwatch::Stopwatch() = default;
Stopwatch::~Stopwatch() = default;
void Stopwatch::start(Stream&) {}
double Stopwatch::stop_ms(Stream&) { return 1; }

}  // namespace lacuna::cuda
