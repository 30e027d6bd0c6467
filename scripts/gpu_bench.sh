#!/usr/bin/env bash
# Linear layers of one token on an NVIDIA GPU, beside PyTorch's int4 kernel in the same run: docs/results/spqt-cuda-linear.json.
# usage: scripts/gpu_bench.sh [--lacuna PROGRAM] [options of scripts/gpu_bench.py]; without --lacuna it is built first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  -h | --help) exec python3 scripts/gpu_bench.py --help ;;
esac
case " $* " in
  *" --lacuna "*) ;;
  *)
    scripts/build.sh --cuda lacuna
    set -- --lacuna build/release/lacuna "$@"
    ;;
esac
exec python3 scripts/gpu_bench.py "$@"
