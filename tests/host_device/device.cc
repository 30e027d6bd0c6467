// tests/host_device/device.cc - the CUDA backend's launches done by the host, one output after the other, in the place
// of the kernels: what a decoder makes of them can be tested without a card. Devices are the host's memory. Weights in
// f32 rows and zz8, in which no product is rounded on the way.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <new>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "host_device/clock.h"
#include "host_device/peers.h"
#include "host_device/products.h"
#include "host_device/tape.h"
#include "kernels/cuda/beams.h"
#include "kernels/cuda/calibration.h"
#include "kernels/cuda/exchange.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/groups.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/plans.h"
#include "kernels/cuda/rows.h"
#include "kernels/ops.h"

namespace lacuna::cuda {
namespace {

using test::Tape;
using test::tape;

/// Runs now, or, while a graph is recorded, with it.
void enqueue(std::function<void()> work) {
  if (tape() != nullptr)
    tape()->push_back(std::move(work));
  else
    work();
}

float silu(float v) { return v / (1 + std::exp(-v)); }

void preset(const Preset& p) {
  for (int64_t i = 0; i < p.count; ++i)
    p.data[i] = p.values != nullptr ? p.values[p.period > 0 ? i % p.period : i] : 0.0f;
}

/// norm(x) * weight (+ bias), [K].
void normed(const float* x, const float* weight, const float* bias, float eps, int64_t K, float* y) {
  double mean = 0, squares = 0;
  for (int64_t k = 0; k < K && bias != nullptr; ++k) mean += double(x[k]) / double(K);
  for (int64_t k = 0; k < K; ++k) squares += (double(x[k]) - mean) * (double(x[k]) - mean);
  const double inverse = 1 / std::sqrt(squares / double(K) + double(eps));
  for (int64_t k = 0; k < K; ++k)
    y[k] = float((double(x[k]) - mean) * inverse * double(weight[k]) + (bias != nullptr ? double(bias[k]) : 0.0));
}

const float* f32_row(const Rows& rows, int64_t n) {
  if (rows.layout->id != layout::Id::f32) throw Error("the host's device reads f32 rows, not {}", rows.layout->name);
  return reinterpret_cast<const float*>(rows.data + n * row_places(*rows.layout, rows.K).row_bytes);
}

/// Weight of output 256 r + n and input k.
float zz8_weight(const Columns& w, int64_t r, int64_t n, int64_t k) {
  constexpr int kPlaces[] = {0, 1, 4, 5, 2, 3, 6, 7};
  const std::byte* const codes = w.codes + (r * w.K + k) * 256;
  f16 scale;
  std::memcpy(&scale, w.headers + (r * w.K + k) * 16 + n / 32 * 2, sizeof(scale));
  const auto code = uint8_t(codes[n / 8 * 8 + kPlaces[n % 8]]);
  return to_float(scale) * float(int(code) - 128);
}

void check_zz8(const layout::Layout& layout) {
  if (layout.id != layout::Id::zz8) throw Error("the host's device reads zz8, not {}", layout.name);
}

bool active(float x, float threshold, const float* norms, int64_t k) {
  return !((norms != nullptr ? std::abs(x) * norms[k] : std::abs(x)) < threshold);
}

/// One head: norm, then rotary embedding of position `at`.
void turn(const Heads& h, const float* norm, int64_t at, float* v) {
  if (norm != nullptr) normed(v, norm, nullptr, h.norm_eps, h.head_dim, v);
  const int64_t half = h.n_rot / 2;
  for (int64_t i = 0; i < half; ++i) {
    float &a = v[h.adjacent ? 2 * i : i], &b = v[h.adjacent ? 2 * i + 1 : i + half];
    const float c = h.cos[at * half + i], s = h.sin[at * half + i], before = a;
    a = before * c - b * s;
    b = before * s + b * c;
  }
}

/// Where the keys and values of token m's text at a position are, of a key head.
struct CachePlace {
  f16 *keys, *values;
};
CachePlace cache_place(const Heads& h, int64_t m, int64_t head, int64_t at) {
  const BeamCache& beams = h.beams;
  if (beams.keys == nullptr || at < *beams.first) {
    const int64_t place = (head * h.cache.capacity + at) * h.head_dim;
    return {h.cache.keys + place, h.cache.values + place};
  }
  const int64_t apart = at - *beams.first, slot = beams.sources[apart] >> (8 * m) & 255;
  if (apart >= beams.capacity) throw Error("a position that the beams' cache has no room for");
  const int64_t place = ((slot * h.n_kv_heads + head) * beams.capacity + apart) * h.head_dim;
  return {beams.keys + place, beams.values + place};
}
int64_t position_of(const Heads& h, int64_t m) { return *h.position + (h.beams.keys != nullptr ? 0 : m); }

void heads(const Heads& h, float* q) {
  const int64_t d = h.head_dim;
  std::vector<float> key(static_cast<size_t>(d));
  for (int64_t m = 0; m < h.M; ++m) {
    const int64_t at = position_of(h, m);
    for (int64_t head = 0; head < h.n_heads; ++head) turn(h, h.q_norm, at, q + m * h.q_stride + head * d);
    for (int64_t head = 0; head < h.n_kv_heads; ++head) {
      std::copy_n(h.k + m * h.kv_stride + head * d, d, key.begin());
      turn(h, h.k_norm, at, key.data());
      const CachePlace to = cache_place(h, m, head, at);
      for (int64_t i = 0; i < d; ++i) {
        to.keys[i] = to_f16(key[size_t(i)]);
        to.values[i] = to_f16(h.v[m * h.kv_stride + head * d + i]);
      }
    }
  }
}

/// Of turned queries.
void attend(const Heads& h, const float* q, int64_t window, float scale, float* out, int64_t out_stride) {
  const int64_t d = h.head_dim;
  for (int64_t m = 0; m < h.M; ++m) {
    const int64_t at = position_of(h, m), first = window > 0 ? std::max<int64_t>(0, at - window + 1) : 0;
    for (int64_t head = 0; head < h.n_heads; ++head) {
      const int64_t kv = head / (h.n_heads / h.n_kv_heads);
      std::vector<double> weight;
      for (int64_t p = first; p <= at; ++p) {
        double dot = 0;
        const f16* const key = cache_place(h, m, kv, p).keys;
        for (int64_t i = 0; i < d; ++i) dot += double(q[m * h.q_stride + head * d + i]) * double(to_float(key[i]));
        weight.push_back(dot * double(scale));
      }
      const double most = *std::max_element(weight.begin(), weight.end());
      double sum = 0;
      for (double& w : weight) sum += w = std::exp(w - most);
      for (int64_t i = 0; i < d; ++i) {
        double value = 0;
        for (int64_t p = first; p <= at; ++p)
          value += weight[size_t(p - first)] * double(to_float(cache_place(h, m, kv, p).values[i]));
        out[m * out_stride + head * d + i] = float(value / sum);
      }
    }
  }
}

int64_t whole(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

/// Operands are rows of floats here.
float* operand_row(const Operand& o, int64_t row) {
  return reinterpret_cast<float*>(o.tiles) + row * whole(o.K, kOperandColumns);
}

}  // namespace

Device::Device(const DeviceOptions& options) {
  info_.name = "host";
  info_.major = 9;
  info_.index = options.index;
  info_.multiprocessors = 4;
  info_.memory_bytes = int64_t{1} << 34;
}
void Device::use() const {}
int64_t Device::free_bytes() const { return info_.memory_bytes; }
void Device::require(int64_t, std::string_view) const {}
Buffer::Buffer(Device& device, int64_t bytes, std::string_view)
    : device_(&device),
      data_(static_cast<std::byte*>(::operator new (size_t(bytes), std::align_val_t{256}))),
      bytes_(bytes) {
  std::memset(data_, 0xff, size_t(bytes));  // NaN: what is not written shows
}
Buffer::~Buffer() {
  if (data_ != nullptr) ::operator delete (data_, std::align_val_t{256});
}
void Buffer::upload(std::span<const std::byte> from, int64_t at) {
  if (!from.empty()) std::memcpy(data_ + at, from.data(), from.size());
}
void Buffer::download(std::span<std::byte> to, int64_t at) const {
  if (!to.empty()) std::memcpy(to.data(), data_ + at, to.size());
}
void Buffer::copy_within(int64_t from, int64_t to, int64_t bytes) {
  std::memmove(data_ + to, data_ + from, size_t(bytes));
}
void Buffer::fill(uint8_t byte) { std::memset(data_, byte, size_t(bytes_)); }
Stream::Stream(Device&, bool) {}
Stream::~Stream() {}
void Stream::synchronize() {}
bool Stream::idle() const { return true; }
void Stream::wait(const Event&) {}
Event::Event() {}
Event::~Event() {}
void Event::record(Stream&) {}
Mark::Mark() {}
Mark::~Mark() {}
void Mark::record(Stream&) {}
double Mark::ms_to(const Mark&) const { return 1; }
Graph::Graph(Stream& stream, const std::function<void()>& record) {
  Stream* const streams[] = {&stream};
  std::swap(handle_, together(streams, record).front().handle_);
}
Graph::~Graph() { delete reinterpret_cast<Tape*>(handle_); }
void Graph::launch(Stream&) {
  for (const auto& work : *reinterpret_cast<Tape*>(handle_)) work();
}
// The first stream's graph does the work of all.
std::vector<Graph> Graph::together(std::span<Stream* const> streams, const std::function<void()>& record) {
  std::vector<Graph> out;
  for (size_t i = 0; i < streams.size(); ++i) {
    Graph graph;
    graph.handle_ = reinterpret_cast<CUgraphExec_st*>(new Tape);
    out.push_back(std::move(graph));
  }
  tape() = reinterpret_cast<Tape*>(out.front().handle_);
  try {
    record();
  } catch (...) {
    tape() = nullptr;
    throw;
  }
  tape() = nullptr;
  return out;
}
Stopwatch::Stopwatch() {}
Stopwatch::~Stopwatch() {}
void Stopwatch::start(Stream&) { test::clock().ms = 0; }
double Stopwatch::stop_ms(Stream&) { return 1 + test::clock().ms; }
double measure_read_gb_s(Device&, Stream&, const Buffer&) { return 1; }
double measure_read_gb_s(Device&) { return 1; }

bool reaches(const Device& device, const Device& peer) {
  return test::peers().reach && device.info().index != peer.info().index;
}
void prepare_exchange(const Device&, std::span<const Device* const> all) { test::peers().prepared += int(all.size()); }
StopFlag::StopFlag() : word_(new uint32_t(0)) {}
StopFlag::~StopFlag() { delete word_; }
void StopFlag::raise() noexcept { *word_ = 1; }
// The last member's launch does the work of all.
void launch_exchange(const Device&, Stream&, const ExchangeArgs& args) {
  static std::vector<ExchangeArgs> all;
  ++test::peers().launches;
  if (args.self != int(all.size()) || args.count > kMostExchanged) throw Error("an exchange out of order");
  all.push_back(args);
  if (int(all.size()) < args.members) return;
  const auto members = std::exchange(all, {});
  if (!test::peers().see) return;
  enqueue([members] {
    for (const ExchangeArgs& from : members)
      for (const ExchangeArgs& to : members)
        if (from.self != to.self)
          std::copy_n(from.data + from.self * from.stride, from.count, to.data + from.self * to.stride);
  });
}

GemvPlan default_plan(const DeviceInfo&, const layout::Layout&, const Columns&, Inputs) { return {}; }
std::span<const GemvPlan> kernel_plans(const layout::Layout&) { return {}; }

void launch_gemv(const Device&, Stream&, const layout::Layout& layout, const GemvPlan&, const GemvArgs& a) {
  check_zz8(layout);
  enqueue([a] {
    const bool sparse = a.inputs == Inputs::threshold;
    std::vector<double> x;
    for (int64_t k = 0; k < a.weights.K; ++k) {
      const float v = a.up != nullptr ? silu(a.x[k]) * a.up[k] : a.x[k];
      x.push_back(sparse && !active(v, a.threshold, a.norms, k) ? 0.0 : double(v));
    }
    for (int64_t i = 0; i < a.zero_count; ++i) a.zero[i] = 0;
    for (int64_t n = 0; n < 256 * a.weights.rows; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < a.weights.K; ++k)
        sum += x[size_t(k)] * double(zz8_weight(a.weights, n / 256, n % 256, k));
      if (a.workspace.partial != nullptr)
        a.y[n] = float(sum + (a.workspace.start != nullptr ? double(a.workspace.start[n]) : 0.0));
      else
        a.y[n] = float(double(a.y[n]) + sum);
    }
  });
}

int few_segments(const DeviceInfo&, const Columns&) { return 1; }
void launch_gemv_few(const Device&, Stream&, const layout::Layout& layout, const GemvFewArgs& a) {
  check_zz8(layout);
  enqueue([a] {
    for (int64_t m = 0; m < a.M; ++m) {
      for (int64_t n = 0; n < 256 * a.weights.rows; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < a.weights.K; ++k)
          sum += double(a.x[m * a.x_stride + k]) * double(zz8_weight(a.weights, n / 256, n % 256, k));
        float& y = a.y[m * a.y_stride + n];
        if (a.workspace.partial != nullptr)
          y = float(sum + (a.workspace.start != nullptr ? double(a.workspace.start[n]) : 0.0));
        else
          y = float(double(y) + sum);
      }
    }
  });
}

