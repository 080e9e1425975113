"""The build script: what it builds, what it refuses, and that its library is the same without cmake."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def build(accelerator: str, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "DEEPINFER_ACCELERATOR": accelerator, "PYTHON": sys.executable, **environ}
    return subprocess.run(["bash", "scripts/build.sh"], cwd=ROOT, env=given, capture_output=True, text=True)


@pytest.mark.parametrize("accelerator", ["cpu", "nvidia"])
def test_other_accelerators_have_nothing_to_build(accelerator, tmp_path):
    done = build(accelerator, BUILD_DIR=str(tmp_path))
    assert (done.returncode, list(tmp_path.iterdir())) == (0, [])
    assert f"no native code for {accelerator}" in done.stdout


def test_an_unknown_accelerator_is_refused():
    done = build("tpu")
    assert done.returncode == 2
    assert "DEEPINFER_ACCELERATOR=tpu is not ascend, cpu or nvidia" in done.stderr


def test_a_missing_compiler_is_said(tmp_path):
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = build("ascend", PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "missing: g++ with C++17 (on Debian: apt install g++)\n")


def test_nothing_is_built_twice(native):
    before = [path.stat().st_mtime_ns for path in sorted(native.glob("*.so"))]
    assert build("ascend").stdout == ""
    assert [path.stat().st_mtime_ns for path in sorted(native.glob("*.so"))] == before


@pytest.mark.slow
def test_gxx_alone_builds_both_libraries(native, tmp_path):
    done = build("ascend", BUILD_DIR=str(tmp_path), WITHOUT_CMAKE="1")
    assert done.returncode == 0, done.stderr
    for path in native.glob("*.so"):
        assert symbols(tmp_path / path.name) == symbols(path)


@pytest.mark.slow
def test_sanitizers_find_nothing(native, tmp_path):
    done = subprocess.run(
        ["bash", "scripts/sanitize_bridge.sh"],
        cwd=ROOT,
        env={**os.environ, "BUILD_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("bridge test passed") == 2


def symbols(library: Path) -> set[str]:
    """The functions that a library exports."""
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[2] for line in listed.splitlines() if " T " in line}
