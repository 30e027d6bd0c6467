// tests/io/hf_folder.h - safetensors files and Hugging Face folders made and changed for a test.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "gguf_bytes.h"
#include "io/checkpoint.h"
#include "io/huggingface.h"
#include "io/safetensors.h"
#include "test_support.h"

namespace lacuna::test {

struct Entry {
  std::string name, dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

/// The numbers as they lie in memory.
template <class T>
std::string bytes_of(const std::vector<T>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T)};
}

/// A safetensors file.
inline std::string safetensors(const std::vector<Entry>& entries) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  for (const Entry& e : entries) {
    header[e.name] = {
        {"dtype", e.dtype}, {"shape", e.shape}, {"data_offsets", {data.size(), data.size() + e.bytes.size()}}};
    data += e.bytes;
  }
  const std::string text = header.dump();
  return Bytes().number(uint64_t(text.size())).raw(text).raw(data).text();
}

inline std::vector<Entry> entries_of(const std::string& path) {
  const std::string file = read_text(path);
  std::vector<Entry> out;
  for (const io::SafetensorsEntry& e : io::parse_safetensors(as_span(file), path))
    out.push_back(
        {e.name, std::string(e.dtype), e.dims, {reinterpret_cast<const char*>(e.bytes.data()), e.bytes.size()}});
  return out;
}

/// A copy of a fixture.
class Folder {
 public:
  explicit Folder(const std::string& name) {
    std::filesystem::copy(fixture(name), dir_.path(), std::filesystem::copy_options::recursive);
  }
  std::string path() const { return dir_.path().string(); }
  std::string file(const std::string& name) const { return dir_.file(name); }
  void put(const std::string& name, std::string_view text) const { write_bytes(file(name), text); }
  void patch(const std::string& name, std::string_view changes) const {
    nlohmann::json j = nlohmann::json::parse(read_text(file(name)));
    j.merge_patch(nlohmann::json::parse(changes));
    put(name, j.dump());
  }
  io::HfFolder open() const { return io::open_huggingface(path()); }
  io::Checkpoint checkpoint() const { return io::Checkpoint::open(path()); }

 private:
  TempDir dir_;
};

}  // namespace lacuna::test
