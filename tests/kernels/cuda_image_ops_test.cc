// Norms, heads, attention and experts of diffusion transformers on a CUDA device, against double precision.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "core/e4m3.h"
#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "kernels/cuda/image_ops.h"
#include "kernels/cuda_memory.h"
#include "kernels/e4m3_tokens.h"

namespace lacuna {
namespace {

using cuda::TokenRows;
using test::device;
using test::OnDevice;
using test::stream;

constexpr double kBf16 = 0x1p-8;  // unit roundoff: 8 bits of significand

std::vector<float> normal(int64_t count, uint64_t seed, double size = 1) {
  Rng rng(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& v : out) v = float(size * rng.normal());
  return out;
}
/// Rounds the values, too.
std::vector<bf16> rounded(std::vector<float>& values) {
  std::vector<bf16> out;
  for (float& v : values) out.push_back(to_bf16(v)), v = to_float(out.back());
  return out;
}
int64_t image_of(const TokenRows& rows, int64_t row) {
  const int64_t text = rows.images * rows.text;
  return row < text ? row / rows.text : (row - text) / rows.image;
}
int64_t position_of(const TokenRows& rows, int64_t row) {
  const int64_t text = rows.images * rows.text;
  return row < text ? row % rows.text : rows.text + (row - text) % rows.image;
}
int64_t row_of(const TokenRows& rows, int64_t image, int64_t token) {
  return token < rows.text ? image * rows.text + token
                           : rows.images * rows.text + image * rows.image + token - rows.text;
}

TEST(CudaImageOps, ModulatedNormWithItsCodes) {
  LACUNA_NEED_DEVICE();
  const TokenRows rows{2, 3, 5};
  for (const int64_t width : {30, 64, 257, 3072, 8200}) {
    const int64_t M = rows.count(), stride = (width + 7) / 8 * 8, code_stride = (width + 15) / 16 * 16;
    std::vector<float> x = normal(M * stride, 1, 3), modulation = normal(2 * 2 * width, 2, 0.3);
    for (size_t i = 0; i < size_t(stride); ++i) x[i] = x[i] * 0.01f + 100;  // a mean far from zero
    const OnDevice<bf16> from(rounded(x));
    const OnDevice<float> of(modulation), scale{size_t(M)};
    const OnDevice<bf16> y(size_t(M * stride));
    const OnDevice<std::byte> codes(size_t(M * code_stride));
    // In two parts, as the streams of a double block.
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 6}, {6, 10}})
      cuda::launch_modulated_norm(device(), stream(),
                                  {.rows = rows,
                                   .first = first,
                                   .M = count,
                                   .width = width,
                                   .x = from.data() + first * stride,
                                   .x_stride = stride,
                                   .shift = of.data(),
                                   .scale = of.data() + width,
                                   .modulation_stride = 2 * width,
                                   .y = y.data() + first * stride,
                                   .y_stride = stride,
                                   .codes = codes.data() + first * code_stride,
                                   .code_stride = code_stride,
                                   .code_scale = scale.data() + first});
    const std::vector<bf16> got = y.values();
    const std::vector<std::byte> got_codes = codes.values();
    const std::vector<float> got_scale = scale.values();
    for (int64_t m = 0; m < M; ++m) {
      double mean = 0, variance = 0, size = 0;
      for (int64_t k = 0; k < width; ++k) {
        mean += x[size_t(m * stride + k)] / double(width);
        size = std::max(size, std::abs(double(x[size_t(m * stride + k)])));
      }
      for (int64_t k = 0; k < width; ++k) variance += std::pow(x[size_t(m * stride + k)] - mean, 2) / double(width);
      const double deviation = std::sqrt(variance + 1e-6);
      std::vector<float> values;
      for (int64_t k = 0; k < width; ++k) {
        const float* const of_image = modulation.data() + image_of(rows, m) * 2 * width;
        const double factor = 1 + double(of_image[width + k]);
        const double want = (x[size_t(m * stride + k)] - mean) / deviation * factor + of_image[k];
        values.push_back(to_float(got[size_t(m * stride + k)]));
        // float32: the mean's error, of sums of `width` values, over the deviation; then one rounding to bf16.
        const double bound = kBf16 * std::abs(want) + 40 * 0x1p-24 * (size / deviation + 3) * std::abs(factor) * 4;
        ASSERT_NEAR(values.back(), want, bound) << width << ' ' << m << ' ' << k;
      }
      std::vector<e4m3> expected(static_cast<size_t>(width));
      float expected_scale = 0;
      kernels::quantize_per_token(values.data(), width, 1, width, expected.data(), &expected_scale);
      ASSERT_EQ(got_scale[size_t(m)], expected_scale);
      for (int64_t k = 0; k < width; ++k)
        ASSERT_EQ(uint8_t(got_codes[size_t(m * code_stride + k)]), expected[size_t(k)].bits) << width << ' ' << m;
    }
  }
}

