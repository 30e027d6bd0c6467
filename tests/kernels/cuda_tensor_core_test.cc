// tests/kernels/cuda_tensor_core_test.cc - products on FP8 and 2:4 tensor cores against double precision. Small
// integers come out exactly however sums are kept, so that every place is checked to the bit; random values are held to
// bounds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/e4m3.h"
#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/cuda/tensor_core.h"
#include "kernels/cuda/tensor_core_wgmma.h"
#include "kernels/cuda_memory.h"
#include "kernels/e4m3_tokens.h"
#include "layout/float_rows.h"
#include "layout/tensor_core.h"
#include "tensor_core_weights.h"

namespace lacuna {
namespace {

using cuda::Accumulate;
using cuda::Element;
using cuda::Operation;
using cuda::TensorCoreActivation;
using cuda::TensorCoreArgs;
using cuda::TensorCoreKernel;
using cuda::TensorCorePlan;
using cuda::WriteBack;
using layout::Id;
using layout::Shape;
using test::device;
using test::emulated;
using test::OnDevice;
using test::stream;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr Id kLayouts[] = {Id::f8, Id::nm24_f8, Id::nm24_bf16, Id::bf16};
constexpr Element kElements[] = {Element::f32, Element::f16, Element::bf16};
constexpr WriteBack kWriteBacks[] = {WriteBack::staged, WriteBack::direct, WriteBack::separate};
constexpr Accumulate kAccumulates[] = {Accumulate::fast, Accumulate::full};

bool has_eight_bits(Id id) { return cuda::operation_of(layout::get(id)).eight_bits; }

/// The layouts that the device multiplies.
std::vector<Id> layouts() {
  std::vector<Id> out;
  for (const Id id : kLayouts)
    if (!has_eight_bits(id) || 10 * device().info().major + device().info().minor >= 89) out.push_back(id);
  return out;
}

/// A kernel, and of wgmma a plan.
struct Choice {
  TensorCoreKernel kernel = TensorCoreKernel::mma;
  std::optional<TensorCorePlan> plan;
};
std::vector<Choice> choices(Id id, Accumulate accumulate) {
  std::vector<Choice> out = {{}};
  if (device().info().major == 9)
    for (const TensorCorePlan& plan : cuda::tensor_core_plans(cuda::operation_of(layout::get(id)), accumulate))
      out.push_back({TensorCoreKernel::wgmma, plan});
  return out;
}
/// Both kernels, each once.
std::vector<TensorCoreKernel> kernels(Id id) {
  std::vector<TensorCoreKernel> out = {TensorCoreKernel::mma};
  if (choices(id, Accumulate::fast).size() > 1) out.push_back(TensorCoreKernel::wgmma);
  return out;
}

// ---- values ----

struct Weight {
  const layout::Layout* layout;
  Shape shape;
  std::vector<std::byte> bytes;
  std::vector<float> values;  // [N, K], codes of e4m3 not scaled
  std::vector<float> scale;   // [N], 1 of bf16
};

Weight weight_of(Id id, Shape shape, std::vector<std::byte> bytes) {
  Weight out{&layout::get(id), shape, std::move(bytes), std::vector<float>(size_t(shape.N * shape.K)),
             std::vector<float>(size_t(shape.N), 1.0f)};
  if (id == Id::bf16) {
    layout::decode_rows(*out.layout, shape, out.bytes, 0, shape.N, out.values.data());
    return out;
  }
  const layout::TensorCoreRow map = layout::tensor_core_row(*out.layout, shape.K);
  std::vector<float> kept(static_cast<size_t>(map.kept));
  std::vector<uint8_t> places(map.sparse ? kept.size() : 0);
  for (int64_t n = 0; n < shape.N; ++n) {
    out.scale[size_t(n)] = layout::read_tensor_core_row(
        *out.layout, shape.K, std::span(out.bytes).subspan(size_t(n * map.bytes), size_t(map.bytes)), kept, places);
    for (size_t i = 0; i < kept.size(); ++i)
      if (const size_t k = map.sparse ? 4 * (i / 2) + places[i] : i; k < size_t(shape.K))
        out.values[size_t(n * shape.K) + k] = kept[i];
  }
  return out;
}

std::vector<std::byte> random_bytes(Id id, Shape shape, uint64_t seed) {
  if (id != Id::bf16) return test::tensor_core_weight(id, shape.N, shape.K, seed).bytes;
  Rng rng(seed);
  std::vector<float> w(size_t(shape.N * shape.K));
  for (float& value : w) value = float(rng.normal() / 64);
  std::vector<std::byte> out(2 * w.size());
  layout::encode_bf16(w, out);
  return out;
}

/// -1, 0 and 1, with scales that are powers of two.
Weight integer_weight(Id id, Shape shape, uint64_t seed) {
  std::vector<std::byte> bytes = random_bytes(id, shape, seed);
  Rng rng(seed + 1);
  layout::TensorCoreRow map;
  map.kept = shape.K, map.bytes = 2 * shape.K;
  if (id != Id::bf16) map = layout::tensor_core_row(layout::get(id), shape.K);
  for (int64_t n = 0; n < shape.N; ++n) {
    std::byte* const row = bytes.data() + n * map.bytes;
    const float scale = std::exp2(float(n % 5) - 2);
    if (map.scaled) std::memcpy(row, &scale, 4);
    for (int64_t i = 0; i < map.kept; ++i) {
      if (map.sparse && 4 * (i / 2) + int64_t(row[map.index + i / 4] >> (2 * (i % 4)) & std::byte{3}) >= shape.K)
        continue;  // zeros past K stay
      const auto value = float(int(rng.below(3)) - 1);
      const bf16 wide = to_bf16(value);
      if (has_eight_bits(id))
        row[map.values + i] = std::byte(to_e4m3(value).bits);
      else
        std::memcpy(row + map.values + 2 * i, &wide, 2);
    }
  }
  return weight_of(id, shape, std::move(bytes));
}

struct Tokens {
  int64_t M, K;
  std::vector<float> values;  // [M, K], codes of e4m3 not scaled
  std::vector<float> scale;   // [M], 1 of bf16
};

Tokens integer_tokens(bool eight_bits, int64_t M, int64_t K, uint64_t seed) {
  Tokens out{M, K, std::vector<float>(size_t(M * K)), std::vector<float>(size_t(M), 1.0f)};
  Rng rng(seed);
  for (float& value : out.values) value = float(int(rng.below(3)) - 1);
  for (int64_t m = 0; eight_bits && m < M; ++m) out.scale[size_t(m)] = std::exp2(float(m % 7) - 3);
  return out;
}
Tokens random_tokens(bool eight_bits, int64_t M, int64_t K, uint64_t seed) {
  Tokens out{M, K, std::vector<float>(size_t(M * K)), std::vector<float>(size_t(M), 1.0f)};
  Rng rng(seed);
  for (float& value : out.values) value = to_float(to_bf16(float(rng.normal())));
  if (!eight_bits) return out;
  std::vector<e4m3> codes(out.values.size());
  kernels::quantize_per_token(out.values.data(), K, M, K, codes.data(), out.scale.data());
  for (size_t i = 0; i < codes.size(); ++i) out.values[i] = to_float(codes[i]);
  return out;
}

float as_element(Element type, float value) {
  if (type == Element::f16) return to_float(to_f16(value));
  return type == Element::bf16 ? to_float(to_bf16(value)) : value;
}
template <class T, class Convert>
std::vector<std::byte> bytes_of_each(std::span<const float> values, const Convert& convert) {
  std::vector<T> out(values.size());
  std::ranges::transform(values, out.begin(), convert);
  const auto bytes = std::as_bytes(std::span(out));
  return {bytes.begin(), bytes.end()};
}
std::vector<std::byte> bytes_as(Element type, std::span<const float> values) {
  if (type == Element::f16) return bytes_of_each<f16>(values, to_f16);
  if (type == Element::bf16) return bytes_of_each<bf16>(values, to_bf16);
  return bytes_of_each<float>(values, [](float v) { return v; });
}
template <class T>
T read_at(const std::byte* from, int64_t i) {
  T out;
  std::memcpy(&out, from + i * int64_t(sizeof(T)), sizeof(T));
  return out;
}
float value_at(Element type, const std::byte* from, int64_t i) {
  if (type == Element::f16) return to_float(read_at<f16>(from, i));
  return type == Element::bf16 ? to_float(read_at<bf16>(from, i)) : read_at<float>(from, i);
}

// ---- a product ----

/// Tokens on the device, rows with a gap of NaN after K and rows of NaN after M.
class UploadedTokens {
 public:
  UploadedTokens(const Tokens& x, bool eight_bits)
      : stride_((x.K * (eight_bits ? 1 : 2) + 15) / 16 * 16 + 16),
        bytes_(padded(x, eight_bits)),
        scale_(eight_bits ? x.scale : std::vector<float>()),
        eight_bits_(eight_bits) {}
  void put_into(TensorCoreArgs& args) const {
    args.x = bytes_.data();
    args.x_stride = stride_;
    args.x_scale = eight_bits_ ? scale_.data() : nullptr;
  }

