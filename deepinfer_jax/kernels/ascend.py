"""Opening the Ascend bridge, and tensors that stay on a device.

Experimental: this path has never run on Ascend hardware by this project. It is tested against a simulator of the same
C interface, which must be asked for (DEEPINFER_JAX_ASCEND_SIM=1) and is never chosen by itself.
"""

import ctypes
import json
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Array, UInt32

from deepinfer_jax.config.environ import PROCESS_ENVIRON, VARIABLES, read_variable
from deepinfer_jax.config.resolved import EngineConfig
from deepinfer_jax.kernels import ffi
from deepinfer_jax.pytree import pytree_dataclass, static_field

_LOG = logging.getLogger(__name__)

HANDLE_WORDS = 8
MIB = 2**20
# XLA's status codes, whose names begin the text of an error.
_CODES = {
    3: "INVALID_ARGUMENT",
    4: "DEADLINE_EXCEEDED",
    5: "NOT_FOUND",
    8: "RESOURCE_EXHAUSTED",
    9: "FAILED_PRECONDITION",
    10: "ABORTED",
    12: "UNIMPLEMENTED",
    13: "INTERNAL",
    14: "UNAVAILABLE",
    15: "DATA_LOSS",
}
# numpy dtype and the element type code of the bridge (spec: ascend 3.1). 4-bit values travel as uint8, two in a byte.
DTYPE_CODES: dict[np.dtype, int] = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(np.int8): 2,
    np.dtype(np.int32): 3,
    np.dtype(np.uint8): 4,
    np.dtype(np.int16): 6,
    np.dtype(np.uint16): 7,
    np.dtype(np.uint32): 8,
    np.dtype(np.int64): 9,
    np.dtype(np.uint64): 10,
    np.dtype(np.float64): 11,
    np.dtype(np.bool_): 12,
    np.dtype(ml_dtypes.bfloat16): 27,
    np.dtype(ml_dtypes.float8_e5m2): 35,
    np.dtype(ml_dtypes.float8_e4m3fn): 36,
    np.dtype(ml_dtypes.float8_e8m0fnu): 37,
}


class AscendError(RuntimeError):
    """A failure that the bridge reports; the text begins with the name of XLA's status code."""


class AscendUnsupportedError(NotImplementedError):
    """An operator that the loaded CANN does not have, or a form that it does not take."""


@dataclass(frozen=True, kw_only=True)
class AscendOptions:
    """Where the libraries are and how devices behave; texts that are empty mean "not given"."""

    use_simulator: bool = False
    library_dir: str = ""
    home_dir: str = ""
    accept_version: str = ""
    arena_bytes: int = 64 * MIB  # workspaces and temporaries of a step, on each device
    sync_timeout_ms: int = 600_000
    is_blocking: bool = False
    determinism: int | None = None

    def __post_init__(self) -> None:
        if self.arena_bytes < 1:
            raise ValueError(
                f"arena_bytes={self.arena_bytes} must be at least 1; give the bytes of a step's temporaries"
            )


def options_from_environ(environ: Mapping[str, str] = PROCESS_ENVIRON) -> AscendOptions:
    """The options that the environment asks for: `DEEPINFER_JAX_ASCEND_*`, and where CANN's set_env.sh says it is."""

    return _options(lambda name: read_variable(VARIABLES[name], environ), environ)


def options_from_config(config: EngineConfig, environ: Mapping[str, str] = PROCESS_ENVIRON) -> AscendOptions:
    """The options of an engine's configuration; `environ` tells where CANN's set_env.sh says it is."""
    return _options(config.value, environ)


def _options(value: Callable[[str], Any], environ: Mapping[str, str]) -> AscendOptions:
    return AscendOptions(
        use_simulator=value("DEEPINFER_JAX_ASCEND_SIM"),
        library_dir=value("DEEPINFER_JAX_ASCEND_LIBDIR") or "",
        home_dir=environ.get("ASCEND_HOME_PATH") or environ.get("ASCEND_TOOLKIT_HOME") or "",
        accept_version=value("DEEPINFER_JAX_ASCEND_ACCEPT_VERSION") or "",
        arena_bytes=value("DEEPINFER_JAX_ASCEND_ARENA"),
        sync_timeout_ms=value("DEEPINFER_JAX_ASCEND_SYNC_TIMEOUT_MS"),
        is_blocking=value("DEEPINFER_JAX_ASCEND_BLOCKING"),
        determinism=value("DEEPINFER_JAX_ASCEND_DETERMINISM"),
    )


