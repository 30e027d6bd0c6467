#!/usr/bin/env bash
# Perplexity (protocol hf, context 2048) of the trained model docs22m on its three texts against transformers' figures, within
# 0.1%. Needs the shared data folder; takes some minutes for the held-out text and about ten more with --all.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
usage() { printf 'usage: scripts/check_docs22m.sh [--all] [--save] [LACUNA_BINARY] [SHARED_DATA]\n  --all    all three texts, not only the held-out one\n  --save   write docs/results/docs22m.json\n'; }
typed=$(printf ' %q' "$@")
all=0 save=0
while [[ ${1:-} == -* ]]; do
  case $1 in
    --all) all=1 ;;
    --save) save=1 ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
  shift
done
lacuna=${1:-$root/build/release/lacuna}
data=${2:-${LACUNA_SHARED_DATA:-$root/../shared/data}}
model=$data/models/docs22m
rows=$(mktemp)
trap 'rm -f "$rows"' EXIT

check() {  # key in reference.json, text file
  "$lacuna" perplexity "$model" -f "$2" --ctx 2048 --protocol hf --json | python3 -c '
import json, sys
got = json.loads(sys.stdin.readlines()[-1])
want = json.load(open(sys.argv[1]))[sys.argv[2]]
error = got["ppl"] / want["ppl"] - 1
print("{}: {:.4f}, transformers {:.4f}, {:+.4%}, {} tokens".format(sys.argv[2], got["ppl"], want["ppl"], error, got["tokens"]))
with open(sys.argv[3], "a") as rows:
    rows.write(json.dumps({"text": sys.argv[2], "ppl": got["ppl"], "transformers": want["ppl"], "difference": error, "tokens": got["tokens"], "windows": got["windows"], "ctx": 2048, "protocol": "hf", "text_sha256": got["text_sha256"]}) + "\n")
sys.exit(abs(error) > 1e-3 or got["tokens"] != want["tokens"])' "$model/reference.json" "$1" "$rows"
}

check heldout "$model/heldout.txt"
if (( all )); then
  check wikitext2-raw.test "$data/text/wikitext2-raw.test.txt"
  check tinystories "$data/text/tinystories.valid-subset.txt"
fi
(( save )) || exit 0
python3 - "$rows" "$root/docs/results/docs22m.json" "scripts/check_docs22m.sh$typed" "$(git -C "$root" rev-parse --short=12 HEAD)" <<'PY'
import datetime, json, sys
rows, out, command, commit = sys.argv[1:]
with open(out, "w") as file:
    json.dump({"command": command, "commit": commit, "date": datetime.date.today().isoformat(), "rows": [json.loads(line) for line in open(rows)]}, file, indent=1)
    file.write("\n")
PY