 private:
  std::vector<std::byte> padded(const Tokens& x, bool eight_bits) const {
    std::vector<std::byte> out(size_t((x.M + 2) * stride_), std::byte{0xff});
    for (int64_t m = 0; m < x.M; ++m)
      for (int64_t k = 0; k < x.K; ++k) {
        const float value = x.values[size_t(m * x.K + k)];
        const bf16 wide = to_bf16(value);
        if (eight_bits)
          out[size_t(m * stride_ + k)] = std::byte(to_e4m3(value).bits);
        else
          std::memcpy(&out[size_t(m * stride_ + 2 * k)], &wide, 2);
      }
    return out;
  }
  int64_t stride_;
  OnDevice<std::byte> bytes_;
  OnDevice<float> scale_;
  bool eight_bits_;
};

struct Options {
  Choice choice;
  Accumulate accumulate = Accumulate::fast;
  WriteBack write_back = WriteBack::staged;
  Element type = Element::f32;
  bool bias = false, gate_and_add = false, in_place = false;
  TensorCoreActivation activation = TensorCoreActivation::none;
  int64_t activation_from = 0;
  int64_t gap = 0;  // between the rows of y
  int groups = 0;
  std::vector<int32_t> offsets = {};
};
std::string describe(const Options& o) {
  const auto& plan = o.choice.plan;
  return (plan ? "wgmma " + std::to_string(plan->rows) + " x " + std::to_string(plan->tokens) + " x " +
                     std::to_string(plan->cluster)
               : std::string(o.choice.kernel == TensorCoreKernel::mma   ? "mma"
                             : o.choice.kernel == TensorCoreKernel::few ? "few tokens"
                                                                        : "wgmma")) +
         (o.accumulate == Accumulate::full ? ", full" : ", fast") + ", write-back " +
         std::to_string(int(o.write_back)) + ", type " + std::to_string(int(o.type)) + ", gap " + std::to_string(o.gap);
}

/// One weight with the terms of its outputs on the device. bias, gate and what is added are small integers.
class Product {
 public:
  Product(Weight w, Tokens x)
      : w_(std::move(w)),
        x_(std::move(x)),
        matrix_(device(), cuda::make_tensor_core_tiles(*w_.layout, w_.shape, w_.bytes), "a test"),
        on_x_(x_, has_eight_bits(w_.layout->id)) {
    Rng rng(uint64_t(w_.shape.N * 31 + x_.M));
    const auto integers = [&](int64_t count, int most) {
      std::vector<float> out(static_cast<size_t>(count));
      for (float& value : out) value = float(int(rng.below(uint64_t(2 * most + 1))) - most);
      return out;
    };
    bias_ = integers(w_.shape.N, 8), gate_ = integers(w_.shape.N, 2), add_ = integers(x_.M * w_.shape.N, 16);
    on_bias_.emplace(bias_), on_gate_.emplace(gate_);
  }
  const Weight& w() const { return w_; }
  const Tokens& x() const { return x_; }
  const std::vector<float>& bias() const { return bias_; }