TEST(CudaImageOps, GatedAddAndSilu) {
  LACUNA_NEED_DEVICE();
  const TokenRows rows{3, 1, 2};
  for (const int64_t width : {31, 64}) {
    const int64_t M = rows.count(), stride = 64;
    std::vector<float> x = normal(M * stride, 3), y = normal(M * stride, 4), gate = normal(3 * width, 5);
    const OnDevice<bf16> to(rounded(x)), from(rounded(y));
    const OnDevice<float> gates(gate);
    cuda::launch_gated_add(device(), stream(),
                           {rows, 0, M, width, from.data(), stride, gates.data(), width, to.data(), stride});
    const std::vector<bf16> got = to.values();
    for (int64_t m = 0; m < M; ++m)
      for (int64_t k = 0; k < stride; ++k) {
        const size_t at = size_t(m * stride + k);
        const double add = k < width ? double(gate[size_t(image_of(rows, m) * width + k)]) * y[at] : 0;
        ASSERT_NEAR(to_float(got[at]), x[at] + add, 1.01 * kBf16 * std::abs(x[at] + add) + 0x1p-22) << m << ' ' << k;
      }
  }
  const std::vector<float> a = normal(100, 6), b = normal(100, 7), c = normal(100, 8);
  const OnDevice<float> first(a), second(b), third(c);
  const OnDevice<bf16> y(100);
  for (const bool all : {false, true}) {
    cuda::launch_silu_sum(device(), stream(), first.data(), second.data(), all ? third.data() : nullptr, 100, y.data());
    const std::vector<bf16> got = y.values();
    for (size_t i = 0; i < 100; ++i) {
      const double v = double(a[i]) + b[i] + (all ? c[i] : 0.0f), want = v / (1 + std::exp(-v));
      ASSERT_NEAR(to_float(got[i]), want, 1.01 * kBf16 * std::abs(want) + 0x1p-20);
    }
  }
}

TEST(CudaImageOps, HeadsNormedAndTurned) {
  LACUNA_NEED_DEVICE();
  const TokenRows rows{2, 3, 4};
  for (const int64_t D : {10, 16, 70, 128}) {
    const int64_t H = 3, padded = (D + 7) / 8 * 8, M = rows.count(), stride = 2 * H * D, positions = rows.tokens();
    std::vector<float> x = normal(M * stride, 11), q_norm = normal(D, 12), k_norm = normal(D, 13);
    std::vector<float> cos, sin;
    for (int64_t i = 0; i < positions * D / 2; ++i)
      cos.push_back(float(std::cos(double(i)))), sin.push_back(float(std::sin(double(i))));
    const OnDevice<bf16> from(rounded(x)), out(size_t(3 * M * H * padded));
    const OnDevice<float> of_q(q_norm), of_k(k_norm), of_cos(cos), of_sin(sin);
    cuda::ImageHeadsArgs args{.rows = rows, .M = M, .n_heads = H, .head_dim = D, .padded_dim = padded};
    args.q = from.data(), args.k = args.v = from.data() + H * D, args.in_stride = stride;
    args.q_norm = of_q.data(), args.k_norm = of_k.data(), args.cos = of_cos.data(), args.sin = of_sin.data();
    args.q_out = out.data(), args.k_out = args.q_out + M * H * padded, args.v_out = args.k_out + M * H * padded;
    args.out_stride = H * padded;
    cuda::launch_image_heads(device(), stream(), args);
    const std::vector<bf16> got = out.values();
    for (int part = 0; part < 3; ++part)
      for (int64_t m = 0; m < M; ++m)
        for (int64_t h = 0; h < H; ++h) {
          const float* const in = x.data() + m * stride + (part == 0 ? 0 : H * D) + h * D;
          const std::vector<float>& norm = part == 0 ? q_norm : k_norm;
          double squares = 0;
          for (int64_t d = 0; d < D; ++d) squares += double(in[d]) * in[d];
          const double factor = 1 / std::sqrt(squares / double(D) + 1e-6);
          for (int64_t d = 0; d < padded; ++d) {
            const float value = to_float(got[size_t(((part * M + m) * H + h) * padded + d)]);
            if (d >= D) {
              ASSERT_EQ(value, 0);
            } else if (part == 2) {
              ASSERT_EQ(value, in[d]);
            } else {
              const int64_t pair = d / 2, at = position_of(rows, m) * (D / 2) + pair;
              const double a = in[2 * pair] * factor * norm[size_t(2 * pair)];
              const double b = in[2 * pair + 1] * factor * norm[size_t(2 * pair + 1)];
              const double want =
                  d % 2 == 0 ? a * cos[size_t(at)] - b * sin[size_t(at)] : a * sin[size_t(at)] + b * cos[size_t(at)];
              // The float32 error stays under 16 roundings of the larger of the pair.
              const double bound = kBf16 * std::abs(want) + 0x1p-20 * (std::abs(a) + std::abs(b));
              ASSERT_NEAR(value, want, bound) << D << ' ' << part << ' ' << m << ' ' << h << ' ' << d;
            }
          }
        }
  }
}

