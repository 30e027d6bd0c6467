#include "tokenizer/merge.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace lacuna {
namespace {

using Table = std::map<std::pair<int32_t, int32_t>, Merge>;

std::vector<Symbol> symbols_of(const std::vector<int32_t>& ids) {
  std::vector<Symbol> symbols;
  for (const int32_t id : ids) symbols.push_back({id, static_cast<uint32_t>(symbols.size()), 1});
  return symbols;
}

Merge look_up(const Table& table, const Symbol& left, const Symbol& right) {
  const auto it = table.find({left.id, right.id});
  return it == table.end() ? Merge{} : it->second;
}

std::vector<int32_t> merged(const std::vector<int32_t>& ids, const Table& table) {
  std::vector<Symbol> symbols = symbols_of(ids);
  merge_symbols(symbols, [&](const Symbol& l, const Symbol& r) { return look_up(table, l, r); });
  std::vector<int32_t> out;
  for (const Symbol& symbol : symbols) out.push_back(symbol.id);
  return out;
}

/// The definition: again and again the leftmost pair of lowest order.
std::vector<int32_t> merged_slowly(const std::vector<int32_t>& ids, const Table& table) {
  std::vector<Symbol> symbols = symbols_of(ids);
  while (true) {
    size_t best = symbols.size();
    Merge best_merge;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const Merge merge = look_up(table, symbols[i], symbols[i + 1]);
      if (merge.id >= 0 && (best_merge.id < 0 || merge.order < best_merge.order)) {
        best = i;
        best_merge = merge;
      }
    }
    if (best_merge.id < 0) break;
    symbols[best].id = best_merge.id;
    symbols.erase(symbols.begin() + static_cast<ptrdiff_t>(best) + 1);
  }
  std::vector<int32_t> out;
  for (const Symbol& symbol : symbols) out.push_back(symbol.id);
  return out;
}

TEST(MergeSymbols, LowestOrderFirstThenLeftmost) {
  const Table table = {{{1, 2}, {1, 12}}, {{2, 3}, {0, 23}}, {{1, 23}, {5, 123}}, {{1, 1}, {2, 11}}};
  EXPECT_EQ(merged({1, 2, 3}, table), (std::vector<int32_t>{123}));
  EXPECT_EQ(merged({1, 1, 1}, table), (std::vector<int32_t>{11, 1}));
  EXPECT_EQ(merged({1, 1, 2}, table), (std::vector<int32_t>{1, 12}));
  EXPECT_EQ(merged({}, table), std::vector<int32_t>{});
  EXPECT_EQ(merged({7}, table), std::vector<int32_t>{7});
}

TEST(MergeSymbols, KeepsTheStretchesTogether) {
  std::vector<Symbol> symbols = symbols_of({1, 1, 1, 2});
  const Table table = {{{1, 1}, {0, 11}}};
  merge_symbols(symbols, [&](const Symbol& l, const Symbol& r) { return look_up(table, l, r); });
  ASSERT_EQ(symbols.size(), 3u);
  EXPECT_EQ(symbols[0].begin, 0u);
  EXPECT_EQ(symbols[0].length, 2u);
  EXPECT_EQ(symbols[1].begin, 2u);
  EXPECT_EQ(symbols[2].begin, 3u);
}

TEST(MergeSymbols, EqualsTheDefinitionOnRandomTables) {
  std::mt19937 rng(1);
  for (int round = 0; round < 300; ++round) {
    Table table;
    int32_t next = 4;
    for (int m = 0; m < 30; ++m) {
      const auto left = static_cast<int32_t>(rng() % static_cast<uint32_t>(next));
      const auto right = static_cast<int32_t>(rng() % static_cast<uint32_t>(next));
      if (table.try_emplace({left, right}, Merge{static_cast<double>(rng() % 20), next}).second) ++next;
    }
    std::vector<int32_t> ids(1 + rng() % 60);
    for (int32_t& id : ids) id = static_cast<int32_t>(rng() % 4);
    EXPECT_EQ(merged(ids, table), merged_slowly(ids, table)) << "round " << round;
  }
}

}  // namespace
}  // namespace lacuna
