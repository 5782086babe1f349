#!/usr/bin/env bash
# Checks what a reader should not have to: formatting, the direction of includes, that the documentation is of this tree.
# --fix formats in place.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup.sh

# Every major version formats a little differently, so one is fixed, and fetched where the machine has another.
readonly CLANG_FORMAT_MAJOR=14 CLANG_FORMAT_TO_INSTALL="clang-format==14.0.6"
readonly RUFF_VERSION=0.17.6

# install PACKAGE==VERSION: from PyPI into build/lint
install() {
  python3 -c 'import ensurepip, venv' 2> /dev/null || install_packages python3-venv
  [[ -x build/lint/bin/python ]] || python3 -m venv build/lint
  build/lint/bin/python -m pip install --quiet --disable-pip-version-check "$1" < /dev/null ||
    die "pip could not install $1" "install it yourself (${1%%==*} ${1##*==} on the PATH) and run this again"
}

find_clang_format() {
  for CLANG_FORMAT in clang-format-$CLANG_FORMAT_MAJOR clang-format build/lint/bin/clang-format; do
    "$CLANG_FORMAT" --version 2> /dev/null | grep -q "version $CLANG_FORMAT_MAJOR\." && return
  done
  install "$CLANG_FORMAT_TO_INSTALL"
}

find_ruff() {
  for RUFF in ruff build/lint/bin/ruff; do
    [[ $("$RUFF" --version 2> /dev/null) == "ruff $RUFF_VERSION" ]] && return
  done
  install "ruff==$RUFF_VERSION"
}

format_cpp() {
  local sources
  mapfile -t sources < <(git ls-files '*.cpp' '*.h')
  if [[ ${1:-} == --fix ]]; then
    "$CLANG_FORMAT" -i "${sources[@]}"
  else
    "$CLANG_FORMAT" --dry-run -Werror "${sources[@]}"
  fi
}

check_python() {
  local sources
  mapfile -t sources < <(git ls-files '*.py' '*.pyi')
  if [[ ${1:-} == --fix ]]; then
    "$RUFF" check --quiet --no-cache --fix "${sources[@]}" && "$RUFF" format --quiet --no-cache "${sources[@]}"
  else
    "$RUFF" check --quiet --no-cache "${sources[@]}" && "$RUFF" format --quiet --no-cache --check "${sources[@]}"
  fi
}

main() {
  command -v python3 > /dev/null || install_packages python3
  find_clang_format
  find_ruff
  local failed=()
  format_cpp "$@" || failed+=("formatting of C++ (./dev lint --fix mends it)")
  check_python "$@" || failed+=("Python (./dev lint --fix mends formatting; pyproject.toml has the rules)")
  python3 tools/check_includes.py || failed+=("includes (tools/check_includes.py states the rules)")
  python3 tools/check_docs.py || failed+=("documentation (tools/check_docs.py states the rules)")
  if ((${#failed[@]})); then
    local all
    printf -v all '%s; ' "${failed[@]}"
    die "lint failed: ${all%; }" "each line above names a place"
  fi
  say "dev: sources are formatted, includes and documentation keep their rules"
}

main "$@"
