# Sourced by ./dev. Makes the machine ready to build, or says what is missing and how to get it; costs a fraction of a
# second when nothing is to be done. Afterwards PYTHON is the Python whose PyTorch supplies LibTorch, TORCH its version.

# What the build looks for, and the Debian or Ubuntu package that has it. A header may also lie in a prefix named by
# CMAKE_PREFIX_PATH, as CMake finds it there.
readonly REQUIRED=(
  "command g++                            g++"
  "command cmake                          cmake"
  "command ninja                          ninja-build"
  "command python3                        python3"
  "header  nlohmann/json.hpp              nlohmann-json3-dev"
  "header  CLI/CLI.hpp                    libcli11-dev"
  "header  hwy/highway.h                  libhwy-dev"
  "header  gloo/transport/device.h        libgloo-dev"
  "header  xxhash.h                       libxxhash-dev"
  "header  liburing.h                     liburing-dev"
  "file    /usr/src/googletest            libgtest-dev"
)
readonly FASTER=( # the build is right without them, and slower
  "command mold                           mold"
  "command ccache                         ccache"
)
readonly TORCH_RANGE="2.11 to 2.14" # as in tools/find_torch.py
readonly TORCH_TO_INSTALL="torch==2.13.0"
readonly TEST_PACKAGES=(pytest==9.0.3 scikit-build-core==1.1.2 transformers==5.24.0 safetensors==0.8.0)

say() { printf '%s\n' "$*" >&2; }

# die WHAT REMEDY
die() {
  say "dev: $1"
  say "     $2"
  exit 1
}

has_header() {
  local prefix
  for prefix in /usr /usr/local $(tr ":;" "  " <<< "${CMAKE_PREFIX_PATH:-}"); do
    [[ -e $prefix/include/$1 ]] && return 0
  done
  return 1
}

has() {
  case $1 in
    command) command -v "$2" > /dev/null ;;
    header) has_header "$2" ;;
    file) [[ -e $2 ]] ;;
  esac
}

# missing_of "KIND WHAT PACKAGE"...: prints the packages of what isn't there
missing_of() {
  local row kind what package
  for row in "$@"; do
    read -r kind what package <<< "$row"
    has "$kind" "$what" || printf '%s\n' "$package"
  done
}

can_be_root() {
  [[ $EUID == 0 ]] || { command -v sudo > /dev/null && { [[ -t 0 ]] || sudo -n true 2> /dev/null; }; }
}

as_root() {
  if [[ $EUID == 0 ]]; then "$@"; else sudo "$@"; fi
}

apt_install() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" < /dev/null >&2
}

# install_packages NAME...: the package lists are fetched only where the first try says that they are needed
install_packages() {
  local remedy="install them by hand, then run this again: apt-get install $*"
  command -v apt-get > /dev/null || die "missing: $*, and there is no apt-get here" \
    "these are the names that Debian and Ubuntu use; install their counterparts, then run this again"
  can_be_root || die "missing packages: $*" "run: sudo apt-get install $*"
  say "dev: installing $*"
  apt_install "$@" 2> /dev/null && return
  as_root apt-get update -qq < /dev/null >&2 || die "apt-get update failed (network? package sources?)" "$remedy"
  apt_install "$@" || die "apt-get could not install $* (on Ubuntu some are in 'universe')" "$remedy"
}

ensure_packages() {
  local missing
  mapfile -t missing < <(missing_of "${REQUIRED[@]}" "$@")
  local faster
  mapfile -t faster < <(missing_of "${FASTER[@]}")
  if ((${#faster[@]})) && command -v apt-get > /dev/null && can_be_root; then missing+=("${faster[@]}"); fi
  if ((${#missing[@]})); then install_packages "${missing[@]}"; fi
}

# use_torch_of PYTHON: true where it has a supported PyTorch; sets PYTHON, TORCH and WHY_NOT
use_torch_of() {
  local found
  if found=$("$1" tools/find_torch.py 2>&1); then
    { read -r PYTHON && read -r TORCH; } <<< "$found"
    return 0
  fi
  WHY_NOT=$found
  return 1
}

make_venv() {
  say "dev: $WHY_NOT"
  python3 -c 'import ensurepip, venv' 2> /dev/null || install_packages python3-venv
  python3 -m venv .venv || die "python3 -m venv .venv failed" "delete .venv, look at the message above and run this again"
  say "dev: installing $TORCH_TO_INSTALL into .venv. Where the package index offers the CUDA build this downloads up to 3 GB;" \
    "to get the 200 MB CPU build, point PIP_INDEX_URL at PyTorch's CPU index first, or activate a Python environment" \
    "that has PyTorch $TORCH_RANGE. It is yours too: . .venv/bin/activate"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "$TORCH_TO_INSTALL" < /dev/null >&2 ||
    die "pip could not install $TORCH_TO_INSTALL into .venv (network? index? Python older than 3.10? disk?)" \
      "mend that and run this again, or activate a Python environment that has PyTorch $TORCH_RANGE"
}

# The active environment's PyTorch comes first, so that what is built here can be used from it.
ensure_torch() {
  if [[ -n ${BALLAST_PYTHON:-} ]]; then
    use_torch_of "$BALLAST_PYTHON" || die "BALLAST_PYTHON: $WHY_NOT" "name a Python that has PyTorch $TORCH_RANGE, or unset it"
    return
  fi
  use_torch_of python3 && return
  [[ -x .venv/bin/python ]] && use_torch_of .venv/bin/python && return
  make_venv
  use_torch_of .venv/bin/python || die "$WHY_NOT" "delete .venv and run this again"
}

# The Python module is built with the C headers of PYTHON, which distributions keep in a package of their own.
ensure_python_headers() {
  local headers version base
  { read -r headers && read -r version && read -r base; } < <("$PYTHON" -c 'import sys, sysconfig
print(sysconfig.get_paths()["include"], f"{sys.version_info[0]}.{sys.version_info[1]}", sys.base_prefix, sep="\n")')
  [[ -f $headers/Python.h ]] && return
  [[ $base == /usr ]] || die "$PYTHON has no C headers ($headers/Python.h)" "install them, or choose another Python by BALLAST_PYTHON"
  install_packages "python$version-dev"
}

# What some tests import besides PyTorch, into build/python, which those tests add to their path: whoever's environment
# PYTHON is, it stays as it is. Not to be had isn't an error: the tests then say what they lack, and are skipped.
ensure_test_packages() {
  local folder=build/python wanted="$PYTHON ${TEST_PACKAGES[*]}"
  [[ $(cat "$folder/.installed" 2> /dev/null) == "$wanted" ]] && return
  local modules=("${TEST_PACKAGES[@]%%=*}")
  "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "${modules[@]//-/_}" && return
  say "dev: installing ${TEST_PACKAGES[*]} into $folder, for tests"
  rm -rf "$folder"
  local said # what pip warns of concerns the environment, which this isn't
  if said=$("$PYTHON" -m pip install --quiet --disable-pip-version-check --target "$folder" "${TEST_PACKAGES[@]}" 2>&1 < /dev/null); then
    echo "$wanted" > "$folder/.installed"
  else
    rm -rf "$folder"
    say "$said" "dev: pip could not install them: tests that need them are skipped"
  fi
}

# set_up [EXTRA_ROW...]: rows as in REQUIRED
set_up() {
  ensure_packages "$@"
  ensure_torch
  ensure_python_headers
}
