#include "io/huggingface.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "core/error.h"
#include "core/files.h"
#include "core/progress.h"
#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "io/hf_config.h"
#include "io/hf_names.h"
#include "io/hf_tokenizer.h"
#include "io/json.h"
#include "io/shards.h"

namespace lacuna::io {

namespace {

namespace fs = std::filesystem;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kGptqConfig = "quantize_config.json";
constexpr const char* kAwqConfig = "quant_config.json";
constexpr int64_t kOneThreadBytes = int64_t{1} << 22;  // of weights, which one thread unpacks at once

/// AutoGPTQ names its one file after the bits: gptq_model-4bit-128g.safetensors. Empty: none, or several.
std::string gptq_file(const fs::path& folder) {
  std::string found;
  std::error_code failed;  // then nothing is found
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, failed)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("gptq_model") || !name.ends_with(".safetensors")) continue;
    if (!found.empty()) return {};
    found = name;
  }
  return found;
}

ShardPlan plan_files(const fs::path& folder) {
  if (file_exists(folder / kIndex)) return read_shard_index(folder / kIndex);
  if (file_exists(folder / kSingle)) return {{kSingle, {}}};
  if (const std::string name = gptq_file(folder); !name.empty()) return {{name, {}}};
  throw Error("{}: neither {} nor {} is there; only safetensors weights are read", folder.string(), kSingle, kIndex);
}

/// Tensors that are weights themselves.
void add_plain(const HfConfig& config, FileTensor& tensor, HfFolder& out) {
  std::string name = gguf_tensor_name(config.architecture, config.block_count, tensor.entry.name, tensor.file);
  if (!name.empty()) out.tensors.push_back({std::move(name), std::move(tensor.entry), std::move(tensor.file)});
}

/// Module and part of a tensor's name. "x.weight.bitmask" is an older name of "x.bitmask".
std::pair<std::string_view, std::string_view> split_name(std::string_view name) {
  const size_t dot = std::min(name.rfind('.'), name.size());
  std::string_view module = name.substr(0, dot);
  if (module.ends_with(".weight")) module.remove_suffix(std::string_view(".weight").size());
  return {module, name.substr(std::min(dot + 1, name.size()))};
}

/// Modules that an importer takes become one tensor each, at the place of their first; the others stay.
void add_imported(const HfConfig& config, Importer& importer, std::vector<FileTensor>& tensors, int threads,
                  HfFolder& out) {
  std::map<std::string, ModuleTensors, std::less<>> modules;
  for (const FileTensor& tensor : tensors) {
    const auto [name, part] = split_name(tensor.entry.name);
    if (importer.use_of(part) == PartUse::read)
      modules.try_emplace(std::string(name), std::string(name)).first->second.add(part, tensor);
  }
  std::erase_if(modules, [&](const auto& module) { return !importer.takes(module.second); });
  int64_t total = 0;
  for (const auto& [name, module] : modules) total += module.bytes();
  std::optional<ThreadPool> pool;
  std::optional<Progress> progress;
  if (total > kOneThreadBytes) {
    pool.emplace(threads);
    progress.emplace("Unpacking", total, "B");
  }
  std::set<std::string_view> done;
  for (FileTensor& tensor : tensors) {
    const auto [name, part] = split_name(tensor.entry.name);
    const PartUse use = importer.use_of(part);
    if (use == PartUse::drop) continue;
    const auto found = use == PartUse::read ? modules.find(name) : modules.end();
    if (found == modules.end()) {
      add_plain(config, tensor, out);
      continue;
    }
    const ModuleTensors& module = found->second;
    if (!done.insert(module.name()).second) continue;
    const std::string weight = module.name() + ".weight";
    out.tensors.push_back({gguf_tensor_name(config.architecture, config.block_count, weight, tensor.file), tensor.entry,
                           tensor.file, importer.import(module, pool ? &*pool : nullptr)});
    if (progress) progress->add(module.bytes());
    module.release();
  }
  out.warnings = importer.warnings();
}

/// How the weights were quantized: config.json says it, or, in the first folders of AutoGPTQ and AutoAWQ, a file of its
/// own. nullptr: they were not.
std::unique_ptr<Importer> find_importer(const fs::path& folder, const HfConfig& config,
                                        const std::string& config_path) {
  if (!config.quantization.is_null())
    return make_importer(
        {config.quantization, config_path + ": " + config.quantization_key, config.quantization_rules});
  for (const auto& [file, method] : {std::pair{kGptqConfig, "gptq"}, {kAwqConfig, "awq"}}) {
    const std::string path = (folder / file).string();
    if (!file_exists(path)) continue;
    const std::string text = read_file(path);
    QuantizationConfig own{parse_json_object(text, path), path,
                           json_keys(text, std::array<std::string_view, 1>{"dynamic"})};
    own.settings.emplace("quant_method", method);
    return make_importer(own);
  }
  return nullptr;
}

/// All tensors are weights themselves, where nothing says that they were quantized.
void add_all_plain(const HfConfig& config, const std::string& config_path, std::vector<FileTensor>& tensors,
                   HfFolder& out) {
  for (const FileTensor& tensor : tensors)
    if (is_quantized_part(split_name(tensor.entry.name).second))
      throw Error(
          "{}: a part of a quantized or pruned weight, but {} lacks quantization_config, which says how it was made",
          tensor.where(), config_path);
  for (FileTensor& tensor : tensors) add_plain(config, tensor, out);
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
  if (head->imported || embedding->imported) return;
  const auto& a = head->entry;
  const auto& b = embedding->entry;
  if (a.dtype == b.dtype && a.dims == b.dims &&
      std::equal(a.bytes.begin(), a.bytes.end(), b.bytes.begin(), b.bytes.end()))
    out.tensors.erase(head);
}

}  // namespace

HfFolder open_huggingface(const std::string& path, int threads) {
  const fs::path folder(path);
  const std::string config_path = (folder / "config.json").string();
  const std::string config_text = read_file(config_path);
  HfConfig config = read_hf_config(config_text, config_path);
  HfFolder out;
  out.architecture = config.architecture;
  const std::unique_ptr<Importer> importer = find_importer(folder, config, config_path);
  const ShardPlan plan = plan_files(folder);
  out.files.reserve(plan.size());
  std::vector<FileTensor> tensors;
  for (const auto& [name, wanted] : plan) read_shard(folder / name, wanted, out.files, tensors);
  if (importer)
    add_imported(config, *importer, tensors, threads, out);
  else
    add_all_plain(config, config_path, tensors, out);
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
