"""Everything that may not change a bit, as a table: what is done, and how to see that it really happened.

A new row is an entry of `PERTURBATIONS`. One that needs several devices says so, and is left out where they are not.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.engine.snapshot import load_snapshot, save_snapshot
from deepinfer_jax.testing.determinism import processes
from deepinfer_jax.testing.determinism.driving import Arrival, EngineSetup, Run
from deepinfer_jax.testing.determinism.session import FEW, MAIN, MAX_REQUESTS, BaseName, Session
from deepinfer_jax.testing.determinism.workload import JSON_ANSWER, Request, neighbours, with_pictures

CHUNK = 24  # rows of a chunk, and no multiple of a tile of keys or a page
BUDGET = 16  # rows of a step
GROWING = 40  # neighbours that come one by one
PAUSE = 3  # steps between arrivals
MESHES = ((2, 1), (8, 1), (1, 2), (1, 8), (2, 2), (4, 2), (2, 4))
BALANCED = {"EXPERT_REARRANGEMENT_STEP_INTERVAL": "8", "EXPERT_COUNT_WINDOW_SIZE": "4"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perturbation:
    """One row of the matrix. `run` gives the base set's results in other circumstances."""

    name: str
    axis: str  # what it varies
    run: Callable[[Session], Run]
    base: BaseName = "plain"  # whose results it must equal
    least: Mapping[str, int] = dataclasses.field(default_factory=dict)  # notes that show that it happened
    devices: int = 1
    needs_vision: bool = False
    drafts: int = 0  # that the model must be able to make
    is_quick: bool = True  # False: another mesh, or more than one further process
    is_apart: bool = False  # whether the second process of a quick matrix runs it: most of it is tracing steps

    def missing(self, notes: Mapping[str, int]) -> str:
        """What should have happened and did not, "" where all did."""
        counts = {name: notes.get(name, 0) for name in self.least}
        return "; ".join(
            f"{name} {counts[name]}, expected {least}" for name, least in self.least.items() if counts[name] < least
        )


def _among(number: int, **options: object) -> Callable[[Session], Run]:
    def run(session: Session) -> Run:
        return _beside(session, neighbours(session.texts, number, **options))

    return run


def _beside(session: Session, others: tuple[Request, ...]) -> Run:
    """The base set in the middle of others."""
    half = len(others) // 2
    first, last = ([Arrival(other, is_watched=False) for other in part] for part in (others[:half], others[half:]))
    return session.run([*first, *session.arrivals, *last])


def _growing(session: Session) -> Run:
    others = neighbours(session.texts, GROWING)
    return session.run(
        [*session.arrivals, *(Arrival(other, step=step, is_watched=False) for step, other in enumerate(others, 1))]
    )


def _late(session: Session) -> Run:
    reverse = enumerate(reversed(session.requests))
    return session.run([Arrival(request, step=PAUSE * place) for place, request in reverse])


def _rotated(session: Session) -> Run:
    half = len(session.requests) // 2
    others = [Arrival(other, is_watched=False) for other in neighbours(session.texts, 5)]
    return session.run([*others, *session.arrivals[half:], *session.arrivals[:half]])


def _in_chunks(session: Session) -> Run:
    def cut(request: Request) -> Request:
        return dataclasses.replace(request, cuts=tuple(range(CHUNK, len(request.prompt), CHUNK)))

    return session.run([Arrival(cut(request)) for request in session.requests])


def _elsewhere(*options: tuple[str, object], **variables: str) -> Callable[[Session], Run]:
    """The base set in an engine with these arguments and variables."""
    setup = EngineSetup(options=options, variables=tuple(variables.items()))
    return lambda session: session.run(session.arrivals, setup)


def _at_once(session: Session) -> Run:
    limit = ("max_num_batched_tokens", max(session.main.max_model_len, MAX_REQUESTS))
    return session.run(session.arrivals, EngineSetup(options=(*MAIN.options, ("chunked_prefill", False), limit)))


def _scarce(session: Session) -> Run:
    return session.run(session.arrivals, EngineSetup(options=(FEW, ("num_kv_tokens", session.scarce_tokens))))


def _known(session: Session) -> Run:
    session.run(session.arrivals)
    return session.run(session.arrivals, keeps_prefixes=True)


