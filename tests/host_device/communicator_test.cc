// tests/host_device/communicator_test.cc - exchanges between devices that are the host, over a library in the place of
// NCCL.
#include "kernels/cuda/communicator.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "host_device/nccl/nccl.h"
#include "host_device/peers.h"
#include "kernels/cuda/exchange.h"

namespace lacuna::cuda {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

class CommunicatorTest : public testing::Test {
 protected:
  void SetUp() override {
    ::setenv("LACUNA_NCCL", LACUNA_FAKE_NCCL, 1);
    void* const library = ::dlopen(LACUNA_FAKE_NCCL "/libnccl.so.2", RTLD_NOW);
    ASSERT_NE(library, nullptr) << ::dlerror();
    fake_ = reinterpret_cast<FakeNccl* (*)()>(::dlsym(library, "fake_nccl"))();
    fake_->failing_rank = fake_->refused_rank = -1;
    fake_->destroyed = fake_->aborted = 0;
    fake_->enqueue = nullptr;
    for (Stream* stream : {&first_, &second_, &third_}) members_.push_back({&device_, stream});
  }
  void TearDown() override {
    ::unsetenv("LACUNA_NCCL");
    ::unsetenv("LACUNA_EXCHANGE");
    test::peers() = {};
  }

  FakeNccl* fake_ = nullptr;
  Device device_;
  Stream first_{device_}, second_{device_}, third_{device_};
  std::vector<Communicator::Member> members_;
};

TEST_F(CommunicatorTest, EveryDeviceGetsTheOthersEntries) {
  {
    const auto communicator = make_communicator(members_);
    EXPECT_EQ(communicator->describe(), "3 devices, NCCL 2.28.3");
    std::vector<float> data[3];
    for (int d = 0; d < 3; ++d) {
      data[d].assign(6, -1);
      data[d][size_t(2 * d)] = float(10 * d), data[d][size_t(2 * d + 1)] = float(10 * d + 1);
    }
    float* const all[] = {data[0].data(), data[1].data(), data[2].data()};
    communicator->gather(all, 2);
    communicator->wait();
    for (const std::vector<float>& of : data) EXPECT_EQ(of, (std::vector<float>{0, 1, 10, 11, 20, 21}));
    EXPECT_EQ(fake_->open_groups, 0);
    EXPECT_EQ(fake_->alive, 3);
  }
  EXPECT_EQ(fake_->alive, 0);
  EXPECT_EQ(fake_->destroyed, 3);
}

TEST_F(CommunicatorTest, OneDeviceNeedsNoLibrary) {
  ::setenv("LACUNA_NCCL", "/nowhere", 1);
  const auto communicator = make_communicator(std::span(members_).first(1));
  std::vector<float> data = {1, 2};
  float* const all[] = {data.data()};
  communicator->gather(all, 2);
  communicator->wait();
  EXPECT_EQ(data, (std::vector<float>{1, 2}));
}

// A call that fails leaves no group open, so that nothing waits in it.
TEST_F(CommunicatorTest, ACallThatFailsIsAnErrorAndTheGroupEnds) {
  const auto communicator = make_communicator(members_);
  std::vector<float> data(3);
  float* const all[] = {data.data(), data.data(), data.data()};
  fake_->refused_rank = 1;
  EXPECT_THAT([&] { communicator->gather(all, 1); },
              ThrowsMessage<Error>(HasSubstr("NCCL: an exchange failed: remote error")));
  EXPECT_EQ(fake_->open_groups, 0);
}

TEST_F(CommunicatorTest, AnExchangeThatFailsEndsTheWait) {
  auto communicator = make_communicator(members_);
  fake_->failing_rank = 2;
  EXPECT_THAT([&] { communicator->wait(); }, ThrowsMessage<Error>(HasSubstr("remote error")));
  communicator->abort();
  std::vector<float> data(3);
  float* const all[] = {data.data(), data.data(), data.data()};
  EXPECT_THAT([&] { communicator->gather(all, 1); }, ThrowsMessage<Error>(HasSubstr("load the model again")));
  communicator.reset();
  for (int i = 0; i < 1000 && fake_->aborted < 3; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(fake_->aborted, 3);
  EXPECT_EQ(fake_->destroyed, 0);
}

/// Three devices that reach each other's memory.
class PeerCommunicatorTest : public CommunicatorTest {
 protected:
  void SetUp() override {
    CommunicatorTest::SetUp();
    test::peers().reach = true;
    members_ = {{&device_, &first_}, {&device_1_, &second_}, {&device_2_, &third_}};
  }
  /// Entries of `count` floats, exchanged.
  void expect_exchange(Communicator& communicator, int64_t count) {
    const auto value = [](int64_t d, int64_t k) { return float(d * 1000003 + k); };
    std::vector<std::vector<float>> data(3, std::vector<float>(size_t(3 * count), -1));
    std::vector<float*> all;
    for (int64_t d = 0; d < 3; ++d) {
      for (int64_t k = 0; k < count; ++k) data[size_t(d)][size_t(d * count + k)] = value(d, k);
      all.push_back(data[size_t(d)].data());
    }
    communicator.gather(all, count);
    communicator.wait();
    for (const std::vector<float>& of : data)
      for (int64_t at = 0; at < 3 * count; ++at) ASSERT_EQ(of[size_t(at)], value(at / count, at % count));
  }

  Device device_1_{{.index = 1}}, device_2_{{.index = 2}};
};

TEST_F(PeerCommunicatorTest, NcclTakesLargeCountsOnly) {
  {
    const auto communicator = make_communicator(members_);
    EXPECT_EQ(communicator->describe(), "3 devices, peer memory and NCCL 2.28.3");
    EXPECT_EQ(test::peers().prepared, 6);
    EXPECT_EQ(test::peers().launches, 3);  // the first exchange
    for (const int64_t count : {int64_t{1}, int64_t{4096}, kMostExchanged}) expect_exchange(*communicator, count);
    EXPECT_EQ(test::peers().launches, 12);
    EXPECT_EQ(fake_->alive, 0);
    expect_exchange(*communicator, kMostExchanged + 1);
    EXPECT_EQ(test::peers().launches, 12);
    EXPECT_EQ(fake_->alive, 3);
  }
  EXPECT_EQ(fake_->destroyed, 3);
}

TEST_F(PeerCommunicatorTest, LargeCountsGoInPiecesWithoutNccl) {
  ::setenv("LACUNA_NCCL", "/nowhere", 1);
  ::setenv("LACUNA_EXCHANGE", "peer", 1);
  const auto communicator = make_communicator(members_);
  EXPECT_EQ(communicator->describe(), "3 devices, peer memory");
  test::peers().launches = 0;
  expect_exchange(*communicator, 2 * kMostExchanged + 5);
  EXPECT_EQ(test::peers().launches, 9);
}

TEST_F(PeerCommunicatorTest, WhatIsAskedForIsTakenOrAnError) {
  ::setenv("LACUNA_EXCHANGE", "nccl", 1);
  EXPECT_EQ(make_communicator(members_)->describe(), "3 devices, NCCL 2.28.3");
  ::setenv("LACUNA_EXCHANGE", "fastest", 1);
  EXPECT_THAT([&] { make_communicator(members_); },
              ThrowsMessage<Error>(HasSubstr("LACUNA_EXCHANGE is 'fastest'; it can be peer or nccl")));
  ::setenv("LACUNA_EXCHANGE", "peer", 1);
  ::setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  EXPECT_THAT([&] { make_communicator(members_); }, ThrowsMessage<Error>(HasSubstr("CUDA_LAUNCH_BLOCKING is set")));
  ::unsetenv("CUDA_LAUNCH_BLOCKING");
  test::peers().reach = false;
  EXPECT_THAT([&] { make_communicator(members_); },
              ThrowsMessage<Error>(HasSubstr("LACUNA_EXCHANGE=peer: device 0 cannot access the memory of device 1")));
  ::unsetenv("LACUNA_EXCHANGE");
  EXPECT_EQ(make_communicator(members_)->describe(), "3 devices, NCCL 2.28.3");
  test::peers().reach = true;
  ::setenv("LACUNA_NCCL", "/nowhere", 1);  // named, so it is meant
  EXPECT_THAT([&] { make_communicator(members_); }, ThrowsMessage<Error>(HasSubstr("/nowhere/libnccl.so.2")));
}

TEST_F(PeerCommunicatorTest, DevicesThatDoNotSeeEachOtherAreAnError) {
  test::peers().see = false;
  EXPECT_THAT([&] { make_communicator(members_); },
              ThrowsMessage<Error>(HasSubstr("do not see what they write to each other's memory")));
}

TEST_F(PeerCommunicatorTest, NothingIsExchangedAfterAbort) {
  const auto communicator = make_communicator(members_);
  expect_exchange(*communicator, kMostExchanged + 1);
  communicator->abort();
  std::vector<float> data(3);
  float* const all[] = {data.data(), data.data(), data.data()};
  EXPECT_THAT([&] { communicator->gather(all, 1); }, ThrowsMessage<Error>(HasSubstr("load the model again")));
  for (int i = 0; i < 1000 && fake_->aborted < 3; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(fake_->aborted, 3);
}

}  // namespace
}  // namespace lacuna::cuda
