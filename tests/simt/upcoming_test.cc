// tests/simt/upcoming_test.cc - what a launch over group-sparse weights asks for in L2 of the one after it.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "grouped_weights.h"
#include "kernels/cuda/groups.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda_memory.h"
#include "kernels/support.h"

namespace lacuna {
namespace {

using cuda::GroupsForm;
using cuda::GroupsPlan;
using layout::Id;

struct Weights {
  test::GroupedWeight part;
  cuda::PreparedGroups prepared;
  std::vector<std::byte> memory;
  cuda::Groups placed;

  Weights(int64_t N, int64_t K, GroupsForm form)
      : part(test::grouped_weight(Id::gs4, N, K, 3, {.group_size = 16, .sparsity = 0.5})) {
    const kernels::WeightView view{"w", part.layout, part.shape, part.bytes, {}, part.params};
    prepared = cuda::prepare_groups({&view, 1}, test::pool(), form);
    memory.resize(size_t(cuda::laid_out_bytes(prepared)) + 16);
    auto* const base = memory.data() + (16 - reinterpret_cast<uintptr_t>(memory.data()) % 16) % 16;
    cuda::each_part(prepared, [&](int64_t at, std::span<const std::byte> bytes) {
      std::copy(bytes.begin(), bytes.end(), base + at);
    });
    placed = cuda::laid_out(prepared, base);
  }
  int record_bytes() const { return placed.are_units() ? cuda::UnitForm(4).bytes : cuda::GroupForm(4, 16).bytes; }
};

/// How often each record is asked for.
std::map<int64_t, int> asked_of(const Weights& w, const Weights& next, const GroupsPlan& plan,
                                const GroupsPlan& of_next) {
  const std::vector<float> x(size_t(w.placed.K), 1.0f);
  std::vector<float> y(size_t(w.placed.panels * cuda::kPanelRows));
  cuda::GroupsArgs args;
  args.weights = w.placed;
  args.x = x.data();
  args.y = y.data();
  args.next = cuda::upcoming(*next.prepared.layout, next.placed, of_next);
  cuda::asked_for.clear();
  cuda::launch_groups(test::device(), test::stream(), *w.prepared.layout, plan, args);
  std::map<int64_t, int> out;
  for (const cuda::Asked& asked : cuda::asked_for) {
    const int64_t at = asked.from - next.placed.chunks, bytes = next.record_bytes();
    EXPECT_EQ(at % bytes, 0);
    EXPECT_EQ(asked.bytes % uint32_t(bytes), 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(asked.from) % 16, 0u);
    for (int64_t r = at / bytes; r < (at + asked.bytes) / bytes; ++r) ++out[r];
  }
  return out;
}

GroupsPlan plan_of(const Weights& w, int blocks, int early) {
  GroupsPlan plan = cuda::groups_plans(*w.prepared.layout, w.placed.are_units())[0];
  plan.blocks = blocks, plan.early = early;
  return plan;
}

// The first records of each warp's range, as the kernel of the next launch divides them, each once.
TEST(Upcoming, TheFirstRecordsOfEveryWarpOnce) {
  const Weights w(300, 200, GroupsForm::units), next(1030, 500, GroupsForm::units);
  for (const int early : {1, 2, 5}) {
    for (const int blocks : {1, 3, 7}) {
      const GroupsPlan of_next = plan_of(next, blocks, early);
      std::map<int64_t, int> expected;
      const int64_t warps = int64_t{blocks} * of_next.warps, count = next.placed.count;
      for (int64_t warp = 0, begin = 0; warp < warps; ++warp) {
        const int64_t records = count / warps + (warp < count % warps);
        for (int64_t r = begin; r < begin + std::min<int64_t>(records, early); ++r) expected[r] = 1;
        begin += records;
      }
      EXPECT_EQ(asked_of(w, next, plan_of(w, 2, 0), of_next), expected) << early << " early, " << blocks << " blocks";
      // More warps than records: those without any ask too.
      EXPECT_EQ(asked_of(w, next, plan_of(w, int(w.placed.count), 0), of_next), expected);
    }
  }
}

TEST(Upcoming, ChunksOfEveryBlockOnce) {
  const Weights w(300, 200, GroupsForm::chunks), next(1030, 500, GroupsForm::chunks);
  const GroupsPlan of_next = plan_of(next, 3, 1);
  std::map<int64_t, int> expected;
  for (int64_t block = 0, begin = 0; block < 3; ++block) {
    const int64_t chunks = next.placed.count / 3 + (block < next.placed.count % 3);
    for (int64_t c = begin; c < begin + std::min<int64_t>(chunks, of_next.warps); ++c) expected[c] = 1;
    begin += chunks;
  }
  EXPECT_EQ(asked_of(w, next, plan_of(w, 2, 0), of_next), expected);
}

TEST(Upcoming, AllOrNothing) {
  const Weights w(300, 200, GroupsForm::units), next(600, 300, GroupsForm::units);
  EXPECT_EQ(int64_t(asked_of(w, next, plan_of(w, 2, 0), plan_of(next, 2, 1 << 20)).size()), next.placed.count);
  EXPECT_TRUE(asked_of(w, next, plan_of(w, 2, 0), plan_of(next, 2, 0)).empty());
}

}  // namespace
}  // namespace lacuna
