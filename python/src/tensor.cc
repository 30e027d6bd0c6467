#include "tensor.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>

#include "core/error.h"

namespace lacuna::python {

namespace {

struct Known {
  Type type;
  nanobind::dlpack::dtype_code code;
  uint8_t bits;
  std::string_view name;
};
constexpr std::array kKnown = {Known{Type::u8, nanobind::dlpack::dtype_code::UInt, 8, "uint8"},
                               Known{Type::i32, nanobind::dlpack::dtype_code::Int, 32, "int32"},
                               Known{Type::f32, nanobind::dlpack::dtype_code::Float, 32, "float32"},
                               Known{Type::f16, nanobind::dlpack::dtype_code::Float, 16, "float16"},
                               Known{Type::bf16, nanobind::dlpack::dtype_code::Bfloat, 16, "bfloat16"}};

std::string_view name_of(Type type) { return kKnown[size_t(type)].name; }

Type type_of(const Array& array, std::string_view name) {
  const nanobind::dlpack::dtype type = array.dtype();
  for (const Known& known : kKnown)
    if (type.code == uint8_t(known.code) && type.bits == known.bits && type.lanes == 1) return known.type;
  throw Error("{}: its type is not among uint8, int32, float32, float16 and bfloat16; convert it", name);
}

bool in_c_order(const Array& array) {
  int64_t stride = 1;
  for (size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) == 0) return true;
    if (array.shape(i) != 1 && array.stride(i) != stride) return false;
    stride *= int64_t(array.shape(i));
  }
  return true;
}

}  // namespace

int64_t bytes_of(Type type) { return kKnown[size_t(type)].bits / 8; }

int64_t Tensor::count() const {
  int64_t out = 1;
  for (const int64_t size : shape) out *= size;
  return out;
}

Tensor tensor(const Array& array, std::string_view name) {
  Tensor out;
  const int32_t device = array.device_type();
  out.cuda = device == nanobind::device::cuda::value;
  if (!out.cuda && device != nanobind::device::cpu::value && device != nanobind::device::cuda_host::value)
    throw Error("{}: it is neither on the CPU nor on a CUDA device; move it", name);
  out.device = array.device_id();
  out.type = type_of(array, name);
  if (!in_c_order(array)) throw Error("{}: it is not contiguous; call .contiguous()", name);
  for (size_t i = 0; i < array.ndim(); ++i) out.shape.push_back(int64_t(array.shape(i)));
  out.data = static_cast<std::byte*>(array.data());
  return out;
}

Tensor host(const Array& array, std::string_view name, Type type, size_t dims) {
  Tensor out = tensor(array, name);
  if (out.cuda) throw Error("{}: it is on a CUDA device, but has to be on the CPU", name);
  if (out.type != type) throw Error("{}: its type is {}, but has to be {}", name, name_of(out.type), name_of(type));
  if (out.shape.size() != dims)
    throw Error("{}: it has {} dimensions, but has to have {}", name, out.shape.size(), dims);
  return out;
}

void need_shape(const Tensor& tensor, std::string_view name, std::initializer_list<int64_t> shape) {
  if (!std::ranges::equal(tensor.shape, shape))
    throw Error("{}: its shape is [{}], but has to be [{}]", name, fmt::join(tensor.shape, ", "),
                fmt::join(shape, ", "));
}

}  // namespace lacuna::python
