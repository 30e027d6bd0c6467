#include "model/flux/cuda_net.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/progress.h"
#include "core/scalar.h"
#include "kernels/cuda/image_ops.h"
#include "model/flux/binder.h"
#include "model/flux/cuda_linear.h"
#include "model/flux/embed.h"

namespace lacuna::model::flux {

namespace {

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int64_t kRowValues = 8, kRowCodes = 16;  // rows are multiples of 16 bytes

struct HeadNormBuffers {
  cuda::Buffer q, k;
};
struct CudaExperts {
  CudaLinear gate, up, down;
};
struct CudaStream {
  CudaLinear qkv, out, up, down;
  HeadNormBuffers norms;
  std::optional<CudaExperts> experts;
};
struct CudaDouble {
  CudaStream text, image;
};
struct CudaSingle {
  CudaLinear in, up, out;  // in: k, v, q and, where joined, the MLP's first matrix; else q, k, v
  HeadNormBuffers norms;
  std::optional<CudaExperts> experts;
};
struct CudaEmbedder {
  CudaLinear first, second;
};

/// Where the time of a recorded step goes.
struct Marks {
  std::deque<cuda::Mark> marks;
  std::vector<Part> parts;
  CudaPartTimes times;  // flops
};

/// `place` is `value` for a while.
template <class T>
class Borrowed {
 public:
  Borrowed(T& place, T value) : place_(place), before_(std::exchange(place, value)) {}
  ~Borrowed() { place_ = before_; }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

 private:
  T& place_;
  T before_;
};

/// Sums of bytes, then memory at those places.
class Arena {
 public:
  int64_t add(int64_t bytes) {
    const int64_t at = bytes_;
    bytes_ += round_up(bytes, 256);
    return at;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

}  // namespace

struct CudaNet::Impl {
  Config config;
  cuda::Device& device;
  cuda::Stream stream;
  cuda::TensorCoreTable plans;
  int64_t weight_bytes = 0;

  CudaLinear latents, text, modulate, last;  // modulate: shifts, scales and gates of all blocks, and the last norm's
  CudaEmbedder timestep, guidance, pooled;
  std::vector<CudaDouble> doubles;
  std::vector<CudaSingle> singles;

  // ---- of one size of step ----
  cuda::TokenRows rows{0, 0, 0};
  cuda::Buffer memory;
  std::optional<cuda::Graph> graph;
  std::vector<float> ids;  // whose angles lie in cos and sin
  bf16 *latents_in = nullptr, *text_in = nullptr, *time_in = nullptr, *guidance_in = nullptr, *pooled_in = nullptr;
  float *cos = nullptr, *sin = nullptr;
  float *embedded[4] = {}, *modulation = nullptr, *result_out = nullptr;
  bf16 *embed_inner = nullptr, *condition = nullptr;
  bf16 *hidden = nullptr, *normed = nullptr, *qkv = nullptr, *heads = nullptr, *inner = nullptr, *result = nullptr;
  std::byte *norm_codes = nullptr, *codes = nullptr;
  float *norm_scale = nullptr, *code_scale = nullptr;
  float* logits = nullptr;
  int32_t *chosen = nullptr, *counts = nullptr, *offsets = nullptr, *token = nullptr, *row = nullptr;
  float* share = nullptr;
  bf16 *expert_values = nullptr, *expert_inner = nullptr, *expert_result = nullptr;
  std::byte* expert_codes = nullptr;
  float* expert_scale = nullptr;

  Marks* marks = nullptr;
  const CudaInputObserver* layers = nullptr;  // of the step that runs
  bool portable = false;                      // kernels that every device runs

  Impl(const Config& of, cuda::Device& on) : config(of), device(on), stream(on) {}

  // ---- sizes ----
  bool has_experts() const { return config.moe.n_experts > 0; }
  int64_t width() const { return config.width(); }
  int64_t width_stride() const { return round_up(width(), kRowValues); }
  int64_t mlp() const { return has_experts() ? 0 : config.mlp_width; }
  bool pads_heads() const { return config.head_dim % kRowValues != 0; }
  int64_t padded_dim() const { return round_up(config.head_dim, kRowValues); }
  /// Whether a single block's first matrices make the input of its last one in place: [k, v, q -> attention, MLP].
  bool joins_mlp() const { return mlp() > 0 && width() % cuda::kTileRowsOfWeights == 0 && !pads_heads(); }
  int64_t qkv_stride() const {
    return 3 * padded_outputs(width()) + (joins_mlp() ? round_up(config.mlp_width, kRowValues) : 0);
  }
  int64_t inner_stride() const { return round_up(width() + config.mlp_width, kRowValues); }
  int64_t code_stride(int64_t K) const { return round_up(K, kRowCodes); }
  int64_t expert_stride() const { return padded_outputs(config.moe.width); }
  int64_t expert_rows() const { return rows.count() * config.moe.top_k; }
  int64_t text_rows() const { return rows.images * rows.text; }
  int64_t image_rows() const { return rows.images * rows.image; }
  /// A row of `modulation`: 6 width of text and of image of each double block, 3 width of each single one, the last
  /// norm's scale and shift.
  float* modulation_of_double(size_t block, bool image) const {
    return modulation + padded_outputs(6 * width()) * int64_t(2 * block + (image ? 1 : 0));
  }
  float* modulation_of_single(int64_t block) const {
    return modulation_of_double(size_t(config.n_double), false) + padded_outputs(3 * width()) * block;
  }
  float* last_modulation() const { return modulation_of_single(config.n_single); }
  int64_t modulation_stride() const {
    return padded_outputs(6 * width()) * 2 * config.n_double + padded_outputs(3 * width()) * config.n_single +
           2 * padded_outputs(width());
  }

