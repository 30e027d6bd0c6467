// tests/kernels/cuda_gemm_test.cc - the products of many tokens on a CUDA device against double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/prepared.h"
#include "kernels/cuda_memory.h"
#include "kernels/linear.h"
#include "kernels/support.h"
#include "layout/layout.h"
#include "layout/zigzag.h"

namespace lacuna {
namespace {

using cuda::GemmKernel;
using layout::Id;
using test::device;
using test::OnDevice;
using test::pool;
using test::stream;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

std::vector<float> random_values(int64_t count, uint64_t seed, double scale = 1) {
  Rng rng(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& v : out) v = float(rng.normal() * scale);
  return out;
}

/// Where a canonical block has its f16 scales and its codes. zz8: a superblock is eight blocks.
struct Fields {
  std::vector<size_t> halves;
  size_t codes_begin, codes_end;
  int64_t bytes;  // of a block
};
Fields fields(Id id) {
  const int64_t bytes = layout::get(id).block_bytes;
  switch (id) {
    case Id::q4_0:
      return {{0}, 2, 18, bytes};
    case Id::q8_0:
    case Id::zz8:
      return {{0}, 2, 34, 34};
    case Id::zz2_k:
      return {{80, 82}, 16, 80, bytes};
    case Id::q3_K:
    case Id::zz3_k:
      return {{108}, 0, 96, bytes};
    case Id::q4_K:
    case Id::zz4_k:
      return {{0, 2}, 16, 144, bytes};
    case Id::zz5_k:
      return {{0, 2}, 16, 176, bytes};
    case Id::q6_K:
    case Id::zz6_k:
      return {{208}, 0, 192, bytes};
    default:
      return {{}, 0, 0, bytes};
  }
}

/// Random bytes with finite scales; floats are normal.
std::vector<std::byte> random_bytes(const layout::Layout& l, int64_t N, int64_t K, uint64_t seed, double size = 0.01) {
  Rng rng(seed);
  std::vector<std::byte> bytes(size_t(l.size_bytes({N, K})));
  const auto put_half = [&](size_t at, double value) {
    const f16 h = to_f16(float(value));
    std::memcpy(&bytes[at], &h, 2);
  };
  if (!fields(l.id).halves.empty()) {
    for (std::byte& byte : bytes) byte = std::byte(rng.next() >> 56);
    for (size_t at = 0; at < bytes.size(); at += size_t(fields(l.id).bytes))
      for (const size_t offset : fields(l.id).halves) put_half(at + offset, rng.normal() * size);
    return bytes;
  }
  for (size_t i = 0; i < size_t(N * K); ++i) {
    const auto value = float(rng.normal() * size * 100);
    const bf16 b = to_bf16(value);
    if (l.id == Id::f32) std::memcpy(&bytes[4 * i], &value, 4);
    if (l.id == Id::f16) put_half(2 * i, value);
    if (l.id == Id::bf16) std::memcpy(&bytes[2 * i], &b, 2);
  }
  return bytes;
}

std::vector<float> decode(const layout::Layout& l, int64_t N, int64_t K, const std::vector<std::byte>& bytes) {
  std::vector<float> out(size_t(N * K));
  if (l.zigzag)
    layout::decode_zigzag(l, {N, K}, {}, bytes, 0, N, out.data());
  else
    layout::decode_rows(l, {N, K}, bytes, 0, N, out.data());
  return out;
}

/// The largest weight that a place's scales allow; codes of all zeros and all ones are its ends (q8_0's -1: 1 / 128 of
/// that).
std::vector<float> magnitudes(const layout::Layout& l, int64_t N, int64_t K, std::vector<std::byte> bytes) {
  const Fields f = fields(l.id);
  std::vector<float> out;
  for (const int code : {0, 255}) {
    for (size_t at = 0; at < bytes.size() && f.codes_end > 0; at += size_t(f.bytes))
      std::memset(&bytes[at + f.codes_begin], code, f.codes_end - f.codes_begin);
    const auto end = decode(l, N, K, bytes);
    out.resize(end.size());
    const float size = l.id == Id::q8_0 || l.id == Id::zz8 ? 128 : 1;
    for (size_t i = 0; i < end.size(); ++i) out[i] = std::max(out[i], std::abs(end[i]) * size);
  }
  return out;
}

/// A weight on the device, its scales found.
struct Weight {
  const layout::Layout& l;
  int64_t N, K;
  std::vector<std::byte> bytes;
  cuda::PreparedGroup group;
  std::vector<OnDevice<std::byte>> there;
  OnDevice<float> scale;

