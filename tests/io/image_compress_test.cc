#include "io/image_compress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "core/scalar.h"
#include "core/sha256.h"
#include "hf_folder.h"
#include "io/image_checkpoint.h"
#include "io/manifest.h"
#include "layout/tensor_core.h"
#include "layout/two_of_four.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

using layout::Id;
using test::Entry;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

ThreadPool& pool() {
  static ThreadPool threads(2);
  return threads;
}

/// Made weights, in float and as an entry of a file.
struct Made {
  Entry entry;
  std::vector<float> values;
};

Made made(const std::string& name, std::vector<int64_t> dims, const std::string& dtype) {
  int64_t count = 1;
  for (const int64_t dim : dims) count *= dim;
  Rng rng(std::hash<std::string>()(name));
  Made out{{name, dtype, std::move(dims), {}}, {}};
  std::vector<uint16_t> halves;
  for (int64_t i = 0; i < count; ++i) {
    float value = float(rng.normal() * 0.05);
    if (dtype == "BF16") halves.push_back(to_bf16(value).bits), value = to_float(bf16{halves.back()});
    if (dtype == "F16") halves.push_back(to_f16(value).bits), value = to_float(f16{halves.back()});
    out.values.push_back(value);
  }
  out.entry.bytes = dtype == "F32" ? test::bytes_of(out.values) : test::bytes_of(halves);
  return out;
}

/// A transformer's folder with one double and one single block, whose width of 22 is no multiple of four.
class Model {
 public:
  explicit Model(const std::string& dtype = "BF16", bool sharded = false) {
    constexpr int64_t D = 22;
    const auto add = [&](const std::string& name, std::vector<int64_t> dims, const std::string& type) {
      weights_.emplace(name, made(name, std::move(dims), type));
    };
    add("x_embedder.weight", {D, 8}, dtype);
    add("x_embedder.bias", {D}, dtype);
    add("transformer_blocks.0.attn.to_q.weight", {D, D}, dtype);
    add("transformer_blocks.0.attn.norm_q.weight", {11}, "F32");
    add("transformer_blocks.0.ff.net.2.weight", {D, 4 * D}, dtype);
    add("transformer_blocks.0.ff_context.net.2.weight", {D, 4 * D}, dtype);
    add("single_transformer_blocks.0.proj_out.weight", {D, 5 * D}, dtype);
    add("single_transformer_blocks.0.norm.linear.weight", {3 * D, D}, dtype);
    write(sharded);
  }
  std::string path() const { return dir_.path().string(); }
  std::string file(const std::string& name) const { return dir_.file(name); }
  const Made& at(const std::string& name) const { return weights_.at(name); }
  const std::map<std::string, Made>& weights() const { return weights_; }
  void set(const std::string& name, size_t at, float value) {  // of an F32 model
    std::memcpy(weights_.at(name).entry.bytes.data() + at * sizeof(float), &value, sizeof(value));
    write(false);
  }

 private:
  void write(bool sharded) const {
    test::write_bytes(file("config.json"), R"({"_class_name": "FluxTransformer2DModel", "num_layers": 1})");
    std::vector<Entry> parts[2];
    nlohmann::json map = nlohmann::json::object();
    for (size_t i = 0; const auto& [name, made] : weights_) {
      const size_t part = sharded ? i++ % 2 : 0;
      parts[part].push_back(made.entry);
      map[name] = part == 0 ? "a.safetensors" : "b.safetensors";
    }
    if (!sharded) return test::write_bytes(file("diffusion_pytorch_model.safetensors"), test::safetensors(parts[0]));
    test::write_bytes(file("a.safetensors"), test::safetensors(parts[0]));
    test::write_bytes(file("b.safetensors"), test::safetensors(parts[1]));
    test::write_bytes(file("diffusion_pytorch_model.safetensors.index.json"),
                      nlohmann::json{{"weight_map", map}}.dump());
  }
  test::TempDir dir_;
  std::map<std::string, Made> weights_;
};

