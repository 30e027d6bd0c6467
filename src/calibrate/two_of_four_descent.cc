#include "calibrate/two_of_four_descent.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/linear.h"
#include "layout/two_of_four.h"

namespace lacuna::calibrate {

namespace {

constexpr int kIterations = 200;
constexpr double kTolerance = 1e-4;

double norm_of(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += double(value) * double(value);
  return std::sqrt(sum);
}

/// Columns of a row that is as z: the two largest of every four stay.
void project(std::span<const float> z, std::span<uint8_t> keep, std::span<float> theta, std::vector<float>& score) {
  score.resize(z.size());
  std::transform(z.begin(), z.end(), score.begin(), [](float value) { return std::fabs(value); });
  layout::keep_largest(score, keep);
  for (size_t k = 0; k < z.size(); ++k) theta[k] = keep[k] != 0 ? z[k] : 0.0f;
}

}  // namespace

void descend_two_of_four(std::span<const float> w, std::span<const float> second_moment, std::span<uint8_t> keep,
                         std::span<float> theta, ThreadPool& pool) {
  const auto K = int64_t(std::llround(std::sqrt(double(second_moment.size()))));
  const auto width = size_t(K);
  const int64_t rows = K == 0 ? 0 : int64_t(w.size()) / K;
  const auto row = [&](auto values, int64_t n) { return values.subspan(size_t(n) * width, width); };
  const double size = norm_of(second_moment);
  const auto eta = float(size > 0 ? 2 / size : 0);  // 0: every Theta is as good as another

  pool.parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> score(width);
    for (int64_t n = begin; n < end; ++n) {  // Wanda
      for (size_t k = 0; k < width; ++k)
        score[k] = float(std::fabs(double(row(w, n)[k])) * std::sqrt(double(second_moment[k * width + k])));
      layout::keep_largest(score, row(keep, n));
      for (size_t k = 0; k < width; ++k) row(theta, n)[k] = row(keep, n)[k] != 0 ? row(w, n)[k] : 0.0f;
    }
  });

  const kernels::WeightView view{
      "second moment", &layout::get(layout::Id::f32), {K, K}, std::as_bytes(second_moment), {}, {}};
  const auto group = kernels::make_cpu_linear_group(std::span(&view, 1), pool, kernels::Prepare::in_place);
  std::vector<int64_t> active(static_cast<size_t>(rows));
  std::iota(active.begin(), active.end(), int64_t{0});
  std::vector<float> difference(w.size()), step(w.size());  // of active rows; io::kDescentArrays
  for (int t = 1; t <= kIterations && !active.empty(); ++t) {
    const auto count = int64_t(active.size());
    pool.parallel_for(count, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        for (size_t k = 0; k < width; ++k)
          difference[size_t(i) * width + k] = row(w, active[size_t(i)])[k] - row(theta, active[size_t(i)])[k];
    });
    kernels::Activation x;
    x.x = difference.data();
    x.M = count;
    x.stride = K;
    const kernels::Output y{step.data(), K};
    group->run(x, std::span(&y, 1));
    pool.parallel_for(count, 16, [&](int64_t begin, int64_t end) {
      std::vector<float> z(width), score;
      for (int64_t i = begin; i < end; ++i) {
        int64_t& n = active[size_t(i)];
        const auto gradient = row(std::span<const float>(step), i);
        if (!(2 * norm_of(gradient) >= kTolerance * norm_of(row(w, n))) || norm_of(gradient) == 0) {
          n = -1;
          continue;
        }
        for (size_t k = 0; k < width; ++k) z[k] = row(theta, n)[k] + eta * gradient[k];
        project(z, row(keep, n), row(theta, n), score);
      }
    });
    std::erase(active, int64_t{-1});
  }
}

}  // namespace lacuna::calibrate
