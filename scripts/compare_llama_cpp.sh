#!/usr/bin/env bash
# Compares lacuna's tokens, greedy texts, perplexities and logits with llama.cpp's on the same files: the three evaluation models, and
# SmolLM2 requantized by llama.cpp's own tool to Q8_0, Q6_K and Q4_K_M. Prints one line a check and writes
# docs/results/compare-llama-cpp.json; exit status 1 where a check is outside its limit.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib/models.sh"
. "$here/lib/llama_cpp.sh"

usage() {
  cat <<EOF
usage: scripts/compare_llama_cpp.sh -f TEXT [--llama FOLDER] [--binding FOLDER] [options of scripts/compare_llama_cpp.py] [MODEL...]
  -f TEXT           the text to score, for example wikitext2-raw.test.txt
  --llama FOLDER    use this build of llama.cpp (with shared libraries) instead of building llama-cpp-python $llama_cpp_version's under $peers_dir
  --binding FOLDER  the unpacked source package of llama-cpp-python that belongs to that build
Without a MODEL: the six models named above (fetched and made where they are missing).
EOF
}

typed=$(printf '%q ' scripts/compare_llama_cpp.sh "$@")
llama="" binding="" rest=() models=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    -f | --text | --llama | --binding | --lacuna | --checks | --contexts | --tokens | --chunks | --kl-chunks | --threads | --output | --scratch)
      [ $# -ge 2 ] || llama_cpp_fail "$1 needs a value"
      case $1 in
        --llama) llama=$2 ;;
        --binding) binding=$2 ;;
        *) rest+=("$1" "$2") ;;
      esac
      shift 2
      ;;
    -*) rest+=("$1"); shift ;;
    *) models+=("$1"); shift ;;
  esac
done
if [ -z "$llama" ]; then
  llama_cpp_get
  llama=$llama_cpp_build
fi
if [ -z "$binding" ]; then
  llama_cpp_source
  binding=$llama_cpp_binding
fi
if [ "${#models[@]}" -eq 0 ]; then
  mapfile -t models < <("$here/eval_models.sh")
  [ "${#models[@]}" -eq 3 ] || llama_cpp_fail "the evaluation models are not all there, see above"
  quantize="$llama/bin/llama-quantize"
  for type in Q8_0 Q6_K Q4_K_M; do
    file="$models_dir/smollm2-$(printf '%s' "$type" | tr '[:upper:]' '[:lower:]').gguf"
    if [ ! -f "$file" ]; then
      "$quantize" --allow-requantize "$models_dir/smollm2-135m.gguf" "$file.partial" "$type" >"$file.log" 2>&1 ||
        llama_cpp_fail "$quantize: could not make $file, see $file.log"
      mv -- "$file.partial" "$file"
      rm -f "$file.log"
    fi
    models+=("$file")
  done
fi
python=$(llama_cpp_python)
exec "$python" "$here/compare_llama_cpp.py" --llama "$llama" --binding "$binding" --scratch "$peers_dir/scratch" --typed "$typed" \
  ${rest[@]+"${rest[@]}"} -- "${models[@]}"
