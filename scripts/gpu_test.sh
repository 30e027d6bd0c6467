#!/usr/bin/env bash
# Builds the tests with the CUDA backend and runs those that need a device, on a machine with an NVIDIA GPU. A test that skips is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TXT'
usage: scripts/gpu_test.sh [--tests PROGRAM] [--sanitize]
  --tests PROGRAM   run this kernels_test, and model_test and eval_test beside it, instead of building them
  --sanitize        the small tests once more under compute-sanitizer's memcheck and racecheck (CUDA toolkit), about seven minutes, most of them the
                    decoder's racecheck, whose tests run side by side
TXT
}
tests="" sanitize=0
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --tests) tests=${2:?--tests needs a program}; shift ;;
    --sanitize) sanitize=1 ;;
    *) printf 'error: unknown option %s\n' "$1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
if [ -z "$tests" ]; then
  scripts/build.sh --cuda kernels_test model_test eval_test
  tests=build/release/kernels_test
fi
folder=$(dirname "$tests")

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# run NAME COMMAND...: prints the output where it fails or skips, else its last lines.
run() {
  local name=$1
  shift
  if ! "$@" >"$log" 2>&1 || grep -q '^\[  SKIPPED \]' "$log"; then
    cat "$log"
    printf 'error: %s failed, or tests skipped\n' "$name" >&2
    exit 1
  fi
  printf '%s: ' "$name"
  grep -E '^\[  PASSED  \]|ERROR SUMMARY|RACECHECK SUMMARY' "$log" | paste -sd' '
}

# One process a test: a few minutes each under racecheck.
racecheck_decoder() {
  local logs tests
  logs=$(mktemp -d)
  mapfile -t tests < <("$folder/model_test" --gtest_list_tests '--gtest_filter=CudaDecoder*:-*AThousand*:*Tuned*:*GivenPlans*' | sed -n 's/^  //p')
  if ! printf '%s\n' "${tests[@]}" | LOGS=$logs PROGRAM=$folder/model_test xargs -P 12 -I{} bash -c \
    'compute-sanitizer --error-exitcode 1 --tool racecheck "$PROGRAM" --gtest_filter=CudaDecoderTest.{} >"$LOGS/{}" 2>&1 || { cat "$LOGS/{}"; exit 1; }'; then
    printf 'error: racecheck of the decoder failed\n' >&2
    exit 1
  fi
  printf 'racecheck of the decoder: %s tests, %s hazards\n' "${#tests[@]}" "$(cat "$logs"/* | grep -c 'RACECHECK SUMMARY: [1-9]' || true)"
  rm -rf "$logs"
}

run "GPU tests" "$tests" '--gtest_filter=*Cuda*'
run "GPU tests of the decoder" "$folder/model_test" '--gtest_filter=CudaDecoder*'
# Real models: those that are here, at least one.
"$folder/eval_test" '--gtest_filter=*CudaModels*' | tee "$log"
if ! grep -q '^\[       OK \]' "$log"; then
  printf 'error: no real model was compared; run `lacuna pull smollm2-135m` first\n' >&2
  exit 1
fi
if [ "$sanitize" -eq 1 ]; then
  run memcheck compute-sanitizer --error-exitcode 1 --tool memcheck "$tests" \
    '--gtest_filter=*CudaGemv.EveryActiveCount/zz4_k:*CudaGemv.EveryActiveCount/zz6_k:*CudaGemv.Siblings*:*CudaGemv.Large*:*CudaGemv.NonFinite*:*CudaGemv.Equal*:*CudaGemv.Norms*:*CudaGemv.TakesTheGate*:*CudaBaselines*:CudaCollectActive.*:CudaGemmRange.*:*CudaGemm.Slices*:CudaOps.TopK'
  run racecheck compute-sanitizer --error-exitcode 1 --tool racecheck "$tests" '--gtest_filter=*CudaGemv.Large*:*CudaGemv.Equal*:*CudaBaselines*:CudaCollectActive.Nine*:*CudaGemm.Slices*:CudaOps.TopK'
  run "memcheck of the decoder" compute-sanitizer --error-exitcode 1 --tool memcheck "$folder/model_test" '--gtest_filter=CudaDecoder*:-*AThousand*:*Tuned*'
  racecheck_decoder
fi
