// The FLUX.1 transformer on a CUDA device against diffusers' and against the one on the CPU. Compiled also into
// simt_test, where the kernels run on the CPU.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "io/float_tensors.h"
#include "io/image_checkpoint.h"
#include "io/image_compress.h"
#include "io/image_policy.h"
#include "kernels/cuda_support.h"
#include "model/flux/cuda_net.h"
#include "model/flux/net.h"
#include "model/flux/sampler.h"
#include "model/flux/synth.h"
#include "relative_error.h"
#include "test_support.h"

namespace lacuna::model::flux {
namespace {

using io::FloatTensor;
using io::FloatTensors;
using io::ImageCheckpoint;
using Results = std::map<std::string, std::vector<float>>;

constexpr CudaNetOptions kQuiet{.progress = false};

ThreadPool& pool() {
  static ThreadPool two(2);
  return two;
}

std::string tiny(const std::string& name) { return test::fixture("flux_tiny/" + name); }

std::span<const float> row(const FloatTensor& tensor, int64_t index) {
  const auto size = tensor.values.size() / size_t(tensor.dims[0]);
  return std::span(tensor.values).subspan(size_t(index) * size, size);
}

/// Inputs of all samples of a case.
std::vector<Inputs> inputs_of(const FloatTensors& file) {
  std::vector<Inputs> out;
  const auto guidance = file.find("in.guidance");
  for (int64_t b = 0; b < file.at("in.hidden_states").dims[0]; ++b)
    out.push_back({row(file.at("in.hidden_states"), b), row(file.at("in.encoder_hidden_states"), b),
                   row(file.at("in.pooled_projections"), b), file.at("in.timestep").values[size_t(b)],
                   guidance == file.end() ? 0 : guidance->second.values[size_t(b)], file.at("in.img_ids").values,
                   file.at("in.txt_ids").values});
  return out;
}

size_t results_of(const Config& config, std::span<const Inputs> images) {
  return images.size() * images.front().latents.size() / size_t(config.in_channels) * size_t(config.out_channels);
}

/// Every result by name, of all images one after the other.
Results run_cuda(CudaNet& net, std::span<const Inputs> images) {
  Results out;
  const Observer keep = [&](std::string_view name, std::span<const float> values) {
    out[std::string(name)].assign(values.begin(), values.end());
  };
  std::vector<float> sample(results_of(net.config(), images));
  net.predict(images, sample, &keep);
  out["sample"] = std::move(sample);
  return out;
}

Results run_cpu(Net& net, std::span<const Inputs> images) {
  Results out;
  const Observer keep = [&](std::string_view name, std::span<const float> values) {
    std::vector<float>& all = out[std::string(name)];
    all.insert(all.end(), values.begin(), values.end());
  };
  const size_t size = results_of(net.config(), images) / images.size();
  std::vector<float> sample(size * images.size());
  for (size_t b = 0; b < images.size(); ++b) net.predict(images[b], std::span(sample).subspan(b * size, size), &keep);
  out["sample"] = std::move(sample);
  return out;
}

/// A rounding to BF16 costs 2^-9/sqrt(3) of a value on average; a path through a block has about 12 of them. Three
/// times as much is allowed.
double bf16_bound(const Config& config) {
  return 3 * 0x1p-9 * std::sqrt(12 * double(config.n_double + config.n_single + 1) / 3.0);
}

/// Against the CPU on the same weights. Rounded inputs move some tokens' values to the next code of E4M3: a value's
/// mean distance to the edge between two codes is 2^-5 of it, and it comes with an error of 2^-9 sqrt(12/3) at most, so
/// that a thirtieth of the values move by 2^-3.5 of themselves, which is 2^-6 of all. Three such inputs follow each
/// other in a block. Three times as much is allowed.
double layout_bound(const Config& config, const std::string& policy) {
  const double blocks = double(config.n_double + config.n_single + 1);
  const bool eight_bits = policy == "f8" || policy == "quaspa";
  return bf16_bound(config) + (eight_bits ? 3 * 0x1p-6 * std::sqrt(blocks) : 0);
}

class CudaFlux : public test::CudaTest {
 protected:
  /// A fixture's net as `image compress` stores it.
  ImageCheckpoint compressed(const std::string& net, const std::string& policy) {
    const std::string path = dir_.file(net + "." + policy + ".gguf");
    io::ImageCompressOptions options;
    options.policy = io::ImagePolicy::load(policy);
    io::compress_image(tiny(net), path, options, pool());
    return ImageCheckpoint::open(path);
  }