@pytree_dataclass
class DeviceArray:
    """A tensor in device memory, named inside jitted programs by eight words that no arithmetic may touch.

    Words with leading axes name several tensors of one shape; indexing the tree takes one of them.
    """

    words: UInt32[Array, "*stack eight"]
    shape: tuple[int, ...] = static_field()
    dtype: np.dtype = static_field()


@dataclass(frozen=True)
class DeviceGroups:
    """Groups of devices along one axis of a mesh that do collectives together, as `Bridge.make_groups` made them."""

    family: int
    size: int


@dataclass(frozen=True)
class Bridge:
    """The open bridge of the process: what was loaded, and what can be asked of its devices."""

    library: ctypes.CDLL
    version: str
    soc: str
    num_devices: int
    is_simulator: bool
    libraries: tuple[str, ...]

    def put(self, array: np.ndarray | Array, *, device: int = 0) -> DeviceArray:
        """The array in device memory of its own, until `release`."""
        seats = jax.local_devices(backend=ffi.PLATFORM)
        if device >= min(len(seats), self.num_devices):
            raise ValueError(
                f"device={device} needs a JAX CPU device for each of {device + 1} Ascend devices; there are "
                f"{len(seats)} and {self.num_devices} (--xla_force_host_platform_device_count)"
            )
        host = np.asarray(array)
        shape, dtype = host.shape, host.dtype
        if dtype not in DTYPE_CODES:
            raise ValueError(f"dtype {dtype} does not cross the bridge; 4-bit values cross as uint8, two in a byte")
        host = np.ascontiguousarray(host)
        dims = (ctypes.c_int64 * len(shape))(*shape)
        words = np.zeros(HANDLE_WORDS, np.uint32)
        check(
            self.library,
            self.library.deepinfer_ascend_put(
                device, DTYPE_CODES[dtype], dims, len(shape), _address(host), _address(words)
            ),
        )
        return DeviceArray(words=jax.device_put(words, seats[device]), shape=shape, dtype=dtype)

    def put_stack(self, arrays: np.ndarray | Array, *, num_lead: int = 1, device: int = 0) -> DeviceArray:
        """One device tensor for each index of the leading axes, which the words keep; freed when the words are gone."""
        host = np.asarray(arrays)
        placed: list[DeviceArray] = []
        try:
            for array in host.reshape(-1, *host.shape[num_lead:]):
                placed.append(self.put(array, device=device))
        except BaseException:
            made = np.asarray([one.words for one in placed], np.uint32).reshape(len(placed), HANDLE_WORDS)
            _release_all(self.library, made)
            raise
        words = np.stack([np.asarray(one.words) for one in placed]).reshape(*host.shape[:num_lead], HANDLE_WORDS)
        held = jax.device_put(words, jax.local_devices(backend=ffi.PLATFORM)[device])
        weakref.finalize(held, _release_all, self.library, words).atexit = False  # an ending process frees everything
        return DeviceArray(words=held, shape=placed[0].shape, dtype=placed[0].dtype)

    def get(self, array: DeviceArray) -> np.ndarray:
        """The tensor as a host array, after everything that was enqueued before."""
        host = np.zeros(array.shape, array.dtype)
        words = np.asarray(array.words)
        check(
            self.library,
            self.library.deepinfer_ascend_get(_address(words), _address(host), ctypes.c_uint64(host.nbytes)),
        )
        return host

    def release(self, array: DeviceArray) -> None:
        """Gives the memory of a tensor made by `put` back once the device has passed all work enqueued so far.

        A program that JAX has not run yet by then finds the handle stale: wait for what reads the tensor first.
        """
        check(self.library, self.library.deepinfer_ascend_release(_address(np.asarray(array.words))))

    def make_groups(self, groups: Sequence[Sequence[int]]) -> DeviceGroups:
        """Communicators for groups of equally many devices; a rank is a place in a group. Before any program runs."""
        sizes = {len(group) for group in groups}
        if len(sizes) != 1:
            raise ValueError(f"groups={groups} must be at least one group, all with equally many devices")
        (size,) = sizes
        ordinals = np.asarray(groups, np.int32)
        family = ctypes.c_int64()
        code = self.library.deepinfer_ascend_make_groups(_address(ordinals), len(groups), size, ctypes.byref(family))
        check(self.library, code)
        return DeviceGroups(family=family.value, size=size)

    def end_step(self, results: Any = (), *, device: int = 0) -> None:
        """Drops all temporaries of resident calls. `results` is what the step returned: it is waited for first."""
        jax.block_until_ready(results)
        check(self.library, self.library.deepinfer_ascend_end_step(device))

    def synchronize(self, *, device: int = 0) -> None:
        """Waits for the device, and reports a fault of anything enqueued so far."""
        check(self.library, self.library.deepinfer_ascend_synchronize(device))

    def reset_device(self, device: int) -> None:
        """Drops all work and tensors of a device, and lets a device that had a fault work again."""
        check(self.library, self.library.deepinfer_ascend_reset(device))

    def usage(self, *, device: int = 0) -> tuple[int, int]:
        """Live handles, and bytes of the arena in use."""
        num_handles, arena_bytes = ctypes.c_int64(), ctypes.c_uint64()
        check(
            self.library,
            self.library.deepinfer_ascend_usage(device, ctypes.byref(num_handles), ctypes.byref(arena_bytes)),
        )
        return num_handles.value, arena_bytes.value

    def close(self) -> None:
        """Ends all streams and gives all device memory back; every handle is void."""
        self.library.deepinfer_ascend_close()


