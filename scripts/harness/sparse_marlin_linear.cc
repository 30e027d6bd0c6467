// scripts/harness/sparse_marlin_linear.cc - the linear layers of one token on Sparse-Marlin's kernel (2:4 sparse
// weights of 4 bits; IST-DASLab/Sparse-Marlin, arXiv:2408.11743): what ours are compared with.
//
// Every matrix of every layer of a known shape (q+k+v, o, gate+up, down; no head) lies in memory of its own, so that
// none is in a cache when it is read; the layers' values are alike. A CUDA graph is one token. The results of all
// layers are compared with a double-precision product before and after the clock. Prints one JSON object for each way
// of scaling: groups of 128 inputs, one scale an output. Built by build_sparse_marlin.sh.
//
// What the kernel reads, found from how it indexes (marlin_cuda_kernel_nm.cu) and PTX's mma.sp.m16n8k32; W: [N, K]:
//   codes   [K/32, N/64, 32 lanes, 4] u32, a code is weight / scale + 8
//   places  [K/32, N/64, 2, 32 lanes] u32, 2 bits a kept weight: its place in its four
//   scales  [K/128, N] f16, in each eight outputs 0 4 1 5 2 6 3 7; or [N] f16
// A block of 64 outputs is four products of 16 rows: row r of product j is output 8 (r % 8) + 4 (r / 8) + j.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/cuda/device.h"
#include "model/shapes.h"

namespace marlin {
// Of the kernel's file, which has no header. prob_n: tokens, prob_m: outputs; groupsize: kept weights, -1: one scale an
// output. Returns 0 where it launched.
int marlin_cuda_2_4(const void* A, const void* B, const void* meta, void* C, void* s, int prob_m, int prob_n,
                    int prob_k, void* workspace, int groupsize, int dev, CUstream_st* stream, int thread_k,
                    int thread_m, int sms, int max_par);
}  // namespace marlin

