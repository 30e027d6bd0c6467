#include "eval/tensor_core_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/e4m3.h"
#include "core/error.h"
#include "core/rng.h"
#include "layout/tensor_core.h"
#include "layout/two_of_four.h"

namespace lacuna::eval {
namespace {

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

std::vector<uint8_t> largest_of_four(std::span<const float> w, layout::Shape shape, ThreadPool& pool) {
  std::vector<uint8_t> keep(w.size());
  pool.parallel_for(shape.N, 8, [&](int64_t begin, int64_t end) {
    std::vector<float> score(static_cast<size_t>(shape.K));
    for (int64_t n = begin; n < end; ++n) {
      const auto at = size_t(n * shape.K);
      for (size_t k = 0; k < score.size(); ++k) score[k] = std::fabs(w[at + k]);
      layout::keep_largest(score, std::span(keep).subspan(at, score.size()));
    }
  });
  return keep;
}

/// Rows of tokens at which groups begin, and the last one's end: even shares, or such as 1, 1/2, 1/3, ...
std::vector<int32_t> group_offsets(const TensorCoreProblem& problem) {
  std::vector<double> until = {0};
  for (int g = 0; g < problem.groups; ++g) until.push_back(until.back() + (problem.skewed ? 1.0 / (g + 1) : 1.0));
  std::vector<int32_t> out;
  for (const double share : until) out.push_back(int32_t(std::lround(double(problem.M) * share / until.back())));
  return out;
}

}  // namespace

RandomWeights random_weights(const layout::Layout& layout, layout::Shape shape, uint64_t seed, ThreadPool& pool) {
  const bool sparse = cuda::operation_of(layout).sparse;
  RandomWeights out{.layout = &layout, .shape = shape, .bytes = {}, .tiles = {}};
  const std::vector<float> w = normal_rows(shape.N, shape.K, seed, pool);
  out.bytes.resize(size_t(layout.size_bytes(shape)));
  if (layout.family == layout::Family::tensor_core) {
    layout::encode_tensor_core(layout, shape, w, sparse ? largest_of_four(w, shape, pool) : std::vector<uint8_t>(),
                               out.bytes, &pool);
  } else {
    const auto row = size_t(layout.row_bytes(shape.K));
    pool.parallel_for(shape.N, 8, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        layout.encode_row(layout, std::span(w).subspan(size_t(n * shape.K), size_t(shape.K)), {},
                          std::span(out.bytes).subspan(size_t(n) * row, row));
    });
  }
  out.tiles = cuda::make_tensor_core_tiles(layout, shape, out.bytes, &pool);
  return out;
}

TensorCoreCase::TensorCoreCase(cuda::Device& device, const RandomWeights& weights, const TensorCoreProblem& problem,
                               uint64_t seed, ThreadPool& pool)
    : device_(device), stream_(device), weights_(weights), problem_(problem) {
  const int64_t M = problem.M, K = problem.K;
  eight_bits_ = weights.tiles.operation.eight_bits;
  stride_ = (K * (eight_bits_ ? 1 : 2) + 15) / 16 * 16;
  const int64_t values = eight_bits_ ? K : stride_ / int64_t(sizeof(bf16));  // of a row of x
  const int64_t distinct = std::min<int64_t>(M, 512);
  const std::vector<float> x = normal_rows(distinct, K, seed, pool);
  std::vector<bf16> rows(size_t(M * values));
  pool.parallel_for(M, 8, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      for (int64_t k = 0; k < K; ++k) rows[size_t(m * values + k)] = to_bf16(x[size_t(m % distinct * K + k)]);
  });
  const int64_t one = int64_t(weights.tiles.blocks.size()) + M * stride_;
  const int64_t copies = std::clamp<int64_t>(4 * device.info().cache_bytes / one + 1, 2, 8);
  for (int64_t i = 0; i < copies; ++i) {
    matrices_.emplace_back(device, weights.tiles, "weights");
    codes_.emplace_back(device, M * stride_, "quantized tokens");
    scales_.emplace_back(device, M * 4, "scales of tokens");
  }
  y_ = cuda::Buffer(device, M * problem.N * 2, "results");
  if (problem.groups > 0) {
    offsets_ = group_offsets(problem);
    on_offsets_ = cuda::Buffer(device, int64_t(offsets_.size() * sizeof(int32_t)), "groups of tokens");
    on_offsets_.upload(std::as_bytes(std::span(offsets_)));
  }
  if (!eight_bits_) {
    for (cuda::Buffer& codes : codes_) codes.upload(std::as_bytes(std::span(rows)));
    return;
  }
  x_ = cuda::Buffer(device, M * K * 2, "tokens");
  x_.upload(std::as_bytes(std::span(rows)));
  for (int64_t i = 0; i < copies; ++i) quantize(i);
  stream_.synchronize();
}

