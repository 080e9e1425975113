"""What a step of one rank must do at least: bytes that move and products that are made (`scripts/bench_steps.py`)."""

import math
from collections.abc import Mapping

import jax
import numpy as np

from deepinfer_jax.checkpoint.names import num_lead_axes
from deepinfer_jax.config.roles import layer_roles
from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.kernels.experts.api import PackedMatrix
from deepinfer_jax.model.params import Params
from deepinfer_jax.testing.kernel_bench import Ceilings
from deepinfer_jax.testing.rank_model import StepLoad, rank_schema

# Rates of data sheets, dense: for predictions of GPUs that are not there.
PUBLISHED = {
    "h200": Ceilings(bytes_per_s=4.8e12, flops_per_s={"bf16": 989e12, "fp8": 1979e12}),
    "b200": Ceilings(bytes_per_s=8.0e12, flops_per_s={"bf16": 2250e12, "fp8": 4500e12}),
}
_LOOKED_UP = ("embed", "engram.embed.", "engram.token_map")


def floor_us(num_bytes: int, flops: Mapping[str, float], ceilings: Ceilings) -> tuple[float, str]:
    """The least time in microseconds, and what sets it: "bandwidth" or "compute"."""
    moving = 1e6 * num_bytes / ceilings.bytes_per_s
    computing = 1e6 * sum(count / ceilings.flops_per_s[rate] for rate, count in flops.items())
    return (moving, "bandwidth") if moving >= computing else (computing, "compute")


def step_bytes(config: RuntimeConfig, params: Params, load: StepLoad) -> int:
    """Bytes that one step must move: each once, if every layer finds nothing of another one in a cache.

    Weights are read once: of routed experts those that some row chose, of embedding and Engram tables the rows that are
    looked up, everything else whole. Of caches each request reads in every layer the windows of its rows, in every
    layer that has them the selected entries, all of them different while there are so many, and the index keys that
    each index source scores. Logits are written. Activations and the written entries are not counted.
    """
    model, rows = config.model, load.num_rows
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731
    looked_up = (params.embed, params.engram.embed, params.engram.token_map)
    # Scales that have become steps stay for the reference, and no kernel reads them.
    is_packed = lambda node: isinstance(node, PackedMatrix)  # noqa: E731
    matrices = jax.tree.leaves(params.moe.experts, is_leaf=is_packed)
    routed = size(params.moe.experts) - size([w.scale for w in matrices if is_packed(w)])
    total = size(params) - size(params.moe.experts) - size(looked_up)
    one_expert = routed // (model.num_hidden_layers * load.num_experts)
    for ids in load.experts(config).values():
        chosen = np.unique(np.asarray(ids))
        total += one_expert * int((chosen < load.num_experts).sum())
    total += rows * model.hidden_size * params.embed.dtype.itemsize
    total += rows * len(model.engram_layer_ids) * model.engram_columns * model.engram_head_dim * 33 // 32
    window_row, main_row, index_row = (
        model.head_dim * 33 // 32,
        model.head_dim * 9 // 16,
        model.index_head_dim * 17 // 32,
    )
    of_request = 0
    for role in layer_roles(model):
        of_request += min(model.sliding_window + load.rows_each - 1, load.context) * window_row
        if not role.ratio:
            continue
        visible = load.context // role.ratio
        of_request += min(load.rows_each * model.index_topk, visible) * main_row
        if role.index_ordinal >= 0:
            listed = model.candidate_topk_blocks * model.candidate_block_size if role.uses_candidates else visible
            of_request += min(load.rows_each * listed, visible) * index_row
    return total + load.num_requests * (of_request + model.vocab_size * 4)


def step_flops(config: RuntimeConfig, load: StepLoad) -> dict[str, float]:
    """Multiplications and additions of one step by the rate that bounds them, "fp8" or "bf16".

    FP8 are products of quantised rows with E4M3 weights, and index scores. Routed experts and everything whose operands
    are not quantised is bfloat16. Attention takes the keys that a row sees; products alone are counted.
    """
    model, rows = config.model, load.num_rows
    flops = {"fp8": 0.0, "bf16": 0.0}
    for spec in rank_schema(model, num_experts=load.num_experts):
        if spec.path.startswith(_LOOKED_UP) or len(spec.shape) - num_lead_axes(spec) < 2:
            continue
        if spec.path.startswith("moe.experts."):
            chosen = rows * min(model.num_experts_per_tok, load.num_experts)
            flops["bf16"] += 2.0 * chosen * spec.shape[0] * math.prod(spec.shape[-2:])
            continue
        is_quantized = spec.storage == "fp8" and spec.path != "attention.wo_a"
        times = load.num_requests if spec.path == "head" else rows
        flops["fp8" if is_quantized else "bf16"] += 2.0 * times * spec.num_parameters
    tokens = load.positions().astype(np.int64) + 1  # that each row sees, itself among them
    for role in layer_roles(model):
        keys = np.minimum(tokens, model.sliding_window)
        if role.ratio:
            visible = tokens // role.ratio
            keys = keys + np.minimum(visible, model.index_topk)
            if role.index_ordinal >= 0:
                most = model.candidate_topk_blocks * model.candidate_block_size
                scored = np.minimum(visible, most) if role.uses_candidates else visible
                flops["fp8"] += 2.0 * model.index_n_heads * model.index_head_dim * float(scored.sum())
        flops["bf16"] += 4.0 * model.num_attention_heads * model.head_dim * float(keys.sum())
    return flops
