#!/usr/bin/env bash
# What activation sparsity does to generated text: three prompts, greedy, 64 tokens each, dense beside sparse, as one JSON file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib/models.sh

# Fixed before anything was generated.
prompts=(
  "The three most important things to know about compilers are"
  "def binary_search(items, target):"
  "In the autumn of 1884 the lighthouse keeper wrote in his diary that"
)
tokens=64

usage() {
  cat <<TXT
usage: scripts/generate_samples.sh [-o FILE] [--threads N]
Continues three fixed prompts by $tokens tokens, greedy: smollm2-135m dense and at 25%, qwen1.5b dense, at 40 and 50% (a model that is
not there is left out, and said so). Models and their thresholds (lacuna calibrate) are looked for in $models_dir (LACUNA_MODELS);
zigzag files NAME-zz4_k.gguf are taken where they exist. LACUNA names the program, where it is not build/release/lacuna.
  -o FILE       where the JSON goes (default: docs/results/spqt-texts.json)
  --threads N   threads to use (default: all cores)
TXT
}

output=docs/results/spqt-texts.json threads=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    -o) output=${2:?-o needs a file}; shift ;;
    --threads) threads=(--threads "${2:?--threads needs a number}"); shift ;;
    *) printf 'error: unknown option %s\n' "$1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
lacuna=${LACUNA:-build/release/lacuna}
[ -x "$lacuna" ] || { printf 'error: %s is not there; run scripts/build.sh, or set LACUNA to the program\n' "$lacuna" >&2; exit 1; }

lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
samples() {  # samples NAME LEVEL...: of a model and its thresholds
  local name=$1 file thresholds="$models_dir/$1.thresholds.gguf" level prompt
  shift
  file="$models_dir/$name-zz4_k.gguf"
  [ -e "$file" ] || file="$models_dir/$name.gguf"
  if [ ! -e "$file" ] || [ ! -e "$thresholds" ]; then
    printf 'left out: %s (needs %s and %s; see scripts/eval_models.sh and lacuna calibrate --help)\n' "$name" "$file" "$thresholds" >&2
    return 0
  fi
  for level in "$@"; do
    for prompt in "${prompts[@]}"; do
      printf '%s at %s%%: %s\n' "$name" "$level" "$prompt" >&2
      local sparse=()
      [ "$level" = 0 ] || sparse=(--act-sparsity "$level" --thresholds "$thresholds")
      "$lacuna" run "$file" --raw -p "$prompt" -n "$tokens" --temp 0 --ignore-eos --json "${sparse[@]}" "${threads[@]}" |
        python3 -c '
import json, sys
row = json.load(sys.stdin)
print(json.dumps({"model": sys.argv[1], "level": int(sys.argv[2]) / 100, "act_sparsity": row["act_sparsity"], "prompt": sys.argv[3],
                  "text": row["text"]}))' "$(basename "$file")" "$level" "$prompt" >>"$lines"
    done
  done
}
samples smollm2-135m 0 25
samples qwen1.5b 0 40 50
[ -s "$lines" ] || { printf 'error: no model was found, nothing was written\n' >&2; exit 1; }

mkdir -p "$(dirname "$output")"
python3 - "$lines" "$output" "$("$lacuna" --version | head -n 1)" <<'PY'
import datetime
import json
import os
import sys

lines, output, version = sys.argv[1:]
rows = [json.loads(line) for line in open(lines, encoding="utf-8")]
with open(output + ".partial", "w", encoding="utf-8") as out:
    json.dump({"command": "scripts/generate_samples.sh", "program": version, "date": datetime.date.today().isoformat(), "rows": rows}, out,
              indent=1, ensure_ascii=False)
    out.write("\n")
os.replace(output + ".partial", output)
PY
printf '%s: %d texts\n' "$output" "$(wc -l <"$lines")"
