"""Engines on meshes of devices: every request gives what it gives on one device, wherever experts move meanwhile."""

from pathlib import Path

import jax
import numpy as np
import pytest

from deepinfer_jax.engine import mesh_steps
from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.parallel import exchange
from deepinfer_jax.scheduler import placement
from deepinfer_jax.scheduler.plan import RankPlan
from deepinfer_jax.testing import hlo, tiny
from tests.engine import driving
from tests.engine.driving import Facts, Recorder, add, params_of, prompt_of
from tests.engine.pictures import ask

DRAFTS = 3
EPLB = {
    "DEEPINFER_EXPERT_REARRANGEMENT_STEP_INTERVAL": "8",
    "DEEPINFER_EXPERT_COUNT_WINDOW_SIZE": "4",
    "DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS": "3",
}
COMPACT = {"DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE": "compact", "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "140"}
SCHEDULED = {"DEEPINFER_ENABLE_MTP_VARLEN": "1"}
ONE_PLACE = {"DEEPINFER_MULTI_MODAL_BUFFER_SIZE": "1"}
MESHES = [(2, 1), (8, 1), (1, 2), (1, 8), (2, 2), (4, 2), (2, 4)]


def engine_on(model: Path, mesh: tuple[int, int], environ: dict[str, str] | None = None, **options) -> LLMEngine:
    return tiny.tiny_engine(model, environ, **{"num_draft_tokens": DRAFTS, "mesh_shape": mesh, **options})


def fill(engine: LLMEngine) -> None:
    """Prefill chunks of several lengths, greedy and sampled decode rows, drafts, and rows that wait for masks."""
    driving.add_many(engine)
    digits = {"schema_type": "regex", "schema": "[0-9]{3,12}"}
    add(engine, "digits", prompt_of(20), params_of(7, 12, so_args=digits, ignore_eos=False))
    add(engine, "penalties", prompt_of(33), params_of(8, 14, frequency_penalty=0.7, presence_penalty=0.3))


def fill_with_pictures(engine: LLMEngine) -> None:
    """The same with pictures among it: first, within a prompt longer than a chunk, and one that comes twice."""
    ask(engine, "picture", ["A", *prompt_of(9)], params_of(3, 10))
    fill(engine)
    ask(engine, "pictures", [*prompt_of(40), "B", *prompt_of(50, seed=1), "D", 6], params_of(4, 12, temperature=0.7))
    ask(engine, "again", [0, 5, "A", "C", 7], params_of(5, 11, temperature=0.0))


def run(engine: LLMEngine) -> dict[str, Facts]:
    fill(engine)
    return driving.facts(driving.drain(engine))


def run_with_pictures(engine: LLMEngine) -> dict[str, Facts]:
    fill_with_pictures(engine)
    return driving.facts(driving.drain(engine))


@pytest.fixture(scope="module")
def wanted(agreeing_model: Path) -> dict[str, Facts]:
    engine = engine_on(agreeing_model, (1, 1))
    found = run_with_pictures(engine)
    assert 1 < engine.stats()["drafts"]["accepted_len_mean"] < 1 + DRAFTS
    return found


# Without drafts an engine has only one step to compile; with them the same is below.
def test_a_mesh_gives_what_one_device_gives_while_experts_move(agreeing_model):
    recorder = Recorder()
    engine = engine_on(agreeing_model, (2, 2), EPLB, hooks=recorder, num_draft_tokens=0)
    assert run(engine) == run(engine_on(agreeing_model, (1, 1), num_draft_tokens=0))
    assert all(any(plan.ranks[rank].chunks for plan in recorder.plans) for rank in range(2)), "both ranks had work"
    balancer = engine.pipeline.balancer
    assert balancer is not None and len(balancer.history) > 1
    assert all(one.num_moved > 0 for one in balancer.history)
    first = balancer.history[0]
    assert first.imbalance_after < first.imbalance_before
    check_weights(engine, engine_on(agreeing_model, (1, 1), num_draft_tokens=0))
    assert engine.stats()["recompilations"] == 0


@pytest.mark.slow
def test_pairs_that_travel_in_several_rounds_change_nothing(agreeing_model, monkeypatch):
    def room_of_one(num_items: int, peers: exchange.Peers, least: int = 1) -> int:
        return 1

    wanted = run(engine_on(agreeing_model, (1, 1), num_draft_tokens=0))
    monkeypatch.setattr(exchange, "room_for_each", room_of_one)
    engine = engine_on(agreeing_model, (4, 1), num_draft_tokens=0)  # a mesh that no other test compiles this step for
    assert run(engine) == wanted


def check_weights(engine: LLMEngine, still: LLMEngine) -> None:
    """Every place holds the expert that the table says, and every expert has one."""
    moe, balancer = engine.params.moe, engine.pipeline.balancer
    assert balancer is not None and moe.replicas is not None
    for layer, places in enumerate(balancer.places):
        table = placement.replica_table(places, moe.gate.shape[1], balancer.table_width)
        np.testing.assert_array_equal(moe.replicas[layer], table)
        held = np.flatnonzero(places >= 0)
        for moved, own in zip(jax.tree.leaves(moe.experts), jax.tree.leaves(still.params.moe.experts), strict=True):
            np.testing.assert_array_equal(np.asarray(moved[layer])[held], np.asarray(own[layer])[places[held]])


def test_no_device_holds_all_experts(agreeing_model):
    engine = engine_on(agreeing_model, (2, 2), {"DEEPINFER_ENFORCE_EAGER": "1"})
    for leaf in jax.tree.leaves((engine.params.moe.experts, engine.params.engram.embed)):
        largest = max(shard.data.nbytes for shard in leaf.addressable_shards)
        assert largest * 4 == leaf.nbytes
    for leaf in jax.tree.leaves((engine.pipeline.state.main_kv, engine.pipeline.state.window)):
        assert {shard.data.nbytes * 2 for shard in leaf.addressable_shards} == {leaf.nbytes}


# Those of docs/sharding.md: two exchanges for each Engram table, for the experts of a layer, and for those of a draft
# stage; with cp, the gathers of new window rows, of a source's rows (of ratio 2 also of the row before each block),
# of the wanted hidden rows, of draft experts' outputs, and of context rows. Bodies of loops count once.
@pytest.mark.parametrize(
    "mesh, wanted_kinds",
    [
        ((2, 1), {"all-reduce": 1, "all-to-all": 8}),
        ((2, 2), {"all-gather": 7, "all-reduce": 2, "all-to-all": 8}),  # four agree on the rounds of an exchange
    ],
)
@pytest.mark.slow
def test_a_step_has_the_collectives_that_are_documented(agreeing_model, mesh, wanted_kinds):
    engine = engine_on(agreeing_model, mesh, {"DEEPINFER_ENFORCE_EAGER": "1"})
    pipeline = engine.pipeline
    shape = next(iter(engine.sizes.buckets.all_shapes(is_compact=False)))
    packed = pipeline._steps.place(pipeline._contents([RankPlan()] * mesh[0], shape))
    lowered = mesh_steps._run_step.lower(
        engine.params, pipeline._carried, packed, None, mesh=pipeline._steps.mesh, shape=shape, **pipeline._static
    )
    text = lowered.compile().as_text()
    assert hlo.collectives(text) == wanted_kinds
    moved = {shape for one in hlo.instructions(text) if one.opcode in hlo.COLLECTIVES for _, shape in one.arrays}
    kept = jax.tree.leaves((engine.params.moe.experts, engine.params.engram.embed, pipeline.state))
    pieces = {shard.data.shape for leaf in kept for shard in leaf.addressable_shards}
    assert not moved & (pieces | {leaf.shape for leaf in kept}), "weights and caches stay where they are"


@pytest.mark.slow
@pytest.mark.compiles_much
@pytest.mark.parametrize("environ", [{}, EPLB, COMPACT, SCHEDULED], ids=["plain", "balanced", "compact", "scheduled"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_gives_what_one_device_gives(agreeing_model, wanted, mesh, environ):
    want = wanted
    if environ is COMPACT:
        want = run_with_pictures(engine_on(agreeing_model, (1, 1), COMPACT))
    engine = engine_on(agreeing_model, mesh, environ)
    assert run_with_pictures(engine) == want
    assert engine.stats()["images_encoded"] == 4
    if environ is EPLB:
        history = engine.pipeline.balancer.history  # type: ignore[union-attr]
        assert sum(one.num_moved for one in history) > 0
        print(mesh, [(one.num_moved, one.imbalance_before, one.imbalance_after) for one in history])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(8, 1), (2, 2)])
def test_copies_of_a_prompt_are_equal_on_every_rank(agreeing_model, mesh):
    engine = engine_on(agreeing_model, mesh, max_num_seqs=8)
    for index in range(16):
        ask(engine, str(index), [*prompt_of(50), "B", *prompt_of(6)], params_of(5, 20))
    found = driving.facts(driving.drain(engine))
    assert len(found) == 16 and all(one == found["0"] for one in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (2, 2)])
