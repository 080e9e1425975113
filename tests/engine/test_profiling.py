import gc
import gzip
import http.client
import json
import pathlib
import socket
import threading

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.engine.profiling import Profiler


@pytest.fixture
def traces(monkeypatch):
    """JAX's trace calls replaced by ones that note their order and leave one file."""
    calls, running = [], []

    def start(folder):
        if running:
            raise RuntimeError("Profile has already been started")
        running.append(folder)
        calls.append("start")

    def stop():
        folder = pathlib.Path(running.pop())
        folder.mkdir(parents=True)
        (folder / "trace").touch()
        calls.append("stop")

    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", stop)
    return calls


@pytest.fixture
def profiler(tmp_path, traces):
    without_server = Profiler(tmp_path / "traces")
    yield without_server
    without_server.close()


@pytest.fixture
def served(tmp_path, traces):
    with_server = Profiler(tmp_path / "traces", http_port=0)
    yield with_server
    with_server.close()


def run_steps(profiler, count, calls=None):
    for number in range(count):
        with profiler.step(number):
            if calls is not None:
                calls.append(number)


def ask(profiler, method="GET", query="", body=None, headers=None, path="/profile"):
    connection = http.client.HTTPConnection("127.0.0.1", profiler.port, timeout=10)
    connection.request(method, path + query, body, headers or {})
    response = connection.getresponse()
    answer = json.loads(response.read())
    assert response.headers["Content-Type"] == "application/json"
    connection.close()
    return response.status, answer


