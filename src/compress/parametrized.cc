#include "compress/parametrized.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

namespace lacuna::compress {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// A reference that autograd's context can keep.
struct Reference : torch::CustomClassHolder {
  explicit Reference(const Parametrized* of) : matrix(of) {}
  const Parametrized* matrix;
};

template <typename F>
void each_block(const Parametrized& W, int64_t most_weights, const F& f) {
  const int64_t N = W.N(), block = std::clamp<int64_t>(most_weights / W.K(), 1, N);
  for (int64_t first = 0; first < N; first += block) f(first, std::min(block, N - first));
}

variable_list parts_of(const Parametrized& W, int64_t first, int64_t rows) {
  const auto [begin, count] = W.part(first, rows);
  variable_list parts;
  for (const at::Tensor& parameter : W.parameters()) parts.push_back(parameter.detach().narrow(0, begin, count));
  return parts;
}

struct Product : torch::autograd::Function<Product> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::TensorList /*parameters*/,
                            const Parametrized* W, int64_t most_weights) {
    context->save_for_backward({x});
    context->saved_data["W"] = c10::IValue::make_capsule(c10::make_intrusive<Reference>(W));
    context->saved_data["most_weights"] = most_weights;
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = W->N();
    at::Tensor y = at::empty(shape, x.options());
    each_block(*W, most_weights, [&](int64_t first, int64_t rows) {
      const at::Tensor weight = W->rows(first, rows, parts_of(*W, first, rows));
      y.narrow(-1, first, rows).copy_(at::matmul(x, weight.t()));
    });
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto held = context->saved_data["W"].toCapsule();
    const Parametrized& W = *static_cast<const Reference&>(*held).matrix;
    const at::Tensor in = context->get_saved_variables()[0];
    const at::Tensor x = in.reshape({-1, W.K()}), dy = gradients[0].reshape({-1, W.N()});
    variable_list out(1 + W.parameters().size());
    if (context->needs_input_grad(0)) out[0] = at::zeros(x.sizes(), x.options());
    for (size_t i = 1; i < out.size(); ++i) out[i] = at::empty_like(W.parameters()[i - 1]);
    each_block(W, context->saved_data["most_weights"].toInt(), [&](int64_t first, int64_t rows) {
      variable_list parts = parts_of(W, first, rows);
      for (at::Tensor& part : parts) part.set_requires_grad(true);
      at::Tensor weight;
      {
        const c10::AutoGradMode with_gradients(true);
        weight = W.rows(first, rows, parts);
      }
      const at::Tensor d = dy.narrow(1, first, rows);
      if (out[0].defined()) out[0].addmm_(d, weight.detach());
      const variable_list found = torch::autograd::grad({weight}, parts, {at::mm(d.t(), x)});
      const auto [begin, count] = W.part(first, rows);
      for (size_t i = 0; i < found.size(); ++i) out[i + 1].narrow(0, begin, count).copy_(found[i]);
    });
    if (out[0].defined()) out[0] = out[0].view(in.sizes());
    out.resize(out.size() + 2);  // of W and most_weights: none
    return out;
  }
};

}  // namespace

at::Tensor product(const at::Tensor& x, const Parametrized& W, int64_t most_weights) {
  const std::vector<at::Tensor> parameters = W.parameters();
  return Product::apply(x, at::TensorList(parameters), &W, most_weights);
}

}  // namespace lacuna::compress