using cuda::JointAttentionKernel;

struct AttentionCase {
  TokenRows rows;
  int64_t heads, head_dim, out_dim;
  bool in_place = false;
  double size = 1;      // of queries: large ones give weights near 0 and 1
  int64_t padding = 0;  // NaNs after each row, and rows of them after the last
};

/// Kernels that run on the device.
std::vector<JointAttentionKernel> kernels_of(cuda::JointAttentionArgs args) {
  std::vector<JointAttentionKernel> out = {JointAttentionKernel::mma};
  args.kernel = JointAttentionKernel::best;
  if (cuda::joint_attention_kernel(device().info(), args) == JointAttentionKernel::wgmma)
    out.push_back(JointAttentionKernel::wgmma);
  return out;
}
const char* name_of(JointAttentionKernel kernel) { return kernel == JointAttentionKernel::mma ? "mma" : "wgmma"; }

/// Inputs in host memory and the arguments of a launch on their copy, which lies there until the object goes.
class Attention {
 public:
  explicit Attention(const AttentionCase& c)
      : c_(c),
        stride_(3 * c.heads * c.head_dim + c.padding),
        out_stride_(c.in_place ? stride_ : c.heads * c.out_dim + c.padding),
        stored_(c.rows.count() + (c.padding > 0 ? 200 : 0)),
        x_(inputs()),
        bits_(rounded(x_)),
        from_(bits_),
        apart_(size_t(c.in_place ? 1 : stored_ * out_stride_)) {
    const int64_t width = c.heads * c.head_dim;
    args_.rows = c.rows, args_.n_heads = c.heads, args_.head_dim = c.head_dim;
    args_.q = from_.data(), args_.k = args_.q + width, args_.v = args_.q + 2 * width;
    args_.stride = args_.v_stride = stride_, args_.scale = float(1 / std::sqrt(double(c.out_dim)));
    args_.out = c.in_place ? from_.data() : apart_.data(), args_.out_dim = c.out_dim, args_.out_stride = out_stride_;
  }

  const cuda::JointAttentionArgs& args() const { return args_; }
  /// All values of the memory that the result lies in, as bits.
  std::vector<uint16_t> run(JointAttentionKernel kernel) {
    clear();
    args_.kernel = kernel;
    cuda::launch_joint_attention(device(), stream(), args_);
    return result();
  }
  /// Memory as before a run.
  void clear() {
    from_ = bits_;
    if (!c_.in_place) apart_.buffer().fill(0xff);
  }
  std::vector<uint16_t> result() const {
    std::vector<uint16_t> out;
    const std::vector<bf16> values = (c_.in_place ? from_ : apart_).values();
    out.reserve(values.size());
    for (const bf16 value : values) out.push_back(value.bits);
    return out;
  }