def contents(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_real_trace_holds_the_asked_steps_and_no_other(tmp_path):
    profiler = Profiler(tmp_path)
    folder = profiler.request(2)["output_dir"]
    for number in range(40, 44):
        with profiler.step(number):
            jnp.ones(3).block_until_ready()
    profiler.close()
    (trace,) = tmp_path.glob("trace-*/plugins/profile/*/*.trace.json.gz")
    assert str(trace).startswith(folder)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = {event["args"]["step_num"] for event in events if "step_num" in event.get("args", {})}
    assert steps == {"40", "41"}


def test_trace_starts_with_the_next_step_and_ends_with_the_last_asked_one(profiler, traces):
    run_steps(profiler, 1, traces)
    profiler.request(2)
    run_steps(profiler, 4, traces)
    assert traces == [0, "start", 0, 1, "stop", 2, 3]


def test_request_within_a_step_begins_with_the_next(profiler, traces):
    with profiler.step(0):
        profiler.request(1)
    assert traces == []
    run_steps(profiler, 1, traces)
    assert traces == ["start", 0, "stop"]


def test_folder_is_empty_until_the_trace_is_whole_and_of_this_trace_alone(profiler, tmp_path):
    folders = []
    for _ in range(2):
        folder = tmp_path / "traces" / profiler.request(2)["output_dir"]
        folders.append(folder)
        run_steps(profiler, 1)
        assert contents(folder) == []
        run_steps(profiler, 1)
        assert contents(folder) == ["trace"]
    assert folders[0] != folders[1]
    assert contents(tmp_path / "traces") == sorted(folder.name for folder in folders)


def test_output_dir_of_a_caller_in_python_may_be_anywhere(profiler, tmp_path):
    absolute = profiler.request(1, tmp_path / "else" / "where")["output_dir"]
    run_steps(profiler, 1)
    relative = profiler.request(1, "below")["output_dir"]
    assert absolute.startswith(str(tmp_path / "else" / "where" / "trace-"))
    assert relative.startswith(str(tmp_path / "traces" / "below" / "trace-"))


@pytest.mark.parametrize("num_steps", [0, 51, -1, True])
def test_number_of_steps_outside_the_range_is_refused(profiler, num_steps):
    with pytest.raises(ValueError, match=rf"num_steps={num_steps} is outside 1\.\.50; ask for fewer steps"):
        profiler.request(num_steps)


def test_second_request_is_refused_until_the_first_trace_is_whole(profiler):
    folder = profiler.request(1)["output_dir"]
    with pytest.raises(RuntimeError, match=f"a trace into {folder} is not whole yet; ask again"):
        profiler.request(1)
    with profiler.step(0), pytest.raises(RuntimeError, match="not whole yet"):
        profiler.request(1)
    assert profiler.request()["num_steps"] == 20


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_in_a_step_ends_the_trace_early_and_goes_on(profiler, traces, error):
    folder = profiler.request(5)["output_dir"]
    run_steps(profiler, 1)
    with pytest.raises(error, match="inside"), profiler.step(1):
        raise error("inside")
    assert traces == ["start", "stop"]
    run_steps(profiler, 2)
    assert traces == ["start", "stop"]
    assert profiler.request(1)["output_dir"] != folder


def test_trace_of_someone_else_costs_the_request_and_not_the_step(profiler, traces, tmp_path):
    jax.profiler.start_trace(str(tmp_path / "other"))
    profiler.request(1)
    with pytest.warns(UserWarning, match="no trace into .*: Profile has already been started; ask again later"):
        run_steps(profiler, 1, traces)
    assert traces == ["start", 0]
    assert contents(tmp_path / "traces") == []
    jax.profiler.stop_trace()
    profiler.request(1)
    run_steps(profiler, 1)
    assert traces == ["start", 0, "stop", "start", "stop"]


def test_trace_that_someone_else_stopped_costs_the_request_and_not_the_step(profiler, traces, monkeypatch):
    def stop():
        raise RuntimeError("No profile started")

    profiler.request(1)
    monkeypatch.setattr(jax.profiler, "stop_trace", stop)
    with pytest.warns(UserWarning, match="the trace into .* is not whole: No profile started"):
        run_steps(profiler, 1)
    profiler.request(1)


def test_close_ends_a_running_trace_drops_a_wanted_one_and_can_be_repeated(tmp_path, traces):
    running, wanted = Profiler(tmp_path / "a"), Profiler(tmp_path / "b")
    folder = tmp_path / running.request(5)["output_dir"]
    run_steps(running, 2)
    wanted.request(5)
    for profiler in (running, wanted):
        profiler.close()
        profiler.close()
        with pytest.raises(RuntimeError, match="the profiler is closed"):
            profiler.request(1)
        run_steps(profiler, 1)
    assert traces == ["start", "stop"]
    assert contents(folder) == ["trace"]
    assert contents(tmp_path / "b") == []


def test_close_stops_the_endpoint(tmp_path):
    profiler = Profiler(tmp_path, http_port=0)
    port = profiler.port
    assert port is not None
    profiler.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    assert not [thread for thread in threading.enumerate() if thread.name == "profile-http" and thread.is_alive()]


def test_without_a_port_there_is_no_endpoint(tmp_path):
    assert Profiler(tmp_path).port is None


def test_port_in_use_is_refused_with_what_to_change(served, tmp_path):
    with pytest.raises(RuntimeError, match=f"port {served.port} is not free.*DEEPINFER_PROFILE_HTTP_PORT_BASE"):
        Profiler(tmp_path, http_port=served.port)


@pytest.mark.parametrize(
    "method, query, body, num_steps, below",
    [
        ("GET", "", None, 20, "traces"),
        ("GET", "?num_steps=3", None, 3, "traces"),
        ("GET", "?num_steps=3&output_dir=a/b", None, 3, "traces/a/b"),
        ("POST", "?num_steps=50", None, 50, "traces"),
        ("POST", "", '{"num_steps": 4, "output_dir": "a"}', 4, "traces/a"),
        ("POST", "?num_steps=9&output_dir=a", '{"num_steps": 1}', 1, "traces/a"),
    ],
    ids=["default", "steps", "folder", "post", "json", "json-beats-query"],
)
def test_endpoint_starts_a_trace(served, traces, tmp_path, method, query, body, num_steps, below):
    status, answer = ask(served, method, query, body)
    assert (status, set(answer), answer["num_steps"]) == (200, {"output_dir", "num_steps"}, num_steps)
    assert answer["output_dir"].rpartition("/")[0] == str(tmp_path / below)
    run_steps(served, num_steps + 1, traces)
    assert traces == ["start", *range(num_steps), "stop", num_steps]


def test_endpoint_takes_an_absolute_folder_inside(served, tmp_path):
    inside = tmp_path / "traces" / "x"
    assert ask(served, query=f"?output_dir={inside}")[1]["output_dir"].startswith(f"{inside}/trace-")


@pytest.mark.parametrize(
    "method, query, body, message",
    [
        ("GET", "?num_steps=0", None, "num_steps=0 is outside 1..50"),
        ("GET", "?num_steps=51", None, "num_steps=51 is outside 1..50"),
        ("GET", "?num_steps=-1", None, "num_steps='-1' is not a number in 1..50"),
        ("GET", "?num_steps=few", None, "num_steps='few' is not a number in 1..50"),
        ("POST", "", '{"num_steps": true}', "num_steps=True is not a number"),
        ("POST", "", '{"num_steps": 2.5}', "num_steps=2.5 is not a number"),
        ("POST", "", '{"num_steps": null}', "num_steps=None is not a number"),
        ("POST", "", '{"output_dir": 3}', "output_dir=3 is not a folder in"),
        ("POST", "", "[1]", "give them in the query or in a JSON object"),
        ("POST", "", "not json", "Expecting value"),
        ("POST", "", b"\xff", "decode"),
        ("POST", "", "1" * 5000, "a body of 5000 bytes is outside 0..4096"),
        ("GET", "?steps=3", None, "the options are num_steps and output_dir"),
        ("POST", "", '{"num_steps": 1, "output_dir": "a", "x": 1}', "the options are num_steps and output_dir"),
        ("GET", "?output_dir=..", None, "output_dir='..' is not a folder in"),
        ("GET", "?output_dir=a/../../b", None, "is not a folder in"),
        ("GET", "?output_dir=/", None, "output_dir='/' is not a folder in"),
        ("GET", "?output_dir=%2e%2e%2Fx", None, "output_dir='../x' is not a folder in"),
        ("POST", "", '{"output_dir": "../traces2"}', "output_dir='../traces2' is not a folder in"),
        ("GET", "?output_dir=a%00b", None, "null"),
        ("GET", "?output_dir=link", None, "output_dir='link' is not a folder in"),
        ("GET", "?output_dir=file", None, "file"),
    ],
)
def test_endpoint_refuses_with_the_reason_and_writes_nothing(served, traces, tmp_path, method, query, body, message):
    root = tmp_path / "traces"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    (root / "file").touch()
    status, answer = ask(served, method, query, body)
    assert (status, list(answer)) == (400, ["error"])
    assert message in answer["error"]
    run_steps(served, 1, traces)
    assert traces == [0]
    assert contents(tmp_path) == ["traces"]
    assert contents(root) == ["file", "link"]


def test_endpoint_knows_one_path(served):
    assert ask(served, path="/") == (404, {"error": "/ is unknown; the only path is /profile"})


def test_endpoint_refuses_a_second_trace_as_a_conflict(served):
    assert ask(served)[0] == 200
    status, answer = ask(served)
    assert status == 409
    assert "is not whole yet" in answer["error"]


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://example.org"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "example.org:6070"}],
    ids=["origin", "fetch", "rebound-name"],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_endpoint_refuses_what_a_web_page_sends(served, tmp_path, method, headers):
    status, answer = ask(served, method, headers=headers)
    assert (status, contents(tmp_path)) == (403, [])
    assert "a web page may not ask for a trace" in answer["error"]
    assert ask(served, headers={"Sec-Fetch-Site": "none", "Host": "localhost:6070"})[0] == 200


def test_memory_profile_is_written_at_each_request_and_at_the_end(tmp_path, traces):
    path = tmp_path / "memory" / "profile.pb.gz"
    profiler = Profiler(tmp_path, memory_profile_path=path)
    assert not path.exists()
    for write in (profiler.request, profiler.close):
        write()
        assert gzip.decompress(path.read_bytes())
        assert contents(path.parent) == ["profile.pb.gz"]
        path.unlink()


def test_memory_counts_live_arrays_where_the_device_does_not_count(tmp_path):
    assert Profiler(tmp_path).memory() == {}
    profiler = Profiler(tmp_path, memory_tracing=True)
    gc.collect()
    before = profiler.memory()["memory_live_bytes"]
    held = jnp.zeros(1000, jnp.float32)
    assert profiler.memory() == {"memory_live_bytes": before + held.nbytes}


def test_memory_is_the_sum_over_devices_that_count(tmp_path, monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_in_use": 5, "bytes_limit": 10}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(), Device()])
    assert Profiler(tmp_path, memory_tracing=True).memory() == {"memory_live_bytes": 10}
