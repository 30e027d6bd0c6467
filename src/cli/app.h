// src/cli/app.h - the program: picks the subcommand and turns errors into one line and an exit code.
#pragma once

#include <span>

#include "cli/command.h"

namespace lacuna::cli {

using AddCommand = Action (*)(CLI::App& program);

/// The commands of the program that links no LibTorch. `compress` among them starts lacuna-compress, which lies beside
/// the program, in its place.
std::span<const AddCommand> runtime_commands();

/// Exit codes: 0 done, 1 an error that one line on stderr explains, 2 wrong usage, 130 stopped by Ctrl-C.
int run_program(int argc, char** argv, std::span<const AddCommand> commands);

}  // namespace lacuna::cli
