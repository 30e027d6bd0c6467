#include "model/flux/cuda_linear.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/scalar.h"

namespace lacuna::model::flux {

namespace {

bool is_rounded(const kernels::WeightView& view) {
  return view.layout->id == layout::Id::f32 || view.layout->id == layout::Id::f16;
}

/// Bytes of bf16 of a matrix in f32 or f16.
std::vector<std::byte> as_bf16(const kernels::WeightView& view, ThreadPool& pool) {
  const layout::Shape shape = view.shape;
  std::vector<std::byte> out(size_t(shape.N * shape.K) * sizeof(bf16));
  pool.parallel_for(shape.N, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(shape.K));
    for (int64_t n = begin; n < end; ++n) {
      layout::decode_rows(*view.layout, shape, view.bytes, n, 1, row.data(), view.params);
      for (int64_t k = 0; k < shape.K; ++k) {
        const bf16 value = to_bf16(row[size_t(k)]);
        std::memcpy(out.data() + (n * shape.K + k) * int64_t(sizeof(bf16)), &value, sizeof(value));
      }
    }
  });
  return out;
}

}  // namespace

cuda::Operation operation_of_weight(const kernels::WeightView& view) {
  return naming_file(fmt::format("tensor {} on --device cuda", view.name), [&] {
    return cuda::operation_of(is_rounded(view) ? layout::get(layout::Id::bf16) : *view.layout);
  });
}

const cuda::TensorCoreTiles& CudaUploader::tiles(const kernels::WeightView& view) {
  const auto key = std::tuple(view.bytes.data(), view.shape.N, view.shape.K);
  if (const auto found = kept_.find(key); found != kept_.end()) return found->second;
  last_ = {};  // no two in memory at once
  operation_of_weight(view);
  if (is_rounded(view))
    last_ = cuda::make_tensor_core_tiles(layout::get(layout::Id::bf16), view.shape, as_bf16(view, pool_), &pool_);
  else
    last_ = cuda::make_tensor_core_tiles(*view.layout, view.shape, view.bytes, &pool_);
  return keep_ ? kept_.emplace(key, std::move(last_)).first->second : last_;
}

cuda::Buffer CudaUploader::upload(std::span<const float> values, const std::string& what) {
  cuda::Buffer out(device_, int64_t(values.size_bytes()), what);
  out.upload(std::as_bytes(values));
  count(out.bytes());
  return out;
}

CudaLinear::CudaLinear(CudaUploader& uploader, std::span<const kernels::WeightView> parts) {
  int64_t column = 0;
  while (!parts.empty()) {
    const cuda::Operation first = operation_of_weight(parts.front());
    const auto other =
        std::ranges::find_if(parts, [&](const auto& part) { return operation_of_weight(part) != first; });
    const auto joined = parts.first(size_t(other - parts.begin()));
    add(uploader, joined, column, false);
    for (const kernels::WeightView& part : joined) column += padded_outputs(part.shape.N);
    parts = parts.subspan(joined.size());
  }
}

CudaLinear CudaLinear::grouped(CudaUploader& uploader, std::span<const kernels::WeightView> experts) {
  const cuda::Operation first = operation_of_weight(experts.front());
  for (const kernels::WeightView& expert : experts)
    if (operation_of_weight(expert) != first)
      throw Error("--device cuda: {} and {} are experts of one product in different layouts; give them one",
                  experts.front().name, expert.name);
  CudaLinear out;
  out.add(uploader, experts, 0, true);
  out.groups_ = int(experts.size());
  return out;
}

