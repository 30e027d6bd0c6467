#include "kernels/cuda/prepared.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>

#include "core/error.h"
#include "layout/q2_K.h"
#include "layout/q3_K.h"
#include "layout/q4_K.h"
#include "layout/q5_K.h"
#include "layout/q6_K.h"
#include "layout/q8_0.h"
#include "layout/zigzag.h"

namespace lacuna::cuda {
namespace {

/// The kernels compute offsets inside a row, and shares of a list, in 32 bits.
constexpr int64_t kMostInputs = int64_t{1} << 18;

// ---- one code as a block holds it, not negative; n: 0..255, see each layout's header ----

int code_of(const layout::Q2KBlock& block, int n) {
  return block.code[n / 128 * 32 + n % 32] >> (n % 128 / 32 * 2) & 3;
}
int code_of(const layout::Q3KBlock& block, int n) {
  const int low = block.low[n / 128 * 32 + n % 32] >> (n % 128 / 32 * 2) & 3;
  return low | (block.high[n % 32] >> (n / 32) & 1) << 2;
}
int code_of(const layout::Q4KBlock& block, int n) { return block.code[n / 64 * 32 + n % 32] >> (n % 64 / 32 * 4) & 15; }
int code_of(const layout::Q5KBlock& block, int n) {
  const int low = block.low[n / 64 * 32 + n % 32] >> (n % 64 / 32 * 4) & 15;
  return low | (block.high[n % 32] >> (n / 32) & 1) << 4;
}
int code_of(const layout::Q6KBlock& block, int n) {
  const int half = n / 128, quarter = n % 128 / 32, place = n % 32;
  const int low = block.low[64 * half + 32 * (quarter % 2) + place] >> (quarter / 2 * 4) & 15;
  return low | (block.high[32 * half + place] >> (2 * quarter) & 3) << 4;
}

/// Bits [first, first + bits) of the code of output p of each half.
struct Field {
  int p, first, bits;
};

/// A plane: `Word` is a lane's; its halves hold the fields one after the other from the lowest bit on.
template <class Word, class Block>
void put(const Block& block, std::initializer_list<Field> fields, std::byte* plane) {
  for (int l = 0; l < 32; ++l) {
    uint32_t word = 0;
    for (int half = 0; half < 2; ++half) {
      int at = half * int(sizeof(Word)) * 4;
      for (const Field& field : fields) {
        const int code = code_of(block, 8 * l + 4 * half + field.p);
        word |= uint32_t(code >> field.first & ((1 << field.bits) - 1)) << at;
        at += field.bits;
      }
    }
    const auto out = Word(word);
    std::memcpy(plane + size_t(l) * sizeof(Word), &out, sizeof(Word));
  }
}

template <class Block>
Block read(const std::byte* superblock) {
  Block block;
  std::memcpy(&block, superblock, sizeof(block));
  return block;
}

void prepare_zz2_k(const std::byte* superblock, std::byte* codes, std::byte* header) {
  const auto block = read<layout::Q2KBlock>(superblock);
  put<uint16_t>(block, {{0, 0, 2}, {1, 0, 2}, {2, 0, 2}, {3, 0, 2}}, codes);
  std::memcpy(header, block.scale_min, 16);
  std::memcpy(header + 16, &block.d, 2);
  std::memcpy(header + 18, &block.dmin, 2);
}

void prepare_zz3_k(const std::byte* superblock, std::byte* codes, std::byte* header) {
  const auto block = read<layout::Q3KBlock>(superblock);
  put<uint16_t>(block, {{0, 0, 3}, {1, 0, 3}, {2, 0, 2}}, codes);
  put<uint8_t>(block, {{3, 0, 3}, {2, 2, 1}}, codes + 64);
  std::memcpy(header, block.scale, 12);
  std::memcpy(header + 12, &block.d, 2);
  std::memset(header + 14, 0, 2);
}

void prepare_zz4_k(const std::byte* superblock, std::byte* codes, std::byte* header) {
  const auto block = read<layout::Q4KBlock>(superblock);
  put<uint32_t>(block, {{0, 0, 4}, {1, 0, 4}, {2, 0, 4}, {3, 0, 4}}, codes);
  std::memcpy(header, &block, 16);
}

void prepare_zz5_k(const std::byte* superblock, std::byte* codes, std::byte* header) {
  const auto block = read<layout::Q5KBlock>(superblock);
  put<uint32_t>(block, {{0, 0, 5}, {1, 0, 5}, {2, 0, 5}, {3, 4, 1}}, codes);
  put<uint8_t>(block, {{3, 0, 4}}, codes + 128);
  std::memcpy(header, &block, 16);
}

void prepare_zz6_k(const std::byte* superblock, std::byte* codes, std::byte* header) {
  const auto block = read<layout::Q6KBlock>(superblock);
  put<uint32_t>(block, {{0, 0, 6}, {1, 0, 6}, {2, 2, 4}}, codes);
  put<uint16_t>(block, {{2, 0, 2}, {3, 0, 6}}, codes + 128);
  std::memcpy(header, block.scale, 16);
  std::memcpy(header + 16, &block.d, 2);
  std::memset(header + 18, 0, 2);
}

void prepare_zz8(const std::byte* superblock, std::byte* codes, std::byte* header) {
  constexpr int kPlaces[] = {0, 1, 4, 5, 2, 3, 6, 7};
  for (int b = 0; b < 8; ++b) {
    const auto block = read<layout::Q8_0Block>(superblock + size_t(b) * sizeof(layout::Q8_0Block));
    std::memcpy(header + 2 * b, &block.scale, 2);
    for (int n = 0; n < 32; ++n) codes[32 * b + n / 8 * 8 + kPlaces[n % 8]] = std::byte(uint8_t(block.code[n]) ^ 0x80);
  }
}

constexpr ColumnForm kForms[] = {
    {layout::Id::zz2_k, 64, 20, prepare_zz2_k},  {layout::Id::zz3_k, 96, 16, prepare_zz3_k},
    {layout::Id::zz4_k, 128, 16, prepare_zz4_k}, {layout::Id::zz5_k, 160, 16, prepare_zz5_k},
    {layout::Id::zz6_k, 192, 20, prepare_zz6_k}, {layout::Id::zz8, 256, 16, prepare_zz8},
};

}  // namespace

const ColumnForm& column_form(const layout::Layout& layout) {
  std::string names;
  for (const ColumnForm& form : kForms) {
    if (form.id == layout.id) return form;
    names += (names.empty() ? "" : ", ") + std::string(layout::get(form.id).name);
  }
  throw Error("--device cuda: no kernel reads {}; those that one reads: {}", layout.name, names);
}

PreparedGroup prepare_group(std::span<const kernels::WeightView> parts, ThreadPool& pool) {
  PreparedGroup group;
  group.K = kernels::check_weights(parts);
  group.layout = parts[0].layout;
  const ColumnForm& form = column_form(*group.layout);
  if (group.K > kMostInputs)
    throw Error("{}: K = {}, but the CUDA kernels take at most {} inputs", parts[0].name, group.K, kMostInputs);
  for (const kernels::WeightView& part : parts) {
    if (part.layout != group.layout)
      throw Error("{}: is {}, but {} is {}; weights that one launch reads must have one layout", part.name,
                  part.layout->name, parts[0].name, group.layout->name);
    group.first_output.push_back(group.rows * layout::kSuperRows);
    group.rows += layout::super_rows(part.shape.N);
  }
  group.codes = HugeBuffer(size_t((group.rows * group.K + kSlackColumns) * form.code_bytes));
  group.headers = HugeBuffer(size_t(group.rows * group.K * form.header_bytes));
  constexpr int64_t kColumns = 512;  // a job: of one superblock row
  for (size_t p = 0; p < parts.size(); ++p) {
    const layout::ZigzagMap map(parts[p].shape, parts[p].params);
    const int64_t jobs_a_row = (group.K + kColumns - 1) / kColumns;
    pool.parallel_for(map.rows * jobs_a_row, 1, [&](int64_t begin, int64_t end) {
      for (int64_t job = begin; job < end; ++job) {
        const int64_t r = job / jobs_a_row, k0 = job % jobs_a_row * kColumns;
        for (int64_t k = k0; k < std::min(k0 + kColumns, group.K); ++k) {
          const int64_t to = (group.first_output[p] / layout::kSuperRows + r) * group.K + k;
          form.prepare(parts[p].bytes.data() + map.index(r, k) * group.layout->block_bytes,
                       group.codes.data() + to * form.code_bytes, group.headers.data() + to * form.header_bytes);
        }
      }
    });
  }
  return group;
}

}  // namespace lacuna::cuda
