"""Cost curves in files: found again under the same facts, and nothing else in the folder is touched."""

import dataclasses
import json
import warnings
from pathlib import Path

import jax
import pytest

from deepinfer_jax.config.released import load_config
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.engine import cost_cache
from deepinfer_jax.engine.cost_cache import CurveFacts, curve_path, load_curve, store_curve
from deepinfer_jax.scheduler.budget import CostCurve

MODELS = Path(__file__).parents[2] / "configs" / "model"
CURVE = CostCurve(points=((8, 3.0), (64, 9.5)), platform="cpu", mesh=(1, 1), dtype="q")


@pytest.fixture
def facts() -> CurveFacts:
    return CurveFacts(
        device="cpu x86_64 2 cores",
        mesh=(1, 1),
        runtime=RuntimeConfig(model=load_config(MODELS / "deepseek-v4.1-flash.json")),
        sizes=(8, 64),
        num_drafts=5,
        spec_mode="match",
        context_len=1024,
    )


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_stored_curve_is_found_again(tmp_path, facts):
    folder = tmp_path / "new" / "folder"
    assert load_curve(folder, facts, max_age_s=60) is None
    store_curve(folder, facts, CURVE)
    assert load_curve(folder, facts, max_age_s=60) == CURVE
    assert [path.name for path in folder.iterdir()] == [f"{facts.key}{cost_cache.SUFFIX}"]


def test_a_curve_is_valid_for_its_lifetime(tmp_path, facts):
    store_curve(tmp_path, facts, CURVE, now=1000.0)
    found = {now: load_curve(tmp_path, facts, max_age_s=60, now=now) for now in (999.0, 1000.0, 1060.0, 1060.5)}
    assert found == {999.0: None, 1000.0: CURVE, 1060.0: CURVE, 1060.5: None}
    newer = dataclasses.replace(CURVE, points=((8, 2.0),))
    store_curve(tmp_path, facts, newer, now=1061.0)
    assert load_curve(tmp_path, facts, max_age_s=60, now=1062.0) == newer
    assert len(contents(tmp_path)) == 1


OTHERS = {
    "device": "gpu NVIDIA H200",
    "mesh": (2, 1),
    "numerics": "bf16",
    "model": "tiny.json",
    "sizes": (8, 16, 64),
    "num_drafts": 4,
    "spec_mode": "block",
    "context_len": 4096,
    "versions": ("0", "0.12", "0.12"),
}


@pytest.mark.parametrize("name, value", OTHERS.items(), ids=list(OTHERS))
def test_other_facts_are_another_curve(name, value, tmp_path, facts):
    match name:
        case "numerics":
            changes = {"runtime": dataclasses.replace(facts.runtime, numerics=value)}
        case "model":
            changes = {"runtime": dataclasses.replace(facts.runtime, model=load_config(MODELS / value))}
        case _:
            changes = {name: value}
    other = dataclasses.replace(facts, **changes)
    store_curve(tmp_path, facts, CURVE)
    assert load_curve(tmp_path, other, max_age_s=60) is None
    store_curve(tmp_path, other, dataclasses.replace(CURVE, points=((8, 1.0),)))
    assert load_curve(tmp_path, facts, max_age_s=60) == CURVE


def test_foreign_files_are_never_touched(tmp_path, facts):
    stale = dataclasses.replace(facts, context_len=1)
    store_curve(tmp_path, stale, CURVE, now=0.0)  # our own, long out of date, of other facts
    for name in ("notes.txt", "0123.4567.1700000000", f"{facts.key}.json", f"broken{cost_cache.SUFFIX}", ".hidden"):
        (tmp_path / name).write_bytes(b"not ours")
    before = contents(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_curve(tmp_path, facts, max_age_s=60) is None
        store_curve(tmp_path, facts, CURVE)
        assert load_curve(tmp_path, facts, max_age_s=60) == CURVE
    after = contents(tmp_path)
    assert after.pop(curve_path(tmp_path, facts).name)
    assert after == before


def broken(facts: CurveFacts) -> dict[str, bytes]:
    good = {"format": cost_cache.FORMAT, "key": facts.key, "written_at": 0.0, "curve": CURVE.to_json()}
    return {
        "half": json.dumps(good).encode()[:-20],
        "bytes": b"\xff\xfe\x00",
        "list": b"[]",
        "format": json.dumps(good | {"format": "deepinfer_jax cost curve 0"}).encode(),
        "key": json.dumps(good | {"key": "other"}).encode(),
        "time": json.dumps(good | {"written_at": "today"}).encode(),
        "no curve": json.dumps(good | {"curve": None}).encode(),
        "bad curve": json.dumps(good | {"curve": {"points": [[8, -1.0]]}}).encode(),
    }


@pytest.mark.parametrize("kind", ["half", "bytes", "list", "format", "key", "time", "no curve", "bad curve"])
def test_an_unreadable_file_is_a_warning_and_is_replaced(kind, tmp_path, facts):
    curve_path(tmp_path, facts).write_bytes(broken(facts)[kind])
    with pytest.warns(UserWarning, match="measured again"):
        assert load_curve(tmp_path, facts, max_age_s=60, now=1.0) is None
    store_curve(tmp_path, facts, CURVE)
    assert load_curve(tmp_path, facts, max_age_s=60) == CURVE


def test_a_folder_that_takes_no_file_is_a_warning(tmp_path, facts):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="DEEPINFER_DECODE_PERF_CACHE_DIR"):
        store_curve(tmp_path / "file", facts, CURVE)


def test_a_write_that_fails_leaves_the_old_curve_and_no_part(tmp_path, facts, monkeypatch):
    store_curve(tmp_path, facts, CURVE)
    before = contents(tmp_path)

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(cost_cache.os, "replace", fail)
    with pytest.warns(UserWarning, match="no space left"):
        store_curve(tmp_path, facts, dataclasses.replace(CURVE, points=((8, 1.0),)))
    assert contents(tmp_path) == before


def test_device_names_tell_platform_and_kind():
    assert cost_cache.device_name(jax.devices("cpu")[0]).startswith("cpu ")

    class Device:
        platform, device_kind = "gpu", "NVIDIA H200"

    assert cost_cache.device_name(Device()) == "gpu NVIDIA H200"