  Weight(const layout::Layout& of, int64_t outputs, int64_t inputs, std::vector<std::byte> canonical)
      : l(of), N(outputs), K(inputs), bytes(std::move(canonical)), scale(size_t((N + 255) / 256 * 256)) {
    if (l.zigzag) {
      const kernels::WeightView view{"w", &l, {N, K}, bytes};
      group = cuda::prepare_group({&view, 1}, pool());
      for (const auto from : {group.codes.bytes(), group.headers.bytes()})
        there.emplace_back(std::vector<std::byte>(from.begin(), from.end()));
    } else {
      std::vector<std::byte> prepared(size_t(N * cuda::row_places(l, K).row_bytes));
      cuda::prepare_rows(l, {N, K}, {}, bytes, pool(), prepared.data());
      there.emplace_back(prepared);
    }
    find_scales();
  }
  /// Copies of `part` (of columns: whole superblock rows) below each other; its bytes are those of one.
  Weight(const Weight& part, int64_t copies)
      : l(part.l), N(part.N * copies), K(part.K), bytes(part.bytes), scale(size_t((N + 255) / 256 * 256)) {
    group.rows = part.group.rows * copies;
    for (size_t plane = 0; plane < part.there.size(); ++plane) {
      const std::vector<std::byte> one = part.there[plane].values();
      auto size = int64_t(one.size()), slack = int64_t{0};
      if (l.zigzag) {  // the columns that kernels may read behind the last one
        const cuda::ColumnForm& form = cuda::column_form(l);
        size = part.group.rows * K * (plane == 0 ? form.code_bytes : form.header_bytes);
        slack = int64_t(one.size()) - size;
      }
      there.emplace_back(size_t(size * copies + slack));
      for (int64_t i = 0; i < copies; ++i) there.back().buffer().upload(one, i * size);
    }
    find_scales();
  }
  void find_scales() const {
    if (l.zigzag)
      cuda::launch_weight_scales(device(), stream(), l, columns(), scale.data());
    else
      cuda::launch_weight_scales(device(), stream(), rows(), scale.data());
  }
  cuda::Columns columns() const { return {there[0].data(), there[1].data(), group.rows, K}; }
  cuda::Rows rows() const { return {&l, there[0].data(), N, K}; }
  void write(int64_t first, const cuda::Operand& to) const {
    if (l.zigzag)
      cuda::launch_gemm_weights(device(), stream(), l, columns(), first, to);
    else
      cuda::launch_gemm_weights(device(), stream(), rows(), first, to);
  }
};

struct Run {
  GemmKernel kernel = GemmKernel::best;
  bool bias = false, add = false;
  int64_t slice = 1 << 20;  // outputs at a time
  int64_t spare = 0;        // columns of y between a row and the next
};

/// y of all tokens; what lies between rows must stay as it was.
std::vector<float> multiply(const Weight& w, const std::vector<float>& x, int64_t M, const Run& how) {
  const int64_t stride = w.N + how.spare;
  const OnDevice<float> x_there(x), bias(random_values(w.N, 5)), x_scale{static_cast<size_t>(M)};
  std::vector<float> before(size_t(M * stride), kNan);
  if (how.add) {
    const auto values = random_values(M * w.N, 6);
    for (int64_t m = 0; m < M; ++m) std::copy_n(values.begin() + m * w.N, w.N, before.begin() + m * stride);
  }
  const OnDevice<float> y(before);
  const OnDevice<std::byte> x_tiles(size_t(cuda::operand_bytes(M, w.K)));
  const int64_t at_once = std::min(how.slice, (w.N + 255) / 256 * 256);
  const OnDevice<std::byte> w_tiles(size_t(cuda::operand_bytes(at_once, w.K)));
  const cuda::Operand operand = {x_tiles.data(), x_scale.data(), M, w.K};
  cuda::launch_gemm_inputs(device(), stream(), {.x = x_there.data(), .stride = w.K, .to = operand});
  for (int64_t first = 0; first < w.N; first += at_once) {
    cuda::GemmArgs args;
    args.x = operand;
    args.w = {w_tiles.data(), w.scale.data() + first, std::min(at_once, w.N - first), w.K};
    args.bias = how.bias ? bias.data() + first : nullptr;
    args.add = how.add;
    args.y = y.data() + first;
    args.stride = stride;
    args.kernel = how.kernel;
    w.write(first, args.w);
    cuda::launch_gemm(device(), stream(), args);
  }
  const auto got = y.values();
  std::vector<float> out;
  for (int64_t m = 0; m < M; ++m) {
    const auto row = got.begin() + m * stride;
    out.insert(out.end(), row, row + w.N);
    for (int64_t i = w.N; i < stride; ++i) EXPECT_TRUE(std::isnan(row[i])) << "written between the rows";
  }
  return out;
}

/// In double from decoded weights, and how far off the product may be.
struct Expected {
  std::vector<double> y, bound;
};
Expected expect(const Weight& w, const std::vector<float>& x, int64_t M, const Run& how) {
  const auto decoded = decode(w.l, w.N, w.K, w.bytes), most = magnitudes(w.l, w.N, w.K, w.bytes);
  const auto bias = random_values(w.N, 5), before = random_values(M * w.N, 6);
  Expected out;
  for (int64_t m = 0; m < M; ++m) {
    double x_most = 0;
    for (int64_t k = 0; k < w.K; ++k) x_most = std::max(x_most, std::abs(double(x[size_t(m * w.K + k)])));
    for (int64_t n = 0; n < w.N; ++n) {
      double sum = 0, size = 0, scales = 0, w_most = 0, x_sum = 0;
      for (int64_t k = 0; k < w.K; ++k) {
        const double a = x[size_t(m * w.K + k)], b = decoded[size_t(n * w.K + k)];
        sum += a * b;
        size += std::abs(a * b);
        scales += std::abs(a) * most[size_t(n * w.K + k)];
        w_most = std::max(w_most, std::abs(b));
        x_sum += std::abs(a);
      }
      // Two roundings to f16, the sum's, what is lost below f16's range, and a zigzag weight's own f32 (gemm.h).
      double bound = (0x1.01p-10 + double(w.K) * 0x1p-27) * size;
      bound += 0x1p-39 * (x_most * double(w.K) * w_most + w_most * x_sum) + (w.l.zigzag ? 0x1p-19 * scales : 0);
      if (how.bias) sum += bias[size_t(n)];
      if (how.add) sum += before[size_t(m * w.N + n)];
      out.y.push_back(sum);
      out.bound.push_back(bound + 0x1p-21 * (std::abs(sum) + size + 8));
    }
  }
  return out;
}

void check(const Weight& w, const std::vector<float>& x, int64_t M, const Run& how) {
  const auto got = multiply(w, x, M, how);
  const Expected expected = expect(w, x, M, how);
  double error = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], expected.y[i], expected.bound[i])
        << w.l.name << " M " << M << " N " << w.N << " K " << w.K << ": token " << i / size_t(w.N) << " output "
        << i % size_t(w.N);
    error += std::pow(double(got[i]) - expected.y[i], 2);
    size += std::pow(expected.y[i], 2);
  }
  if (got.size() >= 64) {
    EXPECT_LT(std::sqrt(error / size), 1e-3) << w.l.name;
  }
}

