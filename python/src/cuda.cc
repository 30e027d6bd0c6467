// python/src/cuda.cc - products on tensor cores, on the caller's stream.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind.h"
#include "core/error.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/tensor_core.h"
#include "tensor.h"

namespace lacuna::python {

namespace nb = nanobind;
using layout::Shape;

namespace {

constexpr int64_t kAlignment = 16;

/// A device is opened once and stays.
cuda::Device& device(int index) {
  static std::mutex mutex;
  static auto* const devices = new std::map<int, std::unique_ptr<cuda::Device>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<cuda::Device>& found = (*devices)[index];
  if (found == nullptr) found = std::make_unique<cuda::Device>(cuda::DeviceOptions{.index = index});
  return *found;
}

cuda::Element element(const Tensor& tensor, std::string_view name) {
  switch (tensor.type) {
    case Type::f32:
      return cuda::Element::f32;
    case Type::f16:
      return cuda::Element::f16;
    case Type::bf16:
      return cuda::Element::bf16;
    default:
      throw Error("{}: its type has to be float32, float16 or bfloat16", name);
  }
}

/// On the same device as the first of them.
Tensor on_device(const Array& array, std::string_view name, int index, size_t dims) {
  Tensor out = tensor(array, name);
  if (!out.cuda || out.device != index) throw Error("{}: it is not on CUDA device {}, as others are", name, index);
  if (out.shape.size() != dims)
    throw Error("{}: it has {} dimensions, but has to have {}", name, out.shape.size(), dims);
  return out;
}

const float* floats(const std::optional<Array>& array, std::string_view name, int index, int64_t count) {
  if (!array) return nullptr;
  const Tensor found = on_device(*array, name, index, 1);
  if (found.type != Type::f32) throw Error("{}: its type has to be float32", name);
  need_shape(found, name, {count});
  return found.as<const float>();
}

cuda::Accumulate accumulation(const std::string& name) {
  if (name == "fast") return cuda::Accumulate::fast;
  if (name == "full") return cuda::Accumulate::full;
  throw Error("accumulate is \"{}\", but has to be \"fast\" or \"full\"", name);
}

/// blocks and scales of a matrix as the kernels read them, in arrays that own their memory.
auto make_tiles(const std::string& layout_name, int64_t K, const Array& packed_array) {
  const layout::Layout& layout = packed_layout(layout_name);
  const Tensor packed = host(packed_array, "packed", Type::u8, 2);
  need_shape(packed, "packed", {packed.shape[0], row_bytes(layout, K)});
  auto tiles = std::make_unique<cuda::TensorCoreTiles>();
  {
    const nb::gil_scoped_release release;
    with_threads(packed.count(), [&](ThreadPool& pool) {
      *tiles = cuda::make_tensor_core_tiles(layout, {packed.shape[0], K}, packed.bytes(), &pool);
    });
  }
  cuda::TensorCoreTiles* const kept = tiles.release();
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<cuda::TensorCoreTiles*>(p); });
  using Bytes = nb::ndarray<nb::pytorch, uint8_t, nb::ndim<1>, nb::device::cpu>;
  using Floats = nb::ndarray<nb::pytorch, float, nb::ndim<1>, nb::device::cpu>;
  return std::tuple(Bytes(kept->blocks.data(), {kept->blocks.size()}, owner),
                    Floats(kept->scale.data(), {kept->scale.size()}, owner));
}

void canonical(const std::string& layout_name, int64_t K, const Array& blocks_array, const Array& scale_array,
               const Array& packed_array) {
  const layout::Layout& layout = packed_layout(layout_name);
  const Tensor blocks = host(blocks_array, "blocks", Type::u8, 1), scale = host(scale_array, "scale", Type::f32, 1),
               packed = host(packed_array, "packed", Type::u8, 2);
  const Shape shape{packed.shape[0], K};
  need_shape(packed, "packed", {shape.N, row_bytes(layout, K)});
  cuda::TensorCoreTiles tiles;
  tiles.operation = cuda::operation_of(layout);
  tiles.shape = shape;
  need_shape(blocks, "blocks", {cuda::tile_bytes(tiles.operation, shape)});
  tiles.blocks.assign(blocks.data, blocks.data + blocks.count());
  tiles.scale.assign(scale.as<float>(), scale.as<float>() + scale.count());
  const std::vector<std::byte> bytes = cuda::canonical_bytes(tiles);
  if (int64_t(bytes.size()) != packed.count())
    throw Error("the tiles of [{}, {}] in {} have {} canonical bytes, but {} are needed", shape.N, K, layout.name,
                bytes.size(), packed.count());
  std::memcpy(packed.data, bytes.data(), bytes.size());
}

