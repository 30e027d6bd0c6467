// tests/simt/exchange_test.cc - the halves of an exchange, run one after the other for members that are all the host:
// which words go where, whose they are and that none is left. How devices see them, tests/kernels/cuda_exchange_test.cc
// tests on cards.
#include "kernels/cuda/exchange.cuh"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <future>
#include <vector>

#include "core/rng.h"
#include "simt.h"

namespace lacuna::cuda {
namespace {

constexpr uint32_t kUntouched = 0x7fc0dead;  // a NaN

class Members {
 public:
  explicit Members(int count)
      : staging_(size_t(count), std::vector<ulonglong2>(size_t(staging_bytes(count)) / sizeof(ulonglong2))),
        numbers_(size_t(count), std::vector<uint32_t>(kExchangeBlocks)),
        data_(size_t(count)) {}

  int count() const { return int(data_.size()); }
  /// Of all members.
  void set_numbers(uint32_t last) {
    for (auto& of : numbers_) std::fill(of.begin(), of.end(), last);
  }
  /// Every member's entry: random bits. begin: floats before the first entry.
  void fill(int64_t entry, int64_t begin, Rng& rng) {
    entry_ = entry, begin_ = begin;
    expected_.assign(size_t(begin + count() * entry + 1), kUntouched);
    for (auto& of : data_) of.assign(expected_.size(), std::bit_cast<float>(kUntouched));
    for (int m = 0; m < count(); ++m)
      for (int64_t k = 0; k < entry; ++k) {
        const auto at = size_t(begin + m * entry + k);
        expected_[at] = uint32_t(rng.next());
        data_[size_t(m)][at] = std::bit_cast<float>(expected_[at]);
      }
  }
  /// Other bits in the entry of a member.
  void renew(int m, Rng& rng) {
    for (int64_t k = 0; k < entry_; ++k) {
      const auto at = size_t(begin_ + m * entry_ + k);
      expected_[at] = uint32_t(rng.next());
      data_[size_t(m)][at] = std::bit_cast<float>(expected_[at]);
    }
  }
  void send(int m) {
    run(m, [](const ExchangeArgs& a) { send_entry(a, read_number(a)); });
  }
  void receive(int m) {
    run(m, [](const ExchangeArgs& a) { receive_entries(a, read_number(a)); });
    run(m, [](const ExchangeArgs& a) {
      const uint32_t number = read_number(a);
      __syncthreads();
      keep_number(a, number);
    });
  }
  /// A word of the first unit that member 0 sent to member 1 in the first exchange has not come yet.
  void take_back(bool second) {
    ulonglong2& unit = staging_[1][size_t(count() * units_of(kMostExchanged))];
    ASSERT_EQ(unit.x >> 32, 1u);
    (second ? unit.y : unit.x) = 0;
  }
  const std::vector<uint32_t>& expected() const { return expected_; }
  void expect_all(int m) const { expect(m, expected_); }
  void expect(int m, const std::vector<uint32_t>& bits) const {
    for (size_t at = 0; at < bits.size(); ++at)
      ASSERT_EQ(std::bit_cast<uint32_t>(data_[size_t(m)][at]), bits[at]) << "member " << m << ", float " << at;
  }
  void expect_only_own(int m) const {
    for (int64_t at = 0; at < int64_t(expected_.size()); ++at) {
      const bool own = at >= begin_ + m * entry_ && at < begin_ + (m + 1) * entry_;
      ASSERT_EQ(std::bit_cast<uint32_t>(data_[size_t(m)][size_t(at)]), own ? expected_[size_t(at)] : kUntouched);
    }
  }
  void expect_nothing_left() const {
    for (const auto& of : staging_)
      for (const ulonglong2& unit : of) ASSERT_TRUE(unit.x == 0 && unit.y == 0);
  }
  const std::vector<uint32_t>& numbers(int m) const { return numbers_[size_t(m)]; }

 private:
  template <class Part>
  void run(int m, const Part& part) {
    ExchangeArgs a;
    a.data = data_[size_t(m)].data() + begin_;
    a.stride = a.count = entry_;
    a.members = count(), a.self = m;
    for (int other = 0; other < count(); ++other)
      a.staging[other] = reinterpret_cast<std::byte*>(staging_[size_t(other)].data());
    a.numbers = numbers_[size_t(m)].data();
    a.stop = &stopped_;
    const int64_t blocks = (units_of(entry_) + kExchangeThreads - 1) / kExchangeThreads;
    simt::launch(dim3(unsigned(std::clamp<int64_t>(blocks, 1, kExchangeBlocks))), kExchangeThreads, 0,
                 [&] { part(a); });
  }

