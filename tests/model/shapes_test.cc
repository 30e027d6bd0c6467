#include "model/shapes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/error.h"

namespace lacuna::model {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

int64_t weights_of(const LinearLayers& layers) {
  int64_t weights = 0;
  for (const LinearGroupShape& group : layers.groups)
    for (const int64_t N : group.outputs) weights += N * group.K;
  return weights * layers.n_layers;
}

TEST(LinearLayers, HaveTheWeightsOfTheModelWithoutEmbeddingAndHead) {
  EXPECT_EQ(weights_of(linear_layers("llama-2-7b")), 6'738'415'616 - 2 * 32000 * 4096 - (2 * 32 + 1) * 4096);
  EXPECT_EQ(weights_of(linear_layers("llama-3-8b")), 8'030'261'248 - 2 * 128256 * 4096 - (2 * 32 + 1) * 4096);
}

TEST(LinearLayers, OfOptHaveNoGate) {
  const LinearLayers layers = linear_layers("opt-6.7b");
  ASSERT_EQ(layers.groups.size(), 4u);
  EXPECT_EQ(layers.groups[2].name, "up");
  EXPECT_THAT(layers.groups[2].outputs, ElementsAre(16384));
}

TEST(LinearLayers, OfOneMatrixAreMoreThanACacheHolds) {
  const LinearLayers layers = linear_layers("4096x11008");
  EXPECT_EQ(layers.name, "4096x11008");
  ASSERT_EQ(layers.groups.size(), 1u);
  EXPECT_THAT(layers.groups[0].outputs, ElementsAre(4096));
  EXPECT_EQ(layers.groups[0].K, 11008);
  EXPECT_EQ(linear_layers("4096x4096").n_layers, 64);
  for (const char* name : {"256x256", "4096x4096", "4096x11008", "1048576x1048576"}) {
    EXPECT_GE(weights_of(linear_layers(name)) / 4, 256 << 20) << name;
    EXPECT_GE(linear_layers(name).n_layers, 2) << name;
  }
}

TEST(LinearLayers, RefuseWhatIsNoShape) {
  EXPECT_THAT([] { linear_layers("128x4096"); }, ThrowsMessage<Error>(HasSubstr("expected N and K from 256")));
  for (const char* name : {"", "x", "4096x", "x4096", "4096x4096x2", "4096 x4096", "llama-2-7"})
    EXPECT_THAT([&] { linear_layers(name); }, ThrowsMessage<Error>(HasSubstr("known: llama-2-7b"))) << name;
  EXPECT_THROW(linear_layers("-4096x4096"), Error);
}

}  // namespace
}  // namespace lacuna::model
