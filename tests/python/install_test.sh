#!/usr/bin/env bash
# pip installs the module from the sources as the README says, and a program uses it, far from the sources.
# install_test.sh SOURCES BUILD WORK PYTHON COMPILER BUILD_TYPE
set -euo pipefail
sources=$1 build=$2 work=$3 python=$4 compiler=$5 build_type=$6

if ! "$python" -c 'import scikit_build_core' 2> /dev/null; then
  echo "skipped: no scikit-build-core for this Python (./dev test installs it into build/python)"
  exit 77
fi
rm -rf "$work"
mkdir -p "$work"
# A build folder beside the others, and their compiler: what they compiled comes out of its cache, where there is one.
"$python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --target "$work/site" \
  -C build-dir="$build/../wheel" -C cmake.build-type="$build_type" -C cmake.define.CMAKE_CXX_COMPILER="$compiler" "$sources"
cp "$sources/examples/training_worker.py" "$work"
cd "$work"
PYTHONPATH="$work/site:${PYTHONPATH:-}" "$python" training_worker.py

# Under another PyTorch the import says what to do.
sed -i 's/^TORCH = .*/TORCH = "2.1.0"/' "$work/site/ballast/_built_for.py"
if said=$(PYTHONPATH="$work/site" "$python" -c 'import ballast' 2>&1); then
  echo "it was imported under another PyTorch"
  exit 1
fi
grep -q "ImportError: ballast was built for PyTorch 2.1.0" <<< "$said" && grep -q "pip install --no-build-isolation" <<< "$said" || {
  echo "$said"
  exit 1
}

# Without PyTorch in sight the build says what to do: pip's isolated build has none.
mkdir "$work/none"
cp -r "$sources/tools" "$work/none"
if said=$(cd "$work/none" && "$python" -S -I tools/find_torch.py 2>&1); then
  echo "a PyTorch was found where there is none"
  exit 1
fi
grep -q "no PyTorch" <<< "$said"
