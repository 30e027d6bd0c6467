#include "calibrate/profile.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "calibrate/profile_file.h"
#include "core/error.h"
#include "io/json.h"

namespace lacuna::calibrate {
namespace {

using io::JsonObject;
using kernels::Plan;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr int64_t kFormat = 2;  // 1: "prefetch" was true or false

ordered_json plan_json(const Plan& plan) {
  return {{"split", kernels::name_of(plan.split)},
          {"chunk", plan.chunk},
          {"prefetch", plan.prefetch},
          {"tile_rows", plan.tile_rows},
          {"dense_below", plan.dense_below}};
}

Plan parse_plan(const json& value, const std::string& where) {
  const JsonObject object(value, where);
  Plan plan;
  const std::string split = object.need_string("split");
  if (split == kernels::name_of(Plan::Split::rows))
    plan.split = Plan::Split::rows;
  else if (split != kernels::name_of(Plan::Split::columns))
    throw Error("{}: \"split\" is \"{}\", expected columns or rows", where, split);
  const int64_t chunk = object.need_integer("chunk");
  plan.chunk = chunk < 0 || chunk > 1024 ? -1 : int(chunk);  // check_plan refuses it
  const int64_t prefetch = object.need_integer("prefetch");
  plan.prefetch = prefetch < 0 || prefetch > Plan::kColumn ? -1 : int(prefetch);
  plan.tile_rows = object.need_integer("tile_rows");
  plan.dense_below = need_number(object, "dense_below", where);
  try {
    kernels::check_plan(plan);
  } catch (const Error& error) {
    throw Error("{}: {}", where, error.what());
  }
  return plan;
}

std::vector<double> parse_numbers(const json& array, const char* key, const std::string& where) {
  std::vector<double> out;
  for (const json& value : array) {
    if (!value.is_number() || !std::isfinite(value.get<double>()))
      throw Error("{}: \"{}\" must hold numbers", where, key);
    out.push_back(value.get<double>());
  }
  return out;
}

PlanTimes parse_times(const json& value, size_t levels, const std::string& where) {
  const JsonObject object(value, where);
  PlanTimes times;
  const json* plan = object.object("plan");
  if (plan == nullptr) throw Error("{}: \"plan\" is missing", where);
  times.plan = parse_plan(*plan, where);
  times.dense_ms = need_number(object, "dense_ms", where);
  check_ms(times.dense_ms, where);
  times.sparse_ms = parse_numbers(object.need_array("sparse_ms"), "sparse_ms", where);
  if (times.sparse_ms.size() != levels)
    throw Error("{}: {} times for {} levels", where, times.sparse_ms.size(), levels);
  for (const double ms : times.sparse_ms) check_ms(ms, where);
  const int64_t rounds = object.need_integer("rounds");
  if (rounds < 1 || rounds > 1'000'000'000) throw Error("{}: {} rounds", where, rounds);
  times.rounds = int(rounds);
  return times;
}

GroupTuning parse_group(const std::string& key, const json& value, const std::string& file) {
  const std::string where = fmt::format("{}: group \"{}\"", file, key);
  const JsonObject object(value, where);
  GroupTuning group;
  group.key = key;
  group.name = object.need_string("name");
  group.bytes = object.need_integer("bytes");
  group.levels = parse_numbers(object.need_array("levels"), "levels", where);
  for (size_t i = 0; i < group.levels.size(); ++i)
    if (i == 0 ? group.levels[i] != 0 : !(group.levels[i] > group.levels[i - 1] && group.levels[i] < 1))
      throw Error("{}: \"levels\" must begin with 0 and ascend below 1", where);
  if (group.levels.empty()) throw Error("{}: \"levels\" is empty", where);
  group.noise = need_number(object, "noise", where);
  group.plan = parse_plan(object.need_object("plan"), where);
  for (const json& times : object.need_array("measured"))
    group.measured.push_back(parse_times(times, group.levels.size(), where));
  if (group.measured.empty() || group.standard().plan != kernels::default_plan())
    throw Error("{}: \"measured\" must begin with the default plan", where);
  Plan chosen = group.chosen().plan;
  chosen.dense_below = group.plan.dense_below;
  if (chosen != group.plan) throw Error("{}: its plan is not among those measured", where);
  return group;
}

ordered_json group_json(const GroupTuning& group) {
  ordered_json measured = ordered_json::array();
  for (const PlanTimes& times : group.measured)
    measured.push_back({{"plan", plan_json(times.plan)},
                        {"dense_ms", times.dense_ms},
                        {"sparse_ms", times.sparse_ms},
                        {"rounds", times.rounds}});
  return {{"name", group.name},   {"bytes", group.bytes},          {"levels", group.levels},
          {"noise", group.noise}, {"plan", plan_json(group.plan)}, {"measured", std::move(measured)}};
}

}  // namespace

kernels::Plans Profile::plans() const {
  kernels::Plans out;
  for (const auto& [key, group] : groups) out.set(key, group.plan);
  return out;
}

void Profile::merge(const std::vector<GroupTuning>& tuned) {
  for (const GroupTuning& group : tuned) groups[group.key] = group;
}

std::string Profile::to_json() const {
  ordered_json all = ordered_json::object();
  for (const auto& [key, group] : groups) all[key] = group_json(group);
  const ordered_json out = {{"lacuna_profile", kFormat}, {"version", machine.version}, {"cpu", machine.cpu},
                            {"isa", machine.isa},        {"threads", machine.threads}, {"groups", std::move(all)}};
  return out.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

Profile Profile::parse(std::string_view text, const std::string& where) {
  const json top = io::parse_json_object(text, where);
  const JsonObject object(top, where);
  const int64_t format = object.need_integer("lacuna_profile");
  if (format != kFormat) throw Error("{}: format {} of profiles, this program reads {}", where, format, kFormat);
  Profile out;
  out.machine.version = object.need_string("version");
  out.machine.cpu = object.need_string("cpu");
  out.machine.isa = object.need_string("isa");
  const int64_t threads = object.need_integer("threads");
  if (threads < 1 || threads > 1 << 20) throw Error("{}: made for {} threads", where, threads);
  out.machine.threads = int(threads);
  for (const auto& [key, value] : object.need_object("groups").items())
    out.groups[key] = parse_group(key, value, where);
  return out;
}

std::string profile_file_name(const Machine& machine) {
  return file_name_of(fmt::format("{} {} {} threads", machine.cpu.substr(0, 100), machine.isa, machine.threads)) +
         ".json";
}

std::optional<Profile> load_profile(const std::string& path, const Machine& here) {
  const auto text = read_profile_file(path);
  if (!text) return std::nullopt;
  Profile out = Profile::parse(*text, path);
  check_same(path, "version", out.machine.version, here.version);
  check_same(path, "CPU", out.machine.cpu, here.cpu);
  check_same(path, "instruction set", out.machine.isa, here.isa);
  if (out.machine.threads != here.threads)
    throw Error("{}: is for {} threads, this is a run with {}", path, out.machine.threads, here.threads);
  return out;
}

void save_profile(const std::string& path, const Profile& profile) { write_profile_file(path, profile.to_json()); }

}  // namespace lacuna::calibrate
