#!/usr/bin/env bash
# Builds the tests with the CUDA backend and runs those that need a device, on a machine with an NVIDIA GPU. A test that skips is a failure; what needs a
# second GPU, NCCL, PyTorch or a model that is not here is left out, and a line says so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib/parts.sh

usage() {
  cat <<'TXT'
usage: scripts/gpu_test.sh [--tests PROGRAM] [--sanitize | --sanitize-only] [--parts PATTERN] [--jobs N]
  --tests PROGRAM   run this kernels_test, and model_test, calibrate_test, eval_test, cli_test and lacuna beside it, instead of building them; solver_test and
                    compress_test too where they are there and were made with a PyTorch for CUDA
  --sanitize        the small tests once more under compute-sanitizer's memcheck and racecheck (CUDA toolkit); most of these parts are the decoder's racecheck,
                    a test each
  --sanitize-only   these without the tests themselves
  --parts PATTERN   only the parts that are named so: 'tests of*', 'racecheck of*', '*decoder*'; leaves out what runs by itself at the end
  --jobs N          parts at a time; without it half as many as there are processors, 8 a GPU at most. Some tests need gigabytes of the device's memory and skip,
                    so that their part fails, where others leave less: 1 on a small card
Parts run side by side, divided between the GPUs (CUDA_VISIBLE_DEVICES or all), with a line for each as it ends and all of its output where it has not passed.
By themselves, after them: what needs two devices, the Python package, the program, real models.
TXT
}
# value FLAG VALUE...: what follows a flag.
value() {
  [ -n "${2:-}" ] || { printf 'error: %s needs a value; see --help\n' "$1" >&2; exit 2; }
  printf '%s' "$2"
}
tests="" sanitize=0 plain=1 jobs=0
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --tests) tests=$(value "$@"); shift ;;
    --sanitize) sanitize=1 ;;
    --sanitize-only) sanitize=1 plain=0 ;;
    --parts) part_pattern=$(value "$@"); shift ;;
    --jobs)
      jobs=$(value "$@")
      [[ $jobs =~ ^[1-9][0-9]*$ ]] || { printf 'error: --jobs %s; it takes a number from 1 on\n' "$jobs" >&2; exit 2; }
      shift
      ;;
    *) printf 'error: unknown option %s\n' "$1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
# Parts of tests and sanitizers are divided between the GPUs.
if [ -n "${CUDA_VISIBLE_DEVICES+x}" ]; then
  IFS=, read -ra part_devices <<<"${CUDA_VISIBLE_DEVICES// /}"
