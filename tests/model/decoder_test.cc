// Limits of a session, the promise of no allocation per token, and metadata that contradicts itself.
#include "model/decoder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "core/error.h"
#include "io/gguf_writer.h"
#include "io/quantize.h"
#include "model/sampler.h"
#include "model/support.h"
#include "test_support.h"

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

// Not inlined: the compiler would take malloc and operator delete for a mismatched pair.
[[gnu::noinline]] void* operator new(size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::malloc(size > 0 ? size : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(size > 0 ? size : 1);
}
// HugeBuffer maps its memory. The sanitizers have an mmap of their own.
#if !defined(__SANITIZE_ADDRESS__) && defined(__linux__) && defined(__x86_64__)
extern "C" void* mmap(void* at, size_t size, int protection, int flags, int file, off_t offset) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return reinterpret_cast<void*>(::syscall(SYS_mmap, at, size, protection, flags, file, offset));
}
constexpr bool kCountsMaps = true;
#else
constexpr bool kCountsMaps = false;
#endif
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace lacuna::model {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(Decoder, OneTokenAllocatesNothing) {
  const test::TempDir folder;
  const std::string zigzag = (folder.path() / "zz4_k.gguf").string();
  {
    Model source(test::fixture("text_model"));
    io::quantize(source.checkpoint, zigzag, {.layout = layout::Id::zz4_k, .progress = false}, source.pool);
  }
  for (const auto& [path, sparse] : {std::pair{test::fixture("text_model"), false},
                                     {test::fixture("hf/qwen3"), false},
                                     {test::fixture("hf/opt"), false},
                                     {test::fixture("text_model"), true},
                                     {test::fixture("hf/opt_post_norm_projected"), true},
                                     {zigzag, false},
                                     {zigzag, true}}) {
    Model model(path);
    if (sparse) {
      Thresholds thresholds;
      thresholds.t.assign(size_t(model.decoder->config().n_layers), {0.5f, 0.5f, 0.5f, 0.5f});
      model.decoder->set_sparsity(SparsityOptions{thresholds, 4, false});
    }
    Session session(*model.decoder, model.decoder->config().n_ctx);
    Sampler sampler({}, model.decoder->config().n_vocab);
    int32_t id = 3;
    const std::vector<int32_t> prompt(5, id);
    model.decoder->forward(session, prompt);
    const auto step = [&] {
      id = sampler.sample(model.decoder->forward(session, {&id, 1}));
      sampler.accept(id);
    };
    step();  // scratch of the threads grows here at the latest
    const int64_t before = allocations.load();
    while (session.length() < session.capacity()) step();
    EXPECT_EQ(allocations.load() - before, 0) << path;
    EXPECT_EQ(model.decoder->sparsity_counts().share() > 0.01, sparse) << path;
  }
  const int64_t before = allocations.load();
  const auto kept = std::make_unique<std::vector<int>>(100);
  EXPECT_GE(allocations.load() - before, 2) << "the counter counts" << kept->size();
  const int64_t without = allocations.load();
  const HugeBuffer buffer(size_t{1} << 20);
  EXPECT_EQ(allocations.load() > without, kCountsMaps) << buffer.size();
}

TEST(Session, ContextOf64WithPromptsOfEveryLength) {
  Model model(test::fixture("text_model"));
  for (const size_t length : {0, 1, 63, 64, 65, 10000}) {
    Session session(*model.decoder, 64);
    const std::vector<int32_t> ids(length, 5);
    if (length == 0) {
      EXPECT_THAT([&] { model.decoder->forward(session, ids); }, ThrowsMessage<Error>(HasSubstr("empty")));
    } else if (length <= 64) {
      EXPECT_EQ(int64_t(model.decoder->forward(session, ids).size()), model.decoder->config().n_vocab);
      EXPECT_EQ(session.length(), int64_t(length));
      while (session.length() < 64) model.decoder->forward(session, {&ids[0], 1});
      EXPECT_THAT(
          [&] {
            model.decoder->forward(session, {&ids[0], 1});
          },
          ThrowsMessage<Error>(HasSubstr("do not fit")));
      EXPECT_EQ(session.length(), 64);
    } else {
      EXPECT_THAT([&] { model.decoder->forward(session, ids); },
                  ThrowsMessage<Error>(HasSubstr("the context holds 64")));
      EXPECT_EQ(session.length(), 0);
    }
  }
}

TEST(Session, RefusesCapacitiesThatTheModelLacks) {
  Model model(test::fixture("hf/opt"));
  for (const int64_t capacity : {int64_t{-1}, int64_t{0}, model.decoder->config().n_ctx + 1})
    EXPECT_THAT([&] { Session(*model.decoder, capacity); }, ThrowsMessage<Error>(HasSubstr("this model takes 1 to")));
}

TEST(Decoder, RefusesIdsOutsideTheVocabulary) {
  Model model(test::fixture("hf/opt"));
  Session session(*model.decoder, 8);
  for (const int32_t id : {-1, 48, 1 << 30}) {
    const std::vector<int32_t> ids = {1, id};
    EXPECT_THAT([&] { model.decoder->forward(session, ids); }, ThrowsMessage<Error>(HasSubstr("vocabulary of 48")));
    EXPECT_EQ(session.length(), 0);
  }
}

// ---- metadata and tensors that contradict each other ----

/// A copy of a GGUF fixture with changed metadata and without the tensors in `dropped`.
template <class Edit>
void expect_refused(const char* fixture, const Edit& edit, const char* message, const std::string& dropped = "",
                    const std::string& renamed = "") {
  const io::Checkpoint source = io::Checkpoint::open(test::fixture(fixture));
  const test::TempDir folder;
  io::Metadata metadata = source.metadata();
  edit(metadata);
  std::vector<io::TensorPlan> plan;
  for (const io::Tensor& tensor : source.tensors()) {
    if (tensor.name == dropped && renamed.empty()) continue;
    plan.push_back({tensor.name == dropped ? renamed : tensor.name, tensor.layout, tensor.dims});
  }
  io::GgufWriter writer(folder.file("m.gguf"), metadata, plan);
  for (const io::Tensor& tensor : source.tensors())
    if (tensor.name != dropped || !renamed.empty()) writer.write(tensor.bytes);
  writer.finish();
  EXPECT_THAT([&] { Model{folder.file("m.gguf")}; }, ThrowsMessage<Error>(HasSubstr(message))) << message;
}

TEST(Config, ContradictionsAreErrors) {
  const auto set = [](const char* key, io::MetadataValue value) {
    return [=](io::Metadata& metadata) { metadata.set(key, value); };
  };
  const char* llama = "gguf_models/llama_head_dim.gguf";
  const auto same = [](io::Metadata&) {};
  expect_refused(llama, set("general.architecture", std::string("falcon")), "known are llama, opt, qwen2, qwen3");
  expect_refused(llama, set("llama.attention.head_count_kv", uint32_t{3}), "no multiple");
  expect_refused(llama, set("llama.attention.head_count", uint32_t{0}), "head_count");
  expect_refused(llama, set("llama.attention.value_length", uint32_t{2}), "value_length");
  expect_refused(llama, set("llama.rope.dimension_count", uint32_t{3}), "rope.dimension_count");
  expect_refused(llama, set("llama.rope.scaling.type", std::string("longrope")),
                 "known are none, linear, llama3, yarn");
  expect_refused(llama, set("llama.expert_count", uint32_t{8}), "mixture of experts");
  expect_refused(llama, set("llama.embedding_length", uint32_t{20}), "20");
  expect_refused(llama, set("llama.block_count", uint32_t{3}), "blk.2.");
  expect_refused(llama, set("llama.block_count", uint32_t{1}), "has no place");
  expect_refused(llama, set("llama.vocab_size", uint32_t{47}), "token_embd.weight has 48 rows");
  expect_refused(
      llama, [](io::Metadata& m) { m.erase("llama.context_length"); }, "llama.context_length");
  expect_refused(llama, same, "blk.1.ffn_up.weight", "blk.1.ffn_up.weight");
  expect_refused(llama, same, "output_norm.weight", "output_norm.weight");
  expect_refused("gguf_models/llama_bias.gguf", same, "blk.0.attn_sinks.weight has no place", "blk.0.attn_q.bias",
                 "blk.0.attn_sinks.weight");
}

}  // namespace
}  // namespace lacuna::model
