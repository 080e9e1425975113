"""What the perturbations of one matrix share: the workload, the engine of the base, and the base itself."""

import contextlib
from collections.abc import Iterator
from typing import Literal

from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.kernels.registry import ASCEND
from deepinfer_jax.testing.determinism.driving import (
    Arrival,
    EngineSetup,
    Interrupt,
    Model,
    RowCounter,
    Run,
    make_engine,
    run_requests,
)
from deepinfer_jax.testing.determinism.workload import Texts, base_requests, longest_request

BaseName = Literal["plain", "replay"]
# Of the engine that gives the base: room for 200 neighbours, and in its steps for any prompt of a quick run.
MAX_REQUESTS = 336
MAIN = EngineSetup(options=(("max_num_seqs", MAX_REQUESTS),))
FEW = ("max_num_seqs", 8)  # requests of engines that have other steps anyway
REPLAY_BEYOND = 12  # tokens that bounded replay keeps beyond a window


class Session:
    """Engines of one model, and results that were computed once. `close` frees the engines."""

    def __init__(self, model: Model, *, num_tokens: int, spare_cores: tuple[int, ...] = ()) -> None:
        """Raises ValueError for a model without a tokenizer, and whatever an engine refuses.

        spare_cores: processors that this process leaves to one beside it.
        """
        self.model, self.spare_cores = model, spare_cores
        self._counter = RowCounter()
        self._bases: dict[BaseName, Run] = {}
        self._max_len = longest_request(num_tokens)
        self.main = make_engine(model, self._max_len, MAIN, self._counter)
        if self.main.tokenizer is None:
            self.main.close()
            raise ValueError(
                f"--model={model.path} has no tokenizer, which grammars and stop strings need; give a model with one"
            )
        self.texts = Texts(
            tokenizer=self.main.tokenizer, image_token=self.main.model.image_token_id, num_tokens=num_tokens
        )
        self.requests = base_requests(self.texts, has_vision=self.has_vision)

    @property
    def has_vision(self) -> bool:
        """Whether requests may have images."""
        return self.main.params.vision is not None

    @property
    def max_drafts(self) -> int:
        """The most tokens that the model may draft."""
        if self.model.device == ASCEND or not self.main.model.num_nextn_predict_layers:
            return 0
        return self.main.model.dspark_block_size

    @property
    def scarce_tokens(self) -> int:
        """The least capacity of pages in which the longest request fits."""
        page = self.main.runtime.page_tokens
        return -(-int(self._max_len / 0.8 + 1) // page) * page

    def replay(self, mode: str) -> EngineSetup:
        """An engine with bounded replay."""
        keep = self.main.model.sliding_window + REPLAY_BEYOND
        variables = (("YOCO_PREFILL_TRUNCATION_MODE", mode), ("YOCO_PREFILL_KEEP_TOKENS", str(keep)))
        return EngineSetup(options=MAIN.options, variables=variables)

    def base(self, name: BaseName) -> Run:
        """The whole base set at once: in the engine of the base, or under bounded replay."""
        if name not in self._bases:
            setup = MAIN if name == "plain" else self.replay("mask")
            self._bases[name] = self.run(self.arrivals, setup)
        return self._bases[name]

    def run(
        self,
        arrivals: list[Arrival],
        setup: EngineSetup = MAIN,
        *,
        interrupt: Interrupt | None = None,
        keeps_prefixes: bool = False,
    ) -> Run:
        """Runs requests in an engine of this setup (see `run_requests`)."""
        with self._engine(setup) as engine:
            return run_requests(
                engine, self._counter, self.texts, arrivals, interrupt=interrupt, keeps_prefixes=keeps_prefixes
            )

    def each_alone(self, setup: EngineSetup = MAIN) -> Run:
        """The base set, one request after the other; notes are those of the last one, but for rows."""
        results = {}
        notes: dict[str, int] = {}
        with self._engine(setup) as engine:
            for request in self.requests:
                one = run_requests(engine, self._counter, self.texts, [Arrival(request)])
                results |= one.results
                notes = one.notes | {"rows": max(notes.get("rows", 0), one.notes["rows"])}
        return Run(results=results, notes=notes)

    @property
    def arrivals(self) -> list[Arrival]:
        """The base set, all at once and in order."""
        return [Arrival(request) for request in self.requests]

    def close(self) -> None:
        """Frees the engine of the base."""
        self.main.close()

    @contextlib.contextmanager
    def _engine(self, setup: EngineSetup) -> Iterator[LLMEngine]:
        if setup == MAIN:
            yield self.main
            return
        engine = make_engine(self.model, self._max_len, setup, self._counter)
        try:
            yield engine
        finally:
            engine.close()