// Group-sparse products are asked for, timed by the test's clock, and add nothing.
void launch_groups(const Device&, Stream&, const layout::Layout& layout, const GroupsPlan& plan, const GroupsArgs& a) {
  check_plan({layout.id, a.weights.panels, a.weights.K, a.weights.group}, plan);
  enqueue([plan, a] {
    for (int64_t i = 0; i < a.zero_count; ++i) a.zero[i] = 0;
    for (int64_t n = 0; n < 256 * a.weights.panels && a.workspace.partial != nullptr; ++n)
      a.y[n] = a.workspace.start != nullptr ? a.workspace.start[n] : 0.0f;
    if (test::clock().of_groups) test::clock().ms += test::clock().of_groups(plan, a.weights);
  });
}

void launch_rows(const Device&, Stream&, const RowsArgs& args) {
  std::vector<RowsPart> parts(args.parts.begin(), args.parts.end());
  RowsArgs a = args;
  a.parts = {};
  enqueue([a, parts] {
    for (const RowsPart& part : parts) {
      for (int64_t n = 0; n < part.weights.N; ++n) {
        const float* const w = f32_row(part.weights, n);
        for (int64_t m = 0; m < a.M; ++m) {
          const float* const x = a.x + m * a.x_stride;
          double sum = part.bias != nullptr ? double(part.bias[n]) : 0.0;
          for (int64_t k = 0; k < part.weights.K; ++k)
            if (a.threshold <= 0 || active(x[k], a.threshold, a.norms, k)) sum += double(x[k]) * double(w[k]);
          part.y[m * a.y_stride + n] = float(sum);
        }
      }
    }
  });
}

