#include "cli/pull/http.h"

#include <fcntl.h>
#include <httplib.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "cli/pull/lock.h"
#include "core/error.h"
#include "core/progress.h"
#include "core/sha256.h"

namespace lacuna::cli::pull {
namespace {

constexpr int kRedirects = 10;
constexpr int64_t kTextLimit = int64_t{64} << 20;
constexpr double kLongestWait = 60;
constexpr int kConnectSeconds = 20, kReadSeconds = 60;

/// A failure that another attempt may mend.
struct Transient {
  std::string what;
  double wait_s = 0;  // that the server asked for
};

std::string unquoted(std::string value) {
  if (value.starts_with("W/")) value.erase(0, 2);
  if (value.size() >= 2 && value.front() == '"' && value.back() == '"') value = value.substr(1, value.size() - 2);
  return value;
}

bool is_sha256(const std::string& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

std::optional<int64_t> to_integer(const std::string& text) {
  int64_t value = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failed != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

struct Proxy {
  Url url;
  std::string user, password;
};

/// The proxy that the environment names for this address.
std::optional<Proxy> proxy_for(const Url& url) {
  const auto variable = [](const char* lower, const char* upper) -> std::string {
    if (const char* value = std::getenv(lower)) return value;
    if (const char* value = std::getenv(upper)) return value;
    return {};
  };
  if (url.is_local()) return std::nullopt;
  std::string exceptions = variable("no_proxy", "NO_PROXY") + ",";
  for (size_t comma; (comma = exceptions.find(',')) != std::string::npos; exceptions.erase(0, comma + 1)) {
    std::string name = exceptions.substr(0, comma);
    std::erase(name, ' ');
    if (name == "*") return std::nullopt;
    if (name.starts_with('.')) name.erase(0, 1);
    if (!name.empty() && (url.host == name || url.host.ends_with("." + name))) return std::nullopt;
  }
  std::string proxy =
      url.scheme == "https" ? variable("https_proxy", "HTTPS_PROXY") : variable("http_proxy", "HTTP_PROXY");
  if (proxy.empty()) return std::nullopt;
  if (proxy.find("://") == std::string::npos) proxy.insert(0, "http://");
  Proxy out;
  const size_t begin = proxy.find("://") + 3, at = proxy.rfind('@', proxy.find('/', begin));
  if (at != std::string::npos) {
    const std::string account = proxy.substr(begin, at - begin);
    const size_t colon = account.find(':');
    out.user = account.substr(0, colon);
    if (colon != std::string::npos) out.password = account.substr(colon + 1);
    proxy.erase(begin, at + 1 - begin);
  }
  out.url = Url::parse(proxy);
  return out;
}

std::string reason(httplib::Error error) {
  switch (error) {
    case httplib::Error::Connection:
      return "no connection (is the network there, does the host exist?)";
    case httplib::Error::ConnectionTimeout:
      return "no answer in time";
    case httplib::Error::Read:
      return "the connection broke while reading";
    case httplib::Error::Write:
      return "the connection broke while sending";
    case httplib::Error::SSLConnection:
      return "the TLS connection failed";
    case httplib::Error::SSLLoadingCerts:
      return "the system's certificates cannot be loaded (install ca-certificates)";
    case httplib::Error::SSLServerVerification:
      return "the server's certificate is not trusted";
    default:
      return httplib::to_string(error);
  }
}

void refuse(const Url& url, int status) {
  if (status == 401 || status == 403)
    throw Error(
        "{}: the server denies access ({}); for a gated or private model accept its terms on its page, make an "
        "access token in your account's settings and set HF_TOKEN to it",
        url.text(), status);
  if (status == 407)
    throw Error(
        "{}: the proxy asks for a user name and password (407); put them into https_proxy or http_proxy: "
        "http://USER:PASSWORD@HOST:PORT",
        url.text());
  if (status == 404 || status == 410) throw Error("{}: not found ({}); check the name", url.text(), status);
  throw Error("{}: the server answered {}; expected the file", url.text(), status);
}

/// The unfinished file: appended to, locked against another download of the same name.
class PartFile {
 public:
  explicit PartFile(const std::string& target) : target_(target), path_(target + ".part"), etag_path_(path_ + ".etag") {
    const std::filesystem::path folder = std::filesystem::path(target).parent_path();
    std::error_code failed;
    if (!folder.empty()) std::filesystem::create_directories(folder, failed);
    if (failed) throw Error("{}: the folder cannot be made: {}", folder.string(), failed.message());
    fd_ = open_locked(path_);
    if (fd_ < 0) throw Error("{}: another process is downloading it; wait for that or stop it", path_);
    size_ = ::lseek(fd_, 0, SEEK_END);
    std::ifstream etag(etag_path_);
    etag_.assign(std::istreambuf_iterator<char>(etag), {});
  }
  ~PartFile() {
    if (size_ == 0 && !finished_) remove();
    ::close(fd_);
  }
  PartFile(const PartFile&) = delete;
  PartFile& operator=(const PartFile&) = delete;

  int64_t size() const { return size_; }
  const std::string& etag() const { return etag_; }
  void restart(const std::string& etag) {
    if (::ftruncate(fd_, 0) != 0 || ::lseek(fd_, 0, SEEK_SET) != 0) fail("truncated");
    size_ = 0;
    etag_ = etag;
    std::ofstream(etag_path_) << etag;
  }
  void append(const char* data, size_t count) {
    while (count > 0) {
      const ssize_t done = ::write(fd_, data, count);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) fail("written");
      data += done;
      count -= size_t(done);
      size_ += done;
    }
  }
  std::string sum() const { return sha256_file(path_); }
  void finish() {
    if (::fsync(fd_) != 0) fail("synced");
    if (std::rename(path_.c_str(), target_.c_str()) != 0) fail("renamed to its name");
    finished_ = true;
    ::unlink(etag_path_.c_str());
  }
  const std::string& path() const { return path_; }
  void remove() {
    ::unlink(path_.c_str());
    ::unlink(etag_path_.c_str());
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw Error("{}: cannot be {}: {}", path_, what, std::strerror(errno));
  }
  std::string target_, path_, etag_path_, etag_;
  int fd_ = -1;
  int64_t size_ = 0;
  bool finished_ = false;
};

/// Runs `attempt` until it succeeds; waits and tries again on Transient, unless `retries` attempts in a row brought
/// nothing new (position() tells).
template <class Attempt, class Position>
void with_retries(const HttpOptions& options, const std::string& url, Attempt&& attempt, Position&& position) {
  int failures = 0;
  double wait = options.wait_s;
  for (;;) {
    const int64_t before = position();
    try {
      attempt();
      return;
    } catch (const Transient& failure) {
      if (position() > before) failures = 0, wait = options.wait_s;
      if (++failures > options.retries)
        throw Error("{}: {}{}; check the network and try again{}", url, failure.what,
                    failures > 1 ? fmt::format(", {} times", failures) : "",
                    position() > 0 ? " (what has come is kept)" : "");
      if (::isatty(STDERR_FILENO) == 1)  // somebody waits
        spdlog::warn("{}: {}; trying again ({} of {})", url, failure.what, failures, options.retries);
      std::this_thread::sleep_for(
          std::chrono::duration<double>(std::min(kLongestWait, std::max(wait, failure.wait_s))));
      wait *= 2;
    }
  }
}

}  // namespace

/// One request after its redirects: what came back and where the body goes.
struct Http::Exchange {
  int status = 0;
  Url url;                    // that answered
  std::string linked_sha256;  // from any answer on the way
  int64_t linked_size = -1;
  httplib::Headers headers;
  /// Called once the final answer's header is there; false: the body is not wanted.
  std::function<bool()> on_header;
  std::function<void(const char* data, size_t count)> on_body;

