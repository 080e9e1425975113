"""A11, A14, A15: which libraries are taken and which are refused, no simulator by accident, no text of CANN's.

Copies of the simulator under the names of CANN's libraries stand for CANN's. Each case runs in a process of its own,
since libraries stay loaded.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_jax.kernels import ascend, ffi

ROOT = Path(__file__).parent.parent.parent

# Opens the bridge with four texts and prints what it found, without JAX.
CHILD = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
for name in ("deepinfer_ascend_error",):
    getattr(library, name).restype = ctypes.c_char_p
texts = [text.encode() for text in sys.argv[2:6]]
code = library.deepinfer_ascend_open(*texts, ctypes.c_uint64(4096), 1000, 0, ctypes.c_int64(-1))
if code:
    print(json.dumps({"code": code, "error": library.deepinfer_ascend_error().decode()}))
    sys.exit()
text, reason, path = ctypes.c_char_p(), ctypes.c_char_p(), ctypes.c_char_p()
library.deepinfer_ascend_describe(ctypes.byref(text))
library.deepinfer_ascend_why_not(sys.argv[6].encode(), ctypes.byref(reason), ctypes.byref(path))
print(json.dumps(json.loads(text.value) | {"why_not": reason.value.decode(), "path": path.value.decode()}))
"""


@pytest.fixture
def cann(native: Path, tmp_path: Path):
    """Makes a folder with copies of the simulator under the given names."""

    def make(folder: str, *names: str) -> Path:
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            shutil.copy(native / ffi.SIMULATOR_LIBRARY, tmp_path / folder / name)
        return tmp_path / folder

    return make


