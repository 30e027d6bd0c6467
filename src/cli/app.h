// src/cli/app.h - the program: picks the subcommand and turns errors into one line and an exit code.
#pragma once

namespace lacuna::cli {

/// Exit codes: 0 done, 1 an error that one line on stderr explains, 2 wrong usage, 130 stopped by Ctrl-C.
int run_program(int argc, char** argv);

}  // namespace lacuna::cli