namespace {

using lacuna::Error;
using lacuna::f16;
using lacuna::Rng;
using lacuna::to_f16;
using lacuna::to_float;

// A weight, partial sums between blocks and the result are rounded to f16: each a relative error of at most 2^-11,
// spread evenly, of terms that do not all have one sign. A wrong place makes it about 1.
constexpr double kTolerance = 0.003;
constexpr int kGroup = 128;
constexpr int64_t kTileK = 32, kTileN = 64;  // of the layout
constexpr int64_t kAlign = 256;
constexpr int kMostParallel = 16;  // locks that the kernel wants for each 128 outputs

/// How the kernel cuts a product up. Its own choice for one token is the first.
struct Tile {
  int k, n;
};
constexpr Tile kTiles[] = {{128, 128}, {64, 256}};

struct Options {
  std::string shape = "llama-2-7b";
  bool on_cuda = true;
  int runs = 50, layers = 0;  // layers 0: as the shape says
};

/// 2:4 weights of 4 bits: scale * (code - 8).
struct Sparse {
  int64_t N, K;
  bool grouped;                 // a scale for each 128 inputs of an output, else for each output
  std::vector<uint8_t> codes;   // [N, K/2]
  std::vector<uint8_t> places;  // [N, K/4], the first kept weight's place in its four, the second's times 4
  std::vector<f16> scales;      // [groups, N]
  int64_t groups() const { return grouped ? K / kGroup : 1; }
  f16 scale(int64_t n, int64_t k) const { return scales[size_t((grouped ? k / kGroup : 0) * N + n)]; }
};

Sparse random_sparse(int64_t N, int64_t K, bool grouped, Rng& rng) {
  constexpr uint8_t kPairs[] = {0 | 1 << 2, 0 | 2 << 2, 0 | 3 << 2, 1 | 2 << 2, 1 | 3 << 2, 2 | 3 << 2};
  Sparse out{N, K, grouped, {}, {}, {}};
  out.codes.resize(size_t(N * K / 2));
  for (uint8_t& code : out.codes) code = uint8_t(rng.next() >> 60);
  out.places.resize(size_t(N * K / 4));
  for (uint8_t& places : out.places) places = kPairs[rng.below(std::size(kPairs))];
  out.scales.resize(size_t(out.groups() * N));
  for (f16& scale : out.scales) scale = to_f16(float(0.001 + 0.009 * rng.uniform()));
  return out;
}

std::vector<double> product(const Sparse& w, std::span<const float> x) {
  std::vector<double> y(size_t(w.N), 0.0);
  for (int64_t n = 0; n < w.N; ++n)
    for (int64_t i = 0; i < w.K / 2; ++i) {
      const int place = w.places[size_t(n * (w.K / 4) + i / 2)] >> (2 * (i % 2)) & 3;
      const int64_t k = 4 * (i / 2) + place;
      y[size_t(n)] += double(to_float(w.scale(n, k))) * (w.codes[size_t(n * (w.K / 2) + i)] - 8) * double(x[size_t(k)]);
    }
  return y;
}

/// As the kernel reads it.
struct Packed {
  std::vector<std::array<uint32_t, 4>> codes;
  std::vector<uint32_t> places;
  std::vector<f16> scales;
};

Packed pack(const Sparse& w) {
  Packed out;
  const int64_t blocks = w.N / kTileN, tiles = w.K / kTileK;
  out.codes.resize(size_t(tiles * blocks * 32));
  out.places.resize(size_t(tiles * blocks * 64));
  for (int64_t n = 0; n < w.N; ++n) {
    const int64_t block = n / kTileN, g = n % kTileN / 8, upper = n % 8 / 4, j = n % 4;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t at = tile * blocks + block;
      for (int64_t c = 0; c < kTileK / 2; ++c) {  // kept weights of the tile
        const uint32_t code = w.codes[size_t(n * (w.K / 2) + tile * (kTileK / 2) + c)];
        const int64_t lane = 4 * g + c % 8 / 2, nibble = 4 * (c % 2) + 2 * upper + c / 8;
        out.codes[size_t(at * 32 + lane)][size_t(j)] |= code << (4 * nibble);
      }
      for (int64_t four = 0; four < kTileK / 4; ++four) {
        const uint32_t places = w.places[size_t(n * (w.K / 4) + tile * (kTileK / 4) + four)];
        const int64_t lane = 4 * g + 2 * (j % 2) + four / 4;
        out.places[size_t(at * 64 + 32 * (j / 2) + lane)] |= places << (16 * upper + 4 * (four % 4));
      }
    }
  }
  out.scales.resize(w.scales.size());
  for (int64_t group = 0; group < w.groups(); ++group)
    for (int64_t n = 0; n < w.N; ++n) {
      const int64_t eighth = w.grouped ? 2 * (n % 4) + n % 8 / 4 : n % 8;
      out.scales[size_t(group * w.N + n / 8 * 8 + eighth)] = w.scales[size_t(group * w.N + n)];
    }
  return out;
}

/// The product as a warp of the kernel takes the packed weights: it walks lanes and registers, not weights. y: [N].
std::vector<double> product_by_lanes(const Packed& packed, int64_t N, int64_t K, bool grouped,
                                     std::span<const float> x) {
  std::vector<double> y(size_t(N), 0.0);
  for (int64_t tile = 0; tile < K / kTileK; ++tile)
    for (int64_t block = 0; block < N / kTileN; ++block)
      for (int64_t lane = 0; lane < 32; ++lane)
        for (int64_t j = 0; j < 4; ++j) {
          const int64_t g = lane / 4, t = lane % 4, at = tile * (N / kTileN) + block;
          const uint32_t word = packed.codes[size_t(at * 32 + lane)][size_t(j)];
          for (int64_t reg = 0; reg < 4; ++reg)  // a0 to a3 of mma.sp, halves low and high
            for (int64_t high = 0; high < 2; ++high) {
              // dequant() takes the low nibbles of bytes 0 and 2, then the high ones; a1 and a3 the same of word >> 8.
              const int64_t shift = 8 * (reg % 2) + 4 * (reg / 2) + 16 * high;
              const int64_t row = g + 8 * (reg % 2), column = 2 * t + high + 8 * (reg / 2);
              // The selector j % 2 names the pair of lanes of each four that hold the 16 rows' places.
              const int64_t four = column / 2, holder = 4 * g + 2 * (j % 2) + four / 4;
              const uint32_t places = packed.places[size_t(at * 64 + 32 * (j / 2) + holder)];
              const int64_t place = places >> (16 * (row / 8) + 4 * (four % 4) + 2 * (column % 2)) & 3;
              const int64_t k = tile * kTileK + 4 * four + place, n = block * kTileN + 8 * g + 4 * (row / 8) + j;
              // scale(frag_b0, frag_s[j], 0) and (frag_b1, ..., 1); one scale an output is read as it is written.
              const int64_t eighth = grouped ? 2 * j + reg % 2 : n % 8;
              const int64_t group = grouped ? k / kGroup : 0;
              const f16 scale = packed.scales[size_t(group * N + block * kTileN + 8 * g + eighth)];
              y[size_t(n)] += double(to_float(scale)) * (int(word >> shift & 15) - 8) * double(x[size_t(k)]);
            }
        }
  return y;
}

