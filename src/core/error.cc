#include "core/error.h"

namespace lacuna {

std::string Error::whole(std::string text) {
  for (size_t at = 0; (at = text.find('\0', at)) != std::string::npos;) text.replace(at, 1, "\\x00");
  return text;
}

}  // namespace lacuna
