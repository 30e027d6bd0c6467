// src/kernels/cuda/plan_search.h - which plans make several products fastest together: the one search of the decoder's
// whole tokens, of linear layers alone and of SpQt's figures, and what it tries. Plain C++; the caller has the clock.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "kernels/cuda/gemv.h"
#include "kernels/cuda/groups.h"

namespace lacuna::cuda {

/// Plans to try for a product, made of the fastest one so far when their turn comes; may be none.
template <class Plan>
using Candidates = std::function<std::vector<Plan>(const Plan& best)>;

struct SearchOptions {
  int rounds = 2;                // over all products
  double noise = 0.002;          // share of the time that a plan must save to be taken
  std::function<void()> step{};  // called after the candidates of each stage, `rounds` times for each
};

/// Changes the plan of one product at a time and keeps what makes everything faster. plans: [products], where the
/// search begins and then what it found. stages: [products][..], tried one after the other. measure(plans):
/// milliseconds of everything with these plans. What a product already has is not measured again.
template <class Plan, class Measure>
void search_plans(std::vector<Plan>& plans, const std::vector<std::vector<Candidates<Plan>>>& stages,
                  const Measure& measure, const SearchOptions& options = {}) {
  double least = measure(plans);
  for (int round = 0; round < options.rounds; ++round) {
    for (size_t product = 0; product < plans.size(); ++product) {
      for (const Candidates<Plan>& stage : stages[product]) {
        const std::vector<Plan> candidates = stage(plans[product]);
        for (const Plan& candidate : candidates) {
          if (candidate == plans[product]) continue;
          Plan before = std::exchange(plans[product], candidate);
          const double ms = measure(plans);
          if (ms < least * (1 - options.noise))
            least = ms;
          else
            plans[product] = std::move(before);
        }
        if (options.step) options.step();
      }
    }
  }
}

/// Milliseconds of everything with a product's default plan and with the one that was found.
struct PlanGain {
  double standard_ms = 0, found_ms = 0;
};

/// What the found plan of each product gains, the others as they are. One that is no faster than the default was a
/// lucky measurement: the default replaces it. standard: [products].
template <class Plan, class Measure>
std::vector<PlanGain> measure_gains(std::vector<Plan>& plans, const std::vector<Plan>& standard,
                                    const Measure& measure) {
  std::vector<PlanGain> out;
  for (size_t product = 0; product < plans.size(); ++product) {
    Plan found = std::exchange(plans[product], standard[product]);
    PlanGain& gain = out.emplace_back();
    gain.standard_ms = gain.found_ms = measure(plans);
    if (found == standard[product]) continue;
    plans[product] = std::move(found);
    gain.found_ms = measure(plans);
    if (gain.found_ms < gain.standard_ms) continue;
    plans[product] = standard[product];
    gain.found_ms = gain.standard_ms;
  }
  return out;
}

/// Takes `others` for all products at once where everything is then faster, and returns whether it did: a search that
/// began with a lucky time never finds them one by one. ms: of what is taken.
template <class Plan, class Measure>
bool take_if_faster(std::vector<Plan>& plans, std::vector<Plan> others, const Measure& measure, double& ms) {
  ms = measure(plans);
  if (others == plans) return false;
  std::swap(plans, others);
  const double theirs = measure(plans);
  if (theirs < ms) {
    ms = theirs;
    return true;
  }
  std::swap(plans, others);
  return false;
}

/// Every kernel, with segments for several shares of the device; early shares as those of `best`.
std::vector<GemvPlan> kernel_candidates(const DeviceInfo& device, const layout::Layout& layout, const Columns& weights,
                                        const GemvPlan& best);
/// `best` with all headers and several shares of the codes early.
std::vector<GemvPlan> early_candidates(const GemvPlan& best);
/// `best` without early headers.
GemvPlan without_early_headers(GemvPlan best);

/// Every kernel (Math::fma: the one of `best`) with blocks for several shares of the device; split and early as those
/// of `best`.
std::vector<GroupsPlan> kernel_candidates(const DeviceInfo& device, const layout::Layout& layout, const Groups& weights,
                                          const GroupsPlan& best);
/// `best` with several numbers of records or chunks early, from none to all.
std::vector<GroupsPlan> early_candidates(const GroupsPlan& best);

}  // namespace lacuna::cuda
