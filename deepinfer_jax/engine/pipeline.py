"""The owner of parameters and device state: plans go in, drawn tokens come out one step later.

`launch` puts a step on the device and returns at once; only `read` waits. Steps are read in the order of launching.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from deepinfer_jax.engine import mesh_steps, steps
from deepinfer_jax.engine.balancing import ExpertBalancer
from deepinfer_jax.engine.buckets import StepShape
from deepinfer_jax.engine.drafting import blank_newest
from deepinfer_jax.engine.expert_loads import ExpertLoads
from deepinfer_jax.engine.guard import no_device_reads
from deepinfer_jax.engine.image_table import ImageTable
from deepinfer_jax.engine.mesh_steps import MeshSteps
from deepinfer_jax.engine.one_device import OneDeviceSteps
from deepinfer_jax.engine.outputs import ChunkDraws, Drawn, Proposal
from deepinfer_jax.engine.setup import LoadedModel
from deepinfer_jax.engine.sizes import EngineSizes
from deepinfer_jax.engine.steps import Carried, Computed, Masks, StepResult
from deepinfer_jax.model.backbone import Features
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.state import PAGED_LEAVES, State, init_state
from deepinfer_jax.parallel.processes import Agreement
from deepinfer_jax.sampling.logits import SampleSettings
from deepinfer_jax.scheduler.batching import pack_copies, pack_step
from deepinfer_jax.scheduler.images import ImageSpan
from deepinfer_jax.scheduler.plan import Plan, RankPlan
from deepinfer_jax.scheduler.sequence import Copy

_TOP_COUNTS = (20, 1000)  # compiled numbers of alternatives
_FIRST_COPIES = 8  # copies of the smallest compiled copy step


@dataclasses.dataclass
class Launched:
    """A step on the device whose results are unread."""

    plan: Plan
    shape: StepShape
    packed: Any  # of all ranks
    computed: Computed
    waiting: tuple[jax.Array, Features | None] | None = None  # logits and features of a step that waits for masks
    drawn: Int32[jax.Array, "*ranks three N"] | None = None
    chunks: Int32[jax.Array, "*ranks F C"] | None = None
    best: tuple[jax.Array, jax.Array] | None = None
    image_errors: dict[str, Exception] = dataclasses.field(default_factory=dict)  # by digest: what was not encoded

    @property
    def is_done(self) -> bool:
        """Whether the device has finished it; never waits."""
        return self.drawn is not None and bool(self.drawn.is_ready())  # type: ignore[attr-defined]


class Pipeline:
    """Launches steps and reads them. page_tables, one for each rank, belong to the scheduler and are copied."""

    def __init__(
        self,
        model: LoadedModel,
        sizes: EngineSizes,
        page_tables: Sequence[Int32[np.ndarray, "S M"]],
        *,
        settings: SampleSettings,
        is_guarded: bool,
    ) -> None:
        self._model, self._sizes, self._page_tables = model, sizes, page_tables
        self._steps = OneDeviceSteps(model.device) if model.mesh is None else MeshSteps(model.mesh)
        # The mode of replay is in the batch: steps of all modes share their programs.
        config = dataclasses.replace(model.runtime, replay_mode="off", replay_keep_tokens=0)
        self._forward: dict[str, Any] = {"config": config, "speculation": model.speculation}
        self._static: dict[str, Any] = {**self._forward, "settings": settings}
        self._agreement = Agreement("steps")
        self._params = model.params
        self.balancer: ExpertBalancer | None = None
        if model.balance is not None:
            shape = config.model
            self.balancer = ExpertBalancer(
                model.balance, num_layers=shape.num_hidden_layers, num_experts=shape.n_routed_experts
            )
            self._params = self._mesh_steps.with_table(self._params, self.balancer.table())
        self._loads = None if model.watch is None else ExpertLoads(model.watch)
        self._temperatures = np.asarray(model.speculation.temperatures, np.float64)
        self._is_compact = model.runtime.replay_mode == "compact"
        self._guard: Callable[[], Any] = no_device_reads if is_guarded else contextlib.nullcontext
        self.num_encoder_rows = self.num_decoder_rows = 0  # computed so far, padding of live tiles included
        self._carried = self._blank()
        self._images: ImageTable | None = None
        if model.params.vision is not None:
            places, shared = sizes.num_image_places, self._steps.shared
            self._images = ImageTable(model.params.vision, config=config, num_places=places, shared=shared)

    @property
    def figures(self) -> dict[str, int | float]:
        """Rows that were computed, balance of the experts, and what became of images, for statistics."""
        rows: dict[str, int | float] = {"encoder_rows": self.num_encoder_rows, "decoder_rows": self.num_decoder_rows}
        rows |= {} if self._loads is None else self._loads.figures()
        return rows | ({} if self._images is None else dataclasses.asdict(self._images.counters))

    @property
    def state(self) -> State:
        """The caches and rings, to look at between steps; the next launch gives them away."""
        return self._carried.state

    def reset(self) -> None:
        """Replaces the state, whatever became of it."""
        self._carried = self._blank()
        if self._images is not None:
            self._images.reset()

    def shape_of(self, plan: Plan) -> StepShape:
        """The compiled step in which a plan runs."""
        return self._sizes.buckets.shape_of(
            plan.num_rows,
            -(-plan.context_len // self._sizes.scheduler.page_tokens),
            num_chunks=plan.num_chunks,
            is_prefill=plan.is_prefill,
            num_logits=plan.num_logits,
            num_tail_rows=plan.num_tail_rows if self._is_compact and plan.is_prefill else None,
            has_images=plan.has_images,
        )

    def computed_rows(self, plan: Plan, shape: StepShape) -> int:
        """Rows that the step of a plan computes, padding included."""
        return self._sizes.buckets.computed_rows(shape, plan.num_rows)

    def warm_up(self, progress: Callable[[Sequence[Any]], Any], compiled: Callable[[str, float], None]) -> None:
        """Compiles every step by a run of padding rows. progress: wraps the list of steps, as `tqdm` does."""
        for shape in progress(self._sizes.buckets.all_shapes(is_compact=self._is_compact)):
            self._warm_up_step(shape, compiled)
        for num_copies in self._copy_sizes():
            self._copy([()] * self._steps.num_ranks, num_copies)

    def warm_up_images(self, compiled: Callable[[str, float], None]) -> None:
        """Compiles the encoder and every step with images."""
        if self._images is None:
            raise AssertionError("this model has no vision weights")
        with self._steps.on_device():
            self._images.warm_up(compiled)
        for shape in self._sizes.buckets.image_shapes(is_compact=self._is_compact):
            self._warm_up_step(shape, compiled)

    def _warm_up_step(self, shape: StepShape, compiled: Callable[[str, float], None]) -> None:
        start = time.perf_counter()
        idle = [RankPlan()] * self._steps.num_ranks
        packed = self._steps.place(self._contents(idle, shape, {} if shape.has_images else None))
        if isinstance(self._steps, MeshSteps) and jax.process_count() > 1:
            table = self._table_of(shape)
            self._steps.compile_step(self._params, self._carried, packed, table, shape=shape, **self._static)
            self._agreement.wait()
        with self._steps.on_device():
            result, _, self._carried = self._steps.run_step(
                self._params, self._carried, packed, self._table_of(shape), shape=shape, **self._static
            )
            for count in _TOP_COUNTS:
                self._steps.best_tokens(result.logprobs, count=count)
        jax.block_until_ready(result.drawn)
        compiled(shape.name, time.perf_counter() - start)

    def launch(self, plan: Plan, *, waits_for_masks: bool = False) -> Launched:
        """Puts a plan on the device: its copies, then its rows. With waits_for_masks, `sample` has to follow."""
        self._rebalance()
        shape = self.shape_of(plan)
        with self._guard(), self._steps.on_device():
            rows, errors = self._image_rows(plan, shape)
            contents = self._contents(plan.ranks, shape, rows)
            self._agreement.check(_told_of(plan, shape, errors), contents)
            if plan.num_copies:
                size = next(size for size in self._copy_sizes() if size >= plan.num_copies)
                self._copy([rank.copies for rank in plan.ranks], size)
            packed, table = self._steps.place(contents), self._table_of(shape)
            if waits_for_masks:
                logits, features, computed, self._carried = self._steps.run_forward(
                    self._params, self._carried, packed, table, shape=shape, **self._forward
                )
                waiting = logits, features
                return Launched(plan, shape, packed, computed, waiting=waiting, image_errors=errors)
            result, computed, self._carried = self._steps.run_step(
                self._params, self._carried, packed, table, shape=shape, **self._static
            )
            launched = Launched(plan, shape, packed, computed, image_errors=errors)
            self._keep(launched, result)
        return launched

    @property
    def params(self) -> Params:
        """The parameters as they lie now: experts may have moved."""
        return self._params

    @property
    def _mesh_steps(self) -> MeshSteps:
        if not isinstance(self._steps, MeshSteps):
            raise AssertionError("one device has no experts to balance")
        return self._steps

    def _rebalance(self) -> None:
        """Moves experts behind the launched steps, where it is time for that; launches go on at once."""
        found = None if self.balancer is None else self.balancer.due()
        if found is None:
            return
        config = self._static["config"]
        for layer in np.flatnonzero((found.sources >= 0).any(axis=1)):
            self._params = self._mesh_steps.move_experts(self._params, int(layer), found.sources[layer], config=config)
        self._params = self._mesh_steps.with_table(self._params, found.table)

    def knows_image(self, image: ImageSpan) -> bool:
        """Whether an image need not be encoded for the next step."""
        return self._images is None or self._images.knows(image)

    def encode_ahead(self, image: ImageSpan) -> None:
        """Encodes an image of a coming step behind those that are launched, and returns at once."""
        if self._images is not None:
            with self._guard(), self._steps.on_device():
                self._images.encode_ahead(image)

    def sample(self, launched: Launched, masks: Sequence[Masks]) -> None:
        """Draws the tokens of a step that waits for masks, which must be the last one launched; masks: of each rank."""
        if launched.waiting is None:
            raise AssertionError("this step does not wait for masks")
        logits, features = launched.waiting
        with self._guard(), self._steps.on_device():
            result, self._carried = self._steps.run_sampling(
                self._params,
                self._carried,
                logits,
                features,
                launched.packed,
                self._steps.place(masks),
                shape=launched.shape,
                **self._static,
            )
            launched.waiting = None
            self._keep(launched, result)

    def read(self, launched: Launched) -> list[ChunkDraws]:
        """Waits for a step; what each chunk drew, in the order of the plan. NaN where logits were not finite."""
        if launched.drawn is None:
            raise AssertionError("a step that waits for masks was read before it was sampled")
        computed, *results = jax.device_get((launched.computed, launched.drawn, launched.chunks, launched.best))
        drawn, told, best = self._steps.by_rank(results)
        self.num_encoder_rows += int(computed.rows[0])
        self.num_decoder_rows += int(computed.rows[1])
        places = None if self.balancer is None else self.balancer.places
        if self._loads is not None:
            self._loads.note(computed.loads, places)
        if self.balancer is not None:
            self.balancer.note(computed.loads, is_prefill=launched.plan.is_prefill)
        found: list[ChunkDraws] = []
        for number, rank in enumerate(launched.plan.ranks):
            own = drawn[number], told[number], jax.tree.map(lambda part, n=number: part[n], best)
            found += self._read_rank(rank, *own)
        return found

    def _read_rank(
        self, plan: RankPlan, drawn: Int32[np.ndarray, "three N"], told: Int32[np.ndarray, "F C"], best: Any
    ) -> list[ChunkDraws]:
        token_ids, (logprobs, masses) = drawn[0].tolist(), drawn[1:].view(np.float32).tolist()
        rows = list(map(Drawn, token_ids, logprobs, masses))
        found: list[ChunkDraws] = []
        first = 0
        for index, (chunk, num_kept, verified) in enumerate(zip(plan.chunks, *told[:2].tolist(), strict=False)):
            end = first + chunk.num_logits - chunk.num_drafts + verified
            if num_top := chunk.sequence.options.params.top_logprobs:
                rows[first:end] = [rows[i]._replace(top=_best_of(best, i, num_top)) for i in range(first, end)]
            first_draw = end - 1 - verified if chunk.draws else end
            is_told = chunk.draws and chunk.proposes and len(told) > 2
            proposal = self._proposal(told[2:, index]) if is_told else None
            found.append(
                ChunkDraws(rows[first:first_draw], rows[first_draw : first_draw + num_kept], verified, proposal)
            )
            first = end
        return found

    def _proposal(self, told: Int32[np.ndarray, " F"]) -> Proposal:
        """What `drafting.propose` tells of one chunk."""
        ids, confidence, logprobs = np.ascontiguousarray(told).reshape(3, -1)
        chances = 0.5 * (1.0 + np.tanh(0.5 * confidence.view(np.float32) / self._temperatures))
        return Proposal(
            token_ids=ids.tolist(),
            confidence=confidence.view(np.float32).tolist(),
            survival=tuple(np.cumprod(chances).tolist()),
            logprobs=logprobs.view(np.float32).tolist(),
        )

    def read_request(self, slot: int, pages: Sequence[int], *, rank: int) -> State:
        """What a request has on its devices, on the host: its rings and pages. Waits for all launched steps."""
        return self._steps.read_request(self._carried.state, slot, self._page_list(pages), rank)

    def write_request(self, request: State, slot: int, pages: Sequence[int], *, rank: int) -> None:
        """Puts what `read_request` gave into another slot and other pages; pages beyond `pages` are left out."""
        places = self._page_list(pages)

        def fit(path: Any, leaf: np.ndarray) -> np.ndarray:
            if not jax.tree_util.keystr(path).startswith(PAGED_LEAVES):
                return leaf
            missing = max(0, len(places) - leaf.shape[1])
            return np.pad(leaf, [(0, 0), (0, missing)] + [(0, 0)] * (leaf.ndim - 2))[:, : len(places)]

        with self._steps.on_device():
            request = jax.tree_util.tree_map_with_path(fit, request)
            self._carried = self._steps.write_request(self._carried, request, slot, places, rank)

    def _page_list(self, pages: Sequence[int]) -> Int32[np.ndarray, " M"]:
        """Padded to a compiled number of pages."""
        sizes = self._sizes.buckets.pages
        padded = np.full(next(size for size in sizes if size >= len(pages)), -1, np.int32)
        padded[: len(pages)] = pages
        return padded

    def _keep(self, launched: Launched, result: StepResult) -> None:
        """Notes a result and starts its way to the host."""
        counts = [chunk.sequence.options.params.top_logprobs for chunk in launched.plan.chunks]
        most = max(counts, default=0)
        if most:
            count = next(size for size in _TOP_COUNTS if size >= most)
            launched.best = self._steps.best_tokens(result.logprobs, count=count)
        launched.drawn, launched.chunks = result.drawn, result.chunks  # the distributions are dropped here
        for array in jax.tree.leaves((launched.drawn, launched.chunks, launched.computed, launched.best)):
            array.copy_to_host_async()

    def _copy(self, by_rank: Sequence[Sequence[Copy]], num_copies: int) -> None:
        with self._steps.on_device():
            packed = self._steps.place([pack_copies(copies, num_copies=num_copies) for copies in by_rank])
            self._carried = self._steps.copy_states(self._carried, packed)

    def _copy_sizes(self) -> tuple[int, ...]:
        """Compiled numbers of copies: few, and as many as a plan may have."""
        return _FIRST_COPIES, max(_FIRST_COPIES, 2 * self._sizes.num_state_slots)

    def _image_rows(self, plan: Plan, shape: StepShape) -> tuple[dict[str, int] | None, dict[str, Exception]]:
        """Where the images of a step are in the table, by digest; None for a step without. And what failed."""
        if not shape.has_images:
            return None, {}
        if self._images is None:
            raise AssertionError("images were taken in for a model without vision weights")
        return self._images.use(image for rank in plan.ranks for image in rank.images)

    def _table_of(self, shape: StepShape) -> jax.Array | None:
        return self._images.features if self._images is not None and shape.has_images else None

    def _contents(
        self, ranks: Sequence[RankPlan], shape: StepShape, image_rows: dict[str, int] | None = None
    ) -> list[Int32[np.ndarray, " L"]]:
        """The packed arrays of the ranks, on the host."""
        return [
            pack_step(
                plan,
                table,
                num_chunks=shape.num_chunks,
                num_tokens=shape.num_rows,
                num_pages=shape.num_pages,
                max_drafts=self._model.speculation.max_drafts,
                image_rows=image_rows,
            )
            for plan, table in zip(ranks, self._page_tables, strict=True)
        ]

    def _blank(self) -> Carried:
        speculation, runtime = self._model.speculation, self._model.runtime
        num_slots = self._sizes.num_state_slots * self._steps.num_ranks
        num_pages = self._sizes.scheduler.num_pages * self._steps.num_ranks

        def make() -> Carried:
            state = init_state(runtime, num_slots=num_slots, num_pages=num_pages, with_draft=speculation.max_drafts > 0)
            newest = blank_newest(speculation, num_slots=num_slots, vocab_size=runtime.model.vocab_size)
            return Carried(state=state, newest=newest)

        return self._steps.blank(make)


def num_compiled() -> int:
    """How many versions of the step functions this process has compiled so far."""
    return steps.num_compiled() + mesh_steps.num_compiled()


def _told_of(plan: Plan, shape: StepShape, image_errors: Mapping[str, Exception]) -> str:
    """A step in words, with what it shows, in which processes must agree."""
    digests = [image.digest for rank in plan.ranks for image in rank.images] if plan.has_images else []
    images = "".join(f", image {digest[:12]}{' (failed)' * (digest in image_errors)}" for digest in digests)
    return f"step {plan.step}, {shape.name}, {len(plan.chunks)} chunks{images}"


def _best_of(best: Any, row: int, count: int) -> tuple[tuple[float, int], ...]:
    """The alternatives that one request asked for, best first."""
    values, token_ids = best
    return tuple(zip(values[row, :count].tolist(), token_ids[row, :count].tolist(), strict=True))
