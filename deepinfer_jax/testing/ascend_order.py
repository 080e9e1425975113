"""Finding resident programs whose reads and in-place writes have no order (spec: ascend 7).

XLA may run a reader of a handle and the in-place writer of the same handle in any order unless data flows from one to
the other. Such a program fails with a stale handle when it runs the wrong way round; here it is found without running.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from deepinfer_jax.kernels import ffi


@dataclass(frozen=True)
class _Step:
    """One equation: what it calls, and the numbers of the values that it reads and makes."""

    name: str
    writes: bool  # its first operand is a device array that it writes in place
    reads: tuple[int, ...]
    makes: tuple[int, ...]


def unordered_reads(function: Callable[..., Any], *arrays: Any) -> list[str]:
    """A text for each read of a device array that an in-place write of it does not wait for; empty when there is none.

    Looks at the jaxpr of `function` on these arguments and through nested `jit`s. A loop or a branch counts as one
    step; its inside is not looked at.
    """
    targets = {t["name"] for t in ffi.target_table(ffi.load_bridge()) if t["is_in_place"]}
    steps: list[_Step] = []
    _flatten(jax.make_jaxpr(function)(*arrays).jaxpr, {}, itertools.count(), targets, steps)
    found = []
    for writer in (step for step in steps if step.writes):
        before = _ancestors(steps, writer)
        late = [step for step in steps if step is not writer and writer.reads[0] in step.reads and step not in before]
        found += [f"{writer.name} writes what {step.name} reads; put the reader's result into after=" for step in late]
    return found


def _flatten(
    jaxpr: core.Jaxpr, numbers: dict[Any, int], fresh: Iterator[int], targets: set[str], steps: list[_Step]
) -> None:
    """Appends the steps of a jaxpr; `numbers` holds the values that it is given and gets those that it makes."""
    for equation in jaxpr.eqns:
        operands = [var for var in equation.invars if not isinstance(var, core.Literal)]
        reads = tuple(numbers.setdefault(var, next(fresh)) for var in operands)
        inner = equation.params.get("jaxpr") if equation.primitive.name == "jit" else None
        if isinstance(inner, core.ClosedJaxpr):
            given = zip(inner.jaxpr.invars, equation.invars, strict=True)
            inside = {var: numbers[outer] for var, outer in given if not isinstance(outer, core.Literal)}
            _flatten(inner.jaxpr, inside, fresh, targets, steps)
            results = zip(equation.outvars, inner.jaxpr.outvars, strict=True)
            numbers |= {var: inside[made] for var, made in results if not isinstance(made, core.Literal)}
            continue
        makes = tuple(numbers.setdefault(var, next(fresh)) for var in equation.outvars)
        name = equation.params.get("target_name", equation.primitive.name)
        attributes = dict(equation.params.get("attributes") or ()) if name in targets else {}
        steps.append(_Step(name, bool(attributes.get("is_resident", 0)), reads, makes))


def _ancestors(steps: list[_Step], of: _Step) -> set[_Step]:
    """The steps that must run before `of`."""
    made_by = {value: step for step in steps for value in step.makes}
    todo, seen = [of], set()
    while todo:
        for value in todo.pop().reads:
            source = made_by.get(value)
            if source is not None and source not in seen:
                seen.add(source)
                todo.append(source)
    return seen
