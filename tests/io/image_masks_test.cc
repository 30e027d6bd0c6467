#include "io/image_masks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "hf_folder.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

using Mask = std::vector<uint8_t>;

test::Entry floats(const char* name, std::vector<int64_t> shape, const std::vector<float>& values) {
  return {name, "F32", std::move(shape), test::bytes_of(values)};
}
test::Entry marks(const char* name, const char* dtype, std::vector<int64_t> shape, const Mask& values) {
  return {name, dtype, std::move(shape), test::bytes_of(values)};
}

void write_safetensors(const std::string& path, const std::vector<test::Entry>& entries) {
  test::write_bytes(path, test::safetensors(entries));
}

ThreadPool& pool() {
  static ThreadPool threads(2);
  return threads;
}

Mask mask_of(const MaskOptions& options, layout::Shape shape, const std::vector<float>& w) {
  const MaskMaker maker(options);
  maker.check("w", shape);
  Mask keep(w.size());
  maker.keep("w", shape, 0, w, keep, pool());
  return keep;
}

TEST(ImageMasks, Names) {
  for (const char* name : {"magnitude", "wanda", "wanda++", "e-sparse", "awp", "file"})
    EXPECT_EQ(mask_method_name(mask_method(name)), name);
  EXPECT_THAT([] { mask_method("sparsegpt"); },
              ThrowsMessage<Error>(HasSubstr("known are magnitude, wanda, wanda++, e-sparse, awp, file")));
}

// One row of eight, by hand.
TEST(ImageMasks, EachMethodByHand) {
  const test::TempDir folder;
  const layout::Shape shape{1, 8};
  const std::vector<float> w = {1, -2, 3, -4, 0.5f, 0.5f, 0.25f, -0.5f};
  const std::vector<float> norm = {8, 1, 1, 0.5f, 1, 2, 8, 3}, entropy = {0, 3, 0, 0, 9, 0, 0, 1};
  const std::vector<float> gradient = {0, 0, 0, 0.25f, 0.125f, 0, 0, 0};
  const std::string norms = folder.file("norms.safetensors"), gradients = folder.file("g.safetensors");
  write_safetensors(norms, {floats("w.norm", {8}, norm), floats("w.entropy", {8}, entropy)});
  write_safetensors(gradients, {floats("w", {1, 8}, gradient)});
  EXPECT_EQ(mask_of({.method = MaskMethod::magnitude}, shape, w), (Mask{0, 0, 1, 1, 1, 1, 0, 0}));
  // 8 2 3 2 | 0.5 1 2 1.5
  EXPECT_EQ(mask_of({.method = MaskMethod::wanda, .norms = norms}, shape, w), (Mask{1, 0, 1, 0, 0, 0, 1, 1}));
  // + 100 G |w|: 8 2 3 102 | 6.75 1 2 1.5
  EXPECT_EQ(mask_of({.method = MaskMethod::wanda_plus_plus, .norms = norms, .gradients = gradients}, shape, w),
            (Mask{1, 0, 0, 1, 1, 0, 1, 0}));
  // alpha 0 is wanda
  EXPECT_EQ(
      mask_of({.method = MaskMethod::wanda_plus_plus, .norms = norms, .gradients = gradients, .alpha = 0}, shape, w),
      (Mask{1, 0, 1, 0, 0, 0, 1, 1}));
  // |w| (H + norm): 8 8 3 2 | 5 1 2 2, and of equal scores the first
  EXPECT_EQ(mask_of({.method = MaskMethod::e_sparse, .norms = norms}, shape, w), (Mask{1, 1, 0, 0, 1, 0, 1, 0}));
  // |w| H alone: 0 6 0 0 | 4.5 0 0 0.5
  EXPECT_EQ(mask_of({.method = MaskMethod::e_sparse, .norms = norms, .alpha = 0}, shape, w),
            (Mask{1, 1, 0, 0, 1, 0, 0, 1}));
}

TEST(ImageMasks, ScoresHoldTheLargestFloats) {
  const std::vector<float> w = {3e38f, 0, -1, 1e-38f}, large(4, 3e38f);
  std::vector<float> score(4);
  wanda_plus_plus_scores(w, large, large, 100, score);
  for (const float value : score) EXPECT_FALSE(std::isnan(value));
  EXPECT_EQ(score[1], 0);
}

