#!/usr/bin/env bash
# Installs what the tests need, checks the sources, builds and runs every test. The last lines are ctest's own summary.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib/packages.sh

usage() {
  cat <<'TXT'
usage: scripts/test.sh [--quick] [--python]
  --quick   only the Release tests: no format, include, warning and sanitizer checks
  --python  the Python package's tests too, for which torch is fetched from PyPI (about 5 GB)
A test that skips must be listed in tests/allowed_skips.txt, else the run fails. Tests that need data or models beyond the repository read them from
LACUNA_SHARED_DATA and LACUNA_MODELS and skip where these are absent.
TXT
}
quick=0 python=0
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --quick) quick=1 ;;
    --python) python=1 ;;
    *) printf 'error: unknown option %s\n' "$1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

step() { printf '\n== %s (%ds)\n' "$1" "$SECONDS"; }

step "Packages"
install_packages "${build_packages[@]}" "${test_packages[@]}" python3-pip

if [ "$quick" -eq 0 ]; then
  step "Format, include arrows, scripts"
  git ls-files -z -- '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0 clang-format-14 --dry-run --Werror
  python3 scripts/check_includes.py
  for source in bench/*.cc fuzz/*.cc; do  # not part of the build below
    clang++-14 -std=c++20 -Wall -Wextra -Wshadow -Werror -fsyntax-only -Isrc "$source"
  done
  for script in scripts/*.sh .ci/run; do bash -n "$script"; done
  python3 -m compileall -q python scripts
  if git grep -nE '@[A-Z0-9_]{4,}@' -- '*.md'; then packages_fail "a document holds a placeholder"; fi
fi

# The CUDA code takes nvcc from the PATH, else from PyPI, and takes some 30 core minutes; its tests skip without a device. The sanitized build is
# the one without either.
step "Release build with the CUDA backend and the compressor, warnings are errors"
scripts/build.sh --cuda --compress
python3 scripts/check_isa_symbols.py build/release

if [ "$quick" -eq 0 ]; then
  step "Unit tests under ASan and UBSan"
  # The command line's tests drive whole processes, those named after a model take minutes; they run in Release below.
  scripts/build.sh --no-install --no-compress --preset sanitize core_test layout_test io_test tokenizer_test kernels_test model_test calibrate_test eval_test
  scripts/run_ctest.sh build/sanitize --exclude-regex 'NOT_BUILT|^SmolLM2'

  step "The kernels compile for NEON"
  scripts/check_neon.sh
fi

step "The Python package"
if [ "$python" -eq 1 ]; then
  install_packages "${python_packages[@]}"
  scripts/python_test.sh
else
  echo "SKIPPED: the Python package's tests fetch torch from PyPI (about 5 GB); scripts/test.sh --python runs them, or scripts/python_test.sh alone"
fi

step "Release tests"
scripts/run_ctest.sh build/release
