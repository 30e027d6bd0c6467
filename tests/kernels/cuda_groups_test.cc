// tests/kernels/cuda_groups_test.cc - the CUDA kernels over group-sparse weights against double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "grouped_weights.h"
#include "kernels/cuda/groups.h"
#include "kernels/cuda_memory.h"
#include "kernels/support.h"

namespace lacuna {
namespace {

using cuda::Groups;
using cuda::GroupsArgs;
using cuda::GroupsForm;
using cuda::GroupsPlan;
using cuda::InputBits;
using cuda::Math;
using cuda::Split;
using kernels::WeightView;
using layout::Id;
using test::device;
using test::OnDevice;
using test::stream;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

std::vector<float> inputs(int64_t K, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> x(static_cast<size_t>(K));
  for (float& value : x) value = float(rng.normal() * std::exp(rng.normal()));
  return x;
}

/// Parts on the device.
struct Uploaded {
  std::vector<test::GroupedWeight> parts;
  cuda::PreparedGroups prepared;
  OnDevice<std::byte> memory;
  Groups placed;

  explicit Uploaded(std::vector<test::GroupedWeight> weights, std::optional<GroupsForm> form = std::nullopt)
      : parts(std::move(weights)), prepared(prepare(parts, form)), memory(bytes_of(prepared)) {
    placed = cuda::laid_out(prepared, memory.data());
  }
  static cuda::PreparedGroups prepare(const std::vector<test::GroupedWeight>& parts, std::optional<GroupsForm> form) {
    std::vector<WeightView> views;
    for (const test::GroupedWeight& w : parts) views.push_back({"w", w.layout, w.shape, w.bytes, {}, w.params});
    return cuda::prepare_groups(views, test::pool(), form);
  }
  static std::vector<std::byte> bytes_of(const cuda::PreparedGroups& p) {
    std::vector<std::byte> out(size_t(cuda::laid_out_bytes(p)));
    cuda::each_part(p, [&](int64_t at, std::span<const std::byte> bytes) {
      std::copy(bytes.begin(), bytes.end(), out.begin() + at);
    });
    return out;
  }
  const layout::Layout& layout() const { return *prepared.layout; }
  int64_t outputs() const { return prepared.panels * cuda::kPanelRows; }
  const Groups& groups() const { return placed; }
};

/// Both, where weights have both.
std::vector<GroupsForm> forms(Id id, int64_t group) {
  if (cuda::has_units(layout::get(id), group, 4096)) return {GroupsForm::chunks, GroupsForm::units};
  return {GroupsForm::chunks};
}

struct Run {
  const float* x;
  const float* up = nullptr;
  float threshold = 0;
  const float* norms = nullptr;
  InputBits bits = InputBits::half;
  bool fixed_order = false;
  const std::byte* ready = nullptr;
};

using How = Run;  // in a test Run is gtest's

/// The padded results; with a workspace starting from 0.25.
std::vector<float> run(const Uploaded& w, GroupsPlan plan, const Run& how) {
  OnDevice<float> y(std::vector<float>(size_t(w.outputs()), how.fixed_order ? kNan : 0.25f));
  OnDevice<float> start(std::vector<float>(size_t(w.outputs()), 0.25f)), zero(size_t(64));
  OnDevice<float> partial(size_t(cuda::groups_partial_bytes(w.groups(), plan.blocks)) / sizeof(float));
  OnDevice<uint32_t> arrived(std::vector<uint32_t>(size_t(w.prepared.panels), 0));
  GroupsArgs args;
  args.weights = w.groups();
  args.input_bits = how.bits;
  args.x = how.x, args.up = how.up, args.threshold = how.threshold, args.norms = how.norms;
  args.ready = how.ready;
  args.y = y.data(), args.zero = zero.data(), args.zero_count = 64;
  if (how.fixed_order) args.workspace = {partial.data(), arrived.data(), start.data()};
  cuda::launch_groups(device(), stream(), w.layout(), plan, args);
  for (const float z : zero.values()) EXPECT_EQ(z, 0);
  for (const uint32_t a : arrived.values()) EXPECT_EQ(a, 0u);
  return y.values();
}

/// Inputs are off by 2^-11 of themselves or 2^-33 of the largest (int8: half a step of their group; units: half a step
/// of 127 or 32767 of the largest of 16), products and a group's sum by f32's rounding, and a row's sum by half a unit
/// for each group (units: by f32's).
void expect_right(const Uploaded& w, const std::vector<float>& y, const std::vector<float>& x, InputBits bits,
                  const std::string& what) {
  const bool units = w.groups().are_units();
  const int64_t K = w.prepared.K, g = units ? cuda::kUnit : w.prepared.group;
  double largest = 0;
  for (const float v : x) largest = std::max(largest, std::fabs(double(v)));
  std::vector<double> off(x.size());
  for (int64_t k = 0; k < K; ++k) {
    double step = 0;
    for (int64_t i = k / g * g; i < std::min(K, (k / g + 1) * g); ++i)
      step = std::max(step, std::fabs(double(x[size_t(i)])) / (bits == InputBits::half ? 32767 : 127));
    off[size_t(k)] = bits == InputBits::half && !units ? std::fabs(double(x[size_t(k)])) * 0x1p-11 + largest * 0x1p-33
                                                       : step * (0.5 + 1e-4);
  }
  for (size_t p = 0; p < w.parts.size(); ++p) {
    const test::GroupedWeight& part = w.parts[p];
    for (int64_t n = 0; n < part.shape.N; ++n) {
      const int64_t at = w.prepared.first_output[p] + n;
      double exact = 0.25, slack = 0, through = 0;
      for (int64_t k = 0; k < K; ++k) {
        const auto i = size_t(n * K + k);
        exact += double(part.decoded[i]) * double(x[size_t(k)]);
        slack += std::fabs(double(part.decoded[i])) * off[size_t(k)];
        through += double(part.largest[i]) * std::fabs(double(x[size_t(k)]));
      }
      slack += 1e-6;
      if (units) {
        slack += through * double(K / cuda::kUnit + 16) * 0x1p-23;
      } else {
        const double unit = double(w.prepared.bound[size_t(at / cuda::kPanelRows)]) * largest * 0x1p-29;
        slack += through * double(g + 16) * 0x1p-23 + unit * double((K + g - 1) / g);
      }
      ASSERT_LE(std::fabs(double(y[size_t(at)]) - exact), slack) << what << " output " << n << " of part " << p;
    }
  }
}

std::vector<GroupsPlan> all_plans(const Uploaded& w) {
  std::vector<GroupsPlan> out;
  for (GroupsPlan plan : cuda::groups_plans(w.layout(), w.groups().are_units())) {
    for (const Split split : {Split::stream, Split::slice}) {
      plan.split = split;
      out.push_back(cuda::filled(device().info(), w.groups(), plan));
      out.back().blocks = int(split == Split::stream ? std::min<int64_t>(3, w.groups().count) : 3 * w.prepared.panels);
      out.push_back(cuda::filled(device().info(), w.groups(), plan));
    }
  }
  if (!w.groups().are_units() && (w.layout().bits == 3 || w.layout().bits == 4)) {
    GroupsPlan plan{8, 16, Split::stream, Math::fma, 0};
    out.push_back(cuda::filled(device().info(), w.groups(), plan));
  }
  return out;
}

TEST(CudaGroups, EveryLayoutGroupAndPlanIsRight) {
  LACUNA_NEED_DEVICE();
  for (const Id id : {Id::gs2, Id::gs3, Id::gs4, Id::gs8, Id::gs16}) {
    for (const int64_t g : {8, 16, 32, 64, 128}) {
      for (const double sparsity : {0.0, 0.5, 0.9}) {
        if (test::emulated() && sparsity != 0.5) continue;
        const int64_t K = 9 * g + 12;
        test::GroupedOptions options{.group_size = g, .sparsity = sparsity, .dropped_row = 3, .dropped_input = 2 * g};
        const std::vector<float> x = inputs(K, 5);
        const OnDevice<float> on_device(x);
        for (const GroupsForm form : forms(id, g)) {
          const Uploaded w({test::grouped_weight(id, test::emulated() ? 270 : 600, K, 1, options),
                            test::grouped_weight(id, 1, K, 2, options)},
                           form);
          int turn = int(g);
          for (const GroupsPlan& plan : all_plans(w))
            for (const bool fixed_order : {false, true})
              for (const InputBits bits : {InputBits::half, InputBits::int8})
                if (!test::emulated() || turn++ % 17 == 0)
                  expect_right(w, run(w, plan, {.x = on_device.data(), .bits = bits, .fixed_order = fixed_order}), x,
                               bits,
                               std::string(w.layout().name) + " g" + std::to_string(g) + ", " + cuda::describe(plan));
        }
      }
    }
  }
}

TEST(CudaGroups, AModelsShapeWithUnevenRows) {
  LACUNA_NEED_DEVICE();
  if (test::emulated()) GTEST_SKIP() << "SKIPPED: takes a card";
  // RECIPES 23: panels that keep a tenth to all of their groups.
  std::vector<test::GroupedWeight> parts;
  for (const double sparsity : {0.9, 0.0, 0.5, 0.99})
    parts.push_back(test::grouped_weight(Id::gs4, 1024, 4096, 3, {.group_size = 16, .sparsity = sparsity}));
  const std::vector<float> x = inputs(4096, 6);
  const OnDevice<float> on_device(x);
  for (const GroupsForm form : forms(Id::gs4, 16)) {
    const Uploaded w(parts, form);
    for (const GroupsPlan& plan : all_plans(w))
      for (const bool fixed_order : {false, true})
        expect_right(w, run(w, plan, {.x = on_device.data(), .fixed_order = fixed_order}), x, InputBits::half,
                     cuda::describe(plan));
  }
}

TEST(CudaGroups, AFixedOrderGivesTheSameBitsAThousandTimes) {
  LACUNA_NEED_DEVICE();
  if (test::emulated()) GTEST_SKIP() << "SKIPPED: takes a card";
  for (const GroupsForm form : forms(Id::gs4, 16)) {
    const Uploaded w({test::grouped_weight(Id::gs4, 4096, 4096, 3, {.group_size = 16, .sparsity = 0.5})}, form);
    const OnDevice<float> x(inputs(4096, 6));
    const GroupsPlan plan = cuda::default_plan(device().info(), w.layout(), w.groups());
    const std::vector<float> first = run(w, plan, {.x = x.data(), .fixed_order = true});
    for (int i = 0; i < 1000; ++i) {
      const std::vector<float> again = run(w, plan, {.x = x.data(), .fixed_order = true});
      ASSERT_EQ(std::memcmp(first.data(), again.data(), first.size() * sizeof(float)), 0) << "run " << i;
    }
  }
}

TEST(CudaGroups, GatesAndThresholdsOnTheWay) {
  LACUNA_NEED_DEVICE();
  const int64_t K = 1000;
  for (const GroupsForm form : forms(Id::gs4, 16)) {
    const Uploaded w({test::grouped_weight(Id::gs4, 300, K, 3, {.group_size = 16, .sparsity = 0.5})}, form);
    const std::vector<float> gate = inputs(K, 1), up = inputs(K, 2), norms = [&] {
      std::vector<float> v = inputs(K, 3);
      for (float& n : v) n = std::fabs(n);
      return v;
    }();
    const OnDevice<float> on_gate(gate), on_up(up), on_norms(norms);
    const GroupsPlan plan = cuda::default_plan(device().info(), w.layout(), w.groups());
    for (const bool by_norms : {false, true}) {
      std::vector<float> x(gate.size());
      for (size_t k = 0; k < x.size(); ++k) {
        x[k] = gate[k] / (1 + std::exp(-gate[k])) * up[k];
        // The kernel's silu rounds: inputs at the threshold would be a matter of luck.
        const float size = std::fabs(x[k]) * (by_norms ? norms[k] : 1.0f);
        ASSERT_GT(std::fabs(size - 0.3f), 1e-6f);
        if (size < 0.3f) x[k] = 0;
      }
      const std::vector<float> y = run(
          w, plan,
          {.x = on_gate.data(), .up = on_up.data(), .threshold = 0.3f, .norms = by_norms ? on_norms.data() : nullptr});
      expect_right(w, y, x, InputBits::half, by_norms ? "by norms" : "by size");
    }
  }
}

// Inputs made once give the bits of those that every block makes.
TEST(CudaGroups, InputsThatAreReady) {
  LACUNA_NEED_DEVICE();
  for (const int64_t K : {16, 1000, 4096}) {
    const Uploaded w({test::grouped_weight(Id::gs4, 300, K, 3, {.group_size = 16, .sparsity = 0.5})},
                     GroupsForm::units);
    const OnDevice<float> x(inputs(K, 1)), up(inputs(K, 2));
    const GroupsPlan plan = cuda::default_plan(device().info(), w.layout(), w.groups());
    for (const InputBits bits : {InputBits::half, InputBits::int8}) {
      for (const bool gated : {false, true}) {
        const OnDevice<std::byte> ready(size_t(cuda::group_inputs_bytes(K)));
        How how = {
            .x = x.data(), .up = gated ? up.data() : nullptr, .threshold = 0.3f, .bits = bits, .fixed_order = true};
        const std::vector<float> apart = run(w, plan, how);
        GroupsArgs args;
        args.weights = w.groups();
        args.input_bits = bits;
        args.x = how.x, args.up = how.up, args.threshold = how.threshold;
        cuda::launch_group_inputs(device(), stream(), args, ready.data());
        how.x = how.up = nullptr, how.ready = ready.data();
        const std::vector<float> once = run(w, plan, how);
        for (int64_t n = 0; n < 300; ++n)
          ASSERT_EQ(apart[size_t(n)], once[size_t(n)]) << K << " inputs, output " << n << (gated ? ", gated" : "");
      }
    }
  }
}

TEST(CudaGroups, LargeSmallAndNoInputs) {
  LACUNA_NEED_DEVICE();
  const int64_t K = 700;
  for (const GroupsForm form : forms(Id::gs4, 16)) {
    const Uploaded w({test::grouped_weight(Id::gs4, 300, K, 3, {.group_size = 16, .sparsity = 0.5})}, form);
    const GroupsPlan plan = cuda::default_plan(device().info(), w.layout(), w.groups());
    for (const float size : {0.0f, 1e-38f, 1e-20f, 1e20f, 1e34f}) {
      std::vector<float> x = inputs(K, 4);
      for (float& v : x) v *= size;
      const OnDevice<float> on_device(x);
      const std::vector<float> y = run(w, plan, {.x = on_device.data(), .fixed_order = true});
      for (int64_t n = 0; n < 300; ++n) {
        double exact = 0, sum = 0;
        for (int64_t k = 0; k < K; ++k) {
          const double term = double(w.parts[0].decoded[size_t(n * K + k)]) * double(x[size_t(k)]);
          exact += term, sum += std::fabs(term);
        }
        // 0.25 is where the sums start.
        ASSERT_LE(std::fabs(double(y[size_t(n)]) - 0.25 - exact), 2e-3 * sum + 1e-7) << size << " output " << n;
      }
    }
  }
}

TEST(CudaGroups, WhatIsNotFiniteShows) {
  LACUNA_NEED_DEVICE();
  const int64_t K = 512;
  for (const GroupsForm form : forms(Id::gs4, 16)) {
    const Uploaded w({test::grouped_weight(Id::gs4, 300, K, 3, {.group_size = 16, .sparsity = 0})}, form);
    const GroupsPlan plan = cuda::default_plan(device().info(), w.layout(), w.groups());
    for (const float bad : {kNan, kInf, -kInf}) {
      for (const bool fixed_order : {false, true}) {
        std::vector<float> x = inputs(K, 4);
        x[77] = bad;
        const OnDevice<float> on_device(x);
        const std::vector<float> y = run(w, plan, {.x = on_device.data(), .fixed_order = fixed_order});
        for (int64_t n = 0; n < 300; ++n) ASSERT_FALSE(std::isfinite(y[size_t(n)])) << bad << " output " << n;
      }
    }
  }
}

/// Outputs [first, first + rows) as an operand, and that nothing behind it is written.
void expect_operand(const Uploaded& w, int64_t first, int64_t rows) {
  const int64_t K = w.prepared.K, tiles = (K + 63) / 64;
  const OnDevice<float> scale(w.prepared.scale);
  OnDevice<std::byte> operand(size_t(cuda::operand_bytes(rows, K)) + 256);
  cuda::launch_gemm_weights(device(), stream(), w.layout(), w.groups(), first,
                            {operand.data(), scale.data() + first, rows, K});
  const std::vector<std::byte> bytes = operand.values();
  for (size_t i = bytes.size() - 256; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], std::byte{0xff});
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t k = 0; k < tiles * 64; ++k) {
      const int64_t tile = n / 128 * tiles + k / 64, piece = k % 64 / 8;
      f16 half;
      std::memcpy(&half, &bytes[size_t(tile * 16384 + n % 128 * 128 + (piece ^ (n % 8)) * 16 + k % 8 * 2)], 2);
      const float want = k < K ? w.parts[0].decoded[size_t((first + n) * K + k)] : 0;
      const float got = to_float(half) * w.prepared.scale[size_t(first + n)];
      ASSERT_LE(std::fabs(got - want), std::fabs(want) * 0x1p-11f + 1e-12f)
          << w.layout().name << " g" << w.prepared.group << " [" << n << ", " << k << "]";
    }
  }
}