bool has_wgmma() { return device().info().major == 9; }
std::vector<GemmKernel> kernels_here() {
  std::vector<GemmKernel> out = {GemmKernel::mma};
  if (has_wgmma()) out.push_back(GemmKernel::wgmma);
  return out;
}

class CudaGemm : public testing::TestWithParam<Id> {};
INSTANTIATE_TEST_SUITE_P(Layouts, CudaGemm,
                         testing::Values(Id::f32, Id::f16, Id::bf16, Id::q4_0, Id::q8_0, Id::q3_K, Id::q4_K, Id::q6_K,
                                         Id::zz2_k, Id::zz3_k, Id::zz4_k, Id::zz5_k, Id::zz6_k, Id::zz8),
                         [](const auto& test) { return std::string(layout::get(test.param).name); });

std::vector<int64_t> widths(const layout::Layout& l) {
  if (l.zigzag) return {1, 7, 64, 65, 200, 1027};
  if (l.block_cols == 1) return {1, 3, 64, 65, 1000, 1027};
  if (l.block_cols == 32) return {32, 96, 1056};
  return {256, 768, 1280};
}

TEST_P(CudaGemm, ProductIsTheReference) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(GetParam());
  for (const int64_t K : widths(l)) {
    for (const int64_t N : {1, 130, 257}) {
      const Weight w(l, N, K, random_bytes(l, N, K, uint64_t(N * 31 + K)));
      for (const int64_t M : {1, 17, 129}) {
        const auto x = random_values(M * K, uint64_t(M));
        for (const GemmKernel kernel : kernels_here())
          check(w, x, M, {.kernel = kernel, .bias = M % 2 == 1, .add = N % 2 == 1, .spare = M % 3});
      }
    }
  }
}

