// Any bytes as tokenizer.json: read or refused with an Error; what was read survives the way through GGUF's keys.
#include <cstdlib>

#include "core/error.h"
#include "io/checkpoint.h"
#include "io/tokenizer_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lacuna;
  Vocabulary vocabulary;
  try {
    vocabulary = io::parse_tokenizer_json({reinterpret_cast<const char*>(data), size}, "fuzz.json");
  } catch (const Error&) {
    return 0;
  }
  io::Metadata metadata;
  io::vocabulary_to_metadata(vocabulary, metadata);
  const Vocabulary again = io::vocabulary_from_metadata(metadata);
  if (again.tokens != vocabulary.tokens || again.types != vocabulary.types || again.merges != vocabulary.merges ||
      again.pre != vocabulary.pre || again.split_regexes != vocabulary.split_regexes)
    std::abort();
  return 0;
}