double deviation(std::span<const double> y, std::span<const double> expected) {
  double error = 0, norm = 0;
  for (size_t n = 0; n < y.size(); ++n) {
    error += (y[n] - expected[n]) * (y[n] - expected[n]);
    norm += expected[n] * expected[n];
  }
  return std::sqrt(error / norm);
}

std::vector<float> random_inputs(int64_t K, Rng& rng) {
  std::vector<float> x(static_cast<size_t>(K));
  for (float& value : x) value = to_float(to_f16(float(rng.normal())));
  return x;
}

int64_t outputs_of(const lacuna::model::LinearGroupShape& group) {
  int64_t N = 0;
  for (const int64_t outputs : group.outputs) N += outputs;
  if (N % 128 != 0 || group.K % 128 != 0)
    throw Error("{}: N = {} and K = {}, but Sparse-Marlin needs multiples of 128", group.name, N, group.K);
  return N;
}

/// On the CPU: the packed weights, read as the kernel reads them, give the product of those that were packed.
void check_packing() {
  double worst = 0;
  for (const auto& [N, K] : {std::pair<int64_t, int64_t>{128, 128}, {384, 256}, {128, 11008}, {512, 4096}})
    for (const bool grouped : {false, true}) {
      Rng rng(uint64_t(N + K));
      const Sparse w = random_sparse(N, K, grouped, rng);
      const std::vector<float> x = random_inputs(K, rng);
      const double found = deviation(product_by_lanes(pack(w), N, K, grouped, x), product(w, x));
      if (!(found <= 1e-12))
        throw Error("{}x{}, {}: packed weights give another product, off by {:.3g} of its size", N, K,
                    grouped ? "groups of 128" : "one scale an output", found);
      worst = std::max(worst, found);
    }
  fmt::print("{{\"check\": \"packing\", \"device\": \"cpu\", \"checked\": true, \"deviation\": {:.2e}}}\n", worst);
}

struct Times {
  double median, least, most;
};

class Bench {
 public:
  Bench(const Options& options, bool grouped);
  void run();

 private:
  struct Kind {
    std::string name;
    int64_t N, K;
    std::vector<double> expected;
    int64_t codes_at, places_at, scales_at, x_at, y_at;
  };
  void launch(Tile tile);
  double check(Tile tile);
  Times time(Tile tile, int runs);
  bool fits(Tile tile) const;

  Options options_;
  bool grouped_;
  lacuna::cuda::Device device_;
  lacuna::cuda::Stream stream_;
  lacuna::model::LinearLayers shape_;
  std::vector<Kind> kinds_;
  int64_t layer_bytes_ = 0, layer_y_ = 0, read_ = 0;
  lacuna::cuda::Buffer weights_, inputs_, y_, locks_;
};

