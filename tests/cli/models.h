// tests/cli/models.h - small models made for a test.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "io/gguf_writer.h"
#include "model/synth.h"
#include "test_support.h"

namespace lacuna::test {

/// Random weights of a shape.
inline void write_model(const model::ModelShape& shape, const std::string& path, layout::Id layout,
                        layout::Id head_layout) {
  ThreadPool pool(1);
  model::synthesize(shape, path,
                    {.layout = layout, .head_layout = head_layout, .seed = 3, .n_layers = 0, .progress = false}, pool);
}

/// A llama of two layers with byte tokens: 300 tokens, width 32, context 256.
inline constexpr model::ModelShape kTinyShape{.name = "tiny",
                                              .architecture = "llama",
                                              .n_layers = 2,
                                              .n_embd = 32,
                                              .n_heads = 4,
                                              .n_kv_heads = 2,
                                              .head_dim = 8,
                                              .n_ff = 64,
                                              .n_vocab = 300,
                                              .n_ctx = 256,
                                              .norm_eps = 1e-5,
                                              .rope_base = 10000,
                                              .rope_factor = 1,
                                              .tied = false,
                                              .qkv_bias = false};

/// Random weights of it.
inline void write_tiny_model(const std::string& path, layout::Id layout = layout::Id::f32) {
  write_model(kTinyShape, path, layout, layout);
}

/// Writes `from` again with other metadata and, where `values` returns some, other f32 values.
inline void rewrite(const std::string& from, const std::string& to, const std::function<void(io::Metadata&)>& edit,
                    const std::function<void(const std::string& name, std::vector<std::byte>& bytes)>& values = {}) {
  const io::Checkpoint source = io::Checkpoint::open(from);
  io::Metadata metadata = source.metadata();
  edit(metadata);
  std::vector<io::TensorPlan> plan;
  for (const io::Tensor& tensor : source.tensors())
    plan.push_back({tensor.name, tensor.layout, tensor.dims, tensor.params});
  io::GgufWriter writer(to, metadata, plan);
  for (const io::Tensor& tensor : source.tensors()) {
    std::vector<std::byte> bytes(tensor.bytes.begin(), tensor.bytes.end());
    if (values) values(tensor.name, bytes);
    writer.write(bytes);
  }
  writer.finish();
}

}  // namespace lacuna::test
