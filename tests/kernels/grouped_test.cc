// tests/kernels/grouped_test.cc - the gq, bm, gs and nm24_q4 kernels of every instruction set against double precision.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "grouped_weights.h"
#include "kernels/cpu/linear_kernel.h"
#include "kernels/linear.h"
#include "kernels/support.h"

namespace lacuna {
namespace {

using cpu::Isa;
using kernels::Output;
using kernels::Prepare;
using kernels::WeightView;
using layout::Family;
using layout::Id;
using test::grouped_layouts;
using test::grouped_weight;
using test::GroupedOptions;
using test::GroupedWeight;
using test::isas;
using test::pool;
using test::random_inputs;

WeightView view_of(const GroupedWeight& w, std::span<const float> bias = {}) {
  return {std::string(w.layout->name) + ".weight", w.layout, w.shape, w.bytes, bias, w.params};
}

/// Runs a weight into poisoned outputs with guards around them.
std::vector<float> run(Isa isa, Prepare prepare, const WeightView& view, const std::vector<float>& x, int64_t M,
                       std::string* explain = nullptr) {
  const auto [N, K] = view.shape;
  auto group = cpu::make_linear_group(isa, {&view, 1}, pool(), prepare);
  if (explain) *explain = group->explain();
  std::vector<float> y(size_t(M * (N + 5)) + 16, -77.0f), out;
  const Output to{y.data(), N + 5};
  group->run({x.data(), M, K}, {&to, 1});
  for (int64_t i = 0; i < int64_t(y.size()); ++i) {
    if (i < M * (N + 5) && i % (N + 5) < N)
      out.push_back(y[size_t(i)]);
    else
      EXPECT_EQ(y[size_t(i)], -77.0f) << "guard of " << group->explain();
  }
  return out;
}

/// y against the product in double: rounding the inputs changes at most half a step of each times |w|; float sums of a
/// scaled block of 32 and its group's zero round at most K / 8 + 16 times, each time less than the sum of what may pass
/// through.
void check(Isa isa, Prepare prepare, const GroupedWeight& w, int64_t M, bool bias, uint64_t seed) {
  const auto [N, K] = w.shape;
  const std::vector<float> x = random_inputs(M, K, seed);
  std::vector<float> biases;
  for (int64_t n = 0; bias && n < N; ++n) biases.push_back(float(n) - 1.5f);
  std::string explain;
  const std::vector<float> y = run(isa, prepare, view_of(w, biases), x, M, &explain);
  const bool quantized =
      explain.find("panels_") != std::string::npos || explain.find("gemv_groups_") != std::string::npos;
  for (int64_t m = 0; m < M; ++m) {
    std::vector<double> half_step(size_t(K), 0.0);
    for (int64_t k = 0; quantized && k < K; k += 32) {
      float absmax = 0;
      for (int64_t i = k; i < k + 32; ++i) absmax = std::max(absmax, std::fabs(x[size_t(m * K + i)]));
      const double step = double(absmax) / 127 / (M == 1 ? 254 : 1);
      std::fill_n(half_step.begin() + k, 32, 0.5 * step * (1 + 1e-4));
    }
    for (int64_t n = 0; n < N; ++n) {
      double exact = bias ? double(biases[size_t(n)]) : 0, slack = 0, through = std::fabs(exact);
      for (int64_t k = 0; k < K; ++k) {
        const auto at = size_t(n * K + k);
        const double input = x[size_t(m * K + k)];
        exact += double(w.decoded[at]) * input;
        slack += std::fabs(double(w.decoded[at])) * half_step[size_t(k)];
        through += double(w.largest[at]) * std::fabs(input);
      }
      const double bound = slack + 0x1p-23 * double(K / 8 + 16) * through + 1e-30;
      ASSERT_LE(std::fabs(double(y[size_t(m * N + n)]) - exact), bound)
          << cpu::isa_name(isa) << " " << explain << " M=" << M << " m=" << m << " n=" << n << " g"
          << w.params.group_size;
    }
  }
}

class GroupedKernels : public testing::TestWithParam<Isa> {};

// RECIPES 8, 15.
TEST_P(GroupedKernels, EveryShapeAndGroupMatchesDouble) {
  for (const Id id : grouped_layouts()) {
    const layout::Layout& l = layout::get(id);
    for (const int64_t K : {1, 32, 255, 257, 320, 576, 1408}) {
      if (K % l.block_cols != 0) continue;
      const bool has_groups = l.bits < 16 && l.family != Family::two_of_four;
      for (const int64_t group_size : {8, 16, 32, 64, 128, 256, 4096, 0}) {
        if (!has_groups && group_size != 64) continue;
        if (l.family == Family::group_sparse && !layout::is_sparse_group(group_size)) continue;
        for (const int64_t N : {1, 17, 35}) {
          const double sparsity = layout::counts_kept(l) ? (N == 17 ? 0.75 : 0.4) : 0;
          const GroupedWeight w = grouped_weight(id, N, K, uint64_t(N + K), {group_size, sparsity});
          for (const int64_t M : {1, 2, 5})
            ASSERT_NO_FATAL_FAILURE(check(GetParam(), Prepare::automatic, w, M, N == 17, uint64_t(M)));
          if (group_size != 64) continue;
          for (const int64_t M : {1, 3})
            ASSERT_NO_FATAL_FAILURE(check(GetParam(), Prepare::in_place, w, M, N == 17, uint64_t(M)));
        }
      }
    }
  }
}

TEST_P(GroupedKernels, LongRowsAndManyTokens) {
  for (const Id id : grouped_layouts()) {
    const layout::Layout& l = layout::get(id);
    for (const double sparsity : {0.0, 0.5, 0.9, 0.999}) {
      if (sparsity > 0 && !layout::counts_kept(l)) continue;
      const GroupedWeight w = grouped_weight(id, 50, 4544, 3, {128, sparsity});
      for (const int64_t M : {1, 8, 33, 131})
        ASSERT_NO_FATAL_FAILURE(check(GetParam(), Prepare::automatic, w, M, false, 6));
    }
  }
}

// gq takes any zero on its panels; bm's panels want zeros that are codes, others are decoded.
TEST_P(GroupedKernels, ZerosBetweenCodes) {
  for (const Id id : grouped_layouts()) {
    if (layout::get(id).bits == 16 || layout::get(id).family == Family::two_of_four) continue;
    const GroupedWeight w = grouped_weight(id, 20, 256, 5, {64, 0.5, false});
    for (const int64_t M : {1, 4}) ASSERT_NO_FATAL_FAILURE(check(GetParam(), Prepare::automatic, w, M, false, 6));
  }
}

// RECIPES 13: what an input that every row drops holds (up to its block's largest) changes no bit of the result.
TEST_P(GroupedKernels, DroppedWeightsAddNothing) {
  for (const Id id : grouped_layouts()) {
    if (layout::get(id).family == Family::grouped) continue;
    const int64_t N = 40, K = 512, dropped = 261;
    const GroupedWeight w = grouped_weight(id, N, K, 9, {.group_size = 64, .sparsity = 0.5, .dropped_input = dropped});
    for (const Prepare prepare : {Prepare::automatic, Prepare::in_place}) {
      for (const int64_t M : {1, 3}) {
        std::vector<float> x = random_inputs(M, K, 4);
        x[256] = 50;  // the block's largest
        std::vector<std::vector<float>> results;
        for (const float value : {0.0f, 7.25f, -49.9f, 1e-5f}) {
          x[size_t(dropped)] = value;
          results.push_back(run(GetParam(), prepare, view_of(w), x, M));
          EXPECT_EQ(results[0], results.back()) << layout::get(id).name << " " << value;
        }
      }
    }
  }
}

// RECIPES 14, 17: rows that keep nothing give the bias, zero inputs too.
TEST_P(GroupedKernels, NothingKeptAndZeroInputs) {
  for (const Id id : grouped_layouts()) {
    const int64_t N = 19, K = 128;
    const bool masked = layout::counts_kept(layout::get(id));
    const GroupedWeight w = grouped_weight(id, N, K, 2, {.group_size = 32, .sparsity = 0.5, .dropped_row = 16});
    std::vector<float> bias(static_cast<size_t>(N));
    for (size_t n = 0; n < bias.size(); ++n) bias[n] = float(n) * 0.1f;
    for (const int64_t M : {1, 2}) {
      const auto zeros = run(GetParam(), Prepare::automatic, view_of(w, bias), std::vector<float>(size_t(M * K)), M);
      for (int64_t i = 0; i < M * N; ++i) EXPECT_EQ(zeros[size_t(i)], bias[size_t(i % N)]) << layout::get(id).name;
      if (!masked) continue;
      const auto y = run(GetParam(), Prepare::automatic, view_of(w, bias), random_inputs(M, K, 8), M);
      for (int64_t m = 0; m < M; ++m) EXPECT_EQ(y[size_t(m * N + 16)], bias[16]) << layout::get(id).name;
    }
  }
}

TEST_P(GroupedKernels, NonFiniteInputsShow) {
  for (const Id id : grouped_layouts()) {
    const int64_t N = 17, K = 128;
    const GroupedWeight w = grouped_weight(id, N, K, 1, {.group_size = 64, .sparsity = 0.3});
    for (const int64_t M : {1, 2}) {
      std::vector<float> x = random_inputs(M, K, 2);
      x[70] = std::numeric_limits<float>::quiet_NaN();
      const auto y = run(GetParam(), Prepare::automatic, view_of(w), x, M);
      for (int64_t n = 0; n < N; ++n)
        EXPECT_TRUE(!std::isfinite(y[size_t(n)]) || w.decoded[size_t(n * K + 70)] == 0.0f) << layout::get(id).name;
      EXPECT_TRUE(M == 1 || std::isfinite(y.back())) << "the other token";
    }
  }
}

// Neither the number of threads nor the other tokens change a result.
TEST_P(GroupedKernels, TokensAreIndependent) {
  ThreadPool one_thread(1);
  for (const Id id : grouped_layouts()) {
    const int64_t N = 70, K = 512, M = 21;
    const GroupedWeight w = grouped_weight(id, N, K, 9, {.group_size = 128, .sparsity = 0.5});
    const WeightView view = view_of(w);
    const std::vector<float> x = random_inputs(M, K, 3);
    const std::vector<float> all = run(GetParam(), Prepare::automatic, view, x, M);
    const auto alone = cpu::make_linear_group(GetParam(), {&view, 1}, one_thread, Prepare::automatic);
    std::vector<float> few(size_t(2 * N));
    const Output out{few.data(), N};
    alone->run({x.data() + 5 * K, 2, K}, {&out, 1});
    for (int64_t i = 0; i < 2 * N; ++i) EXPECT_EQ(few[size_t(i)], all[size_t(5 * N + i)]) << layout::get(id).name;
  }
}

TEST_P(GroupedKernels, ShapesThatFitRunOnPanels) {
  for (const Id id : grouped_layouts()) {
    if (layout::get(id).bits == 16) continue;
    const GroupedWeight w = grouped_weight(id, 16, 256, 1, {.group_size = 64, .sparsity = 0.5});
    std::string explain;
    run(GetParam(), Prepare::automatic, view_of(w), random_inputs(1, 256, 1), 1, &explain);
    const bool groups = layout::get(id).family == Family::group_sparse && GetParam() != Isa::avx512vnni;
    const char* form = groups ? "groups_" : "panels_";
    EXPECT_NE(explain.find(form + std::string(layout::get(id).name)), std::string::npos) << explain;
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, GroupedKernels, testing::ValuesIn(isas()),
                         [](const auto& isa) { return std::string(cpu::isa_name(isa.param)); });

// Kernels follow what the bytes say of places: lies are refused before one runs.
TEST(GroupedWeights, DamagedBytesAreRefused) {
  GroupedWeight w = grouped_weight(Id::bm4, 20, 256, 1, {.sparsity = 0.5});
  w.bytes[4] ^= std::byte{0xff};  // row_start[1]
  const WeightView view = view_of(w);
  EXPECT_THAT(
      [&] {
        cpu::make_linear_group(Isa::generic, {&view, 1}, pool(), Prepare::automatic);
      },
      testing::ThrowsMessage<Error>(
          testing::AllOf(testing::StartsWith("bm4.weight: row 0 in bm4"), testing::HasSubstr("damaged"))));
}

}  // namespace
}  // namespace lacuna
