// tests/kernels/cuda_gemv_test.cc - the CUDA GEMV over zigzag weights against double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/prepared.h"
#include "kernels/cuda_support.h"
#include "kernels/support.h"
#include "kernels/zigzag_weights.h"
#include "layout/q2_K.h"
#include "layout/q3_K.h"
#include "layout/q4_K.h"
#include "layout/q5_K.h"
#include "layout/q6_K.h"
#include "layout/q8_0.h"
#include "layout/six_bit.h"
#include "layout/zigzag.h"

namespace lacuna {
namespace {

using cuda::GemvArgs;
using cuda::GemvPlan;
using cuda::Inputs;
using kernels::WeightView;
using layout::Id;
using layout::Shape;
using test::CudaTest;
using test::make_weight;
using test::random_inputs;
using test::Weight;
using test::whole_inputs;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

std::vector<int32_t> active_of(const std::vector<float>& x, float threshold) {
  std::vector<int32_t> list;
  for (size_t k = 0; k < x.size(); ++k)
    if (!(std::fabs(x[k]) < threshold)) list.push_back(int32_t(k));
  return list;
}

std::vector<int32_t> every(int64_t K) {
  std::vector<int32_t> list(static_cast<size_t>(K));
  std::iota(list.begin(), list.end(), 0);
  return list;
}

std::vector<double> reference(const Weight& w, const std::vector<float>& x, const std::vector<int32_t>& active) {
  const auto [N, K] = w.view.shape;
  std::vector<double> y(static_cast<size_t>(N));
  for (int64_t n = 0; n < N; ++n)
    for (const int32_t k : active) y[size_t(n)] += double(w.decoded[size_t(n * K + k)]) * double(x[size_t(k)]);
  return y;
}

/// The least number of segments that a matrix may be cut into, and some more.
std::vector<int> segment_counts(int64_t K) {
  const int least = int((K + cuda::kSegmentColumns - 1) / cuda::kSegmentColumns);
  return {least, least + 1, least + 6};
}

/// Of each zigzag layout.
class CudaGemv : public CudaTest, public testing::WithParamInterface<Id> {
 protected:
  struct Loaded {
    cuda::PreparedGroup group;
    cuda::Buffer codes, headers;
    cuda::Columns columns() const { return {codes.data(), headers.data(), group.rows, group.K}; }
  };
  Loaded load(const WeightView& view) {
    Loaded out;
    out.group = cuda::prepare_group({&view, 1}, test::pool());
    out.codes = cuda::Buffer(device(), int64_t(out.group.codes.size()), "codes");
    out.codes.upload(out.group.codes.bytes());
    out.headers = cuda::Buffer(device(), int64_t(out.group.headers.size()), "headers");
    out.headers.upload(out.group.headers.bytes());
    return out;
  }

  /// Copies of `part` below each other.
  Loaded copies(const Loaded& part, int64_t count) {
    const cuda::ColumnForm& form = cuda::column_form(*part.group.layout);
    const int64_t columns = part.group.rows * part.group.K;
    Loaded out;
    out.group.layout = part.group.layout, out.group.K = part.group.K, out.group.rows = part.group.rows * count;
    out.codes = cuda::Buffer(device(), (columns * count + cuda::kSlackColumns) * form.code_bytes, "codes");
    out.headers = cuda::Buffer(device(), columns * count * form.header_bytes, "headers");
    for (int64_t i = 0; i < count; ++i) {  // each but the last writes over the slack of the one before
      out.codes.upload(part.group.codes.bytes(), i * columns * form.code_bytes);
      out.headers.upload(part.group.headers.bytes(), i * columns * form.header_bytes);
    }
    return out;
  }

  struct Run {
    Inputs inputs = Inputs::dense;
    GemvPlan plan;
    float threshold = 0;
    std::vector<int32_t> list;  // Inputs::list
    bool deterministic = false;
    std::vector<float> norms = {};  // Inputs::threshold
    std::vector<float> up = {};     // dense and by threshold
    int64_t cleared = 0;            // floats; 0: as many as there are outputs
  };

