#include "io/image_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "core/error.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::string chosen(const ImagePolicy& policy, const std::string& name) {
  const auto choice = policy.choose(name);
  return choice.layout == nullptr ? "source" : std::string(choice.layout->name);
}

TEST(ImagePolicy, TheDefaultIsThePapers) {
  const ImagePolicy policy = ImagePolicy::load("quaspa");
  const std::string dual = "transformer_blocks.18.", one = "single_transformer_blocks.37.";
  for (const char* part : {"attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2"})
    EXPECT_EQ(chosen(policy, dual + part + ".weight"), "nm24_f8") << part;
  for (const std::string& blocks : {dual, one})
    for (const char* part : {"net.0.proj", "net.2"})
      EXPECT_EQ(chosen(policy, blocks + "ff.experts.7." + part + ".weight"), "nm24_f8") << blocks << part;
  for (const char* part : {"attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
                           "ff_context.net.0.proj", "ff_context.net.2"})
    EXPECT_EQ(chosen(policy, dual + part + ".weight"), "f8") << part;
  for (const char* part : {"attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out"})
    EXPECT_EQ(chosen(policy, one + part + ".weight"), "nm24_f8") << part;
  for (const char* part : {"img_attn.qkv", "img_attn.proj", "img_mlp.0", "img_mlp.2"})
    EXPECT_EQ(chosen(policy, std::string("double_blocks.0.") + part + ".weight"), "nm24_f8") << part;
  for (const char* part : {"txt_attn.qkv", "txt_attn.proj", "txt_mlp.0", "txt_mlp.2"})
    EXPECT_EQ(chosen(policy, std::string("double_blocks.0.") + part + ".weight"), "f8") << part;
  for (const char* part : {"linear1", "linear2"})
    EXPECT_EQ(chosen(policy, std::string("single_blocks.5.") + part + ".weight"), "nm24_f8") << part;
  for (const char* name :
       {"x_embedder.weight", "context_embedder.weight", "proj_out.weight", "norm_out.linear.weight",
        "transformer_blocks.0.norm1.linear.weight", "transformer_blocks.0.norm1_context.linear.weight",
        "single_transformer_blocks.0.norm.linear.weight", "time_text_embed.timestep_embedder.linear_1.weight",
        "transformer_blocks.0.ff.gate.weight", "img_in.weight", "double_blocks.0.img_mod.lin.weight",
        "single_blocks.0.modulation.lin.weight", "final_layer.linear.weight"})
    EXPECT_EQ(chosen(policy, name), "bf16") << name;
}

TEST(ImagePolicy, TheOthersBuiltIn) {
  const std::string image = "transformer_blocks.0.ff.net.2.weight", text = "double_blocks.0.txt_mlp.2.weight";
  EXPECT_EQ(chosen(ImagePolicy::load("f8"), image), "f8");
  EXPECT_EQ(chosen(ImagePolicy::load("f8"), text), "f8");
  EXPECT_EQ(chosen(ImagePolicy::load("nm24_bf16"), image), "nm24_bf16");
  EXPECT_EQ(chosen(ImagePolicy::load("nm24_bf16"), text), "bf16");
  EXPECT_EQ(chosen(ImagePolicy::load("bf16"), image), "bf16");
  for (const char* name : {"quaspa", "f8", "nm24_bf16", "bf16"}) {
    const ImagePolicy policy = ImagePolicy::load(name);
    EXPECT_TRUE(policy.built_in());
    EXPECT_EQ(ImagePolicy::parse(policy.text(), "x").rule_count(), policy.rule_count()) << "its text is a policy file";
  }
}

TEST(ImagePolicy, TheFirstRuleThatMatchesWins) {
  const ImagePolicy policy = ImagePolicy::parse(
      R"({"version": 1, "rest": "source", "rules": [{"name": "a.*.w", "layout": "f8"}, {"name": "a.1.w", "layout": "bf16"},
      {"name": "*.expert.*.up.weight", "layout": "nm24_f8"}]})",
      "p.json");
  EXPECT_EQ(policy.choose("a.1.w").rule, 0);
  EXPECT_EQ(chosen(policy, "a.1.w"), "f8");
  EXPECT_EQ(chosen(policy, "b.expert.17.up.weight"), "nm24_f8");
  EXPECT_EQ(policy.choose("b.w").rule, -1);
  EXPECT_EQ(chosen(policy, "b.w"), "source");
}

TEST(ImagePolicy, AStarStopsAtADot) {
  EXPECT_TRUE(matches_name("a.*.b", "a.12.b"));
  EXPECT_TRUE(matches_name("a.*.b", "a..b"));
  EXPECT_FALSE(matches_name("a.*.b", "a.1.2.b"));
  EXPECT_FALSE(matches_name("a.*", "a.1.b"));
  EXPECT_FALSE(matches_name("transformer_blocks.*.x", "single_transformer_blocks.0.x"));
  EXPECT_TRUE(matches_name("*", "abc"));
  EXPECT_TRUE(matches_name("*c", "abcc"));
  EXPECT_TRUE(matches_name("*b*b", "abbab"));
  EXPECT_FALSE(matches_name("*c", "abcd"));
  EXPECT_FALSE(matches_name("", "a"));
  EXPECT_TRUE(matches_name("", ""));
}

TEST(ImagePolicy, SaysWhatIsWrong) {
  const auto parse = [](const char* text) { return [=] { ImagePolicy::parse(text, "p.json"); }; };
  EXPECT_THAT(parse(R"({"version": 2, "rules": [], "rest": "bf16"})"),
              ThrowsMessage<Error>(HasSubstr("p.json: version 2")));
  EXPECT_THAT(parse(R"({"version": 1, "rules": []})"), ThrowsMessage<Error>(HasSubstr("rest")));
  EXPECT_THAT(parse(R"({"version": 1, "rest": "bf16", "rules": [{"name": "a", "layout": "q4_K"}]})"),
              ThrowsMessage<Error>(AllOf(HasSubstr("p.json: rule 0"), HasSubstr("\"q4_K\""), HasSubstr("nm24_f8"))));
  EXPECT_THAT(parse(R"({"version": 1, "rest": "bf16", "rules": [{"nme": "a", "layout": "f8"}]})"),
              ThrowsMessage<Error>(HasSubstr("unknown key \"nme\"")));
  EXPECT_THAT(parse(R"({"version": 1, "rest": "bf16", "rules": [7]})"), ThrowsMessage<Error>(HasSubstr("rule 0")));
  EXPECT_THAT(parse(R"({"version": 1, "rest": "bf16", "rules": [{"name": "", "layout": "f8"}]})"),
              ThrowsMessage<Error>(HasSubstr("empty")));
  EXPECT_THAT(parse("[]"), ThrowsMessage<Error>(HasSubstr("p.json")));
  EXPECT_THAT([] { ImagePolicy::load("no-such-policy"); },
              ThrowsMessage<Error>(AllOf(HasSubstr("no-such-policy"), HasSubstr("quaspa, f8, nm24_bf16, bf16"))));
}

TEST(ImagePolicy, IsReadFromAFile) {
  const test::TempDir folder;
  std::ofstream(folder.file("p.json")) << ImagePolicy::load("f8").text();
  const ImagePolicy policy = ImagePolicy::load(folder.file("p.json"));
  EXPECT_FALSE(policy.built_in());
  EXPECT_EQ(chosen(policy, "single_blocks.0.linear1.weight"), "f8");
}

}  // namespace
}  // namespace lacuna::io
