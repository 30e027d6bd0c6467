#!/usr/bin/env bash
# Builds the Python package's wheel and runs python/tests on it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib/packages.sh
. scripts/lib/cuda.sh

usage() {
  cat <<'TXT2'
usage: scripts/python_test.sh [--prepare] [--python PYTHON] [--wheel FILE] [--cuda] [--jobs N]
  --prepare         only make the virtual environment in build/python-venv (torch and diffusers from PyPI, about 5 GB), where it is not there yet
  --python PYTHON   an interpreter that has torch and pytest, and to build nanobind and scikit-build-core, in place of it; nothing is installed into it
  --wheel FILE      test this wheel instead of building one
  --cuda            a test that skips is a failure, but for those of two devices where there is one. Else those on CUDA may, where there is none
  --jobs N          tests at a time, where the interpreter has pytest-xdist
TXT2
}

# Versions that the tests are run with.
wheels=(torch==2.11.0 diffusers==0.35.2 transformers==4.56.2 numpy safetensors pillow pytest nanobind==3.1.0 scikit-build-core==1.1.2)
venv=build/python-venv
prepare=0 python="" wheel="" cuda=0 jobs=1
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --prepare) prepare=1 ;;
    --python) python=${2:?--python needs an interpreter}; shift ;;
    --wheel) wheel=${2:?--wheel needs a file}; shift ;;
    --cuda) cuda=1 ;;
    --jobs)
      jobs=${2:?--jobs needs a number}
      [[ $jobs =~ ^[1-9][0-9]*$ ]] || { printf 'error: --jobs %s; it takes a number from 1 on\n' "$jobs" >&2; exit 2; }
      shift
      ;;
    *) printf 'error: unknown option %s\n' "$1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

make_venv() {
  local wanted="${wheels[*]}"
  [ "$(cat "$venv/complete" 2>/dev/null)" != "$wanted" ] || return 0
  rm -rf "$venv"
  python3 -m venv "$venv" || packages_fail "python3 -m venv failed; install python3-venv"
  printf 'fetching into %s: %s\n' "$venv" "$wanted" >&2
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile "${wheels[@]}" >&2 || packages_fail "pip could not fetch them; check the network"
  printf '%s\n' "$wanted" >"$venv/complete"
}
if [ -z "$python" ]; then
  make_venv
  python=$PWD/$venv/bin/python
fi
[ "$prepare" -eq 0 ] || exit 0

if [ -z "$wheel" ]; then
  # The flags of scripts/build.sh, so that the compiler's cache serves both.
  options=(-Ccmake.define.LACUNA_WERROR=ON)
  if nvcc=$(cuda_compiler 0 2>/dev/null); then options+=("-Ccmake.define.CMAKE_CUDA_COMPILER=$nvcc"); fi
  if command -v ccache >/dev/null; then
    options+=(-Ccmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache -Ccmake.define.CMAKE_CUDA_COMPILER_LAUNCHER=ccache)
    export CCACHE_BASEDIR=$PWD
  fi
  rm -rf build/wheels
  # The build asks for this interpreter's nanobind, and its PATH for scikit-build-core's helpers.
  CXX=${CXX:-c++} PATH=$(dirname "$(command -v "$python")"):$PATH "$python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
    "${options[@]}" --wheel-dir build/wheels . || packages_fail "the wheel does not build"
  wheel=$(ls build/wheels/lacuna-*.whl)
fi
site=$PWD/build/python-site
rm -rf "$site"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index --target "$site" "$wheel"

log=build/python_test.log
status=0
workers=()
if [ "$jobs" -gt 1 ]; then
  if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n "$jobs"); else printf 'no pytest-xdist here: one test at a time\n' >&2; fi
fi
# Threads that wait do not spin: the machine may build at the same time.
OMP_WAIT_POLICY=passive TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONPATH=$site "$python" -m pytest -q -ra --durations=5 -p no:cacheprovider ${workers[@]+"${workers[@]}"} python/tests >"$log" 2>&1 || status=$?
allowed='on CUDA: '
[ "$cuda" -eq 0 ] || allowed='on CUDA: there is one device only'
if grep -E '^SKIPPED ' "$log" | grep -vqF "$allowed"; then
  printf 'error: tests skipped that may not\n' >&2
  status=1
fi
[ "$status" -eq 0 ] || cat "$log"
grep -E '^SKIPPED ' "$log" | sed -E 's/^SKIPPED \[([0-9]+)\] [^ ]+: (.*)$/\1 \2/' | awk '{ n = $1; $1 = ""; count[$0] += n } END { for (reason in count) print count[reason] " tests SKIPPED:" reason }' || true
tail -n 1 "$log"
exit "$status"
