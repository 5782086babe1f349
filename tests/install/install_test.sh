#!/usr/bin/env bash
# Runs what README.md tells the reader to type for a program of their own: install, build examples/ against the installed
# tree, run it on one rank and on two. The build that README makes first is BUILD.
# usage: install_test.sh SOURCE BUILD WORK PYTHON [SANITIZER]
set -euo pipefail
readonly SOURCE=$1 BUILD=$2 WORK=$3 PYTHON=$4 SANITIZER=${5:-}

die() {
  printf 'install_test: %s\n' "$*" >&2
  exit 1
}

# The README's shell block that installs, without ./dev, whose work is done.
commands_of_readme() {
  awk '/^```/ {if (inside && text ~ /cmake --install/) printf "%s", text; inside = /^```sh/; text = ""; next}
       inside && !/^\.\/dev/ {text = text $0 "\n"}' "$SOURCE/README.md"
}

mkdir -p "$WORK/build"
cd "$WORK"
rm -rf examples build/release build/prefix
ln -sfn "$BUILD" build/release
ln -sfn "$SOURCE/examples" examples

export PATH="$(dirname "$PYTHON"):$PATH" CMAKE_GENERATOR=Ninja CMAKE_BUILD_TYPE=Release OMP_NUM_THREADS=1
# torchrun's own default port may be taken by another run on this machine.
PET_MASTER_PORT=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export PET_MASTER_PORT
if [[ -n $SANITIZER ]]; then export CXXFLAGS="-fsanitize=$SANITIZER"; fi

commands=$(commands_of_readme)
[[ $commands == *torchrun* ]] || die "README.md has no shell block that installs and runs a program"
bash -euxc "$commands" 2>&1 | tee output || die "a command of README.md failed"

! grep -q 'CMake Warning' output || die "CMake warns, see above"

# Single-process and two ranks: 100 windows each, the last of one backward.
[[ $(grep -c 'window 99: applied, 1 backwards' output) == 2 ]] || die "want the last window's line of two runs, see above"
# Run paths name folders that are there: LibTorch's, and none that its package only guesses.
for file in $(find build/prefix/ -name libballast.so -o -path '*/bin/ballast'); do
  path=$(readelf -d "$file" | sed -n 's/.*R\(UN\)\?PATH.*\[\(.*\)\]/\2/p')
  for folder in ${path//:/ }; do
    [[ -d ${folder/'$ORIGIN'/$(dirname "$file")} ]] || die "$file looks for libraries in $folder, which does not exist"
  done
done
if [[ -e build/release/cli/ballast ]]; then build/prefix/bin/ballast info; fi
