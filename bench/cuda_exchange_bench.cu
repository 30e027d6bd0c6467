// bench/cuda_exchange_bench.cu - time of an exchange between two devices, through peer memory and through NCCL, in a
// graph of 64 of them: what a token's are, and prompts'. usage: cuda_exchange_bench [DEVICES]
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <span>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/communicator.h"

namespace lacuna {
namespace {

constexpr int kExchanges = 64, kGraphs = 5, kRounds = 9;

/// Median, in microseconds.
double time_us(std::span<const cuda::Communicator::Member> members, cuda::Communicator& communicator, int64_t count) {
  std::vector<cuda::Buffer> buffers;
  std::vector<float*> data;
  std::vector<cuda::Stream*> streams;
  for (const auto& member : members) {
    buffers.emplace_back(*member.device, int64_t(members.size()) * count * int64_t(sizeof(float)), "entries").fill(0);
    data.push_back(buffers.back().as<float>());
    streams.push_back(member.stream);
  }
  communicator.gather(data, count);  // the first one cannot be recorded
  communicator.wait();
  std::vector<cuda::Graph> graphs = cuda::Graph::together(streams, [&] {
    for (int i = 0; i < kExchanges; ++i) communicator.gather(data, count);
  });
  const auto launch = [&] {
    for (size_t d = 0; d < members.size(); ++d) {
      members[d].device->use();
      graphs[d].launch(*streams[d]);
    }
  };
  members[0].device->use();
  cuda::Stopwatch watch;
  std::vector<double> us;
  for (int round = 0; round < kRounds; ++round) {
    launch();  // while it runs the others are launched
    members[0].device->use();
    watch.start(*streams[0]);
    for (int i = 0; i < kGraphs; ++i) launch();
    members[0].device->use();
    us.push_back(watch.stop_ms(*streams[0]) * 1000 / (kGraphs * kExchanges));
    communicator.wait();
  }
  std::nth_element(us.begin(), us.begin() + kRounds / 2, us.end());
  return us[kRounds / 2];
}

int run(int count) {
  std::deque<cuda::Device> devices;
  std::deque<cuda::Stream> streams;
  std::vector<cuda::Communicator::Member> members;
  for (int index = 0; index < count; ++index) {
    devices.emplace_back(cuda::DeviceOptions{.index = index});
    streams.emplace_back(devices.back(), true);
    members.push_back({&devices.back(), &streams.back()});
  }
  for (const char* how : {"peer", "nccl"}) {
    ::setenv("LACUNA_EXCHANGE", how, 1);
    try {
      const auto communicator = cuda::make_communicator(members);
      std::printf("%s\n%12s %12s\n", communicator->describe().c_str(), "floats", "us");
      for (const int64_t floats : {1, 4096, 5120, 16384, 65536, 131072, 262144, 1 << 20, 1 << 21}) {
        std::printf("%12lld %12.2f\n", (long long)floats, time_us(members, *communicator, floats));
        std::fflush(stdout);
      }
    } catch (const Error& error) {
      std::printf("%s: not measured: %s\n", how, error.what());
    }
  }
  return 0;
}

}  // namespace
}  // namespace lacuna

int main(int argc, char** argv) {
  int count = 2;
  const std::string_view given = argc > 1 ? argv[1] : "2";
  const auto [end, status] = std::from_chars(given.data(), given.data() + given.size(), count);
  if (status != std::errc() || end != given.data() + given.size() || count < 2) {
    std::fprintf(stderr, "error: usage: cuda_exchange_bench [DEVICES], 2 or more\n");
    return 2;
  }
  try {
    return lacuna::run(count);
  } catch (const lacuna::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
