#!/usr/bin/env bash
# From nothing to a running model: installs packages, builds, gets a real model, runs it, prints its speed and perplexity.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib/packages.sh

usage() {
  cat <<'TXT'
usage: scripts/quickstart.sh [--large] [--threads N]
Builds Release, gets SmolLM2-135M-Instruct (98 MB) and shows it at work: generated text, tokens per second, perplexity, before and after
it is requantized to q4_0; then the same weights in the zigzag layout, dense against 25, 40 and 50% of the inputs skipped. Run again, it
takes seconds: what was made and measured is kept beside the model.
  --large       Qwen2.5-Coder-1.5B-Instruct (1.1 GB) instead: skipping inputs gains more there and costs less, but making the
                thresholds takes some minutes
  --threads N   threads to use (default: all cores)
TXT
}

model=smollm2-135m threads=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --large) model=qwen2.5-coder-1.5b ;;
    --threads) threads=(--threads "${2:?--threads needs a number}"); shift ;;
    *) printf 'error: unknown option %s\n' "$1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

step() { printf '\n== %s\n' "$1"; }

step "Packages and build"
install_packages "${build_packages[@]}" python3-pip
scripts/build.sh --no-install lacuna
lacuna=build/release/lacuna
"$lacuna" --version

step "Model"
path=$("$lacuna" pull "$model")
printf '%s\n' "$path"
"$lacuna" inspect "$path" | head -n 12

text=scripts/data/quickstart.txt
show() {  # show FILE: generated text, speed and perplexity
  "$lacuna" run "$1" "${threads[@]}" --chat -p "What are the three most important things to know about compilers?" -n 96 --temp 0
  "$lacuna" perplexity "$1" "${threads[@]}" -f "$text" --ctx 256
}

step "The model as it came"
show "$path"

step "The same model, requantized to q4_0"
quantized="${path%.gguf}.q4_0.gguf"
[ -s "$quantized" ] || "$lacuna" quantize "$path" -o "$quantized" --layout q4_0 "${threads[@]}"
show "$quantized"

step "Inputs skipped: zigzag weights, dense against 25, 40 and 50% activation sparsity"
python3 scripts/demo_spqt.py "$lacuna" "$path" "${threads[@]}"
if [ "$model" = smollm2-135m ]; then
  printf '%s\n' "A model this small reads much besides its layers and has little to spare. --large shows the same with a model of 1.5 billion" \
    "weights, whose layers take most of the time of a token, so that skipping their inputs gains more and costs less."
fi

step "Next"
printf 'chat:      %s run %s --chat\nmeasure:   %s bench %s --what prefill,decode\ncommands:  %s --help\n' \
  "$lacuna" "$path" "$lacuna" "$path" "$lacuna"