cuda::TensorCoreArgs TensorCoreCase::arguments(cuda::Accumulate accumulate, cuda::WriteBack write_back,
                                               cuda::TensorCoreKernel kernel) {
  cuda::TensorCoreArgs out;
  out.accumulate = accumulate, out.write_back = write_back, out.kernel = kernel;
  if (write_back == cuda::WriteBack::separate && sums_.bytes() == 0)
    sums_ = cuda::Buffer(device_, problem_.M * problem_.N * 4, "sums");
  out.workspace = sums_.as<float>();
  out.M = problem_.M;
  out.w = matrices_.front().weights();
  out.y = y_.data(), out.y_stride = problem_.N;
  out.x = codes_.front().data(), out.x_stride = stride_;
  out.x_scale = eight_bits_ ? scales_.front().as<float>() : nullptr;
  out.groups = problem_.groups, out.offsets = problem_.groups > 0 ? on_offsets_.as<int32_t>() : nullptr;
  launch(out, 0);
  stream_.synchronize();
  return out;
}

std::vector<bf16> TensorCoreCase::results(const cuda::TensorCoreArgs& args) {
  y_.fill(0xff);  // NaN
  launch(args, 0);
  stream_.synchronize();
  std::vector<bf16> y(size_t(problem_.M * problem_.N));
  y_.download(std::as_writable_bytes(std::span(y)));
  return y;
}

double TensorCoreCase::error(const cuda::TensorCoreArgs& args) {
  const int64_t M = problem_.M, outputs = problem_.N, K = problem_.K, N = weights_.shape.N;
  const std::vector<bf16> y = results(args);
  std::vector<std::byte> codes(size_t(M * stride_));
  codes_[0].download(codes);
  std::vector<float> scale(static_cast<size_t>(M));
  if (eight_bits_) scales_[0].download(std::as_writable_bytes(std::span(scale)));
  std::vector<float> row(static_cast<size_t>(K));
  Rng rng(3);
  double squares = 0, of_reference = 0;
  constexpr int kRows = 48, kTokens = 24;
  for (int i = 0; i < kRows; ++i) {
    const int64_t n = i == 0 ? N - 1 : int64_t(rng.below(uint64_t(N)));
    weights_.layout->decode(*weights_.layout, weights_.shape, {}, weights_.bytes, n, 1, row.data());
    const int64_t first = problem_.groups > 0 ? offsets_[size_t(n / outputs)] : 0;
    const int64_t end = problem_.groups > 0 ? offsets_[size_t(n / outputs) + 1] : M;
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

cuda::Graph TensorCoreCase::record(const cuda::TensorCoreArgs& args, int64_t launches) {
  return {stream_, [this, args, launches] {
            for (int64_t i = 0; i < launches; ++i) launch(args, i);
          }};
}

double TensorCoreCase::time(cuda::Graph& graph) {
  cuda::Stopwatch watch;
  watch.start(stream_);
  graph.launch(stream_);
  return watch.stop_ms(stream_);
}

namespace {
constexpr int64_t kLaunches = 8;
}  // namespace

std::vector<double> TensorCoreCase::time_product(const cuda::TensorCoreArgs& args, int runs) {
  return time_runs(record(args, kLaunches), runs);
}

std::vector<double> TensorCoreCase::time_quantization(int runs) {
  if (!eight_bits_) return {};
  return time_runs(cuda::Graph(stream_,
                               [&] {
                                 for (int64_t i = 0; i < kLaunches; ++i) quantize(i);
                               }),
                   runs);
}

std::vector<double> TensorCoreCase::time_runs(cuda::Graph graph, int runs) {
  constexpr int kWarmUps = 3;
  std::vector<double> out;
  for (int run = -kWarmUps; run < runs; ++run) {
    const double ms = time(graph) / double(kLaunches);
    if (run >= 0) out.push_back(ms);
  }
  return out;
}

double TensorCoreCase::input(const std::vector<std::byte>& codes, int64_t m, int64_t k) const {
  if (eight_bits_) return to_float(e4m3{uint8_t(codes[size_t(m * stride_ + k)])});
  bf16 value;
  std::memcpy(&value, &codes[size_t(m * stride_ + 2 * k)], sizeof value);
  return to_float(value);
}

void TensorCoreCase::quantize(int64_t copy) {
  const auto at = size_t(copy) % codes_.size();
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

void TensorCoreCase::launch(cuda::TensorCoreArgs args, int64_t copy) {
  const auto at = size_t(copy) % codes_.size();
  args.w = matrices_[at].weights();
  args.x = codes_[at].data();
  args.x_scale = eight_bits_ ? scales_[at].as<float>() : nullptr;
  launch_tensor_core(device_, stream_, args);
}

double relative_difference(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  if (a.size() != b.size()) throw Error("{} and {} results are compared", a.size(), b.size());
  double squares = 0, of_b = 0;
  if (!a.empty() && std::memcmp(a.data(), b.data(), a.size() * sizeof(bf16)) == 0) {
    for (const bf16 value : b) of_b += double(to_float(value)) * 0;  // NaN where one is
    return of_b;
  }
  for (size_t i = 0; i < a.size(); ++i) {
    const double y = to_float(b[i]), off = double(to_float(a[i])) - y;
    squares += off * off, of_b += y * y;
  }
  return a.empty() ? 0 : std::sqrt(squares / of_b);
}

}  // namespace lacuna::eval
