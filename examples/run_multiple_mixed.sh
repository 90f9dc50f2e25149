#!/usr/bin/env bash
# Trains examples/multiple_mixed.py on 8 local processes; rank N writes log_output/1/rank.N/stdout.
# Options are passed to the script: bash examples/run_multiple_mixed.sh --epochs 2
set -euo pipefail
cd "$(dirname "$0")/.."
test -x .venv/bin/shardwright || make install
.venv/bin/shardwright launch --devices 8 --log-dir log_output examples/multiple_mixed.py "$@"
for rank in log_output/1/rank.*; do
  echo "$rank/stdout: $(tail -n 1 "$rank/stdout")"
done
