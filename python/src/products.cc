// python/src/products.cc - products on the CPU, by the program's own kernels.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <array>
#include <optional>
#include <string>

#include "bind.h"
#include "core/e4m3.h"
#include "core/error.h"
#include "kernels/e4m3_tokens.h"
#include "kernels/linear.h"
#include "tensor.h"

namespace lacuna::python {

namespace nb = nanobind;

namespace {

void quantize_per_token(const Array& x_array, const Array& codes_array, const Array& scale_array) {
  const Tensor x = host(x_array, "x", Type::f32, 2), codes = host(codes_array, "codes", Type::u8, 2),
               scale = host(scale_array, "scale", Type::f32, 1);
  const int64_t M = x.shape[0], K = x.shape[1], stride = codes.shape[1];
  need_shape(scale, "scale", {M});
  need_shape(codes, "codes", {M, std::max(K, stride)});
  with_threads(x.count(), [&](ThreadPool& pool) {
    pool.parallel_for(M, 1, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m)
        kernels::quantize_per_token(x.as<float>() + m * K, K, 1, K, codes.as<e4m3>() + m * stride,
                                    scale.as<float>() + m);
    });
  });
}

void linear(const std::string& layout_name, const Array& x_array, const Array& packed_array,
            const std::optional<Array>& bias_array, const Array& y_array) {
  const layout::Layout& layout = packed_layout(layout_name);
  const Tensor x = host(x_array, "x", Type::f32, 2), packed = host(packed_array, "packed", Type::u8, 2),
               y = host(y_array, "y", Type::f32, 2);
  const int64_t M = x.shape[0], K = x.shape[1], N = packed.shape[0];
  need_shape(packed, "packed", {N, row_bytes(layout, K)});
  need_shape(y, "y", {M, N});
  kernels::WeightView view{.name = "weight", .layout = &layout, .shape = {.N = N, .K = K}, .bytes = packed.bytes()};
  if (bias_array) {
    const Tensor bias = host(*bias_array, "bias", Type::f32, 1);
    need_shape(bias, "bias", {N});
    view.bias = bias.values<const float>();
  }
  if (M == 0 || N == 0) return;
  with_threads(N * K * M, [&](ThreadPool& pool) {
    // These layouts are read in place, so that a group costs nothing to make.
    const auto group = kernels::make_cpu_linear_group(std::array{view}, pool, kernels::Prepare::in_place);
    group->run({.x = x.as<float>(), .M = M, .stride = K}, std::array{kernels::Output{y.as<float>(), N}});
  });
}

}  // namespace

void bind_products(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  m.def("quantize_per_token", &quantize_per_token, nb::arg("x"), nb::arg("codes"), nb::arg("scale"), release,
        "x: float32 [M, K]; codes: uint8 [M, at least K], E4M3, written up to K; scale: float32 [M], written.");
  m.def("linear", &linear, nb::arg("layout"), nb::arg("x"), nb::arg("packed"), nb::arg("bias").none(), nb::arg("y"),
        release,
        "y = x W^T + bias. x: float32 [M, K]; packed: uint8 [N, row_bytes]; bias: float32 [N] or None; y: float32 "
        "[M, N], written.");
}

}  // namespace lacuna::python
