#include "model/beam_engine.h"

#include <algorithm>

#include "kernels/ops.h"

namespace lacuna::model {

double find_choices(std::span<const float> logits, int64_t wanted, std::vector<Candidate>& likeliest) {
  const auto most = std::min(size_t(wanted), logits.size());
  likeliest.clear();
  for (size_t id = 0; id < logits.size(); ++id) {
    const float logit = logits[id];
    if (likeliest.size() < most)
      likeliest.emplace_back();
    else if (!(logit > likeliest.back().logit))
      continue;
    size_t place = likeliest.size() - 1;
    for (; place > 0 && logit > likeliest[place - 1].logit; --place) likeliest[place] = likeliest[place - 1];
    likeliest[place] = {logit, int32_t(id)};
  }
  return kernels::log_sum_exp(logits.data(), int64_t(logits.size()));
}

}  // namespace lacuna::model
