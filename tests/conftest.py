"""One set of JAX flags for all tests, the marks that need an option, and the summary of `--all`."""

import json
import os
import platform
import time
import zlib
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUMMARY, FAILURES = ROOT / "build" / "test-summary.json", ROOT / "build" / "test-failures.txt"
DEVICES = ("sm90", "sm100", "ascend")

# Read by JAX when it is imported, and inherited by the processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / "build" / "jax-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

import jax  # noqa: E402 (after the environment is set)
from jaxtyping import install_import_hook  # noqa: E402

# Shapes and dtypes are checked in the modules that state them. Not in others: a check costs more than most host code.
ANNOTATED = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "deepinfer_jax").rglob("*.py"))
    if "from jaxtyping import" in path.read_text(encoding="utf-8")
]
install_import_hook(ANNOTATED, "beartype.beartype")

from deepinfer_jax.testing.programs import forget_programs  # noqa: E402 (behind the hook, as all of the package)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help=f"also run the slow tests, and write {SUMMARY.relative_to(ROOT)}, and {FAILURES.name} as they come",
    )
    parser.addoption(
        "--device",
        choices=DEVICES,
        help="also run the full-size tests of this device, which must be attached",
    )


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if config.getoption("--all") and not is_worker:
        config.pluginmanager.register(SummaryWriter(), "deepinfer-summary")


_last_module: list[object] = [None]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Between modules, and between tests with the mark, forgets compiled programs before there are too many."""
    module = getattr(item, "module", None)
    if module is not _last_module[0] or item.get_closest_marker("compiles_much"):
        _last_module[0] = module
        forget_programs()


def pytest_report_header(config: pytest.Config) -> str:
    slow = "run" if config.getoption("--all") else "left out (--all runs them)"
    device = config.getoption("--device") or "none (--device NAME runs those of one)"
    return f"slow tests: {slow}; device tests: {device}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what needs an option that was not given."""
    unwanted = set(DEVICES) - {config.getoption("--device")}
    if not config.getoption("--all"):
        unwanted.add("slow")
    dropped = [item for item in items if unwanted & {mark.name for mark in item.iter_markers()}]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


class SummaryWriter:
    """Collects one outcome per test and writes them as JSON at the end; failures at once, in case there is no end."""

    def __init__(self) -> None:
        self.start_s = time.time()
        self.tests: dict[str, dict[str, str | float]] = {}
        FAILURES.parent.mkdir(exist_ok=True)
        FAILURES.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed", "duration_s": 0.0})
        test["duration_s"] = round(float(test["duration_s"]) + report.duration, 3)
        if hasattr(report, "wasxfail"):
            test["outcome"] = "xpassed" if report.passed else "xfailed"
        elif report.failed:
            test["outcome"] = "failed" if report.when == "call" else "error"
            with FAILURES.open("a") as file:
                file.write(f"{report.nodeid}\n{report.longreprtext}\n\n")
        elif report.skipped:
            test["outcome"] = "skipped"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        summary = {
            "exit_status": int(exitstatus),
            "duration_s": round(time.time() - self.start_s, 1),
            "counts": dict(sorted(Counter(str(t["outcome"]) for t in self.tests.values()).items())),
            "versions": {
                "python": platform.python_version(),
                **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy", "pytest")},
            },
            "tests": dict(sorted(self.tests.items())),
        }
        SUMMARY.write_text(json.dumps(summary, indent=1) + "\n")


@pytest.fixture
def seed_from_name(request: pytest.FixtureRequest) -> int:
    """A seed that depends on the test's name (parameters included) and on nothing else."""
    return zlib.crc32(request.node.name.encode())
