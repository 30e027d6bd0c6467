#include "kernels/cpu/grouped_panels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/scalar.h"
#include "layout/bm.h"
#include "layout/gq.h"
#include "layout/grouped.h"
#include "layout/nm24_q4.h"
#include "layout/octet.h"

namespace lacuna::cpu {
namespace {

using layout::Nm24Q4Block;

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
int64_t panel_count(const Problem& p) { return (p.shape.N + kPanelRows - 1) / kPanelRows; }
bool two_of_four(const Problem& p) { return layout::get(p.layout).family == layout::Family::two_of_four; }
int bits_of(const Problem& p) { return layout::get(p.layout).bits; }

/// Inputs of a full group.
int64_t group_of(const Problem& p) {
  return two_of_four(p) ? Nm24Q4Block::kCols : layout::whole_group(p.shape.K, p.params.group_size);
}
bool fits_blocks(const Problem& p) {
  const int64_t group = group_of(p);
  return p.prepare == kernels::Prepare::automatic && p.shape.K > 0 && p.shape.K % kBlock == 0 &&
         (group % kBlock == 0 || group == p.shape.K);
}

float half_at(const std::byte* at) {
  f16 half;
  std::memcpy(&half, at, sizeof(half));
  return to_float(half);
}

/// One row: its mask, the codes of the kept weights, scales as f16 and zeros.
struct KeptRow {
  std::vector<std::byte> mask;  // [K / 8]
  std::vector<uint8_t> code;    // padded by 8
  std::vector<std::byte> scale;
  std::vector<uint8_t> zero;
};

void read_bitmask_row(const Problem& p, const layout::BitmaskMap& map, int64_t n, KeptRow& out) {
  const layout::BitmaskRow row = layout::bitmask_row(map, p.shape, p.params, p.bytes, n);
  out.mask.assign(row.mask, row.mask + map.mask_row);
  out.code.resize(size_t((row.octets + 1) * layout::kOctet));
  for (int64_t o = 0; o < row.octets; ++o)
    layout::read_octet(map.bits, row.code + o * map.bits, layout::kOctet, &out.code[size_t(o * layout::kOctet)]);
  const std::byte* scale = p.bytes.data() + map.scale + 2 * n * map.groups;
  const std::byte* zero = p.bytes.data() + map.zero + 2 * n * map.groups;
  out.scale.assign(scale, scale + 2 * map.groups);
  out.zero.resize(size_t(map.groups));
  for (int64_t g = 0; g < map.groups; ++g) out.zero[size_t(g)] = uint8_t(half_at(zero + 2 * g));
}

void read_nm24_row(const Problem& p, int64_t n, KeptRow& out) {
  const int64_t K = p.shape.K, blocks = K / Nm24Q4Block::kCols;
  out.mask.assign(size_t(K / 8), std::byte{0});
  out.code.resize(size_t(K / 2 + layout::kOctet));
  out.scale.resize(size_t(2 * blocks));
  out.zero.assign(size_t(blocks), 8);
  for (int64_t b = 0; b < blocks; ++b) {
    Nm24Q4Block block;
    std::memcpy(&block, p.bytes.data() + (n * blocks + b) * int64_t(sizeof(block)), sizeof(block));
    std::memcpy(&out.scale[size_t(2 * b)], &block.scale, sizeof(block.scale));
    for (int64_t i = 0; i < Nm24Q4Block::kKept; ++i) {
      const int64_t k = b * Nm24Q4Block::kCols + 4 * (i / 2) + (block.index[i / 4] >> (2 * (i % 4)) & 3);
      out.mask[size_t(k / 8)] |= std::byte(1 << (k % 8));
      out.code[size_t(b * Nm24Q4Block::kKept + i)] = block.code[i / 2] >> (4 * (i % 2)) & 15;
    }
  }
}

/// Octets of the rows before n.
int64_t octets_before(const Problem& p, int64_t n) {
  n = std::min(n, p.shape.N);
  if (two_of_four(p)) return n * (p.shape.K / 2 / layout::kOctet);
  uint32_t start;  // row_start is at the beginning
  std::memcpy(&start, p.bytes.data() + 4 * n, sizeof(start));
  return start;
}

/// Panel's place: a panel of o octets takes codes_at + o * bits + a chunk at most, and octets before it are rounded
/// down by less than a line.
int64_t masked_panel_at(const Problem& p, int64_t panel) {
  const int64_t fixed = codes_at(p.shape.K, group_of(p)) + chunk_bytes(bits_of(p)) + 64;
  return round_up(8 * panel_count(p), 64) + panel * fixed + octets_before(p, panel * kPanelRows) * bits_of(p) / 64 * 64;
}

/// Packs codes into chunks. code: whole chunks, padded with zeros.
void pack_chunks(int bits, const uint8_t* code, int64_t chunks, std::byte* out) {
  const auto line = [&](const uint8_t* from, int shift, int width) {
    for (int i = 0; i < 64; ++i) {
      uint32_t byte = 0;
      for (int q = 0; q < 8 / width; ++q)
        byte |= (uint32_t(from[64 * q + i]) >> shift & ((1u << width) - 1)) << (q * width);
      out[i] = std::byte(byte);
    }
    out += 64;
  };
  for (int64_t c = 0; c < chunks; ++c, code += chunk_codes(bits)) {
    if (bits == 3) {
      line(code, 0, 2);
      line(code + 256, 0, 2);
      line(code, 2, 1);
    } else {
      line(code, 0, bits);
    }
  }
}

}  // namespace

bool fits_dense_panels(const Problem& p) { return fits_blocks(p); }

bool fits_masked_panels(const Problem& p) {
  if (!fits_blocks(p)) return false;
  if (two_of_four(p)) return true;
  const layout::BitmaskMap map(layout::get(p.layout), p.shape, p.params);
  const float top = float((1 << map.bits) - 1);
  for (int64_t i = 0; i < p.shape.N * map.groups; ++i) {
    const float zero = half_at(p.bytes.data() + map.zero + 2 * i);
    if (!(zero >= 0 && zero <= top && zero == std::floor(zero))) return false;
  }
  return true;
}

int64_t dense_prepared_bytes(const Problem& p) {
  return panel_count(p) * dense_panel_bytes(bits_of(p), p.shape.K, group_of(p));
}

void prepare_dense(const Problem& p, int64_t row0, int64_t row1, std::byte* prepared) {
  const int bits = bits_of(p);
  const int64_t K = p.shape.K, group = group_of(p), groups = count_groups(K, group);
  const int low = bits == 3 ? 2 : bits, high = bits - low;
  const int64_t stride = dense_panel_bytes(bits, K, group);
  const auto row_bytes = layout::gq_row_bytes(bits, K, p.params.group_size);
  std::vector<uint8_t> code(static_cast<size_t>(K));
  std::vector<float> scale(static_cast<size_t>(groups)), zero(scale);
  for (int64_t n = row0; n < row1; ++n) {
    const std::byte* row = p.bytes.data() + n * row_bytes;
    layout::read_gq_row(bits, {row, size_t(row_bytes)}, code, scale, zero);
    const auto r = n % kPanelRows;
    std::byte* panel = prepared + n / kPanelRows * stride;
    for (int64_t b = 0; b < K / kBlock; ++b) {
      // Memory starts as zeros and each row adds its own dwords.
      auto* plane = reinterpret_cast<uint32_t*>(panel + b * 64 * bits);
      for (int j = 0; j < 8; ++j) {
        uint32_t four;
        std::memcpy(&four, &code[size_t(kBlock * b + 4 * j)], sizeof(four));
        const uint32_t low_mask = 0x01010101u * ((1u << low) - 1), high_mask = 0x01010101u * ((1u << high) - 1);
        plane[16 * (j % low) + r] |= (four & low_mask) << (low * (j / low));
        if (high > 0) plane[16 * low + 16 * (j % high) + r] |= (four >> low & high_mask) << (high * (j / high));
      }
    }
    std::byte* scales = panel + K / kBlock * 64 * bits;
    for (int64_t g = 0; g < groups; ++g) {
      std::memcpy(scales + g * kGroupBytes + 2 * r, row + 2 * g, 2);
      std::memcpy(scales + g * kGroupBytes + 32 + 2 * r, row + 2 * (groups + g), 2);
    }
  }
}

// Past the last panel lies what an expansion may read of 64 bytes.
int64_t masked_prepared_bytes(const Problem& p) { return masked_panel_at(p, panel_count(p)) + 128; }

void prepare_masked(const Problem& p, int64_t row0, int64_t row1, std::byte* prepared) {
  const int bits = bits_of(p);
  const int64_t K = p.shape.K, group = group_of(p), groups = count_groups(K, group);
  std::vector<KeptRow> rows(size_t{kPanelRows});
  std::vector<uint8_t> ordered;
  for (int64_t n = row0; n < row1; n += kPanelRows) {
    const int64_t count = std::min(kPanelRows, row1 - n), at = masked_panel_at(p, n / kPanelRows);
    std::memcpy(prepared + n / kPanelRows * 8, &at, sizeof(at));
    std::byte* panel = prepared + at;
    int64_t kept = 0;
    for (int64_t r = 0; r < count; ++r) {
      KeptRow& row = rows[size_t(r)];
      if (two_of_four(p))
        read_nm24_row(p, n + r, row);
      else
        read_bitmask_row(p, layout::BitmaskMap(layout::get(p.layout), p.shape, p.params), n + r, row);
      kept += int64_t(row.code.size());
      for (int64_t g = 0; g < groups; ++g) {
        std::memcpy(panel + g * kGroupBytes + 2 * r, &row.scale[size_t(2 * g)], 2);
        panel[g * kGroupBytes + 32 + r] = std::byte(row.zero[size_t(g)]);
      }
    }
    ordered.assign(size_t(round_up(kept + 8, chunk_codes(bits))), 0);
    const uint8_t* next[kPanelRows];
    for (int64_t r = 0; r < count; ++r) next[r] = rows[size_t(r)].code.data();
    int64_t written = 0;
    for (int64_t k = 0; k < K; k += 4) {
      if (k % kStepCols == 0) {
        const auto start = uint32_t(written);
        std::memcpy(panel + starts_at(K, group) + k / kStepCols * 4, &start, sizeof(start));
      }
      uint64_t mask = 0;
      for (int64_t r = 0; r < count; ++r) {
        const uint32_t four = uint32_t(rows[size_t(r)].mask[size_t(k / 8)]) >> (k % 8) & 15;
        mask |= uint64_t(four) << (4 * r);
        std::memcpy(&ordered[size_t(written)], next[r], 4);  // what is too much is written over
        written += std::popcount(four);
        next[r] += std::popcount(four);
      }
      std::memcpy(panel + masks_at(K, group) + k / 4 * 8, &mask, sizeof(mask));
    }
    const auto end = uint32_t(written);
    std::memcpy(panel + starts_at(K, group) + (K + kStepCols - 1) / kStepCols * 4, &end, sizeof(end));
    const int64_t chunks = (written + chunk_codes(bits) - 1) / chunk_codes(bits);
    std::fill(ordered.begin() + written, ordered.end(), uint8_t{0});
    pack_chunks(bits, ordered.data(), chunks, panel + codes_at(K, group));
  }
}

}  // namespace lacuna::cpu
