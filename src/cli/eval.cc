// src/cli/eval.cc - `eval`: how many questions of the field's zero-shot tasks a model answers rightly.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <cmath>
#include <optional>

#include "cli/command.h"
#include "cli/sparsity.h"
#include "cli/sweep.h"
#include "core/error.h"
#include "core/say.h"
#include "core/sha256.h"
#include "eval/realised.h"
#include "eval/zero_shot.h"
#include "io/atomic_file.h"

namespace lacuna::cli {
namespace {

struct Options : Common {
  std::string model, labels, kv = "f16";
  std::vector<std::string> tasks, files;
  std::optional<std::string> answers_out;
  int64_t limit = 0, ctx = 0;
  SparsityFlags sparsity;
  GpuFlags gpu;
};

/// What is asked of the model, and where it comes from.
struct Wanted {
  eval::Task task;
  std::string file, sha256;
  std::vector<eval::Question> questions;
  eval::TaskTokens tokens = {};
};

std::string digest(std::string_view text) { return sha256_hex(std::as_bytes(std::span(text))); }

std::vector<Wanted> read_tasks(const Options& options) {
  if (options.tasks.size() != options.files.size())
    throw Error("{} tasks, but {} files: each --task needs a --data of its own", options.tasks.size(),
                options.files.size());
  bool labels_used = options.labels.empty();
  const std::string label_text = options.labels.empty() ? "" : read_input(options.labels);
  const eval::Source labels{options.labels, label_text};
  std::vector<Wanted> out;
  for (size_t i = 0; i < options.tasks.size(); ++i) {
    const eval::Task task = eval::task_named(options.tasks[i]);
    const bool labelled = task == eval::Task::piqa && !options.labels.empty();
    labels_used = labels_used || labelled;
    const std::string text = read_input(options.files[i]);
    Wanted& wanted = out.emplace_back(Wanted{task, options.files[i], digest(text), {}});
    wanted.questions = eval::read_questions(task, {options.files[i], text}, labelled ? &labels : nullptr);
    if (options.limit > 0 && options.limit < int64_t(wanted.questions.size()))
      wanted.questions.resize(size_t(options.limit));
  }
  if (!labels_used) throw Error("--labels is of --task piqa; the rows of the other tasks hold their answers");
  return out;
}

Json likelihoods_json(const Wanted& wanted, const eval::Question& question, const eval::QuestionTokens& tokens,
                      std::span<const eval::Likelihood> likelihoods) {
  Json sums = Json::array(), greedy = Json::array(), scored = Json::array();
  for (size_t i = 0; i < likelihoods.size(); ++i) {
    sums.push_back(likelihoods[i].sum);
    greedy.push_back(likelihoods[i].greedy);
    scored.push_back(int64_t(tokens.choices[i].ids.size()) - tokens.choices[i].first);
  }
  return {{"task", name_of(wanted.task)},      {"line", question.line},       {"gold", question.gold},
          {"loglikelihoods", std::move(sums)}, {"tokens", std::move(scored)}, {"greedy", std::move(greedy)},
          {"truncated", tokens.truncated}};
}

/// "0.2750 +- 0.0316"; without the error of one question; "-" for what the task has not.
std::string cell(const eval::Mean& mean, bool present) {
  if (!present) return "-";
  return fmt::format("{:.4f}{}", mean.value, std::isnan(mean.error) ? "" : fmt::format(" +- {:.4f}", mean.error));
}

constexpr auto kRow = FMT_STRING("{:<14} {:>9}  {:<18}  {:<18}  {}\n");

int eval_tasks(const Options& options) {
  const bool on_cuda = options.device == "cuda";
  if (on_cuda && options.kv != "f16") throw Error("--kv is of --device cpu so far; leave it out with cuda");
  if (options.answers_out) check_out("--answers-out", *options.answers_out);
  std::vector<Wanted> tasks = read_tasks(options);
  std::optional<io::AtomicFile> answers;
  if (options.answers_out) answers.emplace(*options.answers_out);
  LoadedModel model = open_model(options.model, options);
  const Tokenizer& tokenizer = model.need_tokenizer();
  const int64_t most = model::read_config(model.checkpoint).n_ctx, ctx = options.ctx > 0 ? options.ctx : most;
  if (ctx > most) throw Error("--ctx {}: this model's context has {} tokens", ctx, most);
  int64_t longest = 1;
  for (Wanted& wanted : tasks) {
    wanted.tokens = eval::tokenize(wanted.questions, tokenizer, ctx, wanted.file);
    longest = std::max(longest, wanted.tokens.longest);
  }

  const auto thresholds = select_thresholds(model.checkpoint, options.model, options.sparsity, on_cuda);
  std::optional<model::SparsityOptions> sparse;
  if (thresholds) sparse = model::SparsityOptions{*thresholds, options.sparsity.dense_prefix, true};
  std::optional<model::CpuEngine> cpu;
  if (on_cuda) {
    open_gpu(model, options.gpu);
    load_cuda_decoder(model, {.context = longest, .gpu_layers = options.gpu.layers, .shards = options.gpu.shards},
                      {.layers = true});
    model.cuda->count_inputs(true);
  } else {
    model.decoder = model::Decoder::load(model.checkpoint, *model.pool);
    cpu.emplace(*model.decoder, longest, parse_kv(options.kv));
  }
  model::Engine& engine = on_cuda ? static_cast<model::Engine&>(*model.cuda) : *cpu;

  if (!options.json) print(fmt::format(kRow, "task", "questions", "acc", "acc_norm", "perplexity"));
  for (const Wanted& wanted : tasks) {
    if (on_cuda)
      model.cuda->set_sparsity(sparse);  // clears the counts
    else
      model.decoder->set_sparsity(sparse);
    eval::ZeroShotOptions how;
    if (answers)
      how.on_question = [&](const eval::Question& question, const eval::QuestionTokens& tokens,
                            std::span<const eval::Likelihood> likelihoods) {
        const std::string line = likelihoods_json(wanted, question, tokens, likelihoods).dump() + "\n";
        answers->write(std::as_bytes(std::span(line)));
      };
    const auto start = std::chrono::steady_clock::now();
    const eval::TaskResult result =
        eval::evaluate(engine, *model.pool, wanted.task, wanted.questions, wanted.tokens, wanted.file, how);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::optional<eval::Realised> realised;
    if (sparse) {
      realised =
          eval::check_realised(engine.sparsity_counts(),
                               on_cuda ? model.cuda->sparsity()->thresholds : model.decoder->sparsity()->thresholds,
                               eval::tokens_behind(options.sparsity.dense_prefix, wanted.tokens));
      if (!realised->within) spdlog::warn("{}: {}", name_of(wanted.task), realised->note);
    }

    const bool norm = eval::has_acc_norm(wanted.task), words = wanted.task == eval::Task::lambada;
    if (options.json) {
      Json row = {{"task", name_of(wanted.task)},
                  {"n", result.n},
                  {"acc", result.acc.value},
                  {"acc_stderr", result.acc.error}};  // a NaN is printed as null
      if (norm) row.update(Json{{"acc_norm", result.acc_norm.value}, {"acc_norm_stderr", result.acc_norm.error}});
      if (words) row.update(Json{{"ppl", result.ppl.value}, {"ppl_stderr", result.ppl.error}});
      row.update(Json{{"truncated", wanted.tokens.truncated},
                      {"ctx", ctx},
                      {"bos", tokenizer.adds_bos()},
                      {"data", wanted.file},
                      {"data_sha256", wanted.sha256},
                      {"act_sparsity", realised ? realised->share : 0.0},
                      {"act_mode", thresholds ? name_of(thresholds->mode) : "dense"},
                      {"criterion", thresholds ? name_of(thresholds->criterion) : "none"},
                      {"dense_prefix", options.sparsity.dense_prefix},
                      {"tokens", wanted.tokens.run},
                      {"seconds", seconds}});
      if (realised) row.update(realised_json(*realised));
      print_json(row);
    } else {
      print(fmt::format(kRow, name_of(wanted.task), result.n, cell(result.acc, true), cell(result.acc_norm, norm),
                        cell(result.ppl, words)));
      if (realised)
        print(fmt::format("  activation sparsity {:.2f}% (asked {:.0f}%)\n", 100 * realised->share,
                          100 * realised->asked));
      if (wanted.tokens.truncated > 0)
        print(fmt::format("  cut at the left to {} tokens: {}\n", ctx, wanted.tokens.truncated));
      say("  {:.1f} s, {:.1f} questions/s, {:.0f} tokens/s, data sha256 {}\n", seconds, double(result.n) / seconds,
          double(wanted.tokens.run) / seconds, wanted.sha256);
    }
  }
  if (answers) answers->commit();
  return 0;
}

}  // namespace

Action add_eval(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command = program.add_subcommand(
      "eval",
      "Measure how many questions of zero-shot tasks a model answers rightly, with the prompts and the figures of "
      "EleutherAI's lm-evaluation-harness (docs/evaluation.md). What `lacuna tune` found is not used, so that the "
      "figures do not depend on the machine.");
  command->add_option("MODEL", options->model, "a .gguf file or a Hugging Face folder")->required();
  std::vector<std::string> names;
  for (const std::string_view name : eval::task_names()) names.emplace_back(name);
  command
      ->add_option("--task", options->tasks,
                   "which questions to ask; given again with a --data each: several tasks in one run")
      ->required()
      ->check(CLI::IsMember(names))
      ->allow_extra_args(false)
      ->type_name("NAME");
  command
      ->add_option(
          "--data", options->files,
          "the task's questions: JSON lines as the authors publish them; of hellaswag also llama.cpp's text; - "
          "is standard input")
      ->required()
      ->allow_extra_args(false)
      ->type_name("FILE");
  command->add_option("--labels", options->labels, "of piqa: the right answers, 0 or 1 a line")->type_name("FILE");
  command->add_option("--limit", options->limit, "ask only the first N questions of each task; 0: all")
      ->check(integer_in(0, int64_t{1} << 40))
      ->capture_default_str()
      ->type_name("N");
  command
      ->add_option("--ctx", options->ctx,
                   "cut longer questions to so many tokens, from the left; 0: to the model's context")
      ->check(integer_in(0, int64_t{1} << 24))
      ->capture_default_str()
      ->type_name("C");
  add_kv(*command, options->kv);
  add_sparsity(*command, options->sparsity);
  command
      ->add_option("--answers-out", options->answers_out,
                   "write each question's log-likelihoods, a JSON object a line: task, line in its file, gold and, a "
                   "value a choice, loglikelihoods, tokens scored, greedy")
      ->type_name("FILE");
  add_gpu(*command, options->gpu);
  add_common(*command, *options);
  return [options, command] {
    check_gpu(*command, *options);
    check_sparsity(*command);
    return eval_tasks(*options);
  };
}

}  // namespace lacuna::cli
