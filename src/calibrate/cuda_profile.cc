#include "calibrate/cuda_profile.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "calibrate/profile_file.h"
#include "core/error.h"
#include "io/json.h"

namespace lacuna::calibrate {
namespace {

using io::JsonObject;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr int64_t kFormat = 1;

int need_int(const JsonObject& object, const char* key, int64_t least, int64_t most, const std::string& where) {
  const int64_t value = object.need_integer(key);
  if (value < least || value > most) throw Error("{}: \"{}\" is {}, expected {} to {}", where, key, value, least, most);
  return int(value);
}

float need_share(const JsonObject& object, const char* key, const std::string& where) {
  const double value = need_number(object, key, where);
  if (!(value >= 0 && value <= 1)) throw Error("{}: \"{}\" is {}, expected 0 to 1", where, key, value);
  return float(value);
}

template <class Tuning>
void parse_times(const JsonObject& object, const std::string& where, Tuning& out) {
  out.standard_ms = need_number(object, "standard_ms", where);
  out.tuned_ms = need_number(object, "tuned_ms", where);
  check_ms(out.standard_ms, where);
  check_ms(out.tuned_ms, where);
}

model::CudaTuning parse_product(const json& value, const std::string& where) {
  const JsonObject object(value, where);
  model::CudaTuning out;
  const std::string name = object.need_string("layout");
  const layout::Layout* layout = layout::find(name);
  if (layout == nullptr || !layout->zigzag) throw Error("{}: \"{}\" is no zigzag layout", where, name);
  out.product.layout = layout->id;
  out.product.rows = need_int(object, "rows", 1, 1 << 24, where);
  out.product.K = need_int(object, "inputs", 1, 1 << 24, where);
  out.product.percent = need_int(object, "percent", 0, 99, where);
  parse_times(object, where, out);
  const JsonObject plan(object.need_object("plan"), where);
  out.plan.warps = need_int(plan, "warps", 1, 32, where);
  out.plan.chunk = need_int(plan, "chunk", 1, 1024, where);
  out.plan.resident = need_int(plan, "resident", 1, 64, where);
  const int64_t least = (out.product.K + cuda::kSegmentColumns - 1) / cuda::kSegmentColumns;
  out.plan.segments = need_int(plan, "segments", least, cuda::kMostSegments, where);
  out.plan.early_headers = need_share(plan, "early_headers", where);
  out.plan.early_codes = need_share(plan, "early_codes", where);
  out.plan.skips = plan.boolean("skips").value_or(true);
  if (!out.plan.skips && out.product.percent == 0) throw Error("{}: \"skips\" is false of a dense product", where);
  return out;
}

constexpr const char* kSplits[] = {"stream", "slice"};  // in the order of cuda::Split
constexpr const char* kMath[] = {"mma", "fma", "dot"};  // and of cuda::Math

/// The value that the key's name stands for.
template <class Value, size_t kCount>
Value need_name(const JsonObject& object, const char* key, const char* const (&names)[kCount],
                const std::string& where) {
  const std::string name = object.need_string(key);
  const auto* const found = std::ranges::find(names, name, [](const char* n) { return std::string_view(n); });
  if (found == std::end(names))
    throw Error("{}: \"{}\" is \"{}\", expected {}", where, key, name, fmt::join(names, ", "));
  return Value(found - std::begin(names));
}

model::CudaGroupsTuning parse_group_sparse(const json& value, const std::string& where) {
  const JsonObject object(value, where);
  model::CudaGroupsTuning out;
  const std::string name = object.need_string("layout");
  const layout::Layout* layout = layout::find(name);
  if (layout == nullptr || !cuda::is_group_layout(*layout))
    throw Error("{}: \"{}\" is no group-sparse layout", where, name);
  out.product.layout = layout->id;
  out.product.rows = need_int(object, "rows", 1, 1 << 24, where);
  out.product.K = need_int(object, "inputs", 1, 1 << 24, where);
  out.product.group = object.need_integer("group_size");
  naming_file(where, [&] { layout::check_params(*layout, {.group_size = out.product.group}); });
  out.product.kept = need_int(object, "kept_percent", 0, 100, where);
  parse_times(object, where, out);
  const JsonObject plan(object.need_object("plan"), where);
  out.plan.split = need_name<cuda::Split>(plan, "split", kSplits, where);
  out.plan.math = need_name<cuda::Math>(plan, "math", kMath, where);
  out.plan.warps = need_int(plan, "warps", 1, 32, where);
  out.plan.resident = need_int(plan, "resident", 1, 64, where);
  out.plan.blocks = need_int(plan, "blocks", 1, 1 << 24, where);
  out.plan.early = need_int(plan, "early", 0, cuda::kMostEarly, where);
  return out;
}

double need_us(const JsonObject& object, const char* key, const std::string& where) {
  const double us = need_number(object, key, where);
  if (!(us > 0 && us < 1e12)) throw Error("{}: \"{}\" is {}, which is no time", where, key, us);
  return us;
}

/// What was known of the same products is replaced.
template <class Tuning>
void merge_into(std::vector<Tuning>& all, const std::vector<Tuning>& tuned) {
  for (const Tuning& tuning : tuned) {
    std::erase_if(all, [&](const Tuning& known) { return known.product == tuning.product; });
    all.push_back(tuning);
  }
}

constexpr int64_t kMostSize = int64_t{1} << 24;  // tokens, outputs, inputs

cuda::TensorCoreTuning parse_tensor_core(const json& value, const std::string& where) {
  const JsonObject object(value, where);
  cuda::TensorCoreTuning out;
  const std::string name = object.need_string("layout"), accumulate = object.need_string("accumulate");
  const layout::Layout* layout = layout::find(name);
  if (layout == nullptr) throw Error("{}: unknown layout \"{}\"", where, name);
  out.product.operation = naming_file(where, [&] { return cuda::operation_of(*layout); });
  if (accumulate != "fast" && accumulate != "full")
    throw Error("{}: \"accumulate\" is \"{}\", expected fast or full", where, accumulate);
  if (accumulate == "full") {
    if (!out.product.operation.eight_bits) throw Error("{}: {} has one kind of sums, fast", where, name);
    out.product.accumulate = cuda::Accumulate::full;
  }
  out.product.M = need_int(object, "tokens", 1, kMostSize, where);
  out.product.N = need_int(object, "outputs", 1, kMostSize, where);
  out.product.K = need_int(object, "inputs", 1, kMostSize, where);
  out.product.groups = need_int(object, "groups", 0, 1 << 16, where);
  if (out.product.groups > 0 && out.product.N % cuda::kTileRowsOfWeights != 0)
    throw Error("{}: {} outputs of a group, which must be a multiple of {}", where, out.product.N,
                cuda::kTileRowsOfWeights);
  out.standard_us = need_us(object, "standard_us", where);
  out.tuned_us = need_us(object, "tuned_us", where);
  const JsonObject plan(object.need_object("plan"), where);
  out.plan.rows = need_int(plan, "rows", 1, 1024, where);
  out.plan.tokens = need_int(plan, "tokens", 1, 1024, where);
  out.plan.cluster = need_int(plan, "cluster", 1, 16, where);
  return out;
}

}  // namespace

ordered_json plan_json(const cuda::TensorCorePlan& plan) {
  return {{"rows", plan.rows}, {"tokens", plan.tokens}, {"cluster", plan.cluster}};
}

ordered_json product_json(const cuda::TensorCoreTuning& tuning) {
  const cuda::TensorCoreProduct& product = tuning.product;
  return {{"layout", cuda::layout_of(product.operation).name},
          {"accumulate", product.accumulate == cuda::Accumulate::full ? "full" : "fast"},
          {"tokens", product.M},
          {"outputs", product.N},
          {"inputs", product.K},
          {"groups", product.groups},
          {"standard_us", tuning.standard_us},
          {"tuned_us", tuning.tuned_us},
          {"plan", plan_json(tuning.plan)}};
}

ordered_json product_json(const model::CudaTuning& tuning) {
  const cuda::GemvPlan& plan = tuning.plan;
  return {{"layout", layout::get(tuning.product.layout).name},
          {"rows", tuning.product.rows},
          {"inputs", tuning.product.K},
          {"percent", tuning.product.percent},
          {"standard_ms", tuning.standard_ms},
          {"tuned_ms", tuning.tuned_ms},
          {"plan",
           {{"warps", plan.warps},
            {"chunk", plan.chunk},
            {"resident", plan.resident},
            {"segments", plan.segments},
            {"early_headers", plan.early_headers},
            {"early_codes", plan.early_codes},
            {"skips", plan.skips}}}};
}

ordered_json product_json(const model::CudaGroupsTuning& tuning) {
  const cuda::GroupsProduct& product = tuning.product;
  const cuda::GroupsPlan& plan = tuning.plan;
  return {{"layout", layout::get(product.layout).name},
          {"rows", product.rows},
          {"inputs", product.K},
          {"group_size", product.group},
          {"kept_percent", product.kept},
          {"standard_ms", tuning.standard_ms},
          {"tuned_ms", tuning.tuned_ms},
          {"plan",
           {{"split", kSplits[size_t(plan.split)]},
            {"math", kMath[size_t(plan.math)]},
            {"warps", plan.warps},
            {"resident", plan.resident},
            {"blocks", plan.blocks},
            {"early", plan.early}}}};
}

cuda::Plans CudaProfile::plans() const {
  cuda::Plans out;
  for (const model::CudaTuning& tuning : products) out.set(tuning.product, tuning.plan);
  for (const model::CudaGroupsTuning& tuning : group_sparse) out.set(tuning.product, tuning.plan);
  return out;
}

void CudaProfile::merge(const std::vector<model::CudaTuning>& tuned) { merge_into(products, tuned); }
void CudaProfile::merge(const std::vector<model::CudaGroupsTuning>& tuned) { merge_into(group_sparse, tuned); }

std::string CudaProfile::to_json() const {
  ordered_json all = ordered_json::array();
  for (const model::CudaTuning& tuning : products) all.push_back(product_json(tuning));
  ordered_json of_groups = ordered_json::array();
  for (const model::CudaGroupsTuning& tuning : group_sparse) of_groups.push_back(product_json(tuning));
  ordered_json of_tensor_cores = ordered_json::array();
  for (const auto& [product, tuning] : tensor_core.tunings()) of_tensor_cores.push_back(product_json(tuning));
  const ordered_json out = {{"lacuna_cuda_profile", kFormat},
                            {"version", machine.version},
                            {"gpu", machine.gpu},
                            {"driver", machine.driver},
                            {"products", std::move(all)},
                            {"group_sparse", std::move(of_groups)},
                            {"tensor_core", std::move(of_tensor_cores)}};
  return out.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

CudaProfile CudaProfile::parse(std::string_view text, const std::string& where) {
  const json top = io::parse_json_object(text, where);
  const JsonObject object(top, where);
  const int64_t format = object.need_integer("lacuna_cuda_profile");
  if (format != kFormat) throw Error("{}: format {} of profiles, this program reads {}", where, format, kFormat);
  CudaProfile out;
  out.machine.version = object.need_string("version");
  out.machine.gpu = object.need_string("gpu");
  out.machine.driver = object.need_string("driver");
  for (const json& value : object.need_array("products"))
    out.products.push_back(parse_product(value, fmt::format("{}: product {}", where, out.products.size())));
  if (const json* of_groups = object.array("group_sparse"))
    for (const json& value : *of_groups)
      out.group_sparse.push_back(
          parse_group_sparse(value, fmt::format("{}: group-sparse product {}", where, out.group_sparse.size())));
  if (const json* of_tensor_cores = object.array("tensor_core"))
    for (size_t i = 0; i < of_tensor_cores->size(); ++i)
      out.tensor_core.set(
          parse_tensor_core((*of_tensor_cores)[i], fmt::format("{}: tensor core product {}", where, i)));
  return out;
}

std::string cuda_profile_file_name(const CudaMachine& machine) {
  return file_name_of(machine.gpu.substr(0, 100) + " cuda") + ".json";
}

std::optional<CudaProfile> load_cuda_profile(const std::string& path, const CudaMachine& here) {
  const auto text = read_profile_file(path);
  if (!text) return std::nullopt;
  CudaProfile out = CudaProfile::parse(*text, path);
  check_same(path, "version", out.machine.version, here.version);
  check_same(path, "card", out.machine.gpu, here.gpu);
  check_same(path, "driver", out.machine.driver, here.driver);
  return out;
}

void save_cuda_profile(const std::string& path, const CudaProfile& profile) {
  write_profile_file(path, profile.to_json());
}

}  // namespace lacuna::calibrate
