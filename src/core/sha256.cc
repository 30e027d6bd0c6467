#include "core/sha256.h"

#include <openssl/evp.h>

#include <array>
#include <cassert>

#include "core/mapped_file.h"

namespace lacuna {

struct Sha256::Context {
  EVP_MD_CTX* evp = EVP_MD_CTX_new();
  ~Context() { EVP_MD_CTX_free(evp); }
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {
  const int ok = EVP_DigestInit_ex(context_->evp, EVP_sha256(), nullptr);
  assert(ok == 1);
  static_cast<void>(ok);
}

Sha256::~Sha256() = default;

void Sha256::update(std::span<const std::byte> bytes) { EVP_DigestUpdate(context_->evp, bytes.data(), bytes.size()); }

std::string Sha256::hex() {
  std::array<unsigned char, 32> digest{};
  EVP_DigestFinal_ex(context_->evp, digest.data(), nullptr);
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (const unsigned char byte : digest) {
    out += kHex[byte >> 4];
    out += kHex[byte & 15];
  }
  return out;
}

std::string sha256_hex(std::span<const std::byte> bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.hex();
}

std::string sha256_file(const std::string& path) { return sha256_hex(MappedFile(path).bytes()); }

}  // namespace lacuna
