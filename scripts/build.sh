#!/usr/bin/env bash
# Installs what the build needs, configures and builds: build/release/lacuna.
set -euo pipefail
from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib/packages.sh
. scripts/lib/cuda.sh

usage() {
  cat <<'TXT'
usage: scripts/build.sh [--preset release|debug|sanitize|coverage] [--cuda|--no-cuda] [--compress|--no-compress] [--torch FOLDER] [--no-install] [TARGET...]
  --preset NAME   a configure preset of CMakePresets.json (default release); the result is build/NAME/lacuna
  --cuda          with the CUDA backend; fetches a CUDA 13.0 compiler from PyPI (105 MB) where nvcc is not on the PATH
  --no-cuda       without it. Neither: with it where nvcc is on the PATH (release and debug only)
  --compress      with `lacuna compress`; installs Debian's libtorch-dev and OpenBLAS (about 500 MB with what they need) where they are missing
  --torch FOLDER  with it, made with the LibTorch of an installed PyTorch, whose torch folder this is: for compress --device cuda
  --no-compress   without it. Neither: with it where LibTorch is found (release and debug only)
  --no-install    never install packages; fail in CMake where one is missing
TXT
}

preset=release install=1 cuda=AUTO compress=AUTO torch= targets=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --preset) preset=${2:?--preset needs a name}; shift ;;
    --cuda) cuda=ON ;;
    --no-cuda) cuda=OFF ;;
    --compress) compress=ON ;;
    --no-compress) compress=OFF ;;
    --torch) compress=ON torch=$(cd "$from" && realpath -- "${2:?--torch needs a folder}"); shift ;;
    --no-install) install=0 ;;
    -*) printf 'error: unknown option %s\n' "$1" >&2; usage >&2; exit 2 ;;
    *) targets+=("$1") ;;
  esac
  shift
done
[ "$install" -eq 0 ] || install_packages "${build_packages[@]}"

if [ "$install" -eq 1 ] && [ "$compress" = ON ] && [ -z "$torch" ]; then install_packages "${compress_packages[@]}"; fi

options=(-DLACUNA_WERROR=ON "-DLACUNA_CUDA=$cuda" "-DLACUNA_COMPRESS=$compress" "-DLACUNA_TORCH=$torch")
if [ "$cuda" = ON ]; then
  nvcc=$(cuda_compiler "$install")
  options+=("-DCMAKE_CUDA_COMPILER=$nvcc")
fi
if command -v ccache >/dev/null; then
  options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  export CCACHE_BASEDIR=$PWD  # clones and worktrees find each other's objects
fi
cmake --preset "$preset" "${options[@]}" -Wno-dev >/dev/null
cmake --build --preset "$preset" ${targets[@]+--target "${targets[@]}"}
