// src/io/import.h - checkpoints that other programs have quantized or pruned, in our layouts.
//
// Such a Hugging Face folder says in config.json how it was made ("quantization_config") and holds several tensors in
// place of a module's `weight`: codes, scales, zero points, masks. An importer puts them together again. Codes, scales,
// zero points and kept positions are carried over; nothing is rounded. What our layouts do not hold exactly is an Error
// that names the tensor and says what to do.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/thread_pool.h"
#include "io/safetensors.h"
#include "layout/layout.h"

namespace lacuna::io {

struct FileTensor {
  SafetensorsEntry entry;
  std::string file;  // for error messages

  std::string where() const { return file + ": tensor " + entry.name; }
};

/// The tensors that stand for one module's weight, by the last part of their names ("qweight", "weight_scale", ...).
class ModuleTensors {
 public:
  explicit ModuleTensors(std::string name) : name_(std::move(name)) {}

  /// Throws Error where the part is there already.
  void add(std::string_view part, const FileTensor& tensor);

  const std::string& name() const { return name_; }  // "model.layers.0.mlp.up_proj"
  bool has(std::string_view part) const { return look(part) != nullptr; }
  /// The part, which does not count as read. nullptr: it is not there.
  const FileTensor* look(std::string_view part) const;
  /// The part, which is read from now on.
  const FileTensor* find(std::string_view part) const;
  /// As find. Throws Error naming module and part.
  const FileTensor& need(std::string_view part) const;
  void forget_reads() const { read_.clear(); }
  /// Throws Error naming the first part that was not read: a weight that is there twice, or numbers that would be
  /// dropped.
  void check_all_read() const;
  int64_t bytes() const;
  /// The mapped files' pages may leave memory.
  void release() const;

 private:
  std::string name_;
  std::map<std::string, const FileTensor*, std::less<>> parts_;
  mutable std::set<std::string, std::less<>> read_;
};

/// What a folder says about how its weights were made.
struct QuantizationConfig {
  nlohmann::json settings;
  std::string where;               // begins the errors, such as "config.json: quantization_config"
  std::vector<std::string> rules;  // the keys of "dynamic", in the order of the file
};

struct ImportedMatrix {
  const layout::Layout* layout = nullptr;
  layout::Shape shape;
  layout::Params params;
  std::vector<std::byte> bytes;
};

/// What to do with a tensor whose name ends in a certain part.
enum class PartUse : uint8_t {
  keep,  // a tensor of its own, such as a bias
  read,  // belongs to the weight of its module, where that is stored in the importer's format
  drop,  // says how activations are to be rounded, which is not done here
};

class Importer {
 public:
  virtual ~Importer() = default;
  virtual PartUse use_of(std::string_view part) const = 0;
  /// Whether this module is stored in the format; the others' weights are plain.
  virtual bool takes(const ModuleTensors& module) const = 0;
  /// Throws Error naming file and tensor for whatever does not fit together, and for a part that the weight does not
  /// come from. Sizes are checked before memory is taken.
  ImportedMatrix import(const ModuleTensors& module, ThreadPool* pool);
  /// What the user should know, a sentence each; complete when all modules are imported.
  virtual std::vector<std::string> warnings() const { return {}; }

 private:
  virtual ImportedMatrix read(const ModuleTensors& module, ThreadPool* pool) = 0;
};

/// The importer that a "quantization_config" (or the older "compression_config") asks for. Throws Error for a method or
/// a variant of it that is not read, naming it and those that are.
std::unique_ptr<Importer> make_importer(const QuantizationConfig& config);

/// Whether a tensor whose name ends so belongs to a quantized or pruned weight.
bool is_quantized_part(std::string_view part);

/// GPTQ (AutoGPTQ, GPTQModel): `qweight` I32 [K B / 32, N], the codes of an output as a string of bits down the column;
/// `qzeros` I32 [G, N B / 32]; `scales` [G, N]; `g_idx` [K], each input's group. Becomes gqB. In checkpoint_format
/// gptq_v2 a stored zero is the zero; in gptq the zero less one: each modulo 2^B, but GPTQModel subtracts from whole
/// words (2, 4, 8 bits), so that a zero of 0 borrows from the one above it.
std::unique_ptr<Importer> make_gptq_importer(const QuantizationConfig& config);

/// AWQ (AutoAWQ), 4 bits. Version gemm: `qweight` I32 [K, N / 8], `qzeros` I32 [G, N / 8], eight outputs a word in the
/// order 0 2 4 6 1 3 5 7, `scales` [G, N]. Version gemv: `qweight` I32 [N, K / 8], `qzeros` I32 [N, Z], `scales`
/// [N, 8 Z], in order, Z words a row of which the first G numbers count. Becomes gq4.
std::unique_ptr<Importer> make_awq_importer(const QuantizationConfig& config);

/// compressed-tensors (LLM Compressor). Integers: `weight_packed` I32 (pack-quantized) or `weight` I8 (int-quantized,
/// naive-quantized), `weight_scale`, `weight_zero_point`, `weight_shape`; become gqB. Pruned: `bitmask` U8 [N, K / 8],
/// `compressed`, `row_offsets`, `shape` (sparse-bitmask, sparse-24-bitmask); floats become bm16 where f16 holds them
/// and plain rows elsewhere, integers bmB. Symmetric 4-bit weights that are 2:4 sparse become nm24_q4.
std::unique_ptr<Importer> make_compressed_importer(const QuantizationConfig& config);

}  // namespace lacuna::io
