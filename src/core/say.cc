#include "core/say.h"

#include <unistd.h>

#include <cerrno>

namespace lacuna {

void say_text(std::string_view text) noexcept {
  while (!text.empty()) {
    const ssize_t done = ::write(STDERR_FILENO, text.data(), text.size());
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return;
    text.remove_prefix(size_t(done));
  }
}

}  // namespace lacuna