  /// Of bf16 activations against the CPU's float32 on the same weights.
  void compare(const ImageCheckpoint& checkpoint, std::span<const Inputs> images, const std::string& policy) {
    CudaNet net(checkpoint, pool(), device(), kQuiet);
    Net cpu(checkpoint, pool());
    const double bound = layout_bound(net.config(), policy);
    const Results found = run_cuda(net, images), expected = run_cpu(cpu, images);
    for (const auto& [name, values] : found) {
      ASSERT_TRUE(expected.contains(name)) << name;
      EXPECT_LE(test::relative_error(values, expected.at(name)), bound) << name;
    }
    EXPECT_EQ(found.size(), 3 + 2 * size_t(net.config().n_double + net.config().n_single));
    // As a graph, and again.
    std::vector<float> sample(found.at("sample").size());
    for (int i = 0; i < 2; ++i) {
      net.predict(images, sample);
      EXPECT_EQ(sample, found.at("sample"));
    }
  }

  /// Each step takes seconds where the kernels run on the CPU.
  bool emulated() { return device().info().name == "emulated"; }
  std::vector<std::string> policies() {
    if (emulated()) return {"quaspa"};
    return {"bf16", "nm24_bf16", "f8", "quaspa"};
  }

 private:
  test::TempDir dir_;
};

TEST_F(CudaFlux, BlocksAreDiffusers) {
  for (const auto& [name, model] : std::map<std::string, std::string>{
           {"dev", "dev"}, {"dev_text1", "dev"}, {"dev_text77", "dev"}, {"schnell", "schnell"}, {"moe", "moe"}}) {
    if (emulated() && name.starts_with("dev_")) continue;
    const FloatTensors file = io::read_float_tensors(tiny(name + ".safetensors"));
    const ImageCheckpoint checkpoint = ImageCheckpoint::open(tiny(model));
    CudaNet net(checkpoint, pool(), device(), kQuiet);
    const Results results = run_cuda(net, inputs_of(file));
    for (const auto& [module, values] : results)
      EXPECT_LE(test::relative_error(values, file.at("f64." + module).values), bf16_bound(net.config()))
          << name << ' ' << module;
    EXPECT_GE(results.size(), 5);
  }
}

TEST_F(CudaFlux, LayoutsGiveTheCpusResults) {
  for (const char* model : {"dev", "moe"}) {
    const FloatTensors file = io::read_float_tensors(tiny(std::string(model) + ".safetensors"));
    for (const std::string& policy : policies()) {
      SCOPED_TRACE(fmt::format("{} {}", model, policy));
      const ImageCheckpoint checkpoint = compressed(model, policy);
      compare(checkpoint, inputs_of(file), policy);
    }
  }
}

/// Random inputs of `count` images of rows x columns tokens.
struct RandomImages {
  std::vector<float> latents, text, pooled, image_ids, text_ids;
  std::vector<Inputs> images;
  RandomImages(const Config& config, int64_t count, int64_t rows, int64_t columns, int64_t text_tokens, uint64_t seed) {
    Rng rng(seed);
    const auto fill = [&](std::vector<float>& values, int64_t size) {
      values.resize(size_t(size));
      for (float& v : values) v = float(rng.normal());
    };
    fill(latents, count * rows * columns * config.in_channels);
    fill(text, count * text_tokens * config.text_dim);
    fill(pooled, count * config.pooled_dim);
    image_ids = flux::image_ids({1, 2 * rows, 2 * columns});
    text_ids.resize(size_t(text_tokens * 3));
    const auto part = [&](const std::vector<float>& of, int64_t b) {
      return std::span(of).subspan(of.size() / size_t(count) * size_t(b), of.size() / size_t(count));
    };
    for (int64_t b = 0; b < count; ++b)
      images.push_back({part(latents, b), part(text, b), part(pooled, b), 0.25 + 0.125 * double(b), 1.0 + double(b),
                        image_ids, text_ids});
  }
};

/// Heads of 128 and widths of whole blocks, as FLUX.1's own: a single block's first matrices are one product.
Config wide_config() {
  Config config = find_image_shape("tiny").config;
  config.n_double = config.n_single = 1;
  return config;
}

TEST_F(CudaFlux, JoinedProductsGiveTheCpusResults) {
  const Config config = wide_config();
  const RandomImages random(config, 2, 3, 4, 9, 1);
  for (const std::string& policy : policies()) {
    SCOPED_TRACE(policy);
    const ImageCheckpoint checkpoint = random_checkpoint("wide", config, io::ImagePolicy::load(policy), 1, pool());
    compare(checkpoint, std::span(random.images).first(1), policy);
    if (!emulated()) compare(checkpoint, random.images, policy);
  }
}

TEST_F(CudaFlux, SizesMayChangeBetweenSteps) {
  const ImageCheckpoint checkpoint = ImageCheckpoint::open(tiny("dev"));
  CudaNet net(checkpoint, pool(), device(), kQuiet);
  const RandomImages small(net.config(), 1, 2, 3, 4, 1), large(net.config(), 2, 3, 3, 7, 2);
  const Results first = run_cuda(net, small.images);
  run_cuda(net, large.images);
  EXPECT_EQ(run_cuda(net, small.images), first);
  // Other coordinates of the same number.
  const RandomImages turned(net.config(), 1, 3, 2, 4, 1);
  EXPECT_NE(run_cuda(net, turned.images).at("sample"), first.at("sample"));
  EXPECT_EQ(run_cuda(net, small.images), first);
}

std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST_F(CudaFlux, RefusesInputsThatDoNotFit) {
  const ImageCheckpoint checkpoint = ImageCheckpoint::open(tiny("dev"));
  CudaNet net(checkpoint, pool(), device(), kQuiet);
  const RandomImages good(net.config(), 2, 2, 3, 4, 1), turned(net.config(), 2, 3, 2, 4, 1);
  std::vector<float> out(results_of(net.config(), good.images));
  const auto message = [&](std::vector<Inputs> images, std::span<float> to) {
    return message_of([&] { net.predict(images, to); });
  };
  EXPECT_EQ(message(good.images, out), "nothing was thrown");
  EXPECT_THAT(message({good.images[0], turned.images[0]}, out), testing::HasSubstr("same coordinates"));
  EXPECT_THAT(message(good.images, std::span(out).first(out.size() - 1)), testing::HasSubstr("results"));
  EXPECT_THAT(message({}, out), testing::HasSubstr("no images"));
  std::vector<Inputs> cut = good.images;
  cut[1].pooled = cut[1].pooled.first(3);
  EXPECT_THAT(message(cut, out), testing::HasSubstr("pooled"));
}

TEST_F(CudaFlux, RefusesWeightsThatItDoesNotRun) {
  const Config config = wide_config();
  const auto policy = io::ImagePolicy::load("bf16");
  const ImageCheckpoint checkpoint = random_checkpoint("wide", config, policy, 1, pool());
  std::vector<io::Tensor> tensors;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    tensors.push_back(tensor);
    if (name == "proj_out.weight") {
      tensors.back().layout = &layout::get(layout::Id::q8_0);
      tensors.back().bytes = tensor.bytes.first(size_t(tensors.back().layout->size_bytes(tensor.shape)));
    }
  }
  const auto other = ImageCheckpoint::in_memory("wide", format_config(config), tensors, {});
  EXPECT_THAT(message_of([&] { CudaNet(other, pool(), device(), kQuiet); }),
              testing::AllOf(testing::HasSubstr("proj_out.weight"), testing::HasSubstr("--device cuda")));
}

TEST_F(CudaFlux, SaysAfterWhichBlockAValueIsNotFinite) {
  FloatTensors tensors = io::read_float_tensors(tiny("schnell/diffusion_pytorch_model.safetensors"));
  for (const char* part : {"proj_mlp", "proj_out"})
    for (float& v : tensors[fmt::format("single_transformer_blocks.0.{}.weight", part)].values) v *= 1e30f;
  const test::TempDir dir;
  io::write_float_tensors(dir.file("diffusion_pytorch_model.safetensors"), tensors);
  std::filesystem::copy_file(tiny("schnell/config.json"), dir.file("config.json"));
  const ImageCheckpoint checkpoint = ImageCheckpoint::open(dir.path().string());
  CudaNet net(checkpoint, pool(), device(), kQuiet);
  const FloatTensors file = io::read_float_tensors(tiny("schnell.safetensors"));
  std::vector<float> out(results_of(net.config(), inputs_of(file)));
  EXPECT_THAT(message_of([&] { net.predict(inputs_of(file), out); }),
              testing::AllOf(testing::HasSubstr("single_transformer_blocks.0"), testing::HasSubstr("not finite")));
}

TEST_F(CudaFlux, KernelsOfAnyDeviceAgree) {
  for (const char* model : {"moe", "dev"}) {
    if (emulated() && model == std::string("dev")) continue;
    const FloatTensors file = io::read_float_tensors(tiny(std::string(model) + ".safetensors"));
    for (const std::string& policy : policies()) {
      SCOPED_TRACE(fmt::format("{} {}", model, policy));
      const ImageCheckpoint checkpoint = compressed(model, policy);
      CudaNet net(checkpoint, pool(), device(), kQuiet);
      EXPECT_THAT(message_of([&] { net.deviation(); }), testing::HasSubstr("no step has run"));
      const std::vector<Inputs> images = inputs_of(file);
      std::vector<float> before(results_of(net.config(), images)), after(before.size());
      net.predict(images, before);
      const double deviation = net.deviation();
      EXPECT_LE(deviation, 0.1);
      // Sums of E4M3 are kept in other bits; on other devices, and of so few bf16 inputs, nothing differs.
      const bool differs = device().info().major == 9 && !emulated() && (policy == "f8" || policy == "quaspa");
      if (differs) {
        EXPECT_GT(deviation, 0);
      }
      net.predict(images, after);
      EXPECT_EQ(after, before);
    }
  }
}

TEST(LargestDeviation, IsOfTheWorstRow) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<float> b = {3, 4, 0, 0, 1, 0};
  const auto of = [&](std::vector<float> a) { return largest_deviation(a, b, 2); };
  EXPECT_EQ(of(b), 0);
  EXPECT_DOUBLE_EQ(of({3, 5, 0, 0, 1, 0}), 0.2);
  EXPECT_DOUBLE_EQ(of({3, 5, 0, 0, 1, -0.5}), 0.5);
  EXPECT_EQ(of({3, 4, 0, 1e-3f, 1, 0}), kInfinity);
  EXPECT_EQ(of({3, 4, 0, 0, NAN, 0}), kInfinity);
  EXPECT_EQ(largest_deviation(b, std::vector<float>{3, 4, 0, 0, INFINITY, 0}, 2), kInfinity);
}