void launch_embed(const Device&, Stream&, const Rows& rows, const int32_t* ids, int64_t M, float* out) {
  enqueue([=] {
    for (int64_t m = 0; m < M; ++m) std::copy_n(f32_row(rows, ids[m]), rows.K, out + m * rows.K);
  });
}

void launch_norm(const Device&, Stream&, const NormArgs& a) {
  enqueue([a] {
    for (int64_t m = 0; m < a.M; ++m) {
      float* const x = a.x + m * a.K;
      for (int64_t k = 0; k < a.K && a.add != nullptr; ++k) {
        const int64_t at = m * (a.add_row > 0 ? a.add_row : a.K) + k;
        float sum = a.add[at];
        for (int part = 1; part < a.parts; ++part) sum += a.add[part * a.add_stride + at];
        x[k] += sum;
      }
      normed(x, a.weight, a.bias, a.eps, a.K, a.y + m * a.K);
    }
    preset(a.preset);
  });
}

void launch_gate(const Device&, Stream&, const GateArgs& a) {
  enqueue([a] {
    for (int64_t k = 0; k < a.count; ++k)
      a.out[k] = a.gate == Gate::swiglu ? silu(a.x[k]) * a.up[k] : std::max(a.x[k], 0.0f);
    preset(a.preset);
  });
}

