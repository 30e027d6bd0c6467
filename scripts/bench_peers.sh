#!/usr/bin/env bash
# Speed of lacuna beside llama.cpp (built once from its source package on PyPI) and, where a build is given, ik_llama.cpp:
# all read the same files, in turn. Prints tables and writes docs/results/peers-cpu.json. `--help` lists the options.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib/models.sh"
. "$here/lib/llama_cpp.sh"

usage() {
  cat <<EOF
usage: scripts/bench_peers.sh [--llama FOLDER] [--ik FOLDER] [--shape NAME] [options of scripts/bench_peers.py] [MODEL...]
  --llama FOLDER   use this build of llama.cpp instead of building llama-cpp-python $llama_cpp_version's under $peers_dir
  --ik FOLDER      also measure this build of ik_llama.cpp (it needs bin/llama-bench and bin/llama-cli)
  --shape NAME     also measure random weights of a known shape (lacuna synth), for example llama-3.2-1b
Without a MODEL: the three models of scripts/eval_models.sh (fetched where they are missing).
EOF
  python3 "$here/bench_peers.py" --help | sed -n '/^options:/,$p'
}

typed=$(printf '%q ' scripts/bench_peers.sh "$@")
llama="" lacuna="$here/../build/release/lacuna"
shapes=() rest=() models=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --llama | --lacuna | --shape | --ik | --ik-version | --llama-version | --rounds | --threads | --prompt | --generate | --context | --output)
      [ $# -ge 2 ] || llama_cpp_fail "$1 needs a value"
      case $1 in
        --llama) llama=$2 ;;
        --shape) shapes+=("$2") ;;
        --lacuna) lacuna=$2; rest+=("$1" "$2") ;;
        *) rest+=("$1" "$2") ;;
      esac
      shift 2
      ;;
    -*) rest+=("$1"); shift ;;
    *) models+=("$1"); shift ;;
  esac
done
if [ "${#models[@]}" -eq 0 ] && [ "${#shapes[@]}" -eq 0 ]; then
  mapfile -t models < <("$here/eval_models.sh")
  [ "${#models[@]}" -eq 3 ] || llama_cpp_fail "the evaluation models are not all there, see above"
fi
for shape in ${shapes[@]+"${shapes[@]}"}; do
  file="$models_dir/synth-$shape-q4_K.gguf"
  if [ ! -f "$file" ]; then
    [ -x "$lacuna" ] || llama_cpp_fail "$lacuna: not built, but it makes the file of --shape $shape; run scripts/build.sh"
    mkdir -p "$models_dir"
    "$lacuna" synth "$shape" -o "$file" --layout q4_K >&2
  fi
  models+=("$file")
done
if [ -z "$llama" ]; then
  llama_cpp_get
  llama=$llama_cpp_build
  rest+=(--llama-version "llama-cpp-python $llama_cpp_version")
fi
exec python3 "$here/bench_peers.py" --llama "$llama" --typed "$typed" ${rest[@]+"${rest[@]}"} -- "${models[@]}"