  /// One launch. Memory around y, and y itself where the launch may not rely on zeros, is poison; nothing beyond y is
  /// written.
  std::vector<float> run(const Loaded& w, const std::vector<float>& x, const Run& how) {
    constexpr size_t kGuard = 64;
    const size_t outputs = size_t(w.group.rows * 256);
    const size_t cleared = how.cleared > 0 ? size_t(how.cleared) : outputs;
    std::vector<float> y(outputs + 2 * kGuard, kNan), zeroed(cleared + 2 * kGuard, kNan);
    if (!how.deterministic) std::fill_n(y.begin() + kGuard, outputs, 0.0f);
    const cuda::Buffer y_there = to_device(y), zero_there = to_device(zeroed), x_there = to_device(x);
    std::vector<int32_t> list = how.list;
    list.push_back(-1);  // never empty
    const cuda::Buffer list_there = to_device(list);
    const cuda::Buffer count_there = to_device(std::vector<int32_t>{int32_t(how.list.size())});
    const cuda::Buffer partial = to_device(std::vector<float>(outputs * size_t(how.plan.segments), kNan));
    const cuda::Buffer arrived = to_device(std::vector<uint32_t>(size_t(w.group.rows), 0u));
    GemvArgs args;
    args.weights = w.columns();
    args.inputs = how.inputs;
    args.x = x_there.as<float>();
    args.threshold = how.threshold;
    std::vector<float> norms = how.norms;
    norms.push_back(kNan);  // never empty
    const cuda::Buffer norms_there = to_device(norms);
    if (!how.norms.empty()) args.norms = norms_there.as<float>();
    std::vector<float> up = how.up;
    up.push_back(kNan);
    const cuda::Buffer up_there = to_device(up);
    if (!how.up.empty()) args.up = up_there.as<float>();
    args.list = list_there.as<int32_t>();
    args.count = count_there.as<int32_t>();
    args.y = y_there.as<float>() + kGuard;
    args.zero = zero_there.as<float>() + kGuard;
    args.zero_count = int64_t(cleared);
    if (how.deterministic) args.workspace = {partial.as<float>(), arrived.as<uint32_t>()};
    cuda::launch_gemv(device(), stream(), *w.group.layout, how.plan, args);
    stream().synchronize();
    y = to_host<float>(y_there), zeroed = to_host<float>(zero_there);
    for (size_t i = 0; i < kGuard; ++i) {
      EXPECT_TRUE(std::isnan(y[i]) && std::isnan(y[kGuard + outputs + i])) << "written outside y";
      EXPECT_TRUE(std::isnan(zeroed[i]) && std::isnan(zeroed[kGuard + cleared + i])) << "cleared too much";
    }
    for (size_t i = 0; i < cleared; ++i) EXPECT_EQ(std::bit_cast<uint32_t>(zeroed[kGuard + i]), 0u) << i;
    for (const uint32_t count : to_host<uint32_t>(arrived)) EXPECT_EQ(count, 0u);
    return {y.begin() + kGuard, y.begin() + kGuard + std::ptrdiff_t(outputs)};
  }

  std::vector<GemvPlan> plans(int64_t K) {
    std::vector<GemvPlan> out;
    for (GemvPlan plan : cuda::kernel_plans(layout::get(GetParam())))
      for (const int segments : segment_counts(K)) {
        plan.segments = segments;
        plan.early_headers = segments % 2 == 0 ? 1 : 0;
        plan.early_codes = segments % 2 == 0 ? 0.3f : 0;
        out.push_back(plan);
      }
    return out;
  }

