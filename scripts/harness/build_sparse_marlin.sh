#!/usr/bin/env bash
# usage: scripts/harness/build_sparse_marlin.sh SOURCE [OUTPUT]
# Compiles sparse_marlin_linear.cc with the kernel of SOURCE, a checkout of IST-DASLab/Sparse-Marlin, for compute capability 9.0 (another:
# LACUNA_CUDA_ARCH=80), and prints the program's path. Without OUTPUT: SOURCE/lacuna-sparse-marlin. It needs no PyTorch, and on the machine
# that runs it the driver alone. An up-to-date program is left as it is.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
root=$(cd -- "$here/../.." && pwd)

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 1
}
[ $# -ge 1 ] && [ $# -le 2 ] || { sed -n '2,5p' "$0" | cut -c3- >&2; exit 2; }
source=$1 output=${2:-$1/lacuna-sparse-marlin} arch=${LACUNA_CUDA_ARCH:-90}
kernel=$source/marlin/marlin_cuda_kernel_nm.cu
[ -f "$kernel" ] || fail "$kernel: missing; give a checkout of https://github.com/IST-DASLab/Sparse-Marlin"
nvcc=$(command -v nvcc) || fail "nvcc is not on the PATH; install CUDA 13.0, or put the nvcc of build/cuda-toolkit (scripts/build.sh --cuda) there"

plain=("$here/sparse_marlin_linear.cc" "$root/src/model/shapes.cc" "$root/src/core/error.cc")
current=1
for file in "${plain[@]}" "$root/src/kernels/cuda/device.cu" "${BASH_SOURCE[0]}" "$kernel"; do
  [ "$output" -nt "$file" ] || current=0
done
if [ "$current" -eq 0 ]; then
  objects=$(mktemp -d)
  trap 'rm -rf "$objects"' EXIT
  code=(-gencode "arch=compute_$arch,code=sm_$arch")
  {
    for file in "${plain[@]}"; do
      "${CXX:-c++}" -std=c++20 -O2 -Wall -Wextra -DFMT_HEADER_ONLY -I "$root/src" -c "$file" -o "$objects/$(basename -- "$file").o" || exit 1
    done
    "$nvcc" -std=c++20 -O3 "${code[@]}" -DFMT_HEADER_ONLY -DFMT_USE_CONSTEXPR=1 -I "$root/src" -c "$root/src/kernels/cuda/device.cu" -o "$objects/device.cu.o" || exit 1
    "$nvcc" -std=c++17 -O3 "${code[@]}" --expt-relaxed-constexpr --disable-warnings -I "$source/marlin" -c "$kernel" -o "$objects/kernel.cu.o" || exit 1
    "$nvcc" "$objects"/*.o -o "$output" || exit 1
  } >&2 || fail "$output: sparse_marlin_linear.cc does not compile against $source"
fi
printf '%s\n' "$(cd -- "$(dirname -- "$output")" && pwd)/$(basename -- "$output")"
