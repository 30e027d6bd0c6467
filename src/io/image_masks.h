// src/io/image_masks.h - 2:4 masks from the original weights: how much each weight matters, of which the two largest of
// every four are kept (layout/two_of_four.h). W: [N, K]; X_j: input j over all calibration tokens.
//
//   magnitude  |W_ij|
//   wanda      |W_ij| ||X_j||_2                            (Sun et al., arXiv:2306.11695, equation 1)
//   wanda++    |W_ij| (alpha G_ij + ||X_j||_2)             (Yang et al., arXiv:2503.04992: the regional gradient score;
//              G_ij is the root mean square over calibration inputs of the derivative of the L2 norm of the block's
//              output with respect to W_ij; alpha is 100 there. Column norms alone give wanda's score.)
//   e-sparse   |W_ij| (H_j + alpha ||X_j||_2)              (Li et al., arXiv:2310.15929: H_j is the information entropy
//              of the values of input j; its channel shuffle is not done.)
//   awp        the support that AWP's projected gradient descent ends with (arXiv:2506.10205; the caller brings it:
//              calibrate/two_of_four_descent.h)
//   file       a mask that another program made
//
// The last two formulae are as we understand the papers' texts; they have not been compared with the authors' code,
// and alpha of e-sparse is ours.
//
// Files are safetensors with tensors named by the weight, as the checkpoint names it:
//   norms      NAME.norm [K], and for e-sparse NAME.entropy [K]; F32, F16 or BF16
//   moments    NAME.second_moment [K, K]: X^T X / tokens; F32, F16 or BF16
//   gradients  NAME [N, K]: G; F32, F16 or BF16
//   masks      NAME [N, K]: 0 or 1; BOOL, U8 or I8
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "layout/layout.h"

namespace lacuna::io {

enum class MaskMethod : uint8_t { magnitude, wanda, wanda_plus_plus, e_sparse, awp, file };

/// Throws Error listing the known names.
MaskMethod mask_method(const std::string& name);
std::string mask_method_name(MaskMethod method);
std::string mask_method_names();
/// The alpha of wanda++ and e-sparse where none is given.
double usual_alpha(MaskMethod method);

/// AWP's descent. w: [rows, K]; second_moment: [K, K]; keep, theta: [rows, K], what stays and what it becomes. Holds
/// kDescentArrays further float arrays of w's size.
using Descent = std::function<void(std::span<const float> w, std::span<const float> second_moment,
                                   std::span<uint8_t> keep, std::span<float> theta, ThreadPool& pool)>;

inline constexpr int64_t kDescentArrays = 2;

struct MaskOptions {
  MaskMethod method = MaskMethod::magnitude;
  std::string norms{}, gradients{}, masks{};  // paths; empty: none
  std::vector<std::string> moments{};         // paths, each with some of the matrices
  bool changed_weights = false;               // awp: store what the descent made of the weights
  Descent descent{};                          // awp
  double alpha = -1;                          // < 0: usual_alpha

  /// Whether anything is asked for that matters only where masks are made.
  bool asks() const {
    return method != MaskMethod::magnitude || !norms.empty() || !gradients.empty() || !masks.empty() ||
           !moments.empty() || changed_weights || alpha >= 0;
  }
};

/// Scores of one row. All spans: [K]. Each is the formula above in double precision, rounded to float.
void magnitude_scores(std::span<const float> w, std::span<float> score);
void wanda_scores(std::span<const float> w, std::span<const float> norm, std::span<float> score);
void wanda_plus_plus_scores(std::span<const float> w, std::span<const float> norm, std::span<const float> gradient,
                            float alpha, std::span<float> score);
void e_sparse_scores(std::span<const float> w, std::span<const float> norm, std::span<const float> entropy, float alpha,
                     std::span<float> score);

/// Makes the masks of a checkpoint's matrices, one piece of rows at a time.
class MaskMaker {
 public:
  /// Opens the files. Throws Error for one that the method needs and that is not given, and for one that it ignores.
  explicit MaskMaker(const MaskOptions& options);
  ~MaskMaker();

  /// Throws Error naming file and tensor unless the files have what this matrix needs, in its shape, finite and not
  /// negative. Masks' values and gradients are checked when they are read.
  void check(const std::string& name, layout::Shape shape) const;
  /// Rows [row0, row0 + rows). w, keep: [rows, K]. Throws Error naming the row and group of a mask that is not 2:4.
  /// changed: [rows, K], what replaces w; asked for where changes_weights(). Returns the bytes of the matrix-sized
  /// float arrays that it held beside these.
  int64_t keep(const std::string& name, layout::Shape shape, int64_t row0, std::span<const float> w,
               std::span<uint8_t> keep, ThreadPool& pool, std::span<float> changed = {}) const;
  bool changes_weights() const { return options_.changed_weights; }
  /// For the file's metadata: "wanda++, alpha 100".
  std::string describe() const;

 private:
  class Files;
  MaskOptions options_;
  std::unique_ptr<Files> files_;
};

}  // namespace lacuna::io
