// src/cli/image_linear.cc - `image linear`: time of linear layers on tensor cores (QuaSpa, Table 1 and Figure 8).
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>

#include "cli/command.h"
#include "cli/image.h"
#include "core/e4m3.h"
#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/cuda/tensor_core.h"
#include "layout/layout.h"
#include "layout/tensor_core.h"
#include "layout/two_of_four.h"

namespace lacuna::cli {
namespace {

using cuda::Accumulate;
using cuda::WriteBack;

/// Tokens, outputs, inputs.
struct Problem {
  int64_t M = 0, N = 0, K = 0;
};
/// QuaSpa's Table 1.
constexpr Problem kPaper[] = {
    {4096, 3072, 3072},   {4096, 12288, 3072}, {4096, 3072, 12288},  {6144, 3072, 3072},
    {6144, 12288, 3072},  {6144, 3072, 12288}, {16384, 3072, 3072},  {16384, 12288, 3072},
    {16384, 3072, 12288}, {18432, 3072, 3072}, {18432, 12288, 3072}, {18432, 3072, 12288},
};
constexpr std::array kAccumulates = {std::pair{"fast", Accumulate::fast}, std::pair{"full", Accumulate::full}};
constexpr std::array kWriteBacks = {std::pair{"staged", WriteBack::staged}, std::pair{"direct", WriteBack::direct},
                                    std::pair{"separate", WriteBack::separate}};
constexpr std::array kKernels = {std::pair{"best", cuda::TensorCoreKernel::best},
                                 std::pair{"mma", cuda::TensorCoreKernel::mma},
                                 std::pair{"wgmma", cuda::TensorCoreKernel::wgmma}};

struct Options : Common {
  int gpu = 0;
  std::vector<std::string> shapes, layouts = {"f8", "nm24_f8"}, accumulates = {"fast"}, write_backs = {"staged"};
  std::string kernel = "best";
  bool plans = false, skewed = false;
  int groups = 0;
  int runs = 15;
  uint64_t seed = 0;
};

template <class Table>
auto named(const Table& table, const std::string& name) {
  for (const auto& [key, value] : table)
    if (name == key) return value;
  throw Error("no {} here", name);
}

Problem parse(const std::string& text) {
  Problem out;
  char left = 0;
  if (std::sscanf(text.c_str(), "%ldx%ldx%ld%c", &out.M, &out.N, &out.K, &left) != 3 || out.M < 1 || out.N < 1 ||
      out.K < 1 || std::max({out.M, out.N, out.K}) > 1 << 20)
    throw Error("--shape {}: expected MxNxK (tokens, outputs, inputs), each from 1 to 1048576", text);
  return out;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Standard normal, a stream a row.
std::vector<float> normal_rows(int64_t rows, int64_t columns, uint64_t seed, ThreadPool& pool) {
  std::vector<float> out(size_t(rows * columns));
  pool.parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      Rng rng(seed * 0x9e3779b9u + uint64_t(r));
      for (int64_t c = 0; c < columns; ++c) out[size_t(r * columns + c)] = float(rng.normal());
    }
  });
  return out;
}

std::vector<uint8_t> largest_of_four(std::span<const float> w, int64_t N, int64_t K, ThreadPool& pool) {
  std::vector<uint8_t> keep(w.size());
  pool.parallel_for(N, 8, [&](int64_t begin, int64_t end) {
    std::vector<float> score(static_cast<size_t>(K));
    for (int64_t n = begin; n < end; ++n) {
      const auto at = size_t(n * K);
      for (size_t k = 0; k < score.size(); ++k) score[k] = std::fabs(w[at + k]);
      layout::keep_largest(score, std::span(keep).subspan(at, score.size()));
    }
  });
  return keep;
}

/// Rows of tokens at which groups begin, and the last one's end: even shares, or such as 1, 1/2, 1/3, ...
std::vector<int32_t> group_offsets(int64_t M, int groups, bool skewed) {
  std::vector<double> until = {0};
  for (int g = 0; g < groups; ++g) until.push_back(until.back() + (skewed ? 1.0 / (g + 1) : 1.0));
  std::vector<int32_t> out;
  for (const double share : until) out.push_back(int32_t(std::lround(double(M) * share / until.back())));
  return out;
}

