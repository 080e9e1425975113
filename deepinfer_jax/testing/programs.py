"""The compiled programs of a process that runs many of them."""

import gc
from pathlib import Path

import jax

MAX_MAPS = 20_000
_MAPS = Path("/proc/self/maps")


def forget_programs(max_maps: int = MAX_MAPS) -> bool:
    """Forgets all compiled programs if the process has more memory maps than `max_maps`; whether it did.

    A compiled step of a CPU takes some hundred maps, of which Linux gives a process 65,530; without more its compiler
    fails. Programs that are needed again are read from the cache on disk. Elsewhere than on Linux nothing is forgotten.
    """
    if not _MAPS.exists() or len(_MAPS.read_bytes().splitlines()) <= max_maps:
        return False
    jax.clear_caches()
    gc.collect()
    return True