  /// Each run's values against double precision: of all tokens or, of many, of some of each head.
  void expect_right(const std::vector<std::pair<const char*, std::vector<uint16_t>>>& runs) const {
    constexpr int64_t kRows = 2500;
    const int64_t T = c_.rows.tokens(), step = (T * c_.heads * c_.rows.images + kRows - 1) / kRows;
    for (int64_t image = 0; image < c_.rows.images; ++image)
      for (int64_t h = 0; h < c_.heads; ++h) {
        for (int64_t t = (image + 7 * h) % step; t < T; t += step) expect_row_right(runs, image, h, t);
        if (step > 1) expect_row_right(runs, image, h, T - 1);
        if (::testing::Test::HasFatalFailure()) return;
      }
  }
  void expect_nothing_else_written(const char* what, const std::vector<uint16_t>& got) const {
    for (size_t i = 0; i < got.size(); ++i) {
      if (int64_t(i) / out_stride_ < c_.rows.count() && int64_t(i) % out_stride_ < c_.heads * c_.out_dim) continue;
      ASSERT_EQ(got[i], c_.in_place ? bits_[i].bits : 0xffff) << what << ' ' << i;
    }
  }

 private:
  std::vector<float> inputs() const {
    const int64_t M = c_.rows.count(), H = c_.heads, D = c_.head_dim;
    std::vector<float> x = normal(stored_ * stride_, uint64_t(c_.rows.tokens() + D));
    for (int64_t m = 0; m < stored_; ++m)
      for (int64_t i = 0; i < stride_; ++i) {
        float& v = x[size_t(m * stride_ + i)];
        if (i < H * D) v *= float(c_.size);
        if (i % D >= c_.out_dim) v = 0;
        if (m >= M || i >= 3 * H * D) v = NAN;
      }
    return x;
  }
  void expect_row_right(const std::vector<std::pair<const char*, std::vector<uint16_t>>>& runs, int64_t image,
                        int64_t head, int64_t t) const {
    const int64_t T = c_.rows.tokens(), D = c_.head_dim;
    const auto values = [&](int64_t token, int64_t part) {
      return x_.data() + row_of(c_.rows, image, token) * stride_ + (part * c_.heads + head) * D;
    };
    std::vector<double> weight(static_cast<size_t>(T)), want(static_cast<size_t>(D)), magnitude = want;
    double largest = -1e300, all = 0, size = 0;
    for (int64_t u = 0; u < T; ++u) {
      double score = 0;
      const float *const q = values(t, 0), *const k = values(u, 1);
      for (int64_t d = 0; d < D; ++d) score += double(q[d]) * k[d], size += std::abs(double(q[d]) * k[d]);
      weight[size_t(u)] = score * args_.scale;
      largest = std::max(largest, weight[size_t(u)]);
    }
    for (double& w : weight) w = std::exp(w - largest), all += w;
    for (int64_t u = 0; u < T; ++u) {
      const float* const v = values(u, 2);
      const double w = weight[size_t(u)] / all;
      for (int64_t d = 0; d < c_.out_dim; ++d) want[size_t(d)] += w * v[d], magnitude[size_t(d)] += w * std::abs(v[d]);
    }
    const double of_scores = 0x1p-22 * (size / double(T) * args_.scale + 2 * std::abs(largest) + 8);
    const int64_t at = row_of(c_.rows, image, t) * out_stride_ + head * c_.out_dim;
    for (const auto& [what, got] : runs)
      for (int64_t d = 0; d < c_.out_dim; ++d) {
        const double w = want[size_t(d)], m = magnitude[size_t(d)];
        // Each weight is rounded to bf16, and off by what its score's float32 error makes of it; then the result.
        const double bound = kBf16 * (1.01 * m + std::abs(w)) + 4 * of_scores * m + 1e-6;
        ASSERT_NEAR(to_float(bf16{got[size_t(at + d)]}), w, bound)
            << what << ", tokens " << T << ", D " << D << ", image " << image << ", head " << head << ", token " << t
            << ", " << d;
      }
  }

  AttentionCase c_;
  int64_t stride_, out_stride_, stored_;  // stored: rows in memory
  std::vector<float> x_;
  std::vector<bf16> bits_;
  OnDevice<bf16> from_, apart_;
  cuda::JointAttentionArgs args_;
};