  // ---- loading ----
  CudaExperts load_experts(Binder& binder, CudaUploader& uploader, const std::string& name);
  CudaStream load_stream(Binder& binder, CudaUploader& uploader, const std::string& prefix, bool is_text);
  CudaSingle load_single(Binder& binder, CudaUploader& uploader, int64_t index);
  void load(const io::ImageCheckpoint& checkpoint, ThreadPool& pool, const CudaNetOptions& options);

  // ---- launches ----
  void mark(Part part, double flops = 0);
  /// Shows `layers` the input of a product.
  void show(const CudaLinear& linear, const CudaInput& x, const int32_t* offsets_of_groups);
  void multiply(Part part, const CudaLinear& linear, const CudaInput& x, const CudaOutput& y,
                const int32_t* offsets_of_groups = nullptr);
  /// Values as `reader` wants them; codes go to the place that all inputs but norms share.
  CudaInput input(const CudaLinear& reader, const bf16* values, int64_t stride, int64_t M, int64_t first);
  CudaInput norm(int64_t first, int64_t M, const float* shift_scale, bool values, bool quantized);
  void turn_heads(const HeadNormBuffers& norms, bf16* q, bf16* k, const bf16* v, int64_t first, int64_t M);
  void attend(const bf16* q, const bf16* k, const bf16* v, bf16* out, int64_t out_stride);
  /// hidden += gate * product.
  void add_product(Part part, const CudaLinear& linear, const CudaInput& x, const float* gate, int64_t first);
  void run_experts(const CudaExperts& experts, const CudaInput& x, int64_t first, const float* gate);
  void embed_one(const CudaEmbedder& embedder, const bf16* x, int64_t K, float* out);
  void embed();
  void run_double(size_t index);
  void run_single(size_t index);
  void finish();
  void launch(const std::function<void(const std::string& name)>& after);