def open_bridge(options: AscendOptions | None = None) -> Bridge:
    """Loads CANN's libraries or the simulator, and counts devices; by default as the environment says.

    One bridge can be open in a process. On real libraries a warning says that the path is experimental.
    """
    options = options_from_environ() if options is None else options
    library = ffi.load_bridge()
    simulator = str(ffi.native_library(ffi.SIMULATOR_LIBRARY)) if options.use_simulator else ""
    texts = [text.encode() for text in (simulator, options.library_dir, options.home_dir, options.accept_version)]
    determinism = -1 if options.determinism is None else options.determinism
    code = library.deepinfer_ascend_open(
        *texts,
        ctypes.c_uint64(options.arena_bytes),
        options.sync_timeout_ms,
        int(options.is_blocking),
        ctypes.c_int64(determinism),
    )
    check(library, code)
    bridge = _describe(library)
    _LOG.info("Ascend bridge: %s, CANN %s, from %s", bridge.soc, bridge.version, ", ".join(bridge.libraries))
    if not bridge.is_simulator:
        warnings.warn(
            "the Ascend path is experimental: it has never run on Ascend hardware by this project", stacklevel=2
        )
    return bridge


def current_bridge() -> Bridge | None:
    """The open bridge of the process, None if there is none."""
    library = ffi.load_bridge()
    code = library.deepinfer_ascend_describe(ctypes.byref(ctypes.c_char_p()))
    return None if _CODES.get(code) == "FAILED_PRECONDITION" else _describe(library)


def why_not(library: ctypes.CDLL, operator: str) -> tuple[str, str]:
    """Why the open bridge cannot use an operator ("" when it can), and the library that has it ("" when none does)."""
    reason, path = ctypes.c_char_p(), ctypes.c_char_p()
    check(library, library.deepinfer_ascend_why_not(operator.encode(), ctypes.byref(reason), ctypes.byref(path)))
    return (reason.value or b"").decode(), (path.value or b"").decode()


def check(library: ctypes.CDLL, code: int) -> None:
    """Raises what a status code of the bridge means: ValueError, AscendUnsupportedError or AscendError."""
    if code == 0:
        return
    text = f"{_CODES.get(code, f'status {code}')}: {library.deepinfer_ascend_error().decode()}"
    if code == 3:
        raise ValueError(text)
    raise AscendUnsupportedError(text) if code == 12 else AscendError(text)


def _describe(library: ctypes.CDLL) -> Bridge:
    text = ctypes.c_char_p()
    check(library, library.deepinfer_ascend_describe(ctypes.byref(text)))
    facts = json.loads(text.value or b"{}")
    return Bridge(
        library=library,
        version=facts["version"],
        soc=facts["soc"],
        num_devices=facts["devices"],
        is_simulator=facts["is_simulator"],
        libraries=tuple(facts["libraries"]),
    )


def _release_all(library: ctypes.CDLL, words: np.ndarray) -> None:
    """Frees tensors that nothing names any more; those of a closed bridge or a reset device are gone already."""
    for one in words.reshape(-1, HANDLE_WORDS):
        library.deepinfer_ascend_release(_address(np.ascontiguousarray(one)))


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)
