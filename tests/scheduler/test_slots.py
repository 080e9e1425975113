"""Fixed slots, first in first out."""

import numpy as np
import pytest

from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.scheduler.batching import LOGIT_FIELDS, ROW_FIELDS, fields_of, pack_step, packed_len
from deepinfer_jax.scheduler.request import Request
from deepinfer_jax.scheduler.slots import Chunk, Plan, SlotScheduler

EOS = 1


def request_of(index: int, prompt_len: int, *, max_tokens: int = 3, **options) -> Request:
    params = SamplingParams(max_tokens=max_tokens, eos_id=EOS, **options)
    prompt = list(range(100, 100 + prompt_len))
    return Request(index=index, prompt=prompt, params=params, seed=index, max_model_len=1000)


def scheduler_of(requests, *, num_slots=2, max_rows=8, max_emitting=8, is_chunked=True) -> SlotScheduler:
    scheduler = SlotScheduler(num_slots, max_rows=max_rows, max_emitting=max_emitting, is_chunked=is_chunked)
    for request in requests:
        scheduler.add(request)
    return scheduler


def run_all(scheduler: SlotScheduler) -> list[tuple[bool, list[tuple[int, int, int]]]]:
    """Every step as (is_prefill, [(request index, start, length)]); token 50 is drawn each time."""
    steps = []
    while plan := scheduler.schedule():
        steps.append((plan.is_prefill, [(c.request.index, c.start, c.length) for c in plan.chunks]))
        scheduler.commit(plan, [50] * len(plan.emitting))
    return steps


def test_prompts_first_in_order_then_all_decode_together():
    scheduler = scheduler_of([request_of(0, 5, max_tokens=2), request_of(1, 10), request_of(2, 1)])
    assert run_all(scheduler) == [
        (True, [(0, 0, 5), (1, 0, 3)]),
        (True, [(1, 3, 7)]),
        (False, [(0, 5, 1), (1, 10, 1)]),  # request 0 ends, its slot goes to request 2
        (True, [(2, 0, 1)]),
        (False, [(1, 11, 1), (2, 1, 1)]),
        (False, [(2, 2, 1)]),
    ]
    assert scheduler.num_unfinished == 0


def test_whole_prompts_only_without_chunking():
    scheduler = scheduler_of([request_of(0, 5, max_tokens=1), request_of(1, 6, max_tokens=1)], is_chunked=False)
    assert run_all(scheduler) == [(True, [(0, 0, 5)]), (True, [(1, 0, 6)])]


def test_a_step_ends_no_more_prompts_than_it_has_logit_rows():
    requests = [request_of(i, 1, max_tokens=1) for i in range(5)]
    steps = run_all(scheduler_of(requests, num_slots=5, max_emitting=2))
    assert [len(chunks) for _, chunks in steps] == [2, 2, 1]


def test_no_two_running_requests_share_a_slot():
    rng = np.random.default_rng(0)
    requests = [request_of(i, int(rng.integers(1, 20)), max_tokens=int(rng.integers(1, 6))) for i in range(40)]
    scheduler = scheduler_of(requests, num_slots=3)
    while plan := scheduler.schedule():
        slots = [chunk.request.slot for chunk in plan.chunks]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= {0, 1, 2}
        assert plan.num_rows <= 8
        scheduler.commit(plan, [50] * len(plan.emitting))
    assert [len(r.output) for r in requests] == [r.params.max_tokens for r in requests]


def test_clear_forgets_everything():
    scheduler = scheduler_of([request_of(i, 3) for i in range(5)])
    scheduler.schedule()
    scheduler.clear()
    assert scheduler.num_unfinished == 0
    assert scheduler.schedule() is None
    scheduler.add(request_of(9, 2, max_tokens=1))
    assert run_all(scheduler) == [(True, [(9, 0, 2)])]


@pytest.mark.parametrize(
    "output, options, max_model_len, reason",
    [
        ([], {}, 1000, ""),
        ([50], {}, 1000, ""),
        ([50, EOS], {}, 1000, "stop"),
        ([50, EOS], {"ignore_eos": True}, 1000, ""),
        ([50, 51, EOS], {}, 1000, "stop"),  # the end token wins over the length
        ([50, 51, 52], {}, 1000, "length"),
        ([50], {}, 5, ""),
        ([50, 51], {}, 5, "length"),
    ],
)
def test_finish_reason(output, options, max_model_len, reason):
    request = request_of(0, 4, **options)
    request.max_model_len = max_model_len
    request.output.extend(output)
    assert request.finish_reason == reason


def test_packed_array_holds_every_field():
    sampled = request_of(0, 3, temperature=0.5, top_p=0.75, top_k=9, first_n_token_no_eos=1, golden_token_ids=[-1, 77])
    sampled.seed, sampled.slot = 2**63 + 2**31 + 1, 1
    decoding = request_of(1, 2, golden_token_ids=[5, 77], temperature=0.0)
    decoding.output, decoding.num_written, decoding.slot = [60], 2, 0
    unfinished = request_of(2, 30)
    unfinished.slot = 2
    plan = Plan((Chunk(sampled, 0, 3), Chunk(decoding, 2, 1), Chunk(unfinished, 0, 2)), is_prefill=True)
    packed = pack_step(plan, num_rows=8, num_logits=4)
    assert packed.dtype == np.int32
    assert packed.size == packed_len(8, 4) == len(ROW_FIELDS) * 8 + len(LOGIT_FIELDS) * 4
    fields = fields_of(packed, num_rows=8, num_logits=4)
    want = {
        "tokens": [100, 101, 102, 60, 100, 101, 0, 0],
        "positions": [0, 1, 2, 2, 0, 1, 0, 0],
        "slots": [1, 1, 1, 0, 2, 2, -1, -1],
        "logit_rows": [2, 3, -1, -1],
        "seed_lo": [-(2**31) + 1, 1, 0, 0],
        "seed_hi": [-(2**31), 0, 0, 0],
        "draw_positions": [3, 3, 0, 0],
        "top_k": [9, -1, -1, -1],
        "is_greedy": [0, 1, 1, 1],
        "suppressed_ids": [EOS, -1, -1, -1],
        "forced_ids": [-1, 77, -1, -1],
    }
    for name, values in want.items():
        np.testing.assert_array_equal(fields[name], values, err_msg=name)
    floats = {name: fields[name].view(np.float32) for name in ("inverse_temperature", "top_p")}
    np.testing.assert_array_equal(floats["inverse_temperature"], np.asarray([2, 1e5, 1, 1], np.float32))
    np.testing.assert_array_equal(floats["top_p"], np.asarray([0.75, 1, 1, 1], np.float32))


def test_a_step_without_a_plan_is_padding():
    fields = fields_of(pack_step(None, num_rows=8, num_logits=8), num_rows=8, num_logits=8)
    assert set(fields["slots"]) == set(fields["logit_rows"]) == {-1}
