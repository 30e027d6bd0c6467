// bench/cuda_ops_bench.cu - time of each op of a token on a CUDA device, in a graph of many launches that overlap, with
// weights and caches too large for the device's cache to hold.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows.h"
#include "layout/layout.h"

namespace lacuna {
namespace {

using layout::Id;

constexpr int kLaunches = 64;

struct Bench {
  cuda::Device device;
  cuda::Stream stream{device};
  double ceiling = 0;

  /// Median time of one of `count` launches, in microseconds.
  double time_us(int count, const std::function<void(int)>& launch) {
    cuda::Graph graph(stream, [&] {
      for (int i = 0; i < count; ++i) launch(i);
    });
    cuda::Stopwatch watch;
    std::vector<double> ms;
    for (int round = 0; round < 12; ++round) {
      watch.start(stream);
      graph.launch(stream);
      const double t = watch.stop_ms(stream);
      if (round >= 2) ms.push_back(t);
    }
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2] * 1000 / count;
  }
  void print(const char* what, double us, double bytes = 0) const {
    if (bytes > 0)
      std::printf("%-44s %9.2f us %8.1f GB/s %5.1f%% of the read ceiling\n", what, us, bytes / us / 1e3,
                  bytes / us / 1e3 / ceiling * 100);
    else
      std::printf("%-44s %9.2f us\n", what, us);
    std::fflush(stdout);
  }

  cuda::Buffer random_floats(int64_t count) {
    Rng rng(uint64_t(count) + 1);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& v : values) v = float(rng.normal());
    cuda::Buffer out(device, count * 4, "inputs");
    out.upload(std::as_bytes(std::span(values)));
    return out;
  }
  /// Bytes of small halves and random bits, whatever they mean.
  cuda::Buffer random_bytes(int64_t bytes) {
    Rng rng(3);
    constexpr int64_t kBlock = 1 << 22;
    std::vector<uint16_t> block(kBlock / 2);
    for (uint16_t& v : block) v = uint16_t(rng.next() & 0xbbff);  // halves below 2
    cuda::Buffer out(device, bytes, "weights");
    for (int64_t at = 0; at < bytes; at += kBlock)
      out.upload(std::as_bytes(std::span(block)).first(size_t(std::min(kBlock, bytes - at))), at);
    return out;
  }

  void rows(Id id, int64_t N, int64_t K, int parts = 1) {
    const layout::Layout& l = layout::get(id);
    const int64_t bytes = N * cuda::row_places(l, K).row_bytes;
    const int copies = int(std::clamp<int64_t>((int64_t{600} << 20) / bytes, 2, kLaunches));
    const cuda::Buffer weights = random_bytes(bytes * copies), x = random_floats(K), y = random_floats(N * parts);
    const double us = time_us(copies, [&](int i) {
      std::vector<cuda::RowsPart> all;
      for (int p = 0; p < parts; ++p)
        all.push_back({{&l, weights.data() + i * bytes + p * (N / parts) * (bytes / N), N / parts, K},
                       nullptr,
                       y.as<float>() + p * (N / parts)});
      cuda::launch_rows(device, stream, {all, x.as<float>()});
    });
    char what[80];
    std::snprintf(what, sizeof(what), "rows %s %lld x %lld%s", std::string(l.name).c_str(), static_cast<long long>(N),
                  static_cast<long long>(K), parts > 1 ? " in parts" : "");
    print(what, us, double(bytes));
  }

  void attention(int64_t n_heads, int64_t n_kv, int64_t D, int context, bool listed) {
    const int64_t capacity = 4096 + 64, layer = n_kv * capacity * D * 2, width = n_heads * D;
    const int layers = 32;
    const cuda::Buffer keys = random_bytes(layer * layers), values = random_bytes(layer * layers);
    const cuda::Buffer q = random_floats(width), k = random_floats(n_kv * D), v = random_floats(n_kv * D);
    const cuda::Buffer cos = random_floats(capacity * D / 2), sin = random_floats(capacity * D / 2);
    const cuda::Buffer out = random_floats(width), list = random_floats(width), count = random_floats(1);
    cuda::Buffer workspace(device, cuda::attention_workspace_bytes(device, 1, n_heads, n_kv, D), "workspace");
    workspace.fill(0);
    cuda::Buffer position(device, 4, "position");
    const std::vector<int32_t> at = {context - 1};
    position.upload(std::as_bytes(std::span(at)));
    const double us = time_us(layers, [&](int i) {
      cuda::AttentionArgs a;
      a.heads.q = q.as<float>(), a.heads.k = k.as<float>(), a.heads.v = v.as<float>();
      a.heads.q_stride = width, a.heads.kv_stride = n_kv * D;
      a.heads.n_heads = n_heads, a.heads.n_kv_heads = n_kv, a.heads.head_dim = D;
      a.heads.cos = cos.as<float>(), a.heads.sin = sin.as<float>();
      a.heads.n_rot = D, a.heads.adjacent = true;
      a.heads.cache = {reinterpret_cast<f16*>(keys.data() + i * layer),
                       reinterpret_cast<f16*>(values.data() + i * layer), capacity};
      a.heads.position = position.as<int32_t>();
      a.with_heads = true;
      a.scale = 0.088f;
      a.out = out.as<float>();
      if (listed) a.collect = {0.5f, nullptr, list.as<int32_t>(), count.as<int32_t>()};
      a.workspace = workspace.data();
      cuda::launch_attention(device, stream, a);
    });
    char what[96];
    std::snprintf(what, sizeof(what), "rope, store, attention %lld/%lld x %lld, context %d%s",
                  static_cast<long long>(n_heads), static_cast<long long>(n_kv), static_cast<long long>(D), context,
                  listed ? ", list" : "");
    print(what, us, double(n_kv) * D * 4 * context);
  }