  /// Results of the first M tokens as float32: [M, outputs of a group]. What lies between rows must not change.
  std::vector<float> run(const Options& o, int64_t M) const {
    const int64_t outputs = outputs_of(o), y_stride = outputs + o.gap, size = cuda::bytes_of(o.type);
    OnDevice<std::byte> y(size_t(M * y_stride * size));
    std::vector<std::byte> before(size_t(M * y_stride * size), std::byte{0xff});
    std::optional<OnDevice<std::byte>> add;
    if (o.gate_and_add) {
      const std::vector<std::byte> values = bytes_as(o.type, add_);
      for (int64_t m = 0; m < M; ++m)
        std::copy_n(values.begin() + m * outputs * size, outputs * size, before.begin() + m * y_stride * size);
      if (o.in_place)
        y = before;
      else
        add.emplace(before);
    }
    const std::vector<int32_t> offsets = o.offsets;
    const OnDevice<int32_t> on_offsets(offsets);
    const OnDevice<float> workspace(o.write_back == WriteBack::separate ? size_t(outputs * M) : 0);
    TensorCoreArgs args{.w = matrix_.weights()};
    on_x_.put_into(args);
    args.M = M;
    args.bias = o.bias ? on_bias_->data() : nullptr;
    args.activation = o.activation;
    args.activation_from = o.activation_from;
    args.gate = o.gate_and_add ? on_gate_->data() : nullptr;
    args.add = !o.gate_and_add ? nullptr : o.in_place ? y.data() : add->data();
    args.type = o.type;
    args.y = y.data();
    args.y_stride = y_stride;
    args.groups = o.groups;
    args.offsets = o.groups > 0 ? on_offsets.data() : nullptr;
    args.accumulate = o.accumulate;
    args.write_back = o.write_back;
    args.kernel = o.choice.kernel;
    args.plan = o.choice.plan ? &*o.choice.plan : nullptr;
    args.workspace = o.write_back == WriteBack::separate ? workspace.data() : nullptr;
    cuda::launch_tensor_core(device(), stream(), args);
    const std::vector<std::byte> got = y.values();
    std::vector<float> out(size_t(M * outputs));
    bool gap_is_untouched = true;
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t n = 0; n < outputs; ++n)
        out[size_t(m * outputs + n)] = value_at(o.type, got.data(), m * y_stride + n);
      for (int64_t i = (m * y_stride + outputs) * size; i < (m + 1) * y_stride * size; ++i)
        gap_is_untouched &= got[size_t(i)] == std::byte{0xff};
    }
    EXPECT_TRUE(gap_is_untouched) << describe(o);
    return out;
  }

  int64_t outputs_of(const Options& o) const { return o.groups > 0 ? w_.shape.N / o.groups : w_.shape.N; }

  /// sum_k of a token and a row of the weight; both scales.
  double sum(int64_t m, int64_t row) const {
    double out = 0;
    const float *x = &x_.values[size_t(m * x_.K)], *w = &w_.values[size_t(row * x_.K)];
    for (int64_t k = 0; k < x_.K; ++k) out += double(x[k]) * double(w[k]);
    return out;
  }
  double scale(int64_t m, int64_t row) const { return double(x_.scale[size_t(m)]) * double(w_.scale[size_t(row)]); }
  /// The result of a token, row and scaled sum. in_group: row, counted in its group.
  double finish(const Options& o, int64_t m, int64_t row, int64_t in_group, double scaled) const {
    if (o.bias) scaled += double(bias_[size_t(row)]);
    if (o.activation == TensorCoreActivation::gelu_tanh && in_group >= o.activation_from)
      scaled = 0.5 * scaled * (1 + std::tanh(std::sqrt(2 / M_PI) * (scaled + 0.044715 * scaled * scaled * scaled)));
    if (!o.gate_and_add) return scaled;
    return double(add_[size_t(m * outputs_of(o) + in_group)]) + double(gate_[size_t(row)]) * scaled;
  }
  double gate(const Options& o, int64_t row) const { return o.gate_and_add ? double(gate_[size_t(row)]) : 1; }

 private:
  Weight w_;
  Tokens x_;
  cuda::TensorCoreMatrix matrix_;
  UploadedTokens on_x_;
  std::vector<float> bias_, gate_, add_;
  std::optional<OnDevice<float>> on_bias_, on_gate_;
};

/// The first and last tokens of tiles, and some between them.
std::vector<int64_t> some_tokens(int64_t M) {
  std::set<int64_t> out;
  for (const int64_t m :
       {0, 1, 7, 8, 15, 16, 31, 32, 63, 64, 76, 95, 126, 127, 128, 129, 254, 255, 256, 300, 4000, 4096})
    if (m < M) out.insert(m);
  out.insert(M - 1);
  return {out.begin(), out.end()};
}

/// Integers: sums are below 2^13, and so exact in every way of keeping them, and so is all that follows but the last
/// rounding.
void expect_exact(const Product& p, const Options& o, int64_t M, const std::vector<std::vector<double>>& sums,
                  const std::vector<int64_t>& tokens) {
  const std::vector<float> got = p.run(o, M);
  const int64_t N = p.w().shape.N;
  const auto unwritten = std::ranges::find_if(got, [](float v) { return std::isnan(v); });
  ASSERT_EQ(unwritten, got.end()) << describe(o) << ", place " << unwritten - got.begin() << " is not written";
  for (size_t i = 0; i < tokens.size() && tokens[i] < M; ++i)
    for (int64_t n = 0; n < N; ++n) {
      const int64_t m = tokens[i];
      const double exact = p.finish(o, m, n, n, sums[i][size_t(n)] * p.scale(m, n));
      ASSERT_EQ(got[size_t(m * N + n)], as_element(o.type, float(exact)))
          << p.w().layout->name << " K " << p.x().K << " M " << M << " N " << N << ", " << describe(o) << ", token "
          << m << ", output " << n;
    }
}

TEST(CudaTensorCore, IntegersAreExact) {
  LACUNA_NEED_DEVICE();
  const std::vector<Shape> shapes =
      emulated() ? std::vector<Shape>{{64, 128}, {100, 37}, {132, 260}}
                 : std::vector<Shape>{{64, 128}, {100, 1}, {100, 37}, {4097, 77}, {4100, 515}, {128, 6001}};
  const std::vector<int64_t> counts =
      emulated() ? std::vector<int64_t>{1, 17, 130} : std::vector<int64_t>{1, 15, 16, 17, 77, 127, 129, 255, 257, 4097};
  for (const Id id : layouts())
    for (const Shape shape : shapes) {
      const Product p(integer_weight(id, shape, 3), integer_tokens(has_eight_bits(id), counts.back(), shape.K, 4));
      const std::vector<int64_t> tokens = some_tokens(counts.back());
      std::vector<std::vector<double>> sums;
      for (const int64_t m : tokens)
        for (sums.emplace_back(); int64_t(sums.back().size()) < shape.N;)
          sums.back().push_back(p.sum(m, int64_t(sums.back().size())));
      // Every write-back with every type, both kinds of rows and terms, dealt out to the numbers of tokens and plans.
      int turn = 0;
      for (const int64_t M : counts)
        for (const Accumulate accumulate : kAccumulates) {
          if (!has_eight_bits(id) && accumulate == Accumulate::full) continue;
          for (const Choice& choice : choices(id, accumulate)) {
            ++turn;
            if (M * shape.N > int64_t{1} << 19 && turn % 4 != 0) continue;  // the host takes long
            const Options o{.choice = choice,
                            .accumulate = accumulate,
                            .write_back = kWriteBacks[turn % 3],
                            .type = kElements[turn / 3 % 3],
                            .bias = turn % 4 != 0,
                            .gate_and_add = turn % 5 > 1,
                            .in_place = turn % 5 > 3,
                            .gap = turn % 2 == 0 ? (8 - shape.N % 8) % 8 + 8 : turn % 7};
            expect_exact(p, o, M, sums, tokens);
            if (HasFatalFailure()) return;
          }
        }
    }
}

