"""What a measurement was made with."""

import subprocess
from importlib import metadata
from pathlib import Path

import jax

ROOT = Path(__file__).parents[2]


def commit_of_checkout() -> str:
    """The short commit id, "unknown" outside a checkout."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return result.stdout.strip() or "unknown"


def run_facts() -> dict[str, str]:
    """Device, versions and commit."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "version": metadata.version("deepinfer-jax"),
        "commit": commit_of_checkout(),
    }
