#!/usr/bin/env bash
# Compiles the CPU kernels for 64-bit ARM (NEON with dot products) with the cross compiler; nothing is linked or run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -eq 0 ] || { printf 'usage: scripts/check_neon.sh (takes no arguments)\n' >&2; exit 2; }
compiler=aarch64-linux-gnu-g++
command -v "$compiler" >/dev/null || { printf 'error: %s is not installed: apt-get install g++-aarch64-linux-gnu\n' "$compiler" >&2; exit 1; }
out=build/neon
mkdir -p "$out"
# Header-only libraries of the host serve: they hold nothing that depends on the architecture.
include=(-Isrc -idirafter /usr/include)
count=0
for source in src/kernels/*.cc src/kernels/reference/*.cc src/kernels/cpu/*.cc src/kernels/cpu/isa/*.cc; do
  [ -e "$source" ] || continue
  "$compiler" -std=c++20 -O2 -Wall -Wextra -Wshadow -Werror -march=armv8.2-a+dotprod+crypto -DLACUNA_ISA=generic -DFMT_HEADER_ONLY=1 "${include[@]}" -c "$source" \
    -o "$out/$(basename "$source" .cc).o"
  count=$((count + 1))
done
printf 'NEON: %d files compiled\n' "$count"
