#include "cli/pull/url.h"

#include <algorithm>
#include <cctype>
#include <charconv>

#include "core/error.h"

namespace lacuna::cli::pull {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  return out;
}

}  // namespace

Url Url::parse(std::string_view text) {
  Url out;
  const size_t colon = text.find("://");
  if (colon == std::string_view::npos) throw Error("{}: not an address; expected https://host/path", text);
  out.scheme = lower(text.substr(0, colon));
  if (out.scheme != "http" && out.scheme != "https")
    throw Error("{}: unknown kind of address '{}'; expected http or https", text, out.scheme);
  std::string_view rest = text.substr(colon + 3);
  rest = rest.substr(0, rest.find('#'));
  const size_t end = std::min(rest.find('/'), rest.find('?'));
  std::string_view authority = rest.substr(0, end);
  out.target = end == std::string_view::npos ? "/" : std::string(rest.substr(end));
  if (out.target.starts_with('?')) out.target.insert(out.target.begin(), '/');
  if (authority.find('@') != std::string_view::npos)
    throw Error("{}: a user name in the address is not supported; use HF_TOKEN for access tokens", text);
  const size_t bracket = authority.rfind(']');
  const size_t port = authority.find(':', bracket == std::string_view::npos ? 0 : bracket);
  if (port != std::string_view::npos) {
    const std::string_view digits = authority.substr(port + 1);
    const auto [last, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), out.port);
    if (failed != std::errc() || last != digits.data() + digits.size() || out.port < 1 || out.port > 65535)
      throw Error("{}: the port '{}' is not a number from 1 to 65535", text, digits);
    authority = authority.substr(0, port);
  }
  out.host = lower(authority);
  if (out.host.empty()) throw Error("{}: the address names no host", text);
  if (std::any_of(text.begin(), text.end(), [](unsigned char c) { return c <= ' ' || c == 0x7f; }))
    throw Error("{}: an address cannot hold spaces or control characters", text);
  if ((out.scheme == "https" && out.port == 443) || (out.scheme == "http" && out.port == 80)) out.port = 0;
  return out;
}

Url Url::resolve(std::string_view location) const {
  location = location.substr(0, location.find('#'));
  if (location.find("://") != std::string_view::npos) return parse(location);
  if (location.starts_with("//")) return parse(fmt::format("{}:{}", scheme, location));
  Url out = *this;
  if (location.starts_with('/')) {
    out.target = location;
  } else {
    const std::string path = target.substr(0, target.find('?'));
    out.target = path.substr(0, path.rfind('/') + 1) + std::string(location);
  }
  return out;
}

std::string Url::origin() const {
  return port ? fmt::format("{}://{}:{}", scheme, host, port) : fmt::format("{}://{}", scheme, host);
}

bool Url::is_local() const { return host == "localhost" || host == "127.0.0.1" || host == "[::1]"; }

std::string escape_segment(std::string_view segment) {
  std::string out;
  for (const unsigned char c : segment) {
    if (std::isalnum(c) || c == '-' || c == '_' || c == '.' || c == '~')
      out += char(c);
    else
      out += fmt::format("%{:02X}", c);
  }
  return out;
}

std::string escape_path(std::string_view path) {
  std::string out;
  for (;;) {
    const size_t slash = path.find('/');
    out += escape_segment(path.substr(0, slash));
    if (slash == std::string_view::npos) return out;
    out += '/';
    path.remove_prefix(slash + 1);
  }
}

}  // namespace lacuna::cli::pull
