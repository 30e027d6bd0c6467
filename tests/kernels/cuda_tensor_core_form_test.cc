#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "core/e4m3.h"
#include "core/error.h"
#include "core/scalar.h"
#include "kernels/cuda/tensor_core_form.h"
#include "layout/tensor_core.h"
#include "tensor_core_weights.h"

namespace lacuna::cuda {
namespace {

using layout::Id;
using layout::Shape;
using test::tensor_core_layouts;
using test::tensor_core_weight;
using test::TensorCoreWeight;
using testing::HasSubstr;
using testing::ThrowsMessage;

uint32_t word_at(const std::vector<std::byte>& bytes, int64_t word) {
  uint32_t out;
  std::memcpy(&out, bytes.data() + 4 * word, 4);
  return out;
}

double value_at(const TensorCoreForm& form, int64_t row, int64_t i) {
  const int64_t stride = form.cols / 2;
  if (form.value_bytes == 1) return to_float(e4m3{uint8_t(form.values[size_t(row * stride + i)])});
  bf16 value;
  std::memcpy(&value, form.values.data() + 2 * (row * stride + i), 2);
  return to_float(value);
}

TEST(TensorCoreForm, ComesBack) {
  for (const Id id : tensor_core_layouts()) {
    for (const Shape shape : {Shape{1, 1}, {3, 4}, {64, 128}, {65, 127}, {130, 260}, {4, 3}, {70, 578}}) {
      const TensorCoreWeight w = tensor_core_weight(id, shape.N, shape.K, 4);
      for (const MetadataOrder order : {MetadataOrder::lanes, MetadataOrder::cutlass}) {
        for (const int64_t tile_cols : {64, 128, 256}) {
          const TensorCoreForm form = make_tensor_core_form(*w.layout, shape, w.bytes, {order, 128, tile_cols});
          EXPECT_EQ(form.rows % 128, 0);
          EXPECT_EQ(form.cols % tile_cols, 0);
          EXPECT_EQ(canonical_bytes(*w.layout, shape, form), w.bytes) << w.layout->name;
          ThreadPool pool(2);
          const TensorCoreForm shared =
              make_tensor_core_form(*w.layout, shape, w.bytes, {order, 128, tile_cols}, &pool);
          EXPECT_EQ(shared.metadata, form.metadata);
          EXPECT_EQ(shared.values, form.values);
        }
      }
    }
  }
}

// No 4 bits of the metadata, padding included, are what the PTX ISA leaves undefined.
TEST(TensorCoreForm, MetadataIsDefinedEverywhere) {
  for (const Id id : {Id::nm24_f8, Id::nm24_bf16}) {
    const TensorCoreWeight w = tensor_core_weight(id, 67, 141, 5);
    for (const MetadataOrder order : {MetadataOrder::lanes, MetadataOrder::cutlass}) {
      const TensorCoreForm form = make_tensor_core_form(*w.layout, w.shape, w.bytes, {order, 64, 128});
      for (const std::byte both : form.metadata)
        for (const int four : {int(both) & 15, int(both) >> 4}) EXPECT_LT(four & 3, four >> 2);
    }
  }
}

// One mma.sp.m16n8k64 of 8-bit values, thread by thread as the PTX ISA describes its operands: thread `lane` has
// groupID = lane / 4 and threadID_in_group = lane % 4. Its registers of A hold four values each, two of each four
// columns, of row groupID (registers 0 and 2) or groupID + 8 (1 and 3) and of the eight columns from
// 8 threadID_in_group (0 and 1) or that + 32 (2 and 3). Thread 0 of a group holds the metadata of row groupID and
// columns 0..31, thread 1 that of row groupID + 8, threads 2 and 3 the same of columns 32..63.
TEST(TensorCoreForm, LanesAreThoseOfMmaSpM16n8k64) {
  const Shape shape{77, 200};
  const TensorCoreWeight w = tensor_core_weight(Id::nm24_f8, shape.N, shape.K, 6);
  const TensorCoreForm form = make_tensor_core_form(*w.layout, shape, w.bytes, {MetadataOrder::lanes, 64, 64});
  ASSERT_EQ(form.cols, 256);
  for (int64_t block = 0; block < form.rows / 16; ++block) {
    std::vector<double> got(size_t(16 * form.cols), 0.0);  // A, unpacked
    for (int64_t step = 0; step < form.cols / 64; ++step) {
      const int64_t first_word = (block * (form.cols / 64) + step) * 32;
      for (int64_t lane = 0; lane < 32; ++lane) {
        const int64_t group = lane / 4, thread = lane % 4;
        for (int64_t reg = 0; reg < 4; ++reg) {
          const int64_t row = group + (reg % 2 == 1 ? 8 : 0), first = 8 * thread + (reg >= 2 ? 32 : 0);
          const int64_t holder = 4 * group + (reg >= 2 ? 2 : 0) + (reg % 2);
          const uint32_t metadata = word_at(form.metadata, first_word + holder);
          for (int64_t i = 0; i < 4; ++i) {
            const int64_t chunk = first + 4 * (i / 2);
            const uint32_t place = metadata >> (2 * (chunk % 32 / 2 + i % 2)) & 3;
            const double value = value_at(form, 16 * block + row, (64 * step + first) / 2 + i);
            got[size_t(row * form.cols + 64 * step + chunk + place)] += value * form.scale[size_t(16 * block + row)];
          }
        }
      }
    }
    for (int64_t row = 0; row < 16; ++row)
      for (int64_t k = 0; k < form.cols; ++k) {
        const int64_t n = 16 * block + row;
        const float expected = n < shape.N && k < shape.K ? w.decoded[size_t(n * shape.K + k)] : 0.0f;
        ASSERT_EQ(float(got[size_t(row * form.cols + k)]), expected) << n << " " << k;
      }
  }
}

// The same of 16-bit values: one m16n8k32 with selector s takes the metadata of threads 2 s and 2 s + 1 of each group:
// columns 0..15 in the first, 16..31 in the second; row groupID in bits 0..15, row groupID + 8 in bits 16..31.
TEST(TensorCoreForm, LanesAreThoseOfMmaSpM16n8k32) {
  const Shape shape{40, 100};
  const TensorCoreWeight w = tensor_core_weight(Id::nm24_bf16, shape.N, shape.K, 7);
  const TensorCoreForm form = make_tensor_core_form(*w.layout, shape, w.bytes, {MetadataOrder::lanes, 64, 64});
  for (int64_t n = 0; n < form.rows; ++n) {
    for (int64_t step = 0; step < form.cols / 32; ++step) {
      std::vector<double> got(32, 0.0);
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t chunk = 4 * (i / 2), thread = 2 * (step % 2) + chunk / 16;
        const uint32_t metadata =
            word_at(form.metadata, (n / 16 * (form.cols / 64) + step / 2) * 32 + 4 * (n % 8) + thread);
        const uint32_t half = n % 16 < 8 ? metadata & 0xffff : metadata >> 16;
        got[size_t(chunk + (half >> (2 * (chunk % 16 / 2 + i % 2)) & 3))] += value_at(form, n, 16 * step + i);
      }
      for (int64_t k = 0; k < 32; ++k) {
        const int64_t at = 32 * step + k;
        const float expected = n < shape.N && at < shape.K ? w.decoded[size_t(n * shape.K + at)] : 0.0f;
        ASSERT_EQ(float(got[size_t(k)]), expected) << n << " " << at;
      }
    }
  }
}

// CUTLASS's order, written as digits: sizes and values of the coordinates from the fastest to the slowest.
TEST(TensorCoreForm, CutlassOrderIsItsDigits) {
  struct Digit {
    int64_t size, value;
  };
  for (const Id id : {Id::nm24_f8, Id::nm24_bf16}) {
    const Shape shape{130, 300};
    const int64_t tile = 128;
    const TensorCoreWeight w = tensor_core_weight(id, shape.N, shape.K, 8);
    const TensorCoreForm form = make_tensor_core_form(*w.layout, shape, w.bytes, {MetadataOrder::cutlass, 64, tile});
    const layout::TensorCoreRow map = layout::tensor_core_row(*w.layout, shape.K);
    std::set<int64_t> seen;
    for (int64_t n = 0; n < form.rows; ++n)
      for (int64_t k = 0; k < form.cols; k += 4) {
        std::vector<Digit> digits;
        if (id == Id::nm24_f8)
          digits = {{tile, k % tile}, {64, n % 64}};
        else
          digits = {{16, k % 16}, {2, n / 8 % 2},  {tile / 32, k % tile / 32},
                    {8, n % 8},   {2, k / 16 % 2}, {4, n / 16 % 4}};
        digits.push_back({form.rows / 64, n / 64});
        digits.push_back({form.cols / tile, k / tile});
        int64_t at = 0, unit = 1;
        for (const Digit& digit : digits) at += digit.value * unit, unit *= digit.size;
        EXPECT_TRUE(seen.insert(at).second);
        const int got = int(form.metadata[size_t(at / 8)] >> (4 * (at / 4 % 2))) & 15;
        int expected = 4;
        if (n < shape.N && k < shape.K)
          expected = int(w.bytes[size_t(n * map.bytes + map.index + k / 8)] >> (4 * (k / 4 % 2))) & 15;
        ASSERT_EQ(got, expected) << n << " " << k;
      }
  }
}

TEST(TensorCoreForm, OtherLayoutsTilesAndShapesAreRefused) {
  const TensorCoreWeight w = tensor_core_weight(Id::nm24_f8, 4, 8, 9);
  EXPECT_THAT(
      [&] {
        make_tensor_core_form(layout::get(Id::q8_0), {4, 32}, w.bytes, {});
      },
      ThrowsMessage<Error>(HasSubstr("q8_0 has no form")));
  EXPECT_THAT(
      [&] {
        make_tensor_core_form(*w.layout, w.shape, w.bytes, {MetadataOrder::lanes, 64, 32});
      },
      ThrowsMessage<Error>(HasSubstr("multiples of 64")));
  const TensorCoreForm form = make_tensor_core_form(*w.layout, w.shape, w.bytes, {});
  EXPECT_THAT([&] { canonical_bytes(*w.layout, {65, 8}, form); }, ThrowsMessage<Error>(HasSubstr("is not that of")));
}

}  // namespace
}  // namespace lacuna::cuda
