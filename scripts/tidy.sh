#!/usr/bin/env bash
# clang-tidy over src/ with the checks of .clang-tidy; any finding fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib/packages.sh
install_packages "${build_packages[@]}" clang-tidy-14
scripts/build.sh --no-install lacuna_commit
# Kernel files under cpu/isa appear once per instruction set; tidy reads each with the last one's flags.
status=0
git ls-files 'src/*.cc' | xargs -P "$(nproc)" -n 1 clang-tidy-14 --quiet -p build/release >build/tidy.log 2>&1 || status=$?
grep -vE '^[0-9]+ warnings? (generated|treated)|^Suppressed|^Use -header-filter' build/tidy.log || true
if [ "$status" -ne 0 ] || grep -qE '(warning|error):' build/tidy.log; then
  printf 'clang-tidy: findings, see build/tidy.log\n' >&2
  exit 1
fi
printf 'clang-tidy: clean\n'
