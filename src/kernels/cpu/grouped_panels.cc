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

namespace {

/// Kept weights of the inputs [k, k + cols) of rows [n, n + rows); k, cols: multiples of 8.
int64_t count_kept(const Problem& p, int64_t n, int64_t rows, int64_t k, int64_t cols) {
  if (two_of_four(p)) return rows * cols / 2;
  const layout::BitmaskMap map(layout::get(p.layout), p.shape, p.params);
  int64_t kept = 0;
  for (int64_t r = n; r < n + rows; ++r) {
    const std::byte* mask = p.bytes.data() + map.mask + r * map.mask_row + k / 8;
    for (int64_t b = 0; b < cols / 8; b += 4) {
      uint32_t word;
      std::memcpy(&word, mask + b, sizeof(word));
      kept += std::popcount(word);
    }
  }
  return kept;
}

/// Calls use(step, first byte of the step in its panel, its masks' bytes) and returns the panel's size.
template <class Use>
int64_t each_step(const Problem& p, int64_t panel, const Use& use) {
  const int64_t K = p.shape.K, n = panel * kPanelRows, rows = std::min(kPanelRows, p.shape.N - n);
  const int bits = bits_of(p);
  int64_t at = steps_at(K, group_of(p));
  for (int64_t step = 0; step < count_steps(K); ++step) {
    const int64_t k = step * kStepCols, cols = std::min(kStepCols, K - k);
    use(step, at, cols * 2);
    const int64_t kept = count_kept(p, n, rows, k, cols);
    at += cols * 2 + (kept + chunk_codes(bits) - 1) / chunk_codes(bits) * chunk_bytes(bits);
  }
  return at;
}

void nothing(int64_t, int64_t, int64_t) {}

}  // namespace

int64_t masked_prepared_bytes(const Problem& p) {
  int64_t bytes = round_up(8 * (panel_count(p) + 1), 64);
  for (int64_t panel = 0; panel < panel_count(p); ++panel) bytes += each_step(p, panel, nothing);
  const int bits = bits_of(p);
  return bytes + most_chunks(bits) * chunk_bytes(bits) + 64;  // what a kernel may read past the end
}

void place_masked(const Problem& p, std::byte* prepared) {
  int64_t at = round_up(8 * (panel_count(p) + 1), 64);
  for (int64_t panel = 0; panel <= panel_count(p); ++panel) {
    std::memcpy(prepared + 8 * panel, &at, sizeof(at));
    if (panel < panel_count(p)) at += each_step(p, panel, nothing);
  }
}

void prepare_masked(const Problem& p, int64_t row0, int64_t row1, std::byte* prepared) {
  const int bits = bits_of(p);
  const int64_t K = p.shape.K, groups = count_groups(K, group_of(p));
  std::vector<KeptRow> rows(size_t{kPanelRows});
  std::vector<uint8_t> ordered(size_t(round_up(kPanelRows * kStepCols + 8, chunk_codes(bits))));
  for (int64_t n = row0; n < row1; n += kPanelRows) {
    const int64_t count = std::min(kPanelRows, row1 - n);
    int64_t at;
    std::memcpy(&at, prepared + n / kPanelRows * 8, sizeof(at));
    std::byte* panel = prepared + at;
    const uint8_t* next[kPanelRows];
    for (int64_t r = 0; r < count; ++r) {
      KeptRow& row = rows[size_t(r)];
      if (two_of_four(p))
        read_nm24_row(p, n + r, row);
      else
        read_bitmask_row(p, layout::BitmaskMap(layout::get(p.layout), p.shape, p.params), n + r, row);
      next[r] = row.code.data();
      for (int64_t g = 0; g < groups; ++g) {
        std::byte* scales = panel + scales_at(K) + g * kGroupBytes;
        std::memcpy(scales + 2 * r, &row.scale[size_t(2 * g)], 2);
        scales[32 + r] = std::byte(row.zero[size_t(g)]);
      }
    }
    int64_t most = 0;
    const int64_t size = each_step(p, n / kPanelRows, [&](int64_t step, int64_t first, int64_t mask_bytes) {
      const auto line = uint32_t(first / 64);
      std::memcpy(panel + 4 * step, &line, sizeof(line));
      int64_t written = 0;
      for (int64_t k = step * kStepCols; k < step * kStepCols + mask_bytes / 2; k += 4) {
        uint64_t mask = 0;
        for (int64_t r = 0; r < count; ++r) {
          const uint32_t four = uint32_t(rows[size_t(r)].mask[size_t(k / 8)]) >> (k % 8) & 15;
          mask |= uint64_t(four) << (4 * r);
          std::memcpy(&ordered[size_t(written)], next[r], 4);  // what is too much is written over
          written += std::popcount(four);
          next[r] += std::popcount(four);
        }
        std::memcpy(panel + first + k % kStepCols * 2, &mask, sizeof(mask));
      }
      const int64_t chunks = (written + chunk_codes(bits) - 1) / chunk_codes(bits);
      most = std::max(most, chunks);
      std::fill(ordered.begin() + written, ordered.begin() + std::max(written, chunks * chunk_codes(bits)), uint8_t{0});
      pack_chunks(bits, ordered.data(), chunks, panel + first + mask_bytes);
    });
    const uint32_t last[] = {uint32_t(size / 64), uint32_t((most + kQuarters - 1) / kQuarters)};
    std::memcpy(panel + 4 * count_steps(K), last, sizeof(last));
  }
}

}  // namespace lacuna::cpu
