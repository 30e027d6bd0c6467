#include "compress/e2e.h"

#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>

#include "compress/bits.h"
#include "compress/device.h"
#include "compress/net.h"
#include "compress/training.h"
#include "core/error.h"
#include "core/mapped_file.h"
#include "core/progress.h"
#include "io/atomic_file.h"
#include "io/json.h"
#include "solver/project.h"

namespace lacuna::compress {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

template <typename Save>
void save_atomically(const std::string& path, const Save& save) {
  torch::serialize::OutputArchive archive;
  save(archive);
  std::ostringstream out;
  archive.save_to(out);
  io::write_file_atomically(path, out.str());
}

torch::serialize::InputArchive open_archive(const std::string& path) {
  torch::serialize::InputArchive archive;
  try {
    archive.load_from(path);
  } catch (const c10::Error& error) {
    throw Error("{}: damaged ({}); remove the folder and begin anew", path, error.what_without_backtrace());
  }
  return archive;
}

/// A layer whose matrices are trained; norms and biases are as the walk left them.
struct TrainedLayer {
  std::array<std::unique_ptr<TrainedMatrix>, model::kMatrices> matrix;
  Layer layer;  // products with these

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> out;
    for (const auto& one : matrix)
      if (one)
        for (const at::Tensor& parameter : one->parameters()) out.push_back(parameter);
    return out;
  }
};

class TrainedNet {
 public:
  TrainedNet(const io::Checkpoint& checkpoint, const WalkOptions& walked) : net_(checkpoint, walked.device) {
    for (int64_t index = 0; index < net_.config().n_layers; ++index) {
      TrainedLayer one;
      one.layer = net_.load_vectors(index);
      put_vectors(read_layer(layer_path(walked.work_folder, index)), index, one.layer);
      const auto solutions = read_solutions(solutions_path(walked.work_folder, index));
      for (size_t m = 0; m < solutions.size(); ++m) {
        if (!solutions[m].code.defined()) continue;
        one.matrix[m] = std::make_unique<TrainedMatrix>(solutions[m], walked.grid, walked.device);
        one.layer.product[m] = [matrix = one.matrix[m].get()](const at::Tensor& x) { return product(x, *matrix); };
      }
      layers_.push_back(std::move(one));
    }
    head_ = net_.load_head();
  }

  const std::vector<TrainedLayer>& layers() const { return layers_; }

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> out;
    for (const TrainedLayer& layer : layers_)
      for (const at::Tensor& parameter : layer.parameters()) out.push_back(parameter);
    return out;
  }

  /// Mean nats a token of windows [windows, tokens]. learn: called for each layer, from the last, when its parameters
  /// have their gradients and nothing reads them any more; they are dropped after it. Not called where the loss is not
  /// finite.
  double run(const at::Tensor& ids, const std::function<void()>& learn = {}) {
    std::vector<at::Tensor> hidden;
    {
      const c10::NoGradGuard no_grad;
      hidden.push_back(net_.embed(ids));
      for (const TrainedLayer& layer : layers_) {
        at::Tensor next = net_.forward(layer.layer, hidden.back());
        if (!learn) hidden.clear();
        hidden.push_back(std::move(next));
      }
    }
    at::Tensor gradient;
    const double loss = head_loss(hidden.back(), ids, learn ? &gradient : nullptr);
    if (!learn || !std::isfinite(loss)) return loss;
    const c10::AutoGradMode gradients(true);
    for (size_t l = layers_.size(); l-- > 0;) {
      hidden.pop_back();
      const at::Tensor in = hidden.back().detach().set_requires_grad(l > 0);
      net_.forward(layers_[l].layer, in).backward(gradient);
      if (l > 0) gradient = in.grad();
      learn();
      drop_gradients(layers_[l].parameters());
    }
    return loss;
  }

 private:
  /// Vectors that scales of inputs were folded into (AWQ).
  void put_vectors(const PackedLayer& packed, int64_t index, Layer& layer) const {
    for (const auto& [name, vector] : vectors_of(layer, index))
      for (const PackedTensor& tensor : packed.tensors)
        if (tensor.name == name) *vector = unpack(tensor).to(net_.device());
  }

  /// The head runs over some tokens at a time: logits are wide. gradient: of the mean loss by `hidden`.
  double head_loss(const at::Tensor& hidden, const at::Tensor& ids, at::Tensor* gradient) const {
    constexpr int64_t kTokens = 256;
    const int64_t scored = ids.size(1) - 1;
    const double count = double(ids.size(0) * scored);
    const c10::AutoGradMode gradients(gradient != nullptr);
    if (gradient != nullptr) *gradient = at::zeros_like(hidden);
    double sum = 0;
    for (int64_t first = 0; first < scored; first += kTokens) {
      const int64_t tokens = std::min(kTokens, scored - first);
      const at::Tensor in = hidden.narrow(1, first, tokens).detach().clone().set_requires_grad(gradient != nullptr);
      const at::Tensor wanted = ids.narrow(1, first + 1, tokens).reshape({-1}).to(hidden.device());
      const at::Tensor loss =
          at::cross_entropy_loss(net_.logits(head_, in).flatten(0, 1), wanted, {}, at::Reduction::Sum) / count;
      if (gradient != nullptr) {
        loss.backward();
        gradient->narrow(1, first, tokens).copy_(in.grad());
      }
      sum += loss.item<double>();
    }
    return sum;
  }

  Net net_;
  std::vector<TrainedLayer> layers_;
  Head head_;
};

