# Sourced by the scripts beside it and by .ci/run. Finds a Python that runs, and keeps .venv/ at the
# repository root in step with pyproject.toml and the pinned versions.

# Without a GPU, JAX's CUDA plugin (the tests assemble kernels with it) would complain about missing libraries.
[ -e /dev/nvidiactl ] || [ -e /dev/dxg ] || export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"

# True when $1 is a Python >= 3.12 that really starts (a version manager's shim may refuse to).
_is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' </dev/null >/dev/null 2>&1
}

_has_venv() {
    "$1" -c 'import venv, ensurepip' </dev/null >/dev/null 2>&1
}

# Prints every place worth trying, best first, one path on a line.
_python_candidates() {
    local name dir
    [ -n "${PYTHON:-}" ] && { type -P -- "$PYTHON" || true; }
    for name in python3.12 python3.13 python3.14 python3.15 python3 python; do
        type -aP "$name" || true
    done
    # A shim directory on PATH tells where its manager keeps the real ones, whatever HOME is.
    for dir in ${PATH//:/$'\n'}; do
        case $dir in
            */shims) _pythons_in "${dir%/shims}/versions/*/bin" "${dir%/shims}/installs/python/*/bin" ;;
        esac
    done
    # The home folder by the environment, then by the account.
    for dir in "${HOME:-}" "$(eval echo "~$(id -un)")"; do
        _pythons_in "${PYENV_ROOT:-$dir/.pyenv}/versions/*/bin" \
            "${UV_PYTHON_INSTALL_DIR:-$dir/.local/share/uv/python}/*/bin" \
            "$dir/.local/share/mise/installs/python/*/bin" "$dir/.asdf/installs/python/*/bin" \
            "$dir/.local/bin" "$dir/*conda*/bin" "$dir/miniforge*/bin"
    done
    _pythons_in "/usr/local/bin" "/usr/local/python*/bin" "/usr/bin" "/opt/*/bin" "/opt/python/*/bin" \
        "/opt/hostedtoolcache/Python/*/*/bin"
}

# Prints the Pythons in the folders that each pattern matches.
_pythons_in() {
    local pattern
    for pattern in "$@"; do
        compgen -G "$pattern/python3.1[2-9]" || true
        compgen -G "$pattern/python3" || true
    done
}

# Prints the path of the first usable Python; otherwise says in one line what is missing and fails.
find_python() {
    local candidate without_venv=""
    while IFS= read -r candidate; do
        _is_new_enough "$candidate" || continue
        if _has_venv "$candidate"; then
            echo "$candidate"
            return 0
        fi
        without_venv=${without_venv:-$candidate}
    done < <(_python_candidates)
    if [ -n "$without_venv" ]; then
        echo "missing: $without_venv is new enough but lacks venv with pip (on Debian: apt install python3-venv)" >&2
    else
        echo "missing: Python 3.12 or newer with venv and pip; install one, or set PYTHON to its path" >&2
    fi
    return 1
}

# What the environment was installed from. The folder counts, since installed scripts name it.
_wanted_state() {
    pwd
    cat pyproject.toml requirements-nvidia.txt
}

# True when .venv/ can be added to: it runs, has pip, and was not copied here from another folder.
_is_usable_venv() {
    _is_new_enough .venv/bin/python && .venv/bin/python -c 'import pip' 2>/dev/null &&
        { [ ! -f .venv/installed-run.txt ] || [ "$(head -n 1 .venv/installed-run.txt)" = "$PWD" ]; }
}

# ensure_venv [EXTRA...]: .venv/ holds the project (editable) and these extras of pyproject.toml.
# Uses no network when nothing changed since an earlier call that asked for as much.
ensure_venv() {
    local part python missing="" extras
    for part in run "$@"; do
        _wanted_state | cmp -s - ".venv/installed-$part.txt" || missing="$missing $part"
    done
    if [ -z "$missing" ] && _is_new_enough .venv/bin/python; then
        return 0
    fi
    if ! _is_usable_venv; then
        python=$(find_python) || return 1
        echo "creating .venv with $python" >&2
        "$python" -m venv --clear .venv >&2 ||
            { echo "missing: $python could not create .venv (see above)" >&2; return 1; }
    fi
    extras=$(IFS=,; echo "$*")
    echo "installing deepinfer-jax${extras:+[$extras]} into .venv (only when pyproject.toml or the pins change)" >&2
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-input \
        --constraint requirements-nvidia.txt --editable ".${extras:+[$extras]}" </dev/null ||
        { echo "missing: packages could not be installed (see above; the first run needs a package index)" >&2; return 1; }
    for part in run "$@"; do
        _wanted_state > ".venv/installed-$part.txt"
    done
}
