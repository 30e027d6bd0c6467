// tests/kernels/communicator_test.cc - what can be said of exchanges without devices.
#include "kernels/cuda/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <string>

#include "core/error.h"
#include "test_support.h"

namespace lacuna::cuda {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

// NCCL is asked for first, so that the error comes before anything is done with the devices.
TEST(Communicator, SeveralDevicesWithoutNcclSayWhatToInstall) {
  const test::TempDir folder;
  const std::string path = folder.path().string();
  ASSERT_EQ(::setenv("LACUNA_NCCL", path.c_str(), 1), 0);
  const std::array<Communicator::Member, 2> members = {};
  EXPECT_THAT([&] { make_communicator(members); },
              ThrowsMessage<Error>(AllOf(HasSubstr("several devices need NCCL"), HasSubstr(path + "/libnccl.so.2"),
                                         HasSubstr("nvidia-nccl-cu13"))));
  EXPECT_STREQ(std::getenv("NCCL_NVLS_ENABLE"), "0");
  ::unsetenv("LACUNA_NCCL");
}

TEST(Communicator, AnUnknownExchangeIsAnError) {
  ASSERT_EQ(::setenv("LACUNA_EXCHANGE", "mpi", 1), 0);
  const std::array<Communicator::Member, 2> members = {};
  EXPECT_THAT([&] { make_communicator(members); },
              ThrowsMessage<Error>(HasSubstr("LACUNA_EXCHANGE is 'mpi'; it can be peer or nccl")));
  ::unsetenv("LACUNA_EXCHANGE");
}

}  // namespace
}  // namespace lacuna::cuda