// RECIPES 9: statistics of zeros leave the first two of four.
TEST(ImageMasks, ZeroStatistics) {
  const test::TempDir folder;
  write_safetensors(folder.file("n"), {floats("w.norm", {5}, std::vector<float>(5, 0.0f))});
  EXPECT_EQ(mask_of({.method = MaskMethod::wanda, .norms = folder.file("n")}, {1, 5}, {1, 2, 3, 4, 5}),
            (Mask{1, 1, 0, 0, 1}));
}

TEST(ImageMasks, AFileIsTakenAsItIsOrRefusedByItsPlace) {
  const test::TempDir folder;
  const layout::Shape shape{3, 6};
  const std::vector<float> w(18, 1.0f);
  const Mask good = {1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1};
  const std::string path = folder.file("m");
  const auto with = [&](const Mask& mask, const char* dtype = "U8") {
    write_safetensors(path, {marks("w", dtype, {3, 6}, mask)});
    return mask_of({.method = MaskMethod::file, .masks = path}, shape, w);
  };
  EXPECT_EQ(with(good), good);
  EXPECT_EQ(with(good, "BOOL"), good);
  Mask bad = good;
  bad[6] = 1;
  EXPECT_THAT([&] { with(bad); },
              ThrowsMessage<Error>(AllOf(HasSubstr("tensor w: row 1: the group of four at input 0"), HasSubstr(path))));
  bad = good;
  bad[13] = 2;
  EXPECT_THAT([&] { with(bad); }, ThrowsMessage<Error>(HasSubstr("row 2 has a value that is neither 0 nor 1")));
  EXPECT_THAT([&] { with(good, "F8_E4M3"); }, ThrowsMessage<Error>(HasSubstr("must be BOOL, U8 or I8")));
  // Rows in pieces.
  with(good);
  const MaskMaker maker({.method = MaskMethod::file, .masks = path});
  Mask piece(6);
  maker.keep("w", shape, 1, std::span(w).first(6), piece, pool());
  EXPECT_EQ(piece, Mask(good.begin() + 6, good.begin() + 12));
}

TEST(ImageMasks, SaysWhatIsMissing) {
  const test::TempDir folder;
  const std::string norms = folder.file("n");
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_THAT([] { MaskMaker({.method = MaskMethod::wanda}); },
              ThrowsMessage<Error>("--mask wanda needs --norms FILE"));
  EXPECT_THAT([&] { MaskMaker({.method = MaskMethod::magnitude, .norms = norms}); },
              ThrowsMessage<Error>(HasSubstr("--norms: --mask magnitude does not read it")));
  EXPECT_THAT([] { MaskMaker({.method = MaskMethod::magnitude, .alpha = 3}); },
              ThrowsMessage<Error>(HasSubstr("--alpha")));
  write_safetensors(norms, {floats("w.norm", {4}, {1, 2, 3, inf}), floats("v.norm", {4}, {1, 2, -3, 1})});
  const MaskMaker wanda({.method = MaskMethod::wanda, .norms = norms});
  EXPECT_THAT(
      [&] {
        wanda.check("u", {2, 4});
      },
      ThrowsMessage<Error>(AllOf(HasSubstr(norms), HasSubstr("no tensor u.norm"))));
  EXPECT_THAT(
      [&] {
        wanda.check("w", {2, 8});
      },
      ThrowsMessage<Error>(HasSubstr("the shape is [4], but the weight asks for [8]")));
  EXPECT_THAT([&] { wanda.check("w", {2, 4}); }, ThrowsMessage<Error>(HasSubstr("value 3 is inf")));
  EXPECT_THAT([&] { wanda.check("v", {2, 4}); }, ThrowsMessage<Error>(HasSubstr("value 2 is -3")));
  EXPECT_THAT(
      [&] {
        MaskMaker({.method = MaskMethod::e_sparse, .norms = norms}).check("w", {2, 4});
      },
      testing::Throws<Error>());
  EXPECT_THROW(MaskMaker({.method = MaskMethod::wanda, .norms = folder.file("absent")}), Error);
}

}  // namespace
}  // namespace lacuna::io
