// scripts/harness/ggml_linear.cc - the linear layers of one token on ggml's CPU or CUDA backend, or on ik_llama.cpp's
// CPU backend: what ours are compared with.
//
// Every matrix of every layer of a known shape (q, k, v, o, gate, up, down; no head) is q4_K in memory of its own, so
// that none is in a cache when it is read, plain or in the form that the program repacks q4_K into. The weights are
// random and the layers' are alike. One matrix of each kind is compared with a double-precision product before the
// clock starts. Prints one JSON object. Built by build_ggml_linear.sh; GGML_LINEAR_IK: against ik_llama.cpp;
// GGML_LINEAR_CUDA: with ggml's CUDA backend.
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>
#ifndef GGML_LINEAR_IK
#include <ggml-cpu.h>
#endif
#ifdef GGML_LINEAR_CUDA
#include <ggml-cuda.h>
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "model/shapes.h"

#ifdef GGML_LINEAR_IK
// What its -rtr does with each tensor; no installed header declares it.
extern "C" void iqk_repack_tensor(ggml_tensor* tensor);
#endif

namespace {

using lacuna::Error;
using lacuna::Rng;

// ggml rounds inputs to 8 bits in blocks of 256 (on CUDA of 32): at most 1/254 of the block's largest, about 2.8 times
// its root mean square, spread evenly: 2.8 / 254 / sqrt(3) = 0.6%.
constexpr double kTolerance = 0.02;
constexpr int64_t kPoolBlocks = 512;  // of 256 random weights, encoded once; a matrix draws its blocks from them

struct Options {
  std::string shape = "llama-3.2-1b";
  std::string form, device = "cpu";        // form empty: repacked, on cuda plain
  int threads = 2, runs = 10, layers = 0;  // layers 0: as the shape says
  bool on_cuda() const { return device == "cuda"; }
};

struct Matrix {
  std::string name;
  int64_t N, K;
};

/// One by one: q+k+v becomes three.
std::vector<Matrix> matrices_of(const lacuna::model::LinearLayers& layers) {
  std::vector<Matrix> out;
  for (const auto& group : layers.groups) {
    std::string_view names = group.name;
    for (const int64_t N : group.outputs) {
      const size_t plus = std::min(names.find('+'), names.size());
      out.push_back({std::string(names.substr(0, plus)), N, group.K});
      names.remove_prefix(std::min(plus + 1, names.size()));
    }
  }
  return out;
}

void encode(const float* values, void* blocks, int64_t count) {
#ifdef GGML_LINEAR_IK
  ggml_quantize_chunk(GGML_TYPE_Q4_K, values, blocks, 0, count, 256, nullptr, nullptr);
#else
  ggml_quantize_chunk(GGML_TYPE_Q4_K, values, blocks, 0, count, 256, nullptr);
#endif
}
void decode(const void* blocks, float* out, int64_t count) {
#ifdef GGML_LINEAR_IK
  ggml_internal_get_type_traits(GGML_TYPE_Q4_K).to_float(blocks, out, count);
#else
  ggml_get_type_traits(GGML_TYPE_Q4_K)->to_float(blocks, out, count);
#endif
}

/// Random q4_K matrices, put together from blocks that were encoded once.
class Weights {
 public:
  Weights() : block_bytes_(ggml_row_size(GGML_TYPE_Q4_K, 256)), pool_(size_t(kPoolBlocks) * block_bytes_), rng_(1) {
    std::vector<float> values(size_t(kPoolBlocks) * 256);
    for (float& value : values) value = float(rng_.normal());
    encode(values.data(), pool_.data(), kPoolBlocks);
  }
  std::vector<char> draw(const Matrix& m) {
    std::vector<char> bytes(size_t(m.N) * ggml_row_size(GGML_TYPE_Q4_K, m.K));
    for (size_t at = 0; at < bytes.size(); at += block_bytes_)
      std::memcpy(bytes.data() + at, pool_.data() + rng_.below(uint64_t(kPoolBlocks)) * block_bytes_, block_bytes_);
    return bytes;
  }