void expect_attention(const AttentionCase& c) {
  Attention attention(c);
  std::vector<std::pair<const char*, std::vector<uint16_t>>> runs;
  for (const JointAttentionKernel kernel : kernels_of(attention.args())) {
    runs.emplace_back(name_of(kernel), attention.run(kernel));
    attention.expect_nothing_else_written(runs.back().first, runs.back().second);
  }
  attention.expect_right(runs);
}

TEST(CudaImageOps, AttentionOfAllTokens) {
  LACUNA_NEED_DEVICE();
  expect_attention({{1, 1, 1}, 1, 16, 16});
  expect_attention({{1, 5, 27}, 2, 16, 10});
  expect_attention({{2, 7, 26}, 2, 64, 64, true});
  expect_attention({{1, 77, 64}, 1, 128, 128, true});
  expect_attention({{2, 1, 129}, 1, 80, 80});
  expect_attention({{1, 3, 62}, 1, 128, 128, false, 40});
  expect_attention({{3, 1, 12}, 2, 128, 128, false, 1, 64});
}

// Tiles of 128 queries and blocks of 176 keys: their ends, one segment alone, heads of which a part is padding.
TEST(CudaImageOps, AttentionOfTilesThatEnd) {
  LACUNA_NEED_DEVICE();
  expect_attention({{1, 1, 0}, 1, 128, 128});
  expect_attention({{1, 0, 1}, 2, 128, 128});
  expect_attention({{1, 5, 62}, 1, 72, 72, true, 1, 8});
  if (test::emulated()) return;
  expect_attention({{1, 0, 128}, 1, 128, 128});
  expect_attention({{2, 127, 129}, 2, 128, 128});
  expect_attention({{3, 1, 129}, 2, 128, 128, false, 1, 64});
  expect_attention({{3, 127, 0}, 2, 128, 128});
  expect_attention({{2, 129, 1}, 1, 128, 128});
  expect_attention({{1, 176, 352}, 2, 128, 128, true});
  expect_attention({{2, 175, 177}, 2, 128, 128});
  expect_attention({{2, 7, 62}, 2, 80, 80, false, 1, 16});
  expect_attention({{1, 3, 300}, 2, 128, 40, false, 1, 64});
}

// More tiles than blocks that run at once, so that a block takes three of them and more, of odd and even counts of
// blocks of keys.
TEST(CudaImageOps, AttentionOfManyTiles) {
  LACUNA_NEED_DEVICE();
  if (test::emulated()) GTEST_SKIP() << "SKIPPED: too many tiles for the emulated device";
  expect_attention({{2, 512, 1024}, 3, 128, 128, true});
  expect_attention({{2, 333, 777}, 2, 128, 128, true, 40, 64});
  expect_attention({{3, 100, 200}, 24, 128, 128, true});
  expect_attention({{4, 0, 176}, 40, 128, 128});
  expect_attention({{1, 512, 4096}, 12, 128, 128, false, 1, 64});
}

TEST(CudaImageOps, AttentionGivesTheSameBitsAgainAndFromAGraph) {
  LACUNA_NEED_DEVICE();
  std::vector<AttentionCase> cases = {{{2, 7, 26}, 2, 128, 128}};
  if (!test::emulated()) {
    cases.push_back({{2, 333, 777}, 24, 128, 128, true});
    cases.push_back({{1, 512, 4096}, 12, 128, 128});
  }
  for (const AttentionCase& c : cases) {
    Attention attention(c);
    for (const JointAttentionKernel kernel : kernels_of(attention.args())) {
      const std::vector<uint16_t> first = attention.run(kernel);
      for (int i = 0; i < 10; ++i)
        ASSERT_TRUE(attention.run(kernel) == first) << name_of(kernel) << ", tokens " << c.rows.tokens() << ", " << i;
      cuda::JointAttentionArgs args = attention.args();
      args.kernel = kernel;
      cuda::Graph graph(stream(), [&] { cuda::launch_joint_attention(device(), stream(), args); });
      for (int i = 0; i < 2; ++i) {
        attention.clear();
        graph.launch(stream());
        ASSERT_TRUE(attention.result() == first) << name_of(kernel) << ", tokens " << c.rows.tokens();
      }
    }
  }
}

