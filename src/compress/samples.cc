#include "compress/samples.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/rng.h"

namespace lacuna::compress {

std::string Samples::describe() const {
  return fmt::format("{} windows of {} tokens, {} of the text's {} tokens ({:.1f}%), none twice", count(), seq_len,
                     tokens(), text_tokens, 100.0 * double(tokens()) / double(std::max<int64_t>(1, text_tokens)));
}

Samples choose_samples(int64_t text_tokens, const SampleOptions& options, const std::string& where) {
  const int64_t windows = text_tokens / options.seq_len;
  if (windows == 0)
    throw Error("{}: has {} tokens, a window needs {}; give a longer text or a smaller --seq-len", where, text_tokens,
                options.seq_len);
  std::vector<int64_t> order(static_cast<size_t>(windows));
  std::iota(order.begin(), order.end(), int64_t{0});
  const int64_t taken = std::min(windows, options.samples);
  Rng rng(options.seed);
  for (int64_t i = 0; i < taken && taken < windows; ++i)  // the beginning of a Fisher-Yates shuffle
    std::swap(order[size_t(i)], order[size_t(i + int64_t(rng.below(uint64_t(windows - i))))]);
  order.resize(size_t(taken));
  std::sort(order.begin(), order.end());
  Samples out{options.seq_len, {}, text_tokens, options.samples};
  for (const int64_t window : order) out.first.push_back(window * options.seq_len);
  return out;
}

}  // namespace lacuna::compress
