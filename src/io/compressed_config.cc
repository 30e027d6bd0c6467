#include "io/compressed_config.h"

#include <algorithm>
#include <cctype>

#include "core/error.h"
#include "io/import_tensors.h"
#include "io/json.h"

namespace lacuna::io {

namespace {

using nlohmann::json;

constexpr int kBits[] = {2, 3, 4, 5, 6, 7, 8};
constexpr std::string_view kRegex = "re:";

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  return text;
}

void check_format(const std::string& format, const std::string& where) {
  if (format != "pack-quantized" && format != "int-quantized" && format != "naive-quantized")
    throw Error(
        "{}: format \"{}\" is not read; known for quantized weights are pack-quantized, int-quantized and "
        "naive-quantized; start from the model before it was quantized",
        where, format);
}

WeightScheme read_scheme(const json& weights, const std::string& format, const std::string& where) {
  const JsonObject in(weights, where);
  const std::string type = lower(in.string("type").value_or("int"));
  if (type != "int")
    throw Error("{}: weights of type \"{}\" are not read; known is int; start from the model before it was quantized",
                where, type);
  check_format(format, where);
  WeightScheme out;
  const int64_t bits = in.integer("num_bits").value_or(8);
  check_bits(bits, kBits, where);
  out.bits = int(bits);
  out.symmetric = in.boolean("symmetric").value_or(true);
  out.packed = format == "pack-quantized";
  const json* dynamic = in.find("dynamic");
  if (dynamic != nullptr && *dynamic != json(false)) throw Error("{}: weights with \"dynamic\" have no scales", where);
  if (const json* order = in.find("actorder"))
    out.ordered = *order == json(true) || *order == json("group") || *order == json("dynamic");
  const auto group_size = in.integer("group_size");
  const std::string strategy = lower(in.string("strategy")
                                         .value_or(!group_size       ? "tensor"
                                                   : *group_size > 0 ? "group"
                                                                     : "channel"));
  if (strategy == "group")
    out.scale_of = ScaleOf::group;
  else if (strategy == "channel")
    out.scale_of = ScaleOf::channel;
  else if (strategy != "tensor")
    throw Error("{}: strategy \"{}\" is not read; known are group, channel, tensor", where, strategy);
  if (out.scale_of != ScaleOf::group) return out;
  out.group_size = group_size.value_or(0);
  if (out.group_size < 1) throw Error("{}: group_size is {}; strategy group needs 1 or more", where, out.group_size);
  return out;
}

/// The class of module, as targets call it.
std::string_view class_of(std::string_view module) {
  const std::string_view last = module.substr(module.rfind('.') + 1);
  return last.starts_with("embed_") ? "Embedding" : "Linear";
}

}  // namespace

CompressedConfig::CompressedConfig(const json& config, const std::string& where) : where_(where) {
  const JsonObject outer(config, where);
  const json* inner = outer.object("quantization_config");  // older files nest it
  const JsonObject in(inner != nullptr ? *inner : config, where);
  if (const json* groups = in.object("config_groups"))
    read_groups(*groups, lower(in.string("format").value_or("dense")), where + ": config_groups");
  const json* sparsity = outer.object("sparsity_config");
  if (sparsity != nullptr && !sparsity->empty()) read_sparsity(*sparsity, where + ": sparsity_config");
  const json* transform = outer.object("transform_config");
  const json* transforms = transform != nullptr ? JsonObject(*transform, where).object("config_groups") : nullptr;
  if (transforms != nullptr && !transforms->empty())
    throw Error("{}: transform_config is set, which needs inputs to be transformed as the model runs", where);
  rounds_activations_ |= in.find("kv_cache_scheme") != nullptr;
}

void CompressedConfig::read_groups(const json& groups, const std::string& format, const std::string& where) {
  for (const auto& [name, value] : groups.items()) {
    const std::string here = fmt::format("{}.{}", where, name);
    if (value.is_array())
      throw Error("{}: names a preset by its targets; write its \"weights\" and \"targets\" out", here);
    const JsonObject in(value, here);
    for (const char* key : {"input_activations", "output_activations"}) rounds_activations_ |= in.find(key) != nullptr;
    const json* weights = in.object("weights");
    const std::string own = lower(in.string("format").value_or(format));
    if (weights == nullptr || own == "dense") continue;
    Group& group = groups_.emplace_back();
    group.scheme = read_scheme(*weights, own, here);
    for (const json& target : in.need_array("targets")) {
      if (!target.is_string()) throw Error("{}: targets must be names, found {}", here, target.type_name());
      const auto& text = target.get_ref<const std::string&>();
      if (text.starts_with(kRegex))
        group.patterns.emplace_back(std::string_view(text).substr(kRegex.size()), here);
      else
        group.names.push_back(text);
    }
  }
}

void CompressedConfig::read_sparsity(const json& sparsity, const std::string& where) {
  const JsonObject in(sparsity, where);
  const std::string format = lower(in.string("format").value_or("dense"));
  if (format != "dense" && format != "sparse-bitmask" && format != "sparse-24-bitmask")
    throw Error("{}: format \"{}\" is not read; known are dense, sparse-bitmask and sparse-24-bitmask", where, format);
  two_of_four_ = lower(in.string("sparsity_structure").value_or("unstructured")) == "2:4";
}

const WeightScheme& CompressedConfig::scheme_of(const ModuleTensors& module) const {
  const std::string_view name = module.name(), kind = class_of(name);
  const auto names = [](const Group& group, std::string_view text) {
    return std::ranges::find(group.names, text) != group.names.end();
  };
  for (int rank = 0; rank < 3; ++rank) {
    const WeightScheme* found = nullptr;
    for (const Group& group : groups_) {
      const bool matches =
          rank == 0 ? names(group, name)
          : rank == 1
              ? std::ranges::any_of(group.patterns, [&](const NamePattern& pattern) { return pattern.matches(name); })
              : names(group, kind);
      if (!matches) continue;
      if (found != nullptr && *found != group.scheme)
        throw Error("{}: two config_groups that differ are for module {}", where_, name);
      found = &group.scheme;
    }
    if (found != nullptr) return *found;
  }
  throw Error("{}: module {} is stored quantized, but no config_groups say how; its targets must name it", where_,
              name);
}

}  // namespace lacuna::io