// RECIPES 20: tokens of pictures with their text, outputs that are no multiple of 4.
TEST(CudaTensorCore, TokensOfPictures) {
  LACUNA_NEED_DEVICE();
  const Shape shape{emulated() ? 66 : 4098, 64};
  const std::vector<int64_t> counts =
      emulated() ? std::vector<int64_t>{96, 130} : std::vector<int64_t>{4096, 3750 + 512, 8352};
  for (const Id id : layouts()) {
    const Product p(integer_weight(id, shape, 7), integer_tokens(has_eight_bits(id), counts.back(), shape.K, 8));
    const std::vector<int64_t> tokens = some_tokens(counts.back());
    std::vector<std::vector<double>> sums;
    for (const int64_t m : tokens)
      for (sums.emplace_back(); int64_t(sums.back().size()) < shape.N;)
        sums.back().push_back(p.sum(m, int64_t(sums.back().size())));
    for (const TensorCoreKernel kernel : kernels(id))
      for (const int64_t M : counts) {
        expect_exact(p, {.choice = {kernel, std::nullopt}, .type = Element::bf16, .bias = true, .gate_and_add = true},
                     M, sums, tokens);
        if (HasFatalFailure()) return;
      }
  }
}

// What hardware may lose: an instruction takes 16 to 64 inputs, aligns their products and the sum so far to the largest
// of them, and of each of these addends, and of the new sum, keeps 14 bits (Hopper's and Ada's FP8; other sums keep
// more). So each addend and each sum loses less than 2^-13 of the largest magnitude A among products and sums so far:
// together (K + 2 K / 16) 2^-13 A, plus a hundredth for sums that are off themselves. Full accumulation does so in 128
// inputs at a time, each of them from zero, and rounds float32 sums of these.
double sum_bound(const Product& p, int64_t m, int64_t row, bool full) {
  const int64_t K = p.x().K;
  const float *x = &p.x().values[size_t(m * K)], *w = &p.w().values[size_t(row * K)];
  double before = 0, sum = 0, largest = 0, largest_total = 0, bound = 0;
  int64_t first = 0;
  for (int64_t k = 0; k < K; ++k) {
    const double product = double(x[k]) * double(w[k]);
    sum += product;
    largest = std::max(largest, std::abs(product));
    if (k % 16 == 15 || k + 1 == K) largest = std::max(largest, std::abs(sum - before));
    largest_total = std::max(largest_total, std::abs(sum));
    if (k + 1 == K || (full && k % 128 == 127)) {
      bound += 1.01 * double(k + 1 - first + 2 * ((k + 16 - first) / 16)) * 0x1p-13 * largest;
      if (full) before = sum, largest = 0, first = k + 1;
    }
  }
  return bound + double(K / 128 + 1) * 0x1p-24 * largest_total * 1.01;
}

TEST(CudaTensorCore, RandomValuesAreWithinTheBoundOfTheHardware) {
  LACUNA_NEED_DEVICE();
  const std::vector<Shape> shapes =
      emulated() ? std::vector<Shape>{{70, 300}} : std::vector<Shape>{{70, 33}, {200, 1000}, {130, 12288}};
  for (const Id id : layouts())
    for (const Shape shape : shapes) {
      const int64_t M = emulated() ? 20 : 150;
      const Product p(weight_of(id, shape, random_bytes(id, shape, 5)),
                      random_tokens(has_eight_bits(id), M, shape.K, 6));
      for (const Accumulate accumulate : kAccumulates) {
        struct Exact {
          int64_t m, n;
          double scaled, lost;
        };
        std::vector<Exact> all;
        for (const int64_t m : some_tokens(M))
          for (int64_t n = 0; n < shape.N; ++n)
            all.push_back({m, n, p.sum(m, n) * p.scale(m, n),
                           sum_bound(p, m, n, accumulate == Accumulate::full) * p.scale(m, n)});
        for (const Choice& choice : choices(id, accumulate))
          for (const Element type : kElements) {
            if (emulated() && type != Element::bf16) continue;
            const Options o{.choice = choice,
                            .accumulate = accumulate,
                            .type = type,
                            .bias = true,
                            .gate_and_add = true,
                            .activation = TensorCoreActivation::gelu_tanh,
                            .activation_from = 64};
            const std::vector<float> got = p.run(o, M);
            const double ulp = type == Element::f32 ? 0x1p-24 : type == Element::f16 ? 0x1p-11 : 0x1p-8;
            for (const auto& [m, n, scaled, lost] : all) {
              const double exact = p.finish(o, m, n, n, scaled);
              // float32 roundings of scales, bias and GELU, whose slope is below 1.13 and which loses a few more.
              const double before_gate =
                  1.13 * lost + 0x1p-20 * (std::abs(scaled) + std::abs(double(p.bias()[size_t(n)])) + 1);
              ASSERT_LE(std::abs(double(got[size_t(m * shape.N + n)]) - exact),
                        (before_gate * std::abs(p.gate(o, n)) + 0x1p-20 * std::abs(exact)) * (1 + ulp) +
                            ulp * std::abs(exact) + 1e-7)
                  << p.w().layout->name << " K " << shape.K << ", " << describe(o) << ", token " << m << ", output "
                  << n;
            }
          }
      }
    }
}

// The kernel of few tokens: exact on integers, whatever the shape, the type and the terms.
TEST(CudaTensorCore, FewTokens) {
  LACUNA_NEED_DEVICE();
  for (const Id id : {Id::bf16, Id::f8})
    for (const Shape shape : {Shape{64, 128}, {1, 1}, {100, 37}, {132, 260}, {67, 1027}, {4100, 515}}) {
      if (emulated() && shape.N > 1000) continue;
      const Product p(integer_weight(id, shape, 3),
                      integer_tokens(has_eight_bits(id), cuda::kMostFewTokens, shape.K, 4));
      const std::vector<int64_t> tokens = {0, 1, 2, 3};
      std::vector<std::vector<double>> sums;
      for (const int64_t m : tokens)
        for (sums.emplace_back(); int64_t(sums.back().size()) < shape.N;)
          sums.back().push_back(p.sum(m, int64_t(sums.back().size())));
      int turn = 0;
      for (const int64_t M : tokens)
        for (const Element type : kElements) {
          ++turn;
          const Options o{.choice = {TensorCoreKernel::few, {}},
                          .type = type,
                          .bias = turn % 4 != 0,
                          .gate_and_add = turn % 5 > 1,
                          .in_place = turn % 5 > 3,
                          .gap = turn % 3};
          expect_exact(p, o, M + 1, sums, tokens);
          if (HasFatalFailure()) return;
        }
      const Options activated{
          .choice = {TensorCoreKernel::few, {}}, .activation = TensorCoreActivation::gelu_tanh, .activation_from = 64};
      const std::vector<float> got = p.run(activated, 2);
      for (int64_t m = 0; m < 2; ++m)
        for (int64_t n = 0; n < shape.N; ++n) {
          const double exact = p.finish(activated, m, n, n, p.sum(m, n) * p.scale(m, n));
          ASSERT_NEAR(double(got[size_t(m * shape.N + n)]), exact, 0x1p-19 * std::max(1.0, std::abs(exact)));
        }
    }
}

