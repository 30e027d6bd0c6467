// src/compress/walk.h - the one walk through a model's layers: calibration text in, solved and packed matrices out.
//
// Layer after layer: every window runs through the layer while second moments of its four inputs are added up; each
// matrix is solved on them; the windows run again through the layer as it is stored, which is what the next layer sees
// (inputs = compressed; with inputs = dense it sees what the first pass gave). All statistics of a layer come from its
// dense matrices, as in SparseGPT's and Wanda's programs. In memory: the embeddings, one layer, the windows' hidden
// states (in a mapped file where asked for) and the sums, 8 K^2 bytes for each input of K values.
//
// Finished layers lie in the work folder. A walk that was stopped goes on from there and gives the same bytes.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "compress/bqpo.h"
#include "compress/net.h"
#include "compress/omniquant.h"
#include "compress/packed.h"
#include "compress/samples.h"
#include "compress/statistics.h"
#include "io/checkpoint.h"
#include "io/json.h"
#include "solver/problem.h"
#include "solver/solve.h"

namespace lacuna::compress {

enum class Inputs : uint8_t { compressed, dense };

struct WalkOptions {
  std::string method = "awp+";
  solver::Grid grid;
  solver::Pattern pattern;
  std::string layout = "auto";
  Inputs inputs = Inputs::compressed;
  TokenWeights tokens;
  solver::Options solving;
  TrainingOptions omniquant = kOmniquant;  // of a method that learns ranges
  TrainingOptions bqpo = kBqpo;            // after it, or after any other
  uint64_t seed = 0;
  at::Device device = at::kCPU;
  int threads = 1;
  std::string work_folder;      // for finished layers; made where it is missing
  bool hidden_on_disk = false;  // hidden states in a mapped file of the work folder
  bool keep_solutions = false;  // codes, scales and zero points too, for e2e.h
  bool progress = true;
  /// Called with each matrix as the checkpoint holds it and its statistics, before it is solved; not for layers that
  /// were found finished.
  std::function<void(const std::string& name, const solver::Problem& problem)> on_problem = {};
  std::string calibration_sha256;  // of the text: a work folder made with another one is refused
};

/// Throws Error for a method, grid, pattern and layout that do not go together.
void check(const WalkOptions& options);

struct MatrixReport {
  std::string name, layout;
  int64_t N = 0, K = 0;
  /// tr(D C D^T) / tr(W C W^T), D = W - Theta: of weights dropped by magnitude and rounded to nearest, and of the
  /// solution.
  double loss_before = 0, loss = 0;
  double sparsity = 0;  // share of weights that are dropped
  double bits = 0;      // stored bits a weight
  int64_t bytes = 0;
  double outlier_share = 0;  // of its input: StatisticsSums::outlier_share
  int iterations = 0;
  double seconds = 0;
  std::vector<double> curve;  // solver::Solution::curve

  nlohmann::json json() const;
  static MatrixReport from_json(const nlohmann::json& json);
};

/// Of a layer in which something was trained.
struct LayerReport {
  int64_t layer = 0;
  std::string stage;  // "omniquant" or "bqpo"
  TrainingReport training;

  nlohmann::json json() const;
  static LayerReport from_json(const nlohmann::json& json);
};

struct WalkReport {
  std::vector<MatrixReport> matrices;
  std::vector<LayerReport> layers;  // one for each stage of training with epochs
  int64_t resumed_layers = 0;       // found finished
  double seconds = 0;
};

/// ids: the calibration text. Calls `on_matrix` after each matrix, `on_layer` after each stage of a layer's training.
/// The packed layers are in the work folder afterwards (layer_path). Throws Error naming layer and window when a hidden
/// state is not finite, and when the work folder belongs to another run or holds files of none.
WalkReport walk(const io::Checkpoint& checkpoint, std::span<const int32_t> ids, const Samples& samples,
                const WalkOptions& options, const std::function<void(const MatrixReport&)>& on_matrix = {},
                const std::function<void(const LayerReport&)>& on_layer = {});

/// The vectors of a layer that scales of inputs are folded into (AWQ), by their names.
std::vector<std::pair<std::string, at::Tensor*>> vectors_of(Layer& layer, int64_t index);

/// Removes what walk and e2e left in a work folder, and the folder where nothing else lies in it.
void remove_work(const std::string& work_folder);

std::string layer_path(const std::string& work_folder, int64_t layer);

/// Writes the compressed model: the walk's matrices, everything else as the checkpoint holds it. Returns its bytes.
int64_t write_model(const io::Checkpoint& checkpoint, const std::string& work_folder, int64_t layers,
                    const std::string& path);

}  // namespace lacuna::compress
