#include "io/image_policy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>

#include "core/error.h"
#include "core/files.h"
#include "io/hf_tokenizer.h"
#include "io/json.h"

namespace lacuna::io {

namespace {

using layout::Id;

constexpr int64_t kVersion = 1;
constexpr std::string_view kSource = "source";
constexpr std::array kLayouts = {Id::f8, Id::nm24_f8, Id::nm24_bf16, Id::bf16, Id::f16, Id::f32};

constexpr std::string_view kImage[] = {
    "transformer_blocks.*.attn.to_q.weight",
    "transformer_blocks.*.attn.to_k.weight",
    "transformer_blocks.*.attn.to_v.weight",
    "transformer_blocks.*.attn.to_out.0.weight",
    "transformer_blocks.*.ff.net.0.proj.weight",
    "transformer_blocks.*.ff.net.2.weight",
    "double_blocks.*.img_attn.qkv.weight",
    "double_blocks.*.img_attn.proj.weight",
    "double_blocks.*.img_mlp.0.weight",
    "double_blocks.*.img_mlp.2.weight",
    "transformer_blocks.*.ff.experts.*.net.0.proj.weight",
    "transformer_blocks.*.ff.experts.*.net.2.weight",
};
constexpr std::string_view kSingle[] = {
    "single_transformer_blocks.*.attn.to_q.weight",
    "single_transformer_blocks.*.attn.to_k.weight",
    "single_transformer_blocks.*.attn.to_v.weight",
    "single_transformer_blocks.*.proj_mlp.weight",
    "single_transformer_blocks.*.proj_out.weight",
    "single_transformer_blocks.*.ff.experts.*.net.0.proj.weight",
    "single_transformer_blocks.*.ff.experts.*.net.2.weight",
    "single_blocks.*.linear1.weight",
    "single_blocks.*.linear2.weight",
};
constexpr std::string_view kText[] = {
    "transformer_blocks.*.attn.add_q_proj.weight",
    "transformer_blocks.*.attn.add_k_proj.weight",
    "transformer_blocks.*.attn.add_v_proj.weight",
    "transformer_blocks.*.attn.to_add_out.weight",
    "transformer_blocks.*.ff_context.net.0.proj.weight",
    "transformer_blocks.*.ff_context.net.2.weight",
    "double_blocks.*.txt_attn.qkv.weight",
    "double_blocks.*.txt_attn.proj.weight",
    "double_blocks.*.txt_mlp.0.weight",
    "double_blocks.*.txt_mlp.2.weight",
};

struct BuiltIn {
  std::string_view name;
  std::optional<Id> image, text;  // of the image modality and single blocks; nullopt: the rest's
};
constexpr BuiltIn kBuiltIn[] = {{"quaspa", Id::nm24_f8, Id::f8},
                                {"f8", Id::f8, Id::f8},
                                {"nm24_bf16", Id::nm24_bf16, std::nullopt},
                                {"bf16", std::nullopt, std::nullopt}};

std::string text_of(const BuiltIn& policy) {
  std::string rules;
  const auto add = [&](std::span<const std::string_view> names, std::optional<Id> id) {
    for (const std::string_view name : names)
      if (id)
        rules += fmt::format("{}\n    {{\"name\": \"{}\", \"layout\": \"{}\"}}", rules.empty() ? "" : ",", name,
                             layout::get(*id).name);
  };
  add(kImage, policy.image);
  add(kSingle, policy.image);
  add(kText, policy.text);
  return fmt::format("{{\n  \"version\": {},\n  \"rules\": [{}{}],\n  \"rest\": \"bf16\"\n}}\n", kVersion, rules,
                     rules.empty() ? "" : "\n  ");
}

/// nullptr: as it is stored.
const layout::Layout* read_layout(const std::string& name, const std::string& where) {
  if (name == kSource) return nullptr;
  std::string known(kSource);
  for (const Id id : kLayouts) {
    if (layout::get(id).name == name) return &layout::get(id);
    known += fmt::format(", {}", layout::get(id).name);
  }
  throw Error("{}: unknown layout \"{}\"; a policy has {}", where, name, known);
}

void refuse_other_keys(const nlohmann::json& object, std::initializer_list<std::string_view> known,
                       const std::string& where) {
  for (const auto& [key, value] : object.items())
    if (std::find(known.begin(), known.end(), key) == known.end())
      throw Error("{}: unknown key \"{}\"; known are {}", where, key, fmt::join(known, ", "));
}

}  // namespace

bool matches_name(std::string_view pattern, std::string_view name) {
  size_t at = 0, in = 0, star = pattern.npos, from = 0;
  while (in < name.size()) {
    if (at < pattern.size() && pattern[at] == '*') {
      star = at++;
      from = in;
    } else if (at < pattern.size() && pattern[at] == name[in]) {
      ++at, ++in;
    } else if (star != pattern.npos && name[from] != '.') {  // the star takes one more
      at = star + 1;
      in = ++from;
    } else {
      return false;
    }
  }
  while (at < pattern.size() && pattern[at] == '*') ++at;
  return at == pattern.size();
}

std::string image_policy_names() {
  std::string out;
  for (const BuiltIn& policy : kBuiltIn) out += (out.empty() ? "" : ", ") + std::string(policy.name);
  return out;
}

ImagePolicy ImagePolicy::parse(std::string_view text, const std::string& where) {
  const nlohmann::json json = parse_json_object(text, where);
  const JsonObject object(json, where);
  refuse_other_keys(json, {"version", "rules", "rest"}, where);
  if (const int64_t version = object.need_integer("version"); version != kVersion)
    throw Error("{}: version {} of policies is not supported, only {} is", where, version, kVersion);
  ImagePolicy out;
  out.name_ = where;
  out.text_ = text;
  for (const nlohmann::json& entry : object.need_array("rules")) {
    const std::string at = fmt::format("{}: rule {}", where, out.rules_.size());
    if (!entry.is_object()) throw Error("{}: must be an object with \"name\" and \"layout\"", at);
    refuse_other_keys(entry, {"name", "layout"}, at);
    const JsonObject rule(entry, at);
    out.rules_.push_back({rule.need_string("name"), read_layout(rule.need_string("layout"), at)});
    if (out.rules_.back().name.empty()) throw Error("{}: the name is empty", at);
  }
  out.rest_ = read_layout(object.need_string("rest"), where + ": rest");
  return out;
}

ImagePolicy ImagePolicy::load(const std::string& name_or_path) {
  for (const BuiltIn& policy : kBuiltIn) {
    if (policy.name != name_or_path) continue;
    ImagePolicy out = parse(text_of(policy), std::string(policy.name));
    out.built_in_ = true;
    return out;
  }
  if (!file_exists(name_or_path))
    throw Error("{}: is neither a policy file nor one of the policies {}", name_or_path, image_policy_names());
  return parse(read_file(name_or_path), name_or_path);
}

ImagePolicy::Choice ImagePolicy::choose(std::string_view tensor) const {
  for (size_t i = 0; i < rules_.size(); ++i)
    if (matches_name(rules_[i].name, tensor)) return {rules_[i].layout, int(i)};
  return {rest_, -1};
}

}  // namespace lacuna::io