// RECIPES 21: tokens that are unit vectors give the weight itself, decoded.
TEST(CudaTensorCore, UnitVectorsGiveTheDecodedWeight) {
  LACUNA_NEED_DEVICE();
  for (const Id id : layouts()) {
    const Shape shape{emulated() ? 67 : 193, emulated() ? 71 : 301};
    Weight w = weight_of(id, shape, random_bytes(id, shape, 8));
    if (id == Id::nm24_f8) {  // groups 0000, 000a, a000, 0a00, ab00, 00ab, 0-0a0
      const layout::TensorCoreRow map = layout::tensor_core_row(*w.layout, shape.K);
      const uint8_t places[] = {4, 14, 12, 13, 4, 14, 9};  // the lower place in the lower two bits
      const uint8_t codes[][2] = {{0, 0}, {0, 0x31}, {0x45, 0}, {0x52, 0}, {0x3a, 0xc1}, {0x22, 0x7e}, {0x80, 0x38}};
      for (size_t g = 0; g < std::size(places); ++g) {
        std::byte& four = w.bytes[size_t(map.index) + g / 2];
        four = (four & std::byte(g % 2 == 0 ? 0xf0 : 0x0f)) | std::byte(places[g] << (4 * (g % 2)));
        for (size_t i = 0; i < 2; ++i) w.bytes[size_t(map.values) + 2 * g + i] = std::byte{codes[g][i]};
      }
      w = weight_of(id, shape, w.bytes);
    }
    Tokens x{shape.K, shape.K, std::vector<float>(size_t(shape.K * shape.K)), std::vector<float>(size_t(shape.K), 1)};
    for (int64_t k = 0; k < shape.K; ++k) x.values[size_t(k * shape.K + k)] = 1;
    const Product p(w, x);
    for (const TensorCoreKernel kernel : kernels(id)) {
      const std::vector<float> got = p.run({.choice = {kernel, {}}}, shape.K);
      for (int64_t n = 0; n < shape.N; ++n)
        for (int64_t k = 0; k < shape.K; ++k)
          ASSERT_EQ(got[size_t(k * shape.N + n)], w.values[size_t(n * shape.K + k)] * w.scale[size_t(n)])
              << w.layout->name << " row " << n << ", input " << k;
    }
  }
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A token's outputs depend neither on the other tokens nor on the way to memory, and are the same in every run.
TEST(CudaTensorCore, BitsDependOnTheTokenAlone) {
  LACUNA_NEED_DEVICE();
  const Shape shape{emulated() ? 68 : 516, emulated() ? 150 : 1111};
  const int64_t M = emulated() ? 33 : 777;
  for (const Id id : layouts()) {
    const Product p(weight_of(id, shape, random_bytes(id, shape, 9)),
                    random_tokens(has_eight_bits(id), M, shape.K, 10));
    for (const Accumulate accumulate : kAccumulates)
      for (const Choice& choice : choices(id, accumulate)) {
        Options o{.choice = choice, .accumulate = accumulate, .bias = true, .gate_and_add = true};
        const std::vector<float> all = p.run(o, M);
        for (int again = 0; again < (emulated() ? 1 : 10); ++again)
          ASSERT_TRUE(same_bits(p.run(o, M), all)) << p.w().layout->name << ", " << describe(o);
        for (const int64_t fewer : {1, 16, 21}) {
          const std::vector<float> part = p.run(o, fewer);
          ASSERT_TRUE(same_bits(part, {all.begin(), all.begin() + fewer * shape.N}))
              << p.w().layout->name << ", " << describe(o) << ", " << fewer << " tokens";
        }
        o.write_back = WriteBack::direct;
        ASSERT_TRUE(same_bits(p.run(o, M), all)) << p.w().layout->name << ", " << describe(o);
        o.gap = 3;
        o.write_back = WriteBack::staged;
        ASSERT_TRUE(same_bits(p.run(o, M), all)) << p.w().layout->name << ", " << describe(o);
      }
  }
}

// Tokens so that the last round of the clusters has whole tiles, halves, quarters, or none; the last one is not full.
TEST(CudaTensorCore, TilesOfALastRoundGiveTheSameBits) {
  LACUNA_NEED_DEVICE();
  const auto plans_of = [](Id id) {
    return cuda::tensor_core_plans(cuda::operation_of(layout::get(id)), Accumulate::fast);
  };
  if (device().info().major != 9 || plans_of(Id::bf16).empty()) GTEST_SKIP() << "SKIPPED: only wgmma splits tiles";
  const TensorCorePlan small{.rows = 128, .tokens = 128, .cluster = 2};
  for (const Id id : layouts()) {
    const Shape shape{200, has_eight_bits(id) ? 300 : 150};
    for (const TensorCorePlan& plan : plans_of(id)) {
      if (!cuda::splits_last_round(plan, false)) continue;
      const int64_t clusters = device().info().multiprocessors / plan.cluster;
      std::set<int> splits;
      for (const int64_t rest : {int64_t{0}, int64_t{1}, clusters / 4, clusters / 2, clusters - 1}) {
        splits.insert(cuda::split_of_last_round(2, rest, clusters));
        const int64_t M = (2 * clusters + rest) * plan.tokens - 27;
        const Product p(weight_of(id, shape, random_bytes(id, shape, 5)),
                        random_tokens(has_eight_bits(id), M, shape.K, 6));
        for (const bool added : {false, true}) {
          Options o{.choice = {TensorCoreKernel::wgmma, small},
                    .type = added ? Element::f16 : Element::bf16,
                    .bias = true,
                    .gate_and_add = added,
                    .activation = added ? TensorCoreActivation::none : TensorCoreActivation::gelu_tanh};
          const std::vector<float> unsplit = p.run(o, M);
          o.choice.plan = plan;
          ASSERT_TRUE(same_bits(p.run(o, M), unsplit)) << p.w().layout->name << ", " << rest << " tiles left over";
          o.gap = 3;  // threads store
          ASSERT_TRUE(same_bits(p.run(o, M), unsplit)) << p.w().layout->name << ", " << rest << " tiles left over";
        }
      }
      EXPECT_EQ(splits, (std::set<int>{1, 2, cuda::kMostSplit}));
    }
  }
}

// RECIPES 22: groups of the given sizes give what each gives alone; rows of none are not touched. (Rows after the last
// group are NaN in x already.)
TEST(CudaTensorCore, GroupsGiveWhatEachGivesAlone) {
  LACUNA_NEED_DEVICE();
  std::vector<std::vector<int32_t>> sizes = {{0, 5, 0, 0, 3}, {0, 0, 0, 0, 0}, {4, 130, 1, 6, 0}, {140, 0, 0, 0, 0}};
  if (!emulated()) sizes.insert(sizes.end(), {{128, 256, 127, 129, 64}, {1, 1, 1, 1, 1}, {1000, 3, 0, 700, 259}});
  const int64_t of_group = emulated() ? 64 : 192, K = emulated() ? 100 : 700;
  const int groups = 5;
  int turn = 0;
  for (const Id id : layouts()) {
    const Weight joined = integer_weight(id, {groups * of_group, K}, 11);
    for (const std::vector<int32_t>& size : sizes) {
      std::vector<int32_t> offsets = {0};
      for (const int32_t tokens : size) offsets.push_back(offsets.back() + tokens);
      const int64_t rows = offsets.back(), M = rows + 3;
      const Product p(joined, integer_tokens(has_eight_bits(id), M, K, 12));
      std::vector<double> scaled;  // of the rows that are of a group
      for (int g = 0; g < groups; ++g)
        for (int64_t m = offsets[size_t(g)]; m < offsets[size_t(g) + 1]; ++m)
          for (int64_t row = g * of_group; row < (g + 1) * of_group; ++row)
            scaled.push_back(p.sum(m, row) * p.scale(m, row));
      for (const Accumulate accumulate : kAccumulates)
        for (const Choice& choice : choices(id, accumulate)) {
          if (emulated() && ++turn % 2 != 0) continue;
          for (const WriteBack write_back : kWriteBacks) {
            if (emulated() && write_back == WriteBack::direct) continue;
            const Options o{.choice = choice,
                            .accumulate = accumulate,
                            .write_back = write_back,
                            .type = Element::bf16,
                            .bias = true,
                            .gate_and_add = true,
                            .groups = groups,
                            .offsets = offsets};
            const std::vector<float> got = p.run(o, M);
            for (int g = 0; g < groups; ++g)
              for (int64_t m = offsets[size_t(g)]; m < offsets[size_t(g) + 1]; ++m)
                for (int64_t n = 0; n < of_group; ++n) {
                  const int64_t row = g * of_group + n;
                  const double exact = p.finish(o, m, row, n, scaled[size_t(m * of_group + n)]);
                  ASSERT_EQ(got[size_t(m * of_group + n)], as_element(o.type, float(exact)))
                      << joined.layout->name << ", " << describe(o) << ", group " << g << ", token " << m << ", output "
                      << n;
                }
            for (int64_t i = rows * of_group; i < M * of_group; ++i)
              ASSERT_TRUE(std::isnan(got[size_t(i)])) << describe(o) << ": a row of no group is written";
          }
        }
    }
  }
}

// Matrices joined along the outputs, each from a multiple of 64 on, as q, k and v are.
TEST(CudaTensorCore, JoinedMatrices) {
  LACUNA_NEED_DEVICE();
  const int64_t K = emulated() ? 70 : 333, M = emulated() ? 9 : 140;
  for (const Id id : layouts()) {
    const Weight first = integer_weight(id, {100, K}, 13), second = integer_weight(id, {60, K}, 14);
    cuda::TensorCoreTiles tiles = cuda::make_tensor_core_tiles(*first.layout, first.shape, first.bytes);
    const cuda::TensorCoreTiles more = cuda::make_tensor_core_tiles(*second.layout, second.shape, second.bytes);
    tiles.blocks.insert(tiles.blocks.end(), more.blocks.begin(), more.blocks.end());
    tiles.scale.insert(tiles.scale.end(), more.scale.begin(), more.scale.end());
    tiles.shape.N = 128 + 60;
    const cuda::TensorCoreMatrix matrix(device(), tiles, "a test");
    const Tokens x = integer_tokens(has_eight_bits(id), M, K, 15);
    const UploadedTokens on_x(x, has_eight_bits(id));
    for (const TensorCoreKernel kernel : kernels(id)) {
      const OnDevice<float> y(size_t(M * 188));
      TensorCoreArgs args{.w = matrix.weights()};
      on_x.put_into(args);
      args.M = M, args.type = Element::f32, args.y = y.data(), args.y_stride = 188, args.kernel = kernel;
      cuda::launch_tensor_core(device(), stream(), args);
      const std::vector<float> got = y.values();
      for (const Weight* w : {&first, &second}) {
        const Product p(*w, x);
        for (int64_t m = 0; m < M; ++m)
          for (int64_t n = 0; n < w->shape.N; ++n)
            ASSERT_EQ(got[size_t(m * 188 + (w == &second ? 128 : 0) + n)], float(p.sum(m, n) * p.scale(m, n)));
      }
    }
  }
}

// RECIPES 17 and 19: tokens and channels of zeros, and values that are not finite, from quantization on. RECIPES 16:
// sums past f16's range.
TEST(CudaTensorCore, ZerosLargeSumsAndWhatIsNotFinite) {
  LACUNA_NEED_DEVICE();
  const int64_t K = 96, N = 70, M = 7;
  const float inf = std::numeric_limits<float>::infinity();
  for (const Id id : layouts()) {
    const bool eight_bits = has_eight_bits(id);
    Weight w = integer_weight(id, {N, K}, 16);
    // Row 2: the largest weights; row 5: zeros, with a scale of zero.
    const layout::TensorCoreRow map =
        id == Id::bf16 ? layout::TensorCoreRow{.kept = K, .bytes = 2 * K} : layout::tensor_core_row(*w.layout, K);
    for (const int64_t n : {2, 5}) {
      std::byte* const row = w.bytes.data() + n * map.bytes;
      const float scale = n == 2 ? 1 : 0;
      const bf16 value = to_bf16(n == 2 ? 448 : 0);
      if (map.scaled) std::memcpy(row, &scale, 4);
      for (int64_t i = 0; i < map.kept; ++i) {
        if (eight_bits)
          row[map.values + i] = std::byte{n == 2 ? uint8_t(0x7e) : uint8_t(0)};
        else
          std::memcpy(row + map.values + 2 * i, &value, 2);
      }
    }
    w = weight_of(id, {N, K}, w.bytes);
    std::vector<float> x(size_t(M * K), 1.0f);
    std::fill_n(x.begin() + K, K, 0.0f);         // token 1: zeros
    std::fill_n(x.begin() + 2 * K, K, 1e-40f);   // token 2: denormal
    std::fill_n(x.begin() + 3 * K, K, 4560.0f);  // token 3: sums past f16's range
    x[size_t(4 * K + 3)] = inf, x[size_t(5 * K + 40)] = std::nanf("");
    Tokens tokens{M, K, x, std::vector<float>(size_t(M), 1.0f)};
    for (float& value : tokens.values) value = as_element(Element::bf16, value);
    if (eight_bits) {
      std::vector<e4m3> codes(x.size());
      kernels::quantize_per_token(x.data(), K, M, K, codes.data(), tokens.scale.data());
      for (size_t i = 0; i < codes.size(); ++i) tokens.values[i] = to_float(codes[i]);
    }
    const Product p(w, tokens);
    for (const TensorCoreKernel kernel : kernels(id))
      for (const WriteBack write_back : kWriteBacks) {
        const std::vector<float> got = p.run({.choice = {kernel, {}}, .write_back = write_back, .bias = true}, M);
        for (int64_t n = 0; n < N; ++n) {
          const auto at = [&](int64_t m) { return got[size_t(m * N + n)]; };
          const float bias = p.bias()[size_t(n)];
          EXPECT_EQ(at(1), bias) << "a token of zeros gives the bias";
          EXPECT_NEAR(at(2), bias, 1e-36) << "448 times 96 denormals at most";
          for (const int64_t m : {0, 1, 2, 3, 6})
            EXPECT_TRUE(n != 5 || at(m) == bias) << "a channel of zeros gives the bias";
          const double sum = p.sum(3, n) * p.scale(3, n) + double(bias);
          EXPECT_NEAR(at(3), sum, std::abs(sum) * 0x1p-11 + 4560 * 0x1p-11 * 16) << w.layout->name << " " << n;
          EXPECT_TRUE(n != 2 || at(3) > 1e7f) << "larger than f16 goes";
          for (const int64_t m : {0, 3, 6}) EXPECT_TRUE(std::isfinite(at(m))) << "other tokens are not touched";
          if (n == 2 && write_back == WriteBack::staged && !cuda::operation_of(*w.layout).sparse) {
            EXPECT_FALSE(std::isfinite(at(4)));
            EXPECT_TRUE(std::isnan(at(5)));
          }
        }
      }
  }
}

TEST(CudaTensorCore, ActivationBeginsWhereItIsTold) {
  LACUNA_NEED_DEVICE();
  const Shape shape{192, 60};
  for (const Id id : layouts()) {
    const Product p(integer_weight(id, shape, 17), integer_tokens(has_eight_bits(id), 5, shape.K, 18));
    for (const TensorCoreKernel kernel : kernels(id))
      for (const WriteBack write_back : kWriteBacks) {
        const Options o{.choice = {kernel, {}},
                        .write_back = write_back,
                        .activation = TensorCoreActivation::gelu_tanh,
                        .activation_from = 128};
        const std::vector<float> got = p.run(o, 5);
        for (int64_t m = 0; m < 5; ++m)
          for (int64_t n = 0; n < 192; ++n) {
            const double exact = p.finish(o, m, n, n, p.sum(m, n) * p.scale(m, n));
            const float is = got[size_t(m * 192 + n)];
            if (n < 128)
              ASSERT_EQ(is, float(exact)) << n;
            else
              ASSERT_NEAR(is, exact, 0x1p-20 * (1 + std::abs(exact))) << n;
          }
      }
  }
}

TEST(CudaTensorCore, NoTokensNoOutputsNoInputs) {
  LACUNA_NEED_DEVICE();
  TensorCoreArgs nothing;  // nullptr everywhere
  nothing.w.N = nothing.w.K = 64;
  cuda::launch_tensor_core(device(), stream(), nothing);
  nothing.w.N = 0, nothing.M = 4;
  cuda::launch_tensor_core(device(), stream(), nothing);
  for (const Id id : layouts()) {
    const Product p(weight_of(id, {70, 0}, random_bytes(id, {70, 0}, 1)), integer_tokens(has_eight_bits(id), 3, 0, 1));
    for (const TensorCoreKernel kernel : kernels(id)) {
      const std::vector<float> got = p.run({.choice = {kernel, {}}, .bias = true}, 3);
      for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], p.bias()[i % 70]);
    }
  }
}

