# Sourced by scripts that compare with llama.cpp. Its whole source is inside the source package of llama-cpp-python on PyPI, so one
# pinned package gives the programs, the shared library and (pure Python) the declarations of its C interface.

llama_cpp_version=0.3.36
peers_dir="${LACUNA_PEERS:-$HOME/.cache/lacuna/peers}"
llama_cpp_root="$peers_dir/llama-cpp-python-$llama_cpp_version"
llama_cpp_build="$llama_cpp_root/build"      # bin/ holds the programs and the libraries
llama_cpp_binding="$llama_cpp_root/source"   # holds llama_cpp/llama_cpp.py

llama_cpp_fail() {
  printf 'error: %s\n' "$1" >&2
  exit 1
}

# llama_cpp_source: unpacks the source package once, into $llama_cpp_root/source.
llama_cpp_source() {
  [ -f "$llama_cpp_root/source/.complete" ] && return 0
  local tool
  for tool in python3 tar; do
    command -v "$tool" >/dev/null || llama_cpp_fail "$tool is not installed: apt-get install $tool"
  done
  mkdir -p "$llama_cpp_root" || llama_cpp_fail "$llama_cpp_root: cannot be created; set LACUNA_PEERS to a folder that can be written"
  printf 'llama.cpp: downloading the source package of llama-cpp-python %s (77 MB)\n' "$llama_cpp_version" >&2
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --dest "$llama_cpp_root" \
    "llama-cpp-python==$llama_cpp_version" ||
    llama_cpp_fail "llama-cpp-python $llama_cpp_version: pip could not download it; check the network and pip's configured package index, or pass a folder with a build of llama.cpp: --llama FOLDER"
  rm -rf "$llama_cpp_root/source"
  mkdir "$llama_cpp_root/source"
  tar -xzf "$llama_cpp_root/llama_cpp_python-$llama_cpp_version.tar.gz" -C "$llama_cpp_root/source" --strip-components 1 ||
    llama_cpp_fail "$llama_cpp_root: the source package does not unpack; remove that folder and run this again"
  touch "$llama_cpp_root/source/.complete"
}

# llama_cpp_get: builds the programs once, for this machine's CPU (about 10 minutes on two cores).
llama_cpp_get() {
  local programs=(llama-bench llama-completion llama-perplexity llama-quantize)
  local program missing=0
  for program in "${programs[@]}"; do
    [ -x "$llama_cpp_build/bin/$program" ] || missing=1
  done
  if [ "$missing" -eq 0 ] && [ -f "$llama_cpp_root/source/.complete" ]; then
    printf 'llama.cpp: already built in %s\n' "$llama_cpp_build" >&2
    return 0
  fi
  llama_cpp_source
  local tool
  for tool in cmake ninja c++; do
    command -v "$tool" >/dev/null || llama_cpp_fail "$tool is not installed: apt-get install cmake ninja-build g++"
  done
  local log="$llama_cpp_root/build.log"
  printf 'llama.cpp: building (log: %s)\n' "$log" >&2
  cmake -S "$llama_cpp_root/source/vendor/llama.cpp" -B "$llama_cpp_build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF >"$log" 2>&1 ||
    llama_cpp_fail "llama.cpp: cmake failed, see $log"
  # The progress lines of ninja, one in 20.
  nice -n 5 ninja -C "$llama_cpp_build" "${programs[@]}" 2>&1 | tee -a "$log" | awk '/^\[[0-9]+\// && n++ % 20 == 0 { print "llama.cpp: " $1; fflush() }' >&2 ||
    llama_cpp_fail "llama.cpp: the build failed, see $log; removing $llama_cpp_build starts it afresh"
  for program in "${programs[@]}"; do
    [ -x "$llama_cpp_build/bin/$program" ] || llama_cpp_fail "llama.cpp: the build made no bin/$program, see $log"
  done
}

# llama_cpp_python: path of a Python that has numpy: the caller's where it has it, else one in a virtual environment under $peers_dir.
llama_cpp_python() {
  local environment="$peers_dir/python"
  if python3 -c 'import numpy' 2>/dev/null; then
    command -v python3
    return 0
  fi
  if ! "$environment/bin/python3" -c 'import numpy' 2>/dev/null; then
    python3 -m venv "$environment" >&2 || llama_cpp_fail "$environment: no virtual environment could be made: apt-get install python3-venv"
    "$environment/bin/python3" -m pip install --quiet --disable-pip-version-check numpy==1.26.4 >&2 ||
      llama_cpp_fail "numpy could not be installed into $environment; check the network, or apt-get install python3-numpy"
  fi
  printf '%s\n' "$environment/bin/python3"
}
