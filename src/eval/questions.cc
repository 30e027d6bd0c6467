#include "eval/questions.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/error.h"
#include "eval/python_text.h"
#include "io/json.h"
#include "tokenizer/utf8.h"

namespace lacuna::eval {
namespace {

constexpr std::array<std::string_view, 6> kNames = {"hellaswag", "arc-easy",   "arc-challenge",
                                                    "piqa",      "winogrande", "lambada"};

struct Line {
  std::string_view text;
  int64_t number;
};

std::vector<Line> lines_of(std::string_view text) {
  std::vector<Line> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, end - begin);
    if (line.ends_with('\r')) line.remove_suffix(1);
    lines.push_back({line, int64_t(lines.size()) + 1});
    begin = end + 1;
  }
  return lines;
}

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == std::string_view::npos; }

std::optional<int64_t> whole_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failed != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string place_of(const std::string& file, int64_t line) { return fmt::format("{}: line {}", file, line); }

Choice choice_of(std::string context, std::string_view text) {
  return {std::move(context), fmt::format(" {}", text), count_characters(text)};
}

int64_t check_gold(const std::string& where, int64_t gold, size_t choices) {
  if (gold < 0 || gold >= int64_t(choices))
    throw Error("{}: the right answer is number {}, but the answers are 0 to {}", where, gold, choices - 1);
  return gold;
}

/// A label that is a number, or one in quotes.
std::optional<int64_t> label_of(const io::JsonObject& row, const char* key, const std::string& where) {
  const nlohmann::json* value = row.find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) return row.need_integer(key);
  const std::string text = value->get<std::string>();
  if (const auto number = whole_number(text)) return number;
  if (text.empty()) throw Error("{}: \"{}\" is empty; a split without answers cannot be scored", where, key);
  throw Error("{}: \"{}\" is \"{}\", expected the number of the right answer", where, key, text);
}

int64_t need_label(const io::JsonObject& row, const char* key, const std::string& where, size_t choices) {
  const auto label = label_of(row, key, where);
  if (!label) throw Error("{}: \"{}\" is missing; a split without answers cannot be scored", where, key);
  return check_gold(where, *label, choices);
}

std::vector<std::string> need_strings(const nlohmann::json& array, const char* key, const std::string& where) {
  std::vector<std::string> out;
  for (const nlohmann::json& value : array) {
    if (!value.is_string()) throw Error("{}: \"{}\" must hold strings, found {}", where, key, value.type_name());
    out.push_back(value.get<std::string>());
  }
  return out;
}

// HellaSwag. WikiHow's articles left marks in brackets.
std::string without_marks(std::string_view text) {
  const std::string titled = replace_all(strip(text), " [title]", ". ");
  std::string out;
  for (size_t at = 0; at < titled.size();) {
    const size_t end = titled[at] == '[' ? titled.find_first_of("]\n", at) : std::string::npos;
    if (end != std::string::npos && titled[end] == ']')
      at = end + 1;
    else
      out += titled[at++];
  }
  return replace_all(out, "  ", " ");
}

Question hellaswag_row(const io::JsonObject& row, const std::string& where) {
  const std::string begun = capitalize(row.string("ctx_b").value_or(""));
  const std::string context =
      without_marks(fmt::format("{}: {} {}", row.need_string("activity_label"), row.need_string("ctx_a"), begun));
  Question question;
  for (const std::string& ending : need_strings(row.need_array("endings"), "endings", where))
    question.choices.push_back(choice_of(context, without_marks(ending)));
  if (question.choices.size() < 2) throw Error("{}: \"endings\" holds fewer than two", where);
  question.gold = need_label(row, "label", where, question.choices.size());
  return question;
}

/// The lines of llama.cpp have `ctx`, where the harness begins the unfinished sentence at the end with a capital
/// letter.
std::string with_capital(std::string_view context) {
  constexpr std::string_view kEnds = ".!?", kQuotes = "\"'";
  if (context.empty() || kEnds.find(context.back()) != std::string_view::npos) return std::string(context);
  size_t begin = std::string_view::npos;
  for (size_t at = context.rfind(' '); at != std::string_view::npos && at > 0; at = context.rfind(' ', at - 1)) {
    const size_t last = context[at - 1] != ' ' && kQuotes.find(context[at - 1]) != std::string_view::npos ? 2 : 1;
    if (at < last || kEnds.find(context[at - last]) == std::string_view::npos) continue;
    begin = context.find_first_not_of(' ', at);
    break;
  }
  if (begin == std::string_view::npos) return std::string(context);
  return std::string(context.substr(0, begin)) + capitalize(context.substr(begin));
}