TEST(CudaTensorCore, BadArgumentsAreNamed) {
  LACUNA_NEED_DEVICE();
  const OnDevice<std::byte> memory(4096), x(4096), y(4096);
  const OnDevice<float> scale(128), workspace(128);
  const OnDevice<int32_t> offsets(4);
  TensorCoreArgs good{.w = {.operation = {.eight_bits = false, .sparse = false},
                            .N = 128,
                            .K = 60,
                            .blocks = memory.data(),
                            .scale = nullptr}};
  good.x = x.data(), good.x_stride = 128, good.M = 4;
  good.y = y.data(), good.y_stride = 128;
  const auto expect_error = [&](auto change, const char* text) {
    EXPECT_THAT(
        [&] {
          TensorCoreArgs args = good;
          change(args);
          cuda::launch_tensor_core(device(), stream(), args);
        },
        ThrowsMessage<Error>(HasSubstr(text)));
  };
  expect_error([](auto& a) { a.w.blocks += 16; }, "aligned to 128 bytes");
  expect_error([](auto& a) { a.w.blocks = nullptr; }, "memory of the weight");
  expect_error([&](auto& a) { a.w.scale = scale.data(); }, "bf16 weights have not a scale");
  expect_error([](auto& a) { a.w.operation = {.eight_bits = true, .sparse = true}; }, "2:4 e4m3 weights need a scale");
  expect_error(
      [&](auto& a) {
        a.w.operation = {.eight_bits = true, .sparse = false};
        a.w.scale = scale.data();
      },
      "tokens of e4m3 need scales");
  expect_error([&](auto& a) { a.x_scale = scale.data(); }, "tokens of bf16 have no scales");
  expect_error([](auto& a) { a.x += 8; }, "aligned to 16 bytes");
  expect_error([](auto& a) { a.x_stride = 120; }, "120 bytes apart");
  expect_error([](auto& a) { a.x_stride = 112; }, "hold less than 120");
  expect_error([](auto& a) { a.y = nullptr; }, "memory of y");
  expect_error([](auto& a) { a.y_stride = 127; }, "hold less than 128 outputs");
  expect_error([](auto& a) { a.y = static_cast<std::byte*>(a.y) + 1; }, "aligned to their 2-byte values");
  expect_error([&](auto& a) { a.gate = scale.data(); }, "gate and add go together");
  expect_error([](auto& a) { a.activation_from = 32; }, "must be a multiple of 64");
  expect_error([](auto& a) { a.write_back = WriteBack::separate; }, "needs a workspace");
  expect_error([](auto& a) { a.groups = 2; }, "need offsets");
  expect_error([&](auto& a) { a.offsets = offsets.data(); }, "need offsets");
  expect_error(
      [&](auto& a) {
        a.groups = 3;
        a.offsets = offsets.data();
      },
      "128 outputs are not 3 groups");
  const TensorCorePlan plan{.rows = 17, .tokens = 256, .cluster = 2};
  expect_error(
      [&](auto& a) {
        a.kernel = TensorCoreKernel::mma;
        a.plan = &plan;
      },
      "17 outputs x 256 tokens, clusters of 2 is the wgmma kernel's");
  if (kernels(Id::bf16).size() > 1)
    expect_error([&](auto& a) { a.plan = &plan; }, "no plan of 17 outputs x 256 tokens");
  else
    expect_error([](auto& a) { a.kernel = TensorCoreKernel::wgmma; }, "does not run the wgmma kernel");
}

}  // namespace

