#include "layout/fallback.h"

namespace lacuna::layout {

namespace {

Id smaller_block(Id id) {
  switch (id) {
    case Id::q2_K:
    case Id::q3_K:
      return Id::q4_0;
    case Id::q4_K:
      return Id::q5_0;
    case Id::q5_K:
      return Id::q5_1;
    case Id::q6_K:
      return Id::q8_0;
    default:
      return Id::f16;
  }
}

}  // namespace

Id fitting_layout(Id wanted, int64_t K) {
  Id id = wanted;
  while (K % get(id).block_cols != 0) id = smaller_block(id);
  return id;
}

}  // namespace lacuna::layout