ImageCompressOptions quiet(const std::string& policy = "quaspa") {
  ImageCompressOptions out;
  out.policy = ImagePolicy::load(policy);
  out.progress = false;
  return out;
}

std::vector<float> values(const Tensor& tensor) {
  std::vector<float> out(size_t(tensor.shape.N * tensor.shape.K));
  layout::decode_rows(*tensor.layout, tensor.shape, tensor.bytes, 0, tensor.shape.N, out.data(), tensor.params);
  return out;
}

TEST(ImageCompress, EveryTensorHasItsLayoutAndItsWeights) {
  for (const char* dtype : {"BF16", "F16", "F32"}) {
    for (const bool sharded : {false, true}) {
      const Model model(dtype, sharded);
      const ImageCompressReport report = compress_image(model.path(), model.file("out.lacuna"), quiet(), pool());
      const ImageCheckpoint made = ImageCheckpoint::open(model.file("out.lacuna"));
      ASSERT_EQ(made.tensors().size(), model.weights().size());
      EXPECT_EQ(made.config(), test::read_text(model.file("config.json")));
      std::map<std::string_view, int64_t> bytes;
      for (const auto& [name, tensor] : made.tensors()) {
        const std::vector<float>& w = model.at(name).values;
        const layout::Id expected =
            name.ends_with("to_q.weight") || name.ends_with(".ff.net.2.weight") || name.ends_with("proj_out.weight")
                ? Id::nm24_f8
            : name.ends_with("ff_context.net.2.weight")               ? Id::f8
            : tensor.dims.size() == 2 || dtype == std::string("BF16") ? Id::bf16
            : dtype == std::string("F16")                             ? Id::f16
                                                                      : Id::f32;
        if (name.ends_with("norm_q.weight")) {
          EXPECT_EQ(tensor.layout->id, Id::f32);
        } else {
          EXPECT_EQ(tensor.layout->id, expected) << name;
        }
        EXPECT_EQ(tensor.dims, model.at(name).entry.shape);
        bytes[tensor.layout->name] += int64_t(tensor.bytes.size());
        const std::vector<float> got = values(tensor);
        const auto [N, K] = tensor.shape;
        for (int64_t n = 0; n < N; ++n) {
          float most = 0;
          std::vector<float> magnitude(static_cast<size_t>(K));
          for (int64_t k = 0; k < K; ++k) {
            magnitude[size_t(k)] = std::abs(w[size_t(n * K + k)]);
            most = std::max(most, magnitude[size_t(k)]);
          }
          std::vector<uint8_t> keep(static_cast<size_t>(K), 1);
          if (tensor.layout->id == Id::nm24_f8) layout::keep_largest(magnitude, keep);
          const bool codes = layout::has_e4m3_codes(*tensor.layout);
          for (int64_t k = 0; k < K; ++k) {
            const float exact = keep[size_t(k)] != 0 ? w[size_t(n * K + k)] : 0.0f;
            const float bound = codes ? std::max(std::abs(exact) * 0x1p-4f, most / 448 * 0x1p-10f) * (1 + 0x1p-20f)
                                      : std::abs(exact) * 0x1p-8f;
            ASSERT_LE(std::abs(got[size_t(n * K + k)] - exact), bound) << name << " " << n << " " << k;
          }
        }
      }
      int64_t stored = 0;
      for (const auto& group : report.groups) {
        EXPECT_EQ(group.bytes, bytes.at(group.layout->name));
        stored += group.bytes;
      }
      EXPECT_EQ(report.groups.size(), bytes.size());
      EXPECT_EQ(report.bytes, stored);
      EXPECT_EQ(report.file_bytes, int64_t(std::filesystem::file_size(model.file("out.lacuna"))));
      EXPECT_EQ(report.mask, "magnitude");
      std::filesystem::remove(model.file("out.lacuna"));
    }
  }
}

