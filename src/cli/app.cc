#include "cli/app.h"

#include <fcntl.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "cli/command.h"
#include "core/error.h"
#include "core/say.h"
#include "core/temporary_name.h"
#include "kernels/ops.h"
#include "lacuna_commit.h"

namespace lacuna::cli {
namespace {

constexpr const char* kCompressProgram = "lacuna-compress";

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

std::string version_text() {
  return fmt::format("lacuna {}\ncommit   {}\ncompiler {}\nSIMD     {}\nbuild    {}\n", LACUNA_VERSION, LACUNA_COMMIT,
                     kCompiler, kernels::isa_name(), LACUNA_BUILD_TYPE);
}

/// A descriptor 0 to 2 that is closed would be given to the next file that is opened, and text meant for the terminal
/// would land in it. /dev/null takes the place of stderr; reading such a stdin or writing such a stdout is an error.
void occupy_standard_descriptors() {
  for (const auto& [fd, mode] :
       {std::pair{STDIN_FILENO, O_WRONLY}, {STDOUT_FILENO, O_RDONLY}, {STDERR_FILENO, O_WRONLY}})
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", mode);  // gets the lowest free number: fd
}

/// One line, whatever the message holds.
void complain(std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  say("lacuna: {}\n", printable(message));
}

using Commands = std::vector<std::pair<CLI::App*, Action>>;

std::string names_of(const CLI::App& program) {
  std::string names;
  for (const CLI::App* command : program.get_subcommands([](const CLI::App*) { return true; }))
    names += (names.empty() ? "" : ", ") + command->get_name();
  return names;
}

int run_checked(int argc, char** argv, std::span<const AddCommand> to_add) {
  CLI::App program(
      "Lacuna runs language models on this machine, makes them smaller and measures them.\n"
      "`lacuna COMMAND --help` explains each command.",
      "lacuna");
  program.require_subcommand(0, 1);
  bool version = false;
  program.add_flag("--version", version, "print version, commit, compiler, SIMD target and build type");

  std::vector<Action> actions;
  for (const AddCommand add : to_add) actions.push_back(add(program));
  const std::vector<CLI::App*> commands = program.get_subcommands([](CLI::App*) { return true; });

  if (argc > 1 && argv[1][0] != '-' &&
      std::none_of(commands.begin(), commands.end(), [&](CLI::App* c) { return c->get_name() == argv[1]; })) {
    complain(fmt::format("unknown command '{}'; the commands are {}", argv[1], names_of(program)));
    return 2;
  }
  try {
    program.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    print(program.help());  // of the subcommand where one is given
    return 0;
  } catch (const CLI::ParseError& error) {
    std::string chosen;
    for (auto at = program.get_subcommands(); !at.empty(); at = at[0]->get_subcommands())
      chosen += at[0]->get_name() + " ";
    complain(fmt::format("{}; see `lacuna {}--help`", error.what(), chosen));
    return 2;
  }
  if (version) {
    print(version_text());
    return 0;
  }
  for (size_t i = 0; i < commands.size(); ++i)
    if (commands[i]->parsed()) return actions[i]();
  complain(fmt::format("no command given; the commands are {}; see `lacuna --help`", names_of(program)));
  return 2;
}

/// `compress` is a program of its own, which gets all arguments as they are.
Action add_compress_launcher(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "compress", "Drop weights of a model, store them in few bits, or both, so that its outputs change least.");
  command->set_help_flag();  // its own --help
  command->prefix_command();
  return [command]() -> int {
    const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe").parent_path() / kCompressProgram;
    const std::string name = path.string();
    std::vector<std::string> arguments = {name, "compress"};
    for (const std::string& argument : command->remaining()) arguments.push_back(argument);
    std::vector<char*> pointers;
    // LibTorch's threads wait for their next operation busily, for longer than it takes to come: between the operations
    // others need the cores. 2000 turns are some microseconds; compressing a small model takes 0.8 times as long so.
    if (::getenv("OMP_WAIT_POLICY") == nullptr) ::setenv("GOMP_SPINCOUNT", "2000", 0);
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    ::execv(name.c_str(), pointers.data());
    throw Error("{}: {}; this build has no compressor, which needs LibTorch: build with scripts/build.sh --compress",
                name, std::strerror(errno));
  };
}

}  // namespace

std::span<const AddCommand> runtime_commands() {
  static constexpr std::array<AddCommand, 14> kCommands = {
      add_pull,       add_run,  add_inspect, add_tokenize, add_quantize,          add_calibrate, add_tune,
      add_perplexity, add_eval, add_bench,   add_synth,    add_compress_launcher, add_report,    add_image};
  return kCommands;
}

int run_program(int argc, char** argv, std::span<const AddCommand> commands) {
  occupy_standard_descriptors();
  std::signal(SIGPIPE, SIG_IGN);  // print() sees the closed pipe
  std::signal(SIGXFSZ, SIG_IGN);  // so does a writer that meets the file size limit
  remove_temporaries_on_signals();
  auto log = std::make_shared<spdlog::logger>("lacuna", std::make_shared<spdlog::sinks::stderr_color_sink_st>());
  log->set_pattern("lacuna: %^%l%$: %v");
  spdlog::set_default_logger(std::move(log));
  try {
    return run_checked(argc, argv, commands);
  } catch (const ReaderGone&) {
    return 0;
  } catch (const Error& error) {
    complain(error.what());
  } catch (const std::bad_alloc&) {
    complain("out of memory; try a shorter --ctx or a smaller model");
  } catch (const std::filesystem::filesystem_error& error) {
    complain(fmt::format("{}: {}", error.path1().string(), error.code().message()));
  } catch (const std::exception& error) {
    complain(fmt::format("internal error: {}", error.what()));
  }
  return 1;
}

}  // namespace lacuna::cli