TEST(CudaGroups, OperandsHoldTheWeights) {
  LACUNA_NEED_DEVICE();
  for (const Id id : {Id::gs2, Id::gs3, Id::gs4, Id::gs8, Id::gs16}) {
    for (const int64_t g : {8, 16, 32, 64, 128}) {
      if (test::emulated() && g > 32) continue;
      for (const GroupsForm form : forms(id, g))
        expect_operand(
            Uploaded({test::grouped_weight(id, 560, 5 * g + 3, 1, {.group_size = g, .sparsity = 0.5})}, form), 256,
            300);
    }
  }
}

// All warps of a launch, 32 a multiprocessor, take fewer chunks or records at a time than there are: 128 groups are a
// chunk, 64 a record. The zeros before them take several rounds too.
TEST(CudaGroups, WarpsWriteSeveralPartsOfAnOperand) {
  LACUNA_NEED_DEVICE();
  const int64_t K = 96 * device().info().multiprocessors;
  for (const auto& [id, g, form] :
       {std::tuple{Id::gs2, 8, GroupsForm::chunks}, std::tuple{Id::gs4, 16, GroupsForm::units}}) {
    const Uploaded w({test::grouped_weight(id, 512, K, 4, {.group_size = g, .dropped_row = 3})}, form);
    ASSERT_GT(w.groups().count, 40 * device().info().multiprocessors);
    expect_operand(w, 0, 512);
  }
}