  /// Dense, by threshold and by list, in both ways of adding up.
  template <class Check>
  void in_every_way(const Loaded& w, const std::vector<float>& x, float threshold, const Check& check) {
    for (const GemvPlan& plan : plans(w.group.K)) {
      for (const bool deterministic : {false, true}) {
        const std::vector<int32_t> active = active_of(x, threshold);
        check(every(w.group.K), run(w, x, {Inputs::dense, plan, 0, {}, deterministic}), "dense " + describe(plan));
        check(active, run(w, x, {Inputs::threshold, plan, threshold, {}, deterministic}),
              "threshold " + describe(plan));
        check(active, run(w, x, {Inputs::list, plan, 0, active, deterministic}), "list " + describe(plan));
      }
    }
  }
};

// A column that is left out, read twice or taken with another one's scale changes a whole number.
TEST_P(CudaGemv, ExactOnWholeNumbers) {
  for (const int64_t N : {1, 31, 256, 257, 1000}) {
    for (const int64_t K : {1, 2, 15, 16, 17, 33, 255, 1025}) {
      const Weight w = make_weight(GetParam(), {N, K}, N % 2 == 0 ? 0 : 256, uint64_t(N * 10000 + K), true);
      const Loaded there = load(w.view);
      const std::vector<float> x = whole_inputs(K, uint64_t(K));
      in_every_way(there, x, 1.5f,
                   [&](const std::vector<int32_t>& active, const std::vector<float>& y, const std::string& how) {
                     const std::vector<double> expected = reference(w, x, active);
                     for (int64_t n = 0; n < N; ++n)
                       ASSERT_EQ(double(y[size_t(n)]), expected[size_t(n)])
                           << N << " x " << K << ", output " << n << ", " << how;
                   });
    }
  }
}

TEST_P(CudaGemv, ExactOnWholeNumbersOfALayer) {
  for (const Shape shape : {Shape{512, 4096}, Shape{300, 11008}}) {
    const Weight w = make_weight(GetParam(), shape, 256, 3, true);
    const Loaded there = load(w.view);
    const std::vector<float> x = whole_inputs(shape.K, 4);
    in_every_way(there, x, 1.5f,
                 [&](const std::vector<int32_t>& active, const std::vector<float>& y, const std::string& how) {
                   const std::vector<double> expected = reference(w, x, active);
                   for (int64_t n = 0; n < shape.N; ++n)
                     ASSERT_EQ(double(y[size_t(n)]), expected[size_t(n)]) << "output " << n << ", " << how;
                 });
  }
}

// Two segments of each row and more than twice as many blocks as the device holds at a time, so that blocks of a row
// may run far apart.
TEST_P(CudaGemv, MoreBlocksThanTheDeviceHolds) {
  constexpr int64_t K = 70;
  const Weight w = make_weight(GetParam(), {3 * 256, K}, 0, 16, true);
  const Loaded part = load(w.view);
  const std::vector<float> x = whole_inputs(K, 17);
  const std::vector<int32_t> active = active_of(x, 1.5f);
  const std::vector<double> dense = reference(w, x, every(K)), sparse = reference(w, x, active);
  for (GemvPlan plan : cuda::kernel_plans(layout::get(GetParam()))) {
    plan.segments = 2;
    const int64_t held = device().info().multiprocessors * int64_t{plan.resident} / plan.warps;
    const Loaded there = copies(part, (held * 5 / 4 + 2) / 3);
    for (const Inputs inputs : {Inputs::dense, Inputs::threshold, Inputs::list})
      for (const bool deterministic : {false, true}) {
        const std::vector<float> y = run(there, x, {inputs, plan, 1.5f, active, deterministic});
        const std::vector<double>& expected = inputs == Inputs::dense ? dense : sparse;
        for (size_t n = 0; n < y.size(); ++n)
          ASSERT_EQ(double(y[n]), expected[n % expected.size()]) << "output " << n << ", " << describe(plan);
      }
  }
}

// What a wide product clears for a launch after it: more than its threads take at a time.
TEST_P(CudaGemv, ClearsMoreThanItsThreadsAtOnce) {
  const Weight w = make_weight(GetParam(), {256, 40}, 0, 18, true);
  const Loaded there = load(w.view);
  const std::vector<float> x = whole_inputs(40, 19);
  const std::vector<double> expected = reference(w, x, every(40));
  for (GemvPlan plan : cuda::kernel_plans(layout::get(GetParam()))) {
    plan.segments = 1;
    Run how = {.inputs = Inputs::dense, .plan = plan, .list = {}};
    how.cleared = plan.warps * 32 * 4 * 5 / 2 + 4;
    const std::vector<float> y = run(there, x, how);
    for (size_t n = 0; n < y.size(); ++n) ASSERT_EQ(double(y[n]), expected[n]) << n << ", " << describe(plan);
  }
}

/// Of the weights of one superblock and output, what the bound needs.
struct Scales {
  double size = 0;   // what factors are made relative to: |d|; zz8: the largest scale
  double scale = 0;  // weight = scale * (code - zero) - min
  double min = 0;
};
struct Codes {
  double largest = 0, zero = 0;  // of what is multiplied, and of that the code of a weight of zero
  int top = 0;                   // sizes are brought below 2^(top + 1)
  double unit = 0;               // what a code of one is multiplied as
};

Codes codes_of(Id id) {
  if (id == Id::zz2_k) return {3, 0, 10, 0x1p-24};
  if (id == Id::zz3_k) return {7, 4, 9, 0x1p-24};
  if (id == Id::zz4_k) return {15, 0, 8, 0x1p-24};
  if (id == Id::zz5_k) return {31, 0, 8, 0x1p-24};
  if (id == Id::zz6_k) return {63, 32, 7, 0x1p-24};
  return {128, 0, 4, 1};
}

Scales scales_of(Id id, const std::byte* superblock, int64_t n) {
  const auto six_bit = [&](const auto& block) -> Scales {
    const layout::ScaleMin packed = layout::unpack_six_bit(block.scale_min, int(n / 32));
    const double d = double(to_float(block.d));
    return {std::fabs(d), d * packed.scale, double(to_float(block.dmin)) * packed.min};
  };
  const auto read = [&]<class Block>(Block block) {
    std::memcpy(&block, superblock, sizeof(block));
    return block;
  };
  const int64_t s = n / 16;
  if (id == Id::zz2_k) {
    const auto block = read(layout::Q2KBlock());
    const double d = double(to_float(block.d));
    return {std::fabs(d), d * (block.scale_min[s] & 15), double(to_float(block.dmin)) * (block.scale_min[s] >> 4)};
  }
  if (id == Id::zz3_k) {
    const auto block = read(layout::Q3KBlock());
    const int bits = (block.scale[s % 8] >> (s / 8 * 4) & 15) | (block.scale[8 + s % 4] >> (s / 4 * 2) & 3) << 4;
    const double d = double(to_float(block.d));
    return {std::fabs(d), d * (bits - 32), 0};
  }
  if (id == Id::zz4_k) return six_bit(read(layout::Q4KBlock()));
  if (id == Id::zz5_k) return six_bit(read(layout::Q5KBlock()));
  if (id == Id::zz6_k) {
    const auto block = read(layout::Q6KBlock());
    const double d = double(to_float(block.d));
    return {std::fabs(d), d * block.scale[s], 0};
  }
  Scales out;
  for (int64_t g = 0; g < 8; ++g) {
    layout::Q8_0Block block;
    std::memcpy(&block, superblock + g * int64_t(sizeof(block)), sizeof(block));
    const double scale = double(to_float(block.scale));
    out.size = std::max(out.size, std::fabs(scale));
    if (g == n / 32) out.scale = scale;
  }
  return out;
}

/// What rounding may do. A factor x * scale is rounded to f16 at most twice (2^-11 each, of code - zero, which is at
/// most the largest code; or, below f16's normal numbers, 2^-25 each). Of eight products the first goes through at most
/// eight roundings to f16, 2^-11 of the partial sum each, or, where that is less than f16's least, through as many of
/// 2^-25. The chunk's unit, by which a factor is too large, is at most its largest size / 2^top. The rest is f32.
double bound(const Weight& w, const std::vector<float>& x, const std::vector<int32_t>& active, int64_t n) {
  const layout::ZigzagMap map(w.view.shape, w.view.params);
  const Codes codes = codes_of(w.view.layout->id);
  double products = 0, mins = 0, largest = 0;
  for (const int32_t k : active) {
    const Scales scales =
        scales_of(w.view.layout->id, w.bytes.data() + map.index(n / 256, k) * w.view.layout->block_bytes, n % 256);
    const double size = std::fabs(double(x[size_t(k)]));
    products += codes.largest * size * std::fabs(scales.scale);
    mins += size * (std::fabs(scales.min) + codes.zero * std::fabs(scales.scale));
    largest = std::max(largest, size * scales.size);
  }
  const double count = double(active.size()) + 8, unit = largest * std::exp2(-codes.top);
  const double least = 0x1p-25 * unit * (1 / codes.unit + codes.largest * (std::exp2(14 - codes.top) + 1));
  return products * (2 * 0x1p-11 + 8 * 0x1p-11) * 1.01 + count * least + (products + mins) * (count + 16) * 0x1p-24 +
         1e-37;
}

TEST_P(CudaGemv, WithinWhatRoundingMayDo) {
  for (const Shape shape : {Shape{300, 40}, Shape{256, 1000}, Shape{700, 3000}}) {
    const Weight w = make_weight(GetParam(), shape, 256, uint64_t(shape.K), false);
    const Loaded there = load(w.view);
    for (const float size : {0.0f, 1e-36f, 1e-20f, 1.0f, 1e20f}) {
      std::vector<float> x = random_inputs(shape.K, 5);
      for (float& value : x) value *= size;
      double error = 0, norm = 0;
      std::map<std::vector<int32_t>, std::pair<std::vector<double>, std::vector<double>>> known;  // result, bound
      in_every_way(there, x, 0.6745f * size,
                   [&](const std::vector<int32_t>& active, const std::vector<float>& y, const std::string& how) {
                     auto& [expected, bounds] = known[active];
                     if (expected.empty()) {
                       expected = reference(w, x, active);
                       for (int64_t n = 0; n < shape.N; ++n) bounds.push_back(bound(w, x, active, n));
                     }
                     for (int64_t n = 0; n < shape.N; ++n) {
                       const double e = expected[size_t(n)], d = double(y[size_t(n)]) - e;
                       ASSERT_LE(std::fabs(d), bounds[size_t(n)]) << "output " << n << ", " << how << ", " << size;
                       error += d * d, norm += e * e;
                     }
                   });
      if (size >= 1e-20f) {
        EXPECT_LE(std::sqrt(error / norm), 0.003);
      }
    }
  }
}

// RECIPES 16: sums past f16's range.
TEST_P(CudaGemv, LargeInputsOfOneAndOfAlternatingSign) {
  const Weight w = make_weight(GetParam(), {256, 64}, 0, 6, false);
  const Loaded there = load(w.view);
  for (const bool alternating : {false, true}) {
    std::vector<float> x(64, 0.0f);
    for (size_t k = 0; k < 32; ++k) x[k] = alternating && k % 2 == 1 ? -4560.0f : 4560.0f;
    in_every_way(there, x, 1.0f,
                 [&](const std::vector<int32_t>& active, const std::vector<float>& y, const std::string& how) {
                   const std::vector<double> expected = reference(w, x, active);
                   for (int64_t n = 0; n < 256; ++n)
                     ASSERT_LE(std::fabs(double(y[size_t(n)]) - expected[size_t(n)]), bound(w, x, active, n)) << how;
                 });
  }
}

// RECIPES 25: how many count, and which.
TEST_P(CudaGemv, EveryActiveCount) {
  for (const int64_t K : {17, 40, 1100}) {
    const Weight w = make_weight(GetParam(), {256, K}, 0, 7, true);
    const Loaded there = load(w.view);
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{16}, int64_t{17}, K - 1, K}) {
      Rng rng{uint64_t(count)};
      std::vector<float> x(static_cast<size_t>(K), 0.5f);
      std::vector<int32_t> order = every(K);
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[size_t(rng.below(i))]);
      for (int64_t i = 0; i < count; ++i) x[size_t(order[size_t(i)])] = i % 2 == 0 ? 1.0f : -2.0f;
      ASSERT_EQ(int64_t(active_of(x, 1.0f).size()), count);
      in_every_way(there, x, 1.0f,
                   [&](const std::vector<int32_t>& active, const std::vector<float>& y, const std::string& how) {
                     const std::vector<double> expected = reference(w, x, active);
                     for (int64_t n = 0; n < 256; ++n)
                       ASSERT_EQ(double(y[size_t(n)]), expected[size_t(n)]) << count << " " << how;
                   });
    }
  }
}

