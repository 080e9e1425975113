"""Traces of some steps and memory figures, asked for in Python or over HTTP (spec: interface 9, profiling endpoint)."""

import contextlib
import json
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import jax

type PathName = str | os.PathLike[str]

DEFAULT_STEPS, MAX_STEPS = 20, 50
MAX_BODY_BYTES = 4096


class Profiler:
    """Traces the steps that run inside `step`, one trace at a time.

    trace_dir: parent of the traces, and the only place where a trace asked for over HTTP can go.
    memory_profile_path: file for the device's memory profile (pprof), written at each request and by `close`.
    memory_tracing: `memory` gives figures instead of nothing.
    http_port: serves GET and POST /profile on 127.0.0.1, in a thread; 0 takes a free port, see `port`.
    """

    def __init__(
        self,
        trace_dir: PathName,
        *,
        memory_profile_path: PathName | None = None,
        memory_tracing: bool = False,
        http_port: int | None = None,
    ) -> None:
        self._trace_dir = Path(trace_dir).resolve()
        self._memory_path = None if memory_profile_path is None else Path(memory_profile_path).resolve()
        self._memory_tracing = memory_tracing
        self._lock = threading.Lock()  # guards the next two lines
        self._folder: Path | None = None  # of the wanted trace, which is written beside it and moved there at its end
        self._is_tracing, self._steps_left, self._is_closed = False, 0, False
        self._server = None if http_port is None else _serve(self, self._trace_dir, http_port)
        self.port = None if self._server is None else self._server.server_port

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surrounds one step of the engine, under its number in a trace. An exception inside ends the trace early.

        The trace ends with the host's part of its last step: work that this step only launched may be missing.
        """
        with self._lock:
            self._start()
        is_whole = False
        try:
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                yield
            is_whole = True
        finally:
            with self._lock:
                self._steps_left -= self._is_tracing
                if self._is_tracing and (self._steps_left == 0 or not is_whole):
                    self._end()

    def request(self, num_steps: int = DEFAULT_STEPS, output_dir: PathName | None = None) -> dict[str, Any]:
        """Has the next steps traced, and returns `output_dir`, a folder of this trace alone, and `num_steps`.

        The folder is made in `output_dir` (a relative one is taken from `trace_dir`) or else in `trace_dir`; it is
        empty until the trace is whole. Raises ValueError for a number outside 1..50, RuntimeError while another trace
        is wanted or running and after `close`.
        """
        if isinstance(num_steps, bool) or not 1 <= num_steps <= MAX_STEPS:
            raise ValueError(f"num_steps={num_steps} is outside 1..{MAX_STEPS}; ask for fewer steps, several times")
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the profiler is closed; make a new engine")
            if self._folder is not None:
                raise RuntimeError(
                    f"a trace into {self._folder} is not whole yet; ask again when that folder has files"
                )
            self._save_memory_profile()
            parent = self._trace_dir / (output_dir or "")
            parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=time.strftime("trace-%Y%m%d-%H%M%S-"), dir=parent))
            self._folder, self._steps_left = folder, num_steps
        return {"output_dir": str(folder), "num_steps": num_steps}

    def memory(self) -> dict[str, int]:
        """Bytes in use on the local devices, by their own count or that of JAX's arrays; {} without memory_tracing."""
        if not self._memory_tracing:
            return {}
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        if not all("bytes_in_use" in each for each in stats):
            return {"memory_live_bytes": sum(array.nbytes for array in jax.live_arrays())}
        return {"memory_live_bytes": sum(each["bytes_in_use"] for each in stats)}

    def close(self) -> None:
        """Stops the endpoint and a running trace, drops one that has not begun. Can be called again."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._end()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._save_memory_profile()

    def _start(self) -> None:
        if self._folder is not None and not self._is_tracing:
            try:
                jax.profiler.start_trace(f"{self._folder}.partial")
                self._is_tracing = True
            except RuntimeError as error:  # a trace of someone else, which is no reason to end the step
                warnings.warn(f"no trace into {self._folder}: {error}; ask again later", stacklevel=2)
                self._end()

    def _end(self) -> None:
        folder, is_tracing = self._folder, self._is_tracing
        self._folder, self._is_tracing = None, False
        try:
            if is_tracing:
                jax.profiler.stop_trace()
                os.replace(f"{folder}.partial", str(folder))
            elif folder is not None:
                folder.rmdir()
        except (RuntimeError, OSError) as error:  # someone else stopped it, a full disk: no reason to end the step
            warnings.warn(f"the trace into {folder} is not whole: {error}", stacklevel=2)

    def _save_memory_profile(self) -> None:
        if self._memory_path is not None:
            self._memory_path.parent.mkdir(parents=True, exist_ok=True)
            partial = f"{self._memory_path}.{os.getpid()}.partial"
            jax.profiler.save_device_memory_profile(partial)
            os.replace(partial, self._memory_path)


def _serve(profiler: Profiler, trace_dir: Path, port: int) -> ThreadingHTTPServer:
    """The endpoint, already answering."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds for a client to send what it announced

        def do_GET(self) -> None:
            status, answer = _respond(profiler, trace_dir, self)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise RuntimeError(f"port {port} is not free: {error}; change DEEPINFER_PROFILE_HTTP_PORT_BASE") from error
    threading.Thread(target=server.serve_forever, args=(0.1,), name="profile-http", daemon=True).start()
    return server


def _respond(profiler: Profiler, trace_dir: Path, request: BaseHTTPRequestHandler) -> tuple[int, dict[str, Any]]:
    """Status and answer. Refuses what a web page of any site could send to 127.0.0.1."""
    url, headers = urlsplit(request.path), request.headers
    is_local = headers.get("Host", "localhost").partition(":")[0] in ("127.0.0.1", "localhost")
    if not is_local or "Origin" in headers or headers.get("Sec-Fetch-Site", "none") != "none":
        return 403, {"error": "a web page may not ask for a trace; ask 127.0.0.1 from a command line"}
    if url.path != "/profile":
        return 404, {"error": f"{url.path} is unknown; the only path is /profile"}
    try:
        return 200, profiler.request(**_read_options(request, dict(parse_qsl(url.query)), trace_dir))
    except (ValueError, OSError) as error:
        return 400, {"error": str(error)}
    except RuntimeError as error:
        return 409, {"error": str(error)}


def _read_options(request: BaseHTTPRequestHandler, options: dict[str, Any], trace_dir: Path) -> dict[str, Any]:
    """Arguments of `Profiler.request`, from the body before the query. Raises ValueError."""
    length = int(request.headers.get("Content-Length", 0))
    if not 0 <= length <= MAX_BODY_BYTES:
        raise ValueError(f"a body of {length} bytes is outside 0..{MAX_BODY_BYTES}; send less")
    body = json.loads(request.rfile.read(length)) if length else {}
    if not isinstance(body, dict) or not body.keys() | options.keys() <= {"num_steps", "output_dir"}:
        raise ValueError("the options are num_steps and output_dir; give them in the query or in a JSON object")
    options = {"num_steps": DEFAULT_STEPS, "output_dir": ""} | options | body
    num_steps, output_dir = options["num_steps"], options["output_dir"]
    if not str(num_steps).isdecimal():
        raise ValueError(f"num_steps={num_steps!r} is not a number in 1..{MAX_STEPS}")
    folder = (trace_dir / str(output_dir)).resolve()
    if not isinstance(output_dir, str) or not folder.is_relative_to(trace_dir):
        raise ValueError(f"output_dir={output_dir!r} is not a folder in {trace_dir}; leave it out or give one inside")
    return {"num_steps": int(num_steps), "output_dir": folder}