void launch_add(const Device&, Stream&, const float* y, int64_t count, float* x, int parts, int64_t stride) {
  enqueue([=] {
    for (int64_t k = 0; k < count; ++k) {
      float sum = y[k];
      for (int part = 1; part < parts; ++part) sum += y[part * stride + k];
      x[k] += sum;
    }
  });
}

void launch_heads(const Device&, Stream&, const Heads& h) {
  enqueue([h] { heads(h, h.q); });
}
int64_t attention_workspace_bytes(const Device&, int64_t, int64_t, int64_t, int64_t) { return 16; }
void launch_attention(const Device&, Stream&, const AttentionArgs& a) {
  enqueue([a] {
    const int64_t row = a.heads.n_heads * a.heads.head_dim;
    std::vector<float> q(a.heads.q, a.heads.q + (a.heads.M - 1) * a.heads.q_stride + row);
    heads(a.heads, q.data());
    attend(a.heads, q.data(), a.window, a.scale, a.out, a.heads.q_stride);
    preset(a.preset);
  });
}
void launch_batch_attention(const Device&, Stream&, const BatchAttentionArgs& a) {
  enqueue([a] { attend(a.heads, a.heads.q, a.window, a.scale, a.out, a.out_stride); });
}

int64_t argmax_workspace_bytes(int64_t) { return 16; }
void launch_argmax(const Device&, Stream&, const ArgmaxArgs& a) {
  enqueue([a] {
    *a.ids = int32_t(std::max_element(a.x, a.x + a.N) - a.x);
    *a.position += 1;
  });
}
int64_t top_k_workspace_bytes(int64_t, int64_t) { return 16; }
void launch_top_k(const Device&, Stream&, const TopKArgs& a) {
  enqueue([a] {
    for (int64_t m = 0; m < a.M; ++m) {
      const float* const x = a.x + m * a.N;
      TopKCandidate* const out = a.out + m * (a.k + 1);
      std::vector<int32_t> order;
      for (int64_t id = 0; id < a.N; ++id) order.push_back(int32_t(id));
      std::ranges::stable_sort(order, std::greater(), [&](int32_t id) { return x[id]; });
      for (int i = 0; i < a.k; ++i) out[i] = {x[order[size_t(i)]], order[size_t(i)]};
      out[a.k].id = -1;
    }
  });
}
int64_t log_sum_exp_workspace_bytes(int64_t, int64_t) { return 16; }
void launch_log_sum_exp(const Device&, Stream&, const LogSumExpArgs& a) {
  enqueue([a] {
    for (int64_t m = 0; m < a.M; ++m) a.out[m] = kernels::log_sum_exp(a.x + m * a.N, a.N);
  });
}
void launch_order_beams(const Device&, Stream&, const BeamStep* step, uint32_t* sources, int64_t capacity) {
  enqueue([=] {
    const int64_t last = step->position - step->first;
    if (last >= capacity) throw Error("a step of beams for which there is no room");
    for (int64_t i = 0; i <= last; ++i) {
      uint32_t of_new = 0;
      for (uint32_t b = 0; b < uint32_t(kMostBeams); ++b) {
        const uint32_t slot = i == last ? b : sources[i] >> (8 * (step->parents >> (4 * b) & 15)) & 255;
        of_new |= slot << (8 * b);
      }
      sources[i] = of_new;
    }
  });
}
void launch_count_inactive(const Device&, Stream&, const float* x, int64_t K, const float* norms, float t,
                           unsigned long long* count) {
  enqueue([=] {
    for (int64_t k = 0; k < K; ++k) *count += !active(x[k], t, norms, k);
  });
}

