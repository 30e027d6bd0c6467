// tests/model/support.h - a model of a fixture, ready to run.
#pragma once

#include <memory>
#include <string>

#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "model/decoder.h"

namespace lacuna::model {

struct Model {
  io::Checkpoint checkpoint;
  ThreadPool pool;
  std::unique_ptr<Decoder> decoder;
  explicit Model(const std::string& path)
      : checkpoint(io::Checkpoint::open(path)),
        pool(2),
        decoder(Decoder::load(checkpoint, pool, {kernels::Prepare::automatic, false})) {}
};

}  // namespace lacuna::model
