// python/src/weights.cc - from weights to canonical bytes (layout/tensor_core.h) and back, and 2:4 masks.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "bind.h"
#include "core/error.h"
#include "io/image_masks.h"
#include "layout/row_work.h"
#include "layout/tensor_core.h"
#include "layout/two_of_four.h"
#include "tensor.h"

namespace lacuna::python {

namespace nb = nanobind;
using layout::Shape;

namespace {

Tensor packed_rows(const layout::Layout& layout, int64_t K, const Array& array) {
  Tensor out = host(array, "packed", Type::u8, 2);
  need_shape(out, "packed", {out.shape[0], row_bytes(layout, K)});
  return out;
}

void need_finite(const Tensor& weight) {
  const int64_t at = layout::find_non_finite(weight.values<const float>());
  if (at >= 0)
    throw Error("weight: row {}, input {} is {}; weights have to be finite", at / weight.shape[1], at % weight.shape[1],
                weight.as<float>()[at]);
}

void encode(const std::string& layout_name, const Array& weight_array, const std::optional<Array>& keep_array,
            const Array& packed_array) {
  const layout::Layout& layout = packed_layout(layout_name);
  const Tensor weight = host(weight_array, "weight", Type::f32, 2);
  const Shape shape{weight.shape[0], weight.shape[1]};
  const Tensor packed = packed_rows(layout, shape.K, packed_array);
  need_shape(packed, "packed", {shape.N, row_bytes(layout, shape.K)});
  std::span<const uint8_t> keep;
  if (keep_array) {
    const Tensor mask = host(*keep_array, "keep", Type::u8, 2);
    need_shape(mask, "keep", {shape.N, shape.K});
    keep = mask.values<const uint8_t>();
  }
  need_finite(weight);
  with_threads(weight.count(), [&](ThreadPool& pool) {
    layout::encode_tensor_core(layout, shape, weight.values<const float>(), keep, packed.bytes(), &pool);
  });
}

void decode(const std::string& layout_name, const Array& packed_array, const Array& weight_array) {
  const layout::Layout& layout = packed_layout(layout_name);
  const Tensor weight = host(weight_array, "weight", Type::f32, 2);
  const Shape shape{weight.shape[0], weight.shape[1]};
  const Tensor packed = packed_rows(layout, shape.K, packed_array);
  need_shape(packed, "packed", {shape.N, row_bytes(layout, shape.K)});
  constexpr int64_t kGrain = 16;
  with_threads(weight.count(), [&](ThreadPool& pool) {
    pool.parallel_for(shape.N, kGrain, [&](int64_t begin, int64_t end) {
      layout::decode_rows(layout, shape, packed.bytes(), begin, end - begin, weight.as<float>() + begin * shape.K);
    });
  });
}

void check(const std::string& layout_name, int64_t K, const Array& packed_array) {
  const layout::Layout& layout = packed_layout(layout_name);
  const Tensor packed = packed_rows(layout, K, packed_array);
  const int64_t N = packed.shape[0], bytes = packed.shape[1];
  std::atomic<int64_t> bad{N};
  constexpr int64_t kGrain = 64;
  with_threads(packed.count(), [&](ThreadPool& pool) {
    pool.parallel_for(N, kGrain, [&](int64_t begin, int64_t end) {
      const auto rows = packed.bytes().subspan(size_t(begin * bytes), size_t((end - begin) * bytes));
      const int64_t found = layout::first_bad_row(layout, {end - begin, K}, rows);
      int64_t least = bad.load();
      while (found >= 0 && begin + found < least && !bad.compare_exchange_weak(least, begin + found)) {
      }
    });
  });
  if (bad < N)
    throw Error("row {} is not {}: its scale, a code or a place is none that an encoder writes; the data are damaged",
                bad.load(), layout.name);
}

/// fill(weights of a row, its marks).
template <class Fill>
void mark_rows(const Array& weight_array, const Array& keep_array, const Fill& fill) {
  const Tensor weight = host(weight_array, "weight", Type::f32, 2), keep = host(keep_array, "keep", Type::u8, 2);
  need_shape(keep, "keep", {weight.shape[0], weight.shape[1]});
  need_finite(weight);
  const auto K = size_t(weight.shape[1]);
  with_threads(weight.count(), [&](ThreadPool& pool) {
    layout::each_row(weight.shape[0], &pool, [&](int64_t n) {
      fill(weight.values<const float>().subspan(size_t(n) * K, K), keep.values<uint8_t>().subspan(size_t(n) * K, K));
    });
  });
}

void keep_largest(const Array& weight, const std::optional<Array>& norms_array, const Array& keep) {
  std::span<const float> norms;
  if (norms_array) {
    const Tensor tensor = host(*norms_array, "norms", Type::f32, 1);
    norms = tensor.values<const float>();
    for (size_t k = 0; k < norms.size(); ++k)
      if (!(norms[k] >= 0 && norms[k] < std::numeric_limits<float>::infinity()))
        throw Error("norms: input {} has {}, but a norm is a finite number >= 0", k, norms[k]);
  }
  mark_rows(weight, keep, [&](std::span<const float> row, std::span<uint8_t> marks) {
    if (norms_array && norms.size() != row.size())
      throw Error("norms: {} values for {} inputs", norms.size(), row.size());
    std::vector<float> score(row.size());
    if (norms_array)
      io::wanda_scores(row, norms, score);
    else
      io::magnitude_scores(row, score);
    layout::keep_largest(score, marks);
  });
}

void keep_nonzero(const Array& weight, const Array& keep) {
  mark_rows(weight, keep,
            [](std::span<const float> row, std::span<uint8_t> marks) { layout::keep_nonzero(row, marks); });
}

}  // namespace

void bind_weights(nb::module_& m) {
  const auto release = nb::call_guard<nb::gil_scoped_release>();
  m.def(
      "row_bytes", [](const std::string& name, int64_t K) { return row_bytes(packed_layout(name), K); },
      nb::arg("layout"), nb::arg("K"), "Bytes of a row of K weights.");
  m.def("encode", &encode, nb::arg("layout"), nb::arg("weight"), nb::arg("keep").none(), nb::arg("packed"), release,
        "weight: float32 [N, K]; keep: uint8 [N, K], 0: dropped, None for f8; packed: uint8 [N, row_bytes], written. "
        "Raises Error for a weight that is not finite and for a mask that is not 2:4, naming the row.");
  m.def("decode", &decode, nb::arg("layout"), nb::arg("packed"), nb::arg("weight"), release,
        "packed: uint8 [N, row_bytes]; weight: float32 [N, K], written.");
  m.def("check", &check, nb::arg("layout"), nb::arg("K"), nb::arg("packed"), release,
        "Raises Error naming the first row of packed, uint8 [N, row_bytes], that no encoder writes.");
  m.def("keep_largest", &keep_largest, nb::arg("weight"), nb::arg("norms").none(), nb::arg("keep"), release,
        "Marks two of every four weights: those of the largest |w|, or |w| times its input's norm. weight: float32 "
        "[N, K]; norms: float32 [K] or None; keep: uint8 [N, K], written.");
  m.def("keep_nonzero", &keep_nonzero, nb::arg("weight"), nb::arg("keep"), release,
        "Marks the weights of a matrix that is 2:4 already. weight: float32 [N, K]; keep: uint8 [N, K], written. "
        "Raises Error naming the row and the group of four that has more than two.");
}

}  // namespace lacuna::python