TEST_P(CudaGemm, SlicesOfTheOutputs) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(GetParam());
  const int64_t K = 512, N = 700, M = 20;
  const Weight w(l, N, K, random_bytes(l, N, K, 3));
  const auto x = random_values(M * K, 4);
  for (const GemmKernel kernel : kernels_here()) {
    const auto whole = multiply(w, x, M, {.kernel = kernel, .bias = true});
    EXPECT_EQ(multiply(w, x, M, {.kernel = kernel, .bias = true, .slice = 256}), whole);
  }
}

TEST_P(CudaGemm, WhatIsNotFiniteStaysInItsRowAndColumn) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(GetParam());
  const int64_t K = 512, N = 300, M = 40;
  const auto bytes = random_bytes(l, N, K, 7);
  const Weight w(l, N, K, bytes);
  const auto x = random_values(M * K, 8);
  for (const GemmKernel kernel : kernels_here()) {
    const auto finite = multiply(w, x, M, {.kernel = kernel});
    for (const float bad : {kNan, kInf, -kInf}) {
      auto broken = x;
      broken[17 * K + 100] = bad;
      const auto got = multiply(w, broken, M, {.kernel = kernel});
      for (int64_t i = 0; i < M * N; ++i) {
        if (i / N == 17) {
          ASSERT_FALSE(std::isfinite(got[size_t(i)])) << bad;
        } else {
          ASSERT_EQ(got[size_t(i)], finite[size_t(i)]) << bad;
        }
      }
    }
    if (fields(l.id).halves.empty()) continue;
    auto bad_bytes = bytes;  // the first block's scale
    const uint16_t nan = 0x7e00;
    std::memcpy(&bad_bytes[fields(l.id).halves[0]], &nan, 2);
    const auto decoded = decode(l, N, K, bad_bytes);
    const auto got = multiply(Weight(l, N, K, bad_bytes), x, M, {.kernel = kernel});
    for (int64_t n = 0; n < N; ++n) {
      const bool is_bad = std::any_of(decoded.begin() + n * K, decoded.begin() + (n + 1) * K,
                                      [](float v) { return !std::isfinite(v); });
      for (int64_t m = 0; m < M; ++m) ASSERT_EQ(std::isfinite(got[size_t(m * N + n)]), !is_bad) << n;
    }
  }
}

// Activations far outside f16's range, next to ordinary ones; weights that are all tiny, or large.
TEST(CudaGemmRange, LargeAndSmallValues) {
  LACUNA_NEED_DEVICE();
  const int64_t K = 1024, N = 64, M = 9;
  auto x = random_values(M * K, 9);
  x[5] = 3e6f, x[K + 77] = -2e5f;
  for (int64_t k = 0; k < K; ++k) {
    x[size_t(2 * K + k)] *= 1e20f, x[size_t(3 * K + k)] *= 1e-20f;
    x[size_t(4 * K + k)] = 0;
  }
  for (const double size : {0.01, 1e-12, 1e6})
    for (const Id id : {Id::f32, Id::bf16}) {
      const layout::Layout& l = layout::get(id);
      const Weight w(l, N, K, random_bytes(l, N, K, 10, size));
      const Expected expected = expect(w, x, M, {});
      for (const GemmKernel kernel : kernels_here()) {
        const auto got = multiply(w, x, M, {.kernel = kernel});
        for (size_t i = 0; i < got.size(); ++i) {
          double limit = 0;  // the bound of check() without what it adds for sums of order one
          for (int64_t k = 0; k < K; ++k) limit += std::abs(double(x[i / N * K + size_t(k)])) * size * 100 * 5;
          ASSERT_NEAR(got[i], expected.y[i], 0x1.2p-10 * limit) << "token " << i / N << " size " << size;
        }
      }
    }
}

TEST(CudaGemmRange, ResultsOfATokenDoNotDependOnTheOthers) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(Id::zz4_k);
  const int64_t K = 1000, N = 512;
  const Weight w(l, N, K, random_bytes(l, N, K, 11));
  const auto x = random_values(300 * K, 12);
  for (const GemmKernel kernel : kernels_here()) {
    const auto many = multiply(w, x, 300, {.kernel = kernel});
    const auto few = multiply(w, {x.begin() + 200 * K, x.begin() + 210 * K}, 10, {.kernel = kernel});
    EXPECT_TRUE(std::equal(few.begin(), few.end(), many.begin() + 200 * N));
    EXPECT_EQ(multiply(w, x, 300, {.kernel = kernel}), many);  // every run gives the same bits
  }
}

