// src/model/cuda_decoder.h - a decoder on an NVIDIA device: one sequence; a token is one recorded graph of launches, a
// prompt runs in batches.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/plans.h"
#include "model/beam_engine.h"
#include "model/config.h"
#include "model/cuda_block.h"
#include "model/cuda_inputs.h"
#include "model/engine.h"
#include "model/sparsity.h"

namespace lacuna::model {

struct CudaDecoderOptions {
  int64_t context = 0;   // positions of the key-value cache (f16); 0: all that the model allows
  bool progress = true;  // a bar on a terminal
  /// Sums in a fixed order: a token's logits are the same bits every time. Slower; rows and attention always are.
  bool deterministic = false;
  /// Of zigzag and group-sparse products; those without one, and all in a fixed order, have the default plan.
  cuda::Plans plans = {};
  /// The last ones run on the device, the others before them on the CPU. 0: all.
  int64_t gpu_layers = 0;
  /// Every layer is split into so many shards (tensor_split.h), as many on each device; 0: one a device. With sums in a
  /// fixed order the bits depend on this number, not on how many devices the shards are on.
  int64_t shards = 0;
  /// The most bytes of f16 weights that a batch's product makes at a time (the largest group of a 7B model fits); a
  /// larger group runs in slices of its outputs, of 256 at least. The device keeps two such work spaces.
  int64_t batch_weight_bytes = int64_t{192} << 20;
  LoadOptions cpu = {};  // of those on the CPU; first_layers, progress and deterministic are set here
};

/// Milliseconds of a token by what its launches do. Without the overlap of launches of different kinds.
struct CudaShares {
  double linear = 0, attention = 0, rest = 0;  // rest: embedding, norms, gates, choice of a token
  double exchange = 0;                         // between devices, with the time that they wait for each other
  double sum() const { return linear + attention + rest + exchange; }
};

/// What tune() found for one product: times of a whole token with the default plan of this one and with `plan`, the
/// others as tuned.
struct CudaTuning {
  cuda::Product product;
  cuda::GemvPlan plan;
  double standard_ms = 0, tuned_ms = 0;

  bool operator==(const CudaTuning&) const = default;
};

/// The same of a group-sparse product.
struct CudaGroupsTuning {
  cuda::GroupsProduct product;
  cuda::GroupsPlan plan;
  double standard_ms = 0, tuned_ms = 0;

  bool operator==(const CudaGroupsTuning&) const = default;
};

/// Models with rotary positions, norms before their half blocks and embeddings of the model's own width; weights in any
/// mix of zigzag, group-sparse and row layouts, embedding and head in row layouts. Eight tokens and more run at
/// once, up to 512, with weights and inputs rounded to f16 (kernels/cuda/gemm.h). The first layers may run on the CPU,
/// as its decoder runs them: the device waits for them in each token. Or every layer is split over several devices.
class CudaDecoder final : public Engine {
 public:
  /// Prepares and uploads. Throws Error naming the tensor, the layout or the feature that does not run on CUDA, and,
  /// before anything is uploaded, DoesNotFit where weights, cache and work space do not fit the device, with what they
  /// need and, if any, how many layers would and, of one device, which context.
  static std::unique_ptr<CudaDecoder> load(const io::Checkpoint& checkpoint, ThreadPool& pool, cuda::Device& device,
                                           const CudaDecoderOptions& options = {});
  /// The same over devices of one kind, which outlive the decoder. Throws Error also where the model cannot be split
  /// so, and where NCCL is not there.
  static std::unique_ptr<CudaDecoder> load(const io::Checkpoint& checkpoint, ThreadPool& pool,
                                           std::span<cuda::Device* const> devices,
                                           const CudaDecoderOptions& options = {});
  ~CudaDecoder() override;

  const Config& config() const override;
  int64_t length() const override;
  int64_t capacity() const override;
  void truncate(int64_t length) override;
  void append(std::span<const int32_t> ids) override;
  std::span<const float> forward(std::span<const int32_t> ids) override;
  /// The candidates are found on the device, where the sampler wants a few (up to 2048); the draw is the host's.
  int32_t next(std::span<const int32_t> ids, Sampler& sampler) override;
  void score(std::span<const int32_t> ids, const Decoder::LogitsSink& sink) override;
  SparsityCounts sparsity_counts() const override;