void launch_gate_rows(const Device&, Stream&, const GateRowsArgs& a) {
  enqueue([a] {
    for (int64_t m = 0; m < a.M; ++m)
      for (int64_t k = 0; k < a.K; ++k) {
        const float x = a.x[m * a.stride + k];
        a.y[m * a.K + k] = a.gate == Gate::swiglu ? silu(x) * a.up[m * a.stride + k] : std::max(x, 0.0f);
      }
    preset(a.preset);
  });
}
void launch_count_sizes(const Device&, Stream&, const CountSizesArgs& a) {
  for (int64_t i = 0; i < a.M * a.K; ++i) {
    const float size = std::abs(a.norms != nullptr ? a.x[i] * a.norms[i % a.K] : a.x[i]);
    ++a.bins[std::bit_cast<uint32_t>(size) >> kSizeShift];
  }
}
void launch_find_non_finite(const Device&, Stream&, const float* x, int64_t count, uint32_t* first) {
  const auto bad = std::find_if(x, x + count, [](float v) { return !std::isfinite(v); });
  if (bad != x + count) *first = std::min(*first, uint32_t(bad - x));
}
void launch_mask_rows(const Device&, Stream&, const MaskRowsArgs& a) {
  for (int64_t i = 0; i < a.M * a.K; ++i) {
    const bool out = (a.first + i / a.K) % a.window >= a.dense && !active(a.x[i], a.t, a.norms, i % a.K);
    a.y[i] = out ? 0.0f : a.x[i];
    if (a.inactive != nullptr) *a.inactive += out;
  }
}
void launch_squared_distance(const Device&, Stream&, const float* a, const float* b, int64_t count, double* parts) {
  std::fill_n(parts, kDistanceParts, 0.0);
  for (int64_t i = 0; i < count; ++i)
    parts[i % kDistanceParts] += (double(a[i]) - double(b[i])) * (double(a[i]) - double(b[i]));
}