std::vector<Question> hellaswag_lines(const Source& data) {
  constexpr size_t kLines = 6, kEndings = 4;  // of a question
  std::vector<Line> lines = lines_of(data.text);
  while (!lines.empty() && is_blank(lines.back().text)) lines.pop_back();
  std::vector<Question> out;
  for (size_t at = 0; at < lines.size(); at += kLines) {
    const std::string where = place_of(data.file, lines[at].number);
    if (lines.size() - at < kLines)
      throw Error("{}: {} lines are left, but a question has {}: context, number of the right ending, {} endings",
                  where, lines.size() - at, kLines, kEndings);
    for (size_t i = 0; i < kLines; ++i) {
      const Line& line = lines[at + i];
      if (is_blank(line.text)) throw Error("{}: is empty", place_of(data.file, line.number));
      if (valid_utf8_prefix(line.text) != line.text.size())
        throw Error("{}: is not UTF-8", place_of(data.file, line.number));
    }
    Question question;
    question.line = lines[at].number;
    const std::string context = with_capital(lines[at].text);
    for (size_t i = kLines - kEndings; i < kLines; ++i)
      question.choices.push_back(choice_of(context, lines[at + i].text));
    const auto gold = whole_number(strip(lines[at + 1].text));
    const std::string gold_place = place_of(data.file, lines[at + 1].number);
    if (!gold) throw Error("{}: expected the number of the right ending, found \"{}\"", gold_place, lines[at + 1].text);
    question.gold = check_gold(gold_place, *gold, kEndings);
    out.push_back(std::move(question));
  }
  return out;
}

/// Both forms: the authors' {"question": {"stem", "choices": [{"text", "label"}]}} and that of the Hugging Face hub,
/// {"question", "choices": {"text": [], "label": []}}.
Question arc_row(const io::JsonObject& row, const std::string& where) {
  std::string stem;
  std::vector<std::string> texts, labels;
  if (const nlohmann::json* question = row.find("question"); question != nullptr && question->is_string()) {
    stem = question->get<std::string>();
    const io::JsonObject choices(row.need_object("choices"), where);
    texts = need_strings(choices.need_array("text"), "text", where);
    labels = need_strings(choices.need_array("label"), "label", where);
    if (labels.size() != texts.size())
      throw Error("{}: {} choices, but {} labels for them", where, texts.size(), labels.size());
  } else {
    const io::JsonObject parts(row.need_object("question"), where);
    stem = parts.need_string("stem");
    for (const nlohmann::json& value : parts.need_array("choices")) {
      const io::JsonObject choice(value, where);
      texts.push_back(choice.need_string("text"));
      labels.push_back(choice.need_string("label"));
    }
  }
  if (texts.size() < 2) throw Error("{}: \"choices\" holds fewer than two", where);
  Question out;
  for (const std::string& text : texts)
    out.choices.push_back(choice_of(fmt::format("Question: {}\nAnswer:", stem), text));
  const auto key = row.string("answerKey");
  if (!key || key->empty()) throw Error("{}: has no \"answerKey\"; a split without answers cannot be scored", where);
  const auto found = std::ranges::find(labels, *key);
  if (found == labels.end())
    throw Error("{}: \"answerKey\" is \"{}\", but the choices are {}", where, *key, fmt::join(labels, ", "));
  out.gold = found - labels.begin();
  return out;
}

/// gold: -1 where the row has no label.
Question piqa_row(const io::JsonObject& row, const std::string& where) {
  const std::string context = fmt::format("Question: {}\nAnswer:", row.need_string("goal"));
  Question out;
  for (const char* key : {"sol1", "sol2"}) out.choices.push_back(choice_of(context, row.need_string(key)));
  const auto label = label_of(row, "label", where);
  out.gold = label ? check_gold(where, *label, out.choices.size()) : -1;
  return out;
}

/// The sentence up to the blank, with each option in its place, is the context; what follows the blank is scored.
Question winogrande_row(const io::JsonObject& row, const std::string& where) {
  const std::string sentence = row.need_string("sentence");
  const size_t blank = sentence.find('_');
  if (blank == std::string::npos) throw Error("{}: \"sentence\" has no blank, written _", where);
  Question out;
  for (const char* key : {"option1", "option2"}) {
    const std::string option = row.need_string(key);
    out.choices.push_back(
        choice_of(sentence.substr(0, blank) + option, strip(std::string_view(sentence).substr(blank + 1))));
  }
  const auto answer = label_of(row, "answer", where);
  if (!answer) throw Error("{}: \"answer\" is missing; a split without answers cannot be scored", where);
  if (*answer != 1 && *answer != 2) throw Error("{}: \"answer\" is {}, expected 1 or 2", where, *answer);
  out.gold = *answer - 1;
  return out;
}

