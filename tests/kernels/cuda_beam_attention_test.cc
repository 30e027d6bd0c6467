// tests/kernels/cuda_beam_attention_test.cc - attention of beams on a device against double precision.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda_memory.h"
#include "kernels/heads.h"

namespace lacuna {
namespace {

using test::device;
using test::HeadCase;
using test::HeadData;
using test::kEps;
using test::kHeadCases;
using test::OnDevice;
using test::reference_attention;
using test::stream;

class CudaBeamHeads : public testing::TestWithParam<HeadCase> {};
INSTANTIATE_TEST_SUITE_P(Shapes, CudaBeamHeads, testing::ValuesIn(kHeadCases));

// Beams share what lies before `first`; behind it each reads the slots that the table says and stores its own.
TEST_P(CudaBeamHeads, Attention) {
  LACUNA_NEED_DEVICE();
  const HeadCase c = GetParam();
  const int64_t M = 4, D = c.head_dim, width = c.n_heads * D, kv_width = c.n_kv_heads * D;
  const double bound = 6 * kEps * (64.0 * (double(D) / 8 + 20) + 60);  // as above
  struct Length {
    int64_t position, first, window;
  };
  for (const Length& at :
       {Length{298, 290, 0}, {298, 100, 0}, {298, 298, 0}, {40, 1, 0}, {298, 200, 30}, {1500, 700, 0}}) {
    if (test::emulated() && at.position > (c.n_heads > 16 ? 100 : 300)) continue;
    SCOPED_TRACE(fmt::format("position {} first {} window {}", at.position, at.first, at.window));
    HeadData data(c, M, at.position, at.position + 5);
    const int64_t room = at.position - at.first + 3;
    const int64_t values_of_slot = c.n_kv_heads * room * D;
    const auto keys = HeadData::halves(M * values_of_slot, 8), values = HeadData::halves(M * values_of_slot, 9);
    const OnDevice<f16> keys_there(keys), values_there(values);
    Rng rng(10);
    std::vector<uint32_t> sources(static_cast<size_t>(room), 0xffffffffu);
    for (int64_t i = 0; i < at.position - at.first; ++i) {
      sources[size_t(i)] = 0;
      for (int b = 0; b < 4; ++b) sources[size_t(i)] |= uint32_t(rng.below(4)) << (8 * b);
    }
    sources[size_t(at.position - at.first)] = 0x03020100u;
    const OnDevice<uint32_t> sources_there(sources);
    const OnDevice<int32_t> first_there(std::vector<int32_t>{int32_t(at.first)});
    OnDevice<std::byte> workspace(size_t(cuda::attention_workspace_bytes(device(), M, c.n_heads, c.n_kv_heads, D)));
    workspace.buffer().fill(0);
    const OnDevice<float> out(size_t(M * width));
    cuda::AttentionArgs args;
    args.heads = data.heads();
    args.heads.beams = {keys_there.data(), values_there.data(), room, sources_there.data(), first_there.data()};
    args.with_heads = true;
    args.window = at.window;
    args.scale = 1 / std::sqrt(float(D));
    args.out = out.data();
    args.workspace = workspace.data();
    cuda::launch_attention(device(), stream(), args);
    const auto got = out.values();
    EXPECT_EQ(std::memcmp(data.keys_there.values().data(), data.keys.data(), data.keys.size() * 2), 0);
    const auto keys_after = keys_there.values(), values_after = values_there.values();
    for (int64_t m = 0; m < M; ++m) {
      HeadData one(c, 1, at.position, at.position + 5);
      one.q.assign(&data.q[size_t(m * width)], &data.q[size_t(m * width)] + width);
      one.k.assign(&data.k[size_t(m * kv_width)], &data.k[size_t(m * kv_width)] + kv_width);
      one.v.assign(&data.v[size_t(m * kv_width)], &data.v[size_t(m * kv_width)] + kv_width);
      one.run_on_cpu();
      for (int64_t head = 0; head < c.n_kv_heads; ++head) {
        for (int64_t t = at.first; t <= at.position; ++t) {
          const int64_t slot = sources[size_t(t - at.first)] >> (8 * m) & 255;
          const auto from = size_t(slot * values_of_slot + (head * room + t - at.first) * D);
          const auto to = size_t((head * one.capacity + t) * D);
          for (size_t e = 0; e < size_t(D); ++e) {
            if (t == at.position) {
              const float expected = to_float(one.keys[to + e]);
              ASSERT_NEAR(to_float(keys_after[from + e]), expected, std::abs(expected) * 0x1p-10 + 0x1p-19);
              ASSERT_EQ(to_float(values_after[from + e]), to_float(one.values[to + e]));
            } else {
              ASSERT_EQ(to_float(keys_after[from + e]), to_float(keys[from + e])) << "written elsewhere";
            }
            one.keys[to + e] = keys_after[from + e], one.values[to + e] = values_after[from + e];
          }
        }
      }
      const auto expected =
          reference_attention(one, one.q.data(), one.keys, one.values, at.position, at.window, args.scale);
      for (size_t i = 0; i < size_t(width); ++i)
        ASSERT_NEAR(got[size_t(m * width) + i], expected[i], bound) << m << ' ' << i;
    }
  }
}

TEST(CudaBeamErrors, BeamsThatCannotBeAreRefused) {
  LACUNA_NEED_DEVICE();
  const HeadData data(kHeadCases[0], 4, 3, 8);
  cuda::AttentionArgs args;
  args.heads = data.heads();
  args.heads.beams.keys = data.keys_there.data();
  EXPECT_THROW(cuda::launch_attention(device(), stream(), args), Error);  // not with_heads
  EXPECT_THROW(cuda::launch_heads(device(), stream(), args.heads), Error);
  args.with_heads = true;
  args.heads.M = 5;
  EXPECT_THROW(cuda::launch_attention(device(), stream(), args), Error);
}

}  // namespace
}  // namespace lacuna
