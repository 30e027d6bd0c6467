// src/cli/run.cc - `run`: continue a prompt, or chat.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "cli/beams.h"
#include "cli/chat.h"
#include "cli/command.h"
#include "cli/generate.h"
#include "cli/profile.h"
#include "cli/sparsity.h"
#include "core/error.h"
#include "core/say.h"
#include "kernels/cuda/ops.h"
#include "model/cpu_beams.h"

namespace lacuna::cli {
namespace {

constexpr int64_t kDefaultContext = 8192;  // at most: a cache for 128K tokens is no default
constexpr int64_t kDefaultTokens = 256;    // of a raw continuation; an answer goes on until the model ends it

struct Options : Common {
  std::string model, prompt, file, kv = "f16", system, chat_template, prepare = "auto";
  std::vector<int32_t> prompt_ids;
  int64_t tokens = 0, ctx = 0, beams = 0;  // beams 0: sampling
  model::SamplerOptions sampler;
  SparsityFlags sparsity;
  ProfileFlags profile;
  GpuFlags gpu;
  bool chat = false, raw = false, special = false, no_bos = false, ignore_end = false, explain = false,
       beam_union = false;
  // Which of them were given.
  bool has_prompt = false, has_file = false, has_ids = false, has_tokens = false, has_temp = false;
};

void print_statistics(const Generation& result, double load_s) {
  say("load {:.2f} s | prompt {} tokens, {:.1f} tokens/s | generated {} tokens, {:.1f} tokens/s | peak memory {}\n",
      load_s, result.prefill_tokens, result.prefill_tok_s(), result.ids.size(), result.decode_tok_s(),
      human_bytes(peak_memory_bytes()));
}

Json result_json(const Generation& result, const std::vector<int32_t>& prompt_ids, double load_s,
                 const Json& act_sparsity) {
  return {{"text", result.text},
          {"prompt_ids", prompt_ids},
          {"ids", result.ids},
          {"load_s", load_s},
          {"prefill_tok_s", result.prefill_tok_s()},
          {"decode_tok_s", result.decode_tok_s()},
          {"act_sparsity", act_sparsity},
          {"stop", name_of(result.stop)},
          {"peak_memory_bytes", peak_memory_bytes()}};
}

ChatTemplate chat_template(const Options& options, const LoadedModel& model) {
  if (!options.chat_template.empty()) return ChatTemplate::from(options.chat_template);
  const std::string& own = model.need_tokenizer().vocabulary().chat_template;
  if (!own.empty()) return ChatTemplate::from(own);
  std::string names;
  for (const std::string_view name : ChatTemplate::names()) names += (names.empty() ? "" : ", ") + std::string(name);
  throw Error(
      "{}: the model has no chat template; pass one with --chat-template NAME ({}), or give -p TEXT without "
      "--chat to continue raw text",
      model.checkpoint.path(), names);
}

/// What is added to the JSON of one text.
Json beams_json(const BeamRun& run, const LoadedModel& model, const Options& options) {
  Json texts = Json::array();
  for (const model::Hypothesis& text : run.texts)
    texts.push_back({{"text", text_of(model, text.ids)},
                     {"ids", text.ids},
                     {"log_probability", text.log_probability},
                     {"score", text.score()},
                     {"ended", text.ended}});
  return {{"beams", options.beams},
          {"beam_union", options.beam_union},
          {"beam_tok_s", run.best.decode_s > 0 ? double(run.beam_tokens) / run.best.decode_s : 0},
          {"beam_texts", std::move(texts)}};
}

void check_beams(const Options& options, bool chat) {
  if (options.beam_union && options.beams < 2) throw Error("--beam-union needs --beams 2 or more");
  if (options.beam_union && !options.sparsity.sparse())
    throw Error("--beam-union needs --act-sparsity: without it nothing is skipped");
  if (options.beams == 0) return;
  if (chat) throw Error("--beams continues a prompt (-p or -f without --chat)");
  if (options.has_temp && options.sampler.temperature > 0)
    throw Error("--beams looks for the likeliest text and draws nothing: leave --temp out or give --temp 0");
}

/// "1,7,9"; every entry a number.
std::vector<int32_t> parse_ids(std::string_view text) {
  std::vector<int32_t> ids;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    std::string_view entry = text.substr(begin, end - begin);
    entry.remove_prefix(std::min(entry.find_first_not_of(' '), entry.size()));
    int32_t& id = ids.emplace_back();
    const auto [stop, error] = std::from_chars(entry.data(), entry.data() + entry.size(), id);
    if (error != std::errc() || stop != entry.data() + entry.size())
      throw CLI::ValidationError("--prompt-ids",
                                 fmt::format("entry {} is '{}', expected a token id", ids.size(), entry));
    begin = end + 1;
  }
  return ids;
}

/// A marker that the vocabulary lacks is spelled in pieces, which the model was not trained to understand. A model's
/// own template may spell its markers, and so does the family "zephyr".
void warn_of_lacking_markers(const ChatTemplate& style, const Tokenizer& tokenizer) {
  if (style.name() == "zephyr") return;
  const ChatMessage message{"user", "x"};
  const std::string text = style.render({&message, 1});
  std::set<std::string> lacking;
  for (size_t begin = 0; (begin = text.find("<|", begin)) != std::string::npos;) {
    const size_t end = text.find("|>", begin + 2);
    if (end == std::string::npos) break;
    const std::string marker = text.substr(begin, end + 2 - begin);
    if (tokenizer.encode(marker, {.add_special = false, .parse_special = true}).size() != 1) lacking.insert(marker);
    begin = end + 2;
  }
  if (!lacking.empty())
    spdlog::warn(
        "the model has no token for {}, so it was hardly trained with the chat template {}; expect odd answers",
        fmt::join(lacking, ", "), style.name());
}

void check_cuda(const Options& options) {
  const auto refuse = [](const char* flag) {
    throw Error("{} is of --device cpu so far; leave it out with cuda", flag);
  };
  if (options.beams > cuda::kMostBeams)
    throw Error("--beams {}: --device cuda runs 1 to {}; ask for fewer, or use --device cpu", options.beams,
                cuda::kMostBeams);
  if (options.beam_union) refuse("--beam-union");
  if (options.beams > 0 && options.gpu.layers > 0)
    throw Error("--beams takes the whole model on the device; leave out --gpu-layers, or use --device cpu");
  if (options.beams > 0) refuse_split(options.gpu, "--beams");
  if (options.kv != "f16") refuse("--kv");
  if (options.prepare != "auto") refuse("--prepare");
}

int run(const Options& options) {
  const bool on_cuda = options.device == "cuda";
  if (on_cuda) check_cuda(options);
  const bool has_prompt = options.has_prompt || options.has_file || options.has_ids;
  const bool chat = options.chat || (!has_prompt && !options.raw && ::isatty(STDIN_FILENO) == 1);
  if (!has_prompt && !chat) throw Error("no prompt: give -p TEXT, -f FILE, or --chat to talk with the model");
  if (!chat && !options.system.empty()) throw Error("--system needs --chat: a raw continuation has no system message");
  if (!chat && !options.chat_template.empty())
    throw Error("--chat-template needs --chat: a raw continuation has no prompt format");
  if (!options.chat_template.empty()) ChatTemplate::from(options.chat_template);  // an unknown name fails here
  if (chat && options.has_ids) throw Error("--prompt-ids cannot be used with --chat");
  if (chat && !has_prompt && options.json) throw Error("--json needs a prompt: give -p TEXT or -f FILE");
  check_beams(options, chat);
  const std::string prompt = options.has_file ? read_input(options.file) : options.prompt;

  std::optional<MachinePlans> plans;
  CudaPlans cuda_plans;
  if (!on_cuda) plans = load_plans(options.profile, options.threads);
  LoadedModel model = on_cuda ? open_model(options.model, options)
                              : load_model(options.model, options,
                                           plans->load_options(options.prepare == "auto" ? kernels::Prepare::automatic
                                                                                         : kernels::Prepare::in_place));
  const model::Config config = model::read_config(model.checkpoint);
  const int64_t capacity = options.ctx > 0 ? options.ctx : std::min(config.n_ctx, kDefaultContext);
  const auto thresholds = on_cuda ? select_thresholds(model.checkpoint, options.model, options.sparsity, true)
                                  : apply_sparsity(model, options.model, options.sparsity, false);
  if (on_cuda) {
    open_gpu(model, options.gpu);
    cuda_plans = load_cuda_plans(options.profile, model.gpu->info());
    if (options.gpu.layers > 0) plans = load_plans_beside_gpu(options.profile, options.threads);
    load_cuda_decoder(model,
                      {.context = capacity,
                       .progress = true,
                       .deterministic = options.profile.deterministic,
                       .plans = cuda_plans.plans,
                       .gpu_layers = options.gpu.layers,
                       .shards = options.gpu.shards,
                       .cpu = plans ? plans->load_options(kernels::Prepare::automatic) : model::LoadOptions{}},
                      {.layers = true, .context = "--ctx"});
    if (thresholds) model.cuda->set_sparsity(model::SparsityOptions{*thresholds, options.sparsity.dense_prefix, false});
  }
  const InterruptGuard guard;  // Ctrl-C ends the program while it loads, from here on only the text that is being made
  if (thresholds && !has_zigzag_weights(model.checkpoint))
    spdlog::warn(
        "{}: has no zigzag weights, so inputs are left out but no time is saved; store it with `lacuna quantize "
        "--layout zz4_k`, of a K-quant file with `--layout zigzag`, which keeps its bits",
        options.model);
  if (thresholds && !options.json && options.beams < 2)
    spdlog::info(
        "each token skips about {:.0f}% of the layers' inputs ({}, {}), the first {} positions and the prompt none",
        100 * thresholds->level, name_of(thresholds->mode), name_of(thresholds->criterion),
        options.sparsity.dense_prefix);
  if (options.explain && on_cuda)
    say("profile: {}\n{}{}\n", cuda_plans.source,
        plans ? fmt::format("profile of the CPU's layers: {}\n", plans->source) : "", model.cuda->explain());
  else if (options.explain)
    say("{}{}{}\n", model.decoder->explain(), explain_plans(model.checkpoint, *plans), explain_sparsity(model, *plans));
  if (options.beams > 1 && options.sparsity.sparse() && on_cuda)
    spdlog::info("several beams run dense on CUDA: with --beams 2 and more --act-sparsity skips nothing");
  else if (options.beams > 1 && options.sparsity.sparse()) {
    model::SparsityOptions sparsity = *model.decoder->sparsity();
    sparsity.unite_sessions = options.beam_union;
    model.decoder->set_sparsity(std::move(sparsity));
    if (options.beam_union && !options.json)
      spdlog::info("beams skip the inputs that none of them needs, fewer the more they are");
    if (!options.beam_union)
      spdlog::info("several beams run dense; --beam-union lets them skip the inputs that none of them needs");
  }
  std::optional<model::CpuEngine> on_cpu;
  if (!on_cuda) on_cpu.emplace(*model.decoder, capacity, parse_kv(options.kv));
  Sequence sequence{on_cuda ? static_cast<model::Engine&>(*model.cuda) : *on_cpu};
  model::Sampler sampler(options.sampler, config.n_vocab);
  const GenerateOptions generation{
      .max_tokens = options.has_tokens ? options.tokens : (chat ? -1 : kDefaultTokens),
      .ignore_end = options.ignore_end,
  };
  const auto on_text = [&](std::string_view text) {
    if (!options.json) print(text);
  };

  Generation result;
  std::vector<int32_t> prompt_ids;
  Json beams;
  if (chat) {
    const ChatTemplate style = chat_template(options, model);
    if (!options.chat_template.empty()) warn_of_lacking_markers(style, model.need_tokenizer());
    Chat conversation(model, sequence, sampler, style, options.system, generation);
    if (!has_prompt) {
      chat_loop(conversation);
      return 0;
    }
    result = conversation.ask(prompt, on_text);
    prompt_ids = conversation.prompt_ids();
  } else {
    prompt_ids =
        options.has_ids
            ? options.prompt_ids
            : model.need_tokenizer().encode(
                  prompt, {.add_special = !options.no_bos, .add_eos = false, .parse_special = options.special});
    if (options.beams > 0) {
      const std::unique_ptr<model::BeamEngine> engine =
          on_cuda ? model.cuda->make_beams(options.beams)
                  : std::make_unique<model::CpuBeams>(*model.decoder, options.beams, capacity, parse_kv(options.kv));
      BeamRun run = search_beams(model, *engine, prompt_ids, generation);
      on_text(run.best.text);
      beams = beams_json(run, model, options);
      result = std::move(run.best);
    } else {
      result = generate(model, sequence, sampler, prompt_ids, generation, on_text);
    }
  }

  if (options.json) {
    Json row = result_json(result, prompt_ids, model.load_s,
                           on_cuda ? Json() : Json(model.decoder->sparsity_counts().share()));
    if (on_cuda) row["device"] = model.gpu->info().name;
    if (!beams.is_null()) row.update(beams);
    print_json(row);
  } else {
    print("\n");
  }
  if (result.stop == Stop::context_full)
    say("lacuna: the context of {} tokens is full, so the text ends here (the model allows {}; see --ctx)\n", capacity,
        config.n_ctx);
  print_statistics(result, model.load_s);
  return result.stop == Stop::interrupted ? 130 : 0;
}

}  // namespace

