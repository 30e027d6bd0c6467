#include "io/gguf_split.h"

#include <filesystem>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/files.h"

namespace lacuna::io {

namespace {

constexpr int64_t kMaxParts = 99999;  // five digits in the name

struct Part {
  int64_t number = 0;  // from 0
  int64_t count = 1;
};

Part read_part(const Metadata& metadata, const std::string& path) {
  Part out;
  naming_file(path, [&] {
    out.count = metadata.integer("split.count").value_or(1);
    if (out.count > 1) out.number = metadata.need_integer("split.no");
  });
  if (out.count <= 1) return {};
  if (out.count > kMaxParts || out.number < 0 || out.number >= out.count)
    throw Error("{}: split.no = {}, split.count = {}: no possible part of a set", path, out.number, out.count);
  return out;
}

std::string part_suffix(int64_t number, int64_t count) {
  return fmt::format("-{:05}-of-{:05}.gguf", number + 1, count);
}

void append(GgufSet& set, GgufFile&& part, std::set<std::string>& names, const std::string& path) {
  for (GgufTensor& tensor : part.tensors) {
    if (!names.insert(tensor.name).second) throw Error("{}: tensor {} stands in another part too", path, tensor.name);
    set.tensors.push_back(std::move(tensor));
  }
}

}  // namespace

GgufSet open_gguf_set(const std::string& path) {
  GgufSet out;
  MappedFile opened(path);
  GgufFile first = parse_gguf(opened.bytes(), path);
  const Part part = read_part(first.metadata, path);
  if (part.count == 1) {
    out.files.push_back(std::move(opened));
    out.metadata = std::move(first.metadata);
    out.tensors = std::move(first.tensors);
  } else {
    const std::string suffix = part_suffix(part.number, part.count);
    if (!path.ends_with(suffix))
      throw Error("{}: this is part {} of {}, so its name must end with {} for the others to be found", path,
                  part.number + 1, part.count, suffix);
    const std::string prefix = path.substr(0, path.size() - suffix.size());
    std::set<std::string> names;
    int64_t announced = -1;
    for (int64_t i = 0; i < part.count; ++i) {
      const std::string name = prefix + part_suffix(i, part.count);
      if (!file_exists(name))
        throw Error("{}: part {} of {} is missing; put it beside the others", name, i + 1, part.count);
      out.files.emplace_back(name);
      GgufFile file = parse_gguf(out.files.back().bytes(), name);
      const Part found = read_part(file.metadata, name);
      if (found.number != i || found.count != part.count)
        throw Error("{}: it says that it is part {} of {}, expected part {} of {}", name, found.number + 1, found.count,
                    i + 1, part.count);
      if (i == 0) {
        out.metadata = file.metadata;
        announced = naming_file(name, [&] { return file.metadata.integer("split.tensors.count").value_or(-1); });
      }
      append(out, std::move(file), names, name);
    }
    if (announced >= 0 && announced != int64_t(out.tensors.size()))
      throw Error("{}: the parts hold {} tensors, split.tensors.count says {}", path, out.tensors.size(), announced);
  }
  for (const char* key : {"split.no", "split.count", "split.tensors.count"}) out.metadata.erase(key);
  return out;
}

}  // namespace lacuna::io