TEST_P(CudaGemv, EqualToTheThresholdCountsAndSoDoesMinusZeroAtZero) {
  const Weight w = make_weight(GetParam(), {256, 8}, 0, 8, true);
  const Loaded there = load(w.view);
  const std::vector<float> x = {1, -1, std::nextafter(1.0f, 0.0f), 0.0f, -0.0f, 2, -2, 0.5f};
  for (const GemvPlan& plan : plans(8)) {
    for (const float threshold : {1.0f, 0.0f}) {
      const std::vector<double> expected = reference(w, x, active_of(x, threshold));
      const std::vector<float> y = run(there, x, {Inputs::threshold, plan, threshold, {}, false});
      for (int64_t n = 0; n < 256; ++n) {
        if (threshold == 1.0f) {
          ASSERT_EQ(double(y[size_t(n)]), expected[size_t(n)]);
        } else {
          // One below one is no short number, and weights are at most 256.
          ASSERT_NEAR(double(y[size_t(n)]), expected[size_t(n)], 2e-5);
        }
      }
    }
  }
}

TEST_P(CudaGemv, NormsDecideWithTheInputs) {
  for (const int64_t K : {8, 1500}) {
    const Weight w = make_weight(GetParam(), {256, K}, 0, 8, true);
    const Loaded there = load(w.view);
    const std::vector<float> x = whole_inputs(K, 31);
    std::vector<float> norms(static_cast<size_t>(K)), sizes = x;
    for (size_t k = 0; k < norms.size(); ++k) {
      norms[k] = std::array{0.25f, 0.5f, 1.0f, 3.0f}[k * 7 % 4];
      sizes[k] *= norms[k];
    }
    const std::vector<double> expected = reference(w, x, active_of(sizes, 0.6f));
    ASSERT_NE(active_of(sizes, 0.6f), active_of(x, 0.6f));
    for (const GemvPlan& plan : plans(K)) {
      const std::vector<float> y = run(there, x, {Inputs::threshold, plan, 0.6f, {}, false, norms});
      for (int64_t n = 0; n < 256; ++n) ASSERT_EQ(double(y[size_t(n)]), expected[size_t(n)]);
    }
  }
}