void CudaLinear::add(CudaUploader& uploader, std::span<const kernels::WeightView> parts, int64_t column,
                     bool whole_last) {
  const cuda::Operation operation = operation_of_weight(parts.front());
  const std::string& name = parts.front().name;
  K_ = parts.front().shape.K;
  int64_t padded = 0, bytes = 0;
  for (const kernels::WeightView& part : parts) {
    if (std::ranges::find(names_, part.name) == names_.end()) names_.push_back(part.name);
    padded += padded_outputs(part.shape.N);
    bytes += cuda::tile_bytes(operation, part.shape);
    weights_ += double(part.shape.N) * double(part.shape.K);
  }
  Product product;
  product.column = column;
  product.blocks = cuda::Buffer(uploader.device(), bytes, name);
  uploader.count(bytes);
  std::vector<float> scale, bias(static_cast<size_t>(padded), 0.0f);
  int64_t at = 0, row = 0;
  for (const kernels::WeightView& part : parts) {
    const cuda::TensorCoreTiles& tiles = uploader.tiles(part);
    product.blocks.upload(tiles.blocks, at);
    scale.insert(scale.end(), tiles.scale.begin(), tiles.scale.end());
    std::ranges::copy(part.bias, bias.begin() + row);
    product.has_bias = product.has_bias || !part.bias.empty();
    at += int64_t(tiles.blocks.size()), row += padded_outputs(part.shape.N);
  }
  if (operation.eight_bits) product.scale = uploader.upload(scale, name);
  if (product.has_bias) product.bias = uploader.upload(bias, name);
  const int64_t last = parts.back().shape.N;
  product.weights = {.operation = operation,
                     .N = whole_last ? padded : padded - padded_outputs(last) + last,
                     .K = K_,
                     .blocks = product.blocks.data(),
                     .scale = operation.eight_bits ? product.scale.as<float>() : nullptr};
  products_.push_back(std::move(product));
}

bool CudaLinear::reads_codes() const {
  return std::ranges::any_of(products_, [](const Product& p) { return p.weights.operation.eight_bits; });
}
bool CudaLinear::reads_values() const {
  return std::ranges::any_of(products_, [](const Product& p) { return !p.weights.operation.eight_bits; });
}

cuda::TensorCoreArgs CudaLinear::arguments(const Product& product, const CudaInput& x, const CudaOutput& y,
                                           const int32_t* offsets) const {
  cuda::TensorCoreArgs args;
  args.w = product.weights;
  const bool codes = product.weights.operation.eight_bits;
  args.x = codes ? x.codes : reinterpret_cast<const std::byte*>(x.values);
  args.x_stride = codes ? x.code_stride : x.value_stride * int64_t(sizeof(bf16));
  args.x_scale = codes ? x.scale : nullptr;
  args.M = x.M;
  args.bias = product.has_bias ? product.bias.as<float>() : nullptr;
  if (y.gelu_from >= 0 && y.gelu_from < product.column + product.weights.N) {
    args.activation = cuda::TensorCoreActivation::gelu_tanh;
    args.activation_from = std::max(y.gelu_from - product.column, int64_t{0});
  }
  args.gate = y.gate;
  args.add = y.add;
  args.type = y.type;
  args.y = static_cast<std::byte*>(y.y) + product.column * cuda::bytes_of(y.type);
  args.y_stride = y.stride;
  args.groups = groups_;
  args.offsets = offsets;
  return args;
}

void CudaLinear::run(const cuda::Device& device, cuda::Stream& stream, const cuda::TensorCoreTable& plans,
                     const CudaInput& x, const CudaOutput& y, const int32_t* offsets,
                     cuda::TensorCoreKernel kernel) const {
  for (const Product& product : products_) {
    cuda::TensorCoreArgs args = arguments(product, x, y, offsets);
    args.kernel = kernel;
    if (kernel == cuda::TensorCoreKernel::best) args.plan = cuda::find_plan(plans, device.info(), args);
    cuda::launch_tensor_core(device, stream, args);
  }
}

std::vector<std::string> CudaLinear::explain(const cuda::DeviceInfo& device, const cuda::TensorCoreTable& plans,
                                             const CudaInput& x, const CudaOutput& y, const int32_t* offsets) const {
  std::vector<std::string> out;
  for (const Product& product : products_)
    out.push_back(fmt::format("{} x {}: {}", product.weights.N / std::max(groups_, 1), K_,
                              cuda::explain_tensor_core(device, arguments(product, x, y, offsets), plans)));
  return out;
}

std::vector<cuda::TensorCoreProduct> CudaLinear::planned(const cuda::DeviceInfo& device, const CudaInput& x,
                                                         const CudaOutput& y, const int32_t* offsets) const {
  std::vector<cuda::TensorCoreProduct> out;
  for (const Product& product : products_)
    if (const auto planned = cuda::planned_product(device, arguments(product, x, y, offsets))) out.push_back(*planned);
  return out;
}

}  // namespace lacuna::model::flux
