#!/usr/bin/env bash
# usage: scripts/harness/build_ggml_linear.sh BUILD [OUTPUT]
# Compiles ggml_linear.cc against BUILD, the folder of a finished build of llama.cpp or of ik_llama.cpp (which of the two it is, is found
# out), and prints the program's path. Without OUTPUT: BUILD/lacuna-ggml-linear. An up-to-date program is left as it is.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
root=$(cd -- "$here/../.." && pwd)

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 1
}
[ $# -ge 1 ] && [ $# -le 2 ] || { sed -n '2,4p' "$0" | cut -c3- >&2; exit 2; }
build=$1 output=${2:-$1/lacuna-ggml-linear}
cache=$build/CMakeCache.txt
[ -f "$cache" ] || fail "$build: no CMakeCache.txt in it; give the folder of a finished build of llama.cpp or ik_llama.cpp"
source=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$cache")
include=$source/ggml/include
[ -f "$include/ggml.h" ] || fail "$include/ggml.h: missing; it is where $cache says that the source is"

flags=() libraries=()
if [ -f "$build/bin/libggml-cpu.so" ]; then
  folder=$build/bin libraries=(-lggml-cpu -lggml-base -lggml)
  [ ! -f "$folder/libggml-cuda.so" ] || { libraries=(-lggml-cuda "${libraries[@]}"); flags=(-DGGML_LINEAR_CUDA); }
elif [ -f "$build/ggml/src/libggml.so" ] && [ -d "$source/ggml/src/iqk" ]; then
  folder=$build/ggml/src libraries=(-lggml) flags=(-DGGML_LINEAR_IK)
else
  fail "$build: neither bin/libggml-cpu.so (llama.cpp) nor ggml/src/libggml.so (ik_llama.cpp) in it; build with shared libraries"
fi
inputs=("$here/ggml_linear.cc" "$root/src/model/shapes.cc" "$root/src/core/error.cc")
current=1
for file in "${inputs[@]}" "${BASH_SOURCE[0]}" "$folder/${libraries[-1]/-l/lib}.so"; do
  [ "$output" -nt "$file" ] || current=0
done
if [ "$current" -eq 0 ]; then
  "${CXX:-c++}" -std=c++20 -O2 -Wall -Wextra ${flags[@]+"${flags[@]}"} -I "$root/src" -isystem "$include" "${inputs[@]}" -o "$output" \
    -L "$folder" -Wl,-rpath,"$(cd -- "$folder" && pwd)" "${libraries[@]}" -lfmt >&2 || fail "$output: ggml_linear.cc does not compile against $source"
fi
printf '%s\n' "$(cd -- "$(dirname -- "$output")" && pwd)/$(basename -- "$output")"
