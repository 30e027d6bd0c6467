// Every row type against the `gguf` package's own decoder (and encoder, where it has one): tests/fixtures/ggml_types.
#include <gtest/gtest.h>

#include <bit>
#include <cctype>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "layout/layout.h"
#include "test_support.h"

namespace lacuna::layout {
namespace {

std::vector<std::byte> from_hex(const std::string& hex) {
  std::vector<std::byte> bytes(hex.size() / 2);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  return bytes;
}

class GgmlType : public testing::TestWithParam<const char*> {
 protected:
  GgmlType() {
    const std::string type = GetParam();
    fixture_ = nlohmann::json::parse(test::read_text(test::fixture("ggml_types/" + type + ".json")));
    std::string name;
    for (const char c : type) name += c == 'K' ? c : char(std::tolower(c));
    layout_ = find(name);
  }
  nlohmann::json fixture_;
  const Layout* layout_;
};

TEST_P(GgmlType, TableAgrees) {
  ASSERT_NE(layout_, nullptr);
  EXPECT_EQ(layout_->ggml_type, fixture_["id"].get<int>());
  EXPECT_EQ(layout_->block_cols, fixture_["block_values"].get<int64_t>());
  EXPECT_EQ(layout_->block_bytes, fixture_["block_bytes"].get<int64_t>());
  EXPECT_EQ(find_ggml_type(layout_->ggml_type), layout_);
}

TEST_P(GgmlType, DecodesToTheSameBits) {
  ASSERT_NE(layout_, nullptr);
  ASSERT_GE(fixture_["decode"].size(), 2u);
  for (const auto& entry : fixture_["decode"]) {
    SCOPED_TRACE(entry["what"].get<std::string>());
    const auto bytes = from_hex(entry["bytes"]);
    const auto expected = entry["values"].get<std::vector<float>>();
    std::vector<float> w(expected.size(), 12345.0f);
    layout_->decode_row(*layout_, bytes, w);
    for (size_t i = 0; i < w.size(); ++i)
      EXPECT_EQ(std::bit_cast<uint32_t>(w[i]), std::bit_cast<uint32_t>(expected[i]))
          << "weight " << i << ": " << w[i] << ", expected " << expected[i];
  }
}

INSTANTIATE_TEST_SUITE_P(All, GgmlType,
                         testing::Values("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K",
                                         "Q5_K", "Q6_K"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace lacuna::layout