TEST(CudaGemmRange, AModelsShape) {
  LACUNA_NEED_DEVICE();
  for (const Id id : {Id::zz4_k, Id::q6_K}) {
    const layout::Layout& l = layout::get(id);
    const int64_t K = 11008, N = 260, M = 70;
    const Weight w(l, N, K, random_bytes(l, N, K, 13));
    for (const GemmKernel kernel : kernels_here()) check(w, random_values(M * K, 14), M, {.kernel = kernel});
  }
}

/// The product with copies of a part, all outputs of which are compared.
void check_copies(const Weight& part, int64_t copies, int64_t M, const Run& how) {
  const Weight w(part, copies);
  const auto x = random_values(M * w.K, 21);
  const auto got = multiply(w, x, M, how);
  const Expected expected = expect(part, x, M, {});
  const auto bias = random_values(how.bias ? w.N : 0, 5), before = random_values(how.add ? M * w.N : 0, 6);
  for (size_t i = 0; i < got.size(); ++i) {
    const size_t m = i / size_t(w.N), n = i % size_t(w.N), of_part = m * size_t(part.N) + n % size_t(part.N);
    double sum = expected.y[of_part], bound = expected.bound[of_part];
    for (const double more : {how.bias ? double(bias[n]) : 0.0, how.add ? double(before[i]) : 0.0})
      sum += more, bound += 0x1p-21 * std::abs(more);
    ASSERT_NEAR(got[i], sum, bound) << w.l.name << " M " << M << " N " << w.N << ": token " << m << " output " << n;
  }
}

// More tiles than three rounds of blocks, with a last round that is not full: of one token's rows, of an even number
// (blocks that share weights) and of an odd one.
TEST(CudaGemmRange, BlocksThatTakeSeveralTiles) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(Id::f16);
  const int64_t multiprocessors = device().info().multiprocessors, K = 200;
  const Weight part(l, 331, K, random_bytes(l, 331, K, 22));
  for (const int64_t M : {5, 130, 300}) {
    const int64_t rounds = (M + 127) / 128, tiles = (3 * multiprocessors + 1 + rounds) / rounds;
    const int64_t copies = (tiles * 128 + part.N - 1) / part.N;
    for (const GemmKernel kernel : kernels_here())
      check_copies(part, copies, M, {.kernel = kernel, .bias = true, .add = M > 128, .spare = M % 2});
  }
}

// Three tiles a block, of four: gemm_columns.cu gives blocks several where 16 blocks a multiprocessor have enough.
TEST(CudaGemmRange, ColumnsWhoseBlocksWriteSeveralTiles) {
  LACUNA_NEED_DEVICE();
  const int64_t K = 200, superblock_rows = 3 * 16 * device().info().multiprocessors / 4 + 1;
  for (const Id id : {Id::zz3_k, Id::zz4_k, Id::zz8}) {
    const layout::Layout& l = layout::get(id);
    const Weight part(l, 5 * 256, K, random_bytes(l, 5 * 256, K, 23));
    check_copies(part, (superblock_rows + 4) / 5, 3, {.bias = true});
  }
}

TEST(CudaGemmRange, MoreRowsThanOneLaunchWrites) {
  LACUNA_NEED_DEVICE();
  const int64_t K = 256;
  for (const Id id : {Id::bf16, Id::q8_0, Id::q6_K}) {
    const layout::Layout& l = layout::get(id);
    const Weight part(l, 331, K, random_bytes(l, 331, K, 24));
    check_copies(part, 65536 / part.N + 1, 2, {.bias = true});
  }
}