TEST_P(CudaGemv, TakesTheGateOfItsInputs) {
  for (const int64_t K : {40, 1100}) {
    const Weight w = make_weight(GetParam(), {300, K}, 0, 41, false);
    const Loaded there = load(w.view);
    const std::vector<float> gate = random_inputs(K, 42), up = random_inputs(K, 43);
    std::vector<float> x = gate;
    float threshold = 0.25f;
    for (size_t k = 0; k < x.size(); ++k)
      x[k] = float(double(gate[k]) / (1 + std::exp(-double(gate[k]))) * double(up[k]));
    // The device's exponential is off by a few units of the last place: no input lies that near the threshold.
    std::vector<float> norms(static_cast<size_t>(K)), sizes = x;  // powers of two: products with them are exact
    for (size_t k = 0; k < norms.size(); ++k) sizes[k] *= norms[k] = k % 3 == 0 ? 0.25f : 2.0f;
    const auto near = [&](float value) { return std::abs(std::fabs(value) - threshold) < 1e-5f; };
    while (std::ranges::any_of(x, near) || std::ranges::any_of(sizes, near)) threshold += 1e-4f;
    const std::vector<double> dense = reference(w, x, every(K)), sparse = reference(w, x, active_of(x, threshold));
    ASSERT_LT(active_of(x, threshold).size(), size_t(K));
    const std::vector<double> by_norms = reference(w, x, active_of(sizes, threshold));
    for (const GemvPlan& plan : plans(K)) {
      for (const int how : {0, 1, 2}) {
        const std::vector<double>& expected = std::array{&dense, &sparse, &by_norms}[size_t(how)][0];
        const std::vector<float> y = run(there, gate,
                                         {how == 0 ? Inputs::dense : Inputs::threshold,
                                          plan,
                                          threshold,
                                          {},
                                          false,
                                          how == 2 ? norms : std::vector<float>(),
                                          up});
        double error = 0, norm = 0;
        for (size_t n = 0; n < expected.size(); ++n) {
          error += (double(y[n]) - expected[n]) * (double(y[n]) - expected[n]);
          norm += expected[n] * expected[n];
        }
        ASSERT_LT(std::sqrt(error / norm), 3e-3) << describe(plan);
      }
    }
  }
}

