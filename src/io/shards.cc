#include "io/shards.h"

#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/files.h"
#include "io/hf_tokenizer.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace lacuna::io {

ShardPlan read_shard_index(const std::filesystem::path& path) {
  const std::string where = path.string();
  const nlohmann::json index = parse_json_object(read_file(where), where);
  ShardPlan out;
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

void read_shard(const std::filesystem::path& path, const std::set<std::string>& wanted, std::vector<MappedFile>& files,
                std::vector<FileTensor>& tensors) {
  const std::string where = path.string();
  if (!file_exists(path))
    throw Error("{}: this shard is missing; the index names it for tensor {}", where,
                wanted.empty() ? "?" : *wanted.begin());
  files.emplace_back(where);
  auto entries = parse_safetensors(files.back().bytes(), where);
  std::set<std::string_view> missing(wanted.begin(), wanted.end());
  for (SafetensorsEntry& entry : entries)
    if (wanted.empty() || missing.erase(entry.name) != 0) tensors.push_back({std::move(entry), where});
  if (!missing.empty())
    throw Error("{}: tensor {} is missing; the index says that it is in this file", where, *missing.begin());
}

}  // namespace lacuna::io
