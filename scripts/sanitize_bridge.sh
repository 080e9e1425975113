#!/usr/bin/env bash
# Builds the Ascend bridge, the targets and the simulator with AddressSanitizer and UndefinedBehaviorSanitizer, runs the
# C++ test on them, and does the same with ThreadSanitizer. Needs g++; neither JAX nor CANN.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${BUILD_DIR:-build/sanitized}
mkdir -p "$out"

targets=()
for source in custom_calls/*.cc; do
    [ "$source" = custom_calls/ffi_handlers.cc ] || targets+=("$source") # the only file that needs XLA
done

# check NAME FLAG...: builds with the flags and runs.
check() {
    local name=$1
    shift
    local flags=(-std=c++17 -O1 -g -fPIC -fno-omit-frame-pointer -Wall -Wextra "$@")
    g++ "${flags[@]}" -shared -pthread ascend_bridge/simulator/*.cc -o "$out/libascend_sim_$name.so"
    g++ "${flags[@]}" -pthread ascend_bridge/tests/bridge_test.cc ascend_bridge/src/*.cc "${targets[@]}" -ldl \
        -o "$out/bridge_test_$name"
    echo "== $name"
    "$out/bridge_test_$name" "$out/libascend_sim_$name.so"
}

check address -fsanitize=address,undefined -fno-sanitize-recover=all
check thread -fsanitize=thread
