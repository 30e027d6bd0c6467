#include "cli/command.h"

#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>

#include "core/error.h"

namespace lacuna::cli {
namespace {

/// All of `text` as a whole number; CLI11 takes the largest one for what does not fit, and 0 for nothing.
template <class T>
std::optional<T> parsed(std::string_view text) {
  T value{};
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failed != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

void add_common(CLI::App& command, Common& common) {
  command.add_option("--threads", common.threads, "threads to compute with; default: the cores this process may use")
      ->check(CLI::Range(1, 1024))
      ->each([cores = common.threads](const std::string& text) {
        int threads = 0;  // CLI11 reads 0x10 and the like too
        if (CLI::detail::lexical_cast(text, threads) && threads > cores)
          spdlog::warn("--threads {}: this process may use {} {}; more threads than cores compute slower", text, cores,
                       cores == 1 ? "core" : "cores");
      })
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
  if (common.device == "cuda")
    throw Error(
        "--device cuda is for `run`, `perplexity`, `eval`, `bench`, `calibrate`, `tune`, `compress` and `image step`, "
        "`denoise`, `bench`, `linear`, `tune` and `calibrate` so far; leave it out here");
}

void add_gpu_choice(CLI::App& command, GpuFlags& flags) {
  command.add_option("--gpu", flags.index, "number of the CUDA device")
      ->check(CLI::Range(0, 1023))
      ->capture_default_str()
      ->type_name("N")
      ->group("CUDA");
  command
      .add_option("--gpu-memory", flags.memory_gib,
                  "use at most so many GiB of the device's memory, as a smaller card would; 0: all that is free")
      ->check(number_in(0, 1e6))
      ->capture_default_str()
      ->type_name("GIB")
      ->group("CUDA");
}

void add_gpu(CLI::App& command, GpuFlags& flags) {
  add_gpu_choice(command, flags);
  command
      .add_option("--gpu-layers", flags.layers,
                  "run the last N layers and the output head on the device, the layers before them on the CPU: for "
                  "models that do not fit; default: all layers")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->type_name("N")
      ->group("CUDA");
  command
      .add_option(
          "--gpus", flags.count,
          "split every layer over N devices of one kind, from --gpu on: heads and feed-forward values are shared "
          "out, two exchanges a layer (tensor parallelism; needs NCCL where the devices do not reach each other's "
          "memory)")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str()
      ->type_name("N")
      ->group("CUDA");
  command
      .add_option(
          "--gpu-split", flags.shards,
          "split every layer into N shards, a multiple of --gpus; default: one a device. With --deterministic the "
          "shards, not the devices, decide the bits")
      ->check(CLI::Range(int64_t{1}, int64_t{1024}))
      ->type_name("N")
      ->group("CUDA");
}

void refuse_split(const GpuFlags& flags, std::string_view what) {
  if (flags.split()) throw Error("{} runs on one device, unsplit; leave out --gpus and --gpu-split", what);
}

void refuse_given(const CLI::App& command, std::initializer_list<const char*> flags, std::string_view needs) {
  for (const char* flag : flags)
    if (const CLI::Option* option = command.get_option_no_throw(flag); option != nullptr && option->count() > 0)
      throw Error("{} needs {}", flag, needs);
}

void check_gpu(const CLI::App& command, const Common& common) {
  if (common.device != "cuda")
    refuse_given(command, {"--gpu", "--gpu-memory", "--gpu-layers", "--gpus", "--gpu-split"}, "--device cuda");
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
  const auto close = [](std::FILE* file) {
    if (file != stdin) std::fclose(file);
  };
  const std::unique_ptr<std::FILE, decltype(close)> file(path == "-" ? stdin : std::fopen(path.c_str(), "rb"), close);
  if (!file) throw Error("{}: cannot be opened: {}", path, std::strerror(errno));
  std::string text;
  char buffer[1 << 16];
  size_t got = 0;
  while ((got = std::fread(buffer, 1, sizeof(buffer), file.get())) > 0) text.append(buffer, got);
  const int error = std::ferror(file.get()) ? errno : 0;
  if (error) throw Error("{}: cannot be read: {}", path, std::strerror(error));
  return text;
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
  const CLI::Validator whole(
      [](std::string& text) {
        return parsed<uint64_t>(text) ? std::string() : "'" + text + "' is no seed: a whole number from 0 to 2^64 - 1";
      },
      "");
  return command.add_option("--seed", seed, description)->check(whole)->capture_default_str()->type_name("S");
}

CLI::Validator integer_in(int64_t low, int64_t high) {
  return {[=](std::string& text) {
            const auto value = parsed<int64_t>(text);
            if (value && *value >= low && *value <= high) return std::string();
            return fmt::format("'{}' is not a whole number from {} to {}", text, low, high);
          },
          ""};
}

CLI::Validator number_in(double low, double high, bool above) {
  return {[=](std::string& text) {
            double value = 0;
            if (CLI::detail::lexical_cast(text, value) && (above ? value > low : value >= low) && value <= high)
              return std::string();
            return above ? fmt::format("'{}' is not a number above {} and at most {}", text, low, high)
                         : fmt::format("'{}' is not a number from {} to {}", text, low, high);
          },
          ""};
}

CLI::Validator layout_name() {
  return {[](std::string& text) {
            return layout::find(text) ? std::string()
                                      : fmt::format("unknown layout '{}'; known: {}", text, layout::known_names());
          },
          ""};
}

CLI::Validator tile_rows(bool automatic) {
  return {[=](std::string& text) {
            const auto value = parsed<int64_t>(text);
            if ((automatic && text == "auto") || (value && *value >= 0 && *value % 256 == 0)) return std::string();
            return fmt::format("'{}' is {}neither 0 nor a multiple of 256", text, automatic ? "not auto and " : "");
          },
          ""};
}

void check_out(const std::string& flag, const std::string& path) {
  if (path.empty()) throw Error("{} needs the name of the file to write, got an empty one", flag);
}

const Tokenizer& LoadedModel::need_tokenizer() const {
  if (!tokenizer)
    throw Error("{}: the model has no tokenizer, so it cannot read text; {}", checkpoint.path(), kTokenizerFiles);
  return *tokenizer;
}

Tokenizer make_tokenizer(const io::Checkpoint& checkpoint) {
  const Vocabulary& vocabulary = checkpoint.vocabulary();
  if (checkpoint.source() == io::Source::gguf && vocabulary.model == Vocabulary::Model::byte_bpe &&
      vocabulary.split_regexes.empty() && !checkpoint.metadata().contains("tokenizer.ggml.pre"))
    spdlog::warn(
        "{}: has no key tokenizer.ggml.pre, so text is cut into words by the rule \"{}\"; the model may have been "
        "trained with other ids",
        printable(checkpoint.path()), vocabulary.pre);
  return naming_file(checkpoint.path(), [&] { return Tokenizer(vocabulary); });
}

io::Checkpoint open_checkpoint(const std::string& path, const Common& common) {
  io::Checkpoint checkpoint = io::Checkpoint::open(path, common.threads);
  for (const std::string& warning : checkpoint.warnings()) spdlog::warn("{}: {}", printable(path), warning);
  return checkpoint;
}

io::Checkpoint open_weights(const std::string& path, const Common& common) {
  io::Checkpoint checkpoint = open_checkpoint(path, common);
  if (checkpoint.tensors().empty())
    throw Error("{}: has no weights{}", path,
                checkpoint.vocabulary().model == Vocabulary::Model::none
                    ? "; `lacuna inspect` shows what is in it"
                    : ", a vocabulary only; `lacuna tokenize` and `lacuna inspect` read such a file");
  return checkpoint;
}

LoadedModel open_model(const std::string& path, const Common& common) {
  const auto start = std::chrono::steady_clock::now();
  auto pool = std::make_unique<ThreadPool>(common.threads);
  LoadedModel model{open_weights(path, common), std::nullopt, std::move(pool), nullptr, nullptr, {}, nullptr, 0};
  if (model.checkpoint.vocabulary().model != Vocabulary::Model::none)
    model.tokenizer.emplace(make_tokenizer(model.checkpoint));
  model.load_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return model;
}

LoadedModel load_model(const std::string& path, const Common& common, const model::LoadOptions& options) {
  LoadedModel model = open_model(path, common);
  const auto start = std::chrono::steady_clock::now();
  model.decoder = model::Decoder::load(model.checkpoint, *model.pool, options);
  model.load_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return model;
}

void open_gpu(LoadedModel& model, const GpuFlags& flags) {
  model.gpu = std::make_unique<cuda::Device>(flags.options());
  for (int further = 1; further < flags.count; ++further)
    model.more_gpus.push_back(std::make_unique<cuda::Device>(flags.options(further)));
}

std::string advised(const cuda::DoesNotFit& error, int64_t n_layers, const FitAdvice& advice) {
  std::string what = error.what();
  if (!advice.context.empty() && error.positions > 0)
    what += fmt::format("; a context of {} tokens would fit ({})", error.positions, advice.context);
  if (advice.layers && error.layers > 0)
    what += fmt::format("; {} of its {} layers fit: --gpu-layers {} runs the others on the CPU", error.layers, n_layers,
                        error.layers);
  return what;
}

void load_cuda_decoder(LoadedModel& model, const model::CudaDecoderOptions& options, const FitAdvice& advice) {
  const auto start = std::chrono::steady_clock::now();
  try {
    std::vector<cuda::Device*> devices = {model.gpu.get()};
    for (const auto& gpu : model.more_gpus) devices.push_back(gpu.get());
    model.cuda = model::CudaDecoder::load(model.checkpoint, *model.pool, devices, options);
  } catch (const cuda::DoesNotFit& error) {
    throw Error("{}", advised(error, model::read_config(model.checkpoint).n_layers, advice));
  }
  model.load_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace lacuna::cli
