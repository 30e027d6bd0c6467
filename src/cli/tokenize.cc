// src/cli/tokenize.cc - `tokenize`: text to ids.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/command.h"
#include "core/error.h"

namespace lacuna::cli {
namespace {

struct Options : Common {
  std::string model, text, file;
  bool no_bos = false, special = false, pieces = false;
};

int tokenize(const Options& options, bool has_text) {
  check_common(options);
  const io::Checkpoint checkpoint = io::Checkpoint::open(options.model, options.threads);
  if (checkpoint.vocabulary().model == Vocabulary::Model::none)
    throw Error("{}: the model has no tokenizer; {}", checkpoint.path(), kTokenizerFiles);
  const Tokenizer tokenizer = make_tokenizer(checkpoint);
  const std::vector<int32_t> ids = tokenizer.encode(has_text ? options.text : read_input(options.file),
                                                    {.add_special = !options.no_bos, .parse_special = options.special});
  if (options.json) {
    Json out = {{"ids", ids}};
    if (options.pieces) {
      out["pieces"] = Json::array();
      for (const int32_t id : ids) out["pieces"].push_back(tokenizer.piece(id, true));
    }
    print_json(out);
  } else if (options.pieces) {
    std::string out;
    for (const int32_t id : ids)
      out += fmt::format("{:>7} {}\n", id,
                         Json(tokenizer.piece(id, true)).dump(-1, ' ', false, Json::error_handler_t::replace));
    print(out);
  } else {
    print(fmt::format("{}\n", fmt::join(ids, " ")));
  }
  return 0;
}

}  // namespace

Action add_tokenize(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command = program.add_subcommand("tokenize", "Turn text into the model's token ids.");
  command->add_option("MODEL", options->model, "a .gguf file (a vocabulary is enough) or a Hugging Face folder")
      ->required();
  CLI::Option* text = command->add_option("-p,--prompt", options->text, "the text")->type_name("TEXT");
  CLI::Option* file =
      command->add_option("-f,--file", options->file, "read the text from this file; - is standard input")
          ->type_name("FILE");
  text->excludes(file);
  command->add_flag("--no-bos", options->no_bos, "do not add the special tokens (BOS, EOS) that the model adds");
  command->add_flag("--special", options->special, "control tokens written in the text become their ids");
  command->add_flag("--pieces", options->pieces, "show each id's text beside it");
  add_common(*command, *options);
  return [options, text, file] {
    if (text->count() + file->count() == 0) throw Error("no text: give -p TEXT or -f FILE");
    return tokenize(*options, text->count() > 0);
  };
}

}  // namespace lacuna::cli