def test_images_on_a_mesh(tiny_model, mesh):
    parts = {"pair": [0, "A", 5, "B", *prompt_of(9)], "long": [*prompt_of(40), "A", *prompt_of(50, seed=1), "D", 6]}

    def answers(engine: LLMEngine) -> dict[str, Facts]:
        for name, own in parts.items():
            ask(engine, name, own, params_of(3, 10))
        add(engine, "text", prompt_of(30), params_of(3, 10))
        return driving.facts(driving.drain(engine))

    want = answers(tiny.tiny_engine(tiny_model))
    assert answers(tiny.tiny_engine(tiny_model, ONE_PLACE, mesh_shape=mesh)) == want


def test_ranks_that_share_a_small_table_of_images_have_a_place_each(tiny_model):
    engine = tiny.tiny_engine(tiny_model, ONE_PLACE | {"DEEPINFER_ENFORCE_EAGER": "1"}, mesh_shape=(2, 1))
    assert engine.sizes.num_image_places == 2 and engine.scheduler.config.max_images == 1


@pytest.mark.slow
def test_a_saved_request_goes_on_elsewhere(agreeing_model, wanted):
    one, many = engine_on(agreeing_model, (1, 1)), engine_on(agreeing_model, (2, 2), EPLB)
    for engine, other in ((one, many), (many, one)):
        fill_with_pictures(engine)
        found = driving.run_steps(engine, 9)
        name = next(name for name in ("0", "1", "2", "3") if engine.scheduler.get(name) is not None)
        saved = engine.save_request(name)
        assert saved.state is not None
        for name_of_all in list(wanted):
            engine.abort_request(name_of_all)
        driving.collect(found, engine.flush_inflight_reqs())
        other.restore_request(saved, "again")
        again = driving.facts(driving.drain(other))["again"]
        assert again == wanted[name][len(saved.output) :]