TEST(CudaImageOps, AttentionRefusesWhatItDoesNotRun) {
  LACUNA_NEED_DEVICE();
  const OnDevice<bf16> x(1024);
  cuda::JointAttentionArgs args{.rows = {1, 1, 1}, .n_heads = 1, .head_dim = 136};
  args.q = args.k = args.v = args.out = x.data(), args.stride = args.v_stride = args.out_stride = args.out_dim = 136;
  EXPECT_THROW(cuda::launch_joint_attention(device(), stream(), args), Error);
  args.head_dim = args.out_dim = 12;
  EXPECT_THROW(cuda::launch_joint_attention(device(), stream(), args), Error);
}

TEST(CudaImageOps, AttentionTakesWgmmaWhereItRuns) {
  LACUNA_NEED_DEVICE();
  const OnDevice<bf16> x(1024);
  cuda::JointAttentionArgs args{.rows = {1, 1, 1}, .n_heads = 1, .head_dim = 128};
  args.q = args.k = args.v = x.data(), args.out = x.data() + 512;
  args.stride = args.v_stride = args.out_stride = args.out_dim = 128;
  cuda::DeviceInfo ada = device().info();
  ada.major = 8, ada.minor = 9;
  const auto kernel = [&](const cuda::DeviceInfo& info) { return cuda::joint_attention_kernel(info, args); };
  const cuda::JointAttentionArgs fits = args;
  const bool runs = kernel(device().info()) == JointAttentionKernel::wgmma;
  EXPECT_EQ(kernel(ada), JointAttentionKernel::mma);
  args.kernel = JointAttentionKernel::wgmma;
  EXPECT_THROW(kernel(ada), Error);
  if (!runs) {
    EXPECT_THROW(cuda::launch_joint_attention(device(), stream(), args), Error);
    return;
  }
  EXPECT_EQ(kernel(device().info()), JointAttentionKernel::wgmma);
  args.kernel = JointAttentionKernel::mma;
  EXPECT_EQ(kernel(device().info()), JointAttentionKernel::mma);
  args = fits;
  const auto refuses = [&] {
    args.kernel = JointAttentionKernel::best;
    EXPECT_EQ(kernel(device().info()), JointAttentionKernel::mma);
    args.kernel = JointAttentionKernel::wgmma;
    EXPECT_THROW(cuda::launch_joint_attention(device(), stream(), args), Error);
    args = fits;
  };
  args.head_dim = args.out_dim = 64, refuses();
  args.out_dim = 100, refuses();
  args.out_stride = 132, refuses();
  args.out += 4, refuses();
  args.rows.image = cuda::kMostWgmmaTokens, refuses();
}

TEST(RouteParts, HoldEveryChoiceAndAreNeverMoreThanTheMost) {
  for (int64_t choices = 1; choices < 300000; choices += choices < 2000 ? 1 : 37) {
    ASSERT_GE(cuda::route_part(choices) * cuda::route_parts(choices), choices);
    ASSERT_LE(cuda::route_parts(choices), cuda::kMostRouteParts) << choices;
    ASSERT_EQ(cuda::route_part(choices) % 32, 0);
  }
  EXPECT_LT(cuda::route_parts(67584), cuda::route_parts(65536));  // more choices may take fewer parts
}