namespace cuda {
namespace {

DeviceInfo card(int major, int minor) {
  DeviceInfo out;
  out.name = "a card", out.major = major, out.minor = minor, out.multiprocessors = 100;
  return out;
}

TEST(TensorCoreChoice, OldCardsAreRefusedByName) {
  TensorCoreArgs args;
  args.w.operation = {.eight_bits = true, .sparse = true};
  args.M = 100;
  EXPECT_THAT([&] { explain_tensor_core(card(8, 6), args); },
              ThrowsMessage<Error>(
                  HasSubstr("a card has compute capability 8.6; products of 2:4 e4m3 weights need 8.9 or later")));
  EXPECT_EQ(explain_tensor_core(card(8, 9), args),
            "mma of 2:4 e4m3, 128 outputs x 128 tokens, fast accumulation, staged write-back");
  args.w.operation.eight_bits = false;
  EXPECT_EQ(explain_tensor_core(card(8, 0), args), "mma of 2:4 bf16, 128 outputs x 128 tokens, staged write-back");
  args.M = 1;
  EXPECT_EQ(explain_tensor_core(card(8, 0), args), "mma of 2:4 bf16, 128 outputs x 128 tokens, staged write-back");
  args.kernel = TensorCoreKernel::few;
  EXPECT_THAT([&] { explain_tensor_core(card(8, 0), args); },
              ThrowsMessage<Error>(HasSubstr("not 1 tokens by 2:4 bf16")));
  args.w.operation.sparse = false, args.kernel = TensorCoreKernel::best;
  EXPECT_EQ(explain_tensor_core(card(8, 0), args), "float32 sums of bf16, 64 outputs x up to 4 tokens");
  args.M = 5;
  EXPECT_EQ(explain_tensor_core(card(8, 0), args), "mma of bf16, 128 outputs x 128 tokens, staged write-back");
  args.kernel = TensorCoreKernel::wgmma;
  EXPECT_THAT([&] { explain_tensor_core(card(8, 9), args); },
              ThrowsMessage<Error>(HasSubstr("does not run the wgmma kernel")));
}

TEST(TensorCoreChoice, PartsOfALastRoundFitIt) {
  EXPECT_EQ(cuda::split_of_last_round(4, 24, 66), 2);
  EXPECT_EQ(cuda::split_of_last_round(2, 6, 66), 4);
  EXPECT_EQ(cuda::split_of_last_round(1, 6, 66), 1) << "parts would wait for whole tiles";
  EXPECT_EQ(cuda::split_of_last_round(0, 6, 66), 1) << "no round is whole: each tile has a cluster of its own";
  for (const int64_t clusters : {1, 2, 57, 66})
    for (int64_t rest = 0; rest < clusters; ++rest) {
      const int split = cuda::split_of_last_round(2, rest, clusters);
      EXPECT_LE(split * rest, std::max(clusters, rest)) << rest << " of " << clusters;
      EXPECT_TRUE(split == 1 || split == 2 || split == cuda::kMostSplit);
      const bool could_be_more = rest > 0 && 2 * split <= cuda::kMostSplit;
      EXPECT_TRUE(!could_be_more || 2 * split * rest > clusters) << rest << " of " << clusters;
    }
}

TEST(TensorCoreChoice, TheDefaultPlanIsOneOfTheKernels) {
  for (const bool eight_bits : {false, true})
    for (const bool sparse : {false, true})
      for (const Accumulate accumulate : {Accumulate::fast, Accumulate::full}) {
        const Operation operation{.eight_bits = eight_bits, .sparse = sparse};
        const auto plans = tensor_core_plans(operation, accumulate);
        if (plans.empty()) continue;
        for (const int64_t M : {1, 100, 4096})
          EXPECT_EQ(std::ranges::count(plans, default_plan(card(9, 0), operation, accumulate, M, 3072, 0)), 1);
      }
}

TEST(TensorCoreChoice, TheDefaultPlanCountsRoundsAndTheirParts) {
  const Operation f8{.eight_bits = true, .sparse = false};
  if (cuda::tensor_core_plans(f8, Accumulate::fast).empty()) return;  // built without the wgmma kernel
  cuda::DeviceInfo h100 = card(9, 0);
  h100.multiprocessors = 132;
  const auto tokens = [&](int64_t M, int64_t N, int groups = 0) {
    return default_plan(h100, f8, Accumulate::fast, M, N, groups).tokens;
  };
  EXPECT_EQ(tokens(4096, 3072), 256) << "three rounds, nearly full";
  EXPECT_EQ(tokens(4608, 3072), 256) << "three rounds and halves, for five of 192";
  EXPECT_EQ(tokens(4608, 3072, 4), 256) << "four rounds for five";
  EXPECT_EQ(tokens(6144, 3072), 256) << "four rounds and halves, for six";
  EXPECT_EQ(tokens(6144, 3072, 4), 192) << "tiles of experts are not split: five rounds of 256 or six of 192";
  EXPECT_EQ(tokens(1536, 3072), 192) << "two rounds of 192; parts after a single round count as whole tiles";
  EXPECT_EQ(tokens(512, 12288), 128) << "three rounds of 128, for two of 256";
}

}  // namespace
}  // namespace cuda
}  // namespace lacuna
