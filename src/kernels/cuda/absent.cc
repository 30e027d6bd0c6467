// src/kernels/cuda/absent.cc - what a build without CUDA has in the place of the .cu files.
#include "core/error.h"
#include "kernels/cuda/active.h"
#include "kernels/cuda/baselines.h"
#include "kernels/cuda/beams.h"
#include "kernels/cuda/calibration.h"
#include "kernels/cuda/column_statistics.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/exchange.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/groups.h"
#include "kernels/cuda/image_ops.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/tensor_core_few.h"
#include "kernels/cuda/tensor_core_mma.h"

namespace lacuna::cuda {
namespace {

[[noreturn]] void refuse() {
  throw Error("this build has no CUDA backend; build with scripts/build.sh --cuda, or use --device cpu");
}

}  // namespace

// Without a device none of the others can be called. (Destructors are not defaulted: clang-tidy would want that in the
// header, where builds with CUDA have work for them.)
Device::Device(const DeviceOptions&) { refuse(); }
void Device::use() const { refuse(); }
int64_t Device::free_bytes() const { refuse(); }
void Device::require(int64_t, std::string_view) const { refuse(); }
Buffer::Buffer(Device&, int64_t, std::string_view) { refuse(); }
Buffer::~Buffer() {}
void Buffer::upload(std::span<const std::byte>, int64_t) { refuse(); }
void Buffer::download(std::span<std::byte>, int64_t) const { refuse(); }
void Buffer::copy_within(int64_t, int64_t, int64_t) { refuse(); }
void Buffer::fill(uint8_t) { refuse(); }
Stream::Stream(Device&, bool) { refuse(); }
Stream::~Stream() {}
void Stream::synchronize() { refuse(); }
bool Stream::idle() const { refuse(); }
void Stream::wait(const Event&) { refuse(); }
Event::Event() { refuse(); }
Event::~Event() {}
void Event::record(Stream&) { refuse(); }
Mark::Mark() { refuse(); }
Mark::~Mark() {}
void Mark::record(Stream&) { refuse(); }
double Mark::ms_to(const Mark&) const { refuse(); }
Graph::Graph(Stream&, const std::function<void()>&) { refuse(); }
Graph::~Graph() {}
std::vector<Graph> Graph::together(std::span<Stream* const>, const std::function<void()>&) { refuse(); }
void Graph::launch(Stream&) { refuse(); }
Stopwatch::Stopwatch() { refuse(); }
Stopwatch::~Stopwatch() {}
void Stopwatch::start(Stream&) { refuse(); }
double Stopwatch::stop_ms(Stream&) { refuse(); }
double measure_read_gb_s(Device&, Stream&, const Buffer&) { refuse(); }
double measure_read_gb_s(Device&) { refuse(); }
void collect_active(const Device&, Stream&, const float*, int64_t, const float*, float, int32_t*, int32_t*) {
  refuse();
}
bool reaches(const Device&, const Device&) { refuse(); }
void prepare_exchange(const Device&, std::span<const Device* const>) { refuse(); }
StopFlag::StopFlag() { refuse(); }
StopFlag::~StopFlag() {}
void StopFlag::raise() noexcept {}
void launch_exchange(const Device&, Stream&, const ExchangeArgs&) { refuse(); }
GemvPlan default_plan(const DeviceInfo&, const layout::Layout&, const Columns&, Inputs) { refuse(); }
std::span<const GemvPlan> kernel_plans(const layout::Layout&) { refuse(); }
void launch_gemv(const Device&, Stream&, const layout::Layout&, const GemvPlan&, const GemvArgs&) { refuse(); }
int few_segments(const DeviceInfo&, const Columns&) { refuse(); }
void launch_gemv_few(const Device&, Stream&, const layout::Layout&, const GemvFewArgs&) { refuse(); }
void launch_skipping_rows(const Device&, Stream&, const SkippingRowsArgs&) { refuse(); }
void launch_unbalanced(const Device&, Stream&, int, const GemvArgs&) { refuse(); }
void launch_column_parallel(const Device&, Stream&, const GemvArgs&) { refuse(); }
int64_t operand_bytes(int64_t, int64_t) { refuse(); }
void launch_gemm_inputs(const Device&, Stream&, const GemmInputs&) { refuse(); }
void launch_weight_scales(const Device&, Stream&, const layout::Layout&, const Columns&, float*) { refuse(); }
void launch_weight_scales(const Device&, Stream&, const Rows&, float*) { refuse(); }
void launch_group_inputs(const Device&, Stream&, const GroupsArgs&, std::byte*) { refuse(); }
void launch_groups(const Device&, Stream&, const layout::Layout&, const GroupsPlan&, const GroupsArgs&) { refuse(); }
void launch_gemm_weights(const Device&, Stream&, const layout::Layout&, const Groups&, int64_t, const Operand&) {
  refuse();
}
void launch_gemm_weights(const Device&, Stream&, const layout::Layout&, const Columns&, int64_t, const Operand&) {
  refuse();
}
void launch_gemm_weights(const Device&, Stream&, const Rows&, int64_t, const Operand&) { refuse(); }
void launch_gemm(const Device&, Stream&, const GemmArgs&) { refuse(); }
void launch_quantize_tokens(const Device&, Stream&, const QuantizeTokensArgs&) { refuse(); }
void launch_tensor_core_few(const Device&, Stream&, const TensorCoreArgs&) { refuse(); }
void launch_tensor_core_mma(const Device&, Stream&, const TensorCoreArgs&) { refuse(); }
void launch_scale_product(const Device&, Stream&, const TensorCoreArgs&) { refuse(); }
void launch_transpose_product(const Device&, Stream&, const TensorCoreArgs&) { refuse(); }
void launch_modulated_norm(const Device&, Stream&, const ModulatedNormArgs&) { refuse(); }
void launch_gated_add(const Device&, Stream&, const GatedAddArgs&) { refuse(); }
void launch_image_heads(const Device&, Stream&, const ImageHeadsArgs&) { refuse(); }
JointAttentionKernel joint_attention_kernel(const DeviceInfo&, const JointAttentionArgs&) { refuse(); }
void launch_joint_attention(const Device&, Stream&, const JointAttentionArgs&) { refuse(); }
void launch_silu_sum(const Device&, Stream&, const float*, const float*, const float*, int64_t, bf16*) { refuse(); }
void launch_route(const Device&, Stream&, const RouteArgs&) { refuse(); }
void launch_gather_rows(const Device&, Stream&, const GatherRowsArgs&) { refuse(); }
void launch_combine_experts(const Device&, Stream&, const CombineExpertsArgs&) { refuse(); }
void launch_column_sums(const Device&, Stream&, const ColumnInputs&, const ColumnSums&) { refuse(); }
void launch_column_counts(const Device&, Stream&, const ColumnInputs&, const float*, const float*, uint32_t*) {
  refuse();
}
void launch_second_moment(const Device&, Stream&, const ColumnInputs&, double*) { refuse(); }
void launch_rows(const Device&, Stream&, const RowsArgs&) { refuse(); }
void launch_embed(const Device&, Stream&, const Rows&, const int32_t*, int64_t, float*) { refuse(); }
void launch_norm(const Device&, Stream&, const NormArgs&) { refuse(); }
void launch_gate(const Device&, Stream&, const GateArgs&) { refuse(); }
void launch_add(const Device&, Stream&, const float*, int64_t, float*, int, int64_t) { refuse(); }
void launch_heads(const Device&, Stream&, const Heads&) { refuse(); }
int64_t attention_workspace_bytes(const Device&, int64_t, int64_t, int64_t, int64_t) { refuse(); }
void launch_attention(const Device&, Stream&, const AttentionArgs&) { refuse(); }
void launch_batch_attention(const Device&, Stream&, const BatchAttentionArgs&) { refuse(); }
void launch_order_beams(const Device&, Stream&, const BeamStep*, uint32_t*, int64_t) { refuse(); }
int64_t log_sum_exp_workspace_bytes(int64_t, int64_t) { refuse(); }
void launch_log_sum_exp(const Device&, Stream&, const LogSumExpArgs&) { refuse(); }
int64_t argmax_workspace_bytes(int64_t) { refuse(); }
void launch_argmax(const Device&, Stream&, const ArgmaxArgs&) { refuse(); }
int64_t top_k_workspace_bytes(int64_t, int64_t) { refuse(); }
void launch_top_k(const Device&, Stream&, const TopKArgs&) { refuse(); }
void launch_count_inactive(const Device&, Stream&, const float*, int64_t, const float*, float, unsigned long long*) {
  refuse();
}
void launch_gate_rows(const Device&, Stream&, const GateRowsArgs&) { refuse(); }
void launch_count_sizes(const Device&, Stream&, const CountSizesArgs&) { refuse(); }
void launch_find_non_finite(const Device&, Stream&, const float*, int64_t, uint32_t*) { refuse(); }
void launch_mask_rows(const Device&, Stream&, const MaskRowsArgs&) { refuse(); }
void launch_squared_distance(const Device&, Stream&, const float*, const float*, int64_t, double*) { refuse(); }

}  // namespace lacuna::cuda