TEST(CudaImageOps, ExpertsRoutedGatheredAndCombined) {
  LACUNA_NEED_DEVICE();
  for (const bool normalize : {false, true})
    for (const int experts : {1, 5, 40, 70}) {  // 70: counted in several parts, the last of them short
      const int top_k = std::min(experts, 3);
      const int64_t M = experts == 70 ? 435 : 45, stride = 72, rows = M * top_k;
      std::vector<float> logits = normal(M * stride, 21);
      for (size_t i = 0; i < logits.size(); i += 7) logits[i] = 0.5f;  // equal ones
      const OnDevice<float> of(logits), weight{size_t(rows)};
      const OnDevice<int32_t> expert{size_t(rows)}, counts{size_t(experts * cuda::route_parts(rows))},
          offsets{size_t(experts) + 1}, token{size_t(rows)}, row{size_t(rows)};
      cuda::RouteArgs args{.logits = of.data(), .logit_stride = stride, .M = M, .experts = experts, .top_k = top_k};
      args.normalize = normalize, args.expert = expert.data(), args.counts = counts.data();
      args.offsets = offsets.data(), args.token = token.data(), args.row = row.data(), args.weight = weight.data();
      cuda::launch_route(device(), stream(), args);

      std::vector<std::vector<int32_t>> tokens_of(static_cast<size_t>(experts));
      std::vector<double> shares;
      std::vector<int> choices;
      for (int64_t m = 0; m < M; ++m) {
        const float* const l = logits.data() + m * stride;
        std::vector<int> order(static_cast<size_t>(experts));
        std::iota(order.begin(), order.end(), 0);
        std::ranges::stable_sort(order, [&](int a, int b) { return l[a] > l[b]; });
        double all = 0, best = 0;
        for (int e = 0; e < experts; ++e) all += std::exp(double(l[e]));
        for (int i = 0; i < top_k; ++i) best += std::exp(double(l[order[size_t(i)]]));
        for (int i = 0; i < top_k; ++i) {
          shares.push_back(std::exp(double(l[order[size_t(i)]])) / (normalize ? best : all));
          choices.push_back(order[size_t(i)]);
          tokens_of[size_t(order[size_t(i)])].push_back(int32_t(m));
        }
      }
      std::vector<int32_t> expected_offsets = {0}, expected_token;
      for (const auto& one : tokens_of) {
        expected_token.insert(expected_token.end(), one.begin(), one.end());
        expected_offsets.push_back(int32_t(expected_token.size()));
      }
      ASSERT_EQ(offsets.values(), expected_offsets);
      ASSERT_EQ(token.values(), expected_token);
      const std::vector<int32_t> got_row = row.values();
      const std::vector<float> got_weight = weight.values();
      for (size_t i = 0; i < size_t(rows); ++i) {
        ASSERT_NEAR(got_weight[i], shares[i], 0x1p-19);
        ASSERT_EQ(expected_token[size_t(got_row[i])], int32_t(i) / top_k);
        ASSERT_GE(got_row[i], expected_offsets[size_t(choices[i])]);
        ASSERT_LT(got_row[i], expected_offsets[size_t(choices[i]) + 1]);
      }

      // What experts made of the gathered rows comes back to its tokens.
      const int64_t width = 24;
      const TokenRows images{3, 5, M / 3 - 5};
      std::vector<float> x = normal(M * width, 22), gate = normal(3 * width, 23), before = x;
      const OnDevice<bf16> from(rounded(x)), gathered(size_t(rows * width)), to(from.values());
      const OnDevice<float> scale(normal(M, 24)), gathered_scale{size_t(rows)}, gates(gate);
      cuda::launch_gather_rows(
          device(), stream(),
          {reinterpret_cast<const std::byte*>(from.data()), 2 * width, scale.data(), token.data(), rows, 2 * width,
           reinterpret_cast<std::byte*>(gathered.data()), 2 * width, gathered_scale.data()});
      const std::vector<bf16> got = gathered.values();
      for (size_t i = 0; i < size_t(rows); ++i) {
        ASSERT_EQ(gathered_scale.values()[i], scale.values()[size_t(expected_token[i])]);
        for (size_t k = 0; k < size_t(width); ++k)
          ASSERT_EQ(to_float(got[i * size_t(width) + k]), x[size_t(expected_token[i]) * size_t(width) + k]);
      }
      cuda::CombineExpertsArgs combine{.rows = images, .M = M, .width = width, .top_k = top_k};
      combine.row = row.data(), combine.weight = weight.data(), combine.results = gathered.data();
      combine.result_stride = width, combine.gate = gates.data(), combine.gate_stride = width;
      combine.x = to.data(), combine.x_stride = width;
      cuda::launch_combine_experts(device(), stream(), combine);
      const std::vector<bf16> combined = to.values();
      for (int64_t m = 0; m < M; ++m) {
        double all = 0;
        for (int i = 0; i < top_k; ++i) all += shares[size_t(m * top_k + i)];
        for (int64_t k = 0; k < width; ++k) {
          const double v = x[size_t(m * width + k)];
          const double want = v + double(gate[size_t(image_of(images, m) * width + k)]) * all * v;
          ASSERT_NEAR(to_float(combined[size_t(m * width + k)]), want,
                      1.01 * kBf16 * std::abs(want) + 0x1p-16 * std::abs(v) * 4);
        }
      }
    }
}

}  // namespace
}  // namespace lacuna
