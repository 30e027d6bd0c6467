#!/usr/bin/env bash
# Builds the fuzz targets with libFuzzer, ASan and UBSan and runs each for a number of seconds (default 60). A finding fails the run and leaves its input in build/fuzz.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib/packages.sh
seconds=${1:-60}
case $seconds in
  *[!0-9]* | "") printf 'usage: scripts/fuzz.sh [SECONDS]\n' >&2; exit 2 ;;
esac
install_packages "${build_packages[@]}" clang-14 libclang-rt-14-dev
scripts/build.sh --no-install --preset fuzz
status=0 passed=0 failed=0
for target in build/fuzz/*_fuzz; do
  name=$(basename "$target" _fuzz)
  corpus="build/fuzz/corpus/$name"
  mkdir -p "$corpus" "build/fuzz/findings"
  seeds=()
  [ ! -d "fuzz/corpus/$name" ] || seeds=("fuzz/corpus/$name")
  printf '== %s, %s s\n' "$name" "$seconds"
  if "$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix=build/fuzz/findings/"$name"- "$corpus" ${seeds[@]+"${seeds[@]}"} \
      >"build/fuzz/$name.log" 2>&1; then
    passed=$((passed + 1))
    grep -E '^stat::number_of_executed_units' "build/fuzz/$name.log"
  else
    failed=$((failed + 1)) status=1
    tail -n 30 "build/fuzz/$name.log"
  fi
done
printf '%d passed, %d failed\n' "$passed" "$failed"
exit "$status"
