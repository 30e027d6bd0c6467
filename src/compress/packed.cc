#include "compress/packed.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/mapped_file.h"
#include "io/gguf.h"
#include "io/gguf_writer.h"
#include "io/manifest.h"
#include "layout/grouped.h"
#include "layout/gs.h"

namespace lacuna::compress {
namespace {

constexpr const char* kReportKey = "lacuna.compress.report";
constexpr int kValueBits = 16;  // of weights that are not on a grid

std::span<const float> floats(const at::Tensor& tensor) { return {tensor.data_ptr<float>(), size_t(tensor.numel())}; }
std::span<const uint8_t> octets(const at::Tensor& tensor) {
  return {tensor.data_ptr<uint8_t>(), size_t(tensor.numel())};
}

/// float32 on the CPU, contiguous; kept alive by the caller.
at::Tensor on_host(const at::Tensor& tensor, at::ScalarType type) { return tensor.to(at::kCPU).to(type).contiguous(); }

}  // namespace

const layout::Layout& automatic_layout(const solver::Grid& grid, const solver::Pattern& pattern) {
  const bool drops = pattern.kind != solver::Pattern::Kind::none;
  if (grid.bits == 0 && !drops) throw Error("nothing to do: give --bits, --sparsity or both");
  // Whole groups are stored without a mask bit for each weight, where they are those that share a scale.
  const bool whole_groups = pattern.kind == solver::Pattern::Kind::groups && layout::is_sparse_group(pattern.group) &&
                            pattern.group == grid.group_size;
  const layout::Layout* found = layout::find(fmt::format("{}{}",
                                                         !drops         ? "gq"
                                                         : whole_groups ? "gs"
                                                                        : "bm",
                                                         grid.bits == 0 ? kValueBits : grid.bits));
  if (found == nullptr) throw Error("--bits {}: known are 2, 3, 4, 8 and none", grid.bits);
  return *found;
}

void check_layout(const layout::Layout& layout, const solver::Grid& grid, const solver::Pattern& pattern) {
  const layout::Layout& fitting = automatic_layout(grid, pattern);
  if (layout.family == layout::Family::two_of_four) {
    if (grid.bits != layout.bits || pattern.kind != solver::Pattern::Kind::n_m || pattern.n != 2 || pattern.m != 4)
      throw Error("--layout {}: holds {} bits of two in every four weights; it needs --bits {} --pattern 2:4",
                  layout.name, layout.bits, layout.bits);
    if (grid.group_size != layout.block_cols || !grid.symmetric)
      throw Error("--layout {}: its scales are for {} inputs, without a zero; leave --group-size out", layout.name,
                  layout.block_cols);
    return;
  }
  if (layout.family == layout::Family::group_sparse) {
    const int bits = grid.bits == 0 ? kValueBits : grid.bits;
    if (bits != layout.bits || pattern.kind != solver::Pattern::Kind::groups || pattern.group != grid.group_size)
      throw Error("--layout {}: holds {} bits of whole groups; it needs --bits {} --pattern group{} --group-size {}",
                  layout.name, layout.bits, layout.bits == kValueBits ? "none" : std::to_string(layout.bits),
                  pattern.group, pattern.group);
    layout::check_params(layout, {.group_size = grid.group_size});
    return;
  }
  // A mask bit for each weight holds whole groups too.
  const bool masks = fitting.family == layout::Family::group_sparse && layout.family == layout::Family::bitmask &&
                     layout.bits == fitting.bits;
  if (&layout != &fitting && !masks)
    throw Error("--layout {}: what these options give is stored as {}; leave --layout out or give it that", layout.name,
                fitting.name);
}

PackedTensor pack(const std::string& name, const solver::Solution& solution, const layout::Layout& layout,
                  const solver::Grid& grid) {
  const int64_t N = solution.weight.size(0), K = solution.weight.size(1);
  PackedTensor out{name, &layout, {}, {N, K}, {}};
  const at::Tensor keep = solution.keep.defined() ? on_host(solution.keep, at::kByte) : at::Tensor();
  const auto kept = keep.defined() ? octets(keep) : std::span<const uint8_t>();
  const at::Tensor weight = on_host(solution.weight, at::kFloat);
  layout::Params params;
  if (layout.bits < kValueBits || layout.family == layout::Family::group_sparse) params.group_size = grid.group_size;
  try {
    if (grid.bits == 0) {
      out.params = layout::pack_values(layout, {N, K}, params, floats(weight), kept, out.bytes);
      return out;
    }
    const at::Tensor code = on_host(solution.code, at::kByte), scale = on_host(solution.scale, at::kFloat),
                     zero = on_host(solution.zero, at::kFloat);
    out.params =
        layout::pack_grouped(layout, {N, K}, params, {octets(code), floats(scale), floats(zero), kept}, out.bytes);
  } catch (const Error& error) {
    throw Error("{}: {}", name, error.what());
  }
  const at::Tensor decoded = unpack(out);
  if (std::memcmp(decoded.data_ptr<float>(), weight.data_ptr<float>(), size_t(N * K) * sizeof(float)) != 0) {
    const at::Tensor differs = (decoded != weight).nonzero();
    throw Error(
        "{}: stored as {} it decodes to other weights than the solver's ({} of {}); this is a fault of the "
        "program",
        name, layout.name, differs.size(0), N * K);
  }
  return out;
}

PackedTensor pack_vector(const std::string& name, const at::Tensor& values) {
  const at::Tensor host = on_host(values, at::kFloat);
  PackedTensor out{name, &layout::get(layout::Id::f32), {}, {host.numel()}, {}};
  const auto bytes = std::as_bytes(floats(host));
  out.bytes.assign(bytes.begin(), bytes.end());
  return out;
}

at::Tensor unpack(const PackedTensor& tensor) {
  const bool vector = tensor.dims.size() == 1;
  const layout::Shape shape{vector ? 1 : tensor.dims[0], tensor.dims.back()};
  at::Tensor out = at::empty({shape.N, shape.K}, at::kFloat);
  layout::decode_rows(*tensor.layout, shape, tensor.bytes, 0, shape.N, out.data_ptr<float>(), tensor.params);
  return vector ? out.reshape({-1}) : out;
}

void write_layer(const std::string& path, const PackedLayer& layer) {
  io::Metadata metadata;
  metadata.set("general.type", std::string("compressed layer"));
  metadata.set(kReportKey, layer.report);
  std::vector<io::TensorPlan> plan;
  for (const PackedTensor& tensor : layer.tensors)
    plan.push_back({tensor.name, tensor.layout, tensor.dims, tensor.params});
  io::GgufWriter writer(path, metadata, std::move(plan));
  const std::string no_digest(64, '0');  // the model's file gets the source's
  for (const PackedTensor& tensor : layer.tensors) {
    writer.write(tensor.bytes);
    if (tensor.layout->ggml_type < 0) writer.set_source_sha256(tensor.name, no_digest);
  }
  writer.finish();
}

PackedLayer read_layer(const std::string& path) {
  const MappedFile file(path);
  const io::GgufFile parsed = io::parse_gguf(file.bytes(), path);
  PackedLayer out;
  out.report = parsed.metadata.need_string(kReportKey);
  const std::string manifest_text = parsed.metadata.string(io::kManifestKey).value_or("");
  const io::Manifest manifest = manifest_text.empty() ? io::Manifest{} : io::parse_manifest(manifest_text, path);
  for (const io::GgufTensor& tensor : parsed.tensors) {
    PackedTensor packed{tensor.name, nullptr, {}, tensor.dims, {tensor.bytes.begin(), tensor.bytes.end()}};
    if (const auto entry = manifest.find(tensor.name); entry != manifest.end()) {
      packed.layout = &io::packed_layout(tensor.name, entry->second, path);
      packed.params = io::packed_params(tensor.name, entry->second, *packed.layout, path);
      packed.dims = {entry->second.shape.N, entry->second.shape.K};
    } else {
      packed.layout = layout::find_ggml_type(tensor.type);
    }
    if (packed.layout == nullptr)
      throw Error("{}: tensor {} is of a type that no layer file holds; remove the folder and begin anew", path,
                  tensor.name);
    out.tensors.push_back(std::move(packed));
  }
  return out;
}

}  // namespace lacuna::compress
