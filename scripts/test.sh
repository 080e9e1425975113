#!/usr/bin/env bash
# Sets up .venv/ and runs the tests on the CPU. --all adds the slow ones and writes build/test-summary.json;
# other arguments go to pytest. TEST_WORKERS sets the number of processes (default: 2, or 1 on one core).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/_python.sh
ensure_venv test

cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
workers=${TEST_WORKERS:-$((cores < 2 ? 1 : 2))}
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
status=0
.venv/bin/python -m pytest -n "$workers" --dist worksteal --durations 10 --durations-min 5 "$@" </dev/null || status=$?
if [ "$status" -eq 5 ]; then
    echo "failed: no test was run" >&2
fi
exit "$status"
