#!/usr/bin/env bash
# Sets up .venv/ and generates text for two prompts. Arguments are passed on: --model DIR, --max-tokens N, ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/_python.sh
ensure_venv

# Compiled programs are kept between runs, so that only the first run compiles.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$PWD/.venv/jax-cache}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
exec .venv/bin/deepinfer-jax generate \
    "The quick brown fox" \
    "Once upon a time" \
    --max-tokens 32 "$@"
