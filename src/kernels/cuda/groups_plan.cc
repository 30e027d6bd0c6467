// src/kernels/cuda/groups_plan.cc - what can be said of plans in every build.
#include <algorithm>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/groups.h"

namespace lacuna::cuda {

std::string describe(const GroupsPlan& plan) {
  constexpr const char* kMath[] = {"tensor cores", "multiply-adds", "byte products"};
  return fmt::format("{}, {} blocks, {} warps, {} resident, {}, {} early",
                     plan.split == Split::stream ? "stream-K" : "slice-K", plan.blocks, plan.warps, plan.resident,
                     kMath[int(plan.math)], plan.early);
}

Upcoming upcoming(const layout::Layout& layout, const Groups& weights, const GroupsPlan& plan) {
  if (plan.early < 1 || plan.blocks < 1 || weights.count < 1) return {};
  const bool units = weights.are_units();  // a range is a warp's; chunks: a block's, whose warps take them in turn
  const auto shares = uint32_t(units ? plan.blocks * plan.warps : plan.blocks);
  const auto count = uint32_t(weights.count);
  Upcoming out;
  out.records = weights.chunks;
  out.record_bytes = uint32_t(units ? UnitForm(layout.bits).bytes : GroupForm(layout.bits, int(weights.group)).bytes);
  out.shares = shares, out.of_share = count / shares, out.larger = count % shares;
  out.early = uint32_t(std::min<int64_t>(count, int64_t{plan.early} * (units ? 1 : plan.warps)));
  return out;
}

Groups laid_out(const PreparedGroups& w, const std::byte* base) {
  std::vector<const std::byte*> at;
  each_part(w, [&](int64_t offset, std::span<const std::byte> bytes) {
    at.push_back(bytes.empty() ? nullptr : base + offset);
  });
  Groups out;
  out.chunks = at[0];
  out.start = reinterpret_cast<const uint32_t*>(at[1]);
  out.bound = reinterpret_cast<const float*>(at[2]);
  out.quads = reinterpret_cast<const Quad*>(at[3]);
  out.quad_of = reinterpret_cast<const uint32_t*>(at[4]);
  out.panels = w.panels, out.K = w.K, out.group = w.group;
  out.count = w.quads.empty() ? w.start.back() : int64_t(w.quad_of.size());
  out.quad_count = int64_t(w.quads.size());
  return out;
}

int64_t laid_out_bytes(const PreparedGroups& w) {
  int64_t end = 0;
  each_part(w, [&](int64_t at, std::span<const std::byte> bytes) { end = at + int64_t(bytes.size()); });
  return end;
}

int64_t group_inputs_bytes(int64_t K) { return ((K + kUnit - 1) / kUnit + 1) * 48; }

std::span<const GroupsPlan> groups_plans(const layout::Layout& layout, bool units) {
  static constexpr GroupsPlan kUnits[] = {{16, 32, Split::stream, Math::dot, 0},
                                          {8, 32, Split::stream, Math::dot, 0},
                                          {24, 24, Split::stream, Math::dot, 0},
                                          {12, 24, Split::stream, Math::dot, 0}};
  // Codes of 8 bits and values need more registers.
  static constexpr GroupsPlan kNarrow[] = {{8, 24, Split::stream, Math::mma, 0},
                                           {24, 24, Split::stream, Math::mma, 0},
                                           {8, 16, Split::stream, Math::mma, 0}};
  static constexpr GroupsPlan kWide[] = {{8, 16, Split::stream, Math::mma, 0}, {16, 16, Split::stream, Math::mma, 0}};
  if (units) return kUnits;
  if (layout.bits > 4) return kWide;
  return kNarrow;
}

GroupsPlan filled(const DeviceInfo& device, const Groups& weights, GroupsPlan plan) {
  const int64_t room = int64_t{device.multiprocessors} * plan.resident / plan.warps;
  if (weights.are_units())
    plan.blocks = int(std::clamp<int64_t>(weights.quad_count, 1, room));
  else if (plan.split == Split::stream)
    plan.blocks = int(std::clamp<int64_t>(weights.count, 1, room));
  else
    plan.blocks = int(std::max<int64_t>(1, room / std::max<int64_t>(1, weights.panels)) * weights.panels);
  return plan;
}

GroupsPlan fitted(const Groups& weights, GroupsPlan plan) {
  const int64_t panels = std::max<int64_t>(1, weights.panels);
  if (!weights.are_units() && plan.split == Split::slice)
    plan.blocks = int(std::max<int64_t>(1, plan.blocks / panels) * panels);
  else
    plan.blocks = int(std::clamp<int64_t>(
        plan.blocks, 1, std::max<int64_t>(1, weights.are_units() ? weights.quad_count : weights.count)));
  return plan;
}

GroupsPlan default_plan(const DeviceInfo& device, const layout::Layout& layout, const Groups& weights) {
  return filled(device, weights, groups_plans(layout, weights.are_units())[0]);
}

int64_t groups_partial_bytes(const Groups& weights, int64_t blocks) {
  if (weights.are_units()) return sizeof(float);
  return (blocks + weights.panels) * kPanelRows * int64_t(sizeof(float));
}

}  // namespace lacuna::cuda
