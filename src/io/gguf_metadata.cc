#include "io/gguf_metadata.h"

#include "core/error.h"
#include "core/mapped_file.h"
#include "io/gguf.h"
#include "io/gguf_writer.h"

namespace lacuna::io {

Metadata read_gguf_metadata(const std::string& path) {
  const MappedFile file(path);
  return parse_gguf(file.bytes(), path).metadata;
}

void write_gguf_metadata(const std::string& path, const Metadata& metadata) { GgufWriter(path, metadata, {}).finish(); }

void copy_gguf(const Checkpoint& source, const Metadata& metadata, const std::string& path) {
  if (source.source() != Source::gguf || metadata.contains("split.count"))
    throw Error("{}: only a GGUF file in one piece can be copied; `lacuna quantize` makes one", source.path());
  std::vector<TensorPlan> plan;
  for (const Tensor& tensor : source.tensors())
    plan.push_back({tensor.name, tensor.layout, tensor.dims, tensor.params});
  GgufWriter writer(path, metadata, std::move(plan));
  for (const Tensor& tensor : source.tensors()) writer.write(tensor.bytes);
  writer.finish();
}

}  // namespace lacuna::io