  /// What a prompt's product is made of: inputs and weights as operands, and the product of these.
  void batch(int64_t M, int64_t N, int64_t K) {
    const layout::Layout& l = layout::get(Id::zz4_k);
    constexpr int kCopies = 3;  // more than the device's cache holds
    const int64_t codes_bytes = N * K / 2, headers_bytes = N * K / 16, tiles_bytes = cuda::operand_bytes(N, K);
    const cuda::Buffer codes = random_bytes(codes_bytes * kCopies), headers = random_bytes(headers_bytes * kCopies);
    const cuda::Buffer x = random_floats(M * K), y = random_floats(M * N);
    const cuda::Buffer x_tiles(device, cuda::operand_bytes(M, K), "inputs"), scales(device, (M + N) * 4, "scales");
    const cuda::Buffer tiles(device, tiles_bytes * kCopies, "weights");
    const cuda::Operand inputs = {x_tiles.data(), scales.as<float>(), M, K};
    const auto columns = [&](int i) {
      return cuda::Columns{codes.data() + i % kCopies * codes_bytes, headers.data() + i % kCopies * headers_bytes,
                           N / 256, K};
    };
    const auto weights = [&](int i) {
      return cuda::Operand{tiles.data() + i % kCopies * tiles_bytes, scales.as<float>() + M, N, K};
    };
    cuda::launch_weight_scales(device, stream, l, columns(0), weights(0).scale);
    stream.synchronize();
    const auto shape = [&](const char* what) { return fmt::format("{} {} x {} x {}", what, M, N, K); };
    print(shape("inputs of").c_str(),
          time_us(
              2 * kCopies,
              [&](int) { cuda::launch_gemm_inputs(device, stream, {.x = x.as<float>(), .stride = K, .to = inputs}); }),
          double(M * K * 6));
    print(shape("zz4_k weights of").c_str(),
          time_us(2 * kCopies, [&](int i) { cuda::launch_gemm_weights(device, stream, l, columns(i), 0, weights(i)); }),
          double(codes_bytes + headers_bytes + tiles_bytes));
    for (const auto& [name, kernel] : {std::pair{"mma", cuda::GemmKernel::mma}, {"wgmma", cuda::GemmKernel::wgmma}}) {
      if (kernel == cuda::GemmKernel::wgmma && device.info().major != 9) continue;
      const double us = time_us(2 * kCopies, [&, to = kernel](int i) {
        cuda::GemmArgs args;
        args.x = inputs, args.w = weights(i);
        args.y = y.as<float>(), args.stride = N, args.kernel = to;
        cuda::launch_gemm(device, stream, args);
      });
      print(fmt::format("{}, {:.0f} TFLOP/s", shape(name), 2e-6 * double(M * N * K) / us).c_str(), us);
    }
  }

  /// A prompt's attention after `depth` tokens.
  void batch_attention(int64_t M, int64_t n_heads, int64_t n_kv, int64_t D, int64_t depth) {
    const int64_t capacity = depth + M, width = n_heads * D;
    const cuda::Buffer keys = random_bytes(n_kv * capacity * D * 2), values = random_bytes(n_kv * capacity * D * 2);
    const cuda::Buffer q = random_floats(M * width), out = random_floats(M * width);
    cuda::Buffer position(device, 4, "position");
    const std::vector<int32_t> at = {int32_t(depth)};
    position.upload(std::as_bytes(std::span(at)));
    cuda::BatchAttentionArgs a;
    a.heads.q = q.as<float>(), a.heads.q_stride = width, a.heads.M = M;
    a.heads.n_heads = n_heads, a.heads.n_kv_heads = n_kv, a.heads.head_dim = D;
    a.heads.cache = {reinterpret_cast<f16*>(keys.data()), reinterpret_cast<f16*>(values.data()), capacity};
    a.heads.position = position.as<int32_t>();
    a.scale = 0.088f, a.out = out.as<float>(), a.out_stride = width;
    print(fmt::format("attention of {} tokens at {}, {}/{} x {}", M, depth, n_heads, n_kv, D).c_str(),
          time_us(8, [&](int) { cuda::launch_batch_attention(device, stream, a); }));
  }

