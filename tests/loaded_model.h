// tests/loaded_model.h - a model of a file or folder, ready to run on the CPU.
#pragma once

#include <memory>
#include <string>

#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "model/decoder.h"

namespace lacuna::test {

struct LoadedModel {
  io::Checkpoint checkpoint;
  ThreadPool pool;
  std::unique_ptr<model::Decoder> decoder;
  explicit LoadedModel(const std::string& path, int threads = 2)
      : checkpoint(io::Checkpoint::open(path)),
        pool(threads),
        decoder(model::Decoder::load(checkpoint, pool, {kernels::Prepare::automatic, false})) {}
};

}  // namespace lacuna::test
