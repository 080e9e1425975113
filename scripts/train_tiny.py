#!/usr/bin/env python3
"""Trains the small code model: `--stage data`, then `backbone`, then `draft`; each ends in time and can be continued.

One JSON line for each report, on standard output and in OUT/log.jsonl; `--plot` draws the losses from that file.
OUT/model is the exported model, in the released format.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.load import load_params
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.text.engram_vocab import token_map
from deepinfer_jax.training import acceptance, corpus, data, export, loop, runs
from deepinfer_jax.training.numerics import training_config
from deepinfer_jax.training.optimise import Schedule
from deepinfer_jax.training.own_texts import is_own_step, own_batch_of_step, write_own_texts
from deepinfer_jax.training.tokenizer import check_special_tokens
from deepinfer_jax.training.weights import plain_params, training_params

MANIFEST = Path(__file__).with_name("train_tiny_files.json")
CONFIG_NAME = "model/tiny-code.json"
# What `--plot` draws: unit of a panel -> fields of the log.
PANELS = {
    "nats per token (training)": ("nats_per_token", "cross_entropy", "confidence"),
    "total variation (training)": ("total_variation",),
    "bits per byte (held out)": ("bits_per_byte", "bits_per_byte_quantised"),
    "tokens a round (held out)": ("accepted_length",),
}


def main() -> None:
    """Runs the stage that the command line names."""
    started = time.monotonic()
    args = _parser().parse_args()
    if args.plot is not None:
        _plot(args.out / "log.jsonl", args.plot)
        return
    stages = {"pin": _pin, "data": _data, "backbone": _backbone, "draft": _draft}
    args.out.mkdir(parents=True, exist_ok=True)
    stages[args.stage](args, loop.Pace(started=started, limit_s=60 * args.minutes, **_report_options(args)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stage", choices=("pin", "data", "backbone", "draft"), default="backbone")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run: log, checkpoint, exported model")
    parser.add_argument("--data", type=Path, help="data file that the stage `data` writes and the others read")
    parser.add_argument("--sources", type=Path, help="folder or tar of the standard library; default: this Python's")
    parser.add_argument("--model", type=Path, help="exported backbone that the stage `draft` starts from")
    parser.add_argument("--config", type=Path, default=shipped_config(CONFIG_NAME), help="shape of the model")
    parser.add_argument("--minutes", type=float, default=8.0, help="the run saves and ends after so many")
    parser.add_argument("--steps", type=int, default=4000, help="length of the schedule")
    parser.add_argument("--rows", type=int, default=64, help="sequences of one batch")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of one sequence")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--own-texts", type=int, default=24_576, help="that the network writes for the stage `draft`")
    parser.add_argument(
        "--own-share", type=float, default=0.5, help="of the steps of that stage, which learn from them"
    )
    parser.add_argument("--float32", action="store_true", help="float32 products instead of bfloat16, as on a CPU")
    parser.add_argument("--report-every", type=int, default=50, help="steps")
    parser.add_argument("--evaluate-every", type=int, default=500, help="steps")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="only draw the losses of OUT/log.jsonl")
    return parser


def _report_options(args: argparse.Namespace) -> dict[str, int]:
    return {"report_every": args.report_every, "evaluate_every": args.evaluate_every}


def _pin(args: argparse.Namespace, pace: loop.Pace) -> None:
    texts = corpus.read_sources(args.sources or sysconfig.get_path("stdlib"))
    manifest = corpus.make_manifest(texts, version=sys.version.split()[0])
    MANIFEST.write_text(json.dumps(manifest, indent=0) + "\n", encoding="utf-8")
    _print({"kind": "pin", "train_files": len(manifest["train"]), "held_out_files": len(manifest["held_out"])})


def _data(args: argparse.Namespace, pace: loop.Pace) -> None:
    config = load_config(args.config)
    check_special_tokens(config)
    texts = corpus.read_sources(args.sources or sysconfig.get_path("stdlib"))
    train, held_out = corpus.pinned_texts(corpus.read_manifest(MANIFEST), texts)
    made = data.encode_corpus(train, held_out, args.out, vocab_size=config.vocab_size, eos_id=config.eos_token_id)
    token_map(args.out, compressed_vocab_size=config.engram_compressed_vocab_size, vocab_size=config.vocab_size)
    data.save_data(made, _given(args.data, "--data"))
    _print(
        {
            "kind": "data",
            "train_tokens": len(made.train),
            "held_out_tokens": len(made.held_out),
            "held_out_bytes": made.held_out_bytes,
            "held_out_xz_bits_per_byte": data.xz_bits_per_byte(held_out),
        }
    )


def _backbone(args: argparse.Namespace, pace: loop.Pace) -> None:
    plan, source = _plan(args), data.load_data(_given(args.data, "--data"))
    model = plan.config.model
    state = runs.first_state(plan, _token_map(source, args.out, model))
    step = jax.jit(functools.partial(runs.backbone_step, plan=plan), donate_argnums=0)
    losses = jax.jit(functools.partial(runs.held_out_losses, plan=plan))

    def evaluate(state: Any) -> loop.Report:
        def bits(strength: float) -> float:
            own = lambda rows: losses(state.masters, state.fixed, rows, jnp.float32(strength))  # noqa: E731
            return runs.held_out_report(source, own, plan=plan)

        return {"bits_per_byte": bits(0.0), "bits_per_byte_quantised": bits(1.0)}

    draw = functools.partial(runs.batch_of_step, source, plan)
    state, is_done = _run(args, plan, pace, state, step, draw, evaluate)
    export.export_backbone(state.masters, state.fixed, model, source, args.out / "model")
    _log(args.out, {"kind": "end", "stage": "backbone", "done": is_done, "elapsed_s": pace.elapsed_s})


def _draft(args: argparse.Namespace, pace: loop.Pace) -> None:
    plan, source = _plan(args), data.load_data(_given(args.data, "--data"))
    model, directory = plan.config.model, _given(args.model, "--model")
    backbone = load_params(directory, load_config(directory), progress=False)
    frozen = plain_params(backbone, model, dtype=plan.config.activation_dtype)
    prompt_len = min(64, args.seq_len // 4)
    measured = _with_seq_len(plan, 2 * prompt_len)  # answers as long as their prompts: longer ones run in circles
    own = dataclasses.replace(measured, num_rows=plan.tokens_per_step // measured.config.page_tokens)
    corpus_step, own_step = (
        jax.jit(functools.partial(runs.draft_step, plan=each), donate_argnums=0) for each in (plan, own)
    )
    write = jax.jit(functools.partial(acceptance.continue_greedily, prompt_len=prompt_len, config=measured.config))
    own_texts = np.zeros((0, 0), np.int32)
    if args.own_share:
        own_texts = _own_texts(args, source, own, lambda rows: write(frozen, rows), prompt_len=prompt_len)

    @jax.jit
    def record(state: Any, frozen: Any, texts: jax.Array, anchors: jax.Array) -> acceptance.Records:
        full = jnp.float32(1.0)
        params = training_params(state.masters, state.fixed, model, strength=full, frozen=frozen)
        return acceptance.record_acceptance(params, texts, anchors, config=measured.config)

    written: list[Any] = []  # the network does not change, so its texts are written once

    def texts_of(rows: jax.Array) -> jax.Array:
        if not written:
            written.append(write(frozen, rows))
        return written[0]

    def measure(state: Any) -> tuple[acceptance.Records, loop.Report]:
        own = functools.partial(record, state, frozen)
        return runs.acceptance_report(source, measured, texts_of, own, prompt_len=prompt_len)

    def draw(step: int) -> tuple[Any, Any]:
        if is_own_step(step, args.own_share):
            return own_step, own_batch_of_step(own_texts, own, step, prompt_len=prompt_len)
        return corpus_step, (runs.batch_of_step(source, plan, step), runs.anchors_of_step(plan, step))

    def step(state: Any, drawn: tuple[Any, Any]) -> Any:
        compiled, batch = drawn
        return compiled(state, batch, frozen)

    first = runs.first_state(plan, None)
    state, is_done = _run(args, plan, pace, first, step, draw, lambda state: measure(state)[1])
    records, _ = measure(state)
    np.savez(args.out / "acceptance.npz", confidence=records.confidence, accepted=records.accepted)
    export.export_with_draft(backbone, state.masters, state.fixed, model, source, args.out / "model")
    _log(args.out, {"kind": "end", "stage": "draft", "done": is_done, "elapsed_s": pace.elapsed_s})


def _own_texts(
    args: argparse.Namespace, source: data.TrainingData, plan: runs.Plan, write: Any, *, prompt_len: int
) -> np.ndarray:
    """The texts that the network writes itself: of an earlier run in the same folder, else made now."""
    file = args.out / "own_texts.npy"
    if not file.is_file():
        np.save(file, write_own_texts(source, plan, write, num_texts=args.own_texts, prompt_len=prompt_len))
    texts = np.load(file)
    _log(args.out, {"kind": "own_texts", "texts": len(texts), "tokens": texts[:, prompt_len:].size})
    return texts


def _run(
    args: argparse.Namespace, plan: runs.Plan, pace: loop.Pace, state: Any, step: Any, draw: Any, evaluate: Any
) -> tuple[Any, bool]:
    return loop.run_steps(
        state,
        step,
        draw,
        evaluate,
        functools.partial(_log, args.out),
        num_steps=plan.schedule.num_steps,
        tokens_per_step=plan.tokens_per_step,
        directory=args.out / "checkpoint",
        pace=pace,
    )


def _plan(args: argparse.Namespace) -> runs.Plan:
    if not args.float32 and jax.default_backend() == "cpu":
        raise SystemExit("a CPU has no bfloat16 products of the kind that training needs; give --float32")
    config = training_config(load_config(args.config), seq_len=args.seq_len, has_bf16_products=not args.float32)
    schedule = Schedule(num_steps=args.steps, peak_rate=args.rate, final_rate=args.rate / 100)
    return runs.Plan(config=config, schedule=schedule, num_rows=args.rows)


def _with_seq_len(plan: runs.Plan, seq_len: int) -> runs.Plan:
    """The plan for rows of another length."""
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, page_tokens=seq_len))


def _token_map(source: data.TrainingData, out: Path, model: Any) -> np.ndarray:
    """The Engram token map of the data's tokenizer, which is put beside the run."""
    (out / "tokenizer.json").write_text(source.tokenizer, encoding="utf-8")
    return token_map(out, compressed_vocab_size=model.engram_compressed_vocab_size, vocab_size=model.vocab_size)