void quantize(const Array& x_array, const Array& codes_array, const Array& scale_array, uintptr_t stream_handle) {
  const int index = x_array.device_id();
  const Tensor x = on_device(x_array, "x", index, 2), codes = on_device(codes_array, "codes", index, 2);
  cuda::QuantizeTokensArgs args;
  args.type = element(x, "x");
  args.x = x.data;
  args.M = x.shape[0];
  args.stride = args.K = x.shape[1];
  if (codes.type != Type::u8) throw Error("codes: its type has to be uint8");
  need_shape(codes, "codes", {args.M, std::max(args.K, codes.shape[1])});
  args.codes = codes.data;
  args.code_stride = codes.shape[1];
  args.scale = const_cast<float*>(floats(scale_array, "scale", index, args.M));
  const cuda::Device& on = device(index);
  on.use();
  cuda::Stream stream(reinterpret_cast<CUstream_st*>(stream_handle));
  cuda::launch_quantize_tokens(on, stream, args);
}

void linear(const std::string& layout_name, int64_t K, const Array& x_array, const std::optional<Array>& x_scale,
            const Array& blocks_array, const std::optional<Array>& scale, const std::optional<Array>& bias,
            const Array& y_array, const std::string& accumulate, uintptr_t stream_handle) {
  const layout::Layout& layout = packed_layout(layout_name);
  const int index = x_array.device_id();
  const Tensor x = on_device(x_array, "x", index, 2), y = on_device(y_array, "y", index, 2),
               blocks = on_device(blocks_array, "blocks", index, 1);
  const int64_t M = x.shape[0], N = y.shape[1];
  cuda::TensorCoreArgs args;
  args.w.operation = cuda::operation_of(layout);
  args.w.N = N;
  args.w.K = K;
  need_shape(blocks, "blocks", {cuda::tile_bytes(args.w.operation, {N, K})});
  args.w.blocks = blocks.data;
  const int64_t tile_rows = (N + cuda::kTileRowsOfWeights - 1) / cuda::kTileRowsOfWeights * cuda::kTileRowsOfWeights;
  const bool scaled = args.w.operation.eight_bits;
  if (scaled != scale.has_value() || scaled != x_scale.has_value())
    throw Error("x_scale and scale belong to f8 and nm24_f8, and are None for nm24_bf16");
  args.w.scale = floats(scale, "scale", index, tile_rows);
  args.x_scale = floats(x_scale, "x_scale", index, M);
  if (x.type != (scaled ? Type::u8 : Type::bf16))
    throw Error("x: {} multiplies {}", layout.name, scaled ? "codes, uint8" : "bfloat16");
  need_shape(x, "x", {M, std::max(K, x.shape[1])});
  args.x = x.data;
  args.x_stride = x.shape[1] * bytes_of(x.type);
  if (args.x_stride % kAlignment != 0)
    throw Error("x: rows of {} bytes, but they have to be a multiple of {}", args.x_stride, kAlignment);
  args.M = M;
  args.bias = floats(bias, "bias", index, N);
  args.type = element(y, "y");
  need_shape(y, "y", {M, N});
  args.y = y.data;
  args.y_stride = N;
  args.accumulate = accumulation(accumulate);
  const cuda::Device& on = device(index);
  on.use();
  cuda::Stream stream(reinterpret_cast<CUstream_st*>(stream_handle));
  cuda::launch_tensor_core(on, stream, args);
}

}  // namespace

void bind_cuda(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
#if LACUNA_PYTHON_CUDA
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
  m.def(
      "cuda_open", [](int index) { device(index); }, nb::arg("index"), release,
      "Throws Error for a CUDA device that the kernels of this build do not run on.");
  m.def("make_tiles", &make_tiles, nb::arg("layout"), nb::arg("K"), nb::arg("packed"),
        "The form that tensor cores read (src/kernels/cuda/tensor_core.h) of packed, uint8 [N, row_bytes] on the CPU: "
        "blocks, uint8, and scales, float32 [N rounded up to 64], empty for nm24_bf16.");
  m.def("canonical", &canonical, nb::arg("layout"), nb::arg("K"), nb::arg("blocks"), nb::arg("scale"),
        nb::arg("packed"), release, "The inverse of make_tiles. packed: uint8 [N, row_bytes], written.");
  m.def("cuda_quantize_per_token", &quantize, nb::arg("x"), nb::arg("codes"), nb::arg("scale"), nb::arg("stream"),
        release,
        "As quantize_per_token, for x in float32, float16 or bfloat16 on a CUDA device; rows of codes have a multiple "
        "of 16 bytes. stream: the address of a cudaStream_t of that device.");
  m.def("cuda_linear", &linear, nb::arg("layout"), nb::arg("K"), nb::arg("x"), nb::arg("x_scale").none(),
        nb::arg("blocks"), nb::arg("scale").none(), nb::arg("bias").none(), nb::arg("y"), nb::arg("accumulate"),
        nb::arg("stream"), release,
        "y = x W^T + bias on tensor cores. x: codes, uint8, or bfloat16 [M, at least K], rows a multiple of 16 bytes; "
        "x_scale: float32 [M]; blocks, scale: of make_tiles; bias: float32 [N]; y: [M, N], written; accumulate: "
        "\"fast\" or \"full\".");
}

}  // namespace lacuna::python
