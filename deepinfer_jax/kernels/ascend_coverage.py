"""What of this model the operators in use can compute, and what they cannot: checked before anything runs."""

from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.runtime import Backend, RuntimeConfig
from deepinfer_jax.kernels.ascend import AscendUnsupportedError
from deepinfer_jax.kernels.attention.cann import HEAD_DIM, MAX_HEADS
from deepinfer_jax.kernels.catalog import OPS
from deepinfer_jax.kernels.indexer import cann as indexer
from deepinfer_jax.kernels.linear.cann import COLUMNS
from deepinfer_jax.kernels.router.cann import MAX_EXPERTS
from deepinfer_jax.kernels.swiglu.cann import WIDTHS

CANN_VERSION = "9.2"
MISSING_WORD = "missing"  # in `host_ops`: every op of MISSING
# Parts of a step that no operator in use computes, and why. The host computes them, or nobody does.
MISSING: dict[str, str] = {
    "caches": "no gather is known; rows are packed, written and gathered by the host (the keys of attention too)",
    "compress": "aclnnCompressor has the form of another model; the rest of it are sums of pairs",
    "embed": "no gather is known",
    "engram": "hashing, tables and gates have no operator",
    "expert_rows": "rows are sorted by expert, and outputs added, by the host; aclnnMoeInitRoutingV3 is not in use yet",
    "head": "logits are float32 sums of bfloat16 products, which the operator would round",
    "hyper": "aclnnMhcPreSinkhorn takes two hidden sizes only, and the order of hRes is not documented",
    "sampling": "draws have no operator",
}


def host_ops(names: str) -> tuple[str, ...]:
    """Op names of a list with commas; the word "missing" stands for all of MISSING. ValueError for others."""
    given = [name.strip() for name in names.split(",") if name.strip()]
    known = {*MISSING, *OPS}
    unknown = [name for name in given if name not in known and name != MISSING_WORD]
    if unknown:
        raise ValueError(
            f"host_ops={names!r} names {', '.join(unknown)}; allowed are {MISSING_WORD} (all that no "
            f"operator computes) and {', '.join(sorted(known))}"
        )
    found = {*given, *(MISSING if MISSING_WORD in given else ())} - {MISSING_WORD}
    return tuple(sorted(found))


def check_host_ops(backend: Backend) -> None:
    """Raises AscendUnsupportedError unless the caller lets the host compute whatever no operator does."""
    lacking = [name for name in MISSING if name not in backend.host_ops]
    if lacking:
        reasons = "; ".join(f"{name} ({MISSING[name]})" for name in lacking)
        raise AscendUnsupportedError(
            f"no operator of CANN {CANN_VERSION} is in use for: {reasons}. Name them in host_ops "
            f"(DEEPINFER_JAX_ASCEND_HOST_OPS={MISSING_WORD} names all), so that the host computes them"
        )


def check_model(config: RuntimeConfig) -> None:
    """Raises AscendUnsupportedError for numerics and sizes that the operators in use do not take, naming each."""
    skipped = config.host_ops
    wrong = [text for op, text in _size_errors(config.model) if op not in skipped]
    if config.numerics != "q":
        wrong.insert(0, f"numerics={config.numerics}; products take FP8 rows, which are numerics q")
    if wrong:
        raise AscendUnsupportedError(
            f"the model does not fit the operators of CANN {CANN_VERSION}: {'; '.join(wrong)}. Choose another shape "
            "(configs/model/tiny-ascend.json is one), or name the op in host_ops"
        )


def _size_errors(model: ModelConfig) -> list[tuple[str, str]]:
    """(op, what is wrong) for each size that an operator refuses."""
    return [
        *_equal("attention", "head_dim", model.head_dim, HEAD_DIM),
        *_at_most("attention", "num_attention_heads", model.num_attention_heads, MAX_HEADS),
        *_equal("indexer", "index_head_dim", model.index_head_dim, indexer.INDEX_DIM),
        *_at_most("indexer", "index_n_heads", model.index_n_heads, indexer.MAX_HEADS),
        *_at_most("indexer", "index_topk + 1", model.index_topk + 1, indexer.MAX_KEYS),
        *_at_most("router", "n_routed_experts", model.n_routed_experts, MAX_EXPERTS),
        *_multiple("experts", "moe_intermediate_size", model.moe_intermediate_size, WIDTHS),
        *_multiple("shared_expert", "moe_intermediate_size", model.moe_intermediate_size, WIDTHS),
        *_multiple("experts", "hidden_size", model.hidden_size, COLUMNS),
        *_multiple("linear", "hidden_size", model.hidden_size, COLUMNS),
        *_multiple("linear", "q_lora_rank", model.q_lora_rank, COLUMNS),
        *_multiple("linear", "o_groups * o_lora_rank", model.o_groups * model.o_lora_rank, COLUMNS),
    ]


def _equal(op: str, name: str, value: int, wanted: int) -> list[tuple[str, str]]:
    return [] if value == wanted else [(op, f"{op}: {name}={value} must be {wanted}")]


def _at_most(op: str, name: str, value: int, most: int) -> list[tuple[str, str]]:
    return [] if value <= most else [(op, f"{op}: {name}={value} must be at most {most}")]


def _multiple(op: str, name: str, value: int, of: int) -> list[tuple[str, str]]:
    return [] if value % of == 0 else [(op, f"{op}: {name}={value} must be a multiple of {of}")]
