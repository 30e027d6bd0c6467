#include "cli/scratch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

#include "calibrate/calibrate.h"
#include "core/error.h"
#include "core/rng.h"
#include "core/temporary_name.h"

namespace lacuna::cli {
namespace {

constexpr int64_t kCalibrationTokens = 64;

/// A folder of its own that goes away with the object, or with the program when a signal ends it; empty by then.
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::filesystem::path& parent) : path_((parent / "lacuna-bench-XXXXXX").string()) {
    if (::mkdtemp(path_.data()) == nullptr)
      throw Error("{}: cannot be created: {}; choose another folder with --scratch", path_, std::strerror(errno));
    on_signal_.emplace(path_);
  }
  ~ScratchFolder() { ::rmdir(path_.c_str()); }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  std::string file(const char* name) const { return path_ + "/" + name; }

 private:
  std::string path_;
  std::optional<TemporaryName> on_signal_;
};

}  // namespace

std::string scratch_folder(const std::string& folder) {
  return folder.empty() ? std::filesystem::temp_directory_path().string() : folder;
}

ScratchFile::ScratchFile(const std::string& parent, const std::function<void(const std::string& name)>& write) {
  const ScratchFolder folder(scratch_folder(parent));
  const std::string name = folder.file("weights.gguf");
  const TemporaryName on_signal(name);
  write(name);
  descriptor_ = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
  const int reason = errno;
  ::unlink(name.c_str());
  if (descriptor_ < 0) throw Error("{}: cannot be opened: {}", name, std::strerror(reason));
}

ScratchFile::~ScratchFile() { ::close(descriptor_); }

std::string ScratchFile::path() const { return fmt::format("/proc/self/fd/{}", descriptor_); }

model::ThresholdSet thresholds_of_random_tokens(const LoadedModel& model, const std::vector<double>& levels) {
  const model::Config& config = model.decoder->config();
  calibrate::CalibrateOptions options;
  options.levels = levels;
  options.modes = {model::Mode::uniform};
  options.tokens = options.ctx = std::min(kCalibrationTokens, config.n_ctx);
  options.skipped = std::min(options.skipped, options.tokens - 1);
  options.group = skipped_group(model.checkpoint);
  options.progress = false;
  Rng rng(6);
  std::vector<int32_t> ids(size_t(options.tokens));
  for (int32_t& id : ids) id = int32_t(rng.below(uint64_t(config.n_vocab)));
  spdlog::warn("no thresholds for these weights: uniform ones come from {} random tokens, good for speed only",
               options.tokens);
  calibrate::CpuSubject subject(*model.decoder, model.checkpoint);
  return calibrate::calibrate(subject, model.checkpoint, ids, "", options).set;
}

std::optional<model::Thresholds> thresholds_of_bench(const LoadedModel& model, const std::string& path,
                                                     const std::string& synthetic, const SparsityFlags& flags) {
  if (!flags.sparse() || synthetic.empty() || !flags.thresholds.empty())
    return select_thresholds(model.checkpoint, path, flags, model.gpu != nullptr);
  if ((!flags.mode.empty() && flags.mode != "uniform") || flags.criterion_or_default() != model::Criterion::magnitude)
    throw Error("random weights have uniform thresholds by magnitude only, unless --thresholds names a file");
  const model::ThresholdSet set = thresholds_of_random_tokens(model, {flags.act_sparsity});
  return set.select(flags.act_sparsity, model::Mode::uniform, model::Criterion::magnitude, synthetic);
}

}  // namespace lacuna::cli