std::vector<int64_t> order_of(int64_t epoch, int64_t windows, uint64_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(windows));
  std::iota(order.begin(), order.end(), 0);
  Rng rng(seed * 1000003 + uint64_t(epoch));
  shuffle(order, rng);
  return order;
}

/// Settings that a checkpoint must have been made with.
std::string settings_of(const E2eOptions& options) {
  return Json{{"epochs", options.epochs}, {"lr", options.lr}, {"batch", options.batch}, {"seed", options.seed}}.dump();
}

/// What a run is at: everything that later steps depend on.
struct State {
  int64_t step = 0;
  double before = 0;
  std::vector<double> sums;  // of each epoch so far
};

void save_state(const std::string& path, const State& state, const E2eOptions& options,
                const std::vector<at::Tensor>& parameters, const torch::optim::AdamW& adam) {
  save_atomically(path, [&](torch::serialize::OutputArchive& archive) {
    archive.write("settings", c10::IValue(settings_of(options)));
    archive.write("step", c10::IValue(state.step));
    archive.write("before", c10::IValue(state.before));
    archive.write("sums", c10::IValue(state.sums));
    for (size_t i = 0; i < parameters.size(); ++i)
      archive.write("parameter" + std::to_string(i), parameters[i].detach());
    torch::serialize::OutputArchive inner;
    adam.save(inner);
    archive.write("adam", inner);
  });
}

State load_state(const std::string& path, const E2eOptions& options, std::vector<at::Tensor>& parameters,
                 torch::optim::AdamW& adam) {
  torch::serialize::InputArchive archive = open_archive(path);
  c10::IValue settings, step, before, sums;
  archive.read("settings", settings);
  if (settings.toStringRef() != settings_of(options))
    throw Error("{}: belongs to a run with other --e2e options ({}, now {}); remove it", path, settings.toStringRef(),
                settings_of(options));
  archive.read("step", step);
  archive.read("before", before);
  archive.read("sums", sums);
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor value;
    if (!archive.try_read("parameter" + std::to_string(i), value))
      throw Error("{}: belongs to other solutions of the walk ({} parameters, now {}); remove it", path, i,
                  parameters.size());
    if (value.sizes() != parameters[i].sizes())
      throw Error("{}: belongs to other solutions of the walk (parameter {} has {} values, now {}); remove it", path, i,
                  value.numel(), parameters[i].numel());
    parameters[i].copy_(value);
  }
  torch::serialize::InputArchive inner;
  archive.read("adam", inner);
  adam.load(inner);
  return {step.toInt(), before.toDouble(), sums.toDoubleVector()};
}

}  // namespace

TrainedMatrix::TrainedMatrix(const solver::Solution& solution, const solver::Grid& grid, at::Device device)
    : grid_(grid), code_bits_(grid.bits == 3 ? 4 : grid.bits), N_(solution.code.size(0)), K_(solution.code.size(1)) {
  const at::Tensor code = solver::grouped(solution.code.to(device), grid.group(K_));
  G_ = code.size(1);
  width_ = code.size(2);
  const at::Tensor kept = solution.keep.defined()
                              ? solver::grouped(solution.keep.to(device).to(at::kByte), grid.group(K_))
                              : at::ones_like(code);
  const at::Tensor first_scale = solution.scale.to(device);
  // A group whose scale is 0 holds zeros whatever its code: nothing there to train.
  const at::Tensor live = kept.any(2).logical_and(first_scale > 0);
  const at::Tensor counts = live.sum(1).cumsum(0).to(at::kCPU);
  starts_.assign(1, 0);
  starts_.insert(starts_.end(), counts.data_ptr<int64_t>(), counts.data_ptr<int64_t>() + N_);
  live_ = pack_bits(live.to(at::kByte), 1);
  const at::Tensor index = groups_of(0, N_);
  const auto of_live = [&](const at::Tensor& x) { return x.flatten(0, 1).index_select(0, index); };
  code_ = pack_bits(of_live(code), code_bits_);
  keep_ = of_live(kept);
  keep_ = keep_.all().item<bool>() ? at::Tensor() : pack_bits(keep_, 1);
  scale_ = of_live(first_scale);
  unit_ = scale_.to(at::kHalf);
  scale_.set_requires_grad(true);
  if (!grid.symmetric) offset_ = (of_live(solution.zero.to(device)) * unit_).set_requires_grad(true);
}

