// tests/host_device/nccl/nccl.cc - a library in the place of NCCL: devices are host memory. It exchanges when a group
// ends, fails where a test says so, and keeps account of its communicators.
#include "nccl.h"

#include <cstring>
#include <vector>

namespace {

struct Call {
  const float* from;
  float* to;
  size_t count;
  FakeComm* comm;
};
FakeNccl state;
std::vector<Call> calls;
int depth = 0;

}  // namespace

extern "C" {

FakeNccl* fake_nccl() { return &state; }

const char* ncclGetErrorString(int status) { return status == kFakeRemoteError ? "remote error" : "another error"; }
int ncclGetVersion(int* version) {
  *version = 22803;
  return 0;
}

int ncclCommInitAll(void** comms, int count, const int*) {
  for (int rank = 0; rank < count; ++rank) comms[rank] = new FakeComm{rank, count};
  state.alive += count;
  return 0;
}
int ncclCommDestroy(void* comm) {
  delete static_cast<FakeComm*>(comm);
  --state.alive;
  ++state.destroyed;
  return 0;
}
int ncclCommAbort(void* comm) {
  delete static_cast<FakeComm*>(comm);
  --state.alive;
  ++state.aborted;
  return 0;
}
int ncclCommGetAsyncError(void* comm, int* status) {
  *status = static_cast<FakeComm*>(comm)->rank == state.failing_rank ? kFakeRemoteError : 0;
  return 0;
}

int ncclGroupStart() {
  ++depth;
  return 0;
}
int ncclAllGather(const void* from, void* to, size_t count, int type, void* comm, void*) {
  auto* const of = static_cast<FakeComm*>(comm);
  if (of->rank == state.refused_rank) return kFakeRemoteError;
  if (depth != 1 || type != 7) return kFakeRemoteError + 1;  // float32
  calls.push_back({static_cast<const float*>(from), static_cast<float*>(to), count, of});
  return 0;
}
int ncclGroupEnd() {
  state.open_groups = --depth;
  if (calls.empty() || calls.size() != size_t(calls[0].comm->count)) {
    calls.clear();
    return 0;
  }
  const auto exchange = [all = calls] {
    for (const Call& receiver : all)
      for (const Call& sender : all)
        if (sender.from != receiver.to + size_t(sender.comm->rank) * sender.count)
          std::memcpy(receiver.to + size_t(sender.comm->rank) * sender.count, sender.from,
                      sender.count * sizeof(float));
  };
  if (state.enqueue)
    state.enqueue(exchange);
  else
    exchange();
  calls.clear();
  return 0;
}

}  // extern "C"