/// One problem in one layout: operands in several copies, larger together than the device's cache.
class Case {
 public:
  Case(cuda::Device& device, ThreadPool& pool, const Options& options, Problem problem, const layout::Layout& layout)
      : device_(device),
        stream_(device),
        problem_(problem),
        layout_(layout),
        runs_(options.runs),
        groups_(options.groups) {
    const auto [M, outputs, K] = problem;
    const int64_t N = outputs * std::max(groups_, 1);  // rows of the weight
    const std::vector<float> w = normal_rows(N, K, options.seed + 1, pool);
    bytes_.resize(size_t(layout.size_bytes({N, K})));
    const bool sparse = cuda::operation_of(layout).sparse;
    if (layout.family == layout::Family::tensor_core)
      layout::encode_tensor_core(layout, {N, K}, w, sparse ? largest_of_four(w, N, K, pool) : std::vector<uint8_t>(),
                                 bytes_, &pool);
    else
      for (int64_t n = 0; n < N; ++n)
        layout.encode_row(layout, std::span(w).subspan(size_t(n * K), size_t(K)), {},
                          std::span(bytes_).subspan(size_t(n * layout.row_bytes(K)), size_t(layout.row_bytes(K))));
    const cuda::TensorCoreTiles tiles = cuda::make_tensor_core_tiles(layout, {N, K}, bytes_, &pool);
    eight_bits_ = tiles.operation.eight_bits;

    const int64_t distinct = std::min<int64_t>(M, 512);  // tokens
    const std::vector<float> x = normal_rows(distinct, K, options.seed + 2, pool);
    std::vector<bf16> rows(size_t(M * K));
    for (int64_t m = 0; m < M; ++m)
      for (int64_t k = 0; k < K; ++k) rows[size_t(m * K + k)] = to_bf16(x[size_t(m % distinct * K + k)]);
    stride_ = (K * (eight_bits_ ? 1 : 2) + 15) / 16 * 16;
    const int64_t one = int64_t(tiles.blocks.size()) + M * stride_;
    const int64_t copies = std::clamp<int64_t>(4 * device.info().cache_bytes / one + 1, 2, 8);
    x_ = cuda::Buffer(device, M * K * 2, "tokens");
    x_.upload(std::as_bytes(std::span(rows)));
    for (int64_t i = 0; i < copies; ++i) {
      weights_.emplace_back(device, tiles, "weights");
      codes_.emplace_back(device, M * stride_, "quantized tokens");
      scales_.emplace_back(device, M * 4, "scales of tokens");
    }
    y_ = cuda::Buffer(device, M * outputs * 2, "results");
    if (groups_ > 0) {
      offsets_ = group_offsets(M, groups_, options.skewed);
      on_offsets_ = cuda::Buffer(device, int64_t(offsets_.size() * sizeof(int32_t)), "groups of tokens");
      on_offsets_.upload(std::as_bytes(std::span(offsets_)));
    }
    if (eight_bits_) {
      for (int64_t i = 0; i < copies; ++i) quantize(i);
      stream_.synchronize();
    } else {
      if (stride_ != K * 2) throw Error("image linear: K = {} must be a multiple of 8 for {}", K, layout.name);
      for (cuda::Buffer& codes : codes_) codes.upload(std::as_bytes(std::span(rows)));
    }
  }

  /// Median and spread of one quantization of the tokens, ms.
  std::vector<double> time_quantization() {
    return eight_bits_ ? time([&](int64_t i) { quantize(i); }) : std::vector<double>();
  }

  std::vector<double> time_product(cuda::TensorCoreArgs args) {
    return time([&](int64_t i) { product(args, i); });
  }

  cuda::TensorCoreArgs arguments(const Options& options, Accumulate accumulate, WriteBack write_back) {
    cuda::TensorCoreArgs out;
    out.accumulate = accumulate;
    out.write_back = write_back;
    out.kernel = named(kKernels, options.kernel);
    if (write_back == WriteBack::separate && sums_.bytes() == 0)
      sums_ = cuda::Buffer(device_, problem_.M * problem_.N * 4, "sums");
    out.workspace = sums_.as<float>();
    product(out, 0);  // checks the arguments; fills them for explain
    stream_.synchronize();
    return out;
  }
  std::string explain(const cuda::TensorCoreArgs& args) { return explain_tensor_core(device_.info(), args); }

