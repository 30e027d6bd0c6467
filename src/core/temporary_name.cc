#include "core/temporary_name.h"

#include <unistd.h>

#include <atomic>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <iterator>

namespace lacuna {

namespace {

/// Fixed memory: a signal handler may neither lock nor free.
struct Slot {
  std::atomic<bool> taken{false};
  std::atomic<uint64_t> age{0};  // of the name, from 1; 0: none
  char path[PATH_MAX];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);
Slot g_slots[32];
std::atomic<uint64_t> g_age{0};
std::atomic<pid_t> g_owner{0};  // a child that was forked with the handlers removes nothing

void remove_all() {
  for (;;) {
    Slot* youngest = nullptr;
    for (Slot& slot : g_slots)
      if (slot.age > (youngest ? youngest->age.load() : 0)) youngest = &slot;
    if (!youngest) return;
    youngest->age = 0;
    if (::unlink(youngest->path) != 0) ::rmdir(youngest->path);
  }
}

void end(int signal) {
  if (::getpid() == g_owner) remove_all();
  struct sigaction by_itself {};
  by_itself.sa_handler = SIG_DFL;
  ::sigaction(signal, &by_itself, nullptr);
  ::raise(signal);  // is delivered when this handler returns
}

}  // namespace

TemporaryName::TemporaryName(const std::string& path) {
  if (path.size() >= PATH_MAX) return;
  for (int i = 0; i < int(std::size(g_slots)); ++i) {
    if (g_slots[i].taken.exchange(true)) continue;
    std::memcpy(g_slots[i].path, path.c_str(), path.size() + 1);
    g_slots[i].age = ++g_age;
    slot_ = i;
    return;
  }
}

TemporaryName::~TemporaryName() {
  if (slot_ < 0) return;
  g_slots[slot_].age = 0;
  g_slots[slot_].taken = false;
}

void remove_temporaries_on_signals() {
  g_owner = ::getpid();
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction found {};
    if (::sigaction(signal, nullptr, &found) != 0 || found.sa_handler == SIG_IGN) continue;
    struct sigaction action {};
    action.sa_handler = end;
    action.sa_flags = SA_RESTART;
    ::sigaction(signal, &action, nullptr);
  }
}

}  // namespace lacuna
