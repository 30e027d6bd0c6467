#!/usr/bin/env bash
# Builds the fuzz targets with libFuzzer, ASan and UBSan and runs each for a number of seconds (default 60), one after the other or all at once (--together).
# A finding fails the run and leaves its input in build/fuzz/findings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib/packages.sh
usage() { printf 'usage: scripts/fuzz.sh [--together] [SECONDS]\n' >&2; exit 2; }
at_once=1
if [ "${1:-}" = --together ]; then at_once=0; shift; fi  # 0: as many as there are
seconds=${1:-60}
[ $# -le 1 ] || usage
case $seconds in *[!0-9]* | "") usage ;; esac
install_packages "${build_packages[@]}" clang-14 libclang-rt-14-dev
targets=()
for source in fuzz/*_fuzz.cc; do targets+=("$(basename "$source" .cc)"); done
scripts/build.sh --no-install --preset fuzz "${targets[@]}"
mkdir -p build/fuzz/findings

# run_target NAME SECONDS: one target from its own corpus and the committed seeds; its last lines where it found something.
run_target() {
  local name=${1%_fuzz} seeds=()
  local log="build/fuzz/$name.log"
  mkdir -p "build/fuzz/corpus/$name"
  [ ! -d "fuzz/corpus/$name" ] || seeds=("fuzz/corpus/$name")
  if "build/fuzz/$1" -max_total_time="$2" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="build/fuzz/findings/$name-" \
      "build/fuzz/corpus/$name" ${seeds[@]+"${seeds[@]}"} >"$log" 2>&1; then
    printf '%s: no finding in %s s, %s inputs\n' "$name" "$2" "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")"
  else
    { tail -n 30 "$log"; printf '%s: FINDING, see %s\n' "$name" "$log"; } >&2
    return 1
  fi
}
export -f run_target
status=0
printf '%s\n' "${targets[@]}" | xargs -P "$at_once" -I TARGET bash -c 'run_target "$@"' _ TARGET "$seconds" || status=1
exit "$status"