else
  # Without a driver it says so on its standard output.
  mapfile -t part_devices < <(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+$' || true)
fi
[ "${#part_devices[@]}" -gt 0 ] || { printf 'error: no GPU is visible (nvidia-smi, CUDA_VISIBLE_DEVICES); these tests need one and its driver\n' >&2; exit 1; }
if [ "$jobs" -eq 0 ]; then
  jobs=$(($(nproc) / 2)) most=$((8 * ${#part_devices[@]}))
  [ "$jobs" -ge 1 ] || jobs=1
  [ "$jobs" -le "$most" ] || jobs=$most
fi
if [ -z "$tests" ]; then
  torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__) if torch.version.cuda else "")' 2>/dev/null || true)
  compressor=()
  [ -z "$torch" ] || compressor=(lacuna-compress solver_test compress_test)
  scripts/build.sh --cuda ${torch:+--torch "$torch"} lacuna kernels_test model_test calibrate_test eval_test cli_test ${compressor[@]+"${compressor[@]}"}
  tests=build/release/kernels_test
fi
folder=$(dirname "$tests")

work=$(mktemp -d)
log=$work/log
trap 'end_parts; rm -rf "$work"' EXIT
# run NAME COMMAND...: prints the output where it fails or skips, else its last lines.
run() {
  local name=$1
  shift
  if ! "$@" >"$log" 2>&1 || ! passed "$log"; then
    cat "$log"
    printf 'error: %s failed, or tests skipped\n' "$name" >&2
    exit 1
  fi
  printf '%s: %s\n' "$name" "$(summary "$log")"
}

# The compressor runs on a GPU with a PyTorch that is made for CUDA.
compressor_runs() { [ -x "$folder/solver_test" ] && [ -x "$folder/compress_test" ] && ldd "$folder/solver_test" | grep -q libtorch_cuda; }

# check TOOL COUNT WHAT PROGRAM FILTER: tests under a tool of compute-sanitizer, in so many parts.
check() {
  local command=(compute-sanitizer --error-exitcode 1 --tool "$1" "$4" "--gtest_filter=$5")
  if [ "$2" -eq 1 ]; then
    part "$1 of $3" "${command[@]}"
  else
    shards "$2" "$1 of $3" "${command[@]}"
  fi
}

# The sanitizers' parts, those that take longest first.
add_sanitizers() {
  local names name image_kernels
  command -v compute-sanitizer >/dev/null || { printf 'error: no compute-sanitizer on the PATH; it comes with the CUDA toolkit\n' >&2; exit 1; }
  check memcheck 12 "the decoder" "$folder/model_test" 'CudaDecoder*:-*AThousand*:*Tuned*'
  # One process a test, since each takes minutes. Left out: what runs thousands of tokens, all beams of many models, what tries many plans, and a second run
  # of shards. Beams in a fixed order have every kernel of beams.
  "$folder/model_test" --gtest_list_tests '--gtest_filter=CudaDecoderTest.*:-*AThousand*:*Tuned*:*GivenPlans*:*PromptsLonger*:*BeamsAreAsLikely*:*TwoShardsGive*' >"$work/names"
  mapfile -t names < <(sed -n 's/^  //p' "$work/names")
  [ "${#names[@]}" -gt 0 ] || { printf 'error: model_test has no tests of the decoder\n' >&2; exit 1; }
  for name in "${names[@]}"; do check racecheck 1 "the decoder, $name" "$folder/model_test" "CudaDecoderTest.$name"; done
  check racecheck 1 "last rounds of tiles" "$tests" 'CudaTensorCore.Tiles*'
  check memcheck 6 kernels "$tests" '*CudaGemv.EveryActiveCount/zz4_k:*CudaGemv.EveryActiveCount/zz6_k:*CudaGemv.Siblings*:*CudaGemv.Large*:*CudaGemv.NonFinite*:*CudaGemv.Equal*:*CudaGemv.Norms*:*CudaGemv.TakesTheGate*:*CudaGemv.MoreBlocks*:*CudaGemv.Clears*:*CudaBaselines*:CudaCollectActive.*:CudaGemmRange.*:*CudaGemm.Slices*:CudaRows/EachLayout.Teams*:CudaOps.TopK:CudaOps.MoreValues*:CudaGroups.Gates*:CudaGroups.Large*:CudaGroups.WhatIs*:CudaGroups.Operands*:CudaGroups.Warps*:CudaGroupedRows.*:CudaCalibration.*:*GemvFew*:*CudaBeam*'
  check racecheck 4 kernels "$tests" '*CudaGemv.Large*:*CudaGemv.Equal*:*CudaBaselines*:CudaCollectActive.Nine*:*CudaGemm.Slices*:CudaOps.TopK:CudaGroups.Gates*:CudaGroups.Large*:CudaGroups.WhatIs*:CudaGroups.Operands*:CudaGroupedRows.*:CudaCalibration.Mask*:CudaCalibration.Distances*'
  # Blocks that take several tiles, teams that take several groups of rows.
  check racecheck 4 "loops over tiles" "$tests" 'CudaGemmRange.BlocksThat*:CudaRows/EachLayout.Teams*/f16:CudaRows/EachLayout.Teams*/q8_0:CudaRows/EachLayout.Teams*/q4_K'
  # Left out: the same kernels hundreds of times, and one without shared memory.
  check racecheck 2 "kernels of beams" "$tests" 'CudaBeams.LogSum*:CudaBeams.TopK*:*CudaBeamHeads*:*CudaGemvFew.WithinWhat*:*CudaGemvFew.NonFinite*'
  image_kernels='CudaTensorCore.UnitV*:CudaTensorCore.GroupsG*:CudaTensorCore.Tiles*:CudaTensorCore.Few*:CudaImageOps.*:CudaQuantizeTokens.*:CudaColumnStatistics.*:-CudaImageOps.AttentionOfMany*:CudaColumnStatistics.Large*'
  check memcheck 3 "image kernels" "$tests" "$image_kernels"
  # Last rounds of tiles have a part of their own.
  check racecheck 4 "image kernels" "$tests" "CudaTensorCore.Joined*:$image_kernels:CudaTensorCore.Tiles*"
  check memcheck 1 "the image net" "$folder/model_test" 'CudaFlux.*'
  check memcheck 1 "the image net's statistics" "$folder/calibrate_test" 'CudaImageStatistics.*'
  check memcheck 1 calibration "$folder/calibrate_test" 'CudaCalibrate.Thresh*'
  if compressor_runs; then
    part "memcheck of the solvers" compute-sanitizer --error-exitcode 1 --kernel-name kernel_substring=fix "$folder/solver_test" '--gtest_filter=*Cuda*'
  fi
}

add_tests() {
  shards 4 "tests of kernels" "$tests" '--gtest_filter=*Cuda*'
  shards 3 "tests of the decoder" "$folder/model_test" '--gtest_filter=CudaDecoder*'
  part "tests of calibration" "$folder/calibrate_test" '--gtest_filter=CudaCalibrate.*'
  part "tests of the image net" "$folder/model_test" '--gtest_filter=CudaFlux*'
  part "tests of products of the image net" "$folder/eval_test" '--gtest_filter=CudaTensorCoreCase*'
  part "tests of the image net's statistics" "$folder/calibrate_test" '--gtest_filter=CudaImageStatistics*'
  part "tests of plans" env LACUNA_PROGRAM="$(realpath "$folder/lacuna")" "$folder/cli_test" '--gtest_filter=TuneCuda*'
  part "tests of image commands" env LACUNA_PROGRAM="$(realpath "$folder/lacuna")" "$folder/cli_test" '--gtest_filter=ImageCuda*:ImageCalibrateCuda*'
  if compressor_runs; then
    part "tests of the solvers" "$folder/solver_test" '--gtest_filter=*Cuda*'
    part "tests of the compressor" "$folder/compress_test" '--gtest_filter=*Cuda*:DeviceMemory*'
  else
    printf 'SKIPPED: the compressor on a GPU, which needs a PyTorch made for CUDA\n'
  fi
}

[ "$plain" -eq 0 ] || add_tests
[ "$sanitize" -eq 0 ] || add_sanitizers
run_parts "$jobs" 1800 "$work"
[ "$plain" -eq 1 ] && [ "$part_pattern" = "*" ] || exit 0
# Tensor parallelism through peer memory and through NCCL (libnccl.so.2 of the Python package nvidia-nccl-cu13), from the folder LACUNA_NCCL or from Python.
if [ "${#part_devices[@]}" -gt 1 ]; then
  if [ -z "${LACUNA_NCCL:-}" ]; then
    LACUNA_NCCL=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/lib")' 2>/dev/null || true)
    export LACUNA_NCCL
  fi
  run "exchanges through peer memory" timeout 300 "$tests" '--gtest_filter=PeerExchange*'
  run "tests of two devices through peer memory" timeout 600 "$folder/model_test" '--gtest_filter=*TwoDevices*/peer'
  if [ -n "$LACUNA_NCCL" ]; then
    run "tests of two devices through NCCL" timeout 600 "$folder/model_test" '--gtest_filter=*TwoDevices*/nccl'
  else
    printf 'SKIPPED: two devices through NCCL, which Python does not have and LACUNA_NCCL does not name\n'
  fi
else
  printf 'SKIPPED: tests of two devices, one is visible\n'
fi
# The Python package, where there is a torch for CUDA. LACUNA_WHEEL: its wheel, which is built here where it is not given.
if python3 -c 'import pytest, torch; assert torch.version.cuda' 2>/dev/null && { [ -n "${LACUNA_WHEEL:-}" ] || python3 -c 'import nanobind, scikit_build_core' 2>/dev/null; }; then
  scripts/python_test.sh --python python3 --cuda --jobs $(((jobs - 1) / ${#part_devices[@]} + 1)) ${LACUNA_WHEEL:+--wheel "$LACUNA_WHEEL"}
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
  if [ -z "$expected" ] || [ "$found" != "$expected" ]; then
    printf 'error: run --device cuda %s gives %s, the CPU %s\n' "$flags" "$found" "$expected" >&2
    exit 1
  fi
done
printf 'run --gpu-layers, --gpu-split: the tokens of the CPU\n'
# Real models: those that are here, at least one.
"$folder/eval_test" '--gtest_filter=*CudaModels*' | tee "$log"
if ! grep -q '^\[       OK \]' "$log"; then
  printf 'error: no real model was compared; run lacuna pull smollm2-135m first\n' >&2
  exit 1
fi
