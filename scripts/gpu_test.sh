#!/usr/bin/env bash
# Builds the tests with the CUDA backend and runs those that need a device, on a machine with an NVIDIA GPU. A test that skips is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TXT'
usage: scripts/gpu_test.sh [--tests PROGRAM] [--sanitize]
  --tests PROGRAM   run this kernels_test, and model_test, calibrate_test, eval_test, cli_test and lacuna beside it, instead of building them; solver_test and
                    compress_test too where they are there and were made with a PyTorch for CUDA
  --sanitize        the small tests once more under compute-sanitizer's memcheck and racecheck (CUDA toolkit), about ten minutes, most of them the
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
  torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__) if torch.version.cuda else "")' 2>/dev/null || true)
  compressor=()
  [ -z "$torch" ] || compressor=(lacuna-compress solver_test compress_test)
  scripts/build.sh --cuda ${torch:+--torch "$torch"} lacuna kernels_test model_test calibrate_test eval_test cli_test ${compressor[@]+"${compressor[@]}"}
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

# One process a test, since each takes up to seven minutes. Left out: a thousand tokens, and those that try many plans.
racecheck_decoder() {
  local logs names
  logs=$(mktemp -d)
  "$folder/model_test" --gtest_list_tests '--gtest_filter=CudaDecoderTest.*:-*AThousand*:*Tuned*:*GivenPlans*' >"$logs/names"
  mapfile -t names < <(sed -n 's/^  //p' "$logs/names")
  [ "${#names[@]}" -gt 0 ] || { printf 'error: model_test has no tests of the decoder\n' >&2; exit 1; }
  if ! printf '%s\n' "${names[@]}" | LOGS=$logs PROGRAM=$folder/model_test xargs -P 12 -I{} bash -c \
    'compute-sanitizer --error-exitcode 1 --tool racecheck "$PROGRAM" --gtest_filter=CudaDecoderTest.{} >"$LOGS/{}" 2>&1 &&
      grep -q "^\[  PASSED  \] 1 test" "$LOGS/{}" || { cat "$LOGS/{}"; exit 1; }'; then
    printf 'error: racecheck of the decoder failed, or tests skipped\n' >&2
    exit 1
  fi
  rm -rf "$logs"
  printf 'racecheck of the decoder: %s tests\n' "${#names[@]}"
}

run "GPU tests" "$tests" '--gtest_filter=*Cuda*'
run "GPU tests of the decoder" "$folder/model_test" '--gtest_filter=CudaDecoder*'
run "GPU tests of calibration" "$folder/calibrate_test" '--gtest_filter=CudaCalibrate.*'
run "GPU tests of the image net" "$folder/model_test" '--gtest_filter=CudaFlux*'
run "GPU tests of products of the image net" "$folder/eval_test" '--gtest_filter=CudaTensorCoreCase*'
run "GPU tests of the image net's statistics" "$folder/calibrate_test" '--gtest_filter=CudaImageStatistics*'
run "GPU tests of plans" env LACUNA_PROGRAM="$(realpath "$folder/lacuna")" "$folder/cli_test" '--gtest_filter=TuneCuda*'
run "GPU tests of image commands" env LACUNA_PROGRAM="$(realpath "$folder/lacuna")" "$folder/cli_test" '--gtest_filter=ImageCuda*:ImageCalibrateCuda*'
# Tensor parallelism through peer memory and through NCCL (libnccl.so.2 of the Python package nvidia-nccl-cu13), from the folder LACUNA_NCCL or from Python.
if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
  if [ -z "${LACUNA_NCCL:-}" ]; then
    LACUNA_NCCL=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/lib")' 2>/dev/null || true)
    export LACUNA_NCCL
  fi
  run "exchanges through peer memory" timeout 300 "$tests" '--gtest_filter=PeerExchange*'
  run "tests of two devices through peer memory" "$folder/model_test" '--gtest_filter=*TwoDevices*/peer'
  if [ -n "$LACUNA_NCCL" ]; then
    run "tests of two devices through NCCL" "$folder/model_test" '--gtest_filter=*TwoDevices*/nccl'
  else
    printf 'SKIPPED: two devices through NCCL, which Python does not have and LACUNA_NCCL does not name\n'
  fi
else
  printf 'SKIPPED: tests of two devices, this machine has one\n'
fi
# The compressor runs on a GPU with a PyTorch that is made for CUDA.
if [ -x "$folder/solver_test" ] && [ -x "$folder/compress_test" ] && ldd "$folder/solver_test" | grep -q libtorch_cuda; then
  compressor_runs=1
  run "GPU tests of the solvers" "$folder/solver_test" '--gtest_filter=*Cuda*'
  run "GPU tests of the compressor" "$folder/compress_test" '--gtest_filter=*Cuda*'
else
  compressor_runs=0
  printf 'SKIPPED: the compressor on a GPU, which needs a PyTorch made for CUDA\n'