std::vector<at::Tensor> TrainedMatrix::parameters() const {
  std::vector<at::Tensor> out = {scale_};
  if (offset_.defined()) out.push_back(offset_);
  return out;
}

std::pair<int64_t, int64_t> TrainedMatrix::part(int64_t first, int64_t rows) const {
  const int64_t begin = starts_[size_t(first)];
  return {begin, starts_[size_t(first + rows)] - begin};
}

at::Tensor TrainedMatrix::groups_of(int64_t first, int64_t rows) const {
  return unpack_bits(live_.narrow(0, first, rows), 1, G_).flatten().nonzero().flatten();
}

at::Tensor TrainedMatrix::stored_scale(const at::Tensor& scale) const {
  // The least f16 above 0: a scale that became 0 could not come back.
  const at::Tensor exact = scale.clamp(0x1p-24, 65504).to(at::kHalf).to(at::kFloat);
  return straight_through(exact, scale);
}

at::Tensor TrainedMatrix::stored_zero(const at::Tensor& offset, int64_t first) const {
  const at::Tensor zero = offset / unit_.narrow(0, first, offset.size(0));
  return straight_through(zero.round().clamp(0, double((1 << grid_.bits) - 1)), zero);
}

at::Tensor TrainedMatrix::rows(int64_t first, int64_t rows, const std::vector<at::Tensor>& parts) const {
  const auto [begin, count] = part(first, rows);
  const at::Tensor scale = stored_scale(parts[0]);
  const at::Tensor zero =
      grid_.symmetric ? at::full_like(scale.detach(), double(1 << (grid_.bits - 1))) : stored_zero(parts[1], begin);
  const at::Tensor code = unpack_bits(code_.narrow(0, begin, count), code_bits_, width_);
  at::Tensor value = (code - zero.unsqueeze(1)) * scale.unsqueeze(1);
  if (keep_.defined()) value = value.masked_fill(unpack_bits(keep_.narrow(0, begin, count), 1, width_) == 0, 0);
  at::Tensor all = at::zeros({rows * G_, width_}, value.options());
  all.index_copy_(0, groups_of(first, rows), value);
  return all.view({rows, G_ * width_}).narrow(1, 0, K_);
}

solver::Solution TrainedMatrix::solution(const solver::Solution& from) const {
  const c10::NoGradGuard no_grad;
  const at::Tensor index = groups_of(0, N_).to(at::kCPU);
  const auto put = [&](const at::Tensor& first, const at::Tensor& now) {
    return first.flatten().index_copy(0, index, now.to(at::kCPU)).view({N_, G_});
  };
  const at::Tensor scale = put(from.scale, stored_scale(scale_)),
                   zero = grid_.symmetric ? from.zero : put(from.zero, stored_zero(offset_, 0));
  return solver::stored({from.code.to(at::kFloat), {scale, zero}}, grid_, from.keep);
}

int64_t TrainedMatrix::device_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : {live_, code_, keep_, unit_, scale_, offset_})
    if (tensor.defined()) bytes += int64_t(tensor.nbytes());
  return bytes;
}

std::string solutions_path(const std::string& work_folder, int64_t layer) {
  return fmt::format("{}/solutions-{:04}.pt", work_folder, layer);
}

void write_solutions(const std::string& path, const std::array<solver::Solution, model::kMatrices>& solutions) {
  save_atomically(path, [&](torch::serialize::OutputArchive& archive) {
    for (size_t m = 0; m < solutions.size(); ++m) {
      const solver::Solution& one = solutions[m];
      if (!one.code.defined()) continue;
      const auto write = [&](const char* what, const at::Tensor& value) {
        if (value.defined()) archive.write(fmt::format("{}_{}", what, m), value.to(at::kCPU).contiguous());
      };
      write("keep", one.keep);
      write("code", one.code);
      write("scale", one.scale);
      write("zero", one.zero);
    }
  });
}

std::array<solver::Solution, model::kMatrices> read_solutions(const std::string& path) {
  torch::serialize::InputArchive archive = open_archive(path);
  std::array<solver::Solution, model::kMatrices> out;
  for (size_t m = 0; m < out.size(); ++m) {
    const auto read = [&](const char* what, at::Tensor& value) {
      at::Tensor found;
      if (archive.try_read(fmt::format("{}_{}", what, m), found)) value = found;
    };
    read("keep", out[m].keep);
    read("code", out[m].code);
    read("scale", out[m].scale);
    read("zero", out[m].zero);
  }
  return out;
}

