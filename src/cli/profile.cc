#include "cli/profile.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>

#include "cli/cache.h"
#include "core/error.h"
#include "core/machine.h"
#include "kernels/ops.h"
#include "model/weight_groups.h"

namespace lacuna::cli {
namespace {

constexpr const char* kProfileGroup = "This machine";

/// "0-3, 7".
std::string ranges(const std::vector<int64_t>& values) {
  std::string out;
  for (size_t i = 0; i < values.size();) {
    size_t last = i;
    while (last + 1 < values.size() && values[last + 1] == values[last] + 1) ++last;
    if (!out.empty()) out += ", ";
    out += last == i ? fmt::format("{}", values[i]) : fmt::format("{}-{}", values[i], values[last]);
    i = last + 1;
  }
  return out;
}

std::string span_of(const std::vector<double>& shares) {
  const auto [least, most] = std::minmax_element(shares.begin(), shares.end());
  return fmt::format("{:.0f} to {:.0f}%", 100 * *least, 100 * *most);
}

std::string begins(double dense_below) {
  if (dense_below >= 1) return "skipping never pays";
  return fmt::format("skipping pays from {:.0f}% on", 100 * dense_below);
}

/// One input of all layers.
struct InputUse {
  std::vector<int64_t> sparse, dense;  // layers
  std::vector<double> sparse_shares, dense_shares;
  std::set<std::string> keys;  // of the groups of the dense ones
};

/// Empty where there is no cache folder.
std::string in_profile_folder(const std::string& name) {
  const std::string folder = cache_folder();
  return folder.empty() ? "" : folder + "/profiles/" + name;
}

/// command: that makes a profile.
void warn_unused(const std::string& why, const ProfileFlags& flags, std::string_view command) {
  spdlog::warn("the profile is not used: {}; make a new one with `{}{}`", printable(why), command,
               flags.path.empty() ? "" : " -o FILE");
}

/// Throws Error for a plan that no kernel of this build has.
void check_kernels(const calibrate::CudaProfile& profile, const std::string& path) {
  for (const model::CudaTuning& tuning : profile.products) {
    const auto kernels = cuda::kernel_plans(layout::get(tuning.product.layout));
    const auto& plan = tuning.plan;
    if (std::none_of(kernels.begin(), kernels.end(), [&](const cuda::GemvPlan& k) {
          return k.warps == plan.warps && k.chunk == plan.chunk && k.resident == plan.resident;
        }))
      throw Error("{}: {}: no kernel has the plan {}", path, cuda::describe(tuning.product), cuda::describe(plan));
  }
  for (const model::CudaGroupsTuning& tuning : profile.group_sparse)
    naming_file(path, [&] { cuda::check_plan(tuning.product, tuning.plan); });
}

CLI::Option* add_profile_path(CLI::App& command, ProfileFlags& flags, const std::string& description) {
  return command
      .add_option("--profile", flags.path,
                  description +
                      "; default: the one in the cache folder (LACUNA_CACHE, else XDG_CACHE_HOME/lacuna, else "
                      "~/.cache/lacuna), where there is one")
      ->type_name("FILE")
      ->group(kProfileGroup);
}

/// What load_cuda_plans and load_tensor_core_plans have in common: where the profile of the card is and can be used,
/// take(profile, path) says what is taken of it, throwing Error where that can't be used, and returns the source.
template <class Take>
std::string load_card_plans(const ProfileFlags& flags, const cuda::DeviceInfo& device, const std::string& command,
                            const Take& take) {
  if (flags.deterministic || flags.none)
    return fmt::format("default plans ({})", flags.deterministic ? "--deterministic" : "--no-profile");
  const calibrate::CudaMachine here = this_machine(device);
  const std::string path = flags.path.empty() ? profile_path(here) : flags.path;
  if (path.empty()) return "default plans: there is no cache folder";
  try {
    if (const auto profile = calibrate::load_cuda_profile(path, here)) return take(*profile, path);
  } catch (const Error& error) {
    warn_unused(error.what(), flags, command);
    return fmt::format("default plans: {} is not used", path);
  }
  if (!flags.path.empty())
    throw Error("--profile {}: there is no such file; make it with `{} -o {}`", path, command, path);
  return fmt::format("default plans: nothing was measured on this card; `{}` does", command);
}

}  // namespace

calibrate::Machine this_machine(int threads) {
  return {cpu_name(), std::string(kernels::isa_name()), threads, LACUNA_VERSION};
}

calibrate::CudaMachine this_machine(const cuda::DeviceInfo& device) {
  return {device.name, device.driver, LACUNA_VERSION};
}

std::string profile_path(const calibrate::Machine& machine) {
  return in_profile_folder(calibrate::profile_file_name(machine));
}

std::string profile_path(const calibrate::CudaMachine& machine) {
  return in_profile_folder(calibrate::cuda_profile_file_name(machine));
}

void add_profile(CLI::App& command, ProfileFlags& flags) {
  CLI::Option* path = add_profile_path(command, flags, "profile of this machine, as `lacuna tune -o FILE` makes it");
  CLI::Option* none =
      command
          .add_flag("--no-profile", flags.none, "the same plans on every machine: what `lacuna tune` found is not used")
          ->excludes(path)
          ->group(kProfileGroup);
  command
      .add_flag(
          "--deterministic", flags.deterministic,
          "results that do not depend on the number of threads or, on cuda, on the order in which blocks end; uses "
          "no profile, and can be slower")
      ->excludes(path)
      ->excludes(none)
      ->group(kProfileGroup);
}

void add_card_profile(CLI::App& command, ProfileFlags& flags) {
  CLI::Option* path = add_profile_path(
      command, flags, "profile of this card, as `lacuna image tune -o FILE` makes it, on a CUDA device");
  command.add_flag("--no-profile", flags.none, "what `lacuna image tune` found is not used")
      ->excludes(path)
      ->group(kProfileGroup);
}

MachinePlans load_plans(const ProfileFlags& flags, int threads) {
  MachinePlans out;
  out.deterministic = flags.deterministic;
  if (flags.deterministic) {
    out.source = "default plans, split by rows (--deterministic)";
    return out;
  }
  if (flags.none) {
    out.source = "default plans (--no-profile)";
    return out;
  }
  const calibrate::Machine here = this_machine(threads);
  const std::string path = flags.path.empty() ? profile_path(here) : flags.path;
  try {
    if (!path.empty()) out.profile = calibrate::load_profile(path, here);
  } catch (const Error& error) {
    warn_unused(error.what(), flags, "lacuna tune MODEL");
    out.source = fmt::format("default plans: {} is not used", path);
    return out;
  }
  if (!out.profile && !flags.path.empty())
    throw Error("--profile {}: there is no such file; make it with `lacuna tune MODEL -o {}`", flags.path, flags.path);
  if (!out.profile) {
    out.source = fmt::format(
        "default plans: nothing was measured on this machine with {} threads; `lacuna tune MODEL` does", threads);
    return out;
  }
  out.plans = out.profile->plans();
  out.source = path;
  return out;
}

MachinePlans load_plans_beside_gpu(ProfileFlags flags, int threads) {
  flags.path.clear();
  return load_plans(flags, threads);
}

CudaPlans load_cuda_plans(const ProfileFlags& flags, const cuda::DeviceInfo& device) {
  CudaPlans out;
  out.source = load_card_plans(flags, device, "lacuna tune MODEL --device cuda",
                               [&](const calibrate::CudaProfile& profile, const std::string& path) {
                                 check_kernels(profile, path);
                                 out.plans = profile.plans();
                                 return path;
                               });
  return out;
}

TensorCorePlans load_tensor_core_plans(const ProfileFlags& flags, const cuda::DeviceInfo& device) {
  constexpr const char* kTune = "lacuna image tune MODEL --device cuda";
  TensorCorePlans out;
  out.source = load_card_plans(
      flags, device, kTune, [&](const calibrate::CudaProfile& profile, const std::string& path) -> std::string {
        if (profile.tensor_core.empty())
          return fmt::format("default plans: {} has none of `image` commands; `{}` measures them", path, kTune);
        profile.tensor_core.check_plans(path);
        out.plans = profile.tensor_core;
        return path;
      });
  return out;
}

std::string describe(const calibrate::PlanTimes& times, const std::vector<double>& levels) {
  std::string ms, shares;
  for (size_t i = 1; i < levels.size(); ++i) {
    ms += fmt::format("{}{:.3f}", i == 1 ? "" : " / ", times.sparse_ms[i]);
    shares += fmt::format("{}{:.0f}", i == 1 ? "" : " / ", 100 * levels[i]);
  }
  if (ms.empty()) return fmt::format("{:.3f} ms dense", times.dense_ms);
  return fmt::format("{:.3f} ms dense, {} ms with {}% left out", times.dense_ms, ms, shares);
}

std::string explain_plans(const io::Checkpoint& checkpoint, const MachinePlans& plans) {
  std::string out = fmt::format("profile: {}\n", plans.source);
  std::set<std::string> seen;
  for (int64_t layer = 0; layer < model::layer_count(checkpoint); ++layer) {
    for (const model::WeightGroup& group : model::layer_groups(checkpoint, layer)) {
      const std::string key = group.key();
      const bool zigzag = std::all_of(group.parts.begin(), group.parts.end(),
                                      [](const kernels::WeightView& part) { return part.layout->zigzag; });
      if (!zigzag || !seen.insert(key).second) continue;
      kernels::Plan plan = plans.plans.of(group.parts);
      if (plans.deterministic) plan.split = kernels::Plan::Split::rows;
      out += fmt::format("{} {}: {}", printable(group.name), key, kernels::describe(plan));
      const calibrate::GroupTuning* tuning = nullptr;
      if (plans.profile)
        if (const auto found = plans.profile->groups.find(key); found != plans.profile->groups.end())
          tuning = &found->second;
      if (tuning != nullptr)
        out += fmt::format("; {}: {}", begins(plan.dense_below), describe(tuning->chosen(), tuning->levels));
      else
        out += "; not measured";
      out += '\n';
    }
  }
  return out;
}

std::string explain_sparsity(const LoadedModel& model, const MachinePlans& plans) {
  const auto& sparsity = model.decoder->sparsity();
  if (!sparsity) return "";
  const model::Thresholds& thresholds = sparsity->thresholds;
  std::map<model::Input, InputUse> inputs;
  for (size_t layer = 0; layer < thresholds.t.size(); ++layer) {
    for (const model::WeightGroup& group : model::layer_groups(model.checkpoint, int64_t(layer))) {
      InputUse& use = inputs[group.input];
      const auto input = size_t(group.input);
      const double share = layer < thresholds.realised.size() ? double(thresholds.realised[layer][input]) : 0;
      const bool dense = thresholds.t[layer][input] == 0;
      (dense ? use.dense : use.sparse).push_back(int64_t(layer));
      (dense ? use.dense_shares : use.sparse_shares).push_back(share);
      if (dense && share > 0) use.keys.insert(group.key());
    }
  }
  std::string out;
  for (const auto& [input, use] : inputs) {
    out += fmt::format("{}:", name_of(input));
    if (!use.sparse.empty())
      out += fmt::format(" layers {} run sparse, {} of the inputs left out", ranges(use.sparse),
                         span_of(use.sparse_shares));
    if (!use.dense.empty())
      out += fmt::format("{} layers {} run dense, {} could be left out", use.sparse.empty() ? "" : ";",
                         ranges(use.dense), span_of(use.dense_shares));
    out += '\n';
    for (const std::string& key : use.keys) {
      if (!plans.profile) continue;
      const auto found = plans.profile->groups.find(key);
      if (found == plans.profile->groups.end()) continue;
      out += fmt::format("  dense because {} here: {}\n", begins(found->second.plan.dense_below),
                         describe(found->second.chosen(), found->second.levels));
    }
  }
  return out;
}

}  // namespace lacuna::cli
