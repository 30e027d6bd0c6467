#include "io/safetensors.h"

#include <algorithm>

#include "core/checked_math.h"
#include "core/error.h"
#include "io/byte_reader.h"
#include "io/json.h"

namespace lacuna::io {

namespace {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit

struct Dtype {
  std::string_view name;
  int64_t bytes;
};
constexpr Dtype kDtypes[] = {{"F64", 8},     {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"F8_E4M3", 1},
                             {"F8_E5M2", 1}, {"I64", 8}, {"I32", 4}, {"I16", 2},  {"I8", 1},
                             {"U64", 8},     {"U32", 4}, {"U16", 2}, {"U8", 1},   {"BOOL", 1}};

Dtype find_dtype(const std::string& name, const std::string& where) {
  for (const Dtype& dtype : kDtypes)
    if (dtype.name == name) return dtype;
  std::string known;
  for (const Dtype& dtype : kDtypes) known += fmt::format("{}{}", known.empty() ? "" : ", ", dtype.name);
  throw Error("{}: unknown dtype \"{}\"; known are {}", where, name, known);
}

int64_t non_negative(const nlohmann::json& value, const std::string& where, const char* what) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t(INT64_MAX))
    throw Error("{}: {} must hold integers from 0 to 2^63 - 1, found {}", where, what,
                value.is_number() ? value.dump() : value.type_name());
  return value.get<int64_t>();
}

SafetensorsEntry read_entry(const std::string& name, const nlohmann::json& json, std::span<const std::byte> data,
                            const std::string& path) {
  const std::string where = fmt::format("{}: tensor {}", path, name);
  const JsonObject object(json, where);
  const Dtype dtype = find_dtype(object.need_string("dtype"), where);
  SafetensorsEntry out{name, dtype.name, {}, {}};
  for (const auto& dim : object.need_array("shape")) out.dims.push_back(non_negative(dim, where, "shape"));
  const auto& offsets = object.need_array("data_offsets");
  if (offsets.size() != 2)
    throw Error("{}: data_offsets must hold begin and end, found {} numbers", where, offsets.size());
  const int64_t begin = non_negative(offsets[0], where, "data_offsets");
  const int64_t end = non_negative(offsets[1], where, "data_offsets");
  if (begin > end || uint64_t(end) > data.size())
    throw Error("{}: data_offsets [{}, {}] lie outside the {} bytes of data; the file is cut short or damaged", where,
                begin, end, data.size());
  const auto count = checked_product(out.dims);
  const auto bytes = count ? checked_mul(*count, dtype.bytes) : std::nullopt;
  if (!bytes) throw Error("{}: its shape is too large for 64 bits", where);
  if (*bytes != end - begin)
    throw Error("{}: shape [{}] of {} takes {} bytes, but data_offsets [{}, {}] span {}", where,
                fmt::join(out.dims, ", "), dtype.name, *bytes, begin, end, end - begin);
  out.bytes = data.subspan(size_t(begin), size_t(end - begin));
  return out;
}

}  // namespace

std::vector<SafetensorsEntry> parse_safetensors(std::span<const std::byte> file, const std::string& path) {
  ByteReader in(file, path);
  const auto length = in.read<uint64_t>("the header's length");
  if (length > in.remaining() || length > kMaxHeaderBytes)
    throw Error(
        "{}: the header is announced with {} bytes, but {} follow (at most {} are allowed); not a safetensors file, or "
        "cut short",
        path, length, in.remaining(), kMaxHeaderBytes);
  const auto header = in.take(length, "the header");
  const std::string_view text(reinterpret_cast<const char*>(header.data()), header.size());
  const nlohmann::json json = parse_json_object(text, path + ": header");
  const auto data = file.subspan(size_t(8 + length));

  std::vector<SafetensorsEntry> out;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") continue;
    if (name.empty()) throw Error("{}: a tensor without a name", path);
    out.push_back(read_entry(name, value, data, path));
  }
  std::stable_sort(out.begin(), out.end(), [](const auto& a, const auto& b) {
    return a.bytes.data() != b.bytes.data() ? a.bytes.data() < b.bytes.data() : a.bytes.size() < b.bytes.size();
  });
  const std::byte* next = data.data();
  for (const SafetensorsEntry& entry : out) {
    if (entry.bytes.data() < next) throw Error("{}: tensor {} overlaps the one before it", path, entry.name);
    if (entry.bytes.data() > next)
      throw Error("{}: {} bytes before tensor {} belong to no tensor", path, entry.bytes.data() - next, entry.name);
    next += entry.bytes.size();
  }
  if (next != data.data() + data.size())
    throw Error("{}: {} bytes at the end belong to no tensor", path, data.data() + data.size() - next);
  return out;
}

}  // namespace lacuna::io
