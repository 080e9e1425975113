"""Near duplicates among texts: minimum hashes of word shingles."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from jaxtyping import UInt64

SHINGLE_WORDS = 8
NUM_HASHES = 64  # kept smallest hashes of a text: an estimate of a share is off by 0.06 (standard deviation)
SAME_SHARE = 0.5  # texts that share more of their shingles count as near duplicates

_WORD = re.compile(r"\w+|[^\w\s]")


def shingle_hashes(text: str) -> UInt64[np.ndarray, " N"]:
    """The sorted distinct hashes of all runs of 8 words or signs; white space does not count."""
    words = _WORD.findall(text)
    runs = {" ".join(words[i : i + SHINGLE_WORDS]) for i in range(max(1, len(words) - SHINGLE_WORDS + 1))}
    digests = b"".join(hashlib.blake2b(run.encode(), digest_size=8).digest() for run in runs)
    return np.unique(np.frombuffer(digests, np.uint64))


def shared_share(first: UInt64[np.ndarray, " N"], second: UInt64[np.ndarray, " M"]) -> float:
    """Estimate of how much of the smaller text's shingles the larger one holds too.

    The smallest hashes of the union are a random sample of it; containment follows from their overlap and the sizes.
    """
    sample = np.union1d(first[:NUM_HASHES], second[:NUM_HASHES])[:NUM_HASHES]
    overlap = np.intersect1d(first[:NUM_HASHES], second[:NUM_HASHES])
    resemblance = np.isin(sample, overlap).sum() / len(sample)
    common = resemblance / (1 + resemblance) * (len(first) + len(second))
    return float(common / min(len(first), len(second)))


def near_duplicates(texts: Mapping[str, str]) -> dict[str, str]:
    """Name of a text -> name of an earlier, kept text that it nearly repeats, in the order of the mapping."""
    hashes = {name: shingle_hashes(text) for name, text in texts.items()}
    holders: dict[int, list[str]] = defaultdict(list)
    found: dict[str, str] = {}
    for name, own in hashes.items():
        smallest = [int(h) for h in own[:NUM_HASHES]]
        others = dict.fromkeys(other for h in smallest for other in holders[h])
        same = (other for other in others if shared_share(own, hashes[other]) > SAME_SHARE)
        if (original := next(same, None)) is not None:
            found[name] = original
            continue
        for h in smallest:
            holders[h].append(name)
    return found
