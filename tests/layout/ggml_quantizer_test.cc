// Encoding errors against those of ggml's quantizer on the same rows (tests/fixtures/ggml_quantizer, made by
// scripts/ggml_quantizer_errors.py).
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/scalar.h"
#include "layout/rows.h"
#include "test_support.h"

namespace lacuna::layout {
namespace {

TEST(GgmlQuantizer, LeavesNoSmallerError) {
  const auto figures = nlohmann::json::parse(test::read_text(test::fixture("ggml_quantizer/errors.json")));
  const std::string bytes = test::read_text(test::fixture("ggml_quantizer/rows.bf16"));
  std::vector<float> values(bytes.size() / 2);
  for (size_t i = 0; i < values.size(); ++i) {
    bf16 value;
    std::memcpy(&value, bytes.data() + 2 * i, 2);
    values[i] = to_float(value);
  }
  const std::span<const float> importance = std::span(values).last(1024);
  ASSERT_EQ(figures["errors"].size(), 10u);
  for (const auto& [name, errors] : figures["errors"].items()) {
    const Layout* layout = find(name);
    ASSERT_NE(layout, nullptr) << name;
    size_t begin = 0;
    for (const auto& set : figures["sets"]) {
      const size_t rows = set["shape"][0], K = set["shape"][1];
      for (const bool weighted : {false, true}) {
        const std::span<const float> p = weighted ? importance.first(K) : importance.first(0);
        double error = 0;
        for (size_t n = 0; n < rows; ++n) {
          const std::span<const float> w = std::span<const float>(values).subspan(begin + n * K, K);
          error += test_rows::squared_error(w, test_rows::stored(*layout, w, p), p);
        }
        const std::string key = set["name"].get<std::string>() + (weighted ? "_importance" : "");
        const double ggml = errors[key];
        EXPECT_LE(error, ggml) << name << " " << key;
        EXPECT_GE(error, 0.3 * ggml) << name << " " << key << ": too good to be true";
        RecordProperty(name + "_" + key, std::to_string(error / ggml));
      }
      begin += rows * K;
    }
    ASSERT_EQ(begin + 1024, values.size());
  }
}

}  // namespace
}  // namespace lacuna::layout
