#!/usr/bin/env bash
# Installs what the build needs, configures and builds: build/release/lacuna.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib/packages.sh

usage() {
  cat <<'TXT'
usage: scripts/build.sh [--preset release|debug|sanitize|coverage] [--no-install] [TARGET...]
  --preset NAME   a configure preset of CMakePresets.json (default release); the result is build/NAME/lacuna
  --no-install    never install packages; fail in CMake where one is missing
TXT
}

preset=release install=1 targets=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --preset) preset=${2:?--preset needs a name}; shift ;;
    --no-install) install=0 ;;
    -*) printf 'error: unknown option %s\n' "$1" >&2; usage >&2; exit 2 ;;
    *) targets+=("$1") ;;
  esac
  shift
done
[ "$install" -eq 0 ] || install_packages "${build_packages[@]}"

launcher=()
if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
cmake --preset "$preset" "${launcher[@]}" -DLACUNA_WERROR=ON -Wno-dev >/dev/null
cmake --build --preset "$preset" ${targets[@]+--target "${targets[@]}"}