 private:
  size_t block_bytes_;
  std::vector<char> pool_;
  Rng rng_;
};

struct FreeContext {
  void operator()(ggml_context* context) const { ggml_free(context); }
};
using Context = std::unique_ptr<ggml_context, FreeContext>;

Context make_context(size_t tensors, bool graph) {
  const size_t size =
      tensors * ggml_tensor_overhead() + (graph ? ggml_graph_overhead_custom(tensors, /*grads=*/false) : 0);
  Context context(ggml_init({size, nullptr, /*no_alloc=*/true}));
  if (!context) throw Error("ggml_init: no context of {} bytes", size);
  return context;
}

ggml_backend_buffer_type_t buffer_type(const std::string& form, const std::string& device) {
#ifdef GGML_LINEAR_CUDA
  if (device == "cuda") {
    if (ggml_backend_cuda_get_device_count() == 0)
      throw Error("--device cuda: ggml finds no NVIDIA device on this machine; use --device cpu");
    return ggml_backend_cuda_buffer_type(0);
  }
#endif
  if (device != "cpu")
    throw Error("this program was built without ggml's CUDA backend; give the folder of a build with it");
  if (form == "plain") return ggml_backend_cpu_buffer_type();
#ifdef GGML_LINEAR_IK
  return ggml_backend_cpu_buffer_type();  // repacked where it lies
#else
  using GetExtra = ggml_backend_buffer_type_t* (*)(ggml_backend_dev_t);
  ggml_backend_reg_t cpu = ggml_backend_cpu_reg();
  const auto get =
      reinterpret_cast<GetExtra>(ggml_backend_reg_get_proc_address(cpu, "ggml_backend_dev_get_extra_bufts"));
  if (get != nullptr)
    for (ggml_backend_buffer_type_t* type = get(ggml_backend_reg_dev_get(cpu, 0)); type != nullptr && *type != nullptr;
         ++type)
      if (std::strcmp(ggml_backend_buft_name(*type), "CPU_REPACK") == 0) return *type;
  throw Error(
      "this build of ggml has no buffer type CPU_REPACK; build it with GGML_CPU_REPACK, or ask for --form plain");
#endif
}

void allocate(ggml_context* context, ggml_backend_buffer_type_t type, const char* what) {
  if (ggml_backend_alloc_ctx_tensors_from_buft(context, type) == nullptr) throw Error("{}: not enough memory", what);
}

/// The first layer's matrices get `bytes` in the form that the program reads, the other layers' copies of them.
void fill(const std::vector<ggml_tensor*>& weights, size_t per_layer, const std::vector<std::vector<char>>& bytes,
          const Options& options) {
  for (size_t i = 0; i < weights.size(); ++i) {
    ggml_tensor* weight = weights[i];
    if (options.on_cuda()) {
      ggml_backend_tensor_set(weight, bytes[i % per_layer].data(), 0, bytes[i % per_layer].size());
    } else if (i < per_layer) {
      ggml_backend_tensor_set(weight, bytes[i].data(), 0, bytes[i].size());
#ifdef GGML_LINEAR_IK
      if (options.form == "repacked") {
        iqk_repack_tensor(weight);
        if (weight->type == GGML_TYPE_Q4_K) throw Error("{}: ik_llama.cpp does not repack it", ggml_get_name(weight));
      }
#endif
    } else {
      const ggml_tensor* first = weights[i % per_layer];
      std::memcpy(weight->data, first->data, bytes[i % per_layer].size());
      weight->type = first->type;
    }
  }
}

/// Relative root mean square error of a result.
double deviation(const Matrix& m, const std::vector<char>& bytes, const std::vector<float>& x,
                 const ggml_tensor* result) {
  std::vector<float> y(static_cast<size_t>(m.N)), row(static_cast<size_t>(m.K));
  ggml_backend_tensor_get(result, y.data(), 0, y.size() * sizeof(float));
  double error = 0, norm = 0;
  for (int64_t n = 0; n < m.N; ++n) {
    decode(bytes.data() + size_t(n) * ggml_row_size(GGML_TYPE_Q4_K, m.K), row.data(), m.K);
    double sum = 0;
    for (int64_t k = 0; k < m.K; ++k) sum += double(row[size_t(k)]) * double(x[size_t(k)]);
    error += (double(y[size_t(n)]) - sum) * (double(y[size_t(n)]) - sum);
    norm += sum * sum;
  }
  return std::sqrt(error / norm);
}

void bench(const Options& options) {
  const lacuna::model::LinearLayers shape = lacuna::model::linear_layers(options.shape);
  const std::vector<Matrix> matrices = matrices_of(shape);
  const size_t per_layer = matrices.size();
  const size_t count = per_layer * size_t(options.layers > 0 ? options.layers : shape.n_layers);
  Weights random;
  std::vector<std::vector<char>> bytes;
  for (const Matrix& m : matrices) {
    if (m.K % 256 != 0) throw Error("{}: K = {} of {} is no multiple of 256", options.shape, m.K, m.name);
    bytes.push_back(random.draw(m));
  }

  const Context weight_context = make_context(count, false), context = make_context(2 * count + 8, true);
  std::map<int64_t, std::pair<ggml_tensor*, std::vector<float>>> inputs;  // one vector for each K
  Rng rng(2);
  for (const Matrix& m : matrices) {
    auto& [tensor, x] = inputs[m.K];
    if (tensor != nullptr) continue;
    tensor = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, m.K);
    x.resize(size_t(m.K));
    for (float& value : x) value = float(rng.normal());
  }
  std::vector<ggml_tensor*> weights;
  for (size_t i = 0; i < count; ++i) {
    const Matrix& m = matrices[i % per_layer];
    weights.push_back(ggml_new_tensor_2d(weight_context.get(), GGML_TYPE_Q4_K, m.K, m.N));
    ggml_set_name(weights.back(), m.name.c_str());
  }
  allocate(weight_context.get(), buffer_type(options.form, options.device), "weights");
  fill(weights, per_layer, bytes, options);

