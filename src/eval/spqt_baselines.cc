#include "eval/spqt_baselines.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/skip_rows.h"
#include "layout/zigzag.h"

namespace lacuna::eval {
namespace {

constexpr int64_t kBlock = 32;  // inputs of a q4_K block
constexpr int64_t kRowsPerTask = 32;
constexpr int64_t kSuper = layout::kSuperRows;

bool active(float x, float threshold) { return !(std::fabs(x) < threshold); }

const cpu::ZigzagKernel& kernel_of(const kernels::WeightView& weight) {
  const cpu::ZigzagTable& table = cpu::zigzag_table(cpu::isa());
  for (int i = 0; i < table.count; ++i)
    if (table.kernels[i].id == weight.layout->id) return table.kernels[i];
  throw Error("{}: baseline B2 is for zigzag layouts, this is {}", weight.name, weight.layout->name);
}

}  // namespace

SkippingRows::SkippingRows(const kernels::WeightView& weight, ThreadPool& pool) : weight_(weight), pool_(pool) {
  if (weight.layout->id != layout::Id::q4_K)
    throw Error("{}: baseline B1 is for q4_K, this is {}", weight.name, weight.layout->name);
  kernels::check_weights({&weight_, 1});
  const auto K = size_t(weight.shape.K);
  start_.resize(K / kBlock + 1);
  sum_.resize(K / kBlock);
  place_.resize(K);
  active_.resize(K);
}

void SkippingRows::run(const float* x, float threshold, float* y) {
  const auto [N, K] = weight_.shape;
  int32_t count = 0;
  for (int64_t b = 0; b < K / kBlock; ++b) {
    start_[size_t(b)] = count;
    float sum = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      const float value = x[b * kBlock + i];
      if (!active(value, threshold)) continue;
      place_[size_t(count)] = uint8_t(i);
      active_[size_t(count++)] = value;
      sum += value;
    }
    sum_[size_t(b)] = sum;
  }
  start_.back() = count;
  cpu::SkipRowsArgs args;
  args.weight = weight_.bytes.data();
  args.K = K;
  args.start = start_.data();
  args.place = place_.data();
  args.x = active_.data();
  args.sum = sum_.data();
  args.y = y;
  pool_.parallel_for(N, kRowsPerTask, [&](int64_t begin, int64_t end) {
    cpu::SkipRowsArgs rows = args;
    rows.row0 = begin;
    rows.row1 = end;
    LACUNA_CPU_SELECT(skip_rows_q4_K)(rows);
  });
}

UnbalancedZigzag::UnbalancedZigzag(const kernels::WeightView& weight, ThreadPool& pool)
    : weight_(weight), pool_(pool), kernel_(kernel_of(weight)), rows_(layout::super_rows(weight.shape.N)) {
  kernels::check_weights({&weight_, 1});
  if (layout::ZigzagMap(weight.shape, weight.params).tiles() > 1)
    throw Error("{}: baseline B2 takes whole columns, these are cut into tiles of {} rows", weight.name,
                weight.params.tile_rows);
  sums_ = HugeBuffer(size_t(pool.size() * rows_ * (kSuper + cpu::kZigzagMins)) * sizeof(float));
}

void UnbalancedZigzag::run_worker(const float* x, float threshold, int worker) {
  float* sums = reinterpret_cast<float*>(sums_.data()) + worker * rows_ * (kSuper + cpu::kZigzagMins);
  std::memset(sums, 0, size_t(rows_ * (kSuper + cpu::kZigzagMins)) * sizeof(float));
  int32_t columns[kFound];
  float inputs[kFound];
  cpu::ZigzagArgs args;
  args.run = {weight_.bytes.data(), rows_ * kernel_.bytes, rows_};
  args.columns = columns;
  args.x = inputs;
  args.y = sums;
  args.mins = sums + rows_ * kSuper;
  const auto multiply = [&] {
    if (args.count > 0) kernel_.accumulate(args);
    args.count = 0;
  };
  const int64_t K = weight_.shape.K;
  for (int64_t k = K * worker / pool_.size(), end = K * (worker + 1) / pool_.size(); k < end; ++k) {
    if (!active(x[k], threshold)) continue;
    columns[args.count] = int32_t(k);
    inputs[args.count++] = x[k];
    if (args.count == kFound) multiply();
  }
  multiply();
}

void UnbalancedZigzag::run(const float* x, float threshold, float* y) {
  pool_.run([&](int worker) { run_worker(x, threshold, worker); });
  const auto* sums = reinterpret_cast<const float*>(sums_.data());
  const int64_t step = rows_ * (kSuper + cpu::kZigzagMins);
  pool_.parallel_for(rows_, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float whole[kSuper];
      kernel_.finish(sums + r * kSuper, step, sums + rows_ * kSuper + r * cpu::kZigzagMins, step, pool_.size(), whole);
      std::copy_n(whole, std::min(kSuper, weight_.shape.N - r * kSuper), y + r * kSuper);
    }
  });
}

}  // namespace lacuna::eval
