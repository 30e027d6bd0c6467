#include "kernels/cuda/prepared.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/error.h"
#include "layout/q4_K.h"
#include "layout/zigzag.h"

namespace lacuna::cuda {
namespace {

/// The kernels compute offsets inside a row, and shares of a list, in 32 bits.
constexpr int64_t kMostInputs = int64_t{1} << 18;

void prepare_zz4_k(const std::byte* superblock, std::byte* codes, std::byte* header) {
  layout::Q4KBlock block;
  std::memcpy(&block, superblock, sizeof(block));
  std::memcpy(header, &block, 16);
  for (int l = 0; l < 32; ++l) {
    uint32_t word = 0;
    for (int i = 0; i < 8; ++i) {
      const int n = 8 * l + i;
      word |= uint32_t(block.code[n / 64 * 32 + n % 32] >> (n % 64 / 32 * 4) & 15) << (4 * i);
    }
    std::memcpy(codes + 4 * l, &word, 4);
  }
}

constexpr ColumnForm kForms[] = {
    {layout::Id::zz4_k, 128, 16, prepare_zz4_k},
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
      throw Error("{}: is {}, but {} is {}; weights that read one input must have one layout on a CUDA device",
                  part.name, part.layout->name, parts[0].name, group.layout->name);
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