  void small_ops(int64_t K, int64_t ff) {
    const cuda::Buffer x = random_floats(K), add = random_floats(K), w = random_floats(K), y = random_floats(K);
    const cuda::Buffer gate = random_floats(ff), up = random_floats(ff), out = random_floats(ff);
    const cuda::Buffer list = random_floats(ff), count = random_floats(1), zeros = random_floats(12288);
    const cuda::Collect collect{0.6745f, nullptr, list.as<int32_t>(), count.as<int32_t>()};
    cuda::NormArgs norm;
    norm.x = x.as<float>(), norm.add = add.as<float>(), norm.weight = w.as<float>(), norm.y = y.as<float>();
    norm.K = K, norm.eps = 1e-5f, norm.preset = {zeros.as<float>(), 12288};
    print("add, rms_norm, zeros", time_us(kLaunches, [&](int) { cuda::launch_norm(device, stream, norm); }));
    norm.collect = collect;
    print("add, rms_norm, zeros, list", time_us(kLaunches, [&](int) { cuda::launch_norm(device, stream, norm); }));
    cuda::GateArgs args;
    args.x = gate.as<float>(), args.up = up.as<float>(), args.out = out.as<float>(), args.count = ff;
    args.preset = {zeros.as<float>(), 4096};
    print("swiglu", time_us(kLaunches, [&](int) { cuda::launch_gate(device, stream, args); }));
    args.collect = collect;
    print("swiglu, list", time_us(kLaunches, [&](int) { cuda::launch_gate(device, stream, args); }));
    args.gate = cuda::Gate::none;
    args.x = x.as<float>(), args.count = K;
    print("list alone", time_us(kLaunches, [&](int) { cuda::launch_gate(device, stream, args); }));
    print("add", time_us(kLaunches, [&](int) { cuda::launch_add(device, stream, add.as<float>(), K, x.as<float>()); }));
  }

  /// A token of Llama-2-7B without its layers' linear ops.
  void rest_of_token(int context, bool listed) {
    const int64_t K = 4096, ff = 11008, n_vocab = 32000, layers = 32, heads = 32, D = 128, capacity = 4096 + 64;
    const int64_t cache = heads * capacity * D * 2;
    const layout::Layout &words = layout::get(Id::q4_K), &head = layout::get(Id::q6_K);
    const cuda::Buffer embedding = random_bytes(n_vocab * cuda::row_places(words, K).row_bytes);
    const cuda::Buffer output = random_bytes(n_vocab * cuda::row_places(head, K).row_bytes);
    const cuda::Buffer keys = random_bytes(cache * layers), values = random_bytes(cache * layers);
    const cuda::Buffer x = random_floats(K), y = random_floats(K), h = random_floats(K), w = random_floats(K);
    const cuda::Buffer qkv = random_floats(3 * K), attended = random_floats(K), up = random_floats(2 * ff);
    const cuda::Buffer logits = random_floats(n_vocab), list = random_floats(ff), count = random_floats(4);
    const cuda::Buffer cos = random_floats(capacity * D / 2), sin = random_floats(capacity * D / 2);
    cuda::Buffer workspace(device, cuda::attention_workspace_bytes(device, 1, heads, heads, D), "workspace");
    cuda::Buffer id(device, 4, "id"), best(device, cuda::argmax_workspace_bytes(1), "workspace");
    cuda::Buffer position(device, 4, "position");
    workspace.fill(0), id.fill(0), best.fill(0);
    const std::vector<int32_t> at = {context - 1};
    position.upload(std::as_bytes(std::span(at)));
    const cuda::Collect collect =
        listed ? cuda::Collect{0.6745f, nullptr, list.as<int32_t>(), count.as<int32_t>()} : cuda::Collect{};
    const double us = time_us(1, [&](int) {
      cuda::launch_embed(device, stream, {&words, embedding.data(), n_vocab, K}, id.as<int32_t>(), 1, x.as<float>());
      cuda::NormArgs norm;
      norm.x = x.as<float>(), norm.weight = w.as<float>(), norm.y = h.as<float>(), norm.K = K, norm.eps = 1e-5f;
      for (int64_t layer = 0; layer < layers; ++layer) {
        norm.add = layer > 0 ? y.as<float>() : nullptr;
        norm.collect = collect;
        norm.preset = {qkv.as<float>(), 3 * K};
        cuda::launch_norm(device, stream, norm);
        cuda::AttentionArgs a;
        a.heads.q = qkv.as<float>(), a.heads.k = qkv.as<float>() + K, a.heads.v = qkv.as<float>() + 2 * K;
        a.heads.q_stride = a.heads.kv_stride = K, a.heads.n_heads = a.heads.n_kv_heads = heads, a.heads.head_dim = D;
        a.heads.cos = cos.as<float>(), a.heads.sin = sin.as<float>(), a.heads.n_rot = D, a.heads.adjacent = true;
        a.heads.cache = {reinterpret_cast<f16*>(keys.data() + layer * cache),
                         reinterpret_cast<f16*>(values.data() + layer * cache), capacity};
        a.heads.position = position.as<int32_t>();
        a.with_heads = true, a.scale = 0.088f, a.out = attended.as<float>(), a.collect = collect;
        a.workspace = workspace.data(), a.preset = {y.as<float>(), K};
        cuda::launch_attention(device, stream, a);
        norm.add = y.as<float>(), norm.preset = {up.as<float>(), 2 * ff};
        cuda::launch_norm(device, stream, norm);
        cuda::GateArgs gate;
        gate.x = up.as<float>(), gate.up = up.as<float>() + ff, gate.out = up.as<float>(), gate.count = ff;
        gate.collect = collect, gate.preset = {y.as<float>(), K};
        cuda::launch_gate(device, stream, gate);
      }
      norm.collect = {}, norm.preset = {};
      cuda::launch_norm(device, stream, norm);
      const std::vector<cuda::RowsPart> parts = {{{&head, output.data(), n_vocab, K}, nullptr, logits.as<float>()}};
      cuda::launch_rows(device, stream, {parts, h.as<float>()});
      cuda::launch_argmax(device, stream, {logits.as<float>(), 1, n_vocab, id.as<int32_t>(), nullptr, best.data()});
    });
    char what[80];
    std::snprintf(what, sizeof(what), "7B token without its layers' products, %d%s", context, listed ? ", lists" : "");
    print(what, us);
  }

