// src/compress/e2e.h - end-to-end optimisation of the quantization parameters (GQSA, arXiv:2412.17560, section 3.4):
// codes and masks are frozen, every group's scale and zero point are trained on the whole net's next-token loss.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "compress/parametrized.h"
#include "compress/samples.h"
#include "compress/walk.h"
#include "solver/problem.h"

namespace lacuna::compress {

/// Defaults but for epochs: the paper's, section 4.1.
struct E2eOptions {
  int64_t epochs = 0;       // over all windows; 0: none
  double lr = 1e-5;         // AdamW's, without weight decay, of scales and of zero points in units of their first scale
  int64_t batch = 1;        // windows of a step
  int64_t save_every = 50;  // steps between two checkpoints in the work folder
  uint64_t seed = 0;        // order of the windows
  bool progress = true;
};

struct E2eReport {
  double before = 0, after = 0;  // nats a token over all windows: as the walk left the net, as trained
  std::vector<double> epochs;    // mean over the steps of each, while parameters move
  int64_t steps = 0;             // of all epochs
  int64_t resumed_steps = 0;     // found in the work folder
  bool kept = false;             // whether the trained net was better
  double seconds = 0;
  int64_t device_bytes = 0;  // DeviceMemory::peak

  nlohmann::json json() const;
};

/// A matrix in the form that is trained: its kept groups' codes stay, their scales and zero points have gradients. On
/// the device are what rows() needs and the parameters: with 4 bits and groups of G, G / 2 + 10 bytes a kept group (of
/// a symmetric grid G / 2 + 6), a bit for every group, and, where kept groups drop weights, a bit for each of theirs.
class TrainedMatrix : public Parametrized {
 public:
  TrainedMatrix(const solver::Solution& solution, const solver::Grid& grid, at::Device device);

  int64_t N() const override { return N_; }
  int64_t K() const override { return K_; }
  std::vector<at::Tensor> parameters() const override;
  std::pair<int64_t, int64_t> part(int64_t first, int64_t rows) const override;
  /// What would be stored: scales as f16, zero points whole numbers among the codes, gradients passed through.
  at::Tensor rows(int64_t first, int64_t rows, const std::vector<at::Tensor>& parts) const override;
  /// The solution that this was made from, on the CPU, with the scales and zero points as they are now.
  solver::Solution solution(const solver::Solution& from) const;
  /// Bytes that this keeps on its device, without gradients and an optimizer's moments.
  int64_t device_bytes() const;

 private:
  /// Of kept groups from `first` on; scale, offset: [n] -> [n].
  at::Tensor stored_scale(const at::Tensor& scale) const;
  at::Tensor stored_zero(const at::Tensor& offset, int64_t first) const;
  /// Which of these rows' groups are trained: [n] int64.
  at::Tensor groups_of(int64_t first, int64_t rows) const;

  solver::Grid grid_;
  int code_bits_;
  int64_t N_, K_, G_, width_;
  std::vector<int64_t> starts_;  // [N + 1]: rows' first trained groups
  at::Tensor live_;              // [N, G] bits: which groups are trained
  at::Tensor code_;              // [n, width] of code_bits each
  at::Tensor keep_;              // [n, width] bits where a kept group drops weights, else undefined
  at::Tensor unit_;              // [n] f16: the first scales
  at::Tensor scale_, offset_;    // [n]: parameters; zero = offset / unit; of a symmetric grid there is no offset
};

/// Where the walk leaves a layer's solutions for this (WalkOptions::keep_solutions), and reads them.
std::string solutions_path(const std::string& work_folder, int64_t layer);
void write_solutions(const std::string& path, const std::array<solver::Solution, model::kMatrices>& solutions);
std::array<solver::Solution, model::kMatrices> read_solutions(const std::string& path);

/// Trains what a walk has left in options.work_folder and writes the layers with their new parameters to
/// tuned_folder(options.work_folder), from which write_model makes the file. Goes on from a checkpoint in the folder,
/// with the same bytes in the end. Layers run one at a time, forward and again for gradients, each layer's parameters
/// move when it has them: in memory are the matrices as TrainedMatrix has them, two moments of each parameter, the
/// head, each layer's inputs, and of the layer that runs its activations, some rows of one dense matrix, and its
/// gradients. after_step: called after each step that was made (not found). Throws Error when the loss is not finite.
E2eReport e2e(const io::Checkpoint& checkpoint, std::span<const int32_t> ids, const Samples& samples,
              const WalkOptions& walked, const E2eOptions& options,
              const std::function<void(int64_t step)>& after_step = {});

std::string tuned_folder(const std::string& work_folder);

}  // namespace lacuna::compress
