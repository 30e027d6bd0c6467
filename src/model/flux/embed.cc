#include "model/flux/embed.h"

#include <cmath>

namespace lacuna::model::flux {

namespace {

constexpr double kBase = 10000;

}  // namespace

std::vector<float> sinusoid(double t, int64_t size) {
  const int64_t half = size / 2;
  std::vector<float> out(size_t(2 * half));
  for (int64_t i = 0; i < half; ++i) {
    const double angle = t * std::exp(-std::log(kBase) * double(i) / double(half));
    out[size_t(i)] = float(std::cos(angle));
    out[size_t(half + i)] = float(std::sin(angle));
  }
  return out;
}

RopeTable rope_table(std::span<const float> ids, std::span<const int64_t> axes) {
  RopeTable out;
  for (size_t first = 0; first < ids.size(); first += axes.size()) {
    for (size_t axis = 0; axis < axes.size(); ++axis) {
      for (int64_t j = 0; j < axes[axis] / 2; ++j) {
        const double angle = ids[first + axis] * std::pow(kBase, -2.0 * double(j) / double(axes[axis]));
        out.cos.push_back(float(std::cos(angle)));
        out.sin.push_back(float(std::sin(angle)));
      }
    }
  }
  return out;
}

void silu(std::span<float> x) {
  for (float& v : x) v /= 1 + std::exp(-v);
}

}  // namespace lacuna::model::flux