TEST_P(CudaGemv, NonFiniteInputsShow) {
  const Weight w = make_weight(GetParam(), {256, 70}, 0, 9, false);
  const Loaded there = load(w.view);
  for (const float bad : {kNan, kInf, -kInf, 1e38f}) {
    std::vector<float> x = random_inputs(70, 10);
    x[41] = bad;
    if (bad == 1e38f) x[41] = 3e38f;
    in_every_way(there, x, 0.5f, [&](const std::vector<int32_t>&, const std::vector<float>& y, const std::string& how) {
      for (const float value : y) ASSERT_FALSE(std::isfinite(value) && std::fabs(value) < 1e30f) << how;
    });
  }
}

TEST_P(CudaGemv, AThousandTokensInAFixedOrderAreTheSameBits) {
  const Weight w = make_weight(GetParam(), {1000, 4096}, 256, 11, false);
  const Loaded there = load(w.view);
  const cuda::Buffer x = to_device(random_inputs(4096, 12));
  const size_t outputs = size_t(there.group.rows * 256);
  for (const Inputs inputs : {Inputs::dense, Inputs::threshold}) {
    GemvPlan plan = cuda::default_plan(device().info(), *there.group.layout, there.columns(), inputs);
    plan.segments = 24;
    cuda::Buffer y = to_device(std::vector<float>(outputs, kNan));
    const cuda::Buffer partial = to_device(std::vector<float>(outputs * 24, kNan));
    const cuda::Buffer arrived = to_device(std::vector<uint32_t>(size_t(there.group.rows), 0u));
    GemvArgs args;
    args.weights = there.columns();
    args.inputs = inputs;
    args.x = x.as<float>();
    args.threshold = 0.6745f;
    args.y = y.as<float>();
    args.workspace = {partial.as<float>(), arrived.as<uint32_t>()};
    std::vector<float> first;
    for (int token = 0; token < 1000; ++token) {
      cuda::launch_gemv(device(), stream(), *there.group.layout, plan, args);
      if (token % 50 != 0) continue;  // the others follow each other without a pause
      stream().synchronize();
      const std::vector<float> now = to_host<float>(y);
      if (first.empty()) first = now;
      ASSERT_EQ(std::memcmp(first.data(), now.data(), 1000 * sizeof(float)), 0) << token;
    }
  }
}