TEST(ImageCompress, MetadataAndDigests) {
  const Model model;
  compress_image(model.path(), model.file("out.lacuna"), quiet(), pool());
  const Checkpoint made = Checkpoint::open(model.file("out.lacuna"));
  EXPECT_EQ(made.architecture(), "flux");
  EXPECT_EQ(made.metadata().need_string(kImagePolicyKey), ImagePolicy::load("quaspa").text());
  EXPECT_EQ(made.metadata().need_string(kImageMaskKey), "magnitude");
  const Manifest manifest = parse_manifest(made.metadata().need_string(kManifestKey), "x");
  EXPECT_EQ(manifest.size(), 4u);
  for (const auto& [name, entry] : manifest) {
    const std::string& bytes = model.at(name).entry.bytes;
    EXPECT_EQ(entry.sha256, sha256_hex(std::as_bytes(std::span(bytes))));
  }
  EXPECT_EQ(manifest.at("transformer_blocks.0.attn.to_q.weight").nnz, 22 * (5 * 2 + 2));
}

TEST(ImageCompress, ErrorsAreThoseOfTheStoredWeights) {
  const Model model("F32");
  const ImageCompressReport report = compress_image(model.path(), model.file("out.lacuna"), quiet("f8"), pool());
  const ImageCheckpoint made = ImageCheckpoint::open(model.file("out.lacuna"));
  double error = 0, square = 0;
  for (const auto& [name, tensor] : made.tensors()) {
    if (tensor.layout->id != Id::f8) continue;
    const std::vector<float> got = values(tensor), &w = model.at(name).values;
    for (size_t i = 0; i < w.size(); ++i) {
      error += (double(got[i]) - double(w[i])) * (double(got[i]) - double(w[i]));
      square += double(w[i]) * double(w[i]);
    }
  }
  const auto f8 = std::ranges::find(report.groups, Id::f8, [](const auto& group) { return group.layout->id; });
  ASSERT_NE(f8, report.groups.end());
  EXPECT_NEAR(f8->relative_error, std::sqrt(error / square), 1e-12);
  EXPECT_LT(f8->relative_error, 0x1p-4);
  EXPECT_TRUE(report.mask.empty());
}

// A fused matrix has the bytes of its parts one after the other.
TEST(ImageCompress, FusedMatricesAreTheirParts) {
  const layout::Shape whole{12, 10};
  const Made w = made("w", {12, 10}, "F32");
  std::vector<uint8_t> keep(w.values.size());
  for (size_t n = 0; n < 12; ++n)
    layout::keep_largest(std::span(w.values).subspan(10 * n, 10), std::span(keep).subspan(10 * n, 10));
  const layout::Layout& to = layout::get(Id::nm24_f8);
  std::vector<std::byte> fused(size_t(to.size_bytes(whole))), parts;
  layout::encode_tensor_core(to, whole, w.values, keep, fused);
  for (size_t n = 0; n < 12; n += 4) {
    std::vector<std::byte> part(size_t(to.size_bytes({4, 10})));
    layout::encode_tensor_core(to, {4, 10}, std::span(w.values).subspan(10 * n, 40),
                               std::span(keep).subspan(10 * n, 40), part);
    parts.insert(parts.end(), part.begin(), part.end());
  }
  EXPECT_EQ(fused, parts);
}

