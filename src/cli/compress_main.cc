// src/cli/compress_main.cc - lacuna-compress: the commands that need LibTorch, in a program of their own, so that
// loading it costs the others nothing. `lacuna compress` starts it.
#include <malloc.h>

#include <array>

#include "cli/app.h"
#include "cli/compress.h"

int main(int argc, char** argv) {
  // Tensors of some MiB come and go: memory that goes back to the system each time comes again page by page.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  static constexpr std::array<lacuna::cli::AddCommand, 1> kCommands = {lacuna::cli::add_compress};
  return lacuna::cli::run_program(argc, argv, kCommands);
}
