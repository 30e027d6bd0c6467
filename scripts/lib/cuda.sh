# Sourced by scripts that build the CUDA backend: a pinned CUDA 13.0 compiler from PyPI where the machine has none.

cuda_wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85)

# cuda_compiler INSTALL: prints the path of nvcc: the one on the PATH, else one in build/cuda-toolkit, which is fetched where INSTALL is 1.
cuda_compiler() {
  if command -v nvcc; then return 0; fi
  local folder=$PWD/build/cuda-toolkit
  local nvcc=$folder/nvidia/cu13/bin/nvcc
  if [ ! -e "$folder/complete" ]; then
    [ "$1" -eq 1 ] || packages_fail "nvcc is not on the PATH, and --no-install forbids to fetch one"
    rm -rf "$folder"
    install_packages python3-pip
    printf 'fetching a CUDA compiler from PyPI into build/cuda-toolkit: %s\n' "${cuda_wheels[*]}" >&2
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$folder" "${cuda_wheels[@]}" >&2 ||
      packages_fail "pip could not fetch the CUDA compiler; check the network, or install CUDA 13.0 and put nvcc on the PATH"
    # nvcc looks for lib64.
    [ -e "$folder/nvidia/cu13/lib64" ] || ln -s lib "$folder/nvidia/cu13/lib64"
    chmod +x "$folder"/nvidia/cu13/bin/* "$folder"/nvidia/cu13/nvvm/bin/*
    touch "$folder/complete"
  fi
  printf '%s\n' "$nvcc"
}
