// src/core/sha256.h - SHA-256 (FIPS 180-4) as lower-case hex, streamed.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace lacuna {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  void update(std::span<const std::byte> bytes);
  /// The digest of everything given so far; the object is spent afterwards.
  std::string hex();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

std::string sha256_hex(std::span<const std::byte> bytes);
/// Throws Error when the file cannot be read.
std::string sha256_file(const std::string& path);

}  // namespace lacuna
