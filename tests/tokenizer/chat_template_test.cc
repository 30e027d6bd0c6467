#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "test_support.h"
#include "tokenizer/tokenizer.h"

namespace lacuna {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

std::vector<ChatMessage> messages_of(const nlohmann::json& conversation) {
  std::vector<ChatMessage> messages;
  for (const auto& m : conversation.at("messages")) messages.push_back({m.at("role"), m.at("content")});
  return messages;
}

TEST(ChatTemplate, RendersWhatJinjaRenders) {
  const auto fixture = nlohmann::json::parse(test::read_text(test::fixture("chat/templates.json")));
  int rendered = 0;
  for (const auto& entry : fixture.at("templates")) {
    const std::string what = entry.at("name");
    const ChatTemplate style = ChatTemplate::from(entry.at("template").get<std::string>());
    for (size_t i = 0; i < fixture.at("conversations").size(); ++i) {
      const auto messages = messages_of(fixture["conversations"][i]);
      const auto& expected = entry.at("rendered").at(i);
      if (expected.is_null()) {
        EXPECT_THROW(style.render(messages), Error) << what << ", conversation " << i;
      } else {
        EXPECT_EQ(style.render(messages), expected.get<std::string>()) << what << ", conversation " << i;
        ++rendered;
      }
    }
  }
  EXPECT_GE(rendered, 50);
}

TEST(ChatTemplate, RecognisesEachFamilyByItsLiterals) {
  const auto fixture = nlohmann::json::parse(test::read_text(test::fixture("chat/templates.json")));
  std::vector<std::string_view> names;
  for (const auto& entry : fixture.at("templates")) {
    names.push_back(ChatTemplate::from(entry.at("template").get<std::string>()).name());
  }
  EXPECT_THAT(names, testing::ElementsAre("chatml", "qwen2.5", "smollm2", "llama2", "llama3", "llama3.1", "mistral-v0",
                                          "mistral-v1", "mistral-v3", "mistral-v3-tekken", "mistral-v7", "zephyr",
                                          "gemma", "phi3", "vicuna", "alpaca"));
}

TEST(ChatTemplate, TakesEveryNameAndSpeaksEveryRole) {
  const std::vector<ChatMessage> messages = {{"user", "question"}, {"assistant", "answer"}, {"user", "again"}};
  for (const std::string_view name : ChatTemplate::names()) {
    const ChatTemplate style = ChatTemplate::from(name);
    EXPECT_EQ(style.name(), name);
    const std::string text = style.render(messages);
    const size_t question = text.find("question");
    const size_t answer = text.find("answer", question);
    EXPECT_NE(text.find("again", answer), std::string::npos) << text;
    EXPECT_LE(style.render(messages, false).find("again"), text.size());
  }
}

TEST(ChatTemplate, NamesChooseTheDefaultSystemText) {
  const std::vector<ChatMessage> messages = {{"user", "Hi"}};
  EXPECT_EQ(ChatTemplate::from("qwen2").render(messages),
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n");
  EXPECT_EQ(ChatTemplate::from("chatml").render(messages, false), "<|im_start|>user\nHi<|im_end|>\n");
}

TEST(ChatTemplate, ReadsTheDefaultSystemTextOfAChatmlTemplate) {
  const ChatTemplate style = ChatTemplate::from(
      R"({% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are Bob.<|im_end|>\n' }}{% endif %}...)");
  EXPECT_EQ(style.name(), "chatml");
  EXPECT_EQ(style.render(std::vector<ChatMessage>{{"user", "Hi"}}, false),
            "<|im_start|>system\nYou are Bob.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n");
}

TEST(ChatTemplate, Qwen3DropsEarlierThoughts) {
  const ChatTemplate style = ChatTemplate::from("qwen3");
  const std::string thoughtful = "<think>\nhm\n</think>\n\nYes.";
  const std::vector<ChatMessage> messages = {{"user", "A?"}, {"assistant", thoughtful}, {"user", "B?"}};
  EXPECT_EQ(style.render(messages),
            "<|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nB?<|im_end|>\n"
            "<|im_start|>assistant\n");
  const std::vector<ChatMessage> answered = {{"user", "A?"}, {"assistant", thoughtful}};
  EXPECT_EQ(style.render(answered, false),
            "<|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nYes.<|im_end|>\n");
  const std::vector<ChatMessage> plain = {{"user", "A?"}, {"assistant", "Yes."}};
  EXPECT_EQ(style.render(plain, false),
            "<|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nYes.<|im_end|>\n");
}

TEST(ChatTemplate, Gemma3PutsTheSystemTextIntoTheFirstUserTurn) {
  const std::vector<ChatMessage> messages = {{"system", "Be terse."}, {"user", " Hi "}};
  EXPECT_EQ(ChatTemplate::from("gemma3").render(messages),
            "<bos><start_of_turn>user\nBe terse.\n\nHi<end_of_turn>\n<start_of_turn>model\n");
}

TEST(ChatTemplate, UnknownTemplateListsTheNames) {
  for (const char* unknown : {"", "{{ messages }}", "lama2", "{{ '<|im_start|>' }}{{ '<|im_sep|>' }}",
                              "{{ '[INST]' }}{{ '[SYSTEM_PROMPT]' }}{{ default_system_message }}",
                              "{{ '<|user|>' + content + '<|assistant|>' + '<|end|>' }} You are an expert."}) {
    EXPECT_THAT([&] { ChatTemplate::from(unknown); },
                ThrowsMessage<Error>(testing::AllOf(HasSubstr("--chat-template NAME"), HasSubstr("chatml, "),
                                                    HasSubstr("llama3"), HasSubstr("alpaca"))))
        << unknown;
  }
}

TEST(ChatTemplate, RefusesWhatAFamilyHasNoPlaceFor) {
  const ChatTemplate llama = ChatTemplate::from("llama2");
  const ChatTemplate chatml = ChatTemplate::from("chatml");
  EXPECT_THAT(
      [&] {
        chatml.render(std::vector<ChatMessage>{{"tool", "x"}});
      },
      ThrowsMessage<Error>(HasSubstr("role 'tool'")));
  EXPECT_THAT([&] { chatml.render(std::vector<ChatMessage>{}); }, ThrowsMessage<Error>(HasSubstr("no messages")));
  EXPECT_THAT(
      [&] {
        llama.render(std::vector<ChatMessage>{{"user", "a"}, {"user", "b"}});
      },
      ThrowsMessage<Error>(HasSubstr("message 2 is from user, expected assistant")));
  EXPECT_THAT(
      [&] {
        llama.render(std::vector<ChatMessage>{{"user", "a"}, {"system", "b"}});
      },
      ThrowsMessage<Error>(HasSubstr("only at the beginning")));
  EXPECT_THAT(
      [&] {
        ChatTemplate::from("gemma").render(std::vector<ChatMessage>{{"system", "a"}, {"user", "b"}});
      },
      ThrowsMessage<Error>(HasSubstr("no place for a system message")));
}

}  // namespace
}  // namespace lacuna
