#!/usr/bin/env bash
# Sets up .venv/, completes Python code with drafts, and answers in a JSON Schema. Arguments are passed on to
# scripts/demo.py: PROMPT ..., --model DIR, --max-tokens N, ... (--help lists them).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/_python.sh
ensure_venv

# Compiled programs are kept between runs, so that only the first run compiles.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.venv/jax-cache}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
exec .venv/bin/python scripts/demo.py "$@"