TEST(ImageCompress, AMaskFileIsFollowed) {
  const Model model;
  std::vector<Entry> masks;
  for (const auto& [name, made] : model.weights()) {
    if (!name.ends_with("to_q.weight") && !name.ends_with(".ff.net.2.weight") && !name.ends_with("proj_out.weight"))
      continue;
    const int64_t K = made.entry.shape[1];
    std::vector<uint8_t> keep(made.values.size());
    std::vector<float> score(static_cast<size_t>(K));
    for (int64_t n = 0; n < made.entry.shape[0]; ++n) {
      for (int64_t k = 0; k < K; ++k) score[size_t(k)] = float((n + k) * 7 % 5);
      layout::keep_largest(score, std::span(keep).subspan(size_t(n * K), size_t(K)));
    }
    masks.push_back({name, "BOOL", made.entry.shape, test::bytes_of(keep)});
  }
  test::write_bytes(model.file("masks"), test::safetensors(masks));
  ImageCompressOptions options = quiet();
  options.mask = {.method = MaskMethod::file, .masks = model.file("masks")};
  compress_image(model.path(), model.file("out.lacuna"), options, pool());
  const ImageCheckpoint made = ImageCheckpoint::open(model.file("out.lacuna"));
  for (const Entry& mask : masks) {
    const std::vector<float> got = values(*made.find(mask.name));
    for (size_t i = 0; i < got.size(); ++i) ASSERT_TRUE(mask.bytes[i] != 0 || got[i] == 0) << mask.name << " " << i;
  }
  masks.pop_back();
  test::write_bytes(model.file("masks"), test::safetensors(masks));
  EXPECT_THAT([&] { compress_image(model.path(), model.file("out2.lacuna"), options, pool()); },
              ThrowsMessage<Error>(HasSubstr("has no tensor")));
  EXPECT_FALSE(std::filesystem::exists(model.file("out2.lacuna")));
}

// RECIPES 4, 5, 6, 11: what is wrong with a source is said by name, and nothing is left.
TEST(ImageCompress, RefusesBrokenSourcesAndLeavesNothing) {
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    for (const char* name : {"transformer_blocks.0.ff.net.2.weight", "x_embedder.bias", "x_embedder.weight"}) {
      Model model("F32");
      model.set(name, 13, value);
      EXPECT_THAT([&] { compress_image(model.path(), model.file("out.lacuna"), quiet(), pool()); },
                  ThrowsMessage<Error>(AllOf(HasSubstr(name), HasSubstr("diffusion_pytorch_model.safetensors"))));
      EXPECT_EQ(std::distance(std::filesystem::directory_iterator(model.path()), {}), 2) << "no partial file is left";
    }
  }
  const Model model("BF16", true);
  std::filesystem::remove(model.file("b.safetensors"));
  EXPECT_THAT([&] { compress_image(model.path(), model.file("out.lacuna"), quiet(), pool()); },
              ThrowsMessage<Error>(HasSubstr("b.safetensors: this shard is missing")));
}

TEST(ImageCompress, RefusesWhatWasCompressedAndPoliciesThatFitNothing) {
  const Model model;
  compress_image(model.path(), model.file("out.lacuna"), quiet(), pool());
  EXPECT_THAT([&] { compress_image(model.file("out.lacuna"), model.file("again.lacuna"), quiet(), pool()); },
              ThrowsMessage<Error>(HasSubstr("was compressed already")));
  EXPECT_THAT([&] { compress_image(model.file("out.lacuna"), model.file("out.lacuna"), quiet(), pool()); },
              ThrowsMessage<Error>(HasSubstr("is the model that is read")));
  ImageCompressOptions options = quiet();
  options.policy = ImagePolicy::parse(
      R"({"version": 1, "rest": "bf16", "rules": [{"name": "layers.*.w", "layout": "f8"}]})", "p.json");
  EXPECT_THAT([&] { compress_image(model.path(), model.file("x.lacuna"), options, pool()); },
              ThrowsMessage<Error>(HasSubstr("no matrix has a name that a rule of the policy p.json matches")));
  options.policy = ImagePolicy::parse(
      R"({"version": 1, "rest": "source", "rules": [{"name": "layers.*.w", "layout": "f8"},
      {"name": "x_embedder.weight", "layout": "f8"}]})",
      "p.json");
  EXPECT_EQ(compress_image(model.path(), model.file("x.lacuna"), options, pool()).unused_rules,
            std::vector<std::string>{"layers.*.w"});
  options.mask = {.method = MaskMethod::wanda, .norms = model.file("n")};
  EXPECT_THAT([&] { compress_image(model.path(), model.file("y.lacuna"), options, pool()); },
              ThrowsMessage<Error>(HasSubstr("makes no matrix 2:4")));
}

