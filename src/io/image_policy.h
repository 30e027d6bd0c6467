// src/io/image_policy.h - which matrices of a diffusion transformer get which layout.
//
// A policy file is JSON:
//   {"version": 1,
//    "rules": [{"name": "transformer_blocks.*.attn.to_q.weight", "layout": "nm24_f8"}, ...],
//    "rest": "bf16"}
// Every key is needed; others are refused. The first rule whose name matches says the layout of a matrix; "*" in a name
// is any run of characters without a dot. "rest" is for matrices that no rule names. Layouts: f8, nm24_f8, nm24_bf16,
// bf16, f16, f32, and "source": as it is stored. Vectors (biases, scales of norms) stay as they are stored, whatever
// the rules say.
//
// Built in are, for the names of diffusers' and of the original FLUX.1 files:
//   quaspa     QuaSpa, section 4.1: the image modality's matrices of double blocks and all of single blocks nm24_f8,
//   the
//              text modality's f8; rest bf16
//   f8         the same matrices, all f8
//   nm24_bf16  those that are nm24_f8 in quaspa in nm24_bf16; rest bf16
//   bf16       all matrices
// Fused matrices (qkv, linear1, linear2) stay fused: rows have scales of their own and groups of four lie along a row,
// so that a fused matrix has the bytes of its parts one after the other.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "layout/layout.h"

namespace lacuna::io {

class ImagePolicy {
 public:
  /// A built-in name, or a file's. Throws Error naming the file and what is wrong, for an unknown name those built in.
  static ImagePolicy load(const std::string& name_or_path);
  /// where: begins the errors.
  static ImagePolicy parse(std::string_view text, const std::string& where);

  /// As JSON: what `parse` reads.
  const std::string& text() const { return text_; }
  const std::string& name() const { return name_; }

  /// The layout of a matrix; nullptr: as it is stored. rule: its index, -1 where none names it.
  struct Choice {
    const layout::Layout* layout = nullptr;
    int rule = -1;
  };
  Choice choose(std::string_view tensor) const;
  size_t rule_count() const { return rules_.size(); }
  const std::string& rule_name(size_t rule) const { return rules_[rule].name; }
  /// Whether it is one that is built in, whose rules cover two namings.
  bool built_in() const { return built_in_; }

 private:
  struct Rule {
    std::string name;
    const layout::Layout* layout = nullptr;
  };
  std::string name_, text_;
  std::vector<Rule> rules_;
  const layout::Layout* rest_ = nullptr;
  bool built_in_ = false;
};

/// Names of those built in, for messages: "quaspa, f8, ...".
std::string image_policy_names();

/// Whether the whole name matches a pattern in which "*" is any run of characters without a dot.
bool matches_name(std::string_view pattern, std::string_view name);

}  // namespace lacuna::io
