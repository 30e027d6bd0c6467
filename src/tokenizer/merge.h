// src/tokenizer/merge.h - the merge loop that all kinds of BPE share: O(n log n) in the number of symbols.
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

namespace lacuna {

/// A stretch of a word that is one token so far (id -1: no token).
struct Symbol {
  int32_t id;
  uint32_t begin;
  uint32_t length;  // bytes; 0 once it was merged into the symbol on its left
};

/// What two neighbours would become. Lower order first; id -1: they don't merge.
struct Merge {
  double order = 0;
  int32_t id = -1;
};

/// Joins neighbours, lowest order first and leftmost among equals, until none merges.
/// find(left, right) -> Merge. Leaves the symbols that remain, in order.
template <class Find>
void merge_symbols(std::vector<Symbol>& symbols, Find&& find) {
  struct Candidate {
    double order;
    uint32_t left, right;
    uint32_t length;  // of both together; tells whether they are still what they were
    int32_t id;
    bool operator>(const Candidate& other) const {
      return order != other.order ? order > other.order : left > other.left;
    }
  };
  constexpr uint32_t kNone = UINT32_MAX;
  const auto n = static_cast<uint32_t>(symbols.size());
  if (n < 2) return;
  std::vector<uint32_t> previous(n);
  std::vector<uint32_t> next(n);
  std::vector<Candidate> initial;
  const auto candidate = [&](uint32_t left, uint32_t right, auto&& add) {
    if (left == kNone || right == kNone) return;
    const Merge merge = find(symbols[left], symbols[right]);
    if (merge.id >= 0) add({merge.order, left, right, symbols[left].length + symbols[right].length, merge.id});
  };
  for (uint32_t i = 0; i < n; ++i) {
    previous[i] = i == 0 ? kNone : i - 1;
    next[i] = i + 1 == n ? kNone : i + 1;
    candidate(i, next[i], [&](const Candidate& c) { initial.push_back(c); });
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue(std::greater<>(), std::move(initial));
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[best.left];
    Symbol& right = symbols[best.right];
    if (left.length == 0 || right.length == 0 || left.length + right.length != best.length) continue;
    left.id = best.id;
    left.length = best.length;
    right.length = 0;
    next[best.left] = next[best.right];
    if (next[best.left] != kNone) previous[next[best.left]] = best.left;
    const auto push = [&](const Candidate& c) { queue.push(c); };
    candidate(previous[best.left], best.left, push);
    candidate(best.left, next[best.left], push);
  }
  std::erase_if(symbols, [](const Symbol& s) { return s.length == 0; });
}

}  // namespace lacuna
