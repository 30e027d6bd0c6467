// tests/kernels/cuda_exchange_test.cc - exchanges through peer memory, between all devices of the machine. No test
// waits for ever: a watchdog ends the exchanges.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "kernels/cuda/communicator.h"
#include "kernels/cuda/exchange.h"
#include "kernels/cuda/ops.h"

namespace lacuna {
namespace {

using cuda::Buffer;
using cuda::Communicator;
using cuda::Device;
using cuda::Graph;
using cuda::Stream;
using testing::HasSubstr;
using testing::ThrowsMessage;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLongest{10};

/// Ends the exchanges, and fails the test, unless it is gone in time.
class Watchdog {
 public:
  explicit Watchdog(Communicator& communicator)
      : thread_([this, &communicator] {
          std::unique_lock lock(mutex_);
          if (gone_.wait_for(lock, kLongest, [this] { return done_; })) return;
          communicator.abort();
          ADD_FAILURE() << "exchanges did not end";
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    gone_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable gone_;
  bool done_ = false;
  std::thread thread_;
};

class PeerExchange : public testing::Test {
 protected:
  void SetUp() override {
    static std::string why;
    static std::deque<Device> found = [] {
      std::deque<Device> all;
      try {
        while (all.size() < 8) all.emplace_back(cuda::DeviceOptions{.index = int(all.size())});
      } catch (const Error& error) {
        why = error.what();
      }
      return all;
    }();
    if (found.size() < 2) GTEST_SKIP() << "SKIPPED: needs two devices: " << why;
    for (Device& device : found)
      for (Device& peer : found)
        if (&device != &peer && !cuda::reaches(device, peer))
          GTEST_SKIP() << "SKIPPED: the devices do not reach each other's memory";
    ::setenv("LACUNA_EXCHANGE", "peer", 1);
    for (Device& device : found) {
      devices_.push_back(&device);
      streams_.push_back(std::make_unique<Stream>(device, true));
      members_.push_back({&device, streams_.back().get()});
    }
    communicator_ = cuda::make_communicator(members_);
    watchdog_ = std::make_unique<Watchdog>(*communicator_);
  }
  void TearDown() override {
    watchdog_.reset();
    communicator_.reset();
    ::unsetenv("LACUNA_EXCHANGE");
  }

  size_t count() const { return members_.size(); }
  std::vector<Stream*> streams(size_t from = 0) const {
    std::vector<Stream*> out;
    for (size_t d = from; d < count(); ++d) out.push_back(streams_[d].get());
    return out;
  }
  Buffer to_device(size_t d, const std::vector<float>& values) {
    Buffer out(*devices_[d], int64_t(values.size() * sizeof(float)), "a test");
    out.upload(std::as_bytes(std::span(values)));
    return out;
  }
  static std::vector<float> to_host(const Buffer& from) {
    std::vector<float> out(size_t(from.bytes()) / sizeof(float));
    from.download(std::as_writable_bytes(std::span(out)));
    return out;
  }

  std::vector<Device*> devices_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Communicator::Member> members_;
  std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<Watchdog> watchdog_;
};

/// Bits of every kind, NaN among them, that say whose and which they are.
float some_bits(size_t d, int64_t k) {
  uint64_t x = (uint64_t(d + 1) << 40) + uint64_t(k);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return std::bit_cast<float>(uint32_t(x >> 32));
}

// Entries and their beginnings that are aligned to nothing, one launch and several.
TEST_F(PeerExchange, EveryCount) {
  EXPECT_THAT(communicator_->describe(), HasSubstr("devices, peer memory"));
  constexpr float kUntouched = 1.5f;
  for (const int64_t entry : {int64_t{1}, int64_t{3}, int64_t{2}, int64_t{511}, int64_t{4096}, int64_t{5120},
                              int64_t{5121}, cuda::kMostExchanged, cuda::kMostExchanged + 1, int64_t{4096} * 512}) {
    SCOPED_TRACE(entry);
    const int64_t begin = entry % 2;
    std::vector<Buffer> data;
    std::vector<float*> entries;
    for (size_t d = 0; d < count(); ++d) {
      std::vector<float> values(size_t(begin + int64_t(count()) * entry + 1), kUntouched);
      for (int64_t k = 0; k < entry; ++k) values[size_t(begin + int64_t(d) * entry + k)] = some_bits(d, k);
      data.push_back(to_device(d, values));
      entries.push_back(data.back().as<float>() + begin);
    }
    communicator_->gather(entries, entry);
    communicator_->wait();
    for (size_t d = 0; d < count(); ++d) {
      const std::vector<float> found = to_host(data[d]);
      int64_t wrong = 0;
      for (int64_t m = 0; m < int64_t(count()); ++m)
        for (int64_t k = 0; k < entry; ++k)
          wrong += std::bit_cast<uint32_t>(found[size_t(begin + m * entry + k)]) !=
                   std::bit_cast<uint32_t>(some_bits(size_t(m), k));
      EXPECT_EQ(wrong, 0) << "device " << d;
      EXPECT_EQ(found.back(), kUntouched);
      EXPECT_TRUE(begin == 0 || found.front() == kUntouched);
    }
  }
}

/// Exchanges whose entries change before each: to member m's entry something is added, and what the others got of it is
/// summed up. Small integers, so that all sums are exact.
class Chain {
 public:
  static constexpr int64_t kEntry = 4096, kSmall = 5;
  static constexpr size_t kChanges = 8;

  Chain(std::span<const Communicator::Member> members, Communicator& communicator)
      : members_(members), communicator_(communicator) {
    Rng rng(5);
    const size_t n = members.size();
    for (size_t d = 0; d < n; ++d) {
      std::vector<float> change(kChanges * kEntry);
      for (int64_t k = 0; k < kEntry; ++k) {
        float sum = 0;
        for (size_t c = 0; c < kChanges; ++c) {
          // The last one leaves -1, 0 or 1 of all.
          const float v = c + 1 < kChanges ? float(rng.below(7)) - 3 : float(rng.below(3)) - 1 - sum;
          change[c * kEntry + size_t(k)] = v;
          sum += v;
        }
      }
      changes_.push_back(make(d, change));
      data_.push_back(make(d, std::vector<float>(n * kEntry)));
      sums_.push_back(make(d, std::vector<float>(n * kEntry)));
      std::vector<float> small(n * kSmall);
      for (int64_t k = 0; k < kSmall; ++k) small[d * kSmall + size_t(k)] = float(d + 1);
      small_.push_back(make(d, small));
      host_changes_.push_back(std::move(change));
    }
  }

  /// Launches step `step`.
  void launch(size_t step) {
    std::vector<float*> all, small;
    for (size_t d = 0; d < members_.size(); ++d) {
      use(d);
      float* const data = data_[d].as<float>();
      cuda::launch_add(*members_[d].device, *members_[d].stream,
                       changes_[d].as<float>() + step % kChanges * size_t(kEntry), kEntry, data + d * kEntry);
      all.push_back(data);
      small.push_back(small_[d].as<float>());
    }
    if (step % 3 == 1) communicator_.gather(small, kSmall);  // fewer blocks in between
    communicator_.gather(all, kEntry);
    for (size_t d = 0; d < members_.size(); ++d) {
      use(d);
      cuda::launch_add(*members_[d].device, *members_[d].stream, data_[d].as<float>(),
                       int64_t(members_.size()) * kEntry, sums_[d].as<float>());
    }
  }
  /// After `steps` steps and a wait.
  void expect(size_t steps) const {
    const size_t n = members_.size();
    std::vector<float> sums, last;
    for (size_t m = 0; m < n; ++m)
      for (size_t k = 0; k < size_t(kEntry); ++k) {
        float value = 0, sum = 0;
        for (size_t step = 0; step < steps; ++step)
          sum += value += host_changes_[m][step % kChanges * size_t(kEntry) + k];
        sums.push_back(sum);
        last.push_back(value);
      }
    for (size_t d = 0; d < n; ++d) {
      EXPECT_TRUE(download(sums_[d]) == sums) << "device " << d;
      EXPECT_TRUE(download(data_[d]) == last) << "device " << d;
      const std::vector<float> small = download(small_[d]);
      for (size_t at = 0; at < small.size(); ++at) EXPECT_EQ(small[at], float(at / kSmall + 1)) << "device " << d;
    }
  }

 private:
  Buffer make(size_t d, const std::vector<float>& values) const {
    Buffer out(*members_[d].device, int64_t(values.size() * sizeof(float)), "a test");
    out.upload(std::as_bytes(std::span(values)));
    return out;
  }
  static std::vector<float> download(const Buffer& from) {
    std::vector<float> out(size_t(from.bytes()) / sizeof(float));
    from.download(std::as_writable_bytes(std::span(out)));
    return out;
  }
  void use(size_t d) const { members_[d].device->use(); }

  std::span<const Communicator::Member> members_;
  Communicator& communicator_;
  std::vector<std::vector<float>> host_changes_;
  std::vector<Buffer> changes_, data_, sums_, small_;  // of each member
};

TEST_F(PeerExchange, TenThousandWithoutAWait) {
  constexpr size_t kSteps = 10000;
  Chain chain(members_, *communicator_);
  for (size_t step = 0; step < kSteps; ++step) chain.launch(step);
  communicator_->wait();
  chain.expect(kSteps);
}

TEST_F(PeerExchange, RecordedOnceAndReplayed) {
  constexpr size_t kSteps = 64, kReplays = 100;
  Chain chain(members_, *communicator_);
  std::vector<Graph> graphs = Graph::together(streams(), [&] {
    for (size_t step = 0; step < kSteps; ++step) chain.launch(step);
  });
  for (size_t replay = 0; replay < kReplays; ++replay)
    for (size_t d = 0; d < count(); ++d) {
      devices_[d]->use();
      graphs[d].launch(*streams_[d]);
    }
  communicator_->wait();
  chain.expect(kSteps * kReplays);
  graphs.clear();
}

/// Exchanges one float of which only the first device has begun: the others' part is recorded and not launched.
class PeerExchangeAlone : public PeerExchange {
 protected:
  void SetUp() override {
    PeerExchange::SetUp();
    if (IsSkipped()) return;
    std::vector<float*> entries;
    for (size_t d = 0; d < count(); ++d) {
      std::vector<float> values(count(), -1);
      values[d] = float(d);
      data_.push_back(to_device(d, values));
      entries.push_back(data_.back().as<float>());
    }
    others_ = Graph::together(streams(1), [&] { communicator_->gather(entries, 1); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ASSERT_FALSE(streams_[0]->idle());
  }
  void TearDown() override {
    others_.clear();
    PeerExchange::TearDown();
  }

  std::vector<Buffer> data_;
  std::vector<Graph> others_;
};

TEST_F(PeerExchangeAlone, WaitsForALatePeer) {
  for (size_t d = 1; d < count(); ++d) {
    devices_[d]->use();
    others_[d - 1].launch(*streams_[d]);
  }
  communicator_->wait();
  for (size_t d = 0; d < count(); ++d) {
    const std::vector<float> found = to_host(data_[d]);
    for (size_t m = 0; m < count(); ++m) EXPECT_EQ(found[m], float(m)) << "device " << d;
  }
}

TEST_F(PeerExchangeAlone, EndsWhenItIsAborted) {
  const auto begin = Clock::now();
  communicator_->abort();
  communicator_->wait();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(1));
  std::vector<float> expected(count(), -1);
  expected[0] = 0;
  EXPECT_EQ(to_host(data_[0]), expected);
  std::vector<float*> entries;
  for (const Buffer& data : data_) entries.push_back(data.as<float>());
  EXPECT_THAT([&] { communicator_->gather(entries, 1); }, ThrowsMessage<Error>(HasSubstr("load the model again")));
}

TEST_F(PeerExchangeAlone, EndsWithItsCommunicator) {
  watchdog_.reset();
  const auto begin = Clock::now();
  communicator_.reset();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(1));
  EXPECT_TRUE(streams_[0]->idle());
}

}  // namespace
}  // namespace lacuna
