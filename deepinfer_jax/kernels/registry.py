"""The choice of an implementation for each op, by an explicit target; nothing here looks at attached devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_jax.config.runtime import Backend
from deepinfer_jax.kernels.ascend import AscendUnsupportedError

AUTO, REFERENCE, ASCEND, NVIDIA = "auto", "reference", "ascend", "nvidia"
TRAINING = "training"  # the network under a gradient, on any device
MOSAIC_SM90, MOSAIC_SM100 = "mosaic_sm90", "mosaic_sm100"  # kernels for Hopper and for Blackwell
COMPUTE_CAPABILITIES = {MOSAIC_SM90: "9.0", MOSAIC_SM100: "10.0"}  # of the NVIDIA GPUs that they are for


def accepts(*_: Any, **__: Any) -> None:
    """Refuses nothing."""


@dataclass(frozen=True, kw_only=True)
class Impl:
    """One implementation of an op.

    refuses: takes the op's own arguments and gives the reason why this implementation cannot run them, None if it can.
    It looks at types, shapes and dtypes only, so that a choice is made when a step is traced.
    is_automatic: whether "auto" takes it; else it must be asked for by its name.
    """

    name: str
    fn: Callable[..., Any]
    targets: tuple[str, ...] = ()  # what it runs on; none listed: everything that JAX compiles for
    refuses: Callable[..., str | None] = accepts
    is_automatic: bool = True
    compute_capability: str = ""  # of the NVIDIA GPUs that it is for; empty: it says nothing about that

    def serves(self, target: str) -> bool:
        """Whether it runs on a target."""
        return target in self.targets or (not self.targets and target != ASCEND)


def mosaic_sm90(fn: Callable[..., Any], refuses: Callable[..., str | None]) -> Impl:
    """A kernel for Hopper, which is taken where it is asked for."""
    return _mosaic(MOSAIC_SM90, fn, refuses)


def mosaic_sm100(fn: Callable[..., Any], refuses: Callable[..., str | None]) -> Impl:
    """A kernel for Blackwell, which is taken where it is asked for."""
    return _mosaic(MOSAIC_SM100, fn, refuses)


def mosaic(fn: Callable[..., Any], refuses: Callable[..., str | None]) -> tuple[Impl, Impl]:
    """A kernel of instructions that Hopper and Blackwell have: one for each, of which the right one is asked for."""
    return mosaic_sm90(fn, refuses), mosaic_sm100(fn, refuses)


def _mosaic(name: str, fn: Callable[..., Any], refuses: Callable[..., str | None]) -> Impl:
    return Impl(
        name=name,
        fn=fn,
        targets=(NVIDIA,),
        refuses=refuses,
        is_automatic=False,
        compute_capability=COMPUTE_CAPABILITIES[name],
    )


def select(op: str, impls: Sequence[Impl], backend: Backend, *args: Any, **kwargs: Any) -> Impl:
    """The implementation of an op for these arguments; the last of `impls` is the reference.

    Under "auto" the first automatic one that accepts. By name that one, or the reference where it refuses or the op has
    none of that name: `explain` says which and why, and an engine logs it (`engine/kernel_choice.py`).
    On an Ascend device the reference would run on the host, which happens only for the ops in `backend.host_ops`.
    Raises AscendUnsupportedError where an Ascend device has none that accepts.
    """
    return _choose(op, impls, backend, args, kwargs)[0]


def explain(op: str, impls: Sequence[Impl], backend: Backend, *args: Any, **kwargs: Any) -> str:
    """The name of what `select` takes, followed by why it is not one that was asked before it."""
    impl, reasons = _choose(op, impls, backend, args, kwargs)
    if not reasons and impl.name == REFERENCE and backend.kernels not in (AUTO, REFERENCE):
        reasons = [f"there is no {backend.kernels} of this op"]
    return f"{impl.name} ({'; '.join(reasons)})" if reasons else impl.name


def _choose(op: str, impls: Sequence[Impl], backend: Backend, args: Any, kwargs: Any) -> tuple[Impl, list[str]]:
    reasons = []
    for impl in asked(impls, op, backend):
        reason = impl.refuses(*args, **kwargs)
        if reason is None:
            return impl, reasons
        reasons.append(f"{impl.name} refuses: {reason}")
    told = "; ".join(reasons) or f"none of {', '.join(impl.name for impl in impls)} runs there"
    if backend.target != ASCEND:
        raise NotImplementedError(f"{op} on {backend.target}: {told}; set kernels to {AUTO} or {REFERENCE}")
    raise AscendUnsupportedError(
        f"{op} on {ASCEND}: {told}; change that, or add {op} to host_ops (DEEPINFER_JAX_ASCEND_HOST_OPS), so that "
        "the host computes it"
    )


def check_choice(ops: Mapping[str, Sequence[Impl]], backend: Backend) -> None:
    """Raises ValueError for a choice of kernels that no op has on the target, or that leaves the target unused."""
    here = {impl.name for impls in ops.values() for impl in impls if impl.serves(backend.target)}
    if backend.kernels not in {AUTO, *here}:
        allowed = ", ".join(sorted({AUTO, *here}))
        raise ValueError(
            f"kernels={backend.kernels!r} is no implementation for {backend.target}; choose one of {allowed}"
        )


def asked(impls: Sequence[Impl], op: str, backend: Backend) -> tuple[Impl, ...]:
    """The implementations of an op that `select` asks on a backend, in this order; none where it has none there."""
    reference = impls[-1]
    if backend.target == ASCEND and op in backend.host_ops:
        return (reference,)
    here = tuple(impl for impl in impls if impl.serves(backend.target))
    if backend.kernels == AUTO:
        return tuple(impl for impl in here if impl.is_automatic)
    return tuple(impl for impl in here if impl.name == backend.kernels or impl is reference)


def names(ops: Mapping[str, Sequence[Impl]], backend: Backend) -> dict[str, tuple[str, ...]]:
    """For each op the names of what `select` asks on a backend."""
    return {op: tuple(impl.name for impl in asked(impls, op, backend)) for op, impls in sorted(ops.items())}
