"""Which state slots (rings, compressor tails, history) are free."""

from collections import deque
from collections.abc import Set


class StateSlots:
    """Slots 0 to num_slots - 1, handed out in the order in which they became free.

    A slot that is released while a launched step that used it is unread is in quarantine until that step has been
    read. Steps are numbered by the caller, rising, and read in that order.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots} must be at least 1")
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._quarantine: list[tuple[int, int]] = []  # (step that must be read first, slot), in order of release
        self._used: set[int] = set()
        self._last_read = -1

    @property
    def num_free(self) -> int:
        """Slots that can be handed out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that a request holds."""
        return len(self._used)

    @property
    def quarantined(self) -> frozenset[int]:
        """Slots that wait for a step to be read."""
        return frozenset(slot for _, slot in self._quarantine)

    @property
    def last_read(self) -> int:
        """The last step that was read, -1 if none was."""
        return self._last_read

    def has_free(self, *, avoid: Set[int] = frozenset()) -> bool:
        """Whether a slot outside `avoid` can be handed out now."""
        return any(slot not in avoid for slot in self._free)

    def allocate(self, *, avoid: Set[int] = frozenset()) -> int:
        """A free slot outside `avoid`. Raises ValueError if there is none."""
        slot = next((slot for slot in self._free if slot not in avoid), -1)
        if slot < 0:
            raise ValueError(
                f"no state slot is free: {len(self._used)} of {self.num_slots} are in use and "
                f"{len(self._quarantine)} wait for a step to be read"
            )
        self._free.remove(slot)
        self._used.add(slot)
        return slot

    def release(self, slot: int, *, last_step: int) -> None:
        """Gives a slot back that no step after `last_step` uses; -1 if no step used it."""
        if slot not in self._used:
            raise ValueError(f"slot {slot} is not in use; it cannot be released")
        self._used.remove(slot)
        if last_step <= self._last_read:
            self._free.append(slot)
        else:
            self._quarantine.append((last_step, slot))

    def mark_read(self, step: int) -> None:
        """Notes that this step, and every one before it, has been read: what they used can be handed out."""
        if step <= self._last_read:
            raise ValueError(f"step {step} was read after step {self._last_read}; steps are read in order")
        self._last_read = step
        self._free.extend(slot for last_step, slot in self._quarantine if last_step <= step)
        self._quarantine = [(last_step, slot) for last_step, slot in self._quarantine if last_step > step]
