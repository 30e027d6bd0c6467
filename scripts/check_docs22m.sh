#!/usr/bin/env bash
# Perplexity (protocol hf, context 2048) of the trained model docs22m on its three texts against transformers' figures, within
# 0.1%. Needs the shared data folder; takes some minutes for the held-out text and about ten more with --all.
#   scripts/check_docs22m.sh [--all] [LACUNA_BINARY] [SHARED_DATA]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
all=0
if [[ ${1:-} == --all ]]; then all=1; shift; fi
lacuna=${1:-$root/build/release/lacuna}
data=${2:-${LACUNA_SHARED_DATA:-$root/../shared/data}}
model=$data/models/docs22m

check() {  # key in reference.json, text file
  "$lacuna" perplexity "$model" -f "$2" --ctx 2048 --protocol hf --json | python3 -c '
import json, sys
got = json.loads(sys.stdin.readlines()[-1])
want = json.load(open(sys.argv[1]))[sys.argv[2]]
error = got["ppl"] / want["ppl"] - 1
print("{}: {:.4f}, transformers {:.4f}, {:+.4%}, {} tokens".format(sys.argv[2], got["ppl"], want["ppl"], error, got["tokens"]))
sys.exit(abs(error) > 1e-3 or got["tokens"] != want["tokens"])' "$model/reference.json" "$1"
}

check heldout "$model/heldout.txt"
if (( all )); then
  check wikitext2-raw.test "$data/text/wikitext2-raw.test.txt"
  check tinystories "$data/text/tinystories.valid-subset.txt"
fi
