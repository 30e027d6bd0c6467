// src/cli/profile.h - the flags of run and bench that say how weights are multiplied on this machine.
#pragma once

#include <spdlog/spdlog.h>

#include <optional>
#include <string>
#include <utility>

#include "calibrate/cuda_profile.h"
#include "calibrate/profile.h"
#include "cli/command.h"
#include "core/error.h"

namespace lacuna::cli {

/// This machine, run with so many threads.
calibrate::Machine this_machine(int threads);
/// The profile of this machine in the cache folder; empty where there is no such folder.
std::string profile_path(const calibrate::Machine& machine);

struct ProfileFlags {
  std::string path;  // empty: the one in the cache folder
  bool none = false, deterministic = false;
};

/// Adds --profile, --no-profile, --deterministic.
void add_profile(CLI::App& command, ProfileFlags& flags);
/// Adds --profile and --no-profile of a card's plans that `lacuna image tune` finds.
void add_card_profile(CLI::App& command, ProfileFlags& flags);

/// The plans in use; `profile`: where they come from, nullopt: the defaults.
struct MachinePlans {
  std::optional<calibrate::Profile> profile;
  kernels::Plans plans;
  std::string source;  // for --explain: the file, or why there is none
  bool deterministic = false;

  /// Options of a decoder that uses them, which must not outlive this.
  model::LoadOptions load_options(kernels::Prepare prepare) const {
    return {.prepare = prepare, .plans = &plans, .deterministic = deterministic};
  }
};

/// Reads the profile. One that is damaged, stale or nonsense is left out with one warning. Throws Error when --profile
/// names no file.
MachinePlans load_plans(const ProfileFlags& flags, int threads);
/// The same for the layers on the CPU of a model on a device, whose plans --profile then names: those in the cache
/// folder.
MachinePlans load_plans_beside_gpu(ProfileFlags flags, int threads);

/// The same of a card.
calibrate::CudaMachine this_machine(const cuda::DeviceInfo& device);
std::string profile_path(const calibrate::CudaMachine& machine);
/// What `tune` adds to: load(), which gives a profile, nothing where there is no file, and throws Error for another
/// file. At the default path that one is replaced, with a warning; one that -o names is not: Error.
template <class Profile, class Load>
Profile profile_to_add_to(Profile empty, bool named, const Load& load) {
  try {
    if (auto known = load()) return *std::move(known);
  } catch (const Error& error) {
    if (named) throw Error("{}; name another file with -o, or remove this one", error.what());
    spdlog::warn("what was there is replaced: {}", printable(error.what()));
  }
  return empty;
}

struct CudaPlans {
  cuda::Plans plans;
  std::string source;
};
CudaPlans load_cuda_plans(const ProfileFlags& flags, const cuda::DeviceInfo& device);
/// The same of products on tensor cores, which `image tune` measures.
struct TensorCorePlans {
  cuda::TensorCoreTable plans;
  std::string source;
};
TensorCorePlans load_tensor_core_plans(const ProfileFlags& flags, const cuda::DeviceInfo& device);

/// A line for each distinct group of zigzag weights: its plan and what was measured.
std::string explain_plans(const io::Checkpoint& checkpoint, const MachinePlans& plans);
/// A line or two for each thresholded input of a sparse decoder: in which layers it runs sparse and in which dense, and
/// the times that decided it. Empty for a dense decoder.
std::string explain_sparsity(const LoadedModel& model, const MachinePlans& plans);
/// "0.31 ms dense, 0.24 / 0.20 / 0.17 / 0.13 ms with 25 / 40 / 50 / 65% left out".
std::string describe(const calibrate::PlanTimes& times, const std::vector<double>& levels);

}  // namespace lacuna::cli
