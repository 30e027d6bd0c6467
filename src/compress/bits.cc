#include "compress/bits.h"

namespace lacuna::compress {

at::Tensor pack_bits(const at::Tensor& values, int bits) {
  if (bits == 8) return values.contiguous();
  const int64_t n = values.size(0), width = values.size(1), of_byte = 8 / bits, bytes = (width + of_byte - 1) / of_byte;
  const at::Tensor padded = at::constant_pad_nd(values, {0, bytes * of_byte - width}).view({n, bytes, of_byte});
  at::Tensor out = at::zeros({n, bytes}, values.options());
  for (int64_t i = 0; i < of_byte; ++i) out.bitwise_or_(at::bitwise_left_shift(padded.select(2, i), i * bits));
  return out;
}

at::Tensor unpack_bits(const at::Tensor& packed, int bits, int64_t width) {
  if (bits == 8) return packed;
  const int64_t n = packed.size(0), bytes = packed.size(1), of_byte = 8 / bits;
  at::Tensor out = at::empty({n, bytes, of_byte}, packed.options());
  for (int64_t i = 0; i < of_byte; ++i)
    out.select(2, i).copy_(at::bitwise_right_shift(packed, i * bits).bitwise_and_((1 << bits) - 1));
  return out.view({n, bytes * of_byte}).narrow(1, 0, width);
}

}  // namespace lacuna::compress