Question lambada_row(const io::JsonObject& row, const std::string& where) {
  const std::string text = row.need_string("text");
  if (is_blank(text)) throw Error("{}: \"text\" is empty", where);
  const size_t space = text.rfind(' ');
  const bool one_word = space == std::string::npos;
  const std::string_view word = std::string_view(text).substr(one_word ? 0 : space + 1);
  return {.line = 0, .choices = {choice_of(one_word ? "" : text.substr(0, space), word)}, .gold = 0};
}

Question row_of(Task task, const nlohmann::json& object, const std::string& where) {
  const io::JsonObject row(object, where);
  switch (task) {
    case Task::hellaswag:
      return hellaswag_row(row, where);
    case Task::arc_easy:
    case Task::arc_challenge:
      return arc_row(row, where);
    case Task::piqa:
      return piqa_row(row, where);
    case Task::winogrande:
      return winogrande_row(row, where);
    case Task::lambada:
      break;
  }
  return lambada_row(row, where);
}

/// The task whose keys a row has; arc_easy for either of the two, which nothing tells apart.
std::optional<Task> task_of_row(const nlohmann::json& row) {
  const auto has = [&](auto... keys) { return (row.contains(keys) && ...); };
  if (has("endings", "ctx_a")) return Task::hellaswag;
  if (has("question", "answerKey")) return Task::arc_easy;
  if (has("goal", "sol1")) return Task::piqa;
  if (has("sentence", "option1")) return Task::winogrande;
  if (has("text")) return Task::lambada;
  return std::nullopt;
}

bool is_arc(Task task) { return task == Task::arc_easy || task == Task::arc_challenge; }

void check_task(Task task, std::optional<Task> found, const std::string& file) {
  if (!found || *found == task || (is_arc(*found) && is_arc(task))) return;
  throw Error("{}: looks like a file of {}, not of {}; give --task {}", file,
              is_arc(*found) ? "arc-easy or arc-challenge" : name_of(*found), name_of(task),
              is_arc(*found) ? "arc-easy or --task arc-challenge" : name_of(*found));
}

void take_labels(std::vector<Question>& questions, const Source& labels) {
  std::vector<Line> lines = lines_of(labels.text);
  std::erase_if(lines, [](const Line& line) { return is_blank(line.text); });
  if (lines.size() != questions.size())
    throw Error("{}: has {} labels for {} questions; is it of another file?", labels.file, lines.size(),
                questions.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string where = place_of(labels.file, lines[i].number);
    const auto gold = whole_number(strip(lines[i].text));
    if (!gold) throw Error("{}: \"{}\" is no number of an answer", where, lines[i].text);
    questions[i].gold = check_gold(where, *gold, questions[i].choices.size());
  }
}

}  // namespace

std::string_view name_of(Task task) { return kNames[size_t(task)]; }

std::span<const std::string_view> task_names() { return kNames; }

Task task_named(std::string_view name) {
  const auto found = std::ranges::find(kNames, name);
  if (found == kNames.end()) throw Error("--task {}: unknown task; known: {}", name, fmt::join(kNames, ", "));
  return Task(found - kNames.begin());
}

bool has_acc_norm(Task task) { return task != Task::winogrande && task != Task::lambada; }

std::vector<Question> read_questions(Task task, const Source& data, const Source* labels) {
  if (data.text.starts_with("BZh") || data.text.starts_with("\x1f\x8b"))
    throw Error("{}: is compressed; unpack it with `{} -k {}` and give the unpacked file", data.file,
                data.text[0] == 'B' ? "bunzip2" : "gunzip", data.file);
  if (labels != nullptr && task != Task::piqa)
    throw Error("--labels is of piqa; the rows of {} hold their answers", name_of(task));
  const std::vector<Line> lines = lines_of(data.text);
  const auto first = std::ranges::find_if(lines, [](const Line& line) { return !is_blank(line.text); });
  if (first == lines.end()) throw Error("{}: is empty", data.file);

  std::vector<Question> out;
  if (!first->text.starts_with('{')) {
    const bool numbered = first + 1 < lines.end() && whole_number(strip((first + 1)->text)).has_value();
    if (numbered) check_task(task, Task::hellaswag, data.file);
    if (task == Task::hellaswag) return hellaswag_lines(data);
  }
  for (const Line& line : lines) {
    if (is_blank(line.text)) continue;
    const std::string where = place_of(data.file, line.number);
    const nlohmann::json row = io::parse_json_object(line.text, where);
    if (out.empty()) check_task(task, task_of_row(row), data.file);
    out.push_back(row_of(task, row, where));
    out.back().line = line.number;
  }
  if (labels != nullptr) take_labels(out, *labels);
  for (const Question& question : out)
    if (question.gold < 0)
      throw Error("{}: has no \"label\"; the answers of piqa are in a file of their own, which --labels names",
                  place_of(data.file, question.line));
  return out;
}

}  // namespace lacuna::eval
