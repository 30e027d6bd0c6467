#include "calibrate/cuda_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "core/error.h"
#include "test_support.h"

namespace lacuna::calibrate {
namespace {

using layout::Id;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr cuda::Operation kSparse{.eight_bits = true, .sparse = true}, kBf16{.eight_bits = false, .sparse = false};

constexpr cuda::Split kStream = cuda::Split::stream, kSlice = cuda::Split::slice;

CudaProfile example() {
  CudaProfile out;
  out.machine = {"NVIDIA H100 80GB HBM3", "13.0", "0.1.0"};
  out.products.push_back({{Id::zz4_k, 86, 4096, 0}, {8, 32, 24, 4, 0, 0}, 1.8, 1.75});
  out.products.push_back({{Id::zz6_k, 16, 11008, 50}, {4, 16, 32, 24, 1, 0.25f}, 1.4, 1.39});
  out.products.push_back({{Id::zz4_k, 8, 2048, 50}, {4, 16, 32, 24, 0, 0, false}, 0.4, 0.39});
  out.group_sparse.push_back({{Id::gs4, 48, 4096, 16, 50}, {16, 32, kStream, cuda::Math::dot, 264, 4}, 1.59, 1.57});
  out.group_sparse.push_back({{Id::gs8, 16, 4104, 128, 100}, {8, 16, kSlice, cuda::Math::mma, 256, 0}, 2.5, 2.25});
  out.tensor_core.set({{kSparse, cuda::Accumulate::fast, 21504, 3072, 0, 4608}, {128, 192, 2}, 460.25, 441.5});
  out.tensor_core.set({{kSparse, cuda::Accumulate::full, 2048, 2048, 32, 65536}, {128, 64, 1}, 301.5, 301.5});
  out.tensor_core.set({{kBf16, cuda::Accumulate::fast, 3072, 64, 0, 1024}, {128, 128, 2}, 5.5, 5});
  return out;
}

/// The example's text with `from`, which must be there, as `to`.
std::string with(const std::string& from, const std::string& to) {
  std::string text = example().to_json();
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(CudaProfile, ComesBackAsItWasStored) {
  const test::TempDir folder;
  const std::string path = (folder.path() / "new" / "p.json").string();
  EXPECT_EQ(load_cuda_profile(path, example().machine), std::nullopt);
  save_cuda_profile(path, example());
  EXPECT_EQ(load_cuda_profile(path, example().machine), example());
  EXPECT_EQ(cuda_profile_file_name(example().machine), "nvidia-h100-80gb-hbm3-cuda.json");
}

TEST(CudaProfile, MergingReplacesWhatWasKnown) {
  CudaProfile profile = example();
  model::CudaTuning again = profile.products[0], other = again;
  again.plan.segments = 9;
  other.product.percent = 25;
  profile.merge({again, other});
  ASSERT_EQ(profile.products.size(), 4u);
  EXPECT_EQ(profile.plans().find({Id::zz4_k, 86, 4096, 0})->segments, 9);
  EXPECT_EQ(profile.plans().find({Id::zz4_k, 86, 4096, 30})->segments, 4);
  EXPECT_EQ(profile.plans().find({Id::zz6_k, 16, 11008, 50})->segments, 24);
}

TEST(CudaProfile, PlansOfGroupSparseProductsMergeAndServe) {
  CudaProfile profile = example();
  model::CudaGroupsTuning again = profile.group_sparse[0], other = again;
  again.plan.blocks = 132;
  other.product.kept = 80;
  profile.merge({again, other});
  ASSERT_EQ(profile.group_sparse.size(), 3u);
  EXPECT_EQ(profile.products, example().products);
  const cuda::Plans plans = profile.plans();
  EXPECT_EQ(*plans.find_groups({Id::gs4, 48, 4096, 16, 50}), again.plan);
  EXPECT_EQ(*plans.find_groups({Id::gs4, 48, 4096, 16, 90}), other.plan);
  EXPECT_EQ(*plans.find_groups({Id::gs8, 16, 4104, 128, 30}), profile.group_sparse[0].plan);
}

TEST(CudaProfile, AnotherCardDriverOrVersionIsRefused) {
  const test::TempDir folder;
  const std::string path = folder.file("p.json");
  save_cuda_profile(path, example());
  const auto refused = [&](const CudaMachine& here, const char* what) {
    EXPECT_THAT([&] { load_cuda_profile(path, here); }, ThrowsMessage<Error>(HasSubstr(what)));
  };
  refused({"NVIDIA H200", "13.0", "0.1.0"}, "is of card \"NVIDIA H100 80GB HBM3\", this is \"NVIDIA H200\"");
  refused({"NVIDIA H100 80GB HBM3", "12.8", "0.1.0"}, "driver");
  refused({"NVIDIA H100 80GB HBM3", "13.0", "0.2.0"}, "version");
}

TEST(CudaProfile, DamageIsNamed) {
  const auto damaged = [](const std::string& text, const char* what) {
    EXPECT_THAT([&] { CudaProfile::parse(text, "p.json"); }, ThrowsMessage<Error>(HasSubstr(what))) << text;
  };
  EXPECT_EQ(CudaProfile::parse(example().to_json(), "p.json"), example());
  damaged("", "p.json");
  damaged("[]", "p.json");
  damaged(with("\"lacuna_cuda_profile\": 1", "\"lacuna_cuda_profile\": 2"), "format 2");
  damaged(with("\"zz6_k\"", "\"q6_K\""), "p.json: product 1: \"q6_K\" is no zigzag layout");
  damaged(with("\"zz6_k\"", "7"), "layout");
  damaged(with("\"rows\": 86", "\"rows\": 0"), "\"rows\" is 0");
  damaged(with("\"percent\": 50", "\"percent\": 100"), "\"percent\" is 100");
  damaged(with("\"segments\": 24", "\"segments\": 10"), "\"segments\" is 10, expected 11 to 256");
  damaged(with("\"segments\": 24", "\"segments\": 257"), "\"segments\" is 257");
  damaged(with("\"early_codes\": 0.25", "\"early_codes\": 1.5"), "\"early_codes\" is 1.5");
  damaged(with("\"skips\": false", "\"skips\": 0"), "\"skips\" must be true or false");
  std::string dense = example().to_json();
  dense.replace(dense.find("\"skips\": true"), 13, "\"skips\": false");  // of the first product
  damaged(dense, "\"skips\" is false of a dense product");
  std::string older = example().to_json();
  for (size_t at; (at = older.find(",\n    \"skips\": true")) != std::string::npos;) older.erase(at, 19);
  EXPECT_EQ(CudaProfile::parse(older, "p.json"), example()) << "files of before the key";
  damaged(with("\"tuned_ms\": 1.39", "\"tuned_ms\": -1"), "a time of -1 ms");
  damaged(with("\"plan\"", "\"plans\""), "plan");
  damaged(with("\"products\"", "\"product\""), "products");
}

TEST(CudaProfile, DamageOfGroupSparseProductsIsNamed) {
  const auto damaged = [](const std::string& text, const char* what) {
    EXPECT_THAT([&] { CudaProfile::parse(text, "p.json"); }, ThrowsMessage<Error>(HasSubstr(what))) << text;
  };
  damaged(with("\"gs8\"", "\"zz8\""), "p.json: group-sparse product 1: \"zz8\" is no group-sparse layout");
  damaged(with("\"gs4\"", "\"gs5\""), "p.json: group-sparse product 0: \"gs5\" is no group-sparse layout");
  damaged(with("\"gs4\"", "4"), "layout");
  damaged(with("\"rows\": 48", "\"rows\": 0"), "group-sparse product 0: \"rows\" is 0");
  damaged(with("\"inputs\": 4104", "\"inputs\": -1"), "group-sparse product 1: \"inputs\" is -1");
  damaged(with("\"group_size\": 128", "\"group_size\": 48"), "group_size is 48, but gs8 has groups of");
  damaged(with("\"group_size\": 128", "\"group_size\": 0"), "group_size is 0, but gs8 has groups of");
  damaged(with("\"kept_percent\": 50", "\"kept_percent\": 101"), "\"kept_percent\" is 101, expected 0 to 100");
  damaged(with("\"kept_percent\": 50", "\"kept\": 50"), "kept_percent");
  damaged(with("\"standard_ms\": 1.59", "\"standard_ms\": 0"), "a time of 0 ms");
  damaged(with("\"tuned_ms\": 2.25", "\"tuned_ms\": -1"), "a time of -1 ms");
  damaged(with("\"split\": \"slice\"", "\"split\": \"rows\""), "\"split\" is \"rows\", expected stream, slice");
  damaged(with("\"math\": \"dot\"", "\"math\": \"wgmma\""), "\"math\" is \"wgmma\", expected mma, fma, dot");
  damaged(with("\"math\": \"dot\"", "\"math\": 2"), "math");
  damaged(with("\"warps\": 16", "\"warps\": 33"), "group-sparse product 0: \"warps\" is 33");
  damaged(with("\"resident\": 16", "\"resident\": 0"), "group-sparse product 1: \"resident\" is 0");
  damaged(with("\"blocks\": 264", "\"blocks\": 0"), "\"blocks\" is 0, expected 1 to 16777216");
  damaged(with("\"blocks\": 264", "\"blocks\": 16777217"), "\"blocks\" is 16777217");
  damaged(with("\"early\": 4", "\"early\": -1"), "\"early\" is -1, expected 0 to 1048576");
  damaged(with("\"early\": 4", "\"early\": 1048577"), "\"early\" is 1048577");
  damaged(with("\"group_sparse\": [", "\"group_sparse\": {}, \"more\": ["), "group_sparse");
  damaged(with("\"group_sparse\": [", "\"group_sparse\": [7,"), "group-sparse product 0");
}

TEST(CudaProfile, FilesOfBeforeHaveNoGroupSparseProducts) {
  CudaProfile before = example();
  before.group_sparse.clear();
  std::string text = before.to_json();
  const std::string empty = ",\n \"group_sparse\": []";
  const size_t at = text.find(empty);
  ASSERT_NE(at, std::string::npos);
  EXPECT_EQ(CudaProfile::parse(text.erase(at, empty.size()), "p.json"), before);
}

// Sorted by operation: bf16 is product 0, then fast, then full sums of nm24_f8.
TEST(CudaProfile, DamageOfTensorCoreProductsIsNamed) {
  const auto damaged = [](const std::string& text, const char* what) {
    EXPECT_THAT([&] { CudaProfile::parse(text, "p.json"); }, ThrowsMessage<Error>(HasSubstr(what))) << text;
  };
  damaged(with("\"nm24_f8\"", "\"nm25_f8\""), "p.json: tensor core product 1: unknown layout \"nm25_f8\"");
  damaged(with("\"nm24_f8\"", "\"q4_K\""), "p.json: tensor core product 1: q4_K has no form");
  damaged(with("\"nm24_f8\"", "\"nm24_q4\""), "has no form");
  damaged(with("\"nm24_f8\"", "2"), "layout");
  damaged(with("\"full\"", "\"exact\""), "product 2: \"accumulate\" is \"exact\", expected fast or full");
  damaged(with("\"fast\"", "\"full\""), "product 0: bf16 has one kind of sums, fast");
  damaged(with("\"tokens\": 4608", "\"tokens\": 0"), "\"tokens\" is 0, expected 1 to 16777216");
  damaged(with("\"tokens\": 4608", "\"tokens\": -4608"), "\"tokens\" is -4608");
  damaged(with("\"tokens\": 4608", "\"tokens\": 4608.5"), "tokens");
  damaged(with("\"outputs\": 21504", "\"outputs\": 16777217"), "\"outputs\" is 16777217");
  damaged(with("\"inputs\": 64", "\"inputs\": 1e30"), "inputs");
  damaged(with("\"inputs\": 64", "\"input\": 64"), "inputs");
  damaged(with("\"groups\": 32", "\"groups\": 65537"), "\"groups\" is 65537");
  damaged(with("\"outputs\": 2048", "\"outputs\": 2050"), "2050 outputs of a group, which must be a multiple of 64");
  damaged(with("\"standard_us\": 460.25", "\"standard_us\": 0"), "\"standard_us\" is 0, which is no time");
  damaged(with("\"tuned_us\": 441.5", "\"tuned_us\": -1"), "\"tuned_us\" is -1");
  damaged(with("\"tuned_us\": 441.5", "\"tuned_us\": \"1\""), "tuned_us");
  damaged(with("\"rows\": 128", "\"rows\": 0"), "product 0: \"rows\" is 0, expected 1 to 1024");
  damaged(with("\"tokens\": 192", "\"tokens\": 1025"), "\"tokens\" is 1025");
  damaged(with("\"cluster\": 1", "\"cluster\": 17"), "\"cluster\" is 17");
  damaged(with("\"tensor_core\": [", "\"tensor_core\": {}, \"more\": ["), "tensor_core");
  damaged(with("\"tensor_core\": [", "\"tensor_core\": [7,"), "tensor core product 0");
  const std::string whole = example().to_json();
  for (size_t bytes = 0; bytes + 2 < whole.size(); ++bytes)  // without the last brace
    ASSERT_THROW(CudaProfile::parse(std::string_view(whole).substr(0, bytes), "p.json"), Error) << bytes;
}

TEST(CudaProfile, FilesOfBeforeHaveNoTensorCoreProducts) {
  CudaProfile before = example();
  before.tensor_core = {};
  std::string text = before.to_json();
  const std::string empty = ",\n \"tensor_core\": []";
  text.replace(text.find(empty), empty.size(), "");
  EXPECT_EQ(CudaProfile::parse(text, "p.json"), before);
}

}  // namespace
}  // namespace lacuna::calibrate
