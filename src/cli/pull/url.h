// src/cli/pull/url.h - http and https addresses.
#pragma once

#include <string>
#include <string_view>

namespace lacuna::cli::pull {

struct Url {
  std::string scheme, host;  // lower case; an IPv6 host keeps its brackets
  int port = 0;              // 0: the scheme's
  std::string target;        // path and query, begins with '/'

  /// Throws Error for anything but http://host[:port][/path] and https://...
  static Url parse(std::string_view text);
  /// The address that a Location header means, seen from here. A fragment is dropped.
  Url resolve(std::string_view location) const;

  std::string origin() const;  // scheme://host[:port]
  std::string text() const { return origin() + target; }
  /// This machine itself.
  bool is_local() const;
  bool same_origin(const Url& other) const { return origin() == other.origin(); }
};

/// Escapes everything in one path segment that may not stand there.
std::string escape_segment(std::string_view segment);
/// The same for a path; its slashes stay.
std::string escape_path(std::string_view path);

}  // namespace lacuna::cli::pull