Action add_run(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command = program.add_subcommand(
      "run",
      "Continue a prompt (-p, -f) or chat (--chat, or no prompt on a terminal). Text goes to stdout as it is made, "
      "statistics to stderr.");
  command->add_option("MODEL", options->model, "a .gguf file or a Hugging Face folder")->required();

  CLI::Option* prompt =
      command->add_option("-p,--prompt", options->prompt, "text to continue, or the message with --chat")
          ->type_name("TEXT");
  CLI::Option* file =
      command->add_option("-f,--file", options->file, "read it from this file; - is standard input")->type_name("FILE");
  CLI::Option* ids =
      command
          ->add_option_function<std::string>(
              "--prompt-ids", [options](const std::string& text) { options->prompt_ids = parse_ids(text); },
              "the prompt as token ids, separated by commas")
          ->type_name("IDS");
  prompt->excludes(file);
  prompt->excludes(ids);
  file->excludes(ids);
  CLI::Option* tokens =
      command
          ->add_option(
              "-n,--tokens", options->tokens,
              "tokens to generate at most; -1: until the model ends or the context is full; default: 256, in a "
              "chat -1")
          ->check(CLI::Range(int64_t{-1}, int64_t{1} << 40))
          ->type_name("N");
  command->add_flag("--special", options->special, "control tokens written in the prompt become their ids");
  command->add_flag("--no-bos", options->no_bos, "do not add the special tokens (BOS) that the model adds");
  command->add_flag("--ignore-eos", options->ignore_end, "go on past the tokens that end a text");

  CLI::Option* temp =
      command->add_option("--temp", options->sampler.temperature, "temperature; 0: always the likeliest token")
          ->check(number_in(0, 1000))
          ->capture_default_str()
          ->type_name("T")
          ->group("Sampling");
  command->add_option("--top-k", options->sampler.top_k, "only the K likeliest tokens; 0: off")
      ->check(integer_in(0, (int64_t{1} << 31) - 1))
      ->capture_default_str()
      ->type_name("K")
      ->group("Sampling");
  command
      ->add_option("--top-p", options->sampler.top_p, "only the likeliest tokens that sum to this probability; 1: off")
      ->check(number_in(0, 1, true))
      ->capture_default_str()
      ->type_name("P")
      ->group("Sampling");
  command
      ->add_option("--min-p", options->sampler.min_p,
                   "only tokens at least this share as likely as the likeliest; 0: off")
      ->check(number_in(0, 1))
      ->capture_default_str()
      ->type_name("P")
      ->group("Sampling");
  command
      ->add_option("--repeat-penalty", options->sampler.repeat_penalty,
                   "makes tokens seen lately less likely; 1: off, above 1: stronger")
      ->check(number_in(0.01, 100))
      ->capture_default_str()
      ->type_name("R")
      ->group("Sampling");
  command->add_option("--repeat-window", options->sampler.repeat_window, "how many last tokens the penalty looks at")
      ->check(integer_in(0, (int64_t{1} << 31) - 1))
      ->capture_default_str()
      ->type_name("N")
      ->group("Sampling");
  add_seed(*command, options->sampler.seed, "start of the random numbers: the same seed, the same text")
      ->group("Sampling");

  CLI::Option* beams =
      command
          ->add_option("--beams", options->beams,
                       "beam search with B beams: each step keeps the B likeliest continuations; the text with the "
                       "largest log-probability divided by its tokens (the one that ends it included) is printed; 1: "
                       "greedy. Several beams run dense. With --device cuda 1 to 4, the model whole on one device")
          ->check(CLI::Range(int64_t{1}, int64_t{16}))
          ->type_name("B")
          ->group("Beam search");
  for (CLI::Option* other : command->get_options())
    if (const std::string name = other->get_name(); name == "--top-k" || name == "--top-p" || name == "--min-p" ||
                                                    name == "--repeat-penalty" || name == "--repeat-window" ||
                                                    name == "--seed")
      beams->excludes(other);
  command
      ->add_flag("--beam-union", options->beam_union,
                 "with --act-sparsity: beams skip the inputs that none of them needs, instead of running dense")
      ->group("Beam search");

  CLI::Option* chat =
      command
          ->add_flag("--chat", options->chat,
                     "use the model's chat template; without -p or -f, messages are read from standard input")
          ->group("Chat");
  command
      ->add_flag("--raw,--no-chat", options->raw, "never chat: continue the prompt as it is (the default with -p, -f)")
      ->excludes(chat)
      ->group("Chat");
  command->add_option("--system", options->system, "the system message")->type_name("TEXT")->group("Chat");
  command
      ->add_option("--chat-template", options->chat_template,
                   "prompt format by name, instead of the one recognised from the model")
      ->type_name("NAME")
      ->group("Chat");

  command
      ->add_option(
          "--ctx", options->ctx,
          "most tokens of prompt and answer together (the answer's last token takes no room); 0: what the model "
          "allows, at most 8192")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->capture_default_str()
      ->type_name("C");
  add_kv(*command, options->kv);
  add_sparsity(*command, options->sparsity);
  add_profile(*command, options->profile);
  add_gpu(*command, options->gpu);
  command
      ->add_option(
          "--prepare", options->prepare,
          "auto: repack weights where that is faster; in_place: read them from the mapped file, no second copy")
      ->check(CLI::IsMember({"auto", "in_place"}))
      ->capture_default_str()
      ->type_name("HOW");
  command->add_flag(
      "--explain", options->explain,
      "print to stderr which kernels run each group of weights, their plans and which inputs run sparse, with the "
      "times that decided it");
  add_common(*command, *options);
  return [=] {
    check_gpu(*command, *options);
    check_sparsity(*command);
    options->has_prompt = prompt->count() > 0;
    options->has_file = file->count() > 0;
    options->has_ids = ids->count() > 0;
    options->has_tokens = tokens->count() > 0;
    options->has_temp = temp->count() > 0;
    return run(*options);
  };
}

}  // namespace lacuna::cli
