// tests/kernels/cuda_memory.h - vectors in device memory; a loud skip where there is no device.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/device.h"

namespace lacuna::test {

/// The first device, or nullptr and the reason.
struct FoundDevice {
  std::unique_ptr<cuda::Device> device;
  std::unique_ptr<cuda::Stream> stream;
  std::string reason;
};
inline FoundDevice& found_device() {
  static FoundDevice found = [] {
    FoundDevice f;
    try {
      f.device = std::make_unique<cuda::Device>();
      f.stream = std::make_unique<cuda::Stream>(*f.device);
    } catch (const Error& error) {
      f.reason = error.what();
      f.device.reset();
    }
    return f;
  }();
  return found;
}
inline cuda::Device& device() { return *found_device().device; }
inline cuda::Stream& stream() { return *found_device().stream; }

/// Whether kernels run on the CPU (tests/simt), where a launch takes milliseconds: a few cases must do.
inline bool emulated() { return device().info().name == "emulated"; }

template <class T>
class OnDevice {
 public:
  explicit OnDevice(size_t count) : count_(count), buffer_(device(), int64_t(count * sizeof(T)), "a test") {
    buffer_.fill(0xff);  // NaN: what is not written shows
  }
  explicit OnDevice(const std::vector<T>& values) : OnDevice(values.size()) { *this = values; }
  OnDevice& operator=(const std::vector<T>& values) {
    buffer_.upload(std::as_bytes(std::span(values)));
    return *this;
  }
  T* data() const { return buffer_.as<T>(); }
  std::vector<T> values() const {
    stream().synchronize();
    std::vector<T> out(count_);
    buffer_.download(std::as_writable_bytes(std::span(out)));
    return out;
  }
  cuda::Buffer& buffer() { return buffer_; }

 private:
  size_t count_;
  cuda::Buffer buffer_;
};

}  // namespace lacuna::test

#define LACUNA_NEED_DEVICE() \
  if (lacuna::test::found_device().device == nullptr) GTEST_SKIP() << "SKIPPED: " << lacuna::test::found_device().reason
