#!/usr/bin/env bash
# clang-tidy over src/ with the checks of .clang-tidy; any finding fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -eq 0 ] || { printf 'usage: scripts/tidy.sh (takes no arguments; about 50 core minutes)\n' >&2; exit 2; }
. scripts/lib/packages.sh
install_packages clang-tidy-14 libc++-14-dev
scripts/build.sh --compress lacuna_commit
# Kernel files under cpu/isa appear once per instruction set and are read with the flags of each. LibTorch's headers do not
# compile with clang 14 and libstdc++ 12 as C++20, so the compressor is read with libc++.
tidy() { xargs -P "$(nproc)" -n 1 clang-tidy-14 --quiet -p build/release "$@" >>build/tidy.log 2>&1; }
compressor='^src/(solver|compress)/|^src/cli/compress'
status=0
: >build/tidy.log
git ls-files 'src/*.cc' | grep -vE "$compressor" | tidy || status=1
git ls-files 'src/*.cc' | grep -E "$compressor" | tidy --extra-arg=-stdlib=libc++ || status=1
grep -vE '^[0-9]+ warnings? (generated|treated)|^Suppressed|^Use -header-filter' build/tidy.log || true
if [ "$status" -ne 0 ] || grep -qE '(warning|error):' build/tidy.log; then
  printf 'clang-tidy: findings, see build/tidy.log\n' >&2
  exit 1
fi
printf 'clang-tidy: clean\n'
