"""Which implementation an op gets: by target, by name, by what it refuses; and the errors for what it cannot get."""

import pytest

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels.ascend import AscendUnsupportedError
from deepinfer_jax.kernels.catalog import OPS
from deepinfer_jax.kernels.registry import (
    REFERENCE,
    Impl,
    check_choice,
    explain,
    mosaic_sm90,
    mosaic_sm100,
    names,
    select,
)


def refuse_odd(x: int) -> str | None:
    return f"x={x} is odd" if x % 2 else None


def fast(x: int) -> str:
    return f"fast {x}"


def plain(x: int) -> str:
    return f"plain {x}"


IMPLS = (
    Impl(name="fast", fn=fast, targets=("nvidia", "ascend"), refuses=refuse_odd),
    Impl(name=REFERENCE, fn=plain),
)
OTHER = (Impl(name=REFERENCE, fn=plain),)


def run(x: int, impls=IMPLS, **backend) -> str:
    return select("op", impls, Backend(**backend), x).fn(x)


@pytest.mark.parametrize(
    "x, backend, want",
    [
        (2, {}, "plain 2"),
        (2, {"target": "nvidia"}, "fast 2"),
        (1, {"target": "nvidia"}, "plain 1"),
        (2, {"target": "nvidia", "kernels": "reference"}, "plain 2"),
        (2, {"target": "nvidia", "kernels": "fast"}, "fast 2"),
        (2, {"target": "ascend"}, "fast 2"),
        (1, {"target": "ascend", "host_ops": ("op",)}, "plain 1"),
        (2, {"target": "ascend", "host_ops": ("op",)}, "plain 2"),
        (2, {"target": "ascend", "host_ops": ("another",)}, "fast 2"),
    ],
)
def test_the_first_that_runs_there_and_accepts(x, backend, want):
    assert run(x, **backend) == want


def test_an_op_without_the_named_one_takes_the_reference():
    assert run(2, OTHER, target="nvidia", kernels="fast") == "plain 2"


def test_a_named_one_that_refuses_gives_way_to_the_reference_and_says_why():
    backend = Backend(target="nvidia", kernels="fast")
    assert select("op", IMPLS, backend, 1).name == REFERENCE
    assert explain("op", IMPLS, backend, 1) == "reference (fast refuses: x=1 is odd)"
    assert explain("op", IMPLS, backend, 2) == "fast"
    assert explain("op", OTHER, backend, 2) == "reference (there is no fast of this op)"
    assert explain("op", OTHER, Backend(target="nvidia"), 2) == "reference"


def test_a_named_one_that_refuses_is_an_error_on_an_ascend_device():
    with pytest.raises(AscendUnsupportedError, match="^op on ascend: fast refuses: x=1 is odd; change that"):
        run(1, target="ascend", kernels="fast")


@pytest.mark.parametrize(
    "make, name, capability", [(mosaic_sm90, "mosaic_sm90", "9.0"), (mosaic_sm100, "mosaic_sm100", "10.0")]
)
def test_an_implementation_that_is_not_automatic_is_taken_by_name_only(make, name, capability):
    impls = (make(fast, refuse_odd), IMPLS[1])
    assert impls[0].compute_capability == capability
    assert run(2, impls, target="nvidia") == "plain 2"
    assert run(2, impls, target="nvidia", kernels=name) == "fast 2"
    assert run(1, impls, target="nvidia", kernels=name) == "plain 1"
    assert run(2, impls, kernels=name) == "plain 2"
    assert names({"op": impls}, Backend(target="nvidia")) == {"op": (REFERENCE,)}


def test_kernels_for_nvidia_exist_for_ops_of_a_layer_and_are_not_automatic():
    asked = names(OPS, Backend(target="nvidia", kernels="mosaic_sm90"))
    found = {op for op, impls in asked.items() if impls == ("mosaic_sm90", REFERENCE)}
    assert found == OPS.keys() - {"rms_norm"}
    asked = names(OPS, Backend(target="nvidia", kernels="mosaic_sm100"))
    found = {op for op, impls in asked.items() if impls == ("mosaic_sm100", REFERENCE)}
    assert found == OPS.keys() - {"rms_norm"}
    assert set(names(OPS, Backend(target="nvidia")).values()) == {(REFERENCE,)}


def test_nothing_runs_on_the_host_of_an_ascend_device_unasked():
    with pytest.raises(AscendUnsupportedError, match="op on ascend: fast refuses: x=1 is odd; .* add op to host_ops"):
        run(1, target="ascend")
    with pytest.raises(AscendUnsupportedError, match="op on ascend: none of reference runs there"):
        run(2, OTHER, target="ascend")
    with pytest.raises(AscendUnsupportedError, match="none of fast, reference runs there"):
        run(2, (Impl(name="fast", fn=fast, targets=("nvidia",)), IMPLS[1]), target="ascend")


def test_a_choice_that_no_op_has_is_refused():
    ops = {"a": IMPLS, "b": OTHER}
    check_choice(ops, Backend(target="nvidia", kernels="fast"))
    check_choice(ops, Backend())
    with pytest.raises(ValueError, match="kernels='fast' is no implementation for cpu; choose one of auto, reference$"):
        check_choice(ops, Backend(kernels="fast"))
    with pytest.raises(ValueError, match="'reference' is no implementation for ascend; choose one of auto, fast$"):
        check_choice(ops, Backend(target="ascend", kernels="reference"))


def test_names_are_what_is_asked():
    ops = {"b": IMPLS, "a": OTHER}
    assert list(names(ops, Backend(target="nvidia")).items()) == [("a", (REFERENCE,)), ("b", ("fast", REFERENCE))]
    assert names(ops, Backend(target="nvidia", kernels="fast")) == {"a": (REFERENCE,), "b": ("fast", REFERENCE)}
    assert names(ops, Backend(target="ascend", host_ops=("a",))) == {"a": (REFERENCE,), "b": ("fast",)}


def test_every_op_ends_with_its_reference_and_has_one_for_each_target():
    for impls in OPS.values():
        assert impls[-1].name == REFERENCE
        assert len({impl.name for impl in impls}) == len(impls)
    for target in ("cpu", "nvidia", "ascend"):
        assert all(names(OPS, Backend(target=target)).values())