  /// Bytes of a step's work space; base no nullptr: the places in it, of a step of `rows`.
  int64_t lay_out(std::byte* base);
  void reserve(const cuda::TokenRows& of);
  void upload_inputs(std::span<const Inputs> images);
  std::vector<float> hidden_values();
};

// ---- loading ----

CudaExperts CudaNet::Impl::load_experts(Binder& binder, CudaUploader& uploader, const std::string& name) {
  const kernels::WeightView gate = binder.weight(name + ".gate", config.moe.n_experts, width(), Bias::none);
  std::vector<kernels::WeightView> up, down;
  for (int64_t e = 0; e < config.moe.n_experts; ++e) {
    const std::string prefix = fmt::format("{}.experts.{}.net.", name, e);
    up.push_back(binder.weight(prefix + "0.proj", config.moe.width, width()));
    down.push_back(binder.weight(prefix + "2", width(), config.moe.width));
  }
  return {CudaLinear(uploader, {&gate, 1}), CudaLinear::grouped(uploader, up), CudaLinear::grouped(uploader, down)};
}

CudaStream CudaNet::Impl::load_stream(Binder& binder, CudaUploader& uploader, const std::string& prefix, bool is_text) {
  const std::string attention = prefix + (is_text ? "attn.add_" : "attn.to_"), end = is_text ? "_proj" : "";
  const std::string norm = prefix + (is_text ? "attn.norm_added_" : "attn.norm_");
  const std::string feed_forward = prefix + (is_text ? "ff_context" : "ff");
  const auto one = [&](const std::string& name, int64_t N, int64_t K) {
    const kernels::WeightView view = binder.weight(name, N, K);
    return CudaLinear(uploader, {&view, 1});
  };
  const int64_t W = width();
  std::vector<kernels::WeightView> of_heads;
  for (const char* part : {"q", "k", "v"}) of_heads.push_back(binder.weight(attention + part + end, W, W));
  CudaStream out;
  out.qkv = CudaLinear(uploader, of_heads);
  out.out = one(prefix + (is_text ? "attn.to_add_out" : "attn.to_out.0"), W, W);
  out.norms = {uploader.upload(binder.norm(norm + "q", config.head_dim), norm),
               uploader.upload(binder.norm(norm + "k", config.head_dim), norm)};
  if (!is_text && has_experts()) {
    out.experts = load_experts(binder, uploader, feed_forward);
    return out;
  }
  out.up = one(feed_forward + ".net.0.proj", config.mlp_width, W);
  out.down = one(feed_forward + ".net.2", W, config.mlp_width);
  return out;
}

CudaSingle CudaNet::Impl::load_single(Binder& binder, CudaUploader& uploader, int64_t index) {
  const std::string prefix = fmt::format("single_transformer_blocks.{}.", index);
  const int64_t W = width();
  const auto one = [&](const std::string& name, int64_t N, int64_t K) {
    const kernels::WeightView view = binder.weight(prefix + name, N, K);
    return CudaLinear(uploader, {&view, 1});
  };
  CudaSingle out;
  std::vector<kernels::WeightView> in;
  for (const char* part : {"attn.to_k", "attn.to_v", "attn.to_q"}) in.push_back(binder.weight(prefix + part, W, W));
  if (joins_mlp()) in.push_back(binder.weight(prefix + "proj_mlp", config.mlp_width, W));
  out.in = CudaLinear(uploader, in);
  if (mlp() > 0 && !joins_mlp()) out.up = one("proj_mlp", config.mlp_width, W);
  // All read one input; in the order in which the net on the CPU names them.
  std::vector<std::string> readers = out.in.names();
  for (const std::string& name : out.up.names())
    if (std::ranges::find(readers, name) == readers.end()) readers.push_back(name);
  if (readers.size() >= 3) std::rotate(readers.begin(), readers.begin() + 2, readers.begin() + 3);  // k, v, q
  out.in.set_names(std::move(readers)), out.up.set_names({});
  out.norms = {uploader.upload(binder.norm(prefix + "attn.norm_q", config.head_dim), prefix),
               uploader.upload(binder.norm(prefix + "attn.norm_k", config.head_dim), prefix)};
  out.out = one("proj_out", W, W + mlp());
  if (has_experts()) out.experts = load_experts(binder, uploader, prefix + "ff");
  return out;
}

namespace {

/// Device memory of all weights, blocks of weights as tensor cores read them.
int64_t device_bytes(const io::ImageCheckpoint& checkpoint) {
  int64_t out = 0;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    if (tensor.dims.size() == 1 || tensor.shape.N == 1) {
      out += padded_outputs(tensor.shape.K) * int64_t(sizeof(float));
      continue;
    }
    const kernels::WeightView view{tensor.name, tensor.layout, tensor.shape, tensor.bytes, {}, tensor.params};
    const cuda::Operation operation = operation_of_weight(view);
    out += cuda::tile_bytes(operation, tensor.shape);
    if (operation.eight_bits) out += padded_outputs(tensor.shape.N) * int64_t(sizeof(float));
  }
  return out;
}

/// Whether tensors share bytes, as those of a net of random weights do.
bool shares_bytes(const io::ImageCheckpoint& checkpoint) {
  std::set<const std::byte*> seen;
  for (const auto& [name, tensor] : checkpoint.tensors())
    if (tensor.shape.N > 1 && !seen.insert(tensor.bytes.data()).second) return true;
  return false;
}

}  // namespace

void CudaNet::Impl::load(const io::ImageCheckpoint& checkpoint, ThreadPool& pool, const CudaNetOptions& options) {
  device.use();
  if (options.plans != nullptr) plans = *options.plans;
  rows = {options.images, options.text_tokens, options.image_tokens};
  const int64_t of_weights = device_bytes(checkpoint), of_step = rows.count() > 0 ? lay_out(nullptr) : 0;
  rows = {0, 0, 0};
  device.require(of_weights + of_step, fmt::format("{}: {} MiB of weights, {} MiB of work space", checkpoint.path(),
                                                   of_weights >> 20, of_step >> 20));
  std::deque<std::vector<float>> biases;
  Binder binder(checkpoint, config, biases);
  CudaUploader uploader(device, pool, shares_bytes(checkpoint));
  std::optional<Progress> bar;
  if (options.progress) bar.emplace("Uploading", config.n_double + config.n_single, "blocks");
  const int64_t W = width();
  const auto one = [&](const std::string& name, int64_t N, int64_t K) {
    const kernels::WeightView view = binder.weight(name, N, K);
    return CudaLinear(uploader, {&view, 1});
  };
  const auto embedder = [&](const char* name, int64_t inputs) {
    const std::string prefix = fmt::format("time_text_embed.{}.linear_", name);
    return CudaEmbedder{one(prefix + "1", W, inputs), one(prefix + "2", W, W)};
  };
  latents = one("x_embedder", W, config.in_channels);
  text = one("context_embedder", W, config.text_dim);
  timestep = embedder("timestep_embedder", kTimeFrequencies);
  if (config.guidance) guidance = embedder("guidance_embedder", kTimeFrequencies);
  pooled = embedder("text_embedder", config.pooled_dim);
  std::vector<kernels::WeightView> modulations;
  for (int64_t i = 0; i < config.n_double; ++i) {
    const std::string prefix = fmt::format("transformer_blocks.{}.", i);
    for (const char* norm : {"norm1_context", "norm1"})
      modulations.push_back(binder.weight(prefix + norm + ".linear", 6 * W, W));
    CudaStream of_text = load_stream(binder, uploader, prefix, true);
    doubles.push_back({std::move(of_text), load_stream(binder, uploader, prefix, false)});
    if (bar) bar->add(1);
  }
  for (int64_t i = 0; i < config.n_single; ++i) {
    modulations.push_back(binder.weight(fmt::format("single_transformer_blocks.{}.norm.linear", i), 3 * W, W));
    singles.push_back(load_single(binder, uploader, i));
    if (bar) bar->add(1);
  }
  for (const char* part : {"scale", "shift"})
    modulations.push_back(binder.weight(fmt::format("norm_out.{}", part), W, W));
  modulate = CudaLinear(uploader, modulations);
  last = one("proj_out", config.out_channels, W);
  binder.check_all_used();
  weight_bytes = uploader.bytes();
}

// ---- launches ----

void CudaNet::Impl::mark(Part part, double flops_of_part) {
  if (marks == nullptr) return;
  marks->times.flops[size_t(part)] += flops_of_part;
  if (!marks->parts.empty() && marks->parts.back() == part) return;
  marks->marks.emplace_back().record(stream);
  marks->parts.push_back(part);
}

void CudaNet::Impl::show(const CudaLinear& linear, const CudaInput& x, const int32_t* offsets_of_groups) {
  const std::vector<std::string>& names = linear.names();
  const auto rows_of = [&](std::span<const std::string> readers, int64_t first, int64_t M) {
    if (readers.empty() || M == 0) return;
    (*layers)({readers, x.values + first * x.value_stride, M, linear.K(), x.value_stride, &stream});
  };
  if (offsets_of_groups != nullptr) {
    std::vector<int32_t> of_groups(names.size() + 1);
    stream.synchronize();
    memory.download(std::as_writable_bytes(std::span(of_groups)),
                    reinterpret_cast<const std::byte*>(offsets_of_groups) - memory.data());
    for (size_t e = 0; e < names.size(); ++e) rows_of({&names[e], 1}, of_groups[e], of_groups[e + 1] - of_groups[e]);
  } else if (&linear == &modulate) {  // matrices of different blocks
    for (const std::string& name : names) rows_of({&name, 1}, 0, x.M);
  } else {
    rows_of(names, 0, x.M);
  }
}

void CudaNet::Impl::multiply(Part part, const CudaLinear& linear, const CudaInput& x, const CudaOutput& y,
                             const int32_t* offsets_of_groups) {
  mark(part, linear.flops(x.M));
  if (marks != nullptr) {
    for (std::string& kernel : linear.explain(device.info(), plans, x, y, offsets_of_groups)) {
      std::vector<std::string>& all = marks->times.kernels[size_t(part)];
      if (std::ranges::find(all, kernel) == all.end()) all.push_back(std::move(kernel));
    }
    for (const auto& product : linear.planned(device.info(), x, y, offsets_of_groups))
      marks->times.planned.insert(product);
  }
  if (layers != nullptr) show(linear, x, offsets_of_groups);
  linear.run(device, stream, plans, x, y, offsets_of_groups,
             portable ? cuda::TensorCoreKernel::mma : cuda::TensorCoreKernel::best);
}

CudaInput CudaNet::Impl::input(const CudaLinear& reader, const bf16* values, int64_t stride, int64_t M, int64_t first) {
  CudaInput out{.values = values, .value_stride = stride, .M = M};
  if (!reader.reads_codes()) return out;
  mark(Part::quantize);
  out.code_stride = code_stride(reader.K());
  std::byte* const to = codes + first * out.code_stride;
  cuda::launch_quantize_tokens(device, stream,
                               {.type = cuda::Element::bf16,
                                .x = values,
                                .stride = stride,
                                .M = M,
                                .K = reader.K(),
                                .codes = to,
                                .code_stride = out.code_stride,
                                .scale = code_scale + first});
  out.codes = to;
  out.scale = code_scale + first;
  return out;
}

CudaInput CudaNet::Impl::norm(int64_t first, int64_t M, const float* shift_scale, bool values, bool quantized) {
  mark(Part::elementwise);
  CudaInput out{.values = normed + first * width_stride(),
                .value_stride = width_stride(),
                .codes = norm_codes + first * code_stride(width()),
                .code_stride = code_stride(width()),
                .scale = norm_scale + first,
                .M = M};
  cuda::launch_modulated_norm(device, stream,
                              {.rows = rows,
                               .first = first,
                               .M = M,
                               .width = width(),
                               .x = hidden + first * width_stride(),
                               .x_stride = width_stride(),
                               .shift = shift_scale,
                               .scale = shift_scale + width(),
                               .modulation_stride = modulation_stride(),
                               .y = values || layers != nullptr ? normed + first * width_stride() : nullptr,
                               .y_stride = width_stride(),
                               .codes = quantized ? norm_codes + first * code_stride(width()) : nullptr,
                               .code_stride = code_stride(width()),
                               .code_scale = norm_scale + first});
  return out;
}

void CudaNet::Impl::turn_heads(const HeadNormBuffers& norms, bf16* q, bf16* k, const bf16* v, int64_t first,
                               int64_t M) {
  mark(Part::elementwise);
  cuda::ImageHeadsArgs args{.rows = rows, .first = first, .M = M, .n_heads = config.n_heads};
  args.head_dim = config.head_dim, args.padded_dim = padded_dim();
  args.q = q, args.k = k, args.in_stride = qkv_stride();
  args.q_norm = norms.q.as<float>(), args.k_norm = norms.k.as<float>();
  args.cos = cos, args.sin = sin;
  args.q_out = q, args.k_out = k, args.out_stride = qkv_stride();
  if (pads_heads()) {
    const int64_t padded = config.n_heads * padded_dim(), part = rows.count() * padded;
    args.v = v;
    args.q_out = heads + first * padded, args.k_out = args.q_out + part, args.v_out = args.k_out + part;
    args.out_stride = padded;
  }
  cuda::launch_image_heads(device, stream, args);
}

void CudaNet::Impl::attend(const bf16* q, const bf16* k, const bf16* v, bf16* out, int64_t out_stride) {
  mark(Part::attention, 4.0 * double(rows.images) * double(rows.tokens()) * double(rows.tokens()) * double(width()));
  cuda::JointAttentionArgs args{.rows = rows, .n_heads = config.n_heads};
  args.head_dim = padded_dim(), args.out_dim = config.head_dim;
  args.q = q, args.k = k, args.v = v, args.stride = args.v_stride = qkv_stride();
  if (pads_heads()) {
    const int64_t padded = config.n_heads * padded_dim(), part = rows.count() * padded;
    args.q = heads, args.k = heads + part, args.v = heads + 2 * part, args.stride = args.v_stride = padded;
  }
  args.scale = float(1 / std::sqrt(double(config.head_dim)));
  args.out = out, args.out_stride = out_stride;
  if (portable) args.kernel = cuda::JointAttentionKernel::mma;
  cuda::launch_joint_attention(device, stream, args);
}

void CudaNet::Impl::add_product(Part part, const CudaLinear& linear, const CudaInput& x, const float* gate,
                                int64_t first) {
  bf16* const to = hidden + first * width_stride();
  if (rows.images == 1) return multiply(part, linear, x, {.y = to, .stride = width_stride(), .gate = gate, .add = to});
  bf16* const plain = result + first * width_stride();
  multiply(part, linear, x, {.y = plain, .stride = width_stride()});
  mark(Part::elementwise);
  cuda::launch_gated_add(device, stream,
                         {.rows = rows,
                          .first = first,
                          .M = x.M,
                          .width = width(),
                          .y = plain,
                          .y_stride = width_stride(),
                          .gate = gate,
                          .gate_stride = modulation_stride(),
                          .x = to,
                          .x_stride = width_stride()});
}

void CudaNet::Impl::run_experts(const CudaExperts& experts, const CudaInput& x, int64_t first, const float* gate) {
  const MoeConfig& moe = config.moe;
  const int64_t count = x.M * moe.top_k, logit_stride = padded_outputs(moe.n_experts);
  multiply(Part::router, experts.gate, x, {.y = logits, .stride = logit_stride, .type = cuda::Element::f32});
  cuda::RouteArgs route{.logits = logits, .logit_stride = logit_stride, .M = x.M};
  route.experts = int(moe.n_experts), route.top_k = int(moe.top_k), route.normalize = moe.normalize;
  route.expert = chosen, route.counts = counts, route.offsets = offsets;
  route.token = token, route.row = row, route.weight = share;
  cuda::launch_route(device, stream, route);
  CudaInput gathered{.values = expert_values, .value_stride = width_stride(), .M = count};
  gathered.codes = expert_codes, gathered.code_stride = code_stride(width()), gathered.scale = expert_scale;
  const int64_t value_bytes = width_stride() * int64_t(sizeof(bf16));
  if (experts.up.reads_codes())
    cuda::launch_gather_rows(device, stream,
                             {x.codes, x.code_stride, x.scale, token, count, gathered.code_stride, expert_codes,
                              gathered.code_stride, expert_scale});
  if (!experts.up.reads_codes() || layers != nullptr)
    cuda::launch_gather_rows(device, stream,
                             {reinterpret_cast<const std::byte*>(x.values), value_bytes, nullptr, token, count,
                              value_bytes, reinterpret_cast<std::byte*>(expert_values), value_bytes, nullptr});
  multiply(Part::expert_up, experts.up, gathered, {.y = expert_inner, .stride = expert_stride(), .gelu_from = 0},
           offsets);
  CudaInput activated{.values = expert_inner, .value_stride = expert_stride(), .M = count};
  if (experts.down.reads_codes()) {
    mark(Part::quantize);
    activated.codes = expert_codes, activated.code_stride = code_stride(moe.width), activated.scale = expert_scale;
    cuda::launch_quantize_tokens(device, stream,
                                 {.type = cuda::Element::bf16,
                                  .x = expert_inner,
                                  .stride = expert_stride(),
                                  .M = count,
                                  .K = moe.width,
                                  .codes = expert_codes,
                                  .code_stride = activated.code_stride,
                                  .scale = expert_scale});
  }
  const int64_t result_stride = padded_outputs(width());
  multiply(Part::expert_down, experts.down, activated, {.y = expert_result, .stride = result_stride}, offsets);
  mark(Part::elementwise);
  cuda::CombineExpertsArgs combine{.rows = rows, .first = first, .M = x.M, .width = width()};
  combine.top_k = int(moe.top_k), combine.row = row, combine.weight = share;
  combine.results = expert_result, combine.result_stride = result_stride;
  combine.gate = gate, combine.gate_stride = modulation_stride();
  combine.x = hidden + first * width_stride(), combine.x_stride = width_stride();
  cuda::launch_combine_experts(device, stream, combine);
}

void CudaNet::Impl::embed_one(const CudaEmbedder& embedder, const bf16* x, int64_t K, float* out) {
  const auto layer = [&](const CudaLinear& linear, const bf16* from, int64_t stride, float* to) {
    const CudaInput in = input(linear, from, stride, rows.images, 0);
    multiply(Part::embed, linear, in, {.y = to, .stride = width_stride(), .type = cuda::Element::f32});
  };
  layer(embedder.first, x, round_up(K, kRowValues), embedded[3]);
  cuda::launch_silu_sum(device, stream, embedded[3], nullptr, nullptr, rows.images * width_stride(), embed_inner);
  layer(embedder.second, embed_inner, width_stride(), out);
}

void CudaNet::Impl::embed() {
  const auto layer = [&](const CudaLinear& linear, const bf16* from, int64_t M, int64_t first) {
    const CudaInput in = input(linear, from, round_up(linear.K(), kRowValues), M, first);
    multiply(Part::embed, linear, in, {.y = hidden + first * width_stride(), .stride = width_stride()});
  };
  layer(text, text_in, text_rows(), 0);
  layer(latents, latents_in, image_rows(), text_rows());
  embed_one(timestep, time_in, kTimeFrequencies, embedded[0]);
  if (config.guidance) embed_one(guidance, guidance_in, kTimeFrequencies, embedded[2]);
  embed_one(pooled, pooled_in, config.pooled_dim, embedded[1]);
  cuda::launch_silu_sum(device, stream, embedded[0], embedded[1], config.guidance ? embedded[2] : nullptr,
                        rows.images * width_stride(), condition);
  // All blocks' shifts, scales and gates depend on the conditions alone.
  multiply(Part::modulation, modulate, input(modulate, condition, width_stride(), rows.images, 0),
           {.y = modulation, .stride = modulation_stride(), .type = cuda::Element::f32});
}

void CudaNet::Impl::run_double(size_t index) {
  const int64_t W = width(), part = padded_outputs(W);
  CudaDouble& block = doubles[index];
  struct Rows {
    const CudaStream& stream;
    int64_t first, count;
    const float* modulation;  // [6][width]: shift, scale and gate of the attention, then of the MLP
    bool is_text;
  };
  const Rows both[] = {{block.text, 0, text_rows(), modulation_of_double(index, false), true},
                       {block.image, text_rows(), image_rows(), modulation_of_double(index, true), false}};
  for (const Rows& r : both) {
    const CudaInput x = norm(r.first, r.count, r.modulation, r.stream.qkv.reads_values(), r.stream.qkv.reads_codes());
    bf16* const to = qkv + r.first * qkv_stride();
    multiply(r.is_text ? Part::text_qkv : Part::double_qkv, r.stream.qkv, x, {.y = to, .stride = qkv_stride()});
    turn_heads(r.stream.norms, to, to + part, to + 2 * part, r.first, r.count);
  }
  attend(qkv, qkv + part, qkv + 2 * part, inner, inner_stride());
  for (const Rows& r : both) {
    const CudaStream& s = r.stream;
    bf16* const at = inner + r.first * inner_stride();
    CudaInput x = input(s.out, at, inner_stride(), r.count, r.first);
    add_product(r.is_text ? Part::text_out : Part::double_out, s.out, x, r.modulation + 2 * W, r.first);
    if (s.experts) {
      x = norm(r.first, r.count, r.modulation + 3 * W, s.experts->up.reads_values() || s.experts->gate.reads_values(),
               s.experts->up.reads_codes() || s.experts->gate.reads_codes());
      run_experts(*s.experts, x, r.first, r.modulation + 5 * W);
      continue;
    }
    x = norm(r.first, r.count, r.modulation + 3 * W, s.up.reads_values(), s.up.reads_codes());
    multiply(r.is_text ? Part::text_up : Part::double_up, s.up, x, {.y = at, .stride = inner_stride(), .gelu_from = 0});
    x = input(s.down, at, inner_stride(), r.count, r.first);
    add_product(r.is_text ? Part::text_down : Part::double_down, s.down, x, r.modulation + 5 * W, r.first);
  }
}

void CudaNet::Impl::run_single(size_t index) {
  const int64_t W = width(), part = padded_outputs(W), M = rows.count();
  const CudaSingle& s = singles[index];
  const float* const shift_scale_gate = modulation_of_single(int64_t(index));
  bool values = s.in.reads_values(), quantized = s.in.reads_codes();
  for (const CudaLinear* reader : {&s.up, s.experts ? &s.experts->gate : nullptr, s.experts ? &s.experts->up : nullptr})
    if (reader != nullptr) values |= reader->reads_values(), quantized |= reader->reads_codes();
  const CudaInput x = norm(0, M, shift_scale_gate, values, quantized);
  bf16 *const k = qkv, *const v = qkv + part, *const q = qkv + 2 * part;
  multiply(Part::single_in, s.in, x, {.y = qkv, .stride = qkv_stride(), .gelu_from = joins_mlp() ? 3 * part : -1});
  if (mlp() > 0 && !joins_mlp())  // at column `width`, which is no multiple of 16 bytes: rows of y need not be
    multiply(Part::single_in, s.up, x, {.y = inner + W, .stride = inner_stride(), .gelu_from = 0});
  turn_heads(s.norms, q, k, v, 0, M);
  bf16* const joined = joins_mlp() ? q : inner;
  const int64_t stride = joins_mlp() ? qkv_stride() : inner_stride();
  attend(q, k, v, joined, stride);
  add_product(Part::single_out, s.out, input(s.out, joined, stride, M, 0), shift_scale_gate + 2 * W, 0);
  if (s.experts) run_experts(*s.experts, x, 0, shift_scale_gate + 2 * W);
}

void CudaNet::Impl::finish() {
  const int64_t part = padded_outputs(width()), first = text_rows(), M = image_rows();
  mark(Part::last);
  cuda::launch_modulated_norm(device, stream,
                              {.rows = rows,
                               .first = first,
                               .M = M,
                               .width = width(),
                               .x = hidden + first * width_stride(),
                               .x_stride = width_stride(),
                               .shift = last_modulation() + part,
                               .scale = last_modulation(),
                               .modulation_stride = modulation_stride(),
                               .y = normed + first * width_stride(),
                               .y_stride = width_stride()});
  const CudaInput x = input(last, normed + first * width_stride(), width_stride(), M, first);
  multiply(Part::last, last, x, {.y = result_out, .stride = config.out_channels, .type = cuda::Element::f32});
}

void CudaNet::Impl::launch(const std::function<void(const std::string& name)>& after) {
  embed();
  if (after) after("embed");
  for (size_t i = 0; i < doubles.size(); ++i) {
    run_double(i);
    if (after) after(fmt::format("transformer_blocks.{}", i));
  }
  for (size_t i = 0; i < singles.size(); ++i) {
    run_single(i);
    if (after) after(fmt::format("single_transformer_blocks.{}", i));
  }
  finish();
}

// ---- one step ----

int64_t CudaNet::Impl::lay_out(std::byte* base) {
  const int64_t B = rows.images, M = rows.count(), W = width(), Ws = width_stride();
  const int64_t rope = rows.tokens() * config.head_dim / 2;
  Arena arena;
  const auto place = [&]<class T>(T*& to, int64_t count) {
    const int64_t at = arena.add(count * int64_t(sizeof(T)));
    if (base != nullptr) to = reinterpret_cast<T*>(base + at);
  };
  place(latents_in, image_rows() * round_up(config.in_channels, kRowValues));
  place(text_in, text_rows() * round_up(config.text_dim, kRowValues));
  place(time_in, B * kTimeFrequencies), place(guidance_in, B * kTimeFrequencies);
  place(pooled_in, B * round_up(config.pooled_dim, kRowValues));
  place(cos, rope), place(sin, rope);
  for (float*& one : embedded) place(one, B * Ws);
  place(embed_inner, B * Ws), place(condition, B * Ws);
  place(modulation, B * modulation_stride());
  place(result_out, image_rows() * config.out_channels);
  place(hidden, M * Ws), place(normed, M * Ws);
  place(qkv, M * qkv_stride()), place(inner, M * inner_stride());
  if (pads_heads()) place(heads, 3 * M * config.n_heads * padded_dim());
  if (B > 1) place(result, M * Ws);
  const int64_t widest =
      std::max({W + config.mlp_width, config.text_dim, config.in_channels, config.pooled_dim, kTimeFrequencies});
  place(norm_codes, M * code_stride(W)), place(norm_scale, M);
  place(codes, std::max(M, B) * code_stride(widest)), place(code_scale, std::max(M, B));
  if (!has_experts()) return arena.bytes();
  const int64_t routed = expert_rows(), E = config.moe.n_experts;
  place(logits, M * padded_outputs(E));
  place(chosen, routed), place(counts, E * cuda::kMostRouteParts), place(offsets, E + 1), place(token, routed),
      place(row, routed);
  place(share, routed);
  place(expert_values, routed * Ws), place(expert_inner, routed * expert_stride());
  place(expert_result, routed * padded_outputs(W));
  place(expert_codes, routed * std::max(code_stride(W), code_stride(config.moe.width))), place(expert_scale, routed);
  return arena.bytes();
}

void CudaNet::Impl::reserve(const cuda::TokenRows& of) {
  if (of.images == rows.images && of.text == rows.text && of.image == rows.image) return;
  graph.reset();
  memory = {};
  ids.clear();
  rows = of;
  try {
    memory =
        cuda::Buffer(device, lay_out(nullptr),
                     fmt::format("work space of a step of {} images of {} + {} tokens", of.images, of.image, of.text));
  } catch (...) {
    rows = {0, 0, 0};
    throw;
  }
  lay_out(memory.data());
  memory.fill(0);  // what pads rows is finite
}

void CudaNet::Impl::upload_inputs(std::span<const Inputs> images) {
  const auto to_device = [&](const void* to, std::span<const std::byte> from) {
    memory.upload(from, static_cast<const std::byte*>(to) - memory.data());
  };
  /// Rows of K values of all images.
  const auto put = [&](bf16* to, int64_t K, const auto& values_of) {
    const int64_t stride = round_up(K, kRowValues);
    std::vector<bf16> all;
    for (const Inputs& image : images) {
      const auto& values = values_of(image);
      const int64_t count = int64_t(values.size()) / K;
      for (int64_t m = 0; m < count; ++m) {
        for (int64_t k = 0; k < K; ++k) all.push_back(to_bf16(values[size_t(m * K + k)]));
        all.resize(all.size() + size_t(stride - K), bf16{0});
      }
    }
    to_device(to, std::as_bytes(std::span(all)));
  };
  put(latents_in, config.in_channels, [](const Inputs& i) { return i.latents; });
  put(text_in, config.text_dim, [](const Inputs& i) { return i.text; });
  put(pooled_in, config.pooled_dim, [](const Inputs& i) { return i.pooled; });
  put(time_in, kTimeFrequencies, [](const Inputs& i) { return sinusoid(i.timestep * kTimeScale, kTimeFrequencies); });
  if (config.guidance)
    put(guidance_in, kTimeFrequencies,
        [](const Inputs& i) { return sinusoid(i.guidance * kTimeScale, kTimeFrequencies); });
  std::vector<float> all(images.front().text_ids.begin(), images.front().text_ids.end());
  all.insert(all.end(), images.front().image_ids.begin(), images.front().image_ids.end());
  if (all == ids) return;
  ids = std::move(all);
  const RopeTable table = rope_table(ids, config.rope_axes);
  to_device(cos, std::as_bytes(std::span(table.cos)));
  to_device(sin, std::as_bytes(std::span(table.sin)));
}

std::vector<float> CudaNet::Impl::hidden_values() {
  stream.synchronize();
  const int64_t M = rows.count(), W = width();
  std::vector<bf16> stored(size_t(M * width_stride()));
  memory.download(std::as_writable_bytes(std::span(stored)), reinterpret_cast<std::byte*>(hidden) - memory.data());
  std::vector<float> out;
  for (int64_t m = 0; m < M; ++m)
    for (int64_t k = 0; k < W; ++k) out.push_back(to_float(stored[size_t(m * width_stride() + k)]));
  return out;
}

CudaNet::CudaNet(const io::ImageCheckpoint& checkpoint, ThreadPool& pool, cuda::Device& device,
                 const CudaNetOptions& options)
    : impl_(std::make_unique<Impl>(read_config(checkpoint), device)) {
  impl_->load(checkpoint, pool, options);
}
CudaNet::~CudaNet() = default;

const Config& CudaNet::config() const { return impl_->config; }
int64_t CudaNet::weight_bytes() const { return impl_->weight_bytes; }

void CudaNet::predict(std::span<const Inputs> images, std::span<float> out, const Observer* observer,
                      const CudaInputObserver* layers) {
  Impl& net = *impl_;
  net.device.use();
  if (images.empty()) throw Error("a step of no images");
  const auto count = int64_t(images.size());
  const Inputs& first = images.front();
  const auto same = [](std::span<const float> a, std::span<const float> b) { return std::ranges::equal(a, b); };
  for (const Inputs& image : images) {
    check_inputs(net.config, image, int64_t(out.size()) % count == 0 ? int64_t(out.size()) / count : 0);
    if (!same(image.image_ids, first.image_ids) || !same(image.text_ids, first.text_ids))
      throw Error("images of one step need the same coordinates; run those of other sizes one after the other");
  }
  net.reserve({count, int64_t(first.text.size()) / net.config.text_dim,
               int64_t(first.latents.size()) / net.config.in_channels});
  net.upload_inputs(images);
  const auto by_blocks = [&](const Observer& use) {
    const auto text = size_t(net.text_rows() * net.width());
    net.launch([&](const std::string& name) {
      const std::vector<float> values = net.hidden_values();
      const auto all = std::span(values);
      const bool embeds = name == "embed";
      use(embeds ? "context_embedder" : name + ".text", all.first(text));
      use(embeds ? "x_embedder" : name, all.subspan(text));
    });
  };
  if (observer != nullptr || layers != nullptr) {
    const Borrowed<const CudaInputObserver*> with(net.layers, layers);
    observer != nullptr ? by_blocks(*observer) : net.launch({});
  } else {
    if (!net.graph) net.graph.emplace(net.stream, [&] { net.launch({}); });
    net.graph->launch(net.stream);
  }
  net.stream.synchronize();
  net.memory.download(std::as_writable_bytes(out), reinterpret_cast<std::byte*>(net.result_out) - net.memory.data());
  if (layout::find_non_finite(out) < 0) return;
  by_blocks([](std::string_view name, std::span<const float> values) { check_finite(values, name); });
  check_finite(out, "proj_out");
}

double largest_deviation(std::span<const float> a, std::span<const float> b, int64_t width) {
  double out = 0;
  for (size_t row = 0; row < b.size(); row += size_t(width)) {
    double difference = 0, size = 0;
    for (size_t i = row; i < row + size_t(width); ++i) {
      difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
      size += double(b[i]) * b[i];
    }
    const double deviation = difference == 0 ? 0 : std::sqrt(difference / size);
    out = std::max(out, std::isnan(deviation) ? std::numeric_limits<double>::infinity() : deviation);
  }
  return out;
}

double CudaNet::deviation() {
  Impl& net = *impl_;
  net.device.use();
  if (!net.graph) throw Error("no step has run that could be compared");
  const int64_t width = net.config.out_channels;
  std::vector<float> fast(size_t(net.image_rows() * width)), portable = fast;
  const auto results = [&](std::span<float> to) {
    net.stream.synchronize();
    net.memory.download(std::as_writable_bytes(to), reinterpret_cast<std::byte*>(net.result_out) - net.memory.data());
  };
  net.graph->launch(net.stream);
  results(fast);
  const Borrowed<bool> with(net.portable, true);
  net.launch({});
  results(portable);
  return largest_deviation(fast, portable, net.has_experts() ? int64_t(fast.size()) : width);
}

double CudaNet::time_step() {
  Impl& net = *impl_;
  net.device.use();
  if (!net.graph) throw Error("no step has run that could be timed");
  cuda::Stopwatch watch;
  watch.start(net.stream);
  net.graph->launch(net.stream);
  return watch.stop_ms(net.stream);
}

CudaPartTimes CudaNet::time_parts() {
  Impl& net = *impl_;
  net.device.use();
  if (net.rows.count() == 0) throw Error("no step has run that could be timed");
  Marks marks;
  std::optional<cuda::Graph> marked;
  {
    const Borrowed<Marks*> with(net.marks, &marks);
    marked.emplace(net.stream, [&] {
      net.launch({});
      marks.marks.emplace_back().record(net.stream);
    });
  }
  marked->launch(net.stream);
  net.stream.synchronize();
  for (size_t i = 0; i < marks.parts.size(); ++i)
    marks.times.ms[size_t(marks.parts[i])] += marks.marks[i].ms_to(marks.marks[i + 1]);
  return marks.times;
}

}  // namespace lacuna::model::flux
