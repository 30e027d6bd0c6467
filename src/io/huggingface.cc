#include "io/huggingface.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "core/error.h"
#include "core/files.h"
#include "io/checkpoint.h"
#include "io/hf_config.h"
#include "io/hf_names.h"
#include "io/hf_tokenizer.h"
#include "io/json.h"

namespace lacuna::io {

namespace {

namespace fs = std::filesystem;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

/// File name -> the tensors to read from it. Empty set: all.
using Plan = std::map<std::string, std::set<std::string>>;

Plan read_index(const fs::path& path) {
  const std::string where = path.string();
  const nlohmann::json index = parse_json_object(read_file(where), where);
  Plan out;
  for (const auto& [tensor, file] : JsonObject(index, where).need_object("weight_map").items()) {
    if (!file.is_string()) throw Error("{}: weight_map: tensor {} must name a file", where, tensor);
    const auto& name = file.get_ref<const std::string&>();
    if (name.empty() || name == "." || name == ".." || name.find('/') != name.npos || name.find('\0') != name.npos)
      throw Error("{}: weight_map: tensor {} names \"{}\", which is no file of this folder", where, tensor, name);
    out[name].insert(tensor);
  }
  if (out.empty()) throw Error("{}: weight_map is empty", where);
  return out;
}

Plan plan_files(const fs::path& folder) {
  if (file_exists(folder / kIndex)) return read_index(folder / kIndex);
  if (file_exists(folder / kSingle)) return {{kSingle, {}}};
  throw Error("{}: neither {} nor {} is there; only safetensors weights are read", folder.string(), kSingle, kIndex);
}

void read_file_tensors(const fs::path& path, const std::set<std::string>& wanted, const HfConfig& config,
                       HfFolder& out) {
  const std::string where = path.string();
  if (!file_exists(path))
    throw Error("{}: this shard is missing; the index names it for tensor {}", where,
                wanted.empty() ? "?" : *wanted.begin());
  out.files.emplace_back(where);
  auto entries = parse_safetensors(out.files.back().bytes(), where);
  std::set<std::string_view> missing(wanted.begin(), wanted.end());
  for (SafetensorsEntry& entry : entries) {
    if (!wanted.empty() && missing.erase(entry.name) == 0) continue;
    std::string name = gguf_tensor_name(config.architecture, config.block_count, entry.name, where);
    if (!name.empty()) out.tensors.push_back({std::move(name), std::move(entry), where});
  }
  if (!missing.empty())
    throw Error("{}: tensor {} is missing; the index says that it is in this file", where, *missing.begin());
}

/// A head that repeats the embedding byte for byte is the tied head once more; one that differs is kept.
void settle_tied_head(const HfConfig& config, HfFolder& out, const std::string& folder) {
  const auto find = [&](std::string_view name) {
    return std::find_if(out.tensors.begin(), out.tensors.end(), [&](const HfTensor& t) { return t.name == name; });
  };
  const auto head = find("output.weight");
  const auto embedding = find("token_embd.weight");
  if (head == out.tensors.end()) {
    if (!config.tied)
      throw Error("{}: tensor lm_head.weight is missing, and config.json does not say tie_word_embeddings", folder);
    return;
  }
  if (!config.tied || embedding == out.tensors.end()) return;
  const auto& a = head->entry;
  const auto& b = embedding->entry;
  if (a.dtype == b.dtype && a.dims == b.dims &&
      std::equal(a.bytes.begin(), a.bytes.end(), b.bytes.begin(), b.bytes.end()))
    out.tensors.erase(head);
}

}  // namespace

HfFolder open_huggingface(const std::string& path) {
  const fs::path folder(path);
  const std::string config_path = (folder / "config.json").string();
  const std::string config_text = read_file(config_path);
  HfConfig config = read_hf_config(config_text, config_path);
  HfFolder out;
  out.architecture = config.architecture;
  const Plan plan = plan_files(folder);
  out.files.reserve(plan.size());
  for (const auto& [name, wanted] : plan) read_file_tensors(folder / name, wanted, config, out);
  std::set<std::string_view> names;
  for (const HfTensor& tensor : out.tensors)
    if (!names.insert(tensor.name).second) throw Error("{}: two tensors are named {}", tensor.file, tensor.name);
  settle_tied_head(config, out, path);

  out.vocabulary = read_hf_tokenizer(path, config, config_text);
  out.metadata.set("general.architecture", config.architecture);
  const fs::path named = folder.filename().empty() ? folder.parent_path() : folder;
  out.metadata.set("general.name", named.filename().string());
  for (const auto& [key, value] : config.metadata.entries()) out.metadata.set(key, value);
  if (out.vocabulary.model != Vocabulary::Model::none) vocabulary_to_metadata(out.vocabulary, out.metadata);
  return out;
}

}  // namespace lacuna::io