// As a decoder's layer has it: a launch writes the inputs and clears the outputs, three layouts read them, another
// launch reads the outputs; again and again without a pause, with two inputs in turn.
TEST_P(CudaGemv, SiblingsReadTheirInputsAndAreWaitedFor) {
  constexpr int64_t K = 1200;
  constexpr int kTokens = 200;
  const std::pair<Id, int64_t> parts[] = {{Id::zz4_k, 2000}, {GetParam(), 700}, {Id::zz6_k, 4000}};
  std::vector<Weight> weights;
  std::vector<Loaded> there;
  std::vector<int64_t> at;
  int64_t outputs = 0;
  for (const auto& [id, N] : parts) {
    weights.push_back(make_weight(id, {N, K}, 0, uint64_t(51 + N), true));
    there.push_back(load(weights.back().view));
    at.push_back(outputs);
    outputs += there.back().group.rows * 256;
  }
  const std::vector<float> inputs[] = {whole_inputs(K, 55), whole_inputs(K, 56)};
  const cuda::Buffer sources[] = {to_device(inputs[0]), to_device(inputs[1])};
  const cuda::Buffer x = to_device(std::vector<float>(size_t(K), kNan));
  const cuda::Buffer y = to_device(std::vector<float>(size_t(outputs), kNan));
  for (const Inputs how : {Inputs::dense, Inputs::threshold}) {
    const cuda::Buffer results = to_device(std::vector<float>(size_t(outputs * kTokens), 0.0f));
    for (int token = 0; token < kTokens; ++token) {
      cuda::GateArgs gate;
      gate.gate = cuda::Gate::none;
      gate.x = sources[token % 2].as<float>();
      gate.out = x.as<float>();
      gate.count = K;
      gate.preset = {y.as<float>(), outputs, nullptr};
      cuda::launch_gate(device(), stream(), gate);
      for (size_t i = 0; i < there.size(); ++i) {
        GemvArgs args;
        args.weights = there[i].columns();
        args.inputs = how;
        args.x = x.as<float>();
        args.threshold = 1.5f;
        args.y = y.as<float>() + at[i];
        args.has_sibling = i + 1 < there.size();
        args.is_sibling = i > 0;
        const layout::Layout& l = *there[i].group.layout;
        cuda::launch_gemv(device(), stream(), l, cuda::default_plan(device().info(), l, args.weights, how), args);
      }
      cuda::launch_add(device(), stream(), y.as<float>(), outputs, results.as<float>() + token * outputs);
    }
    stream().synchronize();
    const std::vector<float> found = to_host<float>(results);
    for (size_t i = 0; i < there.size(); ++i) {
      std::vector<double> expected[2];
      for (const size_t turn : {0, 1})
        expected[turn] =
            reference(weights[i], inputs[turn], how == Inputs::dense ? every(K) : active_of(inputs[turn], 1.5f));
      for (int token = 0; token < kTokens; ++token)
        for (int64_t n = 0; n < weights[i].view.shape.N; ++n)
          ASSERT_EQ(double(found[size_t(token * outputs + at[i] + n)]), expected[token % 2][size_t(n)])
              << "token " << token << ", part " << i << ", output " << n;
    }
  }
}

