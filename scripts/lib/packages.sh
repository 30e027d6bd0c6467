# Sourced by scripts that install: the Debian packages that the build and the tests need, and one function that installs what is missing.

build_packages=(g++ cmake ninja-build ccache pkg-config git python3 libfmt-dev libspdlog-dev libcli11-dev nlohmann-json3-dev libhwy-dev
  libpcre2-dev libutf8proc-dev libssl-dev libcpp-httplib-dev libgtest-dev libgmock-dev)
# The BLAS that libtorch-dev alone brings is the reference one, many times slower; OpenBLAS with threads of its own waits for LibTorch's.
compress_packages=(libtorch-dev libopenblas0-openmp)
python_packages=(python3-dev python3-venv)
test_packages=(libbenchmark-dev clang-14 clang-format-14 clang-tidy-14 libclang-rt-14-dev gcovr g++-aarch64-linux-gnu)

packages_fail() {
  printf 'error: %s\n' "$1" >&2
  exit 1
}

# install_packages NAME...: installs those that are not there; needs root (or sudo) only when something is missing.
install_packages() {
  local missing=() name
  for name in "$@"; do
    dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null | grep -qx installed || missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null || packages_fail "apt-get is not here; install with your system's tools: ${missing[*]}"
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || packages_fail "run as root, or install sudo, or install by hand: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  printf 'installing %d packages: %s\n' "${#missing[@]}" "${missing[*]}" >&2
  "${as_root[@]}" apt-get update -qq >&2 || packages_fail "apt-get update failed; check the network and the package sources"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
    packages_fail "apt-get could not install: ${missing[*]}"
}