TEST(CudaGemmRange, GatesOnTheWay) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(Id::f16);
  const int64_t K = 333, N = 40, M = 11, stride = 700;
  const Weight w(l, N, K, random_bytes(l, N, K, 15));
  const auto values = random_values(M * stride, 16, 2);
  const OnDevice<float> there(values), scale{static_cast<size_t>(M)}, y{static_cast<size_t>(M * N)};
  const OnDevice<std::byte> x_tiles(size_t(cuda::operand_bytes(M, K))), w_tiles(size_t(cuda::operand_bytes(N, K)));
  for (const cuda::Gate gate : {cuda::Gate::swiglu, cuda::Gate::relu}) {
    std::vector<float> x;
    for (int64_t m = 0; m < M; ++m)
      for (int64_t k = 0; k < K; ++k) {
        const double g = values[size_t(m * stride + k)], up = values[size_t(m * stride + 352 + k)];
        x.push_back(float(gate == cuda::Gate::relu ? std::max(g, 0.0) : g / (1 + std::exp(-g)) * up));
      }
    const cuda::Operand x_to = {x_tiles.data(), scale.data(), M, K}, w_to = {w_tiles.data(), w.scale.data(), N, K};
    cuda::launch_gemm_inputs(device(), stream(),
                             {.gate = gate, .x = there.data(), .up = there.data() + 352, .stride = stride, .to = x_to});
    w.write(0, w_to);
    cuda::GemmArgs args;
    args.x = x_to, args.w = w_to;
    args.y = y.data(), args.stride = N;
    cuda::launch_gemm(device(), stream(), args);
    const auto got = y.values();
    const Expected expected = expect(w, x, M, {});
    for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected.y[i], 1.01 * expected.bound[i]) << i;
  }
}

/// Rows as wide as each of the kernels takes them.
TEST(CudaGemmRange, NormsOnTheWay) {
  LACUNA_NEED_DEVICE();
  const layout::Layout& l = layout::get(Id::f16);
  for (const int64_t K : {37, 2100, 8200, 20000, 40001}) {
    const int64_t N = 5, M = 3, stride = K + 7;
    const Weight w(l, N, K, random_bytes(l, N, K, 15));
    const auto values = random_values(M * stride, 16, 3), norm = random_values(K, 17), bias = random_values(K, 18);
    const OnDevice<float> there(values), norm_there(norm), bias_there(bias);
    const OnDevice<float> scale{static_cast<size_t>(M)}, y{static_cast<size_t>(M * N)};
    const OnDevice<std::byte> x_tiles(size_t(cuda::operand_bytes(M, K))), w_tiles(size_t(cuda::operand_bytes(N, K)));
    for (const bool by_mean : {false, true}) {
      std::vector<float> x;
      for (int64_t m = 0; m < M; ++m) {
        const float* const row = values.data() + m * stride;
        double mean = 0, squares = 0;
        for (int64_t k = 0; k < K && by_mean; ++k) mean += row[k] / double(K);
        for (int64_t k = 0; k < K; ++k) squares += std::pow(row[k] - mean, 2) / double(K);
        for (int64_t k = 0; k < K; ++k)
          x.push_back(
              float((row[k] - mean) / std::sqrt(squares + 1e-5) * norm[size_t(k)] + (by_mean ? bias[size_t(k)] : 0)));
      }
      const cuda::Operand x_to = {x_tiles.data(), scale.data(), M, K}, w_to = {w_tiles.data(), w.scale.data(), N, K};
      cuda::launch_gemm_inputs(device(), stream(),
                               {.x = there.data(),
                                .stride = stride,
                                .norm = norm_there.data(),
                                .norm_bias = by_mean ? bias_there.data() : nullptr,
                                .eps = 1e-5f,
                                .to = x_to});
      w.write(0, w_to);
      cuda::GemmArgs args;
      args.x = x_to, args.w = w_to;
      args.y = y.data(), args.stride = N;
      cuda::launch_gemm(device(), stream(), args);
      const auto got = y.values();
      const Expected expected = expect(w, x, M, {});
      // The norm's own f32 roundings are far below those to f16.
      for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected.y[i], 1.01 * expected.bound[i]) << K;
    }
  }
}

TEST(CudaGemmRange, ErrorsSayWhatDoesNotRun) {
  LACUNA_NEED_DEVICE();
  const OnDevice<float> scale(size_t{256});
  const OnDevice<std::byte> tiles(size_t(cuda::operand_bytes(256, 64)));
  const cuda::Operand a = {tiles.data(), scale.data(), 16, 64}, b = {tiles.data(), scale.data(), 16, 32};
  cuda::GemmArgs args;
  args.x = a, args.w = b;
  EXPECT_THROW(cuda::launch_gemm(device(), stream(), args), Error);
  const cuda::Operand wide = {tiles.data(), scale.data(), 1, 65537};
  EXPECT_THROW(cuda::launch_gemm_inputs(device(), stream(), {.to = wide}), Error);
  EXPECT_THROW(cuda::launch_gemm_weights(device(), stream(), layout::get(Id::zz4_k), {}, 3, a), Error);
  EXPECT_THROW(cuda::launch_gemm_weights(device(), stream(), layout::get(Id::f32), cuda::Columns{}, 0, a), Error);
}

}  // namespace
}  // namespace lacuna