  std::string header(const char* name) const {
    const auto found = headers.find(name);
    return found == headers.end() ? std::string() : found->second;
  }
};

void Http::request(const Url& first, const std::map<std::string, std::string>& headers, Exchange& exchange) const {
  Url url = first;
  for (int hop = 0; hop <= kRedirects; ++hop) {
    httplib::Client client(url.origin());
    client.set_connection_timeout(kConnectSeconds);
    client.set_read_timeout(kReadSeconds);
    client.set_decompress(false);
    client.set_follow_location(false);
    if (const auto proxy = proxy_for(url)) {
      client.set_proxy(proxy->url.host, proxy->url.port ? proxy->url.port : 80);
      if (!proxy->user.empty()) client.set_proxy_basic_auth(proxy->user, proxy->password);
    }
    httplib::Headers sent(headers.begin(), headers.end());
    sent.emplace("User-Agent", "lacuna/" LACUNA_VERSION);
    sent.emplace("Accept-Encoding", "identity");
    if (!options_.token.empty() && url.same_origin(first) && (url.scheme == "https" || url.is_local()))
      sent.emplace("Authorization", "Bearer " + options_.token);

    std::exception_ptr error;
    bool wanted = true;
    const httplib::Result result = client.Get(
        url.target, sent,
        [&](const httplib::Response& response) {
          exchange.status = response.status;
          exchange.headers = response.headers;
          exchange.url = url;
          const std::string sum = unquoted(exchange.header("X-Linked-Etag"));
          if (is_sha256(sum)) exchange.linked_sha256 = sum;
          if (const auto size = to_integer(exchange.header("X-Linked-Size"))) exchange.linked_size = *size;
          try {
            wanted = response.status / 100 == 2 && exchange.on_header();
          } catch (...) {
            error = std::current_exception();
            wanted = false;
          }
          return wanted;
        },
        [&](const char* data, size_t count) {
          try {
            exchange.on_body(data, count);
            return true;
          } catch (...) {
            error = std::current_exception();
            return false;
          }
        });
    if (error) std::rethrow_exception(error);
    if (!result && exchange.status == 0) {
      if (result.error() == httplib::Error::SSLServerVerification || result.error() == httplib::Error::SSLLoadingCerts)
        throw Error("{}: {}", url.origin(), reason(result.error()));
      throw Transient{reason(result.error())};
    }
    if (wanted && !result) throw Transient{reason(result.error())};

    if (exchange.status == 0) exchange.status = result->status;  // a proxy's refusal of an https connection
    const int status = exchange.status;
    if (status / 100 == 2 || status == 416) return;
    if (status / 100 == 3 && status != 304) {
      const std::string location = exchange.header("Location");
      if (location.empty()) throw Error("{}: the server answered {} without saying where to go", url.text(), status);
      const Url next = url.resolve(location);
      if (url.scheme == "https" && next.scheme == "http")
        throw Error("{}: the server leads from https to plain http ({}); refused", url.text(), next.text());
      url = next;
      exchange.status = 0;
      continue;
    }
    if (status == 408 || status == 429 || status >= 500)
      throw Transient{fmt::format("the server answered {}", status),
                      double(to_integer(exchange.header("Retry-After")).value_or(0))};
    refuse(url, status);
  }
  throw Error("{}: more than {} redirects", first.text(), kRedirects);
}

std::string Http::get(const std::string& url) const {
  std::string body;
  with_retries(
      options_, url,
      [&] {
        body.clear();
        Exchange exchange;
        exchange.on_header = [] { return true; };
        exchange.on_body = [&](const char* data, size_t count) {
          if (int64_t(body.size() + count) > kTextLimit) throw Error("{}: the answer is longer than 64 MiB", url);
          body.append(data, count);
        };
        request(Url::parse(url), {}, exchange);
        if (exchange.status == 416) refuse(exchange.url, exchange.status);
      },
      [] { return int64_t{0}; });
  return body;
}

Downloaded Http::download(const Download& wanted) const {
  PartFile part(wanted.path);
  const std::string name = std::filesystem::path(wanted.path).filename().string();
  std::optional<Progress> progress;
  std::string expected_sum = wanted.sha256;
  int64_t expected_size = wanted.bytes;
  bool size_known = false;

  // What the server has is the file of the part here: its tag says so, or a sum will tell in the end.
  const auto goes_on = [&](const Exchange& exchange) {
    const bool sum_known = !expected_sum.empty() || !exchange.linked_sha256.empty();
    return part.etag() == exchange.header("ETag") && (sum_known || !part.etag().empty());
  };
  /// False: the part did not fit and was emptied.
  const auto fetch = [&] {
    std::map<std::string, std::string> headers;
    const int64_t from = part.size();
    if (from > 0) headers["Range"] = fmt::format("bytes={}-", from);
    int64_t total = -1;
    bool started_over = false;
    Exchange exchange;
    exchange.on_header = [&] {
      const std::string etag = exchange.header("ETag");
      const int64_t length = to_integer(exchange.header("Content-Length")).value_or(-1);
      if (exchange.status == 206) {
        const std::string range = exchange.header("Content-Range");  // bytes 100-199/200
        const size_t slash = range.find('/');
        if (!range.starts_with(fmt::format("bytes {}-", from)) || slash == std::string::npos || !goes_on(exchange)) {
          part.restart("");  // the file changed or nothing tells, or the server counts otherwise
          started_over = true;
          return false;
        }
        total = to_integer(range.substr(slash + 1)).value_or(-1);
      } else {
        part.restart(etag);
        total = length;
      }
      if (options_.progress) {
        if (!progress) progress.emplace(name, total, "B");
        progress->set(part.size());
      }
      return true;
    };
    exchange.on_body = [&](const char* data, size_t count) {
      part.append(data, count);
      if (progress) progress->set(part.size());
    };
    request(Url::parse(wanted.url), headers, exchange);
    if (expected_sum.empty()) expected_sum = exchange.linked_sha256;
    if (expected_size < 0) expected_size = exchange.linked_size;
    if (exchange.status == 416) {
      // Nothing lies beyond what is here: complete if the sizes agree, else left over from another file.
      const std::string range = exchange.header("Content-Range");
      const size_t slash = range.find('/');
      total = slash == std::string::npos ? -1 : to_integer(range.substr(slash + 1)).value_or(-1);
      if (total != part.size() || !goes_on(exchange)) {
        part.restart("");
        started_over = true;
      }
    }
    if (started_over) return false;
    size_known = total >= 0;
    if (total >= 0 && part.size() < total) throw Transient{"the connection ended early"};
    return true;
  };
  const auto attempt = [&] {
    if (!fetch() && !fetch()) throw Transient{"the server does not send the file from its start"};
  };
  with_retries(options_, wanted.url, attempt, [&] { return part.size(); });
  progress.reset();

  if (expected_size >= 0 && part.size() != expected_size) {
    const int64_t size = part.size();
    part.remove();
    throw Error("{}: {} bytes came, expected {}; the part was removed, try again", wanted.url, size, expected_size);
  }
  Downloaded out{part.size(), part.sum(), !expected_sum.empty()};
  if (out.checked && out.sha256 != expected_sum) {
    part.remove();
    throw Error(
        "{}: its sha256 is {}, expected {}; the file was removed: it changed at its source or was damaged on the way",
        wanted.url, out.sha256, expected_sum);
  }
  if (wanted.check) {
    try {
      wanted.check(part.path(), size_known || expected_size >= 0 || out.checked);
    } catch (const Error&) {
      part.remove();
      throw;
    }
  }
  part.finish();
  return out;
}

}  // namespace lacuna::cli::pull
