#include "cli/image_case.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/rng.h"
#include "io/image_policy.h"
#include "model/flux/sampler.h"
#include "model/flux/synth.h"

namespace lacuna::cli {
namespace {

/// "HEIGHTxWIDTH" or "HEIGHTxWIDTHxBATCH".
StepSize parse_size(const std::string& text) {
  StepSize out;
  char left = 0;
  const int read = std::sscanf(text.c_str(), "%ldx%ldx%ld%c", &out.height, &out.width, &out.batch, &left);
  const auto is_side = [](int64_t side) { return image_side()(std::to_string(side)).empty(); };
  const auto digits = std::string_view("0123456789x");
  if (read < 2 || read > 3 || text.find_first_not_of(digits) != text.npos || text.back() == 'x' ||
      !is_side(out.height) || !is_side(out.width) || out.batch < 1 || out.batch > 1024)
    throw Error(
        "'{}' is no size of a step: HEIGHTxWIDTH or HEIGHTxWIDTHxBATCH, in pixels, multiples of {}; at most 1024 "
        "images",
        text, kPixelsPerToken);
  return out;
}

constexpr const char* kLayersHelp = "expected two numbers from 0 to 4096, double and single blocks, such as 2,4";

/// "DOUBLE,SINGLE".
std::optional<std::pair<int64_t, int64_t>> parse_layers(const std::string& text) {
  const size_t comma = text.find(',');
  if (comma == text.npos) return std::nullopt;
  const std::string both[] = {text.substr(0, comma), text.substr(comma + 1)};
  for (const std::string& one : both)
    if (one.empty() || one.size() > 4 || one.find_first_not_of("0123456789") != one.npos || std::stoi(one) > 4096)
      return std::nullopt;
  return std::pair(int64_t{std::stoi(both[0])}, int64_t{std::stoi(both[1])});
}

std::vector<float> random_values(int64_t count, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& value : out) value = float(rng.normal());
  return out;
}

std::string policy_help() {
  return "layouts of the random matrices: a policy file, or one of " + io::image_policy_names() +
         "; matrices of one kind have the same values in all blocks";
}

}  // namespace

std::vector<StepSize> CaseOptions::steps() const {
  std::vector<StepSize> out;
  for (const std::string& text : sizes) out.push_back(parse_size(text));
  return out;
}

model::flux::CudaNetOptions CaseOptions::largest() const {
  const std::vector<StepSize> all = steps();
  const StepSize& most =
      *std::ranges::max_element(all, {}, [&](const StepSize& s) { return s.batch * (s.tokens() + text_tokens); });
  return {.images = most.batch, .text_tokens = text_tokens, .image_tokens = most.tokens()};
}

void add_case(CLI::App& command, CaseOptions& options) {
  std::string names;
  for (const model::flux::ImageShape& shape : model::flux::known_image_shapes())
    names += (names.empty() ? "" : ", ") + std::string(shape.name);
  CLI::Option* model = command.add_option("MODEL", options.model, "as for `image step`");
  CLI::Option* synthetic =
      command.add_option("--synthetic", options.synthetic, "random weights of one of " + names)->type_name("SHAPE");
  model->excludes(synthetic);
  command.add_option("--layers", options.layers, "only so many double and single blocks, e.g. 2,4")
      ->check(CLI::Validator([](std::string& text) { return parse_layers(text) ? "" : kLayersHelp; }, ""))
      ->needs(synthetic)
      ->type_name("D,S");
  command
      .add_option("--size", options.sizes,
                  "heights and widths in pixels, and the images in a step where they are several (together on a CUDA "
                  "device), e.g. 512x512,1024x1024x4")
      ->delimiter(',')
      ->check(CLI::Validator(
          [](std::string& text) {
            try {
              parse_size(text);
            } catch (const Error& error) {
              return std::string(error.what());
            }
            return std::string();
          },
          ""))
      ->capture_default_str()
      ->type_name("HxW[xB]");
  command.add_option("--text-tokens", options.text_tokens, "tokens of the prompt")
      ->check(integer_in(1, 65536))
      ->capture_default_str()
      ->type_name("N");
  add_seed(command, options.seed, "start of the random numbers");
}

CLI::Option* add_case_policy(CLI::App& command, std::string& policy) {
  return command.add_option("--policy", policy, policy_help())
      ->needs(command.get_option("--synthetic"))
      ->capture_default_str()
      ->type_name("NAME|FILE");
}

CLI::Option* add_case_policies(CLI::App& command, std::vector<std::string>& policies) {
  return command.add_option("--policy", policies, policy_help() + "; several: a net of each")
      ->delimiter(',')
      ->needs(command.get_option("--synthetic"))
      ->capture_default_str()
      ->type_name("NAME|FILE");
}

void check_case(const CaseOptions& options) {
  if (options.model.empty() && options.synthetic.empty())
    throw Error("nothing to measure: name a MODEL or give --synthetic SHAPE");
}

io::ImageCheckpoint open_case(const CaseOptions& options, const std::string& policy, ThreadPool& pool) {
  if (options.synthetic.empty()) return io::ImageCheckpoint::open(options.model);
  model::flux::Config config = model::flux::find_image_shape(options.synthetic).config;
  if (const auto layers = parse_layers(options.layers)) std::tie(config.n_double, config.n_single) = *layers;
  model::flux::check_config(config, "--layers");
  return model::flux::random_checkpoint(options.synthetic, config, io::ImagePolicy::load(policy), options.seed, pool);
}

RandomStep::RandomStep(const model::flux::Config& config, const StepSize& size, const CaseOptions& options) {
  const int64_t rows = size.height / kPixelsPerToken, columns = size.width / kPixelsPerToken;
  const size_t axes = config.rope_axes.size();
  if (axes != 3) throw Error("the net has {} rope axes; latents of images have 3 coordinates", axes);
  const int64_t B = size.batch;
  latents = random_values(B * size.tokens() * config.in_channels, options.seed + 1);
  text = random_values(B * options.text_tokens * config.text_dim, options.seed + 2);
  pooled = random_values(B * config.pooled_dim, options.seed + 3);
  image_ids = model::flux::image_ids({1, 2 * rows, 2 * columns});
  text_ids.resize(size_t(options.text_tokens) * axes);
  const auto part = [&](const std::vector<float>& of, int64_t b) {
    return std::span(of).subspan(of.size() / size_t(B) * size_t(b), of.size() / size_t(B));
  };
  for (int64_t b = 0; b < B; ++b)
    images.push_back({part(latents, b), part(text, b), part(pooled, b), 0.5, 3.5, image_ids, text_ids});
}

}  // namespace lacuna::cli
