// The FLUX.1 transformer against diffusers' (tests/fixtures/flux_tiny, scripts/make_flux_fixture.py).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "io/float_tensors.h"
#include "io/gguf_writer.h"
#include "io/image_checkpoint.h"
#include "io/image_policy.h"
#include "model/flux/names.h"
#include "model/flux/net.h"
#include "model/flux/sampler.h"
#include "model/flux/synth.h"
#include "test_support.h"

namespace lacuna::model::flux {
namespace {

using io::FloatTensor;
using io::FloatTensors;
using io::ImageCheckpoint;

ThreadPool& pool() {
  static ThreadPool two(2);
  return two;
}

std::string tiny(const std::string& name) { return test::fixture("flux_tiny/" + name); }

std::span<const float> row(const FloatTensor& tensor, int64_t index) {
  const auto size = tensor.values.size() / size_t(tensor.dims[0]);
  return std::span(tensor.values).subspan(size_t(index) * size, size);
}

/// Inputs of sample b of a case.
Inputs inputs_of(const FloatTensors& file, int64_t b) {
  const auto guidance = file.find("in.guidance");
  return {row(file.at("in.hidden_states"), b),
          row(file.at("in.encoder_hidden_states"), b),
          row(file.at("in.pooled_projections"), b),
          file.at("in.timestep").values[size_t(b)],
          guidance == file.end() ? 0 : guidance->second.values[size_t(b)],
          file.at("in.img_ids").values,
          file.at("in.txt_ids").values};
}

using Results = std::map<std::string, std::vector<float>>;

/// Every result by name, of one sample.
Results run(Net& net, const Inputs& inputs) {
  Results out;
  const Observer keep = [&](std::string_view name, std::span<const float> values) {
    out[std::string(name)].assign(values.begin(), values.end());
  };
  std::vector<float> sample(inputs.latents.size() / size_t(net.config().in_channels) *
                            size_t(net.config().out_channels));
  net.predict(inputs, sample, &keep);
  out["sample"] = std::move(sample);
  return out;
}

double largest(std::span<const float> values) {
  double out = 0;
  for (const float v : values) out = std::max(out, std::abs(double(v)));
  return out;
}

double distance(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  test::Largest out;
  for (size_t i = 0; i < a.size(); ++i) out.add(std::abs(double(a[i]) - b[i]));
  return out.value();
}

/// Both are float32 evaluations of one function, which differ in the order of sums: PyTorch's distance from the double
/// evaluation is a sample of what that costs, and ours is allowed four times as much. What the file holds of the double
/// evaluation was rounded once more.
double bound_of(const FloatTensors& file, const std::string& name) {
  return 4 * double(file.at("error." + name).values[0]) + 0x1p-24 * largest(file.at("f64." + name).values);
}

struct Case {
  const char *file, *net;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.file; }

class FluxCase : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Diffusers, FluxCase,
                         testing::Values(Case{"dev", "dev"}, Case{"dev_text1", "dev"}, Case{"dev_text77", "dev"},
                                         Case{"schnell", "schnell"}, Case{"moe", "moe"}));

TEST_P(FluxCase, EveryModulesResult) {
  const FloatTensors file = io::read_float_tensors(tiny(std::string(GetParam().file) + ".safetensors"));
  const ImageCheckpoint checkpoint = ImageCheckpoint::open(tiny(GetParam().net));
  Net net(checkpoint, pool());
  const int64_t batch = file.at("in.hidden_states").dims[0];
  for (int64_t b = 0; b < batch; ++b) {
    const Results results = run(net, inputs_of(file, b));
    size_t compared = 0;
    for (const auto& [name, tensor] : file) {
      if (!name.starts_with("f64.")) continue;
      const std::string module = name.substr(4);
      ASSERT_TRUE(results.contains(module)) << module;
      EXPECT_LE(distance(results.at(module), row(tensor, b)), bound_of(file, module)) << module << " of sample " << b;
      ++compared;
    }
    EXPECT_EQ(compared, results.size());
  }
}

TEST_P(FluxCase, OutputInFloat32) {
  const FloatTensors file = io::read_float_tensors(tiny(std::string(GetParam().file) + ".safetensors"));
  const ImageCheckpoint checkpoint = ImageCheckpoint::open(tiny(GetParam().net));
  Net net(checkpoint, pool());
  const FloatTensor &plain = file.at("f32.sample"), &truth = file.at("f64.sample");
  for (int64_t b = 0; b < plain.dims[0]; ++b) {
    const double theirs = distance(plain.values, truth.values);
    EXPECT_LE(distance(run(net, inputs_of(file, b)).at("sample"), row(plain, b)), theirs + bound_of(file, "sample"));
  }
}

TEST_P(FluxCase, OutputInBf16) {
  const FloatTensors file = io::read_float_tensors(tiny(std::string(GetParam().file) + ".safetensors"));
  if (!file.contains("bf16.sample")) return;  // its inputs are not exact in BF16
  const ImageCheckpoint checkpoint = ImageCheckpoint::open(tiny(GetParam().net));
  Net net(checkpoint, pool());
  const FloatTensor& rounded = file.at("bf16.sample");
  for (int64_t b = 0; b < rounded.dims[0]; ++b) {
    const std::vector<float> ours = run(net, inputs_of(file, b)).at("sample");
    const std::span<const float> theirs = row(rounded, b);
    double difference = 0, size = 0;
    for (size_t i = 0; i < ours.size(); ++i) {
      difference += (ours[i] - theirs[i]) * (ours[i] - theirs[i]);
      size += ours[i] * ours[i];
    }
    // A rounding to BF16 costs 2^-9/sqrt(3) of a value on average; a path through a block has about 12 of them.
    const double blocks = double(net.config().n_double + net.config().n_single);
    EXPECT_LE(std::sqrt(difference / size), 3 * 0x1p-9 * std::sqrt(12 * (blocks + 1) / 3.0));
  }
}

TEST(FluxNet, BothNamingsGiveTheSameBits) {
  const FloatTensors file = io::read_float_tensors(tiny("dev.safetensors"));
  const ImageCheckpoint ours = ImageCheckpoint::open(tiny("dev")), theirs = ImageCheckpoint::open(tiny("original"));
  EXPECT_EQ(naming_of(ours), Naming::diffusers);
  EXPECT_EQ(naming_of(theirs), Naming::original);
  Net a(ours, pool()), b(theirs, pool());
  EXPECT_EQ(run(a, inputs_of(file, 1)), run(b, inputs_of(file, 1)));
}

/// A folder with config.json and the tensors as F32, changed by `change`.
struct Folder {
  test::TempDir dir;
  std::string path() const { return dir.path().string(); }
  explicit Folder(const std::string& net, const std::function<void(FloatTensors&)>& change = {}) {
    FloatTensors tensors = io::read_float_tensors(tiny(net + "/diffusion_pytorch_model.safetensors"));
    if (change) change(tensors);
    io::write_float_tensors(dir.file("diffusion_pytorch_model.safetensors"), tensors);
    std::filesystem::copy_file(tiny(net + "/config.json"), dir.file("config.json"));
  }
};

TEST(FluxNet, WeightsInF32GiveTheSameBitsAsInBf16) {
  const FloatTensors file = io::read_float_tensors(tiny("schnell.safetensors"));
  const Folder folder("schnell");
  const ImageCheckpoint wide = ImageCheckpoint::open(folder.path()), narrow = ImageCheckpoint::open(tiny("schnell"));
  Net a(wide, pool()), b(narrow, pool());
  EXPECT_EQ(run(a, inputs_of(file, 0)), run(b, inputs_of(file, 0)));
}

TEST(FluxNet, GgufFilesGiveTheSameBits) {
  const FloatTensors file = io::read_float_tensors(tiny("schnell.safetensors"));
  const ImageCheckpoint source = ImageCheckpoint::open(tiny("schnell"));
  test::TempDir dir;
  const auto write = [&](const std::string& name, const char* architecture) {
    io::Metadata metadata;
    metadata.set("general.architecture", std::string(architecture));
    metadata.set(std::string(io::kImageConfigKey), source.config());
    std::vector<io::TensorPlan> plans;
    for (const auto& [tensor_name, tensor] : source.tensors())
      plans.push_back({tensor_name, tensor.layout, tensor.dims});
    io::GgufWriter writer(dir.file(name), metadata, plans);
    for (const auto& [tensor_name, tensor] : source.tensors()) writer.write(tensor.bytes);
    writer.finish();
    return dir.file(name);
  };
  const ImageCheckpoint packed = ImageCheckpoint::open(write("net.gguf", "flux"));
  Net a(source, pool()), b(packed, pool());
  EXPECT_EQ(run(a, inputs_of(file, 0)), run(b, inputs_of(file, 0)));
  EXPECT_THROW(ImageCheckpoint::open(write("other.gguf", "llama")), Error);
}

TEST(FluxNet, AnyNumberOfThreads) {
  const FloatTensors file = io::read_float_tensors(tiny("dev_text77.safetensors"));
  const ImageCheckpoint checkpoint = ImageCheckpoint::open(tiny("dev"));
  for (const int threads : {1, 3}) {
    ThreadPool own(threads);
    Net net(checkpoint, own);
    EXPECT_LE(distance(run(net, inputs_of(file, 0)).at("sample"), file.at("f64.sample").values),
              bound_of(file, "sample"));
  }
}

TEST(FluxNet, ShapesListWhatFilesHold) {
  for (const char* name : {"dev", "schnell", "moe"}) {
    const ImageCheckpoint checkpoint = ImageCheckpoint::open(tiny(name));
    std::map<std::string, layout::Shape> shapes;
    for (const TensorShape& tensor : tensor_shapes(read_config(checkpoint))) shapes.emplace(tensor.name, tensor.shape);
    EXPECT_EQ(shapes.size(), checkpoint.tensors().size()) << name;
    for (const auto& [tensor_name, tensor] : checkpoint.tensors()) {
      ASSERT_TRUE(shapes.contains(tensor_name)) << name << ' ' << tensor_name;
      EXPECT_EQ(shapes.at(tensor_name), tensor.shape) << name << ' ' << tensor_name;
    }
  }
}

TEST(FluxNet, RandomNetsRun) {
  const ImageShape& shape = find_image_shape("tiny");
  const ImageCheckpoint checkpoint =
      random_checkpoint(shape.name, shape.config, io::ImagePolicy::load("bf16"), 1, pool());
  Net net(checkpoint, pool());
  EXPECT_EQ(net.config(), shape.config);
  const std::vector<float> latents(6 * 64, 0.5f), text(2 * 256, 0.25f), pooled(256, 1.0f), text_ids(6, 0.0f);
  const std::vector<float> ids = image_ids({16, 4, 6});
  std::vector<float> out(latents.size());
  net.predict({latents, text, pooled, 0.5, 3.5, ids, text_ids}, out);
  EXPECT_GT(largest(out), 0.01);
  // The sizes that the shapes are known by.
  EXPECT_NEAR(double(count_parameters(find_image_shape("flux.1-dev").config)), 11.9e9, 0.05e9);
  EXPECT_NEAR(double(count_parameters(find_image_shape("flux-moe-18b").config)), 18e9, 0.5e9);
  EXPECT_THROW(find_image_shape("flux"), Error);
}

// ---- what is refused ----

std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

std::string load_message(const std::string& path) {
  return message_of([&] {
    const ImageCheckpoint checkpoint = ImageCheckpoint::open(path);
    const Net net(checkpoint, pool());
  });
}

TEST(FluxRefuses, TensorsThatDoNotFit) {
  const std::string norm = "transformer_blocks.0.attn.norm_added_k.weight";
  const auto message = [](const std::function<void(FloatTensors&)>& change) {
    return load_message(Folder("schnell", change).path());
  };
  EXPECT_EQ(message([](FloatTensors&) {}), "nothing was thrown");
  EXPECT_THAT(message([&](FloatTensors& t) { t.erase(norm); }),
              testing::AllOf(testing::HasSubstr(norm), testing::HasSubstr("missing")));
  EXPECT_THAT(message([&](FloatTensors& t) { t.erase("proj_out.bias"); }), testing::HasSubstr("proj_out.bias"));
  EXPECT_THAT(message([&](FloatTensors& t) {
                t[norm] = {{8}, std::vector<float>(8, 1.0f)};
              }),
              testing::AllOf(testing::HasSubstr(norm), testing::HasSubstr("1 x 8"), testing::HasSubstr("1 x 16"),
                             testing::HasSubstr("diffusion_pytorch_model.safetensors")));
  EXPECT_THAT(message([](FloatTensors& t) {
                t["proj_out.weight"].dims = {32, 8};
              }),
              testing::AllOf(testing::HasSubstr("proj_out.weight"), testing::HasSubstr("32 x 8")));
  EXPECT_THAT(message([](FloatTensors& t) {
                t["controlnet.weight"] = {{1}, {1.0f}};
              }),
              testing::HasSubstr("controlnet.weight"));
  EXPECT_THAT(message([](FloatTensors& t) { t["x_embedder.weight"].values[3] = NAN; }),
              testing::AllOf(testing::HasSubstr("x_embedder.weight"), testing::HasSubstr("not finite")));
  EXPECT_THAT(message([](FloatTensors& t) { t["x_embedder.bias"].values[3] = INFINITY; }),
              testing::AllOf(testing::HasSubstr("x_embedder.bias"), testing::HasSubstr("not finite")));
  EXPECT_THAT(message([](FloatTensors& t) { t.erase("x_embedder.weight"); }), testing::HasSubstr("img_in.weight"));
}

TEST(FluxRefuses, FilesThatAreNoNet) {
  test::TempDir dir;
  EXPECT_THAT(load_message(dir.path().string()), testing::HasSubstr("no .safetensors"));
  EXPECT_THAT(load_message(dir.file("absent.safetensors")), testing::HasSubstr("absent.safetensors"));
  // Without the config.json beside it.
  const std::string alone = dir.file("alone.safetensors");
  std::filesystem::copy_file(tiny("dev/diffusion_pytorch_model.safetensors"), alone);
  EXPECT_THAT(load_message(alone), testing::HasSubstr("config.json"));
  // A file of the first release has none, but heads of 10 have no known rope axes.
  EXPECT_THAT(load_message(tiny("original/flux1-dev.safetensors")),
              testing::AllOf(testing::HasSubstr("axes_dims_rope"), testing::HasSubstr("10")));
  // Cut short.
  const std::string whole = test::read_text(alone), cut = dir.file("cut.safetensors");
  std::ofstream(cut, std::ios::binary).write(whole.data(), std::streamsize(whole.size() / 2));
  EXPECT_THAT(load_message(cut), testing::HasSubstr("cut.safetensors"));
  // Two files and nothing that says which.
  EXPECT_THAT(load_message(dir.path().string()), testing::HasSubstr("name one of them"));
}

TEST(FluxRefuses, ValuesThatLeaveFloat32) {
  const FloatTensors file = io::read_float_tensors(tiny("schnell.safetensors"));
  const Folder folder("schnell", [](FloatTensors& t) {
    for (const char* name : {"proj_mlp", "proj_out"})
      for (float& v : t[fmt::format("single_transformer_blocks.0.{}.weight", name)].values) v *= 1e30f;
  });
  const ImageCheckpoint checkpoint = ImageCheckpoint::open(folder.path());
  Net net(checkpoint, pool());
  EXPECT_THAT(message_of([&] { run(net, inputs_of(file, 0)); }),
              testing::AllOf(testing::HasSubstr("single_transformer_blocks.0"), testing::HasSubstr("not finite")));
}

TEST(FluxRefuses, InputsThatDoNotFit) {
  const FloatTensors file = io::read_float_tensors(tiny("dev.safetensors"));
  const ImageCheckpoint checkpoint = ImageCheckpoint::open(tiny("dev"));
  Net net(checkpoint, pool());
  const auto message = [&](const std::function<void(Inputs&)>& change) {
    return message_of([&] {
      Inputs inputs = inputs_of(file, 0);
      change(inputs);
      std::vector<float> out(6 * 8);
      net.predict(inputs, out);
    });
  };
  EXPECT_EQ(message([](Inputs&) {}), "nothing was thrown");
  EXPECT_THAT(message([](Inputs& i) { i.latents = i.latents.first(7); }), testing::HasSubstr("latents"));
  EXPECT_THAT(message([](Inputs& i) { i.latents = i.latents.first(8); }), testing::HasSubstr("image ids"));
  EXPECT_THAT(message([](Inputs& i) { i.text = {}; }), testing::HasSubstr("text embeddings"));
  EXPECT_THAT(message([](Inputs& i) { i.text_ids = i.text_ids.first(3); }), testing::HasSubstr("text ids"));
  EXPECT_THAT(message([](Inputs& i) { i.pooled = i.pooled.first(3); }), testing::HasSubstr("pooled"));
}

TEST(FluxConfig, RefusesWhatIsNotRun) {
  const auto message = [](const std::string& text) { return message_of([&] { parse_config(text, "config.json"); }); };
  EXPECT_EQ(message("{}"), "nothing was thrown");
  for (const auto& [text, part] : std::map<std::string, std::string>{
           {R"({"_class_name": "SD3Transformer2DModel"})", "SD3Transformer2DModel"},
           {R"({"patch_size": 2})", "patch_size"},
           {R"({"mlp_ratio": 3.0})", "mlp_ratio"},
           {R"({"axes_dims_rope": [16, 56, 54]})", "126"},
           {R"({"axes_dims_rope": [15, 57, 56]})", "even"},
           {R"({"axes_dims_rope": [16, "x"]})", "axes_dims_rope"},
           {R"({"num_layers": -1})", "num_layers"},
           {R"({"num_layers": 0, "num_single_layers": 0})", "no blocks"},
           {R"({"num_attention_heads": 0})", "num_attention_heads"},
           {R"({"num_attention_heads": 16777216})", "heads"},
           {R"({"in_channels": "64"})", "in_channels"},
           {R"({"moe_num_experts": 4, "moe_top_k": 5, "moe_intermediate_size": 8})", "moe_top_k"},
           {R"({"moe_num_experts": 4, "moe_intermediate_size": 8})", "moe_top_k"},
           {"[]", "config.json"}})
    EXPECT_THAT(message(text), testing::HasSubstr(part)) << text;
}

TEST(FluxConfig, SurvivesText) {
  for (const ImageShape& shape : known_image_shapes())
    EXPECT_EQ(parse_config(format_config(shape.config), "text"), shape.config) << shape.name;
}

TEST(FluxConfig, FollowsFromShapes) {
  test::TempDir dir;
  const std::string path = dir.file("flux1.safetensors");
  FloatTensors tensors;
  const auto add = [&](const std::string& name, std::vector<int64_t> dims) {
    int64_t count = 1;
    for (const int64_t dim : dims) count *= dim;
    tensors[name] = {std::move(dims), std::vector<float>(size_t(count))};
  };
  add("img_in.weight", {256, 12});
  add("txt_in.weight", {256, 20});
  add("vector_in.in_layer.weight", {256, 7});
  add("guidance_in.in_layer.weight", {256, 256});
  add("final_layer.linear.weight", {8, 256});
  add("double_blocks.0.img_attn.norm.query_norm.scale", {128});
  add("double_blocks.0.img_mlp.0.weight", {1024, 2});
  for (const char* block : {"0", "1"}) add(fmt::format("double_blocks.{}.img_attn.qkv.weight", block), {2});
  for (const char* block : {"0", "1", "2"}) add(fmt::format("single_blocks.{}.linear1.weight", block), {2});
  io::write_float_tensors(path, tensors);
  const Config config = read_config(ImageCheckpoint::open(path));
  Config expected;
  expected.in_channels = 12;
  expected.out_channels = 8;
  expected.n_double = 2;
  expected.n_single = 3;
  expected.n_heads = 2;
  expected.text_dim = 20;
  expected.pooled_dim = 7;
  expected.mlp_width = 1024;
  expected.guidance = true;
  EXPECT_EQ(config, expected);
}

// ---- experts ----

TEST(FluxRoute, SortsTokensByExpert) {
  const MoeConfig config{4, 2, 8, true};
  // Expert 2 wins every token, a tie goes to the lower one; nobody asks for expert 3.
  const std::vector<float> logits = {0, 1, 5, -1, 2, 2, 9, -3, 7, 0, 8, -100};
  const Routing routing = route(logits, config);
  EXPECT_EQ(routing.offsets, (std::vector<int64_t>{0, 2, 3, 6, 6}));
  EXPECT_EQ(routing.token, (std::vector<int64_t>{1, 2, 0, 0, 1, 2}));
  const double first = 1 / (1 + std::exp(7.0)), third = 1 / (1 + std::exp(1.0)), second = 1 / (1 + std::exp(4.0));
  const std::vector<double> weights = {first, third, second, 1 - second, 1 - first, 1 - third};
  for (size_t i = 0; i < weights.size(); ++i) EXPECT_NEAR(routing.weight[i], weights[i], 0x1p-24) << i;
}

TEST(FluxRoute, KeepsProbabilitiesWhereTheyAreNotNormalized) {
  const Routing routing = route(std::vector<float>{0, 0, 0, 0}, {4, 2, 8, false});
  EXPECT_EQ(routing.weight, (std::vector<float>{0.25f, 0.25f}));
  EXPECT_EQ(routing.token, (std::vector<int64_t>{0, 0}));
}

TEST(FluxRoute, NoTokens) {
  const Routing routing = route({}, {4, 2, 8, true});
  EXPECT_EQ(routing.offsets, std::vector<int64_t>(5, 0));
  EXPECT_TRUE(routing.token.empty());
}

// ---- the loop ----

TEST(FluxSampler, NoiseLevelsAreDiffusers) {
  for (const auto& row : nlohmann::json::parse(test::read_text(tiny("sigmas.json")))) {
    const Schedule schedule = parse_schedule(row["settings"].dump(), "settings");
    const auto expected = row["sigmas"].get<std::vector<double>>();
    const std::vector<float> levels = noise_levels(schedule, row["steps"], row["tokens"]);
    ASSERT_EQ(levels.size(), expected.size());
    // Theirs are rounded to float32 before and after the shift: relative 2^-24, which the shift raises by its factor.
    for (size_t i = 0; i < levels.size(); ++i)
      EXPECT_NEAR(levels[i], expected[i], 8 * 0x1p-24) << row["tokens"] << ' ' << i;
  }
  EXPECT_EQ(noise_levels(usual_schedule(false), 4, 99), (std::vector<float>{1, 0.75f, 0.5f, 0.25f, 0}));
  EXPECT_EQ(noise_levels(usual_schedule(true), 1, 4096), (std::vector<float>{1, 0}));
}

TEST(FluxSampler, SchedulesThatAreNotRun) {
  for (const auto& [text, part] :
       std::map<std::string, std::string>{{R"({"_class_name": "DDIMScheduler"})", "DDIMScheduler"},
                                          {R"({"use_karras_sigmas": true})", "use_karras_sigmas"},
                                          {R"({"shift_terminal": 0.02})", "shift_terminal"},
                                          {R"({"time_shift_type": "linear"})", "time_shift_type"},
                                          {R"({"shift": 0})", "shift"},
                                          {R"({"base_image_seq_len": 4096})", "4096"}})
    EXPECT_THAT(message_of([&] { parse_schedule(text, "s.json"); }), testing::HasSubstr(part)) << text;
}

TEST(FluxSampler, PacksAsDiffusers) {
  const FloatTensors file = io::read_float_tensors(tiny("denoise.safetensors"));
  const LatentShape shape{2, 4, 6};
  const std::vector<float> packed = pack_latents(file.at("in.latents").values, shape);
  EXPECT_EQ(packed, file.at("packed").values);
  EXPECT_EQ(unpack_latents(packed, shape), file.at("in.latents").values);
  const FloatTensors dev = io::read_float_tensors(tiny("dev.safetensors"));
  EXPECT_EQ(image_ids({2, 4, 6}), dev.at("in.img_ids").values);
}

TEST(FluxSampler, FourStepsAreDiffusers) {
  const FloatTensors file = io::read_float_tensors(tiny("denoise.safetensors"));
  const ImageCheckpoint checkpoint = ImageCheckpoint::open(tiny("dev"));
  Net net(checkpoint, pool());
  const LatentShape shape{2, 4, 6};
  std::vector<float> x = pack_latents(file.at("in.latents").values, shape), direction(x.size());
  const std::vector<float> levels = noise_levels(usual_schedule(true), 4, shape.tokens());
  EXPECT_LE(distance(levels, file.at("sigmas").values), 8 * 0x1p-24);
  const std::vector<float> text_ids(7 * 3, 0.0f), ids = image_ids(shape);
  for (size_t i = 0; i < 4; ++i) {
    net.predict({x, file.at("in.prompt_embeds").values, file.at("in.pooled_prompt_embeds").values, levels[i],
                 file.at("in.guidance").values[0], ids, text_ids},
                direction);
    euler_step(x, direction, levels[i], levels[i + 1]);
  }
  EXPECT_LE(distance(x, file.at("f64.latents").values), bound_of(file, "latents"));
  EXPECT_LE(distance(unpack_latents(x, shape), file.at("f64.unpacked").values), bound_of(file, "latents"));
}

TEST(FluxSampler, NoiseIsNormalAndItsOwnForEachImage) {
  const LatentShape shape{16, 64, 64};
  const std::vector<float> a = random_latents(shape, 7, 0), b = random_latents(shape, 7, 1);
  EXPECT_EQ(a, random_latents(shape, 7, 0));
  EXPECT_NE(a, b);
  EXPECT_NE(a, random_latents(shape, 8, 0));
  double sum = 0, squares = 0, product = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i], squares += double(a[i]) * a[i], product += double(a[i]) * b[i];
  const double n = double(a.size()), five = 5 / std::sqrt(n);  // five deviations
  EXPECT_NEAR(sum / n, 0, five);
  EXPECT_NEAR(squares / n, 1, five * std::sqrt(2.0));
  EXPECT_NEAR(product / n, 0, five);
}

}  // namespace
}  // namespace lacuna::model::flux
