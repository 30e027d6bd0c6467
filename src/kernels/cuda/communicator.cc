#include "kernels/cuda/communicator.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/exchange.h"

namespace lacuna::cuda {
namespace {

/// What of NCCL's C API is used (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html), found at run
/// time.
struct Nccl {
  using Comm = void*;
  static constexpr int kSuccess = 0, kInProgress = 7, kFloat32 = 7;

  const char* (*get_error_string)(int) = nullptr;
  int (*get_version)(int*) = nullptr;
  int (*comm_init_all)(Comm* comms, int count, const int* devices) = nullptr;
  int (*comm_destroy)(Comm) = nullptr;
  int (*comm_abort)(Comm) = nullptr;
  int (*comm_get_async_error)(Comm, int*) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*all_gather)(const void* from, void* to, size_t count, int type, Comm, CUstream_st*) = nullptr;

  void check(int status, const char* what) const {
    if (status != kSuccess) throw Error("NCCL: {} failed: {}", what, get_error_string(status));
  }
  /// "NCCL 2.28.3".
  std::string describe() const {
    int version = 0;
    check(get_version(&version), "to ask for the version");
    return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  }
};

/// Of the environment; empty: not set.
std::string_view setting(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

/// Loads the library; it stays loaded.
Nccl load_nccl() {
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);  // multicast
  constexpr const char* kName = "libnccl.so.2";
  const std::string_view folder = setting("LACUNA_NCCL");
  const std::string path = folder.empty() ? kName : fmt::format("{}/{}", folder, kName);
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw Error(
        "several devices need NCCL, which cannot be loaded ({}); install it (the Python package nvidia-nccl-cu13 has "
        "it) and set LACUNA_NCCL to the folder of its {}, or set LACUNA_EXCHANGE=peer where the devices reach each "
        "other's memory",
        ::dlerror(), kName);
  Nccl nccl;
  const auto find = [&](auto*& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    if (function == nullptr) throw Error("{} has no function {}; install another version of NCCL", path, name);
  };
  find(nccl.get_error_string, "ncclGetErrorString");
  find(nccl.get_version, "ncclGetVersion");
  find(nccl.comm_init_all, "ncclCommInitAll");
  find(nccl.comm_destroy, "ncclCommDestroy");
  find(nccl.comm_abort, "ncclCommAbort");
  find(nccl.comm_get_async_error, "ncclCommGetAsyncError");
  find(nccl.group_start, "ncclGroupStart");
  find(nccl.group_end, "ncclGroupEnd");
  find(nccl.all_gather, "ncclAllGather");
  return nccl;
}

/// Whether the work of all streams has ended; throws Error when any of it failed.
bool all_idle(std::span<const Communicator::Member> members) {
  bool idle = true;
  for (const Communicator::Member& member : members) idle = member.stream->idle() && idle;
  return idle;
}

[[noreturn]] void refuse_aborted() {
  throw Error("the devices were disconnected by an earlier error; load the model again");
}

class OneDevice final : public Communicator {
 public:
  explicit OneDevice(Stream& stream) : stream_(stream) {}
  void gather(std::span<float* const>, int64_t) override {}
  void wait() override { stream_.synchronize(); }
  void abort() noexcept override {}
  std::string describe() const override { return "one device"; }

 private:
  Stream& stream_;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const Nccl& nccl, std::span<const Member> members)
      : nccl_(nccl), members_(members.begin(), members.end()), comms_(members.size()) {
    std::vector<int> devices;
    for (const Member& member : members_) devices.push_back(member.device->info().index);
    nccl_.check(nccl_.comm_init_all(comms_.data(), int(devices.size()), devices.data()), "to connect the devices");
  }
  ~NcclCommunicator() override {
    for (const Nccl::Comm comm : comms_) nccl_.comm_destroy(comm);
  }

