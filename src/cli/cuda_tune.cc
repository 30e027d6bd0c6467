#include "cli/cuda_tune.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "calibrate/cuda_profile.h"
#include "cli/profile.h"
#include "core/error.h"
#include "core/say.h"

namespace lacuna::cli {
namespace {

/// nullopt, with a warning, where there are none and no flag asks for any.
std::optional<model::ThresholdSet> thresholds_to_tune(const CudaTuneRequest& request, const LoadedModel& model) {
  SparsityFlags flags;
  flags.thresholds = request.thresholds;
  if (!request.levels.empty() || !request.thresholds.empty())
    return load_thresholds(model.checkpoint, request.model, flags);
  auto set = find_thresholds(model.checkpoint, request.model, flags);
  if (!set)
    spdlog::warn(
        "only dense tokens are tuned: {} holds no thresholds of activation sparsity; `lacuna calibrate` makes them",
        printable(request.model));
  return set;
}

template <class Tuning>
void print_row(const CudaTuneRequest& request, const Tuning& tuning, const LoadedModel& model,
               const std::string& path) {
  if (!request.common.json) {
    print(fmt::format("{:<42} {:>9.4f} {:>9.4f}  {}\n", cuda::describe(tuning.product), tuning.standard_ms,
                      tuning.tuned_ms, cuda::describe(tuning.plan)));
    return;
  }
  Json out = {{"product", cuda::describe(tuning.product)}};
  out.update(calibrate::product_json(tuning));
  out["gpu"] = model.gpu->info().name;
  out["path"] = path;
  print_json(out);
}

}  // namespace

int run_cuda_tune(const CudaTuneRequest& request) {
  LoadedModel model = open_model(request.model, request.common);
  open_gpu(model, request.gpu);
  const calibrate::CudaMachine here = this_machine(model.gpu->info());
  const std::string path = request.output.empty() ? profile_path(here) : request.output;
  if (path.empty())
    throw Error(
        "no folder to keep the profile in: LACUNA_CACHE, XDG_CACHE_HOME and HOME are not set; name a file with -o");
  calibrate::CudaProfile profile = profile_to_add_to(calibrate::CudaProfile{.machine = here}, !request.output.empty(),
                                                     [&] { return calibrate::load_cuda_profile(path, here); });
  std::vector<model::Thresholds> wanted;
  const bool zigzag = has_zigzag_weights(model.checkpoint);
  if (!zigzag && (!request.levels.empty() || !request.thresholds.empty()))
    throw Error(
        "{}: has no zigzag weights, and others save nothing where inputs are left out; leave out --levels and "
        "--thresholds",
        request.model);
  if (const auto set = zigzag ? thresholds_to_tune(request, model) : std::nullopt)
    for (const double level : request.levels.empty() ? set->levels : request.levels)
      wanted.push_back(set->select(level, std::nullopt, set->entries.at(0).criterion, request.model));
  load_cuda_decoder(model, {.context = model::CudaDecoder::kTuneContext}, {});

  const auto start = std::chrono::steady_clock::now();
  const std::vector<model::CudaGroupsTuning> of_groups = model.cuda->tune_groups(true);
  std::vector<model::CudaTuning> tuned = model.cuda->tune(true);
  if (tuned.empty() && of_groups.empty())
    throw Error(
        "{}: has neither zigzag nor group-sparse weights, whose plans are tuned; store it with `lacuna quantize "
        "--layout zz4_k`",
        request.model);
  profile.merge(of_groups);
  profile.merge(tuned);
  calibrate::save_cuda_profile(path, profile);  // what is found stays, also where a later level fails
  for (model::Thresholds& thresholds : wanted) {
    model.cuda->set_sparsity(model::SparsityOptions{std::move(thresholds), 0, false});
    const auto sparse = model.cuda->tune(true);
    tuned.insert(tuned.end(), sparse.begin(), sparse.end());
    profile.merge(sparse);
    calibrate::save_cuda_profile(path, profile);
  }

  if (!request.common.json)
    print(fmt::format("{}\n{:<42} {:>9} {:>9}  {}\n", here.gpu, "ms of a whole token", "default", "tuned", "plan"));
  for (const model::CudaGroupsTuning& tuning : of_groups) print_row(request, tuning, model, path);
  for (const model::CudaTuning& tuning : tuned) print_row(request, tuning, model, path);
  if (!request.common.json)
    print(fmt::format("{}: {} products measured in {:.1f} s, {} in all\n", path, of_groups.size() + tuned.size(),
                      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
                      profile.group_sparse.size() + profile.products.size()));
  return 0;
}

}  // namespace lacuna::cli