TEST_P(CudaGemv, SeventyThousandOutputsAndOffsetsPastTwoGib) {
  // 70,144 outputs or more, 2.3e9 bytes of codes or more.
  constexpr int64_t K = 65536;
  const cuda::ColumnForm& form = cuda::column_form(layout::get(GetParam()));
  const int64_t rows = std::max<int64_t>(274, 274 * 128 / form.code_bytes);
  const Weight w = make_weight(GetParam(), {256, K}, 0, 13, true);
  const Loaded row = load(w.view);
  if (device().free_bytes() < (rows * K + 7) * (form.code_bytes + form.header_bytes))
    GTEST_SKIP() << "SKIPPED: the card is too small";
  cuda::Buffer codes(device(), (rows * K + 7) * form.code_bytes, "codes");
  cuda::Buffer headers(device(), rows * K * form.header_bytes, "headers");
  codes.fill(0), headers.fill(0);  // rows of zeros but the last
  codes.upload(row.group.codes.bytes(), (rows - 1) * K * form.code_bytes);
  headers.upload(row.group.headers.bytes(), (rows - 1) * K * form.header_bytes);
  const std::vector<float> x = whole_inputs(K, 14);
  const cuda::Buffer x_there = to_device(x);
  for (const Inputs inputs : {Inputs::dense, Inputs::threshold}) {
    const cuda::Buffer y = to_device(std::vector<float>(size_t(rows * 256), 0.0f));
    GemvArgs args;
    args.weights = {codes.data(), headers.data(), rows, K};
    args.inputs = inputs;
    args.x = x_there.as<float>();
    args.threshold = 1.5f;
    args.y = y.as<float>();
    cuda::launch_gemv(device(), stream(), *row.group.layout,
                      cuda::default_plan(device().info(), *row.group.layout, args.weights, inputs), args);
    stream().synchronize();
    const std::vector<float> result = to_host<float>(y);
    const std::vector<double> expected = reference(w, x, inputs == Inputs::dense ? every(K) : active_of(x, 1.5f));
    for (int64_t n = 0; n < (rows - 1) * 256; ++n) ASSERT_EQ(result[size_t(n)], 0.0f) << n;
    for (int64_t n = 0; n < 256; ++n) ASSERT_EQ(double(result[size_t((rows - 1) * 256 + n)]), expected[size_t(n)]) << n;
  }
}

TEST_P(CudaGemv, RefusesPlansThatNoKernelHas) {
  const Weight w = make_weight(GetParam(), {256, 4096}, 0, 15, true);
  const Loaded there = load(w.view);
  const std::vector<float> x(4096, 1.0f);
  const layout::Layout& l = *there.group.layout;
  GemvPlan plan = cuda::kernel_plans(l)[0];
  GemvArgs args;
  args.weights = there.columns();
  for (const int segments : {0, 3, 257}) {
    plan.segments = segments;
    EXPECT_THROW(cuda::launch_gemv(device(), stream(), l, plan, args), Error) << segments;
  }
  plan.segments = 4;
  args.is_sibling = true;
  const cuda::Buffer zero = to_device(std::vector<float>(4));
  args.zero = zero.as<float>();
  EXPECT_THROW(cuda::launch_gemv(device(), stream(), l, plan, args), Error);
  args.zero = nullptr;
  plan.chunk = 7;
  EXPECT_THROW(cuda::launch_gemv(device(), stream(), l, plan, args), Error);
}

INSTANTIATE_TEST_SUITE_P(EachLayout, CudaGemv,
                         testing::Values(Id::zz2_k, Id::zz3_k, Id::zz4_k, Id::zz5_k, Id::zz6_k, Id::zz8),
                         [](const auto& of) { return std::string(layout::get(of.param).name); });

class CudaDevice : public CudaTest {};

TEST_F(CudaDevice, TooSmallACardIsAnErrorThatSaysWhatIsNeeded) {
  cuda::Device small({.index = 0, .memory_limit = int64_t{1} << 20});
  const cuda::Buffer fits(small, 3 << 18, "a part");
  EXPECT_EQ(small.free_bytes(), 1 << 18);
  try {
    const cuda::Buffer more(small, int64_t{3} << 30, "weights of 32 layers");
    FAIL() << "no error";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("weights of 32 layers: 3.00 GiB of device memory needed"), std::string::npos) << text;
    EXPECT_NE(text.find("0.00 GiB left of the limit that was given"), std::string::npos) << text;
  }
}

TEST_F(CudaDevice, NoSuchDevice) {
  try {
    cuda::Device({.index = 99});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("there is no device 99"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace lacuna