  /// ||y - reference|| / ||reference|| of sampled outputs; the reference in double precision from the codes and scales
  /// that the kernel reads.
  double error(cuda::TensorCoreArgs args) {
    const auto [M, outputs, K] = problem_;
    const int64_t rows = outputs * std::max(groups_, 1);
    y_.fill(0xff);  // NaN
    product(args, 0);
    stream_.synchronize();
    std::vector<bf16> y(size_t(M * outputs));
    y_.download(std::as_writable_bytes(std::span(y)));
    std::vector<std::byte> codes(size_t(M * stride_));
    codes_[0].download(codes);
    std::vector<float> scale(static_cast<size_t>(M));
    scales_[0].download(std::as_writable_bytes(std::span(scale)));
    std::vector<float> row(static_cast<size_t>(K));
    Rng rng(3);
    double squares = 0, of_reference = 0;
    constexpr int kRows = 48, kTokens = 24;
    for (int i = 0; i < kRows; ++i) {
      const int64_t n = i == 0 ? rows - 1 : int64_t(rng.below(uint64_t(rows)));
      layout_.decode(layout_, {rows, K}, {}, bytes_, n, 1, row.data());
      const int64_t first = groups_ > 0 ? offsets_[size_t(n / outputs)] : 0;
      const int64_t end = groups_ > 0 ? offsets_[size_t(n / outputs) + 1] : M;
      for (int j = 0; j < kTokens && first < end; ++j) {
        const int64_t m = j == 0 ? end - 1 : first + int64_t(rng.below(uint64_t(end - first)));
        double sum = 0;
        for (int64_t k = 0; k < K; ++k) sum += double(row[size_t(k)]) * input(codes, m, k);
        if (eight_bits_) sum *= double(scale[size_t(m)]);
        const double off = double(to_float(y[size_t(m * outputs + n % outputs)])) - sum;
        squares += off * off, of_reference += sum * sum;
      }
    }
    return std::sqrt(squares / of_reference);
  }

 private:
  double input(const std::vector<std::byte>& codes, int64_t m, int64_t k) const {
    if (eight_bits_) return to_float(e4m3{uint8_t(codes[size_t(m * stride_ + k)])});
    bf16 value;
    std::memcpy(&value, &codes[size_t(m * stride_ + 2 * k)], sizeof value);
    return to_float(value);
  }
  void quantize(int64_t i) {
    const auto at = size_t(i) % codes_.size();
    launch_quantize_tokens(device_, stream_,
                           {.type = cuda::Element::bf16,
                            .x = x_.data(),
                            .stride = problem_.K,
                            .M = problem_.M,
                            .K = problem_.K,
                            .codes = codes_[at].data(),
                            .code_stride = stride_,
                            .scale = scales_[at].as<float>()});
  }
  void product(cuda::TensorCoreArgs& args, int64_t i) {
    const auto at = size_t(i) % codes_.size();
    args.w = weights_[at].weights();
    args.x = codes_[at].data(), args.x_stride = stride_;
    args.x_scale = eight_bits_ ? scales_[at].as<float>() : nullptr;
    args.M = problem_.M;
    args.y = y_.data(), args.y_stride = problem_.N;
    args.groups = groups_, args.offsets = groups_ > 0 ? on_offsets_.as<int32_t>() : nullptr;
    launch_tensor_core(device_, stream_, args);
  }
  /// Of one launch, from graphs of several.
  template <class Launch>
  std::vector<double> time(const Launch& launch) {
    constexpr int64_t kLaunches = 8, kWarmUps = 3;
    cuda::Graph graph(stream_, [&] {
      for (int64_t i = 0; i < kLaunches; ++i) launch(i);
    });
    cuda::Stopwatch watch;
    std::vector<double> out;
    for (int64_t run = -kWarmUps; run < runs_; ++run) {
      watch.start(stream_);
      graph.launch(stream_);
      const double ms = watch.stop_ms(stream_) / double(kLaunches);
      if (run >= 0) out.push_back(ms);
    }
    return out;
  }

