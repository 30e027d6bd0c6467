#include "model/flux/sampler.h"

#include <cassert>
#include <cmath>

#include "core/error.h"
#include "core/rng.h"
#include "io/json.h"

namespace lacuna::model::flux {

Schedule usual_schedule(bool guidance) {
  Schedule out;
  if (!guidance) {
    out.dynamic = false;
    out.shift = 1;
  }
  return out;
}

Schedule parse_schedule(const std::string& text, const std::string& where) {
  const nlohmann::json whole = io::parse_json_object(text, where);
  const io::JsonObject json(whole, where);
  constexpr const char* kClass = "FlowMatchEulerDiscreteScheduler";
  if (const auto name = json.string("_class_name"); name && *name != kClass)
    throw Error("{}: _class_name is {}; only {} is run", where, *name, kClass);
  for (const char* key :
       {"invert_sigmas", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "stochastic_sampling"})
    if (json.boolean(key).value_or(false)) throw Error("{}: {} is true, which this program does not run", where, key);
  if (const double terminal = json.number("shift_terminal").value_or(0); terminal != 0)
    throw Error("{}: shift_terminal = {}, which this program does not run", where, terminal);
  if (const std::string type = json.string("time_shift_type").value_or("exponential"); type != "exponential")
    throw Error("{}: time_shift_type is {}; only exponential is run", where, type);
  Schedule out;
  out.dynamic = json.boolean("use_dynamic_shifting").value_or(false);
  out.shift = json.number("shift").value_or(1.0);
  out.base_shift = json.number("base_shift").value_or(out.base_shift);
  out.max_shift = json.number("max_shift").value_or(out.max_shift);
  out.base_tokens = json.integer("base_image_seq_len").value_or(out.base_tokens);
  out.max_tokens = json.integer("max_image_seq_len").value_or(out.max_tokens);
  if (!(out.shift > 0)) throw Error("{}: shift = {}, expected a number above 0", where, out.shift);
  if (out.base_tokens == out.max_tokens)
    throw Error("{}: base_image_seq_len and max_image_seq_len are both {}, so no line goes through them", where,
                out.max_tokens);
  return out;
}

std::vector<float> noise_levels(const Schedule& schedule, int64_t steps, int64_t tokens) {
  assert(steps >= 1);
  const double slope = (schedule.max_shift - schedule.base_shift) / double(schedule.max_tokens - schedule.base_tokens);
  const double factor =
      schedule.dynamic ? std::exp(schedule.base_shift + slope * double(tokens - schedule.base_tokens)) : schedule.shift;
  std::vector<float> out;
  for (int64_t i = 0; i < steps; ++i) {
    const double level = 1 - double(i) / double(steps);
    out.push_back(float(factor * level / (1 + (factor - 1) * level)));  // both forms: factor / (factor + 1/s - 1)
  }
  out.push_back(0);
  return out;
}

void euler_step(std::span<float> x, std::span<const float> direction, float level, float next) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += (next - level) * direction[i];
}

namespace {

/// Calls body(index among the latents, index among the tokens' values).
template <class Body>
void for_values(const LatentShape& s, const Body& body) {
  const int64_t columns = s.width / 2;
  for (int64_t c = 0; c < s.channels; ++c) {
    for (int64_t y = 0; y < s.height; ++y) {
      for (int64_t x = 0; x < s.width; ++x) {
        const int64_t token = y / 2 * columns + x / 2;
        body(size_t((c * s.height + y) * s.width + x), size_t((token * s.channels + c) * 4 + y % 2 * 2 + x % 2));
      }
    }
  }
}

}  // namespace

std::vector<float> pack_latents(std::span<const float> latents, const LatentShape& shape) {
  assert(shape.height % 2 == 0 && shape.width % 2 == 0 && int64_t(latents.size()) == shape.values());
  std::vector<float> out(latents.size());
  for_values(shape, [&](size_t latent, size_t token) { out[token] = latents[latent]; });
  return out;
}

std::vector<float> unpack_latents(std::span<const float> tokens, const LatentShape& shape) {
  assert(shape.height % 2 == 0 && shape.width % 2 == 0 && int64_t(tokens.size()) == shape.values());
  std::vector<float> out(tokens.size());
  for_values(shape, [&](size_t latent, size_t token) { out[latent] = tokens[token]; });
  return out;
}

std::vector<float> image_ids(const LatentShape& shape) {
  std::vector<float> out;
  for (int64_t row = 0; row < shape.height / 2; ++row)
    for (int64_t column = 0; column < shape.width / 2; ++column)
      out.insert(out.end(), {0.0f, float(row), float(column)});
  return out;
}

std::vector<float> random_latents(const LatentShape& shape, uint64_t seed, int64_t image) {
  Rng seeds(seed);
  uint64_t own = seeds.next();
  for (int64_t i = 0; i < image; ++i) own = seeds.next();
  Rng rng(own);
  std::vector<float> out(size_t(shape.values()));
  for (float& value : out) value = float(rng.normal());
  return out;
}

}  // namespace lacuna::model::flux
