#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/e4m3.h"
#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/cuda/tensor_core.h"
#include "kernels/cuda/tensor_core_form.h"
#include "layout/float_rows.h"
#include "layout/tensor_core.h"
#include "tensor_core_weights.h"

namespace lacuna::cuda {
namespace {

using layout::Id;
using layout::Shape;
using test::tensor_core_weight;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr Id kLayouts[] = {Id::f8, Id::nm24_f8, Id::nm24_bf16, Id::bf16};

std::vector<std::byte> canonical(Id id, Shape shape, uint64_t seed) {
  if (id != Id::bf16) return tensor_core_weight(id, shape.N, shape.K, seed).bytes;
  Rng rng(seed);
  std::vector<float> w(size_t(shape.N * shape.K));
  for (float& value : w) value = float(rng.normal());
  std::vector<std::byte> out(w.size() * 2);
  layout::encode_bf16(w, out);
  return out;
}

uint32_t word_at(const std::byte* from) {
  uint32_t out;
  std::memcpy(&out, from, 4);
  return out;
}

TEST(TensorCoreTiles, ComeBack) {
  for (const Id id : kLayouts)
    for (const Shape shape : {Shape{1, 1}, {3, 4}, {64, 128}, {65, 127}, {64, 65}, {130, 260}, {4, 3}, {70, 578}}) {
      const std::vector<std::byte> bytes = canonical(id, shape, 4);
      const TensorCoreTiles tiles = make_tensor_core_tiles(layout::get(id), shape, bytes);
      EXPECT_EQ(tiles.operation, operation_of(layout::get(id)));
      EXPECT_EQ(int64_t(tiles.blocks.size()), tile_bytes(tiles.operation, shape));
      EXPECT_EQ(canonical_bytes(tiles), bytes) << layout::get(id).name << " " << shape.N << " " << shape.K;
      ThreadPool pool(2);
      const TensorCoreTiles shared = make_tensor_core_tiles(layout::get(id), shape, bytes, &pool);
      EXPECT_EQ(shared.blocks, tiles.blocks);
      EXPECT_EQ(shared.scale, tiles.scale);
    }
}

TEST(TensorCoreTiles, SizesAreThoseOfTheHeader) {
  EXPECT_EQ(block_bytes({.eight_bits = true, .sparse = false}), 64 * 128);
  EXPECT_EQ(block_bytes({.eight_bits = true, .sparse = true}), 64 * 64 + 4 * 4 * 32 * 2);
  EXPECT_EQ(block_bytes({.eight_bits = false, .sparse = false}), 64 * 128);
  EXPECT_EQ(block_bytes({.eight_bits = false, .sparse = true}), 64 * 64 + 4 * 4 * 32);
  EXPECT_EQ(tile_bytes({.eight_bits = true, .sparse = true}, {65, 129}), 4 * 5120);
  EXPECT_EQ(tile_bytes({.eight_bits = false, .sparse = false}, {64, 129}), 3 * 8192);
  EXPECT_EQ(tile_bytes({.eight_bits = true, .sparse = true}, {0, 129}), 0);
  EXPECT_EQ(tile_bytes({.eight_bits = true, .sparse = true}, {64, 0}), 0);
}

// Blocks of 5120 bytes, 5 along K = 600. Row 75 is row 11 of the second row of blocks: a row of 64 bytes, whose piece p
// lies at place p ^ (11 / 2 % 4 = 1). Input 300 is input 44 of block 2: value 22, in piece 1, which lies at place 0.
TEST(TensorCoreTiles, ASparseCodeLiesWhereTheHeaderSays) {
  const Shape shape{130, 600};
  const layout::Layout& nm24 = layout::get(Id::nm24_f8);
  const layout::TensorCoreRow map = layout::tensor_core_row(nm24, shape.K);
  std::vector<std::byte> bytes = canonical(Id::nm24_f8, shape, 5);
  bytes[size_t(75 * map.bytes + map.values + 150)] = std::byte{0x5a};  // group 75: inputs 300 to 303
  // Group 75 has the high half of its byte of index; the places 1 and 3.
  std::byte& places = bytes[size_t(75 * map.bytes + map.index + 37)];
  places = (places & std::byte{0x0f}) | std::byte{0xd0};
  const TensorCoreTiles tiles = make_tensor_core_tiles(nm24, shape, bytes);
  const std::byte* const block = tiles.blocks.data() + (5 + 2) * 5120;
  EXPECT_EQ(block[11 * 64 + 0 * 16 + 22 % 16], std::byte{0x5a});
  // Rows 0 to 15 are the first of four; row 11 = 8 + 3, inputs 32 to 63 of 64: lane 4 * 3 + 2 + 1, the first word.
  // Input 44 is the fourth group of four of that word.
  EXPECT_EQ(word_at(block + 4096 + 4 * (15 * 2 + 0)) >> 12 & 15, 0xdu);
}

// Dense bf16: 64 inputs a block, piece p of row r at place p ^ (r % 8). Input 83 is input 19 of block 1: byte 38, in
// piece 2, which lies at place 2 ^ 5 = 7.
TEST(TensorCoreTiles, ADenseValueLiesWhereTheHeaderSays) {
  const Shape shape{80, 100};
  std::vector<std::byte> bytes = canonical(Id::bf16, shape, 6);
  const std::byte mark[] = {std::byte{0xcd}, std::byte{0x3f}};
  std::copy_n(mark, 2, bytes.begin() + (69 * 100 + 83) * 2);  // row 64 + 5
  const TensorCoreTiles tiles = make_tensor_core_tiles(layout::get(Id::bf16), shape, bytes);
  const std::byte* const at = tiles.blocks.data() + (2 + 1) * 8192 + 5 * 128 + 7 * 16 + 38 % 16;
  EXPECT_EQ(at[0], mark[0]);
  EXPECT_EQ(at[1], mark[1]);
}

// Every word of metadata is the one that TensorCoreForm has for the same rows, columns and lane; so are the scales.
TEST(TensorCoreTiles, MetadataIsTheFormsOrderLanes) {
  for (const Id id : {Id::nm24_f8, Id::nm24_bf16})
    for (const Shape shape : {Shape{64, 128}, {77, 200}, {1, 3}, {130, 515}}) {
      const std::vector<std::byte> bytes = canonical(id, shape, 7);
      const layout::Layout& l = layout::get(id);
      const int64_t words = id == Id::nm24_f8 ? 2 : 1;  // of a lane in a block
      const TensorCoreForm form = make_tensor_core_form(l, shape, bytes, {MetadataOrder::lanes, 64, 64 * words});
      const TensorCoreTiles tiles = make_tensor_core_tiles(l, shape, bytes);
      EXPECT_EQ(tiles.scale, form.scale);
      const int64_t blocks = form.cols / (64 * words), size = block_bytes(tiles.operation);
      for (int64_t sixteen = 0; sixteen < form.rows / 16; ++sixteen)
        for (int64_t step = 0; step < form.cols / 64; ++step)
          for (int64_t lane = 0; lane < 32; ++lane) {
            const std::byte* const block = tiles.blocks.data() + (sixteen / 4 * blocks + step / words) * size + 64 * 64;
            const int64_t word = (sixteen % 4 * 32 + lane) * words + step % words;
            ASSERT_EQ(word_at(block + 4 * word),
                      word_at(form.metadata.data() + 4 * ((sixteen * (form.cols / 64) + step) * 32 + lane)))
                << l.name << " " << sixteen << " " << step << " " << lane;
          }
    }
}

TEST(TensorCoreTiles, PaddingIsZeros) {
  for (const Id id : kLayouts) {
    const Shape shape{66, 131};
    const std::vector<std::byte> bytes(size_t(layout::get(id).size_bytes(shape)), std::byte{0x44});
    const TensorCoreTiles tiles = make_tensor_core_tiles(layout::get(id), shape, bytes);
    const int64_t value_bytes = tiles.operation.sparse ? 64 * 64 : 64 * 128, size = block_bytes(tiles.operation);
    int64_t set = 0;
    for (int64_t b = 0; b < int64_t(tiles.blocks.size()); b += size)
      for (int64_t i = 0; i < value_bytes; ++i) set += tiles.blocks[size_t(b + i)] != std::byte{0};
    const int64_t kept = tiles.operation.sparse ? 66 : 131;
    EXPECT_EQ(set, 66 * kept * (tiles.operation.eight_bits ? 1 : 2)) << layout::get(id).name;
  }
}

TEST(TensorCoreTiles, OtherLayoutsAreRefused) {
  EXPECT_THAT([] { operation_of(layout::get(Id::q8_0)); }, ThrowsMessage<Error>(HasSubstr("q8_0 has no form")));
}

}  // namespace
}  // namespace lacuna::cuda
