// python/src/tensor.h - tensors that Python hands over through DLPack, checked before anything reads them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace lacuna::python {

/// Any device, type and shape: what bindings take.
using Array = nanobind::ndarray<nanobind::pytorch>;

enum class Type : uint8_t { u8, i32, f32, f16, bf16 };
int64_t bytes_of(Type type);

/// A tensor in C order. The memory belongs to the caller.
struct Tensor {
  std::byte* data = nullptr;
  Type type = Type::u8;
  std::vector<int64_t> shape;
  bool cuda = false;
  int device = 0;  // of CUDA

  int64_t count() const;
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
  template <class T>
  std::span<T> values() const {
    return {as<T>(), size_t(count())};
  }
  std::span<std::byte> bytes() const { return {data, size_t(count() * bytes_of(type))}; }
};

/// Throws Error naming the argument for a tensor that is neither in the CPU's nor in a CUDA device's memory, is of
/// another type than those above, or is not in C order.
Tensor tensor(const Array& array, std::string_view name);

/// The same of a given type and number of dimensions, in the CPU's memory.
Tensor host(const Array& array, std::string_view name, Type type, size_t dims);

/// Throws Error naming the argument unless it has this shape.
void need_shape(const Tensor& tensor, std::string_view name, std::initializer_list<int64_t> shape);

}  // namespace lacuna::python