  cuda::Device& device_;
  cuda::Stream stream_;
  Problem problem_;
  const layout::Layout& layout_;
  int runs_;
  bool eight_bits_ = false;
  int64_t stride_ = 0;
  std::vector<std::byte> bytes_;
  int groups_;
  std::vector<int32_t> offsets_;
  cuda::Buffer x_, y_, sums_, on_offsets_;
  std::vector<cuda::TensorCoreMatrix> weights_;
  std::vector<cuda::Buffer> codes_, scales_;
};

/// A result further off would be no rounding: bf16 of y gives 2e-3, 14 bits of running sums no more than as much again
/// at the paper's K.
constexpr double kMostError = 2e-2;

void report(const Options& options, const cuda::Device& device, Case& problem, Problem shape,
            const layout::Layout& layout) {
  const std::vector<double> quantization = problem.time_quantization();
  const bool eight_bits = cuda::operation_of(layout).eight_bits;
  for (const std::string& accumulate : options.accumulates) {
    if (!eight_bits && accumulate == "full") continue;  // bf16 has one kind of sums
    for (const std::string& write_back : options.write_backs) {
      cuda::TensorCoreArgs args =
          problem.arguments(options, named(kAccumulates, accumulate), named(kWriteBacks, write_back));
      std::vector<const cuda::TensorCorePlan*> plans = {nullptr};
      if (options.plans && write_back == "staged" && options.kernel != "mma") {
        plans.clear();
        for (const cuda::TensorCorePlan& plan : tensor_core_plans(cuda::operation_of(layout), args.accumulate))
          plans.push_back(&plan);
        if (plans.empty()) throw Error("--plans: this build has no wgmma kernel; build it for compute capability 9.0");
      }
      for (const cuda::TensorCorePlan* plan : plans) {
        args.plan = plan;
        const double error = problem.error(args);
        if (!(error < kMostError))
          throw Error("{} {} x {} x {}: the result is off by {:.2e} of itself; the kernel is wrong here", layout.name,
                      shape.M, shape.N, shape.K, error);
        const std::vector<double> ms = problem.time_product(args);
        const double tflops = 2e-9 * double(shape.M) * double(shape.N) * double(shape.K) / median(ms);
        if (options.json)
          print_json({{"bench", "image linear"},
                      {"layout", layout.name},
                      {"M", shape.M},
                      {"N", shape.N},
                      {"K", shape.K},
                      {"groups", options.groups},
                      {"skewed", options.skewed},
                      {"accumulate", accumulate},
                      {"write_back", write_back},
                      {"kernel", problem.explain(args)},
                      {"median_ms", median(ms)},
                      {"min_ms", *std::ranges::min_element(ms)},
                      {"max_ms", *std::ranges::max_element(ms)},
                      {"quantize_ms", quantization.empty() ? Json() : Json(median(quantization))},
                      {"tflops", tflops},
                      {"relative_error", error},
                      {"runs", options.runs},
                      {"device", device.info().name},
                      {"driver", device.info().driver}});
        else
          print(
              fmt::format("{:<10} {:>6} {:>6} {:>6} {:>9.4f} {:>19} {:>9} {:>8.0f} {:>9.1e}  {}\n", layout.name,
                          shape.M, shape.N, shape.K, median(ms),
                          fmt::format("{:.4f} .. {:.4f}", *std::ranges::min_element(ms), *std::ranges::max_element(ms)),
                          quantization.empty() ? "-" : fmt::format("{:.4f}", median(quantization)), tflops, error,
                          problem.explain(args)));
      }
    }
  }
}

