"""Fits the temperatures of the confidence head to a run: one JSON line, with the calibration errors before and after.

Prompts are completed with every draft verified, so that each round says how many drafts its confidences deserved. The
result is a value for DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE. Errors are means over bins, one for each place of a
block; `ece_other_half` is read on the rounds of those prompts' answers that its temperatures were not fitted to, every
second one, in both directions.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.sampling.calibration import expected_calibration_error, fit_temperatures, survival_of
from deepinfer_jax.testing.facts import run_facts

MIN_ROUNDS = 100


def main() -> None:
    """Reads the options and prints one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory or Hugging Face id; default: the embedded model")
    parser.add_argument("--prompts", type=Path, required=True, help="UTF-8 lines to complete")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    lines = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    llm = LLM(args.model, decode_sequence=False)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.tokens, seq_seed=0, ignore_eos=True)
    llm.generate(lines, params)
    confidence, verified, accepted = llm.engine.draft_records()
    is_whole = verified == confidence.shape[1]  # rounds at the end of an answer verify fewer
    if is_whole.sum() < MIN_ROUNDS:
        raise SystemExit(f"{is_whole.sum()} rounds verified every draft; give prompts and tokens for {MIN_ROUNDS}")
    confidence, accepted = confidence[is_whole], accepted[is_whole]
    temperatures = fit_temperatures(confidence, accepted)
    record = {
        "script": "fit_confidence",
        "model": str(args.model or "embedded"),
        "temperature": args.temperature,
        "tokens": args.tokens,
        "rounds": int(is_whole.sum()),
        "temperatures": [round(float(t), 4) for t in temperatures],
        "variable": ",".join(f"{t:.4g}" for t in temperatures),
        "ece_before": _errors(confidence, accepted, np.ones_like(temperatures)),
        "ece_after": _errors(confidence, accepted, temperatures),
        "ece_other_half": _errors_of_halves(confidence, accepted),
    }
    print(json.dumps(record | run_facts()))


def _errors(confidence: np.ndarray, accepted: np.ndarray, temperatures: np.ndarray) -> list[float]:
    """Calibration error of each place."""
    survival = survival_of(confidence, temperatures)
    places = range(survival.shape[1])
    return [round(expected_calibration_error(survival[:, i], accepted > i), 4) for i in places]


def _errors_of_halves(confidence: np.ndarray, accepted: np.ndarray) -> dict[str, list[float]]:
    """Calibration error of each place before and after, of the half of the rounds that the fit did not see."""
    found: dict[str, list[list[float]]] = {"before": [], "after": []}
    for fitted, read in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        temperatures = fit_temperatures(confidence[fitted], accepted[fitted])
        found["before"].append(_errors(confidence[read], accepted[read], np.ones_like(temperatures)))
        found["after"].append(_errors(confidence[read], accepted[read], temperatures))
    return {name: [round(float(e), 4) for e in np.mean(errors, axis=0)] for name, errors in found.items()}


if __name__ == "__main__":
    main()
