// bench/linear_bench.cc - the linear kernels alone: checked, then timed on cold weights.
//
//   linear_bench [--isa NAME] [--layouts q4_K,q6_K] [--m 1] [--n 8192] [--k 2048] [--threads 0] [--runs 15]
//   [--in-place]
//
// Copies of the weight matrix are rotated so that more bytes than the last-level cache lie between two uses of one.
// Prints the least and the median time, GB/s of weights beside the read ceiling measured in the same run, and GOP/s
// (2 M N K operations).
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/huge_buffer.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/cpu/linear_kernel.h"

namespace lacuna {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::string isa = std::string(cpu::isa_name(cpu::isa()));
  std::string layouts = "q4_K,q6_K,q4_0,q4_1,q5_0,q8_0,q5_1,q5_K,q2_K,q3_K,f16,bf16,f32";
  int64_t m = 1, n = 8192, k = 2048, rotate_mb = 400;
  int threads = 0, runs = 15;
  bool in_place = false, cpu_time = false;
};

/// Processor time of the calling thread: with --threads 1 this is the time that a busy machine would hide.
double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

double seconds(Clock::time_point from) { return std::chrono::duration<double>(Clock::now() - from).count(); }

/// GB/s of all threads reading memory that no cache holds.
double read_ceiling(ThreadPool& pool, bool cpu_time) {
  HugeBuffer buffer(size_t{512} << 20);
  constexpr int64_t kPiece = 1 << 20;
  const int64_t pieces = int64_t(buffer.size()) / kPiece;
  pool.parallel_for(pieces, 1, [&](int64_t begin, int64_t end) {
    std::memset(buffer.data() + begin * kPiece, 1, size_t((end - begin) * kPiece));
  });
  double best = 1e30;
  std::vector<uint64_t> sink(static_cast<size_t>(pieces));
  for (int run = 0; run < 9; ++run) {
    const auto start = Clock::now();
    const double cpu_start = cpu_seconds();
    pool.parallel_for(pieces, 1, [&](int64_t begin, int64_t end) {
      const auto* p = reinterpret_cast<const uint64_t*>(buffer.data() + begin * kPiece);
      uint64_t sum[16] = {};
      for (int64_t i = 0; i < (end - begin) * kPiece / 8; i += 16)
        for (int j = 0; j < 16; ++j) sum[j] += p[i + j];
      for (const uint64_t s : sum) sink[size_t(begin)] += s;
    });
    best = std::min(best, cpu_time ? cpu_seconds() - cpu_start : seconds(start));
  }
  volatile uint64_t keep = sink[0];
  (void)keep;
  return double(buffer.size()) / best * 1e-9;
}

std::vector<std::byte> random_weight(const layout::Layout& l, layout::Shape shape) {
  Rng rng(1);
  std::vector<float> w(size_t(shape.K));
  std::vector<std::byte> rows;
  const int64_t bytes = l.row_bytes(shape.K);
  rows.resize(size_t(l.size_bytes(shape)));
  // 16 encoded rows, repeated: the time does not depend on the values.
  for (int64_t n = 0; n < shape.N; ++n) {
    std::byte* out = rows.data() + n * bytes;
    if (n >= 16) {
      std::memcpy(out, out - 16 * bytes, size_t(bytes));
      continue;
    }
    for (float& value : w) value = float(rng.normal() * 0.02);
    l.encode_row(l, w, {}, {out, size_t(bytes)});
  }
  return rows;
}