TEST_F(CudaFlux, TimesOfAStep) {
  const ImageCheckpoint checkpoint = ImageCheckpoint::open(tiny("dev"));
  CudaNet net(checkpoint, pool(), device(), kQuiet);
  EXPECT_THAT(message_of([&] { net.time_step(); }), testing::HasSubstr("no step has run"));
  const RandomImages random(net.config(), 1, 2, 3, 4, 1);
  const std::vector<float> before = run_cuda(net, random.images).at("sample");
  std::vector<float> after(before.size());
  net.predict(random.images, after);
  EXPECT_GT(net.time_step(), 0);
  const CudaPartTimes times = net.time_parts();
  const int64_t W = net.config().width();
  EXPECT_EQ(times.flops[size_t(Part::double_up)],
            2.0 * double(net.config().n_double) * 6 * double(W) * double(net.config().mlp_width));
  EXPECT_GT(times.ms[size_t(Part::attention)], 0);
  EXPECT_EQ(times.ms[size_t(Part::expert_up)], 0);
  EXPECT_THAT(times.kernels[size_t(Part::double_up)], testing::ElementsAre(testing::HasSubstr("bf16")));
  EXPECT_TRUE(times.kernels[size_t(Part::attention)].empty());
  net.predict(random.images, after);
  EXPECT_EQ(after, before);
}