Bench::Bench(const Options& options, bool grouped)
    : options_(options), grouped_(grouped), stream_(device_), shape_(lacuna::model::linear_layers(options.shape)) {
  if (options.layers > 0) shape_.n_layers = options.layers;
  const auto place = [](int64_t& total, int64_t bytes) {
    return std::exchange(total, total + (bytes + kAlign - 1) / kAlign * kAlign);
  };
  int64_t input_bytes = 0, most = 0;
  for (const auto& group : shape_.groups) {
    const int64_t N = outputs_of(group), K = group.K, groups = grouped ? K / kGroup : 1;
    Kind kind{group.name, N, K, {}, 0, 0, 0, 0, 0};
    kind.codes_at = place(layer_bytes_, N * K / 4);
    kind.places_at = place(layer_bytes_, N * K / 8);
    kind.scales_at = place(layer_bytes_, groups * N * 2);
    kind.x_at = place(input_bytes, K * 2);
    kind.y_at = place(layer_y_, N * 2);
    read_ += N * K / 4 + N * K / 8 + groups * N * 2;
    most = std::max(most, N);
    kinds_.push_back(std::move(kind));
  }
  read_ *= shape_.n_layers;
  weights_ = {device_, layer_bytes_ * shape_.n_layers, "weights"};
  inputs_ = {device_, input_bytes, "inputs"};
  y_ = {device_, layer_y_ * shape_.n_layers, "outputs"};
  locks_ = {device_, most / 128 * kMostParallel * 4, "locks"};
  locks_.fill(0);
  Rng rng(1);
  for (Kind& kind : kinds_) {
    const Sparse w = random_sparse(kind.N, kind.K, grouped, rng);
    const std::vector<float> x = random_inputs(kind.K, rng);
    std::vector<f16> halves(x.size());
    std::transform(x.begin(), x.end(), halves.begin(), to_f16);
    kind.expected = product(w, x);
    const Packed packed = pack(w);
    weights_.upload(std::as_bytes(std::span(packed.codes)), kind.codes_at);
    weights_.upload(std::as_bytes(std::span(packed.places)), kind.places_at);
    weights_.upload(std::as_bytes(std::span(packed.scales)), kind.scales_at);
    inputs_.upload(std::as_bytes(std::span(halves)), kind.x_at);
  }
  for (int64_t layer = 1; layer < shape_.n_layers; ++layer) weights_.copy_within(0, layer * layer_bytes_, layer_bytes_);
}

void Bench::launch(Tile tile) {
  for (int64_t layer = 0; layer < shape_.n_layers; ++layer)
    for (const Kind& kind : kinds_) {
      std::byte* const weights = weights_.data() + layer * layer_bytes_;
      const int failed =
          marlin::marlin_cuda_2_4(inputs_.data() + kind.x_at, weights + kind.codes_at, weights + kind.places_at,
                                  y_.data() + layer * layer_y_ + kind.y_at, weights + kind.scales_at, int(kind.N), 1,
                                  int(kind.K), locks_.data(), grouped_ ? kGroup / 2 : -1, 0, stream_.handle(), tile.k,
                                  tile.n, device_.info().multiprocessors, kMostParallel);
      if (failed != 0) throw Error("{}: Sparse-Marlin has no kernel for it (its error {})", kind.name, failed);
    }
}

double Bench::check(Tile tile) {
  y_.fill(0xff);  // not numbers
  launch(tile);
  stream_.synchronize();
  std::vector<f16> all(size_t(layer_y_ / 2));
  double worst = 0;
  for (int64_t layer = 0; layer < shape_.n_layers; ++layer) {
    y_.download(std::as_writable_bytes(std::span(all)), layer * layer_y_);
    for (const Kind& kind : kinds_) {
      std::vector<double> y(kind.expected.size());
      for (size_t n = 0; n < y.size(); ++n) y[n] = double(to_float(all[size_t(kind.y_at / 2) + n]));
      const double found = deviation(y, kind.expected);
      if (!(found <= kTolerance))
        throw Error("layer {}, {}: the result is off by {:.3g} of its size, at most {} allowed; nothing was timed",
                    layer, kind.name, found, kTolerance);
      worst = std::max(worst, found);
    }
  }
  return worst;
}

