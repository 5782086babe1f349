#!/usr/bin/env bash
# Trains a small GPT on the Python sources of the installed PyTorch, with two ranks, gradients sharded (stage 2), a
# caller-owned window whose length changes from step to step, and optimizer states in host memory. Then measures a
# rank's memory in every stage and placement. ./dev demo builds the program first, and calls this.
#
# usage: demo.sh [--large] [option of ballast train ...]      --large: for a CUDA machine, or an hour of CPU
# Environment: BALLAST_PYTHON, whose PyTorch is used; BALLAST_PROGRAM, the built command line; BALLAST_RUNS, where the
# run's folder goes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly PYTHON=${BALLAST_PYTHON:-python3}
readonly PROGRAM=${BALLAST_PROGRAM:-build/dev/cli/ballast}
readonly RUNS=${BALLAST_RUNS:-runs}

fail() {
  echo "demo: $1" >&2
  exit 1
}

# One rank a CUDA device (NCCL takes no two on one), two on a machine without.
choose_ranks() {
  local devices=0
  if [[ $1 == large ]]; then devices=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())'); fi
  RANKS=$((devices > 0 ? devices : 2))
}

# torchrun, but for Ctrl-C: it passes the signal on to the ranks, which then report and end; its own exception about
# the signal would bury their report.
readonly TORCHRUN='
import sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main
try:
    main(sys.argv[1:])
except SignalException:
    sys.exit(130)'

# Each rank computes with one thread, so that two of them fit on two cores. The address: --standalone would look up the
# name of the machine, which need not be known to itself.
launch() {
  OMP_NUM_THREADS=1 LOGLEVEL=ERROR "$PYTHON" -c "$TORCHRUN" --standalone --local_addr 127.0.0.1 \
    --nproc-per-node "$RANKS" --no-python "$PROGRAM" "$@"
}

main() {
  local name=demo
  if [[ ${1:-} == --large ]]; then
    name=demo-large
    shift
  fi
  [[ -x $PROGRAM ]] || fail "no program at $PROGRAM; run ./dev demo, which builds it"
  local text
  text=$("$PYTHON" -c 'import os, torch; print(os.path.dirname(torch.__file__))') ||
    fail "no PyTorch in $PYTHON; run ./dev demo, which prepares one"
  choose_ranks "${name#demo-}"

  echo "demo: $RANKS ranks train on $text/**/*.py"
  local run=(--config "examples/$name.json" --set "data.path=$text" --set "train.folder=$RUNS")
  launch train "${run[@]}" "$@"
  echo
  launch estimate "${run[@]}" --measure | tee "$RUNS/$name/memory.txt"
  echo
  echo "demo: everything it wrote is in $RUNS/$name:"
  ls -l "$RUNS/$name"
}

main "$@"
