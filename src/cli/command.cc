#include "cli/command.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "core/error.h"
#include "io/atomic_file.h"

namespace lacuna::cli {

void add_common(CLI::App& command, Common& common) {
  command.add_option("--threads", common.threads, "threads to compute with; default: the cores this process may use")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str()
      ->type_name("N")
      ->group("Common");
  command.add_option("--device", common.device, "where to compute: cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str()
      ->type_name("NAME")
      ->group("Common");
  command.add_flag("--json", common.json, "print only JSON on stdout, one object a line; messages go to stderr")
      ->group("Common");
}

void check_common(const Common& common) {
  if (common.device == "cuda") throw Error("this build has no CUDA backend yet; use --device cpu");
}

void print(std::string_view text) {
  while (!text.empty()) {
    const ssize_t done = ::write(STDOUT_FILENO, text.data(), text.size());
    if (done < 0) {
      if (errno == EINTR) continue;
      if (errno == EPIPE) throw ReaderGone{};
      throw Error("standard output: cannot be written: {}", std::strerror(errno));
    }
    text.remove_prefix(size_t(done));
  }
}

std::string printable(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f)
      out += fmt::format("\\x{:02x}", byte);
    else
      out += c;
  }
  return out;
}

void print_json(const Json& object) { print(object.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"); }

std::string read_input(const std::string& path) {
  const bool standard_input = path == "-";
  std::FILE* file = standard_input ? stdin : std::fopen(path.c_str(), "rb");
  if (!file) throw Error("{}: cannot be opened: {}", path, std::strerror(errno));
  std::string text;
  char buffer[1 << 16];
  size_t got = 0;
  while ((got = std::fread(buffer, 1, sizeof(buffer), file)) > 0) text.append(buffer, got);
  const int error = std::ferror(file) ? errno : 0;
  if (!standard_input) std::fclose(file);
  if (error) throw Error("{}: cannot be read: {}", path, std::strerror(error));
  return text;
}

void write_output(const std::string& path, std::string_view text) {
  io::AtomicFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

int64_t peak_memory_bytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return int64_t(usage.ru_maxrss) * 1024;
}

std::string human_bytes(int64_t bytes) {
  if (bytes >= int64_t{1} << 30) return fmt::format("{:.2f} GiB", double(bytes) / (1 << 30));
  if (bytes >= 1 << 20) return fmt::format("{:.1f} MiB", double(bytes) / (1 << 20));
  if (bytes >= 1 << 10) return fmt::format("{:.1f} KiB", double(bytes) / (1 << 10));
  return fmt::format("{} B", bytes);
}

layout::Id layout_named(const std::string& flag, const std::string& name) {
  if (const layout::Layout* found = layout::find(name)) return found->id;
  throw Error("{} {}: unknown layout; known: {}", flag, name, layout::known_names());
}

kernels::KvType parse_kv(const std::string& name) {
  if (name == "f16") return kernels::KvType::f16;
  if (name == "q8_0") return kernels::KvType::q8_0;
  if (name == "f32") return kernels::KvType::f32;
  throw Error("--kv {}: unknown type of cache; known: f16, q8_0, f32", name);
}

void add_kv(CLI::App& command, std::string& kv) {
  command.add_option("--kv", kv, "how keys and values are stored: f16, q8_0 (half the memory) or f32")
      ->check(CLI::IsMember({"f16", "q8_0", "f32"}))
      ->capture_default_str()
      ->type_name("TYPE");
}

CLI::Option* add_seed(CLI::App& command, uint64_t& seed, const std::string& description) {
  const CLI::Validator no_sign(
      [](std::string& text) {
        return text.find('-') == std::string::npos ? std::string() : text + " is negative; a seed is 0 or more";
      },
      "");
  return command.add_option("--seed", seed, description)->check(no_sign)->capture_default_str()->type_name("S");
}

void check_out(const std::string& flag, const std::string& path) {
  if (path.empty()) throw Error("{} needs the name of the file to write, got an empty one", flag);
}

const Tokenizer& LoadedModel::need_tokenizer() const {
  if (!tokenizer) throw Error("{}: the model has no tokenizer, so it cannot read text", checkpoint.path());
  return *tokenizer;
}

LoadedModel load_model(const std::string& path, const Common& common, const model::LoadOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  LoadedModel model{io::Checkpoint::open(path), std::nullopt, std::make_unique<ThreadPool>(common.threads), nullptr, 0};
  if (model.checkpoint.vocabulary().model != Vocabulary::Model::none)
    model.tokenizer.emplace(model.checkpoint.vocabulary());
  model.decoder = model::Decoder::load(model.checkpoint, *model.pool, options);
  model.load_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return model;
}

}  // namespace lacuna::cli
