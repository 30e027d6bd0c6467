#!/usr/bin/env bash
# usage: scripts/run_ctest.sh BUILD_FOLDER [ctest options]: runs ctest; fails also when a test skipped that tests/allowed_skips.txt does not list.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:?usage: scripts/run_ctest.sh BUILD_FOLDER [ctest options]}
shift
[ -d "$build" ] || { printf 'usage: scripts/run_ctest.sh BUILD_FOLDER [ctest options]; %s is no folder\n' "$build" >&2; exit 2; }
log="$build/ctest.log"
status=0
ctest --test-dir "$build" --output-on-failure -j "$(nproc)" --no-tests=error "$@" >"$log" 2>&1 || status=$?
# The passed tests' lines go to the log only.
grep -vE '^ *(Start +[0-9]+:|[0-9]+/[0-9]+ Test +#[0-9]+:.* Passed )' "$log" | grep -v '^$' || true
python3 scripts/check_skips.py "$log" tests/allowed_skips.txt || status=1
# ctest's summary again, so that the log ends with the counts.
grep -E '^[0-9]+% tests passed' "$log"
exit "$status"
