// tests/cli/advice_test.cc - what a command says about a model that does not fit the device, and its memory limit.
#include <gtest/gtest.h>

#include "cli/command.h"

namespace lacuna::cli {
namespace {

TEST(Advice, SaysWhatWouldFitAndWithWhichFlags) {
  cuda::DoesNotFit error("m.gguf: 8 GiB needed, but a card has 6 GiB left");
  const std::string plain = error.what();
  const FitAdvice both = {.layers = true, .context = "--ctx"};
  EXPECT_EQ(advised(error, 32, both), plain);
  error.positions = 900;
  EXPECT_EQ(advised(error, 32, both), plain + "; a context of 900 tokens would fit (--ctx)");
  EXPECT_EQ(advised(error, 32, {.layers = true}), plain) << "no flag of the command decides it";
  error.layers = 20;
  EXPECT_EQ(advised(error, 32, both), plain +
                                          "; a context of 900 tokens would fit (--ctx); 20 of its 32 layers fit: "
                                          "--gpu-layers 20 runs the others on the CPU");
  EXPECT_EQ(advised(error, 32, {}), plain);
}

TEST(Advice, AMemoryLimitOfNextToNothingIsOne) {
  EXPECT_EQ(GpuFlags{}.options().memory_limit, 0) << "none";
  EXPECT_EQ(GpuFlags{.memory_gib = 1e-12}.options().memory_limit, 1);
  EXPECT_EQ(GpuFlags{.memory_gib = 2}.options().memory_limit, int64_t{2} << 30);
}

}  // namespace
}  // namespace lacuna::cli