  void gather(std::span<float* const> data, int64_t count) override {
    if (comms_.empty()) refuse_aborted();
    nccl_.check(nccl_.group_start(), "a group of calls");
    int status = Nccl::kSuccess;
    for (size_t d = 0; d < members_.size() && status == Nccl::kSuccess; ++d)
      status = nccl_.all_gather(data[d] + int64_t(d) * count, data[d], size_t(count), Nccl::kFloat32, comms_[d],
                                members_[d].stream->handle());
    const int ended = nccl_.group_end();  // also where a call failed: a group must not stay open
    nccl_.check(status, "an exchange");
    nccl_.check(ended, "an exchange");
  }

  void wait() override {
    for (bool idle = false; !idle;) {
      idle = all_idle(members_);
      for (const Nccl::Comm comm : comms_) {
        int status = Nccl::kSuccess;
        nccl_.check(nccl_.comm_get_async_error(comm, &status), "to ask for errors");
        if (status != Nccl::kInProgress) nccl_.check(status, "an exchange");
      }
    }
  }

  // Taking a communicator down waits for graphs that hold it, and, where a device has failed, perhaps for ever: threads
  // of their own do it.
  void abort() noexcept override {
    for (const Nccl::Comm comm : std::exchange(comms_, {})) {
      try {
        std::thread([abort = nccl_.comm_abort, comm] { abort(comm); }).detach();
      } catch (...) {  // no thread to be had: the communicator stays as it is
      }
    }
  }

  std::string describe() const override { return fmt::format("{} devices, {}", members_.size(), nccl_.describe()); }

 private:
  Nccl nccl_;
  std::vector<Member> members_;
  std::vector<Nccl::Comm> comms_;  // empty: aborted
};

class PeerCommunicator final : public Communicator {
 public:
  /// nccl: for large counts; none: they go in pieces.
  PeerCommunicator(std::span<const Member> members, const std::optional<Nccl>& nccl)
      : members_(members.begin(), members.end()), nccl_(nccl) {
    const auto count = int64_t(members_.size());
    for (const Member& member : members_) {
      std::vector<const Device*> peers;
      for (const Member& peer : members_)
        if (peer.device != member.device) peers.push_back(peer.device);
      prepare_exchange(*member.device, peers);
      staging_.emplace_back(*member.device, staging_bytes(count), "what devices write to each other").fill(0);
      numbers_.emplace_back(*member.device, int64_t(kExchangeBlocks * sizeof(uint32_t)), "numbers of exchanges")
          .fill(0);
    }
  }
  // No memory goes while another device may write to it.
  ~PeerCommunicator() override {
    stop_.raise();
    for (const Member& member : members_) {
      try {
        member.device->use();
        member.stream->synchronize();
      } catch (...) {  // the device has failed: nothing runs on it
      }
    }
  }

  void gather(std::span<float* const> data, int64_t count) override {
    if (aborted_) refuse_aborted();
    if (nccl_ && count > kMostExchanged) return large().gather(data, count);
    for (int64_t first = 0; first < count; first += kMostExchanged)
      for (size_t d = 0; d < members_.size(); ++d) {
        ExchangeArgs args;
        args.data = data[d] + first;
        args.stride = count, args.count = std::min(kMostExchanged, count - first);
        args.members = int(members_.size()), args.self = int(d);
        for (size_t m = 0; m < members_.size(); ++m) args.staging[m] = staging_[m].data();
        args.numbers = numbers_[d].as<uint32_t>();
        args.stop = stop_.word();
        members_[d].device->use();
        launch_exchange(*members_[d].device, *members_[d].stream, args);
      }
  }

  void wait() override {
    if (large_) return large_->wait();
    while (!all_idle(members_)) {
    }
  }

  void abort() noexcept override {
    aborted_ = true;
    stop_.raise();
    if (large_) large_->abort();
  }

  std::string describe() const override {
    return fmt::format("{} devices, peer memory{}", members_.size(), nccl_ ? " and " + nccl_->describe() : "");
  }