def _restored(session: Session) -> Run:
    def restore(engine: LLMEngine, request_id: str, new_id: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "request.safetensors"
            save_snapshot(engine.save_request(request_id), file)
            engine.abort_request(request_id)
            engine.restore_request(load_snapshot(file, engine.runtime), new_id)

    return session.run(session.arrivals, interrupt=restore)


def _forked(session: Session) -> Run:
    def fork(engine: LLMEngine, request_id: str, new_id: str) -> None:
        engine.fork_request(request_id, new_id)
        engine.abort_request(request_id)

    return session.run(session.arrivals, interrupt=fork)


def _with_images(session: Session) -> Run:
    return _beside(session, with_pictures(session.texts, neighbours(session.texts, 6)))


PERTURBATIONS: tuple[Perturbation, ...] = (
    Perturbation(name="alone", axis="batch composition", run=Session.each_alone),
    Perturbation(name="among 7", axis="batch composition", run=_among(7), least={"rows": 15}),
    Perturbation(name="among 40", axis="batch composition", run=_among(40), least={"rows": 48}),
    Perturbation(name="among 200", axis="batch composition", run=_among(200), least={"rows": 200}),
    Perturbation(name="neighbours one by one", axis="batch composition", run=_growing, least={"rows": 16}),
    Perturbation(name="beside grammars", axis="neighbours", run=_among(7, so_args=JSON_ANSWER), least={"rows": 12}),
    Perturbation(name="beside images", axis="neighbours", run=_with_images, least={"images": 6}, needs_vision=True),
    Perturbation(name="later and in reverse", axis="order of arrival", run=_late),
    Perturbation(name="other places", axis="position in the batch", run=_rotated),
    Perturbation(name=f"chunks of {CHUNK}", axis="chunk size", run=_in_chunks),
    Perturbation(name="prompts at once", axis="chunk size", run=_at_once),
    Perturbation(
        name=f"steps of {BUDGET} rows", axis="token budget", run=_elsewhere(FEW, ("max_num_batched_tokens", BUDGET))
    ),
    Perturbation(name="few pages", axis="preemption", run=_scarce, least={"preemptions": 1}, is_apart=True),
    Perturbation(name="known prompts", axis="prefix cache", run=_known, least={"prefix_hits": 1}),
    Perturbation(name="saved and restored", axis="snapshot", run=_restored, least={"restored": 1}),
    Perturbation(name="forked", axis="fork", run=_forked, least={"forks": 1}),
    Perturbation(
        name="synchronous steps",
        axis="asynchronous steps",
        run=_elsewhere(*MAIN.options, ZERO_OVERHEAD_SCHEDULING="0"),
    ),
    Perturbation(
        name="replay mask, alone",
        axis="bounded replay",
        run=lambda session: session.each_alone(session.replay("mask")),
        base="replay",
    ),
    Perturbation(
        name="replay compact",
        axis="bounded replay",
        run=lambda session: session.run(session.arrivals, session.replay("compact")),
        base="replay",
    ),
    *(
        Perturbation(
            name=f"{number} drafts",
            axis="speculation",
            run=_elsewhere(FEW, ("num_draft_tokens", number)),
            least={"accepted": 1},
            drafts=number,
            is_apart=True,
        )
        for number in (1, 3, 5)
    ),
    Perturbation(
        name="5 drafts by confidence",
        axis="varlen verification",
        run=_elsewhere(FEW, ("num_draft_tokens", 5), ("varlen_verification", True)),
        least={"accepted": 1},
        drafts=5,
        is_apart=True,
    ),
    *(
        Perturbation(
            name=f"{dp} x {cp} devices",
            axis="mesh",
            run=_elsewhere(FEW, ("mesh_shape", (dp, cp))),
            devices=dp * cp,
            is_quick=False,
        )
        for dp, cp in MESHES
    ),
    Perturbation(
        name="experts on the move",
        axis="expert balancing",
        run=_elsewhere(FEW, ("mesh_shape", (2, 2)), **BALANCED),
        least={"experts moved": 1},
        devices=4,
        is_quick=False,
    ),
    Perturbation(name="second process", axis="process, warm cache", run=processes.second),
    Perturbation(name="restarted process", axis="process", run=processes.restarted, is_quick=False),
    Perturbation(name="cold cache", axis="compilation cache", run=processes.with_cold_cache, is_quick=False),
)
