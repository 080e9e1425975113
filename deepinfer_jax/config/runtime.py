"""How the network is computed: the static argument of every step."""

import dataclasses
import math
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np

from deepinfer_jax.config.model import ModelConfig

NumericsName = Literal["fp32_noqdq", "fp32", "bf16", "q"]
ReplayMode = Literal["off", "mask", "compact"]
ROW_TILE_SIZES = (8, 16, 32, 64, 128)
KernelChoice = str  # "auto", "reference", or the name of one implementation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numerics:
    """A numerics policy: which roundings of the specification are applied (fixtures: modes)."""

    name: NumericsName
    rounds_activations: bool  # bf16 at every rounding point, else float32 throughout
    quantizes_caches: bool  # FP8 window, FP4 main KV and index K
    quantizes_activations: bool  # FP8 activations in front of quantised linears


NUMERICS: dict[str, Numerics] = {
    "fp32_noqdq": Numerics(
        name="fp32_noqdq", rounds_activations=False, quantizes_caches=False, quantizes_activations=False
    ),
    "fp32": Numerics(name="fp32", rounds_activations=False, quantizes_caches=True, quantizes_activations=False),
    "bf16": Numerics(name="bf16", rounds_activations=True, quantizes_caches=True, quantizes_activations=False),
    "q": Numerics(name="q", rounds_activations=True, quantizes_caches=True, quantizes_activations=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """What single ops run on: the target of a step, a choice among implementations, and what the host may compute."""

    target: str = "cpu"
    kernels: KernelChoice = "auto"
    host_ops: tuple[str, ...] = ()  # ops of an Ascend device's step that the host may compute


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Everything a step needs to know that is not an array. Hashable: it is a static argument of `jax.jit`.

    Raises ValueError for impossible combinations, naming the fields.
    """

    model: ModelConfig
    numerics: NumericsName = "q"
    page_tokens: int = 64  # tokens that one page holds; ratio-2 caches keep half as many entries
    rollback_tokens: int = 6  # rows that a step may write and later reject
    row_tile: int = 8  # rows of one product tile: fixed, so that a row's bits do not depend on the batch
    is_invariant: bool = True  # False: products see all rows at once (faster on GPUs, not bit-stable)
    replay_mode: ReplayMode = "off"  # bounded replay of prefill in the decoder layers (spec: backbone 2.2)
    replay_keep_tokens: int = 0  # last prompt tokens that run them
    kernels: KernelChoice = "auto"
    target: str = "cpu"  # what the step is built for; never read from the attached devices
    host_ops: tuple[str, ...] = ()  # ops that the host may compute where the target is an Ascend device
    dp: int = 1  # devices along the mesh's data-parallel axis; a step of several runs inside `shard_map`
    cp: int = 1  # and along its context-parallel one
    splits_rows: bool = True  # whether the devices of one dp rank share its rows; else each computes all of them
    forced_imbalance: float = (
        0.0  # for benchmarks: rows choose experts by turns (`ops.moe.forced_experts`); 0: by router
    )
    counts_experts: bool = False  # whether a step counts the rows that chose each expert
    expert_axes: tuple[str, ...] = ("dp", "cp")  # mesh axes that the experts are spread over
    engram_axes: tuple[str, ...] = ("dp", "cp")  # and the rows of the Engram tables
    engram_on_host: bool = False  # whether those tables are in the memory of the hosts

    def __post_init__(self) -> None:
        if self.numerics not in get_args(NumericsName):
            raise ValueError(f"numerics={self.numerics!r} is unknown; choose one of {get_args(NumericsName)}")
        if self.page_tokens <= 0 or self.page_tokens % 2:
            raise ValueError(f"page_tokens={self.page_tokens} must be positive and even (ratio-2 groups)")
        if self.rollback_tokens < 1:
            raise ValueError(f"rollback_tokens={self.rollback_tokens} must be at least 1")
        if self.replay_mode not in get_args(ReplayMode):
            raise ValueError(f"replay_mode={self.replay_mode!r} is unknown; choose one of {get_args(ReplayMode)}")
        needed = self.model.sliding_window + self.rollback_tokens
        if self.replay_mode != "off" and self.replay_keep_tokens < needed:
            raise ValueError(
                f"replay_keep_tokens={self.replay_keep_tokens} is below {needed} (window {self.model.sliding_window} + "
                f"{self.rollback_tokens} tokens of backtracking); raise DEEPINFER_YOCO_PREFILL_KEEP_TOKENS to "
                f"{needed} or more, or set DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE to off"
            )
        if self.dp < 1 or self.cp < 1:
            raise ValueError(f"dp={self.dp} and cp={self.cp} must both be at least 1")
        if self.forced_imbalance and self.is_invariant:
            raise ValueError(
                f"forced_imbalance={self.forced_imbalance} makes a row's experts depend on its place in the step, "
                "against batch-invariant mode; set DEEPINFER_BATCH_INVARIANT=0 for such benchmarks"
            )
        if self.row_tile not in ROW_TILE_SIZES:
            raise ValueError(f"row_tile={self.row_tile} must be one of {ROW_TILE_SIZES}")

    @property
    def backend(self) -> Backend:
        """What `kernels/registry.py` chooses implementations by."""
        return Backend(target=self.target, kernels=self.kernels, host_ops=self.host_ops)

    def num_pieces(self, axes: tuple[str, ...]) -> int:
        """How many pieces an array is cut into that is spread over these mesh axes."""
        return math.prod(getattr(self, axis) for axis in axes)

    @property
    def row_multiple(self) -> int:
        """What the rows of a step are padded to a multiple of: whole tiles, equally many on each device."""
        return self.row_tile * self.cp if self.splits_rows else self.row_tile

    @property
    def policy(self) -> Numerics:
        """The numerics policy that `numerics` names."""
        return NUMERICS[self.numerics]

    @property
    def product_tile(self) -> int | None:
        """Rows of one product tile, None where a product sees all rows at once."""
        return self.row_tile if self.is_invariant else None

    @property
    def has_fixed_trips(self) -> bool:
        """Whether loops tell the compiler their trip counts: differentiable, but not bit-stable over shapes."""
        return not self.is_invariant

    @property
    def tiles(self) -> dict[str, Any]:
        """How `ops.invariant.map_rows` cuts the rows of a step."""
        return {
            "tile": self.product_tile,
            "has_fixed_trips": self.has_fixed_trips,
            "loops_one": self.target != "nvidia",
        }

    @property
    def is_repeatable(self) -> bool:
        """Whether the compiler may choose nothing by timing it, as it does for GPUs: two processes might differ."""
        return self.is_invariant and self.target == "nvidia"

    @property
    def runs_reference(self) -> bool:
        """Whether a GPU runs what XLA makes of the reference, in every op: no kernels are named."""
        return self.kernels in ("auto", "reference")

    @property
    def loops_layers(self) -> bool:
        """Whether all layers share one compiled body. A CPU compiles far less; a GPU waits at each branch.

        In batch-invariant mode what XLA makes of the reference loops inside each layer too, and takes a minute to
        compile for eight layers. A step for an Ascend device is a program of the CPU that calls the device for single
        operators.
        """
        return self.target in ("cpu", "ascend") or (self.is_invariant and self.runs_reference)

    @property
    def activation_dtype(self) -> np.dtype:
        """Dtype of streams and activations between ops."""
        return np.dtype(ml_dtypes.bfloat16 if self.policy.rounds_activations else np.float32)

    @property
    def has_replay(self) -> bool:
        """Whether bounded replay is on."""
        return self.replay_mode != "off"

    def tail_start(self, prompt_len: int) -> int:
        """The first position of a prompt that runs the decoder layers: fixed by the prompt, whatever the chunks are."""
        return 0 if self.replay_mode == "off" else max(0, prompt_len - self.replay_keep_tokens)

    @property
    def ring_len(self) -> int:
        """Rows of a window ring: the window and every row that may be rolled back (spec: backbone 9.2)."""
        return self.model.sliding_window + self.rollback_tokens

    @property
    def tail_len(self) -> int:
        """Rows of the compressor tails: one open row and every row that may be rolled back."""
        return self.rollback_tokens + 2

    @property
    def history_len(self) -> int:
        """Token ids kept for Engram: its look-back and every row that may be rolled back."""
        return self.model.engram_max_ngram_size - 1 + self.rollback_tokens + 1