int run(const Options& options) {
  if (options.device != "cuda") throw Error("image linear measures kernels of CUDA devices: give --device cuda");
  std::vector<Problem> problems(std::begin(kPaper), std::end(kPaper));
  if (!options.shapes.empty()) problems.clear();
  for (const std::string& text : options.shapes) problems.push_back(parse(text));
  for (const Problem& problem : problems)
    if (options.groups > 0 && problem.N % cuda::kTileRowsOfWeights != 0)
      throw Error("--groups: {} outputs of a group; they must be a multiple of {}", problem.N,
                  cuda::kTileRowsOfWeights);
  if (options.skewed && options.groups == 0) throw Error("--skewed needs --groups");
  std::vector<const layout::Layout*> layouts;
  for (const std::string& name : options.layouts) {
    layouts.push_back(&layout::get(layout_named("--layout", name)));
    cuda::operation_of(*layouts.back());
  }
  if (options.accumulates == std::vector<std::string>{"full"})
    for (const layout::Layout* layout : layouts)
      if (!cuda::operation_of(*layout).eight_bits)
        throw Error("--accumulate full is of e4m3; {} has one kind of sums: leave it or the flag out", layout->name);
  ThreadPool pool(options.threads);
  cuda::Device device({options.gpu, 0});
  if (options.plans && device.info().major != 9)
    throw Error("--plans are of the wgmma kernel, which {} does not run; leave the flag out", device.info().name);
  if (!options.json)
    print(fmt::format(
        "{}; ms of a product and of the quantization of its tokens; TFLOP/s as if dense\n{:<10} {:>6} {:>6} "
        "{:>6} {:>9} {:>19} {:>9} {:>8} {:>9}  {}\n",
        device.info().name, "layout", "M", "N", "K", "median", "min .. max", "quantize", "TFLOP/s", "error", "kernel"));
  for (const Problem& problem : problems)
    for (const layout::Layout* layout : layouts) {
      Case measured(device, pool, options, problem, *layout);
      report(options, device, measured, problem, *layout);
    }
  return 0;
}

template <class Table>
CLI::IsMember keys_of(const Table& table) {
  std::vector<std::string> names;
  for (const auto& row : table) names.emplace_back(row.first);
  return CLI::IsMember(names);
}

}  // namespace

Action add_image_linear(CLI::App& group) {
  auto options = std::make_shared<Options>();
  CLI::App* command = group.add_subcommand(
      "linear",
      "Time of linear layers on the tensor cores of a CUDA device: FP8 with a scale a token, 2:4, both, bf16. Random "
      "normal numbers, graphs of launches, results checked first.");
  command->add_option("--shape", options->shapes, "tokens, outputs, inputs; default: the twelve of QuaSpa's Table 1")
      ->delimiter(',')
      ->type_name("MxNxK");
  command->add_option("--layout", options->layouts, "of the weights: f8, nm24_f8, nm24_bf16, bf16")
      ->delimiter(',')
      ->check(layout_name())
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option("--accumulate", options->accumulates, "sums of e4m3: fast (in the tensor core), full (in float32)")
      ->delimiter(',')
      ->check(keys_of(kAccumulates))
      ->capture_default_str()
      ->type_name("KIND");
  command
      ->add_option("--write-back", options->write_backs,
                   "staged (through shared memory), direct (strided), separate (scaling and transposition as launches)")
      ->delimiter(',')
      ->check(keys_of(kWriteBacks))
      ->capture_default_str()
      ->type_name("KIND");
  command->add_option("--kernel", options->kernel, "best, mma (any device from 8.0 on; e4m3: 8.9), wgmma (9.0)")
      ->check(keys_of(kKernels))
      ->capture_default_str()
      ->type_name("NAME");
  command->add_flag("--plans", options->plans, "every shape of blocks that the wgmma kernel has, not the default one");
  command
      ->add_option("--groups", options->groups,
                   "grouped: the tokens are shared out to so many groups (experts), each with outputs of its own")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str()
      ->type_name("N");
  command->add_flag("--skewed", options->skewed, "group i has a share of 1/i of the tokens, not the same share");
  command->add_option("--runs", options->runs, "timed repetitions of a graph of 8 launches; the median is reported")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str()
      ->type_name("N");
  add_seed(*command, options->seed, "start of the random numbers");
  command->add_option("--gpu", options->gpu, "number of the CUDA device")
      ->check(CLI::Range(0, 1023))
      ->capture_default_str()
      ->type_name("N");
  add_common(*command, *options);
  return [options] { return run(*options); };
}

}  // namespace lacuna::cli
