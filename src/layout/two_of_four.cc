#include "layout/two_of_four.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <numeric>

#include "core/error.h"

namespace lacuna::layout {

void keep_largest(std::span<const float> score, std::span<uint8_t> keep) {
  assert(score.size() == keep.size());
  const auto K = int64_t(score.size());
  for (int64_t k = 0; k < K; k += 4) {
    const int64_t width = std::min<int64_t>(4, K - k);
    std::array<int64_t, 4> order{0, 1, 2, 3};
    std::stable_sort(order.begin(), order.begin() + width,
                     [&](int64_t a, int64_t b) { return score[size_t(k + a)] > score[size_t(k + b)]; });
    for (int64_t i = 0; i < width; ++i) keep[size_t(k + order[size_t(i)])] = i < kept_of_four(K, k / 4);
  }
}

void keep_nonzero(std::span<const float> w, std::span<uint8_t> keep) {
  assert(w.size() == keep.size());
  const auto K = int64_t(w.size());
  for (int64_t k = 0; k < K; k += 4) {
    const auto four = w.subspan(size_t(k), size_t(std::min<int64_t>(4, K - k)));
    std::array<float, 4> score{};
    int64_t nonzero = 0;
    for (size_t i = 0; i < four.size(); ++i) {
      score[i] = four[i] != 0 ? 2.0f : std::signbit(four[i]) ? 1.0f : 0.0f;
      nonzero += four[i] != 0;
    }
    if (nonzero > 2)
      throw Error("the group of four at input {} has {} weights that are not 0, but 2:4 allows two; prune it first", k,
                  nonzero);
    keep_largest(std::span(score).first(four.size()), keep.subspan(size_t(k), four.size()));
  }
}

int64_t find_bad_group(std::span<const uint8_t> keep) {
  const auto K = int64_t(keep.size());
  for (int64_t g = 0; 4 * g < K; ++g) {
    const auto four = keep.subspan(size_t(4 * g), size_t(std::min<int64_t>(4, K - 4 * g)));
    if (std::count_if(four.begin(), four.end(), [](uint8_t one) { return one != 0; }) != kept_of_four(K, g)) return g;
  }
  return -1;
}

}  // namespace lacuna::layout
