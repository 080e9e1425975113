"""Measures images: one JSON line for each scenario.

decode: time and memory of preprocessing one JPEG in the released shape (decode, resize, cut into patches). read: images
per second of an engine's reader, which decodes on several threads. engine: images per second of whole requests, each
with a picture of its own and one token of answer, and with one picture for all.
"""

import argparse
import io
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.config.model import VisionConfig
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.engine.images import ImageReader
from deepinfer_jax.testing.facts import commit_of_checkout
from deepinfer_jax.text.images import prepare_image

FLASH = "model/deepseek-v4.1-flash.json"
SIDES = {"12 megapixels": (4000, 3000), "1 megapixel": (1152, 864)}  # pixels


def main() -> None:
    """Runs the chosen scenarios."""
    scenarios: dict[str, Callable[[int], list[dict[str, Any]]]] = {"decode": decode, "read": read, "engine": engine}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", help=f"of {', '.join(scenarios)}; all without one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default=commit_of_checkout(), help="recorded with the results")
    args = parser.parse_args()
    for name in args.scenarios or scenarios:
        for figures in scenarios[name](args.repeats):
            cores, load = len(os.sched_getaffinity(0)), round(os.getloadavg()[0], 1)
            facts = {"cores": cores, "load": load, "jax": jax.__version__, "commit": args.commit}
            print(json.dumps({"script": "bench_images", "scenario": name, **figures, **facts}))


def decode(repeats: int) -> list[dict[str, Any]]:
    """One image, one thread."""
    vision, found = load_config(shipped_config(FLASH)).vision, []
    for name, (width, height) in SIDES.items():
        [data] = jpegs(width, height, 1)
        image = prepare_image(data, vision, prompt=0)
        with multiprocessing.get_context("spawn").Pool(1) as fresh:  # memory that was freed before would hide the peak
            peak = fresh.apply(peak_bytes, (data, vision))
        cpu = time.process_time()
        seconds = [timed(lambda data=data: prepare_image(data, vision, prompt=0)) for _ in range(repeats)]
        cpu_s = (time.process_time() - cpu) / repeats
        found.append(
            {
                "image": name,
                "jpeg_bytes": len(data),
                "tokens": image.plan.num_tokens,
                "patch_bytes": image.patches.nbytes,
                "median_s": round(statistics.median(seconds), 4),
                "cpu_s": round(cpu_s, 4),
                "peak_bytes": peak,
            }
        )
    return found


def read(repeats: int) -> list[dict[str, Any]]:
    """Sixteen images at once."""
    vision, found = load_config(shipped_config(FLASH)).vision, []
    for name, (width, height) in SIDES.items():
        entries = [{"images": [data]} for data in jpegs(width, height, 16)]
        reader = ImageReader(vision, timeout_s=600.0)
        cpu = time.process_time()
        seconds = [timed(lambda reader=reader, entries=entries: reader.read(entries)) for _ in range(repeats)]
        busy = (time.process_time() - cpu) / sum(seconds)
        reader.close()
        rate = len(entries) / statistics.median(seconds)
        found.append({"image": name, "images_per_s": round(rate, 2), "busy_cores": round(busy, 2)})
    return found


def engine(repeats: int) -> list[dict[str, Any]]:
    """Requests to the embedded model; known prefixes are forgotten before each run."""
    llm = LLM(max_num_seqs=16, max_model_len=1024, decode_sequence=False)
    image_id, vision = llm.engine.model.image_token_id, llm.engine.model.vision
    ids, params = [[0, 5, image_id, 6]] * 64, SamplingParams(max_tokens=1, ignore_eos=True)
    found = []
    for name, num_different in (("each its own", len(ids)), ("one for all", 1)):
        seconds = []
        for repeat in range(repeats + 1):  # the first one compiles
            pictures = noise(840, 630, num_different, seed=repeat)
            data = [{"images": [pictures[i % num_different]]} for i in range(len(ids))]
            llm.engine.scheduler.clear_prefix_cache()
            seconds.append(timed(lambda data=data: llm.generate(None, params, ids, False, data)))
        image = prepare_image(noise(840, 630, 1, seed=0)[0], vision, prompt=0)
        rate = len(ids) / statistics.median(seconds[1:])
        found.append({"image": name, "tokens": image.plan.num_tokens, "images_per_s": round(rate, 2)})
    return found


def noise(width: int, height: int, count: int, *, seed: int) -> list[np.ndarray]:
    """Pictures of coarse noise, which compresses as photographs do."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (count, height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return [np.asarray(Image.fromarray(one).resize((width, height), Image.Resampling.BICUBIC)) for one in small]


def jpegs(width: int, height: int, count: int) -> Sequence[bytes]:
    """JPEG files of such pictures."""
    files = []
    for picture in noise(width, height, count, seed=0):
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def timed(function: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def peak_bytes(data: bytes, vision: VisionConfig) -> int:
    """How far the memory of this process grows for one image, what comes out included (Linux)."""
    prepare_image(Image.new("RGB", (90, 90)), vision, prompt=0)  # loads what every image needs
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = status_bytes("VmRSS")
    prepare_image(data, vision, prompt=0)
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    """A figure of this process's memory, as the kernel has it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