  /// One exchange. Throws Error where a device does not see what another one writes, of which the driver need not know.
  void check() {
    constexpr std::chrono::seconds kPatience{10};
    std::vector<Buffer> values;
    std::vector<float*> data;
    std::vector<float> expected, found(members_.size());
    for (size_t d = 0; d < members_.size(); ++d) {
      const auto mine = float(d + 1);
      expected.push_back(mine);
      values.emplace_back(*members_[d].device, int64_t(members_.size() * sizeof(float)), "a first exchange").fill(0);
      values.back().upload(std::as_bytes(std::span(&mine, 1)), int64_t(d * sizeof(float)));
      data.push_back(values.back().as<float>());
    }
    bool ended = false;
    try {
      gather(data, 1);
      const auto begin = std::chrono::steady_clock::now();
      while (!(ended = all_idle(members_)) && std::chrono::steady_clock::now() - begin < kPatience) {
      }
    } catch (...) {
      abort();  // the buffers wait for what has begun
      throw;
    }
    if (!ended) abort();
    for (size_t d = 0; d < members_.size(); ++d) {
      if (ended) values[d].download(std::as_writable_bytes(std::span(found)));
      if (!ended || found != expected)
        throw Error(
            "{} devices do not see what they write to each other's memory, though the driver says that they can (an "
            "IOMMU?); install NCCL and set LACUNA_EXCHANGE=nccl",
            members_.size());
    }
  }

 private:
  /// Connected when it is first needed.
  NcclCommunicator& large() {
    if (!large_) large_ = std::make_unique<NcclCommunicator>(*nccl_, members_);
    return *large_;
  }

  std::vector<Member> members_;
  std::optional<Nccl> nccl_;
  std::unique_ptr<NcclCommunicator> large_;
  StopFlag stop_;
  std::vector<Buffer> staging_, numbers_;  // of each member
  std::atomic<bool> aborted_ = false;
};

/// Why peer memory cannot be used; empty: it can.
std::string obstacle(std::span<const Communicator::Member> members) {
  if (members.size() > size_t(kMostMembers))
    return fmt::format("{} devices are too many, {} can be", members.size(), kMostMembers);
  if (const std::string_view blocking = setting("CUDA_LAUNCH_BLOCKING"); !blocking.empty() && blocking != "0")
    return "CUDA_LAUNCH_BLOCKING is set, so that the launch on one device would wait for that on the next";
  for (const Communicator::Member& member : members)
    for (const Communicator::Member& peer : members)
      if (&member != &peer && !reaches(*member.device, *peer.device))
        return fmt::format("device {} cannot access the memory of device {}", member.device->info().index,
                           peer.device->info().index);
  return {};
}

}  // namespace

std::unique_ptr<Communicator> make_communicator(std::span<const Communicator::Member> members) {
  if (members.size() == 1) return std::make_unique<OneDevice>(*members[0].stream);
  const std::string_view wanted = setting("LACUNA_EXCHANGE");
  if (!wanted.empty() && wanted != "peer" && wanted != "nccl")
    throw Error("LACUNA_EXCHANGE is '{}'; it can be peer or nccl, or not be set", wanted);
  std::optional<Nccl> nccl;
  if (wanted != "peer") {
    try {
      nccl = load_nccl();
    } catch (const Error&) {
      if (wanted == "nccl" || !setting("LACUNA_NCCL").empty() || !obstacle(members).empty()) throw;
    }
  }
  if (wanted == "nccl") return std::make_unique<NcclCommunicator>(*nccl, members);
  if (const std::string why = obstacle(members); !why.empty()) {
    if (wanted == "peer") throw Error("LACUNA_EXCHANGE=peer: {}; leave it out", why);
    return std::make_unique<NcclCommunicator>(*nccl, members);
  }
  auto peers = std::make_unique<PeerCommunicator>(members, nccl);
  peers->check();
  return peers;
}

}  // namespace lacuna::cuda