Times Bench::time(Tile tile, int runs) {
  lacuna::cuda::Graph graph(stream_, [&] { launch(tile); });
  lacuna::cuda::Stopwatch watch;
  std::vector<double> times;
  for (int run = -3; run < runs; ++run) {
    watch.start(stream_);
    graph.launch(stream_);
    const double ms = watch.stop_ms(stream_);
    if (run >= 0) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return {0.5 * (times[times.size() / 2] + times[(times.size() - 1) / 2]), times.front(), times.back()};
}

bool Bench::fits(Tile tile) const {
  return std::all_of(kinds_.begin(), kinds_.end(),
                     [&](const Kind& kind) { return kind.N % tile.n == 0 && kind.K % tile.k == 0; });
}

void Bench::run() {
  double worst = 0;
  std::optional<std::pair<Times, Tile>> best;
  for (const Tile tile : kTiles) {
    if (!fits(tile)) continue;
    worst = std::max(worst, check(tile));
    const Times times = time(tile, options_.runs);
    worst = std::max(worst, check(tile));
    if (!best || times.median < best->first.median) best = {times, tile};
  }
  const auto& [times, tile] = *best;
  fmt::print(
      "{{\"bench\": \"linear\", \"shape\": \"{}\", \"layout\": \"2:4 int4{}\", \"program\": \"Sparse-Marlin\", "
      "\"device\": \"cuda\", \"layers\": {}, \"tile\": \"{}x{}\", \"median_ms\": {:.4f}, \"min_ms\": {:.4f}, "
      "\"max_ms\": {:.4f}, \"runs\": {}, \"bytes\": {}, \"gb_s\": {:.3f}, \"checked\": true, \"deviation\": {:.5f}, "
      "\"gpu\": \"{}\"}}\n",
      options_.shape, grouped_ ? " g128" : "", shape_.n_layers, tile.k, tile.n, times.median, times.least, times.most,
      options_.runs, read_, double(read_) / times.median / 1e6, worst, device_.info().name);
}

constexpr const char* kUsage =
    "usage: sparse_marlin_linear [--shape NAME | --single NxK] [--layers N] [--runs R] [--device cuda|cpu]\n"
    "Times the linear layers of one token on Sparse-Marlin's kernel, with a scale for each 128 inputs and with one "
    "for\n"
    "each output, in the faster of its two tile shapes, and prints a JSON object for each.\n"
    "  --shape NAME    a shape that `lacuna synth` knows (default llama-2-7b)\n"
    "  --single NxK    copies of one matrix of N outputs and K inputs, more than a cache holds\n"
    "  --layers N      instead of the shape's own number\n"
    "  --runs R        timed runs, default 50; the median is printed\n"
    "  --device NAME   cuda (default); cpu: no clock, only whether packed weights, read as the kernel reads them, "
    "give\n"
    "                  the right product\n";

int positive(const std::string& flag, const char* text) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*text == '\0' || *end != '\0' || value < 1 || value > 1000000)
    throw Error("{} {}: expected a number from 1 to 1000000", flag, text);
  return int(value);
}

std::optional<Options> parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--help" || flag == "-h") return std::nullopt;
    if (i + 1 == argc) throw Error("{}: unknown, or its value is missing; see --help", flag);
    const std::string value = argv[++i];
    if (flag == "--shape" || flag == "--single") {
      options.shape = value;
    } else if (flag == "--layers") {
      options.layers = positive(flag, argv[i]);
    } else if (flag == "--runs") {
      options.runs = positive(flag, argv[i]);
    } else if (flag == "--device") {
      if (value != "cpu" && value != "cuda") throw Error("--device {}: expected cpu or cuda", value);
      options.on_cuda = value == "cuda";
    } else {
      throw Error("{}: unknown; see --help", flag);
    }
  }
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
    if (options->on_cuda)
      for (const bool grouped : {true, false}) Bench(*options, grouped).run();
    else
      check_packing();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "sparse_marlin_linear: {}\n", error.what());
    return 1;
  }
}
