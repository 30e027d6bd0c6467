#include "kernels/cuda/communicator.h"

#include <dlfcn.h>

#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"

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
};

/// Loads the library; it stays loaded.
Nccl load_nccl() {
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);  // multicast
  constexpr const char* kName = "libnccl.so.2";
  const char* const folder = std::getenv("LACUNA_NCCL");
  const std::string path = folder != nullptr && *folder != 0 ? fmt::format("{}/{}", folder, kName) : kName;
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw Error(
        "several devices need NCCL, which cannot be loaded ({}); install it (the Python package nvidia-nccl-cu13 has "
        "it) and set LACUNA_NCCL to the folder of its {}",
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
  explicit NcclCommunicator(std::span<const Member> members)
      : nccl_(load_nccl()), members_(members.begin(), members.end()), comms_(members.size()) {
    std::vector<int> devices;
    for (const Member& member : members_) devices.push_back(member.device->info().index);
    nccl_.check(nccl_.comm_init_all(comms_.data(), int(devices.size()), devices.data()), "to connect the devices");
  }
  ~NcclCommunicator() override {
    for (const Nccl::Comm comm : comms_) nccl_.comm_destroy(comm);
  }

  void gather(std::span<float* const> data, int64_t count) override {
    if (comms_.empty()) throw Error("the devices were disconnected by an earlier error; load the model again");
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
      idle = true;
      for (const Member& member : members_) idle = member.stream->idle() && idle;
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

  std::string describe() const override {
    int version = 0;
    nccl_.check(nccl_.get_version(&version), "to ask for the version");
    return fmt::format("{} devices, NCCL {}.{}.{}", members_.size(), version / 10000, version / 100 % 100,
                       version % 100);
  }

 private:
  Nccl nccl_;
  std::vector<Member> members_;
  std::vector<Nccl::Comm> comms_;  // empty: aborted
};

}  // namespace

std::unique_ptr<Communicator> make_communicator(std::span<const Communicator::Member> members) {
  if (members.size() == 1) return std::make_unique<OneDevice>(*members[0].stream);
  return std::make_unique<NcclCommunicator>(members);
}

}  // namespace lacuna::cuda