  /// As Decoder::set_sparsity: without mask_batches append() and forward() of several tokens are dense, and score()
  /// runs them one by one, as decoding does. With it they run in batches whose inputs are masked, but for layers on the
  /// CPU, which take them one by one, and fewer than eight tokens. An input runs dense where the plan of one of its
  /// products says so. Clears the counts. Throws Error as that one does, for wina with weights in row layouts, and
  /// DoesNotFit; the decoder is then as before; or, where the device fails, dense.
  void set_sparsity(std::optional<SparsityOptions> options);
  /// What set_sparsity() was given, with thresholds of 0 where the plans run an input dense.
  std::optional<SparsityOptions> sparsity() const;
  /// Whether sparsity_counts() are kept, which takes four more launches a layer; not, to begin with. Clears the counts.
  void count_inputs(bool on);

  /// Runs `count` tokens: the first is `id`, each further one the most likely after the one before, chosen on the
  /// device: the host waits before the first one only, with layers on the CPU before each. wait() waits for all.
  void follow(int32_t id, int64_t count);
  void wait();

  /// Measures in a whole token which plan of each zigzag product is fastest, of dense tokens or, where set_sparsity()
  /// said so, of sparse ones, and uses it; a sparse one may be to run dense, with the dense plan in use: tune dense
  /// tokens first. Forgets all tokens. Throws Error in a fixed order, with layers on the CPU, for shards, and where the
  /// context holds less than kTuneContext.
  std::vector<CudaTuning> tune(bool progress);
  /// The same of group-sparse products: kernel, stream-K or slice-K, blocks, and what the launch before asks for. Dense
  /// tokens are timed, and the plans are of sparse ones too: thresholds save nothing there.
  std::vector<CudaGroupsTuning> tune_groups(bool progress);
  static constexpr int64_t kTuneContext = 16;

  /// The device's part of single tokens, as set_sparsity() said, after the last one that ran; they are neither counted
  /// nor kept. Throws Error where no further token fits.
  CudaShares measure_shares();

  /// Beams, which live no longer than the decoder and overwrite its sequence: truncate(0) then comes before anything
  /// else runs. Throws Error as CudaBeams does, and with layers on the CPU and for shards.
  std::unique_ptr<BeamEngine> make_beams(int64_t beams);

  // ---- calibration. Throws Error with layers on the CPU and for shards ----
  /// Takes its memory; throws DoesNotFit. Before run_observed().
  void begin_observing();
  /// Appends ids in batches of which `observer` sees, and may leave out, the inputs of every group. Thresholds of
  /// set_sparsity() do not hold. sink: gets all logits; may be empty.
  void run_observed(std::span<const int32_t> ids, const CudaInputsObserver& observer, const Decoder::LogitsSink& sink);
  /// The layers one by one on `windows` windows of `window` tokens each. Lives no longer than the decoder, whose
  /// sequence its begin() overwrites: truncate(0) then comes before anything else runs. Throws DoesNotFit.
  std::unique_ptr<CudaBlock> make_block(int64_t windows, int64_t window, int64_t dense_prefix);
  InputBytes input_bytes() const;  // of the weights that read each input of the layers on the device

  int64_t cpu_layers() const;    // how many of the first layers run on the CPU
  int64_t weight_bytes() const;  // read for one dense token, output head included
  std::string explain() const;   // how each group of the first layer and the head run, one line each
  /// How fast the device reads its memory, GB/s; of several devices the sum.
  double measure_read_gb_s();

 private:
  struct Impl;
  explicit CudaDecoder(std::unique_ptr<Impl> impl);
  /// Throws Error where plans cannot be tuned; then the first token of a sequence is ready.
  void begin_tuning();
  std::unique_ptr<Impl> impl_;
};

}  // namespace lacuna::model