  uint32_t stopped_ = 1;  // what has not come when it is asked for never comes
  int64_t entry_ = 0, begin_ = 0;
  std::vector<std::vector<ulonglong2>> staging_;
  std::vector<std::vector<uint32_t>> numbers_;
  std::vector<std::vector<float>> data_;
  std::vector<uint32_t> expected_;
};

TEST(Exchange, EveryMemberGetsTheBitsOfAll) {
  Rng rng(1);
  for (const int count : {2, 3, 8}) {
    Members members(count);
    for (const int64_t entry : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{511}, int64_t{4096}, int64_t{5121},
                                kMostExchanged - 1, kMostExchanged}) {
      if (count == 8 && entry > 5121) continue;
      SCOPED_TRACE(fmt::format("{} members, {} floats", count, entry));
      members.fill(entry, entry % 3, rng);
      for (int m = 0; m < count; ++m) members.send(m);
      for (int m = 0; m < count; ++m) members.receive(m);
      for (int m = 0; m < count; ++m) members.expect_all(m);
      members.expect_nothing_left();
    }
  }
}

// Also where exchanges of many and of few blocks follow each other.
TEST(Exchange, AllBlocksKeepTheSameNumber) {
  Rng rng(2);
  Members members(2);
  members.set_numbers(0xfffffffcu);
  for (const uint32_t number : {0xfffffffdu, 0xfffffffeu, 0xffffffffu, 2u, 3u}) {
    members.fill(number % 2 == 0 ? 5 : 3000, 0, rng);
    for (int m = 0; m < 2; ++m) members.send(m);
    for (int m = 0; m < 2; ++m) members.receive(m);
    for (int m = 0; m < 2; ++m) {
      members.expect_all(m);
      EXPECT_EQ(members.numbers(m), std::vector<uint32_t>(kExchangeBlocks, number));
    }
  }
  EXPECT_EQ(next_number(0), 1u);
}

// A member may send the next entry before the others have read the one before.
TEST(Exchange, AMemberMayBeOneExchangeAhead) {
  Rng rng(3);
  Members members(3);
  for (int round = 0; round < 4; ++round) {
    members.fill(700, 1, rng);
    const std::vector<uint32_t> first = members.expected();
    for (int m = 0; m < 3; ++m) members.send(m);
    members.receive(0);
    members.expect(0, first);
    members.renew(0, rng);
    members.send(0);
    for (const int m : {1, 2}) {
      members.receive(m);
      members.expect(m, first);
      members.renew(m, rng);
      members.send(m);
    }
    for (int m = 0; m < 3; ++m) members.receive(m);
    for (int m = 0; m < 3; ++m) members.expect_all(m);
    members.expect_nothing_left();
  }
}

TEST(Exchange, WhatNeverComesChangesNothing) {
  Rng rng(4);
  Members members(2);
  members.fill(300, 0, rng);
  members.send(0);
  members.receive(0);
  members.expect_only_own(0);
  members.receive(1);
  members.expect_all(1);
}

TEST(Exchange, BothWordsOfAUnitMustHaveCome) {
  Rng rng(6);
  for (const bool second : {false, true}) {
    Members members(2);
    members.fill(2, 0, rng);
    members.send(0);
    members.take_back(second);
    members.receive(1);
    members.expect_only_own(1);
  }
}

// The kernel, each member in a thread of its own.
TEST(Exchange, MembersThatRunAtTheSameTime) {
  constexpr int kMembers = 3, kRounds = 200;
  constexpr int64_t kEntries[] = {700, 1, 513, 1100};
  std::vector<std::vector<ulonglong2>> staging(kMembers);
  for (auto& of : staging) of.resize(size_t(staging_bytes(kMembers)) / sizeof(ulonglong2));
  uint32_t stop = 0;
  const auto value = [](int m, int round, int64_t k) { return float(m + kMembers * ((round * 1100 + k) % 4000000)); };
  const auto count_wrong = [&](int m) {
    std::vector<uint32_t> numbers(kExchangeBlocks);
    int64_t wrong = 0;
    for (int round = 0; round < kRounds; ++round) {
      const int64_t entry = kEntries[round % 4];
      std::vector<float> data(size_t(kMembers * entry), -1);
      for (int64_t k = 0; k < entry; ++k) data[size_t(m * entry + k)] = value(m, round, k);
      ExchangeArgs a;
      a.data = data.data();
      a.stride = a.count = entry;
      a.members = kMembers, a.self = m;
      for (int other = 0; other < kMembers; ++other)
        a.staging[other] = reinterpret_cast<std::byte*>(staging[size_t(other)].data());
      a.numbers = numbers.data();
      a.stop = &stop;
      const int blocks = (units_of(entry) + kExchangeThreads - 1) / kExchangeThreads;
      simt::launch(dim3(unsigned(blocks)), kExchangeThreads, 0, [&] {
        const uint32_t number = read_number(a);
        send_entry(a, number);
        receive_entries(a, number);
        __syncthreads();
        keep_number(a, number);
      });
      for (int64_t at = 0; at < kMembers * entry; ++at)
        wrong += data[size_t(at)] != value(int(at / entry), round, at % entry);
    }
    return wrong;
  };
  std::vector<std::future<int64_t>> running;
  for (int m = 0; m < kMembers; ++m) running.push_back(std::async(std::launch::async, count_wrong, m));
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  for (auto& member : running)
    if (member.wait_until(end) != std::future_status::ready) {
      std::atomic_ref(stop).store(1);
      ADD_FAILURE() << "members wait for each other";
    }
  for (auto& member : running) EXPECT_EQ(member.get(), 0);
}

}  // namespace
}  // namespace lacuna::cuda
