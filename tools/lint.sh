#!/usr/bin/env bash
# Checks what a reader should not have to: formatting, the direction of includes, that the documentation is of this tree.
# --fix formats in place.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup.sh

# Every major version formats a little differently, so one is fixed, and fetched where the machine has another.
readonly CLANG_FORMAT_MAJOR=14 CLANG_FORMAT_TO_INSTALL="clang-format==14.0.6"

find_clang_format() {
  local candidate
  for candidate in clang-format-$CLANG_FORMAT_MAJOR clang-format build/lint/bin/clang-format; do
    if "$candidate" --version 2> /dev/null | grep -q "version $CLANG_FORMAT_MAJOR\."; then
      CLANG_FORMAT=$candidate
      return
    fi
  done
  python3 -c 'import ensurepip, venv' 2> /dev/null || install_packages python3-venv
  python3 -m venv build/lint
  build/lint/bin/python -m pip install --quiet --disable-pip-version-check "$CLANG_FORMAT_TO_INSTALL" < /dev/null ||
    die "pip could not install $CLANG_FORMAT_TO_INSTALL" "install the package clang-format-$CLANG_FORMAT_MAJOR and run this again"
  CLANG_FORMAT=build/lint/bin/clang-format
}

format() {
  local sources
  mapfile -t sources < <(git ls-files '*.cpp' '*.h')
  if [[ ${1:-} == --fix ]]; then
    "$CLANG_FORMAT" -i "${sources[@]}"
  else
    "$CLANG_FORMAT" --dry-run -Werror "${sources[@]}"
  fi
}

main() {
  command -v python3 > /dev/null || install_packages python3
  find_clang_format
  local failed=()
  format "$@" || failed+=("formatting (./dev lint --fix mends it)")
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