std::string tuned_folder(const std::string& work_folder) { return work_folder + "/tuned"; }

Json E2eReport::json() const {
  return {{"e2e",
           {{"before", before},
            {"after", after},
            {"epochs", epochs},
            {"steps", steps},
            {"resumed_steps", resumed_steps},
            {"kept", kept},
            {"seconds", seconds},
            {"device_memory_bytes", device_bytes}}}};
}

E2eReport e2e(const io::Checkpoint& checkpoint, std::span<const int32_t> ids, const Samples& samples,
              const WalkOptions& walked, const E2eOptions& options, const std::function<void(int64_t)>& after_step) {
  const auto start = Clock::now();
  const DeviceMemory memory(walked.device);
  TrainedNet net(checkpoint, walked);
  std::vector<at::Tensor> parameters = net.parameters();
  torch::optim::AdamW adam(parameters, torch::optim::AdamWOptions(options.lr).weight_decay(0));
  const int64_t windows = samples.count(), steps_of_epoch = (windows + options.batch - 1) / options.batch;

  const auto batch_of = [&](std::span<const int64_t> which) {
    std::vector<at::Tensor> rows;
    for (const int64_t w : which) {
      const auto window = ids.subspan(size_t(samples.first[size_t(w)]), size_t(samples.seq_len));
      rows.push_back(at::tensor(at::ArrayRef<int32_t>(window.data(), window.size()), at::kInt).to(at::kLong));
    }
    return at::stack(rows);
  };
  std::optional<Progress> progress;
  if (options.progress) progress.emplace("Training scales", (options.epochs * 3 + 2) * windows, "windows");
  const auto mean_loss = [&] {
    double sum = 0;
    for (int64_t w = 0; w < windows; ++w) {
      sum += net.run(batch_of(std::span(&w, 1)));
      if (progress) progress->add(1);
    }
    return sum / double(windows);
  };

  E2eReport report;
  State state;
  const std::string path = walked.work_folder + "/e2e.pt";
  if (std::filesystem::exists(path)) {
    state = load_state(path, options, parameters, adam);
    report.resumed_steps = state.step;
    if (progress) progress->add(windows + 3 * std::min(state.step * options.batch, options.epochs * windows));
  } else {
    state.before = mean_loss();
    state.sums.assign(size_t(options.epochs), 0);
  }
  report.before = state.before;
  report.steps = options.epochs * steps_of_epoch;
  while (state.step < report.steps) {
    const int64_t epoch = state.step / steps_of_epoch, first = state.step % steps_of_epoch * options.batch;
    const std::vector<int64_t> order = order_of(epoch, windows, options.seed);
    const auto which = std::span(order).subspan(size_t(first), size_t(std::min(options.batch, windows - first)));
    // Moves the parameters that have gradients: one layer's.
    const double loss = net.run(batch_of(which), [&] { adam.step(); });
    if (!std::isfinite(loss))
      throw Error("end-to-end optimisation: the loss is no longer a number at step {}; take a smaller --e2e-lr than {}",
                  state.step + 1, options.lr);
    state.sums[size_t(epoch)] += loss;
    ++state.step;
    if (progress) progress->add(3 * int64_t(which.size()));
    if (state.step % options.save_every == 0 || state.step == report.steps)
      save_state(path, state, options, parameters, adam);
    if (after_step) after_step(state.step);
  }
  for (const double sum : state.sums) report.epochs.push_back(sum / double(steps_of_epoch));
  report.after = mean_loss();
  report.kept = report.after < report.before;

  std::filesystem::create_directories(tuned_folder(walked.work_folder));
  for (size_t l = 0; l < net.layers().size(); ++l) {
    PackedLayer packed = read_layer(layer_path(walked.work_folder, int64_t(l)));
    std::array<solver::Solution, model::kMatrices> solutions;
    if (report.kept) solutions = read_solutions(solutions_path(walked.work_folder, int64_t(l)));
    for (PackedTensor& tensor : packed.tensors)
      for (size_t m = 0; m < size_t(model::kMatrices); ++m) {
        const auto& matrix = net.layers()[l].matrix[m];
        if (report.kept && matrix && tensor.name == model::tensor_name(int64_t(l), model::Matrix(m)) + ".weight")
          tensor = pack(tensor.name, matrix->solution(solutions[m]), *tensor.layout, walked.grid);
      }
    write_layer(layer_path(tuned_folder(walked.work_folder), int64_t(l)), packed);
  }
  report.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  report.device_bytes = memory.peak();
  return report;
}

}  // namespace lacuna::compress
