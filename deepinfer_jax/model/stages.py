"""Named stages of a forward: what can be looked at, and what can be put in its place."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from jaxtyping import Array, Int

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.ops.invariant import map_rows


class Stages:
    """Collects the stages that `capture` asks for while one forward is traced, and substitutes forced ones.

    capture: patterns of stage names such as "logits", "layers.3.attn_out" or "layers.*.topk_idxs".
    forced: stage name -> value used instead of the computed one; the captured value stays the computed one.
    """

    def __init__(self, capture: tuple[str, ...], forced: Mapping[str, Array]) -> None:
        self._capture = capture
        self._forced = dict(forced)
        self._noted: set[str] = set()
        self.captured: dict[str, Array] = {}

    @property
    def is_active(self) -> bool:
        """Whether anything is to be captured or forced."""
        return bool(self._capture or self._forced)

    def wants(self, name: str) -> bool:
        """Whether a stage would be returned; lets costly views be built only on demand."""
        return any(fnmatchcase(name, pattern) for pattern in self._capture)

    def is_forced(self, name: str) -> bool:
        """Whether the caller gives this stage's value."""
        return name in self._forced

    def note(self, name: str, value: Array) -> Array:
        """The value to go on with: `value`, or the forced one, which must have its shape."""
        self._noted.add(name)
        if self.wants(name):
            self.captured[name] = value
        if name not in self._forced:
            return value
        forced = self._forced[name]
        if forced.shape != value.shape:
            raise ValueError(f"forced_selection[{name!r}] has shape {forced.shape}; the stage has shape {value.shape}")
        return forced.astype(value.dtype)

    def show(self, name: str, value: Array) -> None:
        """Notes a view that nothing is computed from. Raises ValueError where it is forced, which would do nothing."""
        if name in self._forced:
            raise ValueError(
                f"forced_selection[{name!r}] would have no effect: this stage is a view of packed data, or a side "
                "result; force what it is made from (attn_in, compress_latent, topk_idxs)"
            )
        self.note(name, value)

    def mark(self, name: str) -> None:
        """Tells that a stage exists whose view was not built, since nobody asked for it."""
        self._noted.add(name)

    def map_rows(
        self,
        fn: Callable[..., Any],
        *trees: Any,
        num_live: Int[Array, ""],
        config: RuntimeConfig,
        tile: int | None = None,
    ) -> Any:
        """`fn(stages, *tiles)` over row tiles (see `ops.invariant.map_rows`), with stages noted inside the tiles.

        The tile is `config.product_tile` unless `tile` bounds the memory of a section in every mode.
        """
        inner_noted: set[str] = set()

        def on_tile(forced: dict[str, Array], *parts: Any) -> tuple[Any, dict[str, Array]]:
            inner = Stages(self._capture, forced)
            result = fn(inner, *parts)
            inner_noted.update(inner._noted)
            return result, inner.captured

        result, captured = map_rows(
            on_tile,
            self._forced,
            *trees,
            num_live=num_live,
            **{**config.tiles, "tile": tile or config.product_tile},
        )
        self._noted.update(inner_noted)
        self.captured.update(captured)
        return result

    def finish(self) -> dict[str, Array]:
        """The captured stages. Raises ValueError for a forced name or a capture pattern that met no stage."""
        unused = sorted(set(self._forced) - self._noted)
        if unused:
            raise ValueError(f"forced_selection names stages that this model does not have: {unused}")
        idle = [p for p in self._capture if not any(fnmatchcase(name, p) for name in self._noted)]
        if idle:
            raise ValueError(f"capture patterns {idle} match no stage; stages of this model: {sorted(self._noted)}")
        return self.captured