// However large the matrix, a few MiB of its values are held at once.
TEST(ImageCompress, HighPrecisionValuesAreHeldInPieces) {
  const test::TempDir folder;
  const int64_t N = 3000, K = 1200;
  Made w = made("single_blocks.0.linear1.weight", {N, K}, "BF16");
  test::write_bytes(folder.file("m.safetensors"), test::safetensors({w.entry}));
  const ImageCompressReport report =
      compress_image(folder.file("m.safetensors"), folder.file("out.lacuna"), quiet(), pool());
  EXPECT_LE(report.most_float_bytes, int64_t{2} * 4 * (1 << 20));
  EXPECT_GT(report.most_float_bytes, 0);
  const ImageCheckpoint stored = ImageCheckpoint::open(folder.file("out.lacuna"));
  const std::vector<float> got = values(*stored.find(w.entry.name));
  for (int64_t n = 0; n < N; n += 7) {  // rows of every piece
    double error = 0, square = 0;
    for (int64_t k = 0; k < K; ++k) {
      const double exact = w.values[size_t(n * K + k)], difference = got[size_t(n * K + k)] - exact;
      error += difference * difference, square += exact * exact;
    }
    ASSERT_LT(error, 0.2 * square) << "the smaller half of normal weights holds less than that, row " << n;
  }
}

// Gradients are a third piece; the descent holds a second moment, its result and two more.
TEST(ImageCompress, HighPrecisionValuesOfMasksCount) {
  const test::TempDir folder;
  const int64_t N = 24, K = 40;
  const std::string name = "single_blocks.0.linear1.weight", model = folder.file("m.safetensors");
  test::write_bytes(model, test::safetensors({made(name, {N, K}, "F32").entry}));
  const auto ones = [&](const std::string& as, std::vector<int64_t> dims, int64_t count) {
    return Entry{as, "F32", std::move(dims), test::bytes_of(std::vector<float>(size_t(count), 1.0f))};
  };
  test::write_bytes(folder.file("norms"), test::safetensors({ones(name + ".norm", {K}, K)}));
  test::write_bytes(folder.file("gradients"), test::safetensors({ones(name, {N, K}, N * K)}));
  test::write_bytes(folder.file("moments"), test::safetensors({ones(name + ".second_moment", {K, K}, K * K)}));
  const auto held = [&](MaskOptions mask) {
    ImageCompressOptions options = quiet();
    options.mask = std::move(mask);
    return compress_image(model, folder.file("out.lacuna"), options, pool()).most_float_bytes;
  };
  const int64_t piece = N * K * int64_t(sizeof(float)), magnitude = held({});
  EXPECT_EQ(magnitude, 2 * piece);
  EXPECT_EQ(held({.method = MaskMethod::wanda_plus_plus,
                  .norms = folder.file("norms"),
                  .gradients = folder.file("gradients")}),
            3 * piece);
  const auto keep_first = [](std::span<const float> w, std::span<const float>, std::span<uint8_t> keep,
                             std::span<float> theta, ThreadPool&) {
    for (size_t i = 0; i < w.size(); ++i) keep[i] = i % 4 < 2, theta[i] = keep[i] != 0 ? w[i] : 0.0f;
  };
  MaskOptions awp{.method = MaskMethod::awp, .moments = {folder.file("moments")}, .descent = keep_first};
  EXPECT_EQ(held(awp), 5 * piece + K * K * int64_t(sizeof(float)));
  awp.changed_weights = true;
  EXPECT_EQ(held(awp), 6 * piece + K * K * int64_t(sizeof(float)));
  // A matrix without a mask, later and larger, has the two pieces alone.
  const int64_t large = 8 * N * K;
  test::write_bytes(model,
                    test::safetensors({made(name, {N, K}, "F32").entry, made("z.weight", {8 * N, K}, "F32").entry}));
  EXPECT_EQ(held({.method = MaskMethod::wanda_plus_plus,
                  .norms = folder.file("norms"),
                  .gradients = folder.file("gradients")}),
            2 * large * int64_t(sizeof(float)));
}

}  // namespace
}  // namespace lacuna::io