// Plans differ in which block computes what, not in the order of sums.
TEST_F(CudaFlux, MeasuredPlansGiveTheSameBits) {
  const Config config = wide_config();
  const RandomImages random(config, 1, emulated() ? 2 : 8, emulated() ? 3 : 16, 9, 1);
  for (const std::string& policy : policies()) {
    SCOPED_TRACE(policy);
    const ImageCheckpoint checkpoint = random_checkpoint("wide", config, io::ImagePolicy::load(policy), 1, pool());
    CudaNet net(checkpoint, pool(), device(), kQuiet);
    const Results expected = run_cuda(net, random.images);
    const CudaPartTimes before = net.time_parts();
    if (emulated()) {
      EXPECT_TRUE(before.planned.empty()) << "it has no wgmma kernel";
      continue;
    }
    EXPECT_GE(before.planned.size(), 8u);
    EXPECT_THAT(before.kernels[size_t(Part::single_in)], testing::ElementsAre(testing::HasSubstr("by the model")));
    for (const size_t choice : {0u, 1u, 2u, 3u}) {
      cuda::TensorCoreTable measured;
      for (const cuda::TensorCoreProduct& product : before.planned) {
        const auto plans = cuda::tensor_core_plans(product.operation, product.accumulate);
        measured.set({product, plans[choice % plans.size()], 2, 1});
      }
      CudaNetOptions options = kQuiet;
      options.plans = &measured;
      CudaNet tuned(checkpoint, pool(), device(), options);
      EXPECT_EQ(run_cuda(tuned, random.images), expected) << choice;
      const CudaPartTimes after = tuned.time_parts();
      EXPECT_EQ(after.planned, before.planned);
      EXPECT_THAT(after.kernels[size_t(Part::single_in)],
                  testing::ElementsAre(testing::HasSubstr("plan measured at 137 tokens: 1.0 us, the model's 2.0 us")));
      EXPECT_THAT(after.kernels[size_t(Part::modulation)],
                  testing::Each(testing::Not(testing::HasSubstr("plan measured"))));
    }
  }
}

TEST_F(CudaFlux, SaysBeforeTheUploadThatItDoesNotFit) {
  if (emulated()) GTEST_SKIP() << "SKIPPED: the emulated device has no limit of memory";
  cuda::Device small({.memory_limit = 1 << 20});
  const ImageCheckpoint checkpoint = random_checkpoint("wide", wide_config(), io::ImagePolicy::load("bf16"), 1, pool());
  EXPECT_THROW(CudaNet(checkpoint, pool(), small, kQuiet), cuda::DoesNotFit);
  // Weights fit, the step does not.
  const ImageCheckpoint tiny_one = ImageCheckpoint::open(tiny("dev"));
  EXPECT_NO_THROW(CudaNet(tiny_one, pool(), small, kQuiet));
  CudaNetOptions large = kQuiet;
  large.images = 64, large.text_tokens = 512, large.image_tokens = 4096;
  EXPECT_THROW(CudaNet(tiny_one, pool(), small, large), cuda::DoesNotFit);
}

}  // namespace
}  // namespace lacuna::model::flux