def opened(simulator="", library_dir="", home_dir="", version="", operator="aclnnRmsNorm", environ=None) -> dict:
    bridge = ffi.native_library(ffi.BRIDGE_LIBRARY)
    words = [str(word) for word in (bridge, simulator, library_dir, home_dir, version, operator)]
    done = subprocess.run([sys.executable, "-c", CHILD, *words], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names(found: dict) -> list[str]:
    return [Path(path).name for path in found["libraries"]]


def test_the_named_folder_comes_before_the_installed_one(cann):
    named = cann("named", "libascendcl.so", "libopapi_nn.so", "libopapi_math.so")
    home = cann("home/lib64", "libascendcl.so", "libopapi_nn.so").parent
    found = opened(library_dir=named, home_dir=home)
    assert found["libraries"][0] == str(named / "libascendcl.so")
    assert names(found) == ["libascendcl.so", "libopapi_math.so", "libopapi_nn.so"]
    assert opened(home_dir=home)["libraries"][0] == str(home / "lib64" / "libascendcl.so")
    assert not found["is_simulator"]


def test_the_old_library_is_loaded_only_without_new_ones(cann):
    both = cann("both", "libascendcl.so", "libopapi_nn.so", "libopapi.so")
    old = cann("old", "libascendcl.so", "libopapi.so")
    assert names(opened(library_dir=both)) == ["libascendcl.so", "libopapi_nn.so"]
    assert names(opened(library_dir=old)) == ["libascendcl.so", "libopapi.so"]


def test_a_runtime_without_operators_is_refused(cann):
    found = opened(library_dir=cann("alone", "libascendcl.so"))
    assert found["code"] == 5
    assert "no operator library beside it" in found["error"]


def test_missing_functions_are_named(cann, tmp_path):
    folder = cann("few", "libopapi_nn.so")
    build(tmp_path, 'extern "C" int aclInit(const char*) { return 0; }', folder / "libascendcl.so")
    found = opened(library_dir=folder)
    assert found["code"] == 12
    assert "aclrtMalloc" in found["error"]
    assert " aclInit" not in found["error"]


def test_a_custom_library_behind_a_known_name_is_refused(cann, tmp_path):
    folder = cann("custom", "libascendcl.so", "libcust_opapi.so")
    build(tmp_path, "", folder / "libopapi_nn.so", folder / "libcust_opapi.so")
    assert "comes from the custom library" in opened(library_dir=folder)["why_not"]


def test_operators_outside_the_table_are_not_used(cann):
    folder = cann("plain", "libascendcl.so", "libopapi_nn.so")
    assert "operator table" in opened(library_dir=folder, operator="aclnnMhcPost")["why_not"]
    found = opened(library_dir=folder)
    assert (found["why_not"], found["path"]) == ("", str(folder / "libopapi_nn.so"))


def test_another_version_must_be_accepted_by_name(cann, tmp_path):
    """The version is read from the installation when the runtime does not tell it."""
    home = cann("home/lib64", "libascendcl.so", "libopapi_nn.so").parent
    (home / "version.info").write_text("Version=9.1.0\n")
    plan = json.dumps([{"call": "aclsysGetVersionStr", "code": 107000}])
    environ = {"DEEPINFER_JAX_SIM_FAULTS": plan}
    found = opened(home_dir=home, environ=environ)
    assert found["version"] == "9.1.0"
    assert "known for CANN 9.2 to 9.2 only; DEEPINFER_JAX_ASCEND_ACCEPT_VERSION=9.1.0" in found["why_not"]
    assert opened(home_dir=home, version="9.1.0", environ=environ)["why_not"] == ""
    assert opened(home_dir=home, version="9.0", environ=environ)["why_not"] != ""


def test_the_simulator_is_taken_alone(cann, native):
    folder = cann("beside", "libascendcl.so", "libopapi_nn.so")
    found = opened(simulator=native / ffi.SIMULATOR_LIBRARY, library_dir=folder)
    assert names(found) == [ffi.SIMULATOR_LIBRARY]
    assert (found["is_simulator"], found["soc"]) == (True, "SIM_Ascend950")


def test_without_cann_there_is_no_simulator_by_accident(native):
    options = ascend.options_from_environ({})
    assert not options.use_simulator
    with pytest.raises(ascend.AscendError, match="NOT_FOUND.*install CANN 9.2.*DEEPINFER_JAX_ASCEND_SIM=1"):
        ascend.open_bridge(options)


def test_the_environment_sets_every_option():
    environ = {
        "DEEPINFER_JAX_ASCEND_SIM": "1",
        "DEEPINFER_JAX_ASCEND_LIBDIR": "/libraries",
        "ASCEND_HOME_PATH": "/cann",
        "DEEPINFER_JAX_ASCEND_ACCEPT_VERSION": "9.3",
        "DEEPINFER_JAX_ASCEND_SYNC_TIMEOUT_MS": "5",
        "DEEPINFER_JAX_ASCEND_BLOCKING": "1",
        "DEEPINFER_JAX_ASCEND_DETERMINISM": "2",
        "DEEPINFER_JAX_ASCEND_ARENA": "1 MiB",
    }
    assert ascend.options_from_environ(environ) == ascend.AscendOptions(
        use_simulator=True,
        library_dir="/libraries",
        home_dir="/cann",
        accept_version="9.3",
        sync_timeout_ms=5,
        is_blocking=True,
        determinism=2,
        arena_bytes=2**20,
    )


def test_real_libraries_are_announced_as_untried(cann):
    folder = cann("real", "libascendcl.so", "libopapi_nn.so")
    code = (
        "import sys; from deepinfer_jax.kernels import ascend;"
        "ascend.open_bridge(ascend.AscendOptions(library_dir=sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-W", "always", "-c", code, folder], capture_output=True, text=True)
    assert "UserWarning: the Ascend path is experimental: it has never run on Ascend hardware" in done.stderr


def test_no_file_has_a_text_of_cann():
    kernels = ROOT / "deepinfer_jax" / "kernels"
    files = [*(ROOT / "custom_calls").rglob("*"), *(ROOT / "ascend_bridge").rglob("*"), *kernels.rglob("cann.py")]
    texts = {path: path.read_text() for path in files if path.is_file()}
    assert len(texts) > 40
    foreign = re.compile(r"CANN Open Software License|Huawei Technologies|Copyright \(c\)", re.IGNORECASE)
    assert [path for path, text in texts.items() if foreign.search(text)] == []


def build(folder: Path, source: str, library: Path, *linked: Path) -> None:
    (folder / "stub.cc").write_text(source)
    beside = [f"-Wl,--no-as-needed,-rpath,{path.parent}" for path in linked]
    command = ["g++", "-shared", "-fPIC", folder / "stub.cc", *beside, *linked, "-o", library]
    subprocess.run(command, check=True)
