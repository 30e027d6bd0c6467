#include "io/manifest.h"

#include <algorithm>

#include "core/checked_math.h"
#include "core/error.h"
#include "io/json.h"

namespace lacuna::io {

namespace {

constexpr size_t kSha256Digits = 64;

void refuse_other_keys(const nlohmann::json& object, std::initializer_list<std::string_view> known,
                       const std::string& where) {
  for (const auto& [key, value] : object.items())
    if (std::find(known.begin(), known.end(), key) == known.end())
      throw Error("{}: unknown key \"{}\"; known are {}", where, key, fmt::join(known, ", "));
}

ManifestTensor read_tensor(const nlohmann::json& json, const std::string& where) {
  const JsonObject object(json, where);
  refuse_other_keys(json, {"layout", "N", "K", "nnz", "params", "sha256"}, where);
  ManifestTensor out;
  out.layout = object.need_string("layout");
  out.shape = {object.need_integer("N"), object.need_integer("K")};
  const auto weights = checked_mul(out.shape.N, out.shape.K);
  if (out.shape.N < 1 || out.shape.K < 1 || !weights)
    throw Error("{}: N = {}, K = {}; both must be at least 1 and N*K below 2^63", where, out.shape.N, out.shape.K);
  out.nnz = object.need_integer("nnz");
  if (out.nnz < 0 || out.nnz > *weights)
    throw Error("{}: nnz = {} of {} weights; it must lie between 0 and N*K", where, out.nnz, *weights);
  const auto& params = object.need_object("params");
  const JsonObject typed(params, where);
  for (const auto& [key, value] : params.items()) out.params[key] = typed.need_integer(key.c_str());
  out.sha256 = object.need_string("sha256");
  const auto is_hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  if (out.sha256.size() != kSha256Digits || !std::all_of(out.sha256.begin(), out.sha256.end(), is_hex))
    throw Error("{}: sha256 must be 64 lower-case hex digits, found \"{}\"", where, out.sha256);
  return out;
}

}  // namespace

Manifest parse_manifest(std::string_view text, const std::string& where) {
  const std::string top = fmt::format("{}: {}", where, kManifestKey);
  const nlohmann::json json = parse_json_object(text, top);
  const JsonObject object(json, top);
  const int64_t version = object.need_integer("version");
  if (version != kManifestVersion)
    throw Error("{}: version {} is not supported, only {} is; the file was made by another version of this program",
                top, version, kManifestVersion);
  refuse_other_keys(json, {"version", "tensors"}, top);
  Manifest out;
  for (const auto& [name, value] : object.need_object("tensors").items()) {
    if (name.empty()) throw Error("{}: a tensor without a name", top);
    out[name] = read_tensor(value, fmt::format("{}: tensor {}", top, name));
  }
  return out;
}

const layout::Layout& packed_layout(const std::string& tensor, const ManifestTensor& entry, const std::string& where) {
  std::string known;
  for (const layout::Layout& layout : layout::all()) {
    if (layout.ggml_type >= 0) continue;
    if (layout.name == entry.layout) return layout;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", layout.name);
  }
  throw Error("{}: tensor {}: unknown packed layout \"{}\"; known are: {}", where, tensor, entry.layout,
              known.empty() ? "none in this version" : known);
}

layout::Params packed_params(const std::string& tensor, const ManifestTensor& entry, const layout::Layout& layout,
                             const std::string& where) {
  const std::span<const layout::Parameter> known = layout::parameters(layout);
  std::string names;
  for (const layout::Parameter& parameter : known) names += (names.empty() ? "" : ", ") + std::string(parameter.name);
  for (const auto& [name, value] : entry.params)
    if (std::ranges::find(known, name, &layout::Parameter::name) == known.end())
      throw Error("{}: tensor {}: unknown parameter \"{}\"; {} has {}", where, tensor, name, layout.name,
                  names.empty() ? "none" : names);
  layout::Params out;
  for (const layout::Parameter& parameter : known) {
    const auto value = entry.params.find(std::string(parameter.name));
    if (value == entry.params.end())
      throw Error("{}: tensor {}: {} needs the parameter {}", where, tensor, layout.name, parameter.name);
    out.*parameter.value = value->second;
  }
  if (layout::counts_kept(layout)) out.nnz = entry.nnz;
  try {
    layout::check_params(layout, out);
  } catch (const Error& error) {
    throw Error("{}: tensor {}: {}", where, tensor, error.what());
  }
  if (const int64_t kept = layout::kept_weights(layout, entry.shape, out); entry.nnz != kept)
    throw Error("{}: tensor {}: nnz = {}, but {} [{}, {}] keeps {}", where, tensor, entry.nnz, layout.name,
                entry.shape.N, entry.shape.K, kept);
  return out;
}

ManifestTensor manifest_entry(const layout::Layout& layout, layout::Shape shape, layout::Params params) {
  ManifestTensor out{.layout = std::string(layout.name),
                     .shape = shape,
                     .nnz = layout::kept_weights(layout, shape, params),
                     .params = {},
                     .sha256 = {}};
  for (const layout::Parameter& parameter : layout::parameters(layout))
    out.params[std::string(parameter.name)] = params.*parameter.value;
  return out;
}

std::string format_manifest(const Manifest& manifest, std::map<std::string, size_t, std::less<>>& sha256_at) {
  const auto quoted = [](const std::string& text) { return nlohmann::json(text).dump(); };
  std::string out = fmt::format("{{\"version\":{},\"tensors\":{{", kManifestVersion);
  for (const auto& [name, tensor] : manifest) {
    if (!sha256_at.empty()) out += ',';
    out += fmt::format("{}:{{\"layout\":{},\"N\":{},\"K\":{},\"nnz\":{},\"params\":{{", quoted(name),
                       quoted(tensor.layout), tensor.shape.N, tensor.shape.K, tensor.nnz);
    for (bool first = true; const auto& [parameter, value] : tensor.params) {
      out += fmt::format("{}{}:{}", first ? "" : ",", quoted(parameter), value);
      first = false;
    }
    out += "},\"sha256\":\"";
    sha256_at[name] = out.size();
    out += tensor.sha256.empty() ? std::string(kSha256Digits, '0') : tensor.sha256;
    out += "\"}";
  }
  return out + "}}";
}

}  // namespace lacuna::io
