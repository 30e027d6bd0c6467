#include "io/gguf.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/checked_math.h"
#include "core/error.h"
#include "io/byte_reader.h"
#include "layout/layout.h"

namespace lacuna::io {

namespace {

// The least bytes that one entry takes: a count larger than what is left divided by this is a lie.
constexpr uint64_t kMinKvBytes = 8 + 4 + 1;
constexpr uint64_t kMinTensorBytes = 8 + 4 + 8 + 4 + 8;
constexpr uint32_t kMaxDims = 4;

constexpr std::string_view kTypeNames[] = {
    "F32",        "F16",        "Q4_0",       "Q4_1",  "Q4_2",     "Q4_3",     "Q5_0",     "Q5_1",    "Q8_0",
    "Q8_1",       "Q2_K",       "Q3_K",       "Q4_K",  "Q5_K",     "Q6_K",     "Q8_K",     "IQ2_XXS", "IQ2_XS",
    "IQ3_XXS",    "IQ1_S",      "IQ4_NL",     "IQ3_S", "IQ2_S",    "IQ4_XS",   "I8",       "I16",     "I32",
    "I64",        "F64",        "IQ1_M",      "BF16",  "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0",   "TQ2_0",
    "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4", "NVFP4",    "Q1_0",     "Q2_0"};

/// Columns and bytes of one block of a type that a file may hold here.
struct BlockSize {
  int64_t cols, bytes;
};

/// Plain integers and F64 have no layout, but are legal GGUF and can be listed; I8 holds packed layouts.
std::optional<BlockSize> block_size(int type) {
  switch (type) {
    case kGgmlTypeI8:
      return BlockSize{1, 1};
    case 25:
      return BlockSize{1, 2};
    case 26:
      return BlockSize{1, 4};
    case 27:
    case 28:
      return BlockSize{1, 8};
    default:
      break;
  }
  const layout::Layout* layout = layout::find_ggml_type(type);
  if (layout == nullptr) return std::nullopt;
  return BlockSize{layout->block_cols, layout->block_bytes};
}

enum class ValueType : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

bool read_bool(ByteReader& in, const std::string& key) {
  const auto value = in.read<uint8_t>(key);
  if (value > 1) throw Error("metadata key {}: a bool is stored as 0 or 1, found {}", key, value);
  return value != 0;
}

template <class T>
MetadataValue read_numbers(ByteReader& in, uint64_t count, const std::string& key) {
  if (count > in.remaining() / sizeof(T)) in.take(count > UINT64_MAX / sizeof(T) ? UINT64_MAX : count * sizeof(T), key);
  const auto bytes = in.take(count * sizeof(T), key);
  std::vector<T> out(count);
  if (count > 0) std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

MetadataValue read_array(ByteReader& in, const std::string& key) {
  const auto type = in.read<uint32_t>(key);
  const auto count = in.read<uint64_t>(key);
  switch (ValueType(type)) {
    case ValueType::u8:
      return read_numbers<uint8_t>(in, count, key);
    case ValueType::i8:
      return read_numbers<int8_t>(in, count, key);
    case ValueType::u16:
      return read_numbers<uint16_t>(in, count, key);
    case ValueType::i16:
      return read_numbers<int16_t>(in, count, key);
    case ValueType::u32:
      return read_numbers<uint32_t>(in, count, key);
    case ValueType::i32:
      return read_numbers<int32_t>(in, count, key);
    case ValueType::f32:
      return read_numbers<float>(in, count, key);
    case ValueType::u64:
      return read_numbers<uint64_t>(in, count, key);
    case ValueType::i64:
      return read_numbers<int64_t>(in, count, key);
    case ValueType::f64:
      return read_numbers<double>(in, count, key);
    case ValueType::boolean: {
      if (count > in.remaining()) in.take(count, key);
      std::vector<bool> out(count);
      for (uint64_t i = 0; i < count; ++i) out[i] = read_bool(in, key);
      return out;
    }
    case ValueType::string: {
      if (count > in.remaining() / 8) in.take(count > UINT64_MAX / 8 ? UINT64_MAX : count * 8, key);
      std::vector<std::string> out;  // grows with what is there: the count may be a lie
      for (uint64_t i = 0; i < count; ++i) out.push_back(in.read_string(key));
      return out;
    }
    case ValueType::array:
      throw Error("metadata key {}: arrays of arrays are not supported", key);
  }
  throw Error("metadata key {}: unknown type {} of array elements", key, type);
}

MetadataValue read_value(ByteReader& in, const std::string& key) {
  const auto type = in.read<uint32_t>(key);
  switch (ValueType(type)) {
    case ValueType::u8:
      return in.read<uint8_t>(key);
    case ValueType::i8:
      return in.read<int8_t>(key);
    case ValueType::u16:
      return in.read<uint16_t>(key);
    case ValueType::i16:
      return in.read<int16_t>(key);
    case ValueType::u32:
      return in.read<uint32_t>(key);
    case ValueType::i32:
      return in.read<int32_t>(key);
    case ValueType::f32:
      return in.read<float>(key);
    case ValueType::boolean:
      return read_bool(in, key);
    case ValueType::string:
      return in.read_string(key);
    case ValueType::array:
      return read_array(in, key);
    case ValueType::u64:
      return in.read<uint64_t>(key);
    case ValueType::i64:
      return in.read<int64_t>(key);
    case ValueType::f64:
      return in.read<double>(key);
  }
  throw Error("metadata key {}: unknown value type {}; the file is damaged or newer than this program", key, type);
}

int read_version(ByteReader& in) {
  constexpr std::string_view kMagic = "GGUF";
  const auto magic = in.take(4, "the magic \"GGUF\"");
  if (std::memcmp(magic.data(), kMagic.data(), 4) != 0) throw Error("not a GGUF file: it does not begin with \"GGUF\"");
  const auto version = in.read<uint32_t>("the version");
  if (version == 2 || version == 3) return int(version);
  if (version == 1) throw Error("GGUF version 1 is not supported; convert the file to version 3 with llama.cpp");
  if (version != 0 && (version & 0xffff) == 0)
    throw Error(
        "a big-endian GGUF file; only little-endian files are supported: convert it with gguf-py's "
        "gguf_convert_endian");
  throw Error("GGUF version {} is not supported; versions 2 and 3 are", version);
}

/// A tensor info with its place still relative to the data section.
struct Info {
  GgufTensor tensor;
  uint64_t offset;
  uint64_t size;
};

Info read_info(ByteReader& in) {
  Info out{};
  GgufTensor& tensor = out.tensor;
  tensor.name = in.read_string("a tensor's name");
  if (tensor.name.empty()) throw Error("a tensor without a name");
  const auto n_dims = in.read<uint32_t>(tensor.name);
  if (n_dims < 1 || n_dims > kMaxDims)
    throw Error("tensor {}: {} dimensions; 1 to {} are possible", tensor.name, n_dims, kMaxDims);
  for (uint32_t i = 0; i < n_dims; ++i) {
    const auto dim = in.read<uint64_t>(tensor.name);
    if (dim == 0 || dim > uint64_t(INT64_MAX))
      throw Error("tensor {}: dimension {} is {}; it must be between 1 and 2^63 - 1", tensor.name, i, dim);
    tensor.dims.push_back(int64_t(dim));
  }
  std::reverse(tensor.dims.begin(), tensor.dims.end());
  const auto type = in.read<uint32_t>(tensor.name);
  out.offset = in.read<uint64_t>(tensor.name);

  const std::string_view type_name = type < std::size(kTypeNames) ? kTypeNames[type] : std::string_view();
  const auto block = type_name.empty() ? std::nullopt : block_size(int(type));
  if (!block)
    throw Error("tensor {}: type {} ({}) is not supported; known are {}, and I8 of the packed layouts", tensor.name,
                type, type_name.empty() ? "unknown" : type_name, layout::known_row_names());
  tensor.type = int(type);
  const int64_t K = tensor.dims.back();
  if (K % block->cols != 0)
    throw Error("tensor {}: K = {}, but {} needs a multiple of {}", tensor.name, K, type_name, block->cols);
  const auto rows = checked_product(std::span(tensor.dims).first(tensor.dims.size() - 1));
  const auto row_bytes = checked_mul(K / block->cols, block->bytes);
  const auto size = rows && row_bytes ? checked_mul(*rows, *row_bytes) : std::nullopt;
  if (!size)
    throw Error("tensor {}: its shape [{}] is too large for 64 bits", tensor.name, fmt::join(tensor.dims, ", "));
  out.size = uint64_t(*size);
  return out;
}

void check_overlap(std::vector<Info>& infos) {
  std::vector<const Info*> order;
  order.reserve(infos.size());
  for (const Info& info : infos) order.push_back(&info);
  std::sort(order.begin(), order.end(), [](const Info* a, const Info* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < order.size(); ++i)
    if (order[i]->offset < order[i - 1]->offset + order[i - 1]->size)
      throw Error("tensors {} and {} overlap", order[i - 1]->tensor.name, order[i]->tensor.name);
}

GgufFile parse(std::span<const std::byte> file, const std::string& path) {
  ByteReader in(file, path);
  GgufFile out;
  out.version = read_version(in);
  const auto n_tensors = in.read<uint64_t>("the number of tensors");
  const auto n_kv = in.read<uint64_t>("the number of metadata keys");
  if (n_kv > in.remaining() / kMinKvBytes)
    throw Error("{} metadata keys are announced, more than the file's {} bytes can hold", n_kv, file.size());
  if (n_tensors > in.remaining() / kMinTensorBytes)
    throw Error("{} tensors are announced, more than the file's {} bytes can hold", n_tensors, file.size());

  for (uint64_t i = 0; i < n_kv; ++i) {
    std::string key = in.read_string("a metadata key");
    if (key.empty() || key.size() > 65535)
      throw Error("metadata key {} has {} bytes; 1 to 65535 are possible", i, key.size());
    if (out.metadata.contains(key)) throw Error("metadata key {} occurs twice", key);
    MetadataValue value = read_value(in, key);
    out.metadata.set(std::move(key), std::move(value));
  }
  out.alignment = gguf_alignment(out.metadata, path);

  std::vector<Info> infos;
  infos.reserve(n_tensors);
  std::set<std::string_view> names;
  for (uint64_t i = 0; i < n_tensors; ++i) {
    infos.push_back(read_info(in));
    if (!names.insert(infos.back().tensor.name).second) throw Error("tensor {} occurs twice", infos.back().tensor.name);
  }
  if (infos.empty()) return out;

  const auto alignment = uint64_t(out.alignment);
  const uint64_t data = (in.position() + alignment - 1) / alignment * alignment;
  const uint64_t available = data < file.size() ? file.size() - data : 0;
  for (Info& info : infos) {
    const std::string& name = info.tensor.name;
    if (info.offset % alignment != 0)
      throw Error("tensor {}: offset {} is no multiple of the alignment {}", name, info.offset, alignment);
    if (info.offset > available || info.size > available - info.offset)
      throw Error(
          "tensor {}: its {} bytes at offset {} lie outside the file, which holds {} bytes of weights; it is cut short "
          "or damaged",
          name, info.size, info.offset, available);
    info.tensor.bytes = file.subspan(data + info.offset, info.size);
  }
  check_overlap(infos);
  // Bytes between and after the tensors are left alone: GGUF finds everything by offset, writers pad as they like and
  // llama.cpp reads such files. (safetensors forbids them, so safetensors.cc refuses them.)
  out.tensors.reserve(infos.size());
  for (Info& info : infos) out.tensors.push_back(std::move(info.tensor));
  return out;
}

}  // namespace

std::string_view ggml_type_name(int type) {
  return type >= 0 && size_t(type) < std::size(kTypeNames) ? kTypeNames[type] : std::string_view();
}

int64_t gguf_alignment(const Metadata& metadata, const std::string& path) {
  const auto alignment = metadata.integer("general.alignment");
  if (!alignment) return kGgufDefaultAlignment;
  if (*alignment < 8 || *alignment > (int64_t{1} << 20) || (*alignment & (*alignment - 1)) != 0)
    throw Error("{}: general.alignment is {}; it must be a power of two from 8 to 2^20", path, *alignment);
  return *alignment;
}

GgufFile parse_gguf(std::span<const std::byte> file, const std::string& path) {
  return naming_file(path, [&] { return parse(file, path); });
}

}  // namespace lacuna::io