int64_t operand_bytes(int64_t rows, int64_t K) {
  return whole(rows, kOperandRows) * whole(K, kOperandColumns) * int64_t(sizeof(float));
}
void launch_gemm_inputs(const Device&, Stream&, const GemmInputs& a) {
  for (int64_t m = 0; m < a.to.rows; ++m) {
    const float* const x = a.x + m * a.stride;
    const float* const up = a.up != nullptr ? a.up + m * a.stride : nullptr;
    float* const to = operand_row(a.to, m);
    if (a.norm != nullptr) {
      normed(x, a.norm, a.norm_bias, a.eps, a.to.K, to);
      continue;
    }
    for (int64_t k = 0; k < a.to.K; ++k)
      to[k] = a.gate == Gate::swiglu ? silu(x[k]) * up[k] : a.gate == Gate::relu ? std::max(x[k], 0.0f) : x[k];
  }
}
void launch_weight_scales(const Device&, Stream&, const layout::Layout&, const Columns&, float*) {}
void launch_weight_scales(const Device&, Stream&, const Rows&, float*) {}
void launch_gemm_weights(const Device&, Stream&, const layout::Layout& layout, const Groups&, int64_t, const Operand&) {
  check_zz8(layout);
}
void launch_gemm_weights(const Device&, Stream&, const layout::Layout& layout, const Columns& weights, int64_t first,
                         const Operand& to) {
  check_zz8(layout);
  for (int64_t n = 0; n < to.rows; ++n)
    for (int64_t k = 0; k < to.K; ++k)
      operand_row(to, n)[k] = zz8_weight(weights, (first + n) / 256, (first + n) % 256, k);
}
void launch_gemm_weights(const Device&, Stream&, const Rows& weights, int64_t first, const Operand& to) {
  for (int64_t n = 0; n < to.rows; ++n) std::copy_n(f32_row(weights, first + n), to.K, operand_row(to, n));
}
void launch_gemm(const Device&, Stream&, const GemmArgs& a) {
  test::Products& products = test::products();
  ++products.count, products.most_outputs = std::max(products.most_outputs, a.w.rows);
  for (int64_t m = 0; m < a.x.rows; ++m) {
    for (int64_t n = 0; n < a.w.rows; ++n) {
      double sum = a.bias != nullptr ? double(a.bias[n]) : 0.0;
      const float *const x = operand_row(a.x, m), *const w = operand_row(a.w, n);
      for (int64_t k = 0; k < a.x.K; ++k) sum += double(x[k]) * double(w[k]);
      float& y = a.y[m * a.stride + n];
      y = a.add ? float(double(y) + sum) : float(sum);
    }
  }
}

}  // namespace lacuna::cuda
