#include "core/sha256.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <string_view>

#include "core/error.h"
#include "test_support.h"

namespace lacuna {
namespace {

std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

// FIPS 180-4's examples and the empty message.
constexpr std::string_view kAbc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
constexpr std::string_view kMillion = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0";

TEST(Sha256, StandardVectors) {
  EXPECT_EQ(sha256_hex(bytes("abc")), kAbc);
  EXPECT_EQ(sha256_hex({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex(bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256_hex(bytes(std::string(1000000, 'a'))), kMillion);
}

TEST(Sha256, PiecesOfAnySizeGiveTheSameDigest) {
  const std::string text(1000000, 'a');
  for (const size_t piece : {1u, 63u, 64u, 65u, 999999u}) {
    Sha256 hash;
    for (size_t i = 0; i < text.size(); i += piece)
      hash.update(bytes(text).subspan(i, std::min(piece, text.size() - i)));
    hash.update({});
    EXPECT_EQ(hash.hex(), kMillion) << piece;
  }
}

TEST(Sha256, Files) {
  const test::TempDir dir;
  std::ofstream(dir.file("abc"), std::ios::binary) << "abc";
  std::ofstream(dir.file("empty"), std::ios::binary);
  EXPECT_EQ(sha256_file(dir.file("abc")), kAbc);
  EXPECT_EQ(sha256_file(dir.file("empty")), sha256_hex({}));
  EXPECT_THAT([&] { sha256_file(dir.file("absent")); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("absent: cannot open")));
}

}  // namespace
}  // namespace lacuna
