// src/cli/compress_main.cc - lacuna-compress: the commands that need LibTorch, in a program of their own, so that
// loading it costs the others nothing. `lacuna compress` starts it.
#include <array>

#include "cli/app.h"
#include "cli/compress.h"

int main(int argc, char** argv) {
  static constexpr std::array<lacuna::cli::AddCommand, 1> kCommands = {lacuna::cli::add_compress};
  return lacuna::cli::run_program(argc, argv, kCommands);
}
