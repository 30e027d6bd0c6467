// src/kernels/cuda/tensor_core.cc - arguments of the product on tensor cores, and the choice of a kernel.
#include "kernels/cuda/tensor_core.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/cuda/tensor_core_few.h"
#include "kernels/cuda/tensor_core_mma.h"
#include "kernels/cuda/tensor_core_table.h"
#include "kernels/cuda/tensor_core_wgmma.h"

namespace lacuna::cuda {

namespace {

std::string_view words(Operation operation) {
  if (operation.eight_bits) return operation.sparse ? "2:4 e4m3" : "e4m3";
  return operation.sparse ? "2:4 bf16" : "bf16";
}

int64_t outputs_of_token(const TensorCoreArgs& a) { return a.groups > 0 ? a.w.N / a.groups : a.w.N; }

bool is_aligned(const void* address, int64_t bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

void check_weights(const TensorCoreWeights& w) {
  if (w.K < 0) throw Error("weights of K = {}", w.K);
  if (w.K > 0 && w.blocks == nullptr) throw Error("a product on tensor cores needs memory of the weight");
  if (!is_aligned(w.blocks, 128)) throw Error("blocks of a weight must be aligned to 128 bytes");
  if (w.operation.eight_bits != (w.scale != nullptr))
    throw Error("{} weights {} a scale of each output", words(w.operation), w.scale == nullptr ? "need" : "have not");
}

void check_tokens(const TensorCoreArgs& a) {
  constexpr int64_t kMost = int64_t{1} << 24;  // kernels count places and tiles in 32 bits
  const int64_t row_bytes = a.w.K * (a.w.operation.eight_bits ? 1 : 2);
  if (std::max({a.M, a.w.N, a.w.K}) > kMost)
    throw Error("{} tokens, {} outputs and {} inputs in one product; at most {} of each", a.M, a.w.N, a.w.K, kMost);
  if (a.x == nullptr && row_bytes > 0) throw Error("a product on tensor cores needs memory of x");
  if (!is_aligned(a.x, 16) || a.x_stride % 16 != 0)
    throw Error("rows of x must be aligned to 16 bytes; they are {} bytes apart", a.x_stride);
  if (a.x_stride < row_bytes) throw Error("rows of x {} bytes apart hold less than {}", a.x_stride, row_bytes);
  if (a.w.operation.eight_bits != (a.x_scale != nullptr))
    throw Error("tokens of {} {} scales", words(a.w.operation), a.x_scale == nullptr ? "need" : "have no");
}

void check_groups(const TensorCoreArgs& a) {
  if (a.groups < 0) throw Error("{} groups of tokens", a.groups);
  if ((a.groups > 0) != (a.offsets != nullptr)) throw Error("groups of tokens need offsets, and offsets groups");
  if (a.groups > 0 && a.w.N % (a.groups * kTileRowsOfWeights) != 0)
    throw Error("{} outputs are not {} groups of a multiple of {} each", a.w.N, a.groups, kTileRowsOfWeights);
}

void check_results(const TensorCoreArgs& a) {
  const int64_t element = bytes_of(a.type), outputs = outputs_of_token(a);
  if (a.y == nullptr) throw Error("a product on tensor cores needs memory of y");
  if (!is_aligned(a.y, element) || !is_aligned(a.add, element))
    throw Error("y and what is added must be aligned to their {}-byte values", element);
  if (a.y_stride < outputs) throw Error("rows of y {} values apart hold less than {} outputs", a.y_stride, outputs);
  if ((a.gate != nullptr) != (a.add != nullptr)) throw Error("gate and add go together: y = add + gate * (...)");
  if (a.activation_from < 0 || a.activation_from % kTileRowsOfWeights != 0)
    throw Error("an activation of outputs from {} on; it must be a multiple of {}", a.activation_from,
                kTileRowsOfWeights);
  if (a.write_back == WriteBack::separate && a.workspace == nullptr)
    throw Error("a product whose scaling and transposition are launches of their own needs a workspace");
}

bool runs_few(const TensorCoreArgs& a) {
  return a.M <= kMostFewTokens && !a.w.operation.sparse && a.groups == 0 && a.write_back != WriteBack::separate;
}

/// All but best. Throws Error where the device or this build does not have it.
TensorCoreKernel kernel_of(const DeviceInfo& device, const TensorCoreArgs& a) {
  if (a.kernel == TensorCoreKernel::few && !runs_few(a))
    throw Error("the kernel of few tokens runs up to {} of them by dense weights, without groups; not {} tokens by {}",
                kMostFewTokens, a.M, words(a.w.operation));
  const bool is_free = a.kernel == TensorCoreKernel::best && a.plan == nullptr && a.write_back == WriteBack::staged;
  if (a.kernel == TensorCoreKernel::few || (is_free && runs_few(a))) return TensorCoreKernel::few;
#if LACUNA_HAVE_SM90A
  const bool has_wgmma = device.major == 9;
#else
  const bool has_wgmma = false;
#endif
  if (a.kernel == TensorCoreKernel::wgmma && !has_wgmma)
    throw Error("{} (compute capability {}.{}) does not run the wgmma kernel, which this build may not have",
                device.name, device.major, device.minor);
  if (a.kernel != TensorCoreKernel::mma && has_wgmma) return TensorCoreKernel::wgmma;
  const int least = a.w.operation.eight_bits ? 89 : 80;
  if (10 * device.major + device.minor < least)
    throw Error("{} has compute capability {}.{}; products of {} weights need {}.{} or later", device.name,
                device.major, device.minor, words(a.w.operation), least / 10, least % 10);
  return TensorCoreKernel::mma;
}

/// What staging takes: 16-bit results.
WriteBack write_back_of(const TensorCoreArgs& a) {
  return a.write_back == WriteBack::staged && a.type == Element::f32 ? WriteBack::direct : a.write_back;
}

TensorCorePlan plan_of(const DeviceInfo& device, const TensorCoreArgs& a) {
  const std::span<const TensorCorePlan> plans = tensor_core_plans(a.w.operation, a.accumulate);
  if (a.plan != nullptr && std::ranges::count(plans, *a.plan) == 0)
    throw Error("the wgmma kernel has no plan of {} for {} weights", describe(*a.plan), words(a.w.operation));
  if (write_back_of(a) != WriteBack::staged) return plans.front();
  if (a.plan != nullptr) return *a.plan;
  return default_plan(device, a.w.operation, a.accumulate, a.M, outputs_of_token(a), a.groups);
}

void check_plan(const TensorCoreArgs& a, TensorCoreKernel kernel) {
  if (kernel != TensorCoreKernel::wgmma && a.plan != nullptr)
    throw Error("a plan of {} is the wgmma kernel's, but the {} kernel runs", describe(*a.plan),
                kernel == TensorCoreKernel::mma ? "mma" : "few tokens'");
}

}  // namespace

TensorCoreMatrix::TensorCoreMatrix(Device& device, const TensorCoreTiles& tiles, std::string_view what)
    : blocks_(device, int64_t(tiles.blocks.size()), what),
      scale_(device, int64_t(tiles.scale.size() * sizeof(float)), what) {
  blocks_.upload(tiles.blocks);
  scale_.upload(std::as_bytes(std::span(tiles.scale)));
  weights_ = {.operation = tiles.operation,
              .N = tiles.shape.N,
              .K = tiles.shape.K,
              .blocks = blocks_.data(),
              .scale = tiles.operation.eight_bits ? scale_.as<float>() : nullptr};
}

#if !LACUNA_HAVE_SM90A
std::span<const TensorCorePlan> tensor_core_plans(Operation, Accumulate) { return {}; }
#endif

TensorCorePlan default_plan(const DeviceInfo& device, Operation operation, Accumulate accumulate, int64_t M, int64_t N,
                            int groups) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  // Rounds of blocks times what one takes: on an H200 blocks of 192 tokens take 0.81 of the time of 256, halves of a
  // split last round 0.84 (e4m3) to 0.98 (2:4 e4m3) and quarters 0.77 (taken as 0.86 and 0.67), since their stages
  // are short of the copies' latency. Where costs are equal, as with 6144 x 3072, the wider tile is as fast or 2%
  // faster.
  const auto cost = [&](const TensorCorePlan& plan) {
    constexpr int64_t kFixedTokens = 80, kFixedOfPart = 160;
    const int64_t tiles = ceil_div(N, plan.rows * plan.cluster) * ceil_div(M, plan.tokens);
    const int64_t clusters = std::max(device.multiprocessors / plan.cluster, 1);
    const int64_t rounds = tiles / clusters, rest = tiles % clusters;
    const bool full = operation.eight_bits && accumulate == Accumulate::full;
    const int split = groups == 0 && splits_last_round(plan, full) ? split_of_last_round(rounds, rest, clusters) : 1;
    const int64_t last = rest == 0 ? 0 : plan.tokens / split + (split > 1 ? kFixedOfPart : kFixedTokens);
    return plan.rows * (rounds * (plan.tokens + kFixedTokens) + last);
  };
  const std::span<const TensorCorePlan> plans = tensor_core_plans(operation, accumulate);
  if (plans.empty()) return {};
  return *std::ranges::min_element(plans, {}, cost);
}

void launch_tensor_core(const Device& device, Stream& stream, const TensorCoreArgs& args) {
  if (args.M <= 0 || args.w.N <= 0) return;
  check_weights(args.w);
  check_tokens(args);
  check_groups(args);
  check_results(args);
  const TensorCoreKernel kernel = kernel_of(device.info(), args);
  check_plan(args, kernel);
  if (kernel == TensorCoreKernel::few) return launch_tensor_core_few(device, stream, args);
#if LACUNA_HAVE_SM90A
  if (kernel == TensorCoreKernel::wgmma)
    launch_tensor_core_wgmma(device, stream, args, plan_of(device.info(), args));
  else
#endif
    launch_tensor_core_mma(device, stream, args);
  if (args.write_back != WriteBack::separate) return;
  if (args.w.operation.eight_bits) launch_scale_product(device, stream, args);
  launch_transpose_product(device, stream, args);
}

std::optional<TensorCoreProduct> planned_product(const DeviceInfo& device, const TensorCoreArgs& args) {
  TensorCoreArgs free = args;
  free.plan = nullptr;
  if (kernel_of(device, free) != TensorCoreKernel::wgmma || write_back_of(free) != WriteBack::staged || args.w.K == 0)
    return std::nullopt;
  TensorCoreProduct out{.operation = args.w.operation, .N = outputs_of_token(args), .K = args.w.K};
  if (args.w.operation.eight_bits) out.accumulate = args.accumulate;
  out.groups = args.groups, out.M = args.M;
  return out;
}

std::string explain_tensor_core(const DeviceInfo& device, const TensorCoreArgs& args) {
  constexpr std::string_view kWriteBacks[] = {"staged", "direct", "separate"};
  const TensorCoreKernel kernel = kernel_of(device, args);
  check_plan(args, kernel);
  if (kernel == TensorCoreKernel::few)
    return fmt::format("float32 sums of {}, 64 outputs x up to {} tokens", words(args.w.operation), kMostFewTokens);
  const bool wgmma = kernel == TensorCoreKernel::wgmma && args.w.K > 0;
  std::string sums;
  if (args.w.operation.eight_bits)
    sums = args.accumulate == Accumulate::full ? ", full accumulation" : ", fast accumulation";
  return fmt::format("{} of {}, {}{}, {} write-back", wgmma ? "wgmma" : "mma", words(args.w.operation),
                     wgmma ? describe(plan_of(device, args)) : "128 outputs x 128 tokens", sums,
                     kWriteBacks[size_t(wgmma ? write_back_of(args) : args.write_back)]);
}

}  // namespace lacuna::cuda
