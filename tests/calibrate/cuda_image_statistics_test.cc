// Statistics of a net's inputs on a CUDA device against those that the CPU gathers. Compiled also into simt_test, where
// the kernels run on the CPU.
#include "calibrate/cuda_image_statistics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "calibrate/image_statistics.h"
#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "io/float_tensors.h"
#include "io/image_checkpoint.h"
#include "io/image_compress.h"
#include "io/image_policy.h"
#include "kernels/cuda/image_ops.h"
#include "kernels/cuda_support.h"
#include "model/flux/cuda_net.h"
#include "model/flux/net.h"
#include "model/flux/sampler.h"
#include "model/flux/synth.h"
#include "relative_error.h"
#include "test_support.h"

namespace lacuna::calibrate {
namespace {

using io::ImageCheckpoint;
using model::flux::Config;
using model::flux::CudaInputObserver;
using model::flux::CudaLinearInput;
using model::flux::CudaNet;
using model::flux::InputObserver;
using model::flux::Inputs;
using model::flux::LinearInput;
using model::flux::Net;
using Results = std::map<std::string, InputStatistics>;  // by the first of the matrices that share an input

ThreadPool& pool() {
  static ThreadPool two(2);
  return two;
}

std::string tiny(const std::string& name) { return test::fixture("flux_tiny/" + name); }

/// Inputs of a fixture's images, or random ones of two images.
struct Images {
  std::map<std::string, std::vector<float>> values;
  std::vector<Inputs> all;

  explicit Images(const std::string& fixture) {
    const io::FloatTensors file = io::read_float_tensors(tiny(fixture + ".safetensors"));
    for (const auto& [name, tensor] : file)
      if (name.starts_with("in.")) values[name.substr(3)] = tensor.values;
    split(size_t(file.at("in.hidden_states").dims[0]));
  }
  explicit Images(const Config& config) {
    constexpr int64_t kCount = 2, kRows = 2, kColumns = 3, kText = 5;
    Rng rng(1);
    const auto fill = [&](const char* name, int64_t size) {
      values[name].resize(size_t(kCount * size));
      for (float& v : values[name]) v = float(rng.normal());
    };
    fill("hidden_states", kRows * kColumns * config.in_channels);
    fill("encoder_hidden_states", kText * config.text_dim);
    fill("pooled_projections", config.pooled_dim);
    values["timestep"] = {0.25f, 0.75f}, values["guidance"] = {2, 3};
    values["img_ids"] = model::flux::image_ids({1, 2 * kRows, 2 * kColumns});
    values["txt_ids"].resize(size_t(kText * 3));
    split(kCount);
  }
  size_t results_of_one(const Config& config) const {
    return all.front().latents.size() / size_t(config.in_channels) * size_t(config.out_channels);
  }