  ggml_cgraph* graph = ggml_new_graph_custom(context.get(), 2 * count, /*grads=*/false);
  std::vector<ggml_tensor*> results;
  int64_t read = 0;
  for (size_t i = 0; i < count; ++i) {
    results.push_back(ggml_mul_mat(context.get(), weights[i], inputs.at(matrices[i % per_layer].K).first));
    ggml_build_forward_expand(graph, results.back());
    read += int64_t(bytes[i % per_layer].size());
  }
  allocate(context.get(), buffer_type("plain", options.device), "inputs and outputs");
  for (const auto& [K, input] : inputs)
    ggml_backend_tensor_set(input.first, input.second.data(), 0, input.second.size() * sizeof(float));

  ggml_backend_t backend = nullptr;
#ifdef GGML_LINEAR_CUDA
  if (options.on_cuda()) backend = ggml_backend_cuda_init(0);
#endif
  if (!options.on_cuda()) {
    backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, options.threads);
  }
  if (backend == nullptr) throw Error("ggml has no backend for --device {} here", options.device);
#ifndef GGML_LINEAR_IK
  ggml_threadpool_params params = ggml_threadpool_params_default(options.threads);
  ggml_threadpool_t pool = ggml_threadpool_new(&params);
  if (!options.on_cuda()) ggml_backend_cpu_set_threadpool(backend, pool);
  for (const ggml_tensor* result : results)
    if (!ggml_backend_supports_op(backend, result))
      throw Error("ggml cannot run the product of {}", ggml_get_name(result));
#endif
  // Several in a row on a device, so that its start and end do not count.
  const int at_once = options.on_cuda() ? 8 : 1;
  const auto run = [&] {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < at_once; ++i)
      if (ggml_backend_graph_compute_async(backend, graph) != GGML_STATUS_SUCCESS)
        throw Error("ggml could not run the graph");
    ggml_backend_synchronize(backend);
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() / at_once;
  };
  for (int i = 0; i < (options.on_cuda() ? 4 : 1); ++i) run();
  double worst = 0;
  for (size_t i = 0; i < per_layer; ++i) {
    const size_t last = count - per_layer + i;  // a copy: copies are checked with it
    const double found = deviation(matrices[i], bytes[i], inputs.at(matrices[i].K).second, results[last]);
    if (!(found <= kTolerance))
      throw Error("{}: the result is off by {:.3g} of its size, at most {} allowed; nothing was timed",
                  matrices[i].name, found, kTolerance);
    worst = std::max(worst, found);
  }
  std::vector<double> times;
  for (int i = 0; i < options.runs; ++i) times.push_back(run());
  std::sort(times.begin(), times.end());
  const double median = 0.5 * (times[times.size() / 2] + times[(times.size() - 1) / 2]);