void bench(const Options& o, const layout::Layout& l, ThreadPool& pool, double ceiling) {
  const layout::Shape shape{o.n, o.k};
  const std::vector<std::byte> bytes = random_weight(l, shape);
  const kernels::WeightView view{"w", &l, shape, bytes, {}};
  cpu::Isa isa = cpu::Isa::generic;
  for (const cpu::Isa each : {cpu::Isa::generic, cpu::Isa::avx2, cpu::Isa::avx512, cpu::Isa::avx512vnni})
    if (cpu::isa_name(each) == o.isa && cpu::supported(each)) isa = each;
  if (cpu::isa_name(isa) != o.isa) throw Error("--isa {}: this CPU has no such instruction set", o.isa);
  const auto prepare = o.in_place ? kernels::Prepare::in_place : kernels::Prepare::automatic;
  std::vector<std::unique_ptr<kernels::LinearGroup>> copies;
  std::vector<std::vector<std::byte>> canonical;  // of copies read in place
  const auto prepare_start = Clock::now();
  for (int64_t held = 0; held < (o.rotate_mb << 20);) {
    kernels::WeightView each = view;
    copies.push_back(cpu::make_linear_group(isa, {&each, 1}, pool, prepare));
    if (copies.back()->prepared_bytes() == 0) {
      canonical.push_back(bytes);
      each.bytes = canonical.back();
      copies.back() = cpu::make_linear_group(isa, {&each, 1}, pool, prepare);
    }
    held += copies.back()->weight_bytes();
  }
  const double prepare_s = seconds(prepare_start);

  Rng rng(2);
  std::vector<float> x(size_t(o.m * o.k)), y(size_t(o.m * o.n), NAN);
  for (float& value : x) value = float(rng.normal());
  const kernels::Output out{y.data(), o.n};
  copies[0]->run({x.data(), o.m, o.k}, {&out, 1});
  // Check: the last token, every 61st output. Quantizing x errs by half a step of about 3/127 a value, at random.
  std::vector<float> row(size_t(o.k));
  for (int64_t n = 0; n < o.n; n += 61) {
    layout::decode_rows(l, shape, bytes, n, 1, row.data());
    double expected = 0, norm = 0;
    const float* input = &x[size_t((o.m - 1) * o.k)];
    for (int64_t k = 0; k < o.k; ++k)
      expected += double(row[size_t(k)]) * input[k], norm += row[size_t(k)] * row[size_t(k)];
    const double got = y[size_t((o.m - 1) * o.n + n)];
    if (!(std::fabs(got - expected) <= 6 * 0.012 * std::sqrt(norm)))
      throw Error("{}: row {} is {}, expected {}", copies[0]->explain(), n, got, expected);
  }

  std::vector<double> times;
  const size_t laps = o.m == 1 ? copies.size() : 1;
  size_t next = 0;
  for (int run = 0; run < o.runs; ++run) {
    const auto start = Clock::now();
    const double cpu_start = cpu_seconds();
    for (size_t i = 0; i < laps; ++i, ++next) copies[next % copies.size()]->run({x.data(), o.m, o.k}, {&out, 1});
    times.push_back((o.cpu_time ? cpu_seconds() - cpu_start : seconds(start)) / double(laps));
  }
  std::sort(times.begin(), times.end());
  const double least = times.front(), median = times[times.size() / 2];
  const double weights = double(copies[0]->weight_bytes());
  fmt::print(
      "{:>5} {:<10} M={:<4} N={:<6} K={:<5} min {:9.1f} us  median {:9.1f} us  {:6.2f} GB/s ({:3.0f}% of {:.1f})  "
      "{:7.1f} GOP/s  prepare {:.2f} GB/s\n",
      l.name, o.isa, o.m, o.n, o.k, least * 1e6, median * 1e6, weights / least * 1e-9, weights / least * 1e-7 / ceiling,
      ceiling, 2.0 * double(o.m) * double(o.n) * double(o.k) / least * 1e-9,
      weights * double(copies.size()) / prepare_s * 1e-9);
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--cpu-time") {
      o.cpu_time = true;
      continue;
    }
    if (flag == "--in-place") {
      o.in_place = true;
      continue;
    }
    if (i + 1 == argc) throw Error("{} needs a value", flag);
    const std::string value = argv[++i];
    if (flag == "--isa")
      o.isa = value;
    else if (flag == "--layouts")
      o.layouts = value;
    else if (flag == "--m")
      o.m = std::atoll(value.c_str());
    else if (flag == "--n")
      o.n = std::atoll(value.c_str());
    else if (flag == "--k")
      o.k = std::atoll(value.c_str());
    else if (flag == "--threads")
      o.threads = std::atoi(value.c_str());
    else if (flag == "--runs")
      o.runs = std::atoi(value.c_str());
    else if (flag == "--rotate-mb")
      o.rotate_mb = std::atoll(value.c_str());
    else
      throw Error(
          "unknown flag {}; known: --isa --layouts --m --n --k --threads --runs --rotate-mb --in-place --cpu-time",
          flag);
  }
  ThreadPool pool(o.threads);
  const double ceiling = o.m == 1 ? read_ceiling(pool, o.cpu_time) : 1;
  for (size_t at = 0; at < o.layouts.size();) {
    const size_t comma = std::min(o.layouts.find(',', at), o.layouts.size());
    const std::string name = o.layouts.substr(at, comma - at);
    const layout::Layout* l = layout::find(name);
    if (l == nullptr) throw Error("--layouts {}: unknown; known: {}", name, layout::known_names());
    bench(o, *l, pool, ceiling);
    at = comma + 1;
  }
  return 0;
}

}  // namespace
}  // namespace lacuna

int main(int argc, char** argv) {
  try {
    return lacuna::run(argc, argv);
  } catch (const std::exception& e) {
    fmt::print(stderr, "linear_bench: {}\n", e.what());
    return 1;
  }
}
