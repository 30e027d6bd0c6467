// Files of zero-shot tasks that are not as they should be; the formats themselves are tested in zero_shot_test.cc.
#include "eval/questions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "eval/python_text.h"

namespace lacuna::eval {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

const std::string kHellaSwag = "A: b. c\n1\nw\nx\ny\nz\n";
const std::string kHellaSwagRow =
    R"({"activity_label": "A", "ctx_a": "b.", "ctx_b": "c", "endings": ["w", "x"], "label": "1"})";
const std::string kArc =
    R"({"question": {"stem": "s", "choices": [{"text": "a", "label": "A"}, {"text": "b", "label": "B"}]}, "answerKey": "B"})";
const std::string kArcOfTheHub =
    R"({"question": "s", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"})";
const std::string kPiqa = R"({"goal": "g", "sol1": "a", "sol2": "b"})";
const std::string kPiqaLabelled = R"({"goal": "g", "sol1": "a", "sol2": "b", "label": 1})";
const std::string kWinogrande = R"({"sentence": "a _ b", "option1": "x", "option2": "y", "answer": "2"})";
const std::string kLambada = R"({"text": "a b c"})";

/// `text` with its first `from` as `to`.
std::string changed(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

void expect_refused(Task task, const std::string& text, const std::string& where, const std::string& words) {
  EXPECT_THAT(
      [&] {
        read_questions(task, {"file", text});
      },
      ThrowsMessage<Error>(AllOf(HasSubstr("file" + where), HasSubstr(words))))
      << text;
}

TEST(Questions, EachTaskHasItsGold) {
  const auto gold = [](Task task, const std::string& text) {
    const std::vector<Question> questions = read_questions(task, {"file", text});
    EXPECT_EQ(questions.size(), 1u);
    return questions[0].gold;
  };
  EXPECT_EQ(gold(Task::hellaswag, kHellaSwag), 1);
  EXPECT_EQ(gold(Task::hellaswag, kHellaSwagRow), 1);
  EXPECT_EQ(gold(Task::arc_easy, kArc), 1);
  EXPECT_EQ(gold(Task::arc_challenge, kArcOfTheHub), 1);
  EXPECT_EQ(gold(Task::piqa, kPiqaLabelled), 1);
  EXPECT_EQ(gold(Task::winogrande, kWinogrande), 1);
  EXPECT_EQ(gold(Task::lambada, kLambada), 0);
}

TEST(Questions, BlankLinesAndCarriageReturnsCountAndAreNotRead) {
  const auto questions = read_questions(Task::lambada, {"file", "\r\n" + kLambada + "\r\n\n" + kLambada});
  ASSERT_EQ(questions.size(), 2u);
  EXPECT_EQ(questions[0].line, 2);
  EXPECT_EQ(questions[1].line, 4);
  const auto text = read_questions(Task::hellaswag, {"file", "A: b. c\r\n1\r\nw\r\nx\r\ny\r\nz\r\n\r\n"});
  ASSERT_EQ(text.size(), 1u);
  EXPECT_EQ(text[0].choices[3].continuation, " z");
}

TEST(Questions, TheUnfinishedSentenceOfAText) {
  const auto context = [](const std::string& line) {
    return read_questions(Task::hellaswag, {"file", changed(kHellaSwag, "A: b. c", line)})[0].choices[0].context;
  };
  EXPECT_EQ(context("A: b. c d"), "A: b. C d");
  EXPECT_EQ(context("A: b! c. d"), "A: b! c. D");
  EXPECT_EQ(context("A: b. c."), "A: b. c.");
  EXPECT_EQ(context("A: \"b?\" c"), "A: \"b?\" C");
  EXPECT_EQ(context("A: b.  c"), "A: b.  C");
  EXPECT_EQ(context("A: b c"), "A: b c");
  EXPECT_EQ(context("A: b. élan"), "A: b. Élan");
}

TEST(Questions, FilesOfOtherTasksAreNamed) {
  expect_refused(Task::lambada, kPiqa, "", "looks like a file of piqa, not of lambada; give --task piqa");
  expect_refused(Task::piqa, kHellaSwag, "", "looks like a file of hellaswag");
  expect_refused(Task::piqa, kHellaSwagRow, "", "looks like a file of hellaswag");
  expect_refused(Task::hellaswag, kWinogrande, "", "looks like a file of winogrande");
  expect_refused(Task::winogrande, kLambada, "", "looks like a file of lambada");
  expect_refused(Task::winogrande, kArc, "", "give --task arc-easy or --task arc-challenge");
  expect_refused(Task::lambada, kArcOfTheHub, "", "looks like a file of arc-easy or arc-challenge");
}

TEST(Questions, CompressedEmptyAndOtherFiles) {
  expect_refused(Task::hellaswag, "BZh91AY", "", "unpack it with `bunzip2 -k file`");
  expect_refused(Task::lambada, "\x1f\x8b\x08", "", "unpack it with `gunzip -k file`");
  expect_refused(Task::lambada, "", "", "is empty");
  expect_refused(Task::hellaswag, "\n \n", "", "is empty");
  expect_refused(Task::lambada, "some text", ": line 1", "bad JSON");
  expect_refused(Task::lambada, "[1]", ": line 1", "expected a JSON object");
  expect_refused(Task::lambada, kLambada + "\n" + kLambada.substr(0, 9), ": line 2", "bad JSON");
  expect_refused(Task::piqa, R"({"a": 1})", ": line 1", "\"goal\" is missing");
}

TEST(Questions, RowsThatLackSomething) {
  expect_refused(Task::hellaswag, changed(kHellaSwagRow, "activity_label", "x"), ": line 1", "\"activity_label\"");
  expect_refused(Task::hellaswag, changed(kHellaSwagRow, R"(, "label": "1")", ""), ": line 1", "\"label\" is missing");
  expect_refused(Task::hellaswag, changed(kHellaSwagRow, R"("1")", R"("")"), ": line 1", "\"label\" is empty");
  expect_refused(Task::hellaswag, changed(kHellaSwagRow, R"("1")", R"("B")"), ": line 1", "the number of the right");
  expect_refused(Task::hellaswag, changed(kHellaSwagRow, R"("1")", "2"), ": line 1",
                 "number 2, but the answers are 0 to 1");
  expect_refused(Task::hellaswag, changed(kHellaSwagRow, R"("1")", "-1"), ": line 1", "number -1");
  expect_refused(Task::hellaswag, changed(kHellaSwagRow, R"("w", )", ""), ": line 1", "fewer than two");
  expect_refused(Task::hellaswag, changed(kHellaSwagRow, R"("w")", "7"), ": line 1", "must hold strings");
  const std::string second = kArc + "\n";
  expect_refused(Task::arc_easy, second + changed(kArc, "stem", "x"), ": line 2", "\"stem\" is missing");
  expect_refused(Task::arc_easy, second + changed(kArc, R"("answerKey": "B")", R"("x": 1)"), ": line 2", "answerKey");
  expect_refused(Task::arc_easy, second + changed(kArc, R"("answerKey": "B")", R"("answerKey": "")"), ": line 2",
                 "answerKey");
  expect_refused(Task::arc_easy, changed(kArc, R"("answerKey": "B")", R"("answerKey": "C")"), ": line 1",
                 "\"answerKey\" is \"C\", but the choices are A, B");
  expect_refused(Task::arc_easy, changed(kArc, R"(, {"text": "b", "label": "B"})", ""), ": line 1", "fewer than two");
  expect_refused(Task::arc_easy, changed(kArcOfTheHub, R"("A", )", ""), ": line 1", "2 choices, but 1 labels");
  expect_refused(Task::piqa, changed(kPiqaLabelled, "sol2", "x"), ": line 1", "\"sol2\" is missing");
  expect_refused(Task::piqa, changed(kPiqaLabelled, ": 1", ": 2"), ": line 1", "number 2, but the answers are 0 to 1");
  expect_refused(Task::piqa, kPiqaLabelled + "\n" + kPiqa, ": line 2", "--labels");
  expect_refused(Task::winogrande, changed(kWinogrande, "_", "-"), ": line 1", "has no blank");
  expect_refused(Task::winogrande, changed(kWinogrande, R"("2")", R"("3")"), ": line 1", "expected 1 or 2");
  expect_refused(Task::winogrande, changed(kWinogrande, R"("2")", R"("")"), ": line 1", "is empty");
  expect_refused(Task::winogrande, changed(kWinogrande, "answer", "x"), ": line 1", "\"answer\" is missing");
  expect_refused(Task::lambada, changed(kLambada, "a b c", " "), ": line 1", "\"text\" is empty");
  expect_refused(Task::lambada, changed(kLambada, R"("a b c")", "7"), ": line 1", "\"text\" must be");
}

TEST(Questions, TextsOfHellaSwagThatAreCut) {
  expect_refused(Task::hellaswag, kHellaSwag + "A: b\n1\nw\n", ": line 7", "3 lines are left");
  expect_refused(Task::hellaswag, kHellaSwag + changed(kHellaSwag, "\n1\n", "\none\n"), ": line 8", "found \"one\"");
  expect_refused(Task::hellaswag, changed(kHellaSwag, "\n1\n", "\n4\n"), ": line 2",
                 "number 4, but the answers are 0 to 3");
  expect_refused(Task::hellaswag, changed(kHellaSwag, "\nx\n", "\n\n"), ": line 4", "is empty");
  expect_refused(Task::hellaswag, changed(kHellaSwag, "\nx\n", "\n\xff\n"), ": line 4", "is not UTF-8");
}

TEST(Questions, LabelsInAFileOfTheirOwn) {
  const std::string two = kPiqa + "\n" + kPiqa + "\n";
  const auto read = [&](Task task, const std::string& text) {
    const Source labels{"labels", text};
    return read_questions(task, {"file", two}, &labels);
  };
  EXPECT_EQ(read(Task::piqa, "1\n0\n")[0].gold, 1);
  EXPECT_EQ(read(Task::piqa, "1\r\n 0\n\n")[1].gold, 0);
  for (const auto& [text, words] : {std::pair<std::string, std::string>{"1\n", "labels: has 1 labels for 2 questions"},
                                    {"", "labels: has 0 labels"},
                                    {"1\n0\n1\n", "labels: has 3 labels"},
                                    {"1\n2\n", "labels: line 2: the right answer is number 2"},
                                    {"1\nx\n", "labels: line 2: \"x\" is no number"}}) {
    const auto run = [&, t = text] { read(Task::piqa, t); };
    EXPECT_THAT(run, ThrowsMessage<Error>(HasSubstr(words)));
  }
  EXPECT_THAT([&] { read(Task::lambada, "1\n0\n"); }, ThrowsMessage<Error>(HasSubstr("--labels is of piqa")));
  expect_refused(Task::piqa, two, ": line 1", "--labels");
}

TEST(Questions, NamesOfTasks) {
  for (const std::string_view name : task_names()) EXPECT_EQ(name_of(task_named(name)), name);
  EXPECT_THAT([] { task_named("boolq"); },
              ThrowsMessage<Error>(AllOf(HasSubstr("boolq"), HasSubstr("winogrande, lambada"))));
}

// The values are Python's.
TEST(PythonText, IsPythons) {
  EXPECT_EQ(strip(" \t\n\x1c\u00a0\u3000a b\u2028\u0085 "), "a b");
  EXPECT_EQ(strip(" \u2003 "), "");
  EXPECT_EQ(strip("\u200b a"), "\u200b a");  // a zero-width space is none
  EXPECT_EQ(strip_end(" a \r\n"), " a");
  EXPECT_EQ(strip_end(""), "");
  EXPECT_EQ(capitalize("éva AND Bob"), "Éva and bob");
  EXPECT_EQ(capitalize("ǆA"), "ǅa");
  EXPECT_EQ(capitalize(""), "");
  EXPECT_EQ(count_characters("aé日😀"), 4);
}

}  // namespace
}  // namespace lacuna::eval