  void ends(int64_t n_vocab, int64_t K) {
    const layout::Layout& l = layout::get(Id::q4_K);
    const cuda::Buffer words = random_bytes(n_vocab * cuda::row_places(l, K).row_bytes),
                       logits = random_floats(n_vocab);
    cuda::Buffer id(device, 4, "id"), workspace(device, cuda::argmax_workspace_bytes(1), "workspace");
    id.fill(0), workspace.fill(0);
    const cuda::Buffer x = random_floats(K);
    print("embedding", time_us(kLaunches, [&](int) {
            cuda::launch_embed(device, stream, {&l, words.data(), n_vocab, K}, id.as<int32_t>(), 1, x.as<float>());
          }));
    print("argmax", time_us(kLaunches, [&](int) {
            cuda::launch_argmax(device, stream,
                                {logits.as<float>(), 1, n_vocab, id.as<int32_t>(), nullptr, workspace.data()});
          }));
  }
};

void run() {
  Bench b;
  {
    const cuda::Buffer buffer = b.random_bytes(int64_t{2} << 30);
    b.ceiling = cuda::measure_read_gb_s(b.device, b.stream, buffer);
  }
  std::printf("%s, CUDA %s, reads %.0f GB/s\n", b.device.info().name.c_str(), b.device.info().driver.c_str(),
              b.ceiling);
  b.small_ops(4096, 11008);
  for (const int context : {128, 1024, 4096}) {
    b.attention(32, 32, 128, context, false);
    b.attention(32, 32, 128, context, true);
    b.attention(32, 8, 128, context, false);
  }
  for (const int64_t M : {16, 128, 512})
    for (const auto& [N, K] : {std::pair<int64_t, int64_t>{12288, 4096}, {4096, 4096}, {22016, 4096}, {4096, 11008}})
      b.batch(M, N, K);
  for (const int64_t depth : {0, 3584}) {
    b.batch_attention(512, 32, 32, 128, depth);
    b.batch_attention(512, 32, 8, 64, depth);
  }
  b.ends(32000, 4096);
  for (const int context : {128, 4096})
    for (const bool listed : {false, true}) b.rest_of_token(context, listed);
  b.rows(Id::q6_K, 32000, 4096);
  b.rows(Id::q6_K, 128256, 4096);
  for (const Id id : {Id::q4_K, Id::q6_K, Id::q8_0, Id::f16}) {
    b.rows(id, 12288, 4096, 3);
    b.rows(id, 4096, 4096);
    b.rows(id, 22016, 4096, 2);
    b.rows(id, 4096, 11008);
  }
  for (const Id id : {Id::q4_0, Id::q4_1, Id::q5_0, Id::q5_1, Id::q2_K, Id::q3_K, Id::q5_K, Id::bf16, Id::f32})
    b.rows(id, 22016, 4096, 2);
}

}  // namespace
}  // namespace lacuna

int main() {
  try {
    lacuna::run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
