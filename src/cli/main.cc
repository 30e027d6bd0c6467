#include "cli/app.h"

int main(int argc, char** argv) { return lacuna::cli::run_program(argc, argv, lacuna::cli::runtime_commands()); }
