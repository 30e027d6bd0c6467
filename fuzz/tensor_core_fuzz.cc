// f8, nm24_f8 and nm24_bf16 from any bytes: checked or refused with an Error; what passes the check decodes to finite
// values, and what was encoded passes it with one byte changed or is refused. The input is the layout and shape, then
// either the bytes of the matrix or (second kind) a mask, with one byte of a good matrix changed. A third kind is a
// policy's text.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"
#include "io/image_policy.h"
#include "layout/tensor_core.h"
#include "layout/two_of_four.h"

namespace {

using namespace lacuna;

/// Bytes in a block of exactly their size, so that a step outside is seen.
struct Exact {
  size_t size;
  std::unique_ptr<std::byte[]> data{new std::byte[size]()};
  std::span<std::byte> bytes() { return {data.get(), size}; }
};

void use(const layout::Layout& l, layout::Shape shape, std::span<const std::byte> bytes) {
  std::vector<float> w(size_t(shape.N * shape.K));
  layout::decode_rows(l, shape, bytes, 0, shape.N, w.data());  // whatever they are, nothing outside is touched
  try {
    layout::check_bytes(l, shape, bytes);
  } catch (const Error&) {
    return;
  }
  if (layout::find_non_finite(w) >= 0) std::abort();
  const layout::TensorCoreRow map = layout::tensor_core_row(l, shape.K);
  std::vector<uint8_t> keep(static_cast<size_t>(shape.K));
  for (int64_t n = 0; map.sparse && n < shape.N; ++n) {
    layout::read_keep(l, shape.K, bytes.subspan(size_t(n * map.bytes), size_t(map.bytes)), keep);
    if (layout::find_bad_group(keep) >= 0) std::abort();
  }
}

void use_policy(std::string_view text) {
  const io::ImagePolicy policy = io::ImagePolicy::parse(text, "fuzz.json");
  for (const char* name : {"a", "transformer_blocks.0.attn.to_q.weight"}) {
    const auto choice = policy.choose(name);
    if (choice.rule >= int(policy.rule_count())) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kHead = 6;
  constexpr layout::Id kIds[] = {layout::Id::f8, layout::Id::nm24_f8, layout::Id::nm24_bf16};
  if (size < kHead) return 0;
  const layout::Layout& l = layout::get(kIds[data[0] % 3]);
  const layout::Shape shape{1 + data[2] % 9, 1 + data[3]};
  const std::span<const uint8_t> rest(data + kHead, size - kHead);
  try {
    if (data[1] < 64) {
      use_policy({reinterpret_cast<const char*>(rest.data()), rest.size()});
      return 0;
    }
    Exact matrix{size_t(l.size_bytes(shape))};
    if (data[1] < 160 || rest.empty()) {
      std::memcpy(matrix.data.get(), rest.data(), std::min(rest.size(), matrix.size));
      use(l, shape, matrix.bytes());
      return 0;
    }
    std::vector<float> w(size_t(shape.N * shape.K));
    std::vector<uint8_t> keep(l.id == layout::Id::f8 ? 0 : w.size());
    for (size_t i = 0; i < w.size(); ++i)
      w[i] = std::ldexp(float(int8_t(rest[i % rest.size()])), std::min(rest[i % 3 % rest.size()] - 128, 120));
    for (size_t n = 0; !keep.empty() && n < size_t(shape.N); ++n)
      layout::keep_largest(std::span(w).subspan(n * size_t(shape.K), size_t(shape.K)),
                           std::span(keep).subspan(n * size_t(shape.K), size_t(shape.K)));
    layout::encode_tensor_core(l, shape, w, keep, matrix.bytes());
    if (layout::first_bad_row(l, shape, matrix.bytes()) >= 0) std::abort();  // what was encoded is sound
    matrix.bytes()[size_t(data[4]) % matrix.size] ^= std::byte(data[5]);
    use(l, shape, matrix.bytes());
  } catch (const Error&) {
  }
  return 0;
}