def _given(value: Path | None, option: str) -> Path:
    if value is None:
        raise SystemExit(f"this stage needs {option}; see --help")
    return value


def _log(out: Path, report: loop.Report) -> None:
    with (out / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(report) + "\n")
    _print(report)


def _print(report: loop.Report) -> None:
    print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in report.items()}), flush=True)


def _plot(log: Path, picture: Path) -> None:
    """One panel for each group of figures that the log has, one above the other: a panel has one unit."""
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'deepinfer-jax[train]'") from error
    reports = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    panels = [(unit, curves) for unit, names in PANELS.items() if (curves := _curves(reports, names))]
    if not panels:
        raise SystemExit(f"{log} has no figures to draw; give the folder of a run that made a step")
    figure, all_axes = pyplot.subplots(len(panels), figsize=(8, 3 * len(panels)), sharex=True, squeeze=False)
    for axes, (unit, curves) in zip(all_axes[:, 0], panels, strict=True):
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), marker=".", label=name.replace("_", " "))
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
        axes.legend()
    all_axes[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def _curves(reports: list[loop.Report], names: tuple[str, ...]) -> dict[str, list[tuple[Any, Any]]]:
    """Name -> (step, value) of the figures that the reports have."""
    curves = {name: [(report["step"], report[name]) for report in reports if name in report] for name in names}
    return {name: points for name, points in curves.items() if points}


if __name__ == "__main__":
    main()
