#!/usr/bin/env bash
# Builds the native libraries for DEEPINFER_ACCELERATOR (ascend, cpu or nvidia; default ascend) into BUILD_DIR (default
# build/native). Needs g++ and an installed jax; uses cmake where there is one. CANN is not needed.
# Nothing is built while no source is newer than the libraries.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
accelerator=${DEEPINFER_ACCELERATOR:-ascend}
out=${BUILD_DIR:-build/native}
python=${PYTHON:-.venv/bin/python}

case $accelerator in
    ascend) ;;
    cpu | nvidia)
        echo "nothing to build: there is no native code for $accelerator yet"
        exit 0
        ;;
    *)
        echo "DEEPINFER_ACCELERATOR=$accelerator is not ascend, cpu or nvidia" >&2
        exit 2
        ;;
esac
if ! type -P g++ >/dev/null; then
    echo "missing: g++ with C++17 (on Debian: apt install g++)" >&2
    exit 1
fi

# True when both libraries are newer than every source.
is_current() {
    [ -f "$out/libdeepinfer_ascend.so" ] && [ -f "$out/libascend_sim.so" ] &&
        [ -z "$(find custom_calls ascend_bridge scripts/build.sh -type f -newer "$out/libdeepinfer_ascend.so")" ]
}

# build_with_gxx: the same libraries without cmake.
build_with_gxx() {
    local flags=(-std=c++17 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -isystem "$include")
    g++ "${flags[@]}" -shared -pthread ascend_bridge/simulator/*.cc -o "$out/libascend_sim.so.new"
    g++ "${flags[@]}" -shared ascend_bridge/src/*.cc custom_calls/*.cc -ldl -o "$out/libdeepinfer_ascend.so.new"
    mv "$out/libascend_sim.so.new" "$out/libascend_sim.so"
    mv "$out/libdeepinfer_ascend.so.new" "$out/libdeepinfer_ascend.so"
}

build_with_cmake() {
    cmake -S custom_calls -B "$out/cmake" -DXLA_FFI_INCLUDE="$include" >/dev/null
    cmake --build "$out/cmake" --parallel "$(getconf _NPROCESSORS_ONLN)"
    # Moved, not copied: a process that has the old library open keeps it.
    for name in libascend_sim.so libdeepinfer_ascend.so; do
        cp "$out/cmake/$name" "$out/$name.new"
        mv "$out/$name.new" "$out/$name"
    done
}

mkdir -p "$out"
exec 9>"$out/lock" # one build at a time
flock 9
if is_current; then
    exit 0
fi
include=$("$python" -c 'import jax; print(jax.ffi.include_dir())')
if [ -z "${WITHOUT_CMAKE:-}" ] && type -P cmake >/dev/null; then
    build_with_cmake
else
    build_with_gxx
fi
echo "built $out/libdeepinfer_ascend.so and $out/libascend_sim.so"
