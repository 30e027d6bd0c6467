// src/io/image_compress.h - a diffusion transformer's matrices as FP8, 2:4, or both (QuaSpa, section 3.2): a folder or
// file of safetensors in, one GGUF file out.
//
// Each weight is read once, in pieces of whole rows, so that no more than a few MiB of high-precision values are held
// at once. A row is quantized with the scale of all its weights first, then loses those that its mask drops; masks are
// made from the original weights (io/image_masks.h).
//
// The file has the tensors under the names that they had, and in its metadata
//   general.architecture   "flux" where names are those of FLUX.1, else _class_name of config.json, else "unknown"
//   lacuna.image.config    text of config.json, where there is one
//   lacuna.image.policy    text of the policy
//   lacuna.image.mask      how masks were made, where a matrix has one
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/thread_pool.h"
#include "io/image_checkpoint.h"
#include "io/image_masks.h"
#include "io/image_policy.h"

namespace lacuna::io {

inline constexpr std::string_view kImagePolicyKey = "lacuna.image.policy", kImageMaskKey = "lacuna.image.mask";

struct ImageCompressOptions {
  ImagePolicy policy = ImagePolicy::load("quaspa");
  MaskOptions mask;
  bool progress = true;
  std::function<void(const ImageCheckpoint& source)> on_checked{};  // called before anything is written
};

struct ImageCompressReport {
  struct Group {  // tensors that are stored in one layout
    const layout::Layout* layout = nullptr;
    int64_t tensors = 0, weights = 0, kept = 0, bytes = 0;
    /// ||W - stored|| / ||W|| in the Frobenius norm, over all of them; 0 where W is.
    double relative_error = 0;
  };
  std::vector<Group> groups;  // in the order of the layout table
  int64_t tensors = 0, weights = 0, source_bytes = 0, bytes = 0, file_bytes = 0;
  /// High-precision values that were held at once, in bytes.
  int64_t most_float_bytes = 0;
  std::string mask;                       // how masks were made; empty: no matrix has one
  std::vector<std::string> unused_rules;  // of a policy that is not built in
};

/// Throws Error naming file and tensor, before anything is written where that can be told: for a source that was
/// quantized, a policy of which no rule names a matrix, a mask that cannot be made, and for weights that are not
/// finite. The file at `out` appears when it is complete.
ImageCompressReport compress_image(const std::string& source, const std::string& out,
                                   const ImageCompressOptions& options, ThreadPool& pool);

}  // namespace lacuna::io