 private:
  void split(size_t count) {
    const auto part = [&](const char* name, size_t b) {
      const std::span<const float> of = values.at(name);
      return of.subspan(of.size() / count * b, of.size() / count);
    };
    for (size_t b = 0; b < count; ++b)
      all.push_back({part("hidden_states", b), part("encoder_hidden_states", b), part("pooled_projections", b),
                     part("timestep", b)[0], values.contains("guidance") ? part("guidance", b)[0] : 0,
                     values.at("img_ids"), values.at("txt_ids")});
  }
};

Results by_name(std::vector<InputStatistics> statistics) {
  Results out;
  for (InputStatistics& one : statistics) {
    const std::string first = one.weights.front();
    out.emplace(first, std::move(one));
  }
  return out;
}

std::vector<float> values_of(const SecondMoment& moment) {
  std::vector<float> out(size_t(moment.K() * moment.K()));
  for (int64_t i = 0; i < moment.K(); ++i)
    moment.row(i, std::span(out).subspan(size_t(i * moment.K()), size_t(moment.K())));
  return out;
}

/// Rows of an input of the net, as floats.
std::vector<float> host_values(const CudaLinearInput& input) {
  const int64_t bytes = (input.K * 2 + 15) / 16 * 16, stride = input.stride * 2;
  std::vector<int32_t> rows(static_cast<size_t>(input.M));
  std::iota(rows.begin(), rows.end(), 0);
  cuda::Device& device = *test::cuda_device(nullptr);
  cuda::Buffer order(device, int64_t(rows.size() * sizeof(int32_t)), "test"), copy(device, input.M * bytes, "test");
  order.upload(std::as_bytes(std::span(rows)));
  cuda::launch_gather_rows(device, *input.stream,
                           {.from = reinterpret_cast<const std::byte*>(input.x),
                            .from_stride = stride,
                            .token = order.as<int32_t>(),
                            .count = input.M,
                            .bytes = bytes,
                            .to = copy.data(),
                            .to_stride = bytes});
  input.stream->synchronize();
  std::vector<bf16> values(size_t(input.M * bytes / 2));
  copy.download(std::as_writable_bytes(std::span(values)));
  std::vector<float> out;
  for (int64_t m = 0; m < input.M; ++m)
    for (int64_t k = 0; k < input.K; ++k) out.push_back(to_float(values[size_t(m * bytes / 2 + k)]));
  return out;
}

/// As in cuda_flux_test.cc: what bf16 activations cost an input on the way to the last layer.
double bf16_bound(const Config& config) {
  return 3 * 0x1p-9 * std::sqrt(12 * double(config.n_double + config.n_single + 1) / 3.0);
}

/// E4M3 besides: as layout_bound() there.
double eight_bits_bound(const Config& config) {
  return bf16_bound(config) + 3 * 0x1p-6 * std::sqrt(double(config.n_double + config.n_single + 1));
}

/// Second moments of most matrices.
ImageStatisticsOptions everything() { return {{"*.*.*.*.weight", "*.*.*.*.*.weight", "proj_out.weight"}, 1 << 30}; }

class CudaImageStatistics : public test::CudaTest {
 protected:
  /// The statistics of `images` on the CPU, which takes them one after the other.
  Results on_cpu(const ImageCheckpoint& checkpoint, const Images& images, const ImageStatisticsOptions& options) {
    Net net(checkpoint, pool());
    ImageStatistics statistics(options, pool());
    std::vector<float> out(images.results_of_one(net.config()));
    const InputObserver adds = [&](const LinearInput& input) { statistics.add(input); };
    const InputObserver counts = [&](const LinearInput& input) { statistics.count(input); };
    for (const InputObserver* observer : {&adds, &counts})
      for (const Inputs& image : images.all) net.predict(image, out, nullptr, observer);
    return by_name(statistics.results(true));
  }

  /// bound: of the distance between the inputs of both, relative.
  void compare(const ImageCheckpoint& checkpoint, const Images& images, double (*bound_of)(const Config&),
               const ImageStatisticsOptions& options = everything()) {
    CudaNet net(checkpoint, pool(), device(), {.progress = false});
    const double bound = bound_of(net.config());
    std::vector<float> out(images.results_of_one(net.config()) * images.all.size());
    calibrate::CudaImageStatistics statistics(options, true, device());
    const CudaInputObserver adds = [&](const CudaLinearInput& input) { statistics.add(input); };
    const CudaInputObserver counts = [&](const CudaLinearInput& input) { statistics.count(input); };
    for (const CudaInputObserver* observer : {&adds, &counts}) net.predict(images.all, out, nullptr, observer);
    const Results ours = by_name(statistics.results()), theirs = on_cpu(checkpoint, images, options);
    ASSERT_EQ(ours.size(), theirs.size());
    size_t moments = 0;
    for (const auto& [name, truth] : theirs) {
      ASSERT_TRUE(ours.contains(name)) << name;
      const InputStatistics& got = ours.at(name);
      EXPECT_EQ(got.weights, truth.weights);
      EXPECT_EQ(got.tokens, truth.tokens) << name;
      EXPECT_LE(test::relative_error(got.norms, truth.norms), bound) << name;  // norms differ less than the inputs
      EXPECT_EQ(got.entropies.size(), truth.entropies.size()) << name;
      ASSERT_EQ(bool(got.moment), bool(truth.moment)) << name;
      if (!got.moment) continue;
      ++moments;
      // Both factors have the inputs' error, and ||x|| <= ||y|| + ||x - y||.
      EXPECT_LE(test::relative_error(values_of(*got.moment()), values_of(*truth.moment())),
                bound * (2 + bound) * fan(truth))
          << name;
    }
    EXPECT_GT(moments, 0);
  }

