# Sourced by scripts that run many programs of GoogleTest side by side.
# shellcheck shell=bash

part_names=() part_commands=() part_pids=()  # pids: of those that run, by their places in the list
part_pattern="*"                             # names of the parts that count
part_devices=()                              # GPUs to share between the parts, as CUDA_VISIBLE_DEVICES names them; none: each part sees all

# part NAME COMMAND...: one more for run_parts, where its name counts.
part() {
  # shellcheck disable=SC2053
  [[ $1 == $part_pattern ]] || return 0
  part_names+=("$1")
  shift
  part_commands+=("$(printf '%q ' "$@")")
}

# shards COUNT NAME COMMAND...: as many parts, each with its share of the command's tests.
shards() {
  local count=$1 name=$2 i
  shift 2
  for ((i = 0; i < count; i++)); do
    part "$name, $((i + 1)) of $count" env GTEST_TOTAL_SHARDS="$count" GTEST_SHARD_INDEX="$i" "$@"
  done
}

# passed LOG [COMMAND]: whether the tests passed, one at least, none skipped; where the command is a sanitizer's, it has to say that it found nothing, no
# warning either.
passed() {
  grep -q '^\[  PASSED  \] [1-9]' "$1" && ! grep -q '^\[  SKIPPED \]' "$1" || return 1
  [[ ${2:-} != *compute-sanitizer* ]] || grep -qE 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards' "$1"
}

# summary LOG: the lines that count tests and a sanitizer's findings, in one.
summary() { grep -hE '^\[  PASSED  \]|ERROR SUMMARY|RACECHECK SUMMARY' "$1" | paste -sd' ' || true; }

# idlest_device: the place in part_devices of the GPU that fewest of the running parts use. part_on: each part's, by its place in the list.
idlest_device() {
  local i best=0 parts=()
  for i in "${!part_devices[@]}"; do parts[i]=0; done
  for i in "${!part_pids[@]}"; do parts[part_on[i]]=$((parts[part_on[i]] + 1)); done
  for i in "${!parts[@]}"; do [ "${parts[i]}" -ge "${parts[best]}" ] || best=$i; done
  echo "$best"
}

# run_parts MOST SECONDS FOLDER: runs the parts in their order, MOST at a time, none for longer than SECONDS, their output in FOLDER. Prints a line for
# each as it ends and, where it has not passed, all of its output. Returns 1 where one has not, and where there are none.
run_parts() {
  local most=$1 limit=$2 folder=$3 next=0 status i name devices="" started=() failed=() part_on=()
  [ "${#part_names[@]}" -gt 0 ] || { printf 'error: no part has a name like %s\n' "$part_pattern" >&2; return 1; }
  while [ "$next" -lt "${#part_names[@]}" ] || [ "${#part_pids[@]}" -gt 0 ]; do
    while [ "$next" -lt "${#part_names[@]}" ] && [ "${#part_pids[@]}" -lt "$most" ]; do
      if [ "${#part_devices[@]}" -gt 0 ]; then
        part_on[next]=$(idlest_device)
        printf -v devices 'CUDA_VISIBLE_DEVICES=%q' "${part_devices[part_on[next]]}"
      fi
      # timeout makes a process group of the part, which ends with it.
      eval "exec env $devices timeout --kill-after 10 $limit ${part_commands[$next]}" >"$folder/$next.log" 2>&1 </dev/null &
      part_pids[next]=$! started[next]=$SECONDS
      next=$((next + 1))
    done
    sleep 0.2
    for i in "${!part_pids[@]}"; do
      ! kill -0 "${part_pids[i]}" 2>/dev/null || continue
      status=0
      wait "${part_pids[i]}" || status=$?
      unset "part_pids[$i]"
      name="${part_names[i]}: $((SECONDS - started[i])) s"
      if [ "$status" -eq 0 ] && passed "$folder/$i.log" "${part_commands[i]}"; then
        printf '%s: %s\n' "$name" "$(summary "$folder/$i.log")"
        continue
      fi
      failed+=("${part_names[i]}")
      case $status in
        0) printf '%s: tests skipped, there were none, or a sanitizer found something:\n' "$name" ;;
        124 | 137) printf '%s: ended with status %s; %s s are the most that it may take:\n' "$name" "$status" "$limit" ;;
        *) printf '%s: failed with status %s:\n' "$name" "$status" ;;
      esac
      cat "$folder/$i.log"
    done
  done
  [ "${#failed[@]}" -gt 0 ] || { printf '%s parts passed\n' "${#part_names[@]}"; return 0; }
  printf 'error: %s of %s parts did not pass:\n' "${#failed[@]}" "${#part_names[@]}" >&2
  printf '  %s\n' "${failed[@]}" >&2
  return 1
}

# Ends the parts that still run; for an EXIT trap.
end_parts() {
  [ "${#part_pids[@]}" -eq 0 ] || kill "${part_pids[@]}" 2>/dev/null || true
}
