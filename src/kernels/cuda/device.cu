#include <algorithm>
#include <cassert>
#include <string>

#include "core/error.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kLeastMajor = 8;
/// What stays free for the driver: modules, local memory, graphs.
constexpr int64_t kReserve = int64_t{256} << 20;

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

double gib(int64_t bytes) { return double(bytes) / double(int64_t{1} << 30); }

__global__ void read_all(const uint4* from, size_t count, unsigned* out) {
  unsigned sum = 0;
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += step) {
    const uint4 v = load_stream(from + i);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x9e3779b9u) *out = sum;  // keeps the reads; out is no part of what is read
}

}  // namespace

void check_cuda(cudaError_t status, std::source_location where) {
  if (status == cudaSuccess) return;
  const std::string_view file = where.file_name();
  throw Error("CUDA: {} ({}, at {}:{})", cudaGetErrorString(status), cudaGetErrorName(status),
              file.substr(file.find_last_of('/') + 1), where.line());
}

// ---- Device ----

Device::Device(const DeviceOptions& options) {
  int count = 0, driver = 0, runtime = 0;
  check_cuda(cudaRuntimeGetVersion(&runtime));
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  if (driver == 0)
    throw Error("--device cuda: this machine has no NVIDIA driver (libcuda.so.1); install it or use --device cpu");
  if (found == cudaErrorInsufficientDriver)
    throw Error("--device cuda: the NVIDIA driver supports CUDA {}, this build needs {}; update the driver",
                version_text(driver), version_text(runtime));
  if (found == cudaErrorNoDevice || (found == cudaSuccess && count == 0))
    throw Error("--device cuda: the driver finds no NVIDIA device (is CUDA_VISIBLE_DEVICES empty?)");
  check_cuda(found);
  if (options.index < 0 || options.index >= count)
    throw Error("--device cuda: there is no device {}; the driver finds {}, numbered from 0", options.index, count);
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, options.index));
  if (properties.major < kLeastMajor)
    throw Error("--device cuda: {} has compute capability {}.{}; the kernels need {}.0 or later", properties.name,
                properties.major, properties.minor, kLeastMajor);
  check_cuda(cudaSetDevice(options.index));
  // The host side overlaps launches and forms clusters on 9.0 and later; code for less would not wait, nor be a
  // cluster.
  cudaFuncAttributes code;
  const cudaError_t loaded = cudaFuncGetAttributes(&code, read_all);
  if (loaded == cudaErrorNoKernelImageForDevice || loaded == cudaErrorInvalidDeviceFunction)
    throw Error(
        "--device cuda: {} has compute capability {}.{}, for which this build holds no code; build with {}{} among "
        "CMAKE_CUDA_ARCHITECTURES",
        properties.name, properties.major, properties.minor, properties.major, properties.minor);
  check_cuda(loaded);
  if (properties.major >= 9 && code.ptxVersion < 90)
    throw Error(
        "--device cuda: {} has compute capability {}.{}, but this build holds code for {}.{} only; build with 90 "
        "among CMAKE_CUDA_ARCHITECTURES",
        properties.name, properties.major, properties.minor, code.ptxVersion / 10, code.ptxVersion % 10);
  info_ = {properties.name,
           version_text(driver),
           options.index,
           properties.major,
           properties.minor,
           properties.multiProcessorCount,
           int64_t(properties.totalGlobalMem),
           properties.l2CacheSize};
  limit_ = options.memory_limit;
}

void Device::use() const { check_cuda(cudaSetDevice(info_.index)); }

int64_t Device::free_bytes() const {
  use();
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total));
  const int64_t usable = std::max<int64_t>(0, int64_t(free) - kReserve);
  return limit_ > 0 ? std::clamp<int64_t>(limit_ - used_, 0, usable) : usable;
}

void Device::require(int64_t bytes, std::string_view what) const {
  if (const int64_t free = free_bytes(); bytes > free)
    throw DoesNotFit("{}: {:.2f} GiB of device memory needed, but {} has {:.2f} GiB left{}", what, gib(bytes),
                     info_.name, gib(free), limit_ > 0 ? " of the limit that was given" : "");
}

// ---- Buffer ----

Buffer::Buffer(Device& device, int64_t bytes, std::string_view what) {
  device.require(bytes, what);  // uses the device
  void* data = nullptr;
  check_cuda(cudaMalloc(&data, size_t(std::max<int64_t>(bytes, 1))));
  device_ = &device;
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
  device_->used_ += bytes_;
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  cudaFree(data_);
  device_->used_ -= bytes_;
}

void Buffer::upload(std::span<const std::byte> from, int64_t at) {
  assert(at >= 0 && at + int64_t(from.size()) <= bytes_);
  device_->use();
  check_cuda(cudaMemcpy(data_ + at, from.data(), from.size(), cudaMemcpyHostToDevice));
  // From memory that is not pinned the call may return while the last bytes are still on their way, and streams here do
  // not wait for the default one.
  check_cuda(cudaDeviceSynchronize());
}

void Buffer::download(std::span<std::byte> to, int64_t at) const {
  assert(at >= 0 && at + int64_t(to.size()) <= bytes_);
  device_->use();
  check_cuda(cudaDeviceSynchronize());  // streams here do not wait for the default one, nor it for them
  check_cuda(cudaMemcpy(to.data(), data_ + at, to.size(), cudaMemcpyDeviceToHost));
}

void Buffer::copy_within(int64_t from, int64_t to, int64_t bytes) {
  assert(std::min(from, to) >= 0 && std::max(from, to) + bytes <= bytes_);
  device_->use();
  check_cuda(cudaMemcpy(data_ + to, data_ + from, size_t(bytes), cudaMemcpyDeviceToDevice));
  check_cuda(cudaDeviceSynchronize());
}