#ifdef GGML_LINEAR_IK
  const std::string type = ggml_type_name(weights[0]->type);
#else
  const std::string type = ggml_backend_buft_name(ggml_backend_buffer_get_type(weights[0]->buffer));
  ggml_threadpool_free(pool);
#endif
  ggml_backend_free(backend);
  fmt::print(
      "{{\"bench\": \"linear\", \"shape\": \"{}\", \"layout\": \"q4_K\", \"form\": \"{}\", \"buffer_type\": \"{}\", "
      "\"device\": \"{}\", \"layers\": {}, \"threads\": {}, "
      "\"median_ms\": {:.4f}, \"min_ms\": {:.4f}, \"max_ms\": {:.4f}, \"runs\": {}, \"bytes\": {}, \"gb_s\": {:.3f}, "
      "\"checked\": true, "
      "\"deviation\": {:.5f}}}\n",
      options.shape, options.form, type, options.device, count / per_layer, options.on_cuda() ? 1 : options.threads,
      median, times.front(), times.back(), options.runs, read, double(read) / median / 1e6, worst);
}

constexpr const char* kUsage =
    "usage: ggml_linear [--shape NAME | --single NxK] [--layers N] [--device cpu|cuda] [--form repacked|plain] "
    "[--threads N] [--runs "
    "R]\n"
    "Times the linear layers of one token in q4_K on ggml's CPU or CUDA backend and prints one JSON object.\n"
    "  --shape NAME    a shape that `lacuna synth` knows (default llama-3.2-1b)\n"
    "  --single NxK    copies of one matrix of N outputs and K inputs, more than a cache holds\n"
    "  --layers N      instead of the shape's own number\n"
    "  --device NAME   cpu (default), or cuda where ggml was built with it\n"
    "  --form FORM     of cpu; repacked: as the program repacks weights when it loads them (default); plain: as the "
    "file has "
    "them\n"
    "  --threads N     default 2\n"
    "  --runs R        timed runs, default 10; the median is printed\n";

int positive(const std::string& flag, const char* text) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*text == '\0' || *end != '\0' || value < 1 || value > 1000000)
    throw Error("{} {}: expected a number from 1 to 1000000", flag, text);
  return int(value);
}

std::optional<Options> parse(int argc, char** argv) {
  Options options;
  std::string of_cpu;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help" || flag == "-h") return std::nullopt;
    if (i + 1 == argc) throw Error("{}: unknown, or its value is missing; see --help", flag);
    const char* value = argv[++i];
    if (flag == "--threads" || flag == "--form") of_cpu = flag;
    if (flag == "--shape" || flag == "--single") {
      options.shape = value;
    } else if (flag == "--form") {
      options.form = value;
      if (options.form != "repacked" && options.form != "plain")
        throw Error("--form {}: expected repacked or plain", value);
    } else if (flag == "--device") {
      options.device = value;
      if (options.device != "cpu" && options.device != "cuda") throw Error("--device {}: expected cpu or cuda", value);
    } else if (flag == "--layers") {
      options.layers = positive(flag, value);
    } else if (flag == "--threads") {
      options.threads = positive(flag, value);
    } else if (flag == "--runs") {
      options.runs = positive(flag, value);
    } else {
      throw Error("{}: unknown; see --help", flag);
    }
  }
  if (options.on_cuda() && !of_cpu.empty()) throw Error("{} is of --device cpu; leave it out", of_cpu);
  if (options.form.empty()) options.form = options.on_cuda() ? "plain" : "repacked";
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::optional<Options> options = parse(argc, argv);
    if (!options) {
      std::fputs(kUsage, stdout);
      return 0;
    }
    bench(*options);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "ggml_linear: {}\n", error.what());
    return 1;
  }
}
