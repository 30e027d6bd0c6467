// src/io/shards.h - safetensors files of a folder: one, or several that an index names.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/mapped_file.h"
#include "io/import.h"

namespace lacuna::io {

/// File name -> the tensors to read from it. Empty set: all.
using ShardPlan = std::map<std::string, std::set<std::string>>;

/// The weight_map of an index. Throws Error for one that is empty or names something outside the folder.
ShardPlan read_shard_index(const std::filesystem::path& path);

/// Maps a file and appends the wanted tensors. Throws Error naming file and tensor where either is missing.
void read_shard(const std::filesystem::path& path, const std::set<std::string>& wanted, std::vector<MappedFile>& files,
                std::vector<FileTensor>& tensors);

}  // namespace lacuna::io
