// src/model/flux/part_times.h - where the time of a step goes.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string_view>

namespace lacuna::model::flux {

// clang-format off
enum class Part : uint8_t {
  embed,                                                                           // inputs, timestep, guidance, text
  modulation,                                                                      // scales, shifts and gates
  double_qkv, double_out, double_up, double_down,                                  // image stream
  text_qkv, text_out, text_up, text_down,                                          // text stream
  single_in, single_out,
  router, expert_up, expert_down,
  attention,
  quantize,                                                                        // tokens to E4M3, on CUDA devices
  elementwise,                                                                     // norms, rope, GELU, gates
  last,                                                                            // last norm and projection
};
// clang-format on
inline constexpr std::array<std::string_view, 19> kPartNames = {
    "embed",       "modulation", "double_qkv", "double_out",  "double_up",  "double_down", "text_qkv",
    "text_out",    "text_up",    "text_down",  "single_in",   "single_out", "router",      "expert_up",
    "expert_down", "attention",  "quantize",   "elementwise", "last"};

/// Seconds and floating-point operations by part.
class PartTimes {
 public:
  struct Total {
    double seconds = 0, flops = 0;
  };
  /// Adds the time from its making to its end.
  class Measure {
   public:
    Measure(Total& total, double flops) : total_(total), flops_(flops) {}
    ~Measure() {
      total_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
      total_.flops += flops_;
    }
    Measure(const Measure&) = delete;
    Measure& operator=(const Measure&) = delete;

   private:
    Total& total_;
    double flops_;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  };
  [[nodiscard]] Measure measure(Part part, double flops = 0) { return {totals_[size_t(part)], flops}; }
  const std::array<Total, kPartNames.size()>& totals() const { return totals_; }
  void reset() { totals_ = {}; }

 private:
  std::array<Total, kPartNames.size()> totals_;
};

}  // namespace lacuna::model::flux