fi
# The Python package, where there is a torch for CUDA. LACUNA_WHEEL: its wheel, which is built here where it is not given.
if python3 -c 'import pytest, torch; assert torch.version.cuda' 2>/dev/null && { [ -n "${LACUNA_WHEEL:-}" ] || python3 -c 'import nanobind, scikit_build_core' 2>/dev/null; }; then
  scripts/python_test.sh --python python3 --cuda ${LACUNA_WHEEL:+--wheel "$LACUNA_WHEEL"}
else
  printf 'SKIPPED: the Python package, which needs torch for CUDA, pytest, and LACUNA_WHEEL or nanobind and scikit-build-core\n'
fi
# The program: Table 2, and a model of which one layer is on the CPU, whose tokens are those of the CPU alone.
if ! "$folder/lacuna" bench --device cuda --spqt --parts table2 --synthetic llama-3.2-1b --layers 2 --runs 2 --gen 16 >"$log" 2>&1 || ! grep -q 'uniform 50% *[0-9]' "$log"; then
  cat "$log"
  printf 'error: Table 2 does not run\n' >&2
  exit 1
fi
printf 'Table 2: runs\n'
ids() { "$folder/lacuna" run tests/fixtures/gguf_models/llama_gqa_rope_llama3.gguf --prompt-ids 1,2,3,4,5,6,7 -n 8 --temp 0 --ignore-eos --json "$@" 2>/dev/null | grep -o '"ids":[^]]*]' || true; }
expected=$(ids)
for flags in "" "--gpu-layers 1" "--gpu-split 2"; do
  # shellcheck disable=SC2086
  found=$(ids --device cuda $flags)
  [ -n "$expected" ] && [ "$found" = "$expected" ] || { printf 'error: run --device cuda %s gives %s, the CPU %s\n' "$flags" "$found" "$expected" >&2; exit 1; }
done
printf 'run --gpu-layers, --gpu-split: the tokens of the CPU\n'
# Real models: those that are here, at least one.
"$folder/eval_test" '--gtest_filter=*CudaModels*' | tee "$log"
if ! grep -q '^\[       OK \]' "$log"; then
  printf 'error: no real model was compared; run `lacuna pull smollm2-135m` first\n' >&2
  exit 1
fi
if [ "$sanitize" -eq 1 ]; then
  run memcheck compute-sanitizer --error-exitcode 1 --tool memcheck "$tests" \
    '--gtest_filter=*CudaGemv.EveryActiveCount/zz4_k:*CudaGemv.EveryActiveCount/zz6_k:*CudaGemv.Siblings*:*CudaGemv.Large*:*CudaGemv.NonFinite*:*CudaGemv.Equal*:*CudaGemv.Norms*:*CudaGemv.TakesTheGate*:*CudaBaselines*:CudaCollectActive.*:CudaGemmRange.*:*CudaGemm.Slices*:CudaOps.TopK:CudaGroups.Gates*:CudaGroups.Large*:CudaGroups.WhatIs*:CudaGroups.Operands*:CudaGroupedRows.*:CudaCalibration.*:*GemvFew*:*CudaBeam*'
  run racecheck compute-sanitizer --error-exitcode 1 --tool racecheck "$tests" '--gtest_filter=*CudaGemv.Large*:*CudaGemv.Equal*:*CudaBaselines*:CudaCollectActive.Nine*:*CudaGemm.Slices*:CudaOps.TopK:CudaGroups.Gates*:CudaGroups.Large*:CudaGroups.WhatIs*:CudaGroups.Operands*:CudaGroupedRows.*:CudaCalibration.Mask*:CudaCalibration.Distances*'
  [ "$compressor_runs" -eq 0 ] ||
    run "memcheck of the solvers" compute-sanitizer --error-exitcode 1 --kernel-name kernel_substring=fix "$folder/solver_test" '--gtest_filter=*Cuda*'
  run "memcheck of the decoder" compute-sanitizer --error-exitcode 1 --tool memcheck "$folder/model_test" '--gtest_filter=CudaDecoder*:-*AThousand*:*Tuned*'
  racecheck_decoder
  image_kernels='CudaTensorCore.UnitV*:CudaTensorCore.GroupsG*:CudaTensorCore.Tiles*:CudaTensorCore.Few*:CudaImageOps.*:CudaQuantizeTokens.*:CudaColumnStatistics.*:-CudaImageOps.AttentionOfMany*:CudaColumnStatistics.Large*'
  run "memcheck of image kernels" compute-sanitizer --error-exitcode 1 --tool memcheck "$tests" "--gtest_filter=$image_kernels"
  run "racecheck of image kernels" compute-sanitizer --error-exitcode 1 --tool racecheck "$tests" \
    "--gtest_filter=${image_kernels/GroupsG/Joined}"
  run "memcheck of calibration" compute-sanitizer --error-exitcode 1 --tool memcheck "$folder/calibrate_test" '--gtest_filter=CudaCalibrate.Thresh*'
  run "memcheck of the image net" compute-sanitizer --error-exitcode 1 --tool memcheck "$folder/model_test" '--gtest_filter=CudaFlux.*'
  run "memcheck of the image net's statistics" compute-sanitizer --error-exitcode 1 --tool memcheck "$folder/calibrate_test" '--gtest_filter=CudaImageStatistics.*'
fi
