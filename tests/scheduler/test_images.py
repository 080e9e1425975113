"""No chunk splits an image, whatever asks for cuts; and what an image shows tells one prefix from another."""

import random

import pytest

from deepinfer_jax.scheduler.images import ImageSpan
from deepinfer_jax.scheduler.policy import SchedulerConfig
from deepinfer_jax.scheduler.scheduler import Scheduler
from deepinfer_jax.scheduler.sequence import Limits, Sequence

IMAGE_ID, ROWS = 9, 32
LIMITS = Limits(max_tokens=2, eos_id=1, ignore_eos=True)
NUM_CASES = 200


def span(start: int, length: int, digest: str = "ab") -> ImageSpan:
    return ImageSpan(start=start, length=length, digest=digest)


def config_of(**options) -> SchedulerConfig:
    sizes = {"num_kv_tokens": 4096, "page_tokens": 8, "max_num_seqs": 4, "max_model_len": 1024}
    cache = {"prefix_mode": "exact", "num_snapshots": 16, "snapshot_interval": 16}
    return SchedulerConfig(**(sizes | cache | {"max_num_batched_tokens": ROWS} | options))


def sequence_of(name: str, parts: list, **options) -> Sequence:
    """parts: token ids, and (length, digest) of images."""
    prompt: list[int] = []
    images: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, tuple):
            images.append(span(len(prompt), *part))
            prompt += [IMAGE_ID] * part[0]
        else:
            prompt.append(part)
    return Sequence(request_id=name, prompt=prompt, limits=LIMITS, images=tuple(images), **options)


def chunks_of(scheduler: Scheduler, *sequences: Sequence) -> list:
    """The prefill chunks of requests that run together."""
    for sequence in sequences:
        scheduler.add(sequence)
    chunks = []
    while plan := scheduler.schedule():
        chunks += plan.chunks if plan.is_prefill else ()
        scheduler.commit(plan, {chunk.sequence.request_id: [5] for chunk in plan.chunks if chunk.draws})
    assert {one.finish_reason for one in scheduler.take_ended()} == {"length"}
    return chunks


def bounds(chunks: list, name: str = "a") -> list[int]:
    return [chunk.end for chunk in chunks if chunk.sequence.request_id == name]


def random_parts(rng: random.Random) -> list:
    parts: list = []
    for _ in range(rng.randint(1, 6)):
        parts += [rng.randint(2, 8) for _ in range(rng.choice([0, 1, 5, 30]))]
        parts += [(rng.randint(4, ROWS), f"{rng.randint(0, 3):x}")] * rng.choice([0, 1, 1, 2])
    return parts or [2]