void Buffer::fill(uint8_t byte) {
  device_->use();
  check_cuda(cudaMemset(data_, byte, size_t(bytes_)));
  check_cuda(cudaDeviceSynchronize());
}

// ---- Stream, Graph, Stopwatch ----

Stream::Stream(Device& device, bool urgent) {
  device.use();
  int least = 0, greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  check_cuda(cudaStreamCreateWithPriority(&handle_, cudaStreamNonBlocking, urgent ? greatest : least));
}
Stream::~Stream() {
  if (!borrowed_) cudaStreamDestroy(handle_);
}
void Stream::synchronize() { check_cuda(cudaStreamSynchronize(handle_)); }
bool Stream::idle() const {
  const cudaError_t status = cudaStreamQuery(handle_);
  if (status == cudaErrorNotReady) return false;
  check_cuda(status);
  return true;
}
void Stream::wait(const Event& event) { check_cuda(cudaStreamWaitEvent(handle_, event.handle_, 0)); }

Event::Event() { check_cuda(cudaEventCreateWithFlags(&handle_, cudaEventDisableTiming)); }
Event::~Event() { cudaEventDestroy(handle_); }
void Event::record(Stream& stream) { check_cuda(cudaEventRecord(handle_, stream.handle())); }

Mark::Mark() { check_cuda(cudaEventCreate(&handle_)); }
Mark::~Mark() { cudaEventDestroy(handle_); }
void Mark::record(Stream& stream) {
  check_cuda(cudaEventRecordWithFlags(handle_, stream.handle(), cudaEventRecordExternal));
}
double Mark::ms_to(const Mark& later) const {
  float ms = 0;
  check_cuda(cudaEventElapsedTime(&ms, handle_, later.handle_));
  return ms;
}

Graph::Graph(Stream& stream, const std::function<void()>& record) {
  Stream* const streams[] = {&stream};
  std::swap(handle_, together(streams, record).front().handle_);
}

std::vector<Graph> Graph::together(std::span<Stream* const> streams, const std::function<void()>& record) {
  // A stream must not stay in capture, nor a graph stay that was captured, whatever fails.
  struct Captures {
    std::span<Stream* const> streams;
    size_t begun = 0, ended = 0;
    std::vector<cudaGraph_t> graphs;
    ~Captures() {
      for (; ended < begun; ++ended) {
        cudaGraph_t graph = nullptr;
        cudaStreamEndCapture(streams[ended]->handle(), &graph);
        graphs.push_back(graph);
      }
      for (cudaGraph_t graph : graphs)
        if (graph != nullptr) cudaGraphDestroy(graph);
    }
  } captures{streams, 0, 0, {}};
  for (; captures.begun < streams.size(); ++captures.begun)
    check_cuda(cudaStreamBeginCapture(streams[captures.begun]->handle(), cudaStreamCaptureModeThreadLocal));
  record();
  while (captures.ended < captures.begun) {
    cudaGraph_t& graph = captures.graphs.emplace_back(nullptr);
    check_cuda(cudaStreamEndCapture(streams[captures.ended++]->handle(), &graph));
  }
  std::vector<Graph> out;
  for (cudaGraph_t graph : captures.graphs) {
    Graph made;
    check_cuda(cudaGraphInstantiate(&made.handle_, graph, 0));
    // The first launch would do it, while the graphs before it already wait for this one.
    if (streams.size() > 1) check_cuda(cudaGraphUpload(made.handle_, streams[out.size()]->handle()));
    out.push_back(std::move(made));
  }
  return out;
}
Graph::~Graph() {
  if (handle_ != nullptr) cudaGraphExecDestroy(handle_);
}
void Graph::launch(Stream& stream) { check_cuda(cudaGraphLaunch(handle_, stream.handle())); }

Stopwatch::Stopwatch() {
  check_cuda(cudaEventCreate(&begin_));
  check_cuda(cudaEventCreate(&end_));
}
Stopwatch::~Stopwatch() {
  cudaEventDestroy(begin_);
  cudaEventDestroy(end_);
}
void Stopwatch::start(Stream& stream) { check_cuda(cudaEventRecord(begin_, stream.handle())); }
double Stopwatch::stop_ms(Stream& stream) {
  check_cuda(cudaEventRecord(end_, stream.handle()));
  check_cuda(cudaEventSynchronize(end_));
  float ms = 0;
  check_cuda(cudaEventElapsedTime(&ms, begin_, end_));
  return ms;
}

double measure_read_gb_s(Device& device, Stream& stream, const Buffer& buffer) {
  Stopwatch watch;
  const Buffer sum(device, sizeof(unsigned), "the read rate's sum");
  double best = 0;
  const size_t count = size_t(buffer.bytes()) / sizeof(uint4);
  for (int round = 0; round < 6; ++round) {
    watch.start(stream);
    read_all<<<device.info().multiprocessors * 16, 512, 0, stream.handle()>>>(buffer.as<const uint4>(), count,
                                                                              sum.as<unsigned>());
    check_cuda(cudaGetLastError());
    const double ms = watch.stop_ms(stream);
    if (round > 0) best = std::max(best, double(count * sizeof(uint4)) / ms / 1e6);
  }
  return best;
}

double measure_read_gb_s(Device& device) {
  Stream stream(device);
  Buffer buffer(device, std::min(device.free_bytes(), std::max(int64_t{1} << 30, 8 * device.info().cache_bytes)),
                "what is read to measure the device's memory");
  buffer.fill(1);
  return measure_read_gb_s(device, stream, buffer);
}

}  // namespace lacuna::cuda