TEST(CudaGroups, ErrorsSayWhatDoesNotRun) {
  LACUNA_NEED_DEVICE();
  const Uploaded w({test::grouped_weight(Id::gs4, 300, 64, 3, {.group_size = 16, .sparsity = 0.5})},
                   GroupsForm::chunks);
  GroupsArgs args;
  args.weights = w.groups();
  const auto launch = [&](const GroupsPlan& plan, Id id = Id::gs4) {
    cuda::launch_groups(device(), stream(), layout::get(id), plan, args);
  };
  EXPECT_THROW(launch({8, 24, Split::stream, Math::mma, 0}), Error);
  EXPECT_THROW(launch({8, 24, Split::stream, Math::mma, 1 << 20}), Error);
  EXPECT_THROW(launch({8, 24, Split::slice, Math::mma, 3}), Error);
  EXPECT_THROW(launch({7, 24, Split::stream, Math::mma, 1}), Error);
  EXPECT_THROW(launch({8, 24, Split::stream, Math::mma, 1}, Id::q4_K), Error);
  const Uploaded units(w.parts, GroupsForm::units);
  args.weights = units.groups();
  EXPECT_THROW(launch({8, 24, Split::stream, Math::mma, 1}), Error);
  EXPECT_THROW(launch({16, 32, Split::stream, Math::dot, 0}), Error);
}

}  // namespace
}  // namespace lacuna
