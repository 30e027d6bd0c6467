// tests/kernels/cuda_support.h - what the tests of the CUDA kernels share.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/device.h"

namespace lacuna::test {

/// The device, opened once; nullptr and the reason where there is none.
inline cuda::Device* cuda_device(std::string* reason) {
  static std::string why;
  static const std::unique_ptr<cuda::Device> device = [] {
    try {
      return std::make_unique<cuda::Device>();
    } catch (const Error& error) {
      why = error.what();
      return std::unique_ptr<cuda::Device>();
    }
  }();
  if (reason != nullptr) *reason = why;
  return device.get();
}

/// Skips, saying why, where there is no device.
class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    device_ = cuda_device(&reason);
    if (device_ == nullptr) GTEST_SKIP() << "SKIPPED: " << reason;
    stream_.emplace(*device_);
  }
  cuda::Device& device() { return *device_; }
  cuda::Stream& stream() { return *stream_; }

  template <class T>
  cuda::Buffer to_device(const std::vector<T>& values) {
    cuda::Buffer out(*device_, int64_t(values.size() * sizeof(T)), "test");
    if (!values.empty()) out.upload(std::as_bytes(std::span(values)));
    return out;
  }
  template <class T>
  static std::vector<T> to_host(const cuda::Buffer& from) {
    std::vector<T> out(size_t(from.bytes()) / sizeof(T));
    from.download(std::as_writable_bytes(std::span(out)));
    return out;
  }

 private:
  cuda::Device* device_ = nullptr;
  std::optional<cuda::Stream> stream_;
};

}  // namespace lacuna::test
