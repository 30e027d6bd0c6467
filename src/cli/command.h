// src/cli/command.h - what all subcommands share: common flags, output, opening a model.
#pragma once

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "kernels/cuda/device.h"
#include "kernels/ops.h"
#include "model/cuda_decoder.h"
#include "model/decoder.h"
#include "tokenizer/tokenizer.h"

namespace lacuna::cli {

using Json = nlohmann::ordered_json;

/// Where a tokenizer is looked for.
inline constexpr const char* kTokenizerFiles =
    "a Hugging Face folder has it as tokenizer.json, as tokenizer.model, or as vocab.json with merges.txt, a GGUF file "
    "in its metadata";

/// Flags of every subcommand.
struct Common {
  int threads = usable_cores();
  std::string device = "cpu";
  bool json = false;
};

/// Flags of the subcommands that run on CUDA devices.
struct GpuFlags {
  int index = 0;
  double memory_gib = 0;  // 0: all that is free
  int64_t layers = 0;     // of the model on the device; 0: all
  int count = 1;          // devices, from `index` on
  int64_t shards = 0;     // of each layer; 0: one a device
  /// Of the device `index` + further.
  cuda::DeviceOptions options(int further = 0) const {
    const double bytes = memory_gib * double(int64_t{1} << 30);
    return {index + further, bytes > 0 ? std::max(int64_t{1}, int64_t(bytes)) : 0};
  }
  bool split() const { return count > 1 || shards > 1; }
};

/// What a subcommand does once its flags are read; returns the exit code, throws Error.
using Action = std::function<int()>;

// One function a subcommand: adds it to the program's parser and returns its action.
Action add_inspect(CLI::App& program);
Action add_tokenize(CLI::App& program);
Action add_run(CLI::App& program);
Action add_perplexity(CLI::App& program);
Action add_eval(CLI::App& program);
Action add_bench(CLI::App& program);
Action add_synth(CLI::App& program);
Action add_quantize(CLI::App& program);
Action add_calibrate(CLI::App& program);
Action add_tune(CLI::App& program);
Action add_pull(CLI::App& program);
Action add_report(CLI::App& program);
Action add_image(CLI::App& program);

void add_common(CLI::App& command, Common& common);
void add_gpu(CLI::App& command, GpuFlags& flags);
/// Of add_gpu's flags those that choose a device and how much of its memory may be used.
void add_gpu_choice(CLI::App& command, GpuFlags& flags);
/// Throws Error naming the first of these flags that was given, which would be ignored; needs: what gives it a meaning.
void refuse_given(const CLI::App& command, std::initializer_list<const char*> flags, std::string_view needs);
/// Throws Error for a flag of add_gpu on another device.
void check_gpu(const CLI::App& command, const Common& common);
/// Throws Error for a device that the command does not run on.
void check_common(const Common& common);

/// Thrown when the reader of stdout has gone: the program ends quietly.
struct ReaderGone {};

/// Writes to stdout at once. Throws ReaderGone, or Error with the system's reason (a full disk).
void print(std::string_view text);
/// One object on one line. Bytes that are no UTF-8 become U+FFFD.
void print_json(const Json& object);

/// Text of a file fit for a terminal: control characters become \xNN.
std::string printable(std::string_view text);

/// The whole file; "-" is standard input. Throws Error with the system's reason.
std::string read_input(const std::string& path);

/// Largest resident memory of this process so far, mapped weights included.
int64_t peak_memory_bytes();
/// "1.5 GiB", "98.4 MiB", "512 B".
std::string human_bytes(int64_t bytes);

/// Throws Error naming the flag and the known layouts.
layout::Id layout_named(const std::string& flag, const std::string& name);
kernels::KvType parse_kv(const std::string& name);
/// Adds `--kv`.
void add_kv(CLI::App& command, std::string& kv);
/// Adds `--seed`.
CLI::Option* add_seed(CLI::App& command, uint64_t& seed, const std::string& description);
// What a flag may be; refused before anything is loaded, with exit code 2.
/// A whole number of 64 bits.
CLI::Validator integer_in(int64_t low, int64_t high);
/// A finite number; `above`: more than `low`.
CLI::Validator number_in(double low, double high, bool above = false);
CLI::Validator layout_name();
/// 0 or a multiple of 256; `automatic`: or "auto".
CLI::Validator tile_rows(bool automatic);
/// Throws Error when the name of an output file is empty.
void check_out(const std::string& flag, const std::string& path);

/// Opens any checkpoint and prints its warnings.
io::Checkpoint open_checkpoint(const std::string& path, const Common& common);
/// One that has weights. Throws Error also for a vocabulary alone.
io::Checkpoint open_weights(const std::string& path, const Common& common);
/// The checkpoint's tokenizer; warns where the file does not say how text is cut into words. Throws Error that names
/// the file.
Tokenizer make_tokenizer(const io::Checkpoint& checkpoint);

/// A model ready to run, with its tokenizer where the files have one.
struct LoadedModel {
  io::Checkpoint checkpoint;
  std::optional<Tokenizer> tokenizer;
  std::unique_ptr<ThreadPool> pool;
  std::unique_ptr<model::Decoder> decoder;  // on the CPU, or
  std::unique_ptr<cuda::Device> gpu;
  std::vector<std::unique_ptr<cuda::Device>> more_gpus;  // of a model that is split
  std::unique_ptr<model::CudaDecoder> cuda;              // on those devices
  double load_s = 0;

  /// Throws Error when the files have no tokenizer.
  const Tokenizer& need_tokenizer() const;
};
LoadedModel load_model(const std::string& path, const Common& common, const model::LoadOptions& options = {});
/// The same without a decoder; CUDA devices for it, and a decoder there.
LoadedModel open_model(const std::string& path, const Common& common);
void open_gpu(LoadedModel& model, const GpuFlags& flags);
/// Throws Error for --gpus and --gpu-split where `what` runs on one device.
void refuse_split(const GpuFlags& flags, std::string_view what);
/// What a command can do about a model that does not fit the device.
struct FitAdvice {
  bool layers = false;            // it takes --gpu-layers
  std::string_view context = {};  // its flags that decide the context: "--ctx"; empty: none
};
/// The error's sentence with what would fit of a model of n_layers.
std::string advised(const cuda::DoesNotFit& error, int64_t n_layers, const FitAdvice& advice);
void load_cuda_decoder(LoadedModel& model, const model::CudaDecoderOptions& options, const FitAdvice& advice);

}  // namespace lacuna::cli
