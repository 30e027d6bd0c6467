// Every family against transformers' logits, from the Hugging Face folder and from the GGUF file.
#include "compress/net.h"

#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "test_support.h"

namespace lacuna::compress {
namespace {

constexpr double kTolerance = 1e-4;  // tests/fixtures/README.md: float64 agrees within 2e-5

struct Truth {
  at::Tensor ids;     // [1, T]
  at::Tensor logits;  // [T, V]
};

Truth read_truth(const std::string& name) {
  const auto json = nlohmann::json::parse(test::read_text(test::fixture("hf/" + name + "/logits.json")));
  const std::vector<int64_t> ids = json["input_ids"];
  const std::vector<std::vector<float>> rows = json["logits"];
  std::vector<float> logits;
  for (const auto& row : rows) logits.insert(logits.end(), row.begin(), row.end());
  return {at::tensor(ids, at::kLong).unsqueeze(0), at::tensor(logits, at::kFloat).reshape({int64_t(rows.size()), -1})};
}

struct Case {
  std::string name, path;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.path; }
};

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const char* folder : {"hf", "gguf_models"})
    for (const auto& entry : std::filesystem::directory_iterator(test::fixture(folder))) {
      const std::string name = entry.path().stem().string();
      if (std::filesystem::exists(test::fixture("hf/" + name + "/logits.json")))
        out.push_back({name, entry.path().string()});
    }
  std::sort(out.begin(), out.end(), [](const Case& a, const Case& b) { return a.path < b.path; });
  return out;
}

class NetFixture : public testing::TestWithParam<Case> {};

TEST_P(NetFixture, GivesTheLogitsOfTransformers) {
  const Truth truth = read_truth(GetParam().name);
  const io::Checkpoint checkpoint = io::Checkpoint::open(GetParam().path);
  const Net net(checkpoint);
  at::Tensor hidden = net.embed(truth.ids);
  int taps = 0;
  for (int64_t i = 0; i < net.config().n_layers; ++i)
    hidden = net.forward(net.load_layer(i), hidden, [&](model::Input input, const at::Tensor& x) {
      ++taps;
      EXPECT_EQ(x.size(0), truth.ids.size(1));
      EXPECT_EQ(x.size(1), model::input_widths(net.config())[size_t(input)]);
    });
  EXPECT_EQ(taps, net.config().n_layers * model::kInputs);
  EXPECT_LE((net.logits(net.load_head(), hidden)[0] - truth.logits).abs().max().item<double>(), kTolerance);
}

TEST_P(NetFixture, InputsAloneAreThoseOfForward) {
  const Truth truth = read_truth(GetParam().name);
  const io::Checkpoint checkpoint = io::Checkpoint::open(GetParam().path);
  const Net net(checkpoint);
  const Layer layer = net.load_layer(0);
  const at::Tensor hidden = net.embed(truth.ids);
  std::vector<std::pair<model::Input, at::Tensor>> whole, alone;
  net.forward(layer, hidden, [&](model::Input input, const at::Tensor& x) { whole.emplace_back(input, x); });
  net.inputs(layer, hidden, [&](model::Input input, const at::Tensor& x) { alone.emplace_back(input, x); });
  ASSERT_EQ(alone.size(), whole.size());
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_EQ(alone[i].first, whole[i].first);
    EXPECT_TRUE(alone[i].second.equal(whole[i].second));
  }
}

TEST_P(NetFixture, WindowsDoNotSeeEachOther) {
  const Truth truth = read_truth(GetParam().name);
  const io::Checkpoint checkpoint = io::Checkpoint::open(GetParam().path);
  const Net net(checkpoint);
  at::Tensor hidden = net.embed(at::cat({truth.ids.flip({1}), truth.ids}, 0));
  for (int64_t i = 0; i < net.config().n_layers; ++i) hidden = net.forward(net.load_layer(i), hidden);
  EXPECT_LE((net.logits(net.load_head(), hidden)[1] - truth.logits).abs().max().item<double>(), kTolerance);
}

TEST_P(NetFixture, TheRuntimesAttentionGivesTheSame) {
  const Truth truth = read_truth(GetParam().name);
  const io::Checkpoint checkpoint = io::Checkpoint::open(GetParam().path);
  const c10::NoGradGuard no_grad;
  ThreadPool pool(2);
  const Net net(checkpoint, at::kCPU, &pool);
  at::Tensor hidden = net.embed(at::cat({truth.ids.flip({1}), truth.ids}, 0));
  for (int64_t i = 0; i < net.config().n_layers; ++i) hidden = net.forward(net.load_layer(i), hidden);
  EXPECT_LE((net.logits(net.load_head(), hidden)[1] - truth.logits).abs().max().item<double>(), kTolerance);
}

INSTANTIATE_TEST_SUITE_P(All, NetFixture, testing::ValuesIn(cases()), [](const auto& one) {
  return one.param.name + (one.param.path.ends_with(".gguf") ? "_gguf" : "_hf");
});

TEST(NetFixture, AllFixturesAreThere) { EXPECT_GE(cases().size(), 34U); }

}  // namespace
}  // namespace lacuna::compress
