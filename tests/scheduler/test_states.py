"""State slots: in quarantine while a step that used them is unread."""

import pytest

from deepinfer_jax.scheduler.states import StateSlots


def test_slot_waits_until_its_step_has_been_read():
    slots = StateSlots(2)
    first, second = slots.allocate(), slots.allocate()
    assert (first, second) == (0, 1)
    slots.release(first, last_step=4)
    assert (slots.num_free, slots.num_used, slots.quarantined) == (0, 1, {0})
    slots.mark_read(3)
    assert slots.num_free == 0
    slots.mark_read(4)
    assert (slots.num_free, slots.quarantined) == (1, frozenset())
    assert slots.allocate() == 0


def test_slot_that_no_unread_step_used_is_free_at_once():
    slots = StateSlots(2)
    slots.release(slots.allocate(), last_step=-1)  # never used
    assert slots.num_free == 2
    slots.mark_read(7)
    slot = slots.allocate()
    slots.release(slot, last_step=7)
    assert slots.num_free == 2
    assert slots.allocate() == 0  # slot 1 went to the end of the line


def test_slots_leave_quarantine_in_the_order_of_their_release():
    slots = StateSlots(3)
    for _ in range(3):
        slots.allocate()
    for slot, last_step in ((2, 5), (0, 6), (1, 5)):
        slots.release(slot, last_step=last_step)
    slots.mark_read(5)
    slots.mark_read(6)
    assert [slots.allocate() for _ in range(3)] == [2, 1, 0]


def test_misuse_is_refused():
    slots = StateSlots(1)
    with pytest.raises(ValueError, match="slot 0 is not in use"):
        slots.release(0, last_step=0)
    slot = slots.allocate()
    with pytest.raises(ValueError, match="no state slot is free: 1 of 1 are in use and 0 wait"):
        slots.allocate()
    slots.release(slot, last_step=2)
    with pytest.raises(ValueError, match="0 of 1 are in use and 1 wait for a step to be read"):
        slots.allocate()
    with pytest.raises(ValueError, match="slot 0 is not in use"):
        slots.release(slot, last_step=2)
    slots.mark_read(2)
    with pytest.raises(ValueError, match="step 2 was read after step 2; steps are read in order"):
        slots.mark_read(2)
    with pytest.raises(ValueError, match="num_slots=0 must be at least 1"):
        StateSlots(0)


def test_slots_to_avoid_stay_where_they_are():
    slots = StateSlots(3)
    assert slots.allocate(avoid={0}) == 1
    assert slots.has_free(avoid={0}) and not slots.has_free(avoid={0, 2})
    assert slots.allocate() == 0
