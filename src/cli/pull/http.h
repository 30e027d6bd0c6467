// src/cli/pull/http.h - files over HTTP: redirects, ranges, resuming, retries, checksums.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "cli/pull/url.h"

namespace lacuna::cli::pull {

struct HttpOptions {
  std::string token;  // sent as a bearer token to the first address's origin only, never over plain http to elsewhere
  int retries = 5;    // further attempts without progress, for lost connections and 408, 429, 5xx
  double wait_s = 1;  // before the first of them; doubled each time, at most 60
  bool progress = true;
};

struct Download {
  std::string url, path;
  std::string sha256;  // expected; empty: what the server's x-linked-etag says, if anything
  int64_t bytes = -1;  // expected; -1: what the server says
  /// Optional: throws Error when what came is not what it should be; it is removed then. complete: a size or a sum told
  /// that all of it came.
  std::function<void(const std::string& part, bool complete)> check = {};
};

struct Downloaded {
  int64_t bytes = 0;
  std::string sha256;
  bool checked = false;  // against an expected sum
};

class Http {
 public:
  explicit Http(HttpOptions options) : options_(std::move(options)) {}

  /// The body of a small resource. Throws Error, as download() does.
  std::string get(const std::string& url) const;

  /// Brings a file to `path`. Its bytes gather in `path`.part, where a later call goes on; the name appears when size
  /// and checksum are right. Throws Error that says what the server answered and what to do.
  Downloaded download(const Download& wanted) const;

 private:
  struct Exchange;
  void request(const Url& first, const std::map<std::string, std::string>& headers, Exchange& exchange) const;
  HttpOptions options_;
};

}  // namespace lacuna::cli::pull
