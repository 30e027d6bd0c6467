// tests/cli/process.h - runs the built program as a user does and collects what it says.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "paths.h"

namespace lacuna::test {

struct Finished {
  int code = -1;   // exit code; -1: a signal ended it
  int signal = 0;  // that ended it
  std::string out, err;
};

struct RunOptions {
  std::string input{};
  std::vector<std::pair<std::string, std::string>> environment{};
  std::string out_path{}, err_path{};  // stdout, stderr go to this file instead
  std::vector<int> closed{};           // descriptors that the program begins without
  int64_t memory_limit = 0;            // RLIMIT_AS in bytes, 0: none
  int64_t file_size_limit = 0;         // RLIMIT_FSIZE in bytes, 0: none
  bool close_out_early = false;        // nobody reads stdout
  int kill_after_ms = 0;               // SIGKILL after so long
  std::function<bool()> end_when{};    // end_signal once this is true
  int end_signal = SIGTERM;
};

/// Runs `lacuna ARGUMENTS...` to its end.
inline Finished run_lacuna(const std::vector<std::string>& arguments, const RunOptions& options = {}) {
  int in[2], out[2], err[2];
  if (::pipe(in) || ::pipe(out) || ::pipe(err)) std::abort();
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(in[0], STDIN_FILENO);
    ::dup2(options.err_path.empty() ? err[1] : ::open(options.err_path.c_str(), O_WRONLY), STDERR_FILENO);
    ::dup2(options.out_path.empty() ? out[1] : ::open(options.out_path.c_str(), O_WRONLY | O_CREAT, 0644),
           STDOUT_FILENO);
    for (const int fd : {in[0], in[1], out[0], out[1], err[0], err[1]}) ::close(fd);
    if (options.file_size_limit > 0) {
      const rlimit limit{rlim_t(options.file_size_limit), rlim_t(options.file_size_limit)};
      ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    if (options.memory_limit > 0) {
      const rlimit limit{rlim_t(options.memory_limit), rlim_t(options.memory_limit)};
      ::setrlimit(RLIMIT_AS, &limit);
    }
    for (const int fd : options.closed) ::close(fd);
    for (const auto& [name, value] : options.environment) ::setenv(name.c_str(), value.c_str(), 1);
    const char* const program = std::getenv("LACUNA_PROGRAM") != nullptr ? std::getenv("LACUNA_PROGRAM") : kProgram;
    std::vector<char*> argv{const_cast<char*>(program)};
    for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    ::signal(SIGINT, SIG_DFL);  // a shell in the background may have left it ignored
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  ::close(in[0]);
  ::close(out[1]);
  ::close(err[1]);
  if (options.close_out_early) {
    ::close(out[0]);
    out[0] = -1;
  }
  ::signal(SIGPIPE, SIG_IGN);
  size_t sent = 0;
  while (sent < options.input.size()) {
    const ssize_t done = ::write(in[1], options.input.data() + sent, options.input.size() - sent);
    if (done <= 0) break;
    sent += size_t(done);
  }
  ::close(in[1]);

  Finished result;
  const auto start = std::chrono::steady_clock::now();
  bool killed = false;
  for (int open = out[0] >= 0 ? 2 : 1; open > 0;) {
    pollfd fds[2] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
    const bool watching = !killed && (options.kill_after_ms > 0 || options.end_when);
    ::poll(fds, 2, watching ? 5 : -1);
    if (watching && options.kill_after_ms > 0 &&
        std::chrono::steady_clock::now() - start >= std::chrono::milliseconds(options.kill_after_ms)) {
      ::kill(child, SIGKILL);
      killed = true;
    } else if (watching && options.end_when && options.end_when()) {
      ::kill(child, options.end_signal);
      killed = true;
    }
    for (int i = 0; i < 2; ++i) {
      if (fds[i].fd < 0 || !(fds[i].revents & (POLLIN | POLLHUP))) continue;
      char buffer[65536];
      const ssize_t got = ::read(fds[i].fd, buffer, sizeof(buffer));
      if (got > 0) {
        (i == 0 ? result.out : result.err).append(buffer, size_t(got));
      } else {
        ::close(fds[i].fd);
        (i == 0 ? out[0] : err[0]) = -1;
        --open;
      }
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status)) result.code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  return result;
}

/// Exit code 0, then stdout.
inline std::string output_of(const std::vector<std::string>& arguments, const RunOptions& options = {}) {
  const Finished done = run_lacuna(arguments, options);
  EXPECT_EQ(done.code, 0) << "signal " << done.signal << "\n" << done.err;
  return done.out;
}

/// Every line of stdout is one JSON object.
inline std::vector<nlohmann::json> json_lines(const std::string& out) {
  std::vector<nlohmann::json> lines;
  EXPECT_TRUE(out.empty() || out.back() == '\n') << out;
  for (size_t at = 0; at < out.size();) {
    const size_t end = out.find('\n', at);
    lines.push_back(nlohmann::json::parse(out.substr(at, end - at), nullptr, false));
    EXPECT_TRUE(lines.back().is_object()) << out.substr(at, end - at);
    at = end == std::string::npos ? out.size() : end + 1;
  }
  return lines;
}
inline nlohmann::json json_of(std::vector<std::string> arguments, const RunOptions& options = {}) {
  arguments.push_back("--json");
  const auto lines = json_lines(output_of(arguments, options));
  EXPECT_EQ(lines.size(), 1u);
  return lines.empty() ? nlohmann::json::object() : lines[0];
}

/// The exit code, nothing on stdout, one line on stderr that begins with "lacuna: " and holds `words`.
inline void expect_error(const std::vector<std::string>& arguments, const std::string& words,
                         const RunOptions& options = {}, int code = 1) {
  const Finished done = run_lacuna(arguments, options);
  std::string command;
  for (const std::string& argument : arguments) command += argument.substr(0, 200) + " ";
  EXPECT_EQ(done.code, code) << command << "signal " << done.signal << "\n" << done.err;
  EXPECT_EQ(done.out, "") << command;
  EXPECT_EQ(std::count(done.err.begin(), done.err.end(), '\n'), 1) << command << "\n" << done.err;
  EXPECT_TRUE(done.err.starts_with("lacuna: ")) << command << "\n" << done.err;
  EXPECT_NE(done.err.find(words), std::string::npos) << command << "\nexpected: " << words << "\nfound: " << done.err;
}

/// The same of a flag that is refused before anything is opened.
inline void expect_usage_error(const std::vector<std::string>& arguments, const std::string& words) {
  expect_error(arguments, words, {}, 2);
}

}  // namespace lacuna::test
