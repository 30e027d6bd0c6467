#include "model/flux/binder.h"

#include "core/error.h"

namespace lacuna::model::flux {

namespace {

/// Whether the bytes of a matrix are those of its rows, one after the other.
bool rows_lie_apart(const layout::Layout& layout) {
  return layout.family == layout::Family::rows || layout.family == layout::Family::tensor_core;
}

}  // namespace

Binder::Binder(const io::ImageCheckpoint& checkpoint, const Config& config, std::deque<std::vector<float>>& biases)
    : checkpoint_(checkpoint), places_(places(config, naming_of(checkpoint))), biases_(biases) {}

Place Binder::place(const std::string& name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? Place{name} : found->second;
}

const io::Tensor& Binder::tensor(const std::string& name, layout::Shape shape) {
  const io::Tensor* found = checkpoint_.find(name);
  if (found == nullptr) throw Error("{}: tensor {} is missing", checkpoint_.path(), name);
  if (found->shape != shape)
    throw Error("{}: tensor {} is {} x {}, but the net's configuration asks for {} x {}", checkpoint_.file_of(name),
                name, found->shape.N, found->shape.K, shape.N, shape.K);
  used_.insert(name);
  return *found;
}

std::vector<float> Binder::values(const io::Tensor& vector, int64_t first, int64_t count) const {
  std::vector<float> all(size_t(vector.shape.K));
  layout::decode_rows(*vector.layout, vector.shape, vector.bytes, 0, 1, all.data(), vector.params);
  if (const int64_t bad = layout::find_non_finite(all); bad >= 0)
    throw Error("{}: tensor {}: value {} is {}, which is not finite", checkpoint_.file_of(vector.name), vector.name,
                bad, all[size_t(bad)]);
  return {all.begin() + first, all.begin() + first + count};
}

kernels::WeightView Binder::weight(const std::string& name, int64_t N, int64_t K, Bias bias) {
  const Place at = place(name);
  const int64_t total = at.total == 0 ? N : at.total;
  const io::Tensor& matrix = tensor(at.tensor + ".weight", {total, K});
  kernels::WeightView view{matrix.name, matrix.layout, {N, K}, matrix.bytes, {}, matrix.params};
  if (N != total) {
    if (!rows_lie_apart(*matrix.layout))
      throw Error(
          "{}: tensor {}: rows of a matrix in layout {} cannot be told apart; make the file from one in diffusers' "
          "naming",
          checkpoint_.file_of(matrix.name), matrix.name, matrix.layout->name);
    const int64_t before = matrix.layout->size_bytes({at.row, K}, matrix.params);
    view.bytes = matrix.bytes.subspan(size_t(before), size_t(matrix.layout->size_bytes({N, K}, matrix.params)));
  }
  naming_file(fmt::format("{}: tensor {}", checkpoint_.file_of(matrix.name), matrix.name),
              [&] { layout::check_bytes(*view.layout, view.shape, view.bytes, view.params); });
  if (bias == Bias::needed)
    view.bias = biases_.emplace_back(values(tensor(at.tensor + ".bias", {1, total}), at.row, N));
  return view;
}

std::vector<float> Binder::norm(const std::string& name, int64_t K) {
  const Place at = place(name);
  return values(tensor(fmt::format("{}.{}", at.tensor, at.suffix), {1, K}), 0, K);
}

void Binder::check_all_used() const {
  for (const auto& [name, tensor] : checkpoint_.tensors())
    if (!used_.contains(name))
      throw Error(
          "{}: tensor {} has no place in the net that its configuration describes; the result would be wrong "
          "without it",
          checkpoint_.file_of(name), name);
}

}  // namespace lacuna::model::flux
