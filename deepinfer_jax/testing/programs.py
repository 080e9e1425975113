"""The compiled programs of a process that runs many of them."""

import gc
import resource
from pathlib import Path

import jax

MAX_MAPS = 20_000
MAX_BYTES = 4 << 30
_MAPS, _STATUS = Path("/proc/self/maps"), Path("/proc/self/statm")


def forget_programs(max_maps: int = MAX_MAPS, max_bytes: int = MAX_BYTES) -> bool:
    """Forgets all compiled programs if the process has more memory maps, or more memory; whether it did.

    A compiled step of a CPU takes some hundred maps, of which Linux gives a process 65,530; without more its compiler
    fails. Programs that are needed again are read from the cache on disk. Elsewhere than on Linux nothing is forgotten.
    """
    if not _MAPS.exists():
        return False
    held = int(_STATUS.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    if len(_MAPS.read_bytes().splitlines()) <= max_maps and held <= max_bytes:
        return False
    jax.clear_caches()
    gc.collect()
    return True
