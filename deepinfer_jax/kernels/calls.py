"""Kernel calls that a program contains once, however many of its layers make them."""

import functools
from collections.abc import Callable
from typing import Any

import jax


@functools.cache
def shared_call(fn: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """`fn` with its static arguments, as one function of the program that calls it.

    A kernel takes seconds to lower. All calls of one such function with equal shapes are lowered together, if whatever
    differs between them (a layer's number) is an argument; XLA puts its body in the place of each call.
    """
    return jax.jit(functools.partial(fn, **static))  # not a step: part of one