  /// ||X||_F^2 / ||X^T X||_F: how much larger the inputs are than their second moment.
  static double fan(const InputStatistics& of) {
    double squares = 0, product = 0;
    for (const float norm : of.norms) squares += double(norm) * double(norm);
    for (const float value : values_of(*of.moment())) product += double(value) * double(value);
    return squares / double(of.tokens) / std::sqrt(product);
  }

  ImageCheckpoint compressed(const std::string& net, const std::string& policy) {
    const std::string path = dir_.file(net + "." + policy + ".gguf");
    io::ImageCompressOptions options;
    options.policy = io::ImagePolicy::load(policy);
    io::compress_image(tiny(net), path, options, pool());
    return ImageCheckpoint::open(path);
  }

 private:
  test::TempDir dir_;
};

TEST_F(CudaImageStatistics, AreTheCpusWithinWhatBf16Costs) {
  for (const char* model : {"dev", "moe"}) {
    SCOPED_TRACE(model);
    compare(ImageCheckpoint::open(tiny(model)), Images(model), bf16_bound);
  }
}

// A single block's first matrices are one product, k first.
TEST_F(CudaImageStatistics, OfJoinedProducts) {
  Config config = model::flux::find_image_shape("tiny").config;
  config.n_double = config.n_single = 1;
  compare(random_checkpoint("wide", config, io::ImagePolicy::load("bf16"), 1, pool()), Images(config), bf16_bound,
          {{"single_transformer_blocks.0.proj_mlp.weight"}, 1 << 30});
}

// Matrices that the first release joined read one input.
TEST_F(CudaImageStatistics, NamesAreTheCheckpoints) {
  compare(ImageCheckpoint::open(tiny("original")), Images("dev"), bf16_bound);
}

// Inputs as they are before they are quantized.
TEST_F(CudaImageStatistics, OfACompressedNet) { compare(compressed("moe", "quaspa"), Images("moe"), eight_bits_bound); }

// The same inputs on both: the device's bf16 values go through the CPU's statistics.
TEST_F(CudaImageStatistics, AreTheCpusOfTheSameInputs) {
  const ImageCheckpoint checkpoint = ImageCheckpoint::open(tiny("moe"));
  CudaNet net(checkpoint, pool(), device(), {.progress = false});
  const Images images("moe");
  std::vector<float> out(images.results_of_one(net.config()) * images.all.size());
  calibrate::CudaImageStatistics statistics(everything(), true, device());
  ImageStatistics expected(everything(), pool());
  const auto both = [&](bool counts) {
    const CudaInputObserver observer = [&](const CudaLinearInput& input) {
      const std::vector<float> x = host_values(input);
      const LinearInput same{input.weights, x.data(), input.M, input.K, input.K};
      counts ? statistics.count(input) : statistics.add(input);
      counts ? expected.count(same) : expected.add(same);
    };
    net.predict(images.all, out, nullptr, &observer);
  };
  both(false), both(true);
  const Results ours = by_name(statistics.results()), theirs = by_name(expected.results(true));
  ASSERT_EQ(ours.size(), theirs.size());
  EXPECT_EQ(statistics.moment_bytes(), expected.moment_bytes());
  for (const auto& [name, truth] : theirs) {
    const InputStatistics& got = ours.at(name);
    for (size_t k = 0; k < truth.norms.size(); ++k) EXPECT_FLOAT_EQ(got.norms[k], truth.norms[k]) << name << ' ' << k;
    EXPECT_EQ(got.entropies, truth.entropies) << name;
    if (!truth.moment) continue;
    const std::vector<float> a = values_of(*got.moment()), b = values_of(*truth.moment());
    const size_t K = truth.norms.size();
    for (size_t i = 0; i < K * K; ++i)  // two sums of at most 256 terms in float32, rounded to float32 each
      EXPECT_NEAR(a[i], b[i], 2 * 258 * 0x1p-24 * std::sqrt(double(b[i / K * (K + 1)]) * double(b[i % K * (K + 1)])))
          << name << ' ' << i;
  }
}

TEST_F(CudaImageStatistics, AStepIsTheSameWithAndWithoutThem) {
  const ImageCheckpoint checkpoint = compressed("moe", "quaspa");
  CudaNet net(checkpoint, pool(), device(), {.progress = false});
  const Images images("moe");
  std::vector<float> before(images.results_of_one(net.config()) * images.all.size());
  std::vector<float> observed(before.size()), after(before.size());
  calibrate::CudaImageStatistics first(everything(), false, device()), again(everything(), false, device());
  const auto step = [&](calibrate::CudaImageStatistics& statistics) {
    const CudaInputObserver adds = [&](const CudaLinearInput& input) { statistics.add(input); };
    net.predict(images.all, observed, nullptr, &adds);
  };
  net.predict(images.all, before);
  step(first), step(again);
  net.predict(images.all, after);
  EXPECT_EQ(observed, before);
  EXPECT_EQ(after, before);
  // And so are the bits of the statistics.
  const Results a = by_name(first.results()), b = by_name(again.results());
  for (const auto& [name, of_first] : a) {
    EXPECT_EQ(b.at(name).norms, of_first.norms) << name;
    if (of_first.moment) {
      EXPECT_EQ(values_of(*b.at(name).moment()), values_of(*of_first.moment())) << name;
    }
  }
}

// What an observer throws ends the step; the next one is not observed.
TEST_F(CudaImageStatistics, AnErrorEndsTheStepOnly) {
  const ImageCheckpoint checkpoint = ImageCheckpoint::open(tiny("moe"));
  CudaNet net(checkpoint, pool(), device(), {.progress = false});
  const Images images("moe");
  std::vector<float> before(images.results_of_one(net.config()) * images.all.size()), after(before.size());
  net.predict(images.all, before);
  ImageStatisticsOptions little = everything();
  little.most_bytes = 4000;
  calibrate::CudaImageStatistics statistics(little, false, device());
  const CudaInputObserver adds = [&](const CudaLinearInput& input) { statistics.add(input); };
  EXPECT_THAT([&] { net.predict(images.all, after, nullptr, &adds); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("more than the 4000 allowed")));
  net.predict(images.all, after);
  EXPECT_EQ(after, before);
}

TEST_F(CudaImageStatistics, RefusesWhatIsNotFiniteOrNotCounted) {
  std::vector<bf16> values(16, to_bf16(1.0f));
  const cuda::Buffer good = to_device(values);
  values[11] = to_bf16(std::numeric_limits<float>::infinity());
  const cuda::Buffer bad = to_device(values);
  const std::vector<std::string> name = {"a.weight"};
  const auto input = [&](const cuda::Buffer& of) { return CudaLinearInput{name, of.as<bf16>(), 2, 6, 8, &stream()}; };
  calibrate::CudaImageStatistics infinite({}, false, device()), uncounted({}, true, device());
  infinite.add(input(good)), infinite.add(input(bad));
  stream().synchronize();
  EXPECT_THAT([&] { infinite.results(); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("a.weight: input 3 is not finite in one of 4 tokens")));
  uncounted.add(input(good)), uncounted.add(input(good)), uncounted.count(input(good));
  stream().synchronize();
  EXPECT_THAT([&] { uncounted.results(); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("2 tokens were counted, but the ranges are of 4")));
}

TEST_F(CudaImageStatistics, SaysWhatDoesNotFit) {
  if (device().info().name == "emulated") GTEST_SKIP() << "SKIPPED: the emulated device has no limit of memory";
  cuda::Device small({.memory_limit = 1 << 20});
  const cuda::Buffer values = to_device(std::vector<bf16>(1024));
  const std::vector<std::string> name = {"a.weight"};
  calibrate::CudaImageStatistics statistics({{"*.weight"}, 1 << 30}, false, small);
  EXPECT_THAT(
      [&] {
        statistics.add({name, values.as<bf16>(), 1, 1024, 1024, &stream()});
      },
      testing::ThrowsMessage<cuda::DoesNotFit>(testing::HasSubstr("a.weight: its second moment")));
}

}  // namespace
}  // namespace lacuna::calibrate