@pytest.mark.parametrize("seed", range(4))
def test_no_chunk_splits_an_image(seed):
    for case in range(NUM_CASES // 4):
        rng = random.Random(1000 * seed + case)
        options = {
            "max_images": rng.choice([1, 2, 100]),
            "prefix_mode": rng.choice(["off", "exact", "replay"]),
            "chunk_multiple": rng.choice([1, 1, 4]),
            "replay_rows": 8,
            "has_tails": rng.random() < 0.3,
        }
        scheduler = Scheduler(config_of(**options))
        all_parts = [random_parts(rng) for _ in range(3)]
        for index, parts in enumerate([*all_parts, all_parts[0] + [3, (5, "f")]]):
            name = str(index)
            length = len(sequence_of(name, parts).prompt)
            checkpoints = frozenset(rng.sample(range(1, length + 1), min(3, length)))
            tail = rng.randint(0, length) if options["has_tails"] else 0
            sequence = sequence_of(name, parts, checkpoints=checkpoints, tail_start=tail)
            chunks = chunks_of(scheduler, sequence)
            for chunk in chunks:
                for image in sequence.images:
                    assert not image.start < chunk.start < image.end, (case, options)
                    assert not image.start < chunk.end < image.end, (case, options)
                assert len(chunk.images) <= options["max_images"]
                assert chunk.length <= ROWS
            assert chunks[-1].end == length
            assert [one.start for one in chunks[1:]] == [one.end for one in chunks[:-1]]


def test_chunks_are_cut_in_front_of_an_image_that_has_no_room():
    scheduler = Scheduler(config_of(prefix_mode="off"))
    chunks = chunks_of(scheduler, sequence_of("a", [2] * 20 + [(20, "a"), (12, "b")] + [3] * 5))
    assert bounds(chunks) == [20, 52, 57]
    assert [[image.digest for image in chunk.images] for chunk in chunks] == [[], ["a", "b"], []]


def test_a_step_has_no_more_images_than_the_table_has_places():
    scheduler = Scheduler(config_of(prefix_mode="off", max_images=1))
    first, second = sequence_of("a", [(5, "a"), (5, "b"), 3]), sequence_of("b", [(6, "a")])
    chunks = chunks_of(scheduler, first, second)
    assert (bounds(chunks, "a"), bounds(chunks, "b")) == ([5, 11], [6])


def test_checkpoints_inside_an_image_move_to_its_beginning():
    scheduler = Scheduler(config_of(snapshot_interval=16))
    sequence = sequence_of("a", [2] * 3 + [(10, "a")] + [3] + [(20, "b")] + [4] * 5, checkpoints=frozenset({8, 14}))
    assert sequence.checkpoints == {3, 14}
    assert bounds(chunks_of(scheduler, sequence)) == [3, 14, 39]
    assert [sequence.is_checkpoint(p, interval=16) for p in (3, 13, 14, 34, 39)] == [True, False, True, False, False]


def test_a_multiple_gives_way_to_images():
    scheduler = Scheduler(config_of(prefix_mode="off", chunk_multiple=4))
    chunks = chunks_of(scheduler, sequence_of("a", [2] * 5 + [(30, "a"), (30, "b")] + [3] * 40))
    assert bounds(chunks) == [5, 35, 65, 96, 105]


@pytest.mark.parametrize("mode", ["exact", "replay"])
@pytest.mark.parametrize("digest, num_known", [("ab", 21), ("ac", 8)])
def test_prefixes_are_the_same_up_to_an_image_that_shows_something_else(mode, digest, num_known):
    scheduler = Scheduler(config_of(prefix_mode=mode, snapshot_interval=8))
    parts = [2] * 8 + [(12, "ab")]
    chunks_of(scheduler, sequence_of("a", [*parts, 3, 4]))
    chunks = chunks_of(scheduler, sequence_of("b", [*parts[:-1], (12, digest), 3, 5]))
    known = {"exact": num_known, "replay": 8}[mode]
    assert scheduler.counters.prefix_hit_tokens == chunks[0].start == known


def test_a_hit_does_not_end_inside_an_image():
    scheduler = Scheduler(config_of(snapshot_interval=16))
    parts = [2] * 16 + [(12, "ab")]
    chunks_of(scheduler, sequence_of("a", parts))
    assert bounds(chunks_of(scheduler, sequence_of("b", parts)), "b") == [28]
    assert scheduler.counters.prefix_hit_tokens == 16


def test_tokens_of_images_are_no_token_ids():
    sequence = sequence_of("a", [5, (2, "00"), (2, "ff"), 6])
    sequence.output += [7, IMAGE_ID]
    assert list(sequence.cache_tokens(7)) == [5, -1, -1, -256, -256, 6, 7]
    assert list(sequence.cache_tokens(2)) == [5, -1]
    assert list(sequence.tokens_from(0, 4)) == [5, IMAGE_ID, IMAGE_ID, IMAGE_ID]
    assert list(sequence.branch("b", 7, limits=None, options=None).cache_tokens(7))[-2:] == [6, 7]


def test_the_next_image_is_that_of_a_begun_prompt_then_of_the_first_that_waits():
    scheduler = Scheduler(config_of(max_num_seqs=2, state_slots_ratio=1.0))
    scheduler.add(sequence_of("a", [2] * 30 + [(20, "a"), (20, "b")]))
    scheduler.add(sequence_of("b", [(8, "c"), 3]))
    scheduler.add(sequence_of("c", [(8, "d"), 3]))
    scheduler.add(sequence_of("d", [(8, "e"), 3]))
    assert next_digest(scheduler) == "a"  # none was begun: the first that waits
    scheduler.schedule()
    assert next_digest(scheduler) == "a"
    assert next_digest(scheduler, "a") == "b"
    assert next_digest(scheduler, "a", "b") == "d"
    assert next_digest(scheduler, "a", "b", "d") is None  # only the first that waits is looked at


def test_an_image_that_a_hit_covers_is_not_next():
    scheduler = Scheduler(config_of(snapshot_interval=8))
    parts = [2] * 4 + [(4, "a"), 3, (6, "b"), 4]
    chunks_of(scheduler, sequence_of("a", parts))
    scheduler.add(sequence_of("b", [*parts[:-1], 5]))
    assert next_digest(scheduler) is None
    scheduler.abort("b")
    scheduler.add(sequence_of("c", [*parts[:-2], (7, "c")]))
    assert next_digest(scheduler) == "c"


def next_digest(scheduler: Scheduler, *known: str) -> str | None:
    image = scheduler.next_image(lambda image: image.digest in known)
    return None if image is None else image.digest
