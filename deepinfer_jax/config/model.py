"""What the model is: the shape of one checkpoint, validated once."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN parameters of the layers that read a compressed cache (spec: backbone 4.1)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Shape of the vision tower (spec: vision 1)."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model's shape, with the released field names (spec: backbone 1.1, checkpoint 4)."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling
    compress_rope_theta: float
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    vision: VisionConfig
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = 129264
    expert_dtype: str = "fp4"
    tokenizer_compatibility: str = "release"

    def __post_init__(self) -> None:
        _check_positive(self)
        _check_attention(self)
        _check_sources(self)
        _check_selection(self)
        _check_experts(self)
        _check_engram(self)
        _check_draft(self)
        _check_vision(self.vision)
        _check_tokens(self)

    @property
    def backbone_ratios(self) -> tuple[int, ...]:
        """Compression ratio of each backbone layer; draft entries are cut off."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def engram_columns(self) -> int:
        """Hash columns of one Engram layer: n-gram sizes times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


_MAY_BE_ZERO = ("num_nextn_predict_layers", "bos_token_id", "eos_token_id", "pad_token_id", "candidate_source_layer_id")


def _check_positive(c: ModelConfig) -> None:
    for part, prefix in ((c, ""), (c.rope_scaling, "rope_scaling."), (c.vision, "vision_config.")):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if field.name in _MAY_BE_ZERO or field.name.endswith("_token_id"):
                _require(value >= 0, f"{prefix}{field.name}={value} must not be negative")
            else:
                _require(value > 0, f"{prefix}{field.name}={value} must be positive")


def _check_attention(c: ModelConfig) -> None:
    _require(
        c.num_attention_heads % c.o_groups == 0,
        f"num_attention_heads={c.num_attention_heads} is not a multiple of o_groups={c.o_groups}",
    )
    for name in ("head_dim", "index_head_dim"):
        width = getattr(c, name)
        _require(width % 32 == 0, f"{name}={width} is not a multiple of 32, the scale group of the caches")
        _require(c.qk_rope_head_dim <= width, f"qk_rope_head_dim={c.qk_rope_head_dim} is larger than {name}={width}")
    _require(c.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim={c.qk_rope_head_dim} must be even")
    group_width = c.num_attention_heads // c.o_groups * c.head_dim
    for name, width in (
        ("hidden_size", c.hidden_size),
        ("q_lora_rank", c.q_lora_rank),
        ("moe_intermediate_size", c.moe_intermediate_size),
        ("o_groups * o_lora_rank", c.o_groups * c.o_lora_rank),
        ("heads of one output group * head_dim", group_width),
        ("engram_head_dim", c.engram_head_dim),
    ):
        _require(width % 32 == 0, f"{name}={width} is not a multiple of 32, the block size of the weights")


def _check_sources(c: ModelConfig) -> None:
    layers = c.num_hidden_layers
    _require(
        len(c.compress_ratios) in (layers, layers + c.num_nextn_predict_layers),
        f"compress_ratios has {len(c.compress_ratios)} entries; allowed are num_hidden_layers={layers}, or that "
        f"plus num_nextn_predict_layers={c.num_nextn_predict_layers}",
    )
    _require(
        all(r in (0, 1, 2) for r in c.compress_ratios),
        f"compress_ratios={list(c.compress_ratios)} holds a ratio other than 0, 1 and 2",
    )
    _require(not any(c.compress_ratios[layers:]), "compress_ratios of draft layers must be 0")
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = getattr(c, name)
        _require(len(ids) > 0, f"{name} is empty; the first layer with a ratio above 0 must be a source")
        _require(list(ids) == sorted(set(ids)), f"{name}={list(ids)} must rise strictly")
        _require(
            ids[0] >= 0 and ids[-1] < layers,
            f"{name}={list(ids)} has an id outside 0..num_hidden_layers-1={layers - 1}",
        )
        _require(
            all(c.compress_ratios[i] > 0 for i in ids),
            f"{name}={list(ids)} names a layer whose compress_ratio is 0",
        )
    missing = set(c.kv_source_layer_ids) - set(c.index_source_layer_ids)
    _require(not missing, f"kv_source_layer_ids {sorted(missing)} are not in index_source_layer_ids")
    for layer, ratio in enumerate(c.backbone_ratios):
        owners = [i for i in c.kv_source_layer_ids if i <= layer]
        if ratio == 0:
            continue
        _require(bool(owners), f"layer {layer} has ratio {ratio} but no kv_source_layer_ids entry at or before it")
        owner = owners[-1]
        _require(
            c.compress_ratios[owner] == ratio,
            f"compress_ratios[{layer}]={ratio} differs from its KV source layer {owner} with "
            f"{c.compress_ratios[owner]}",
        )
    ratios = [r for r in c.backbone_ratios if r]
    _require(ratios == sorted(ratios, reverse=True), "compress_ratios: ratio-1 layers must follow ratio-2 layers")


def _check_selection(c: ModelConfig) -> None:
    source = c.candidate_source_layer_id
    _require(
        source in c.kv_source_layer_ids and c.compress_ratios[source] == 1,
        f"candidate_source_layer_id={source} must be a ratio-1 layer in kv_source_layer_ids",
    )
    reindex = [i for i in c.index_source_layer_ids if i not in c.kv_source_layer_ids]
    _require(
        all(i > source for i in reindex),
        f"index_source_layer_ids {reindex} have no cache of their own and must come after "
        f"candidate_source_layer_id={source}",
    )
    late = [i for i in c.kv_source_layer_ids if i > source]
    _require(not late, f"kv_source_layer_ids {late} come after candidate_source_layer_id={source}")
    pool = c.candidate_topk_blocks * c.candidate_block_size - (c.candidate_block_size - 1)
    _require(
        pool >= c.index_topk,
        f"candidate_topk_blocks={c.candidate_topk_blocks} blocks of candidate_block_size={c.candidate_block_size} "
        f"hold at least {pool} positions, fewer than index_topk={c.index_topk}",
    )


def _check_experts(c: ModelConfig) -> None:
    for name, experts, per_token in (
        ("num_experts_per_tok", c.n_routed_experts, c.num_experts_per_tok),
        ("dspark_num_experts_per_tok", c.dspark_n_routed_experts, c.dspark_num_experts_per_tok),
    ):
        _require(per_token <= experts, f"{name}={per_token} is larger than the number of experts {experts}")
    _require(c.n_shared_experts == 1, f"n_shared_experts={c.n_shared_experts} is not supported; it must be 1")
    _require(c.norm_topk_prob, "norm_topk_prob=False is not supported; released models renormalise")
    _require(c.expert_dtype == "fp4", f"expert_dtype={c.expert_dtype!r} is not supported; it must be 'fp4'")


def _check_engram(c: ModelConfig) -> None:
    _require(
        len(c.engram_layer_ids) == len(c.engram_num_embeddings),
        f"engram_layer_ids has {len(c.engram_layer_ids)} entries, engram_num_embeddings {len(c.engram_num_embeddings)}",
    )
    _require(
        list(c.engram_layer_ids) == sorted(set(c.engram_layer_ids))
        and all(0 <= i < c.num_hidden_layers for i in c.engram_layer_ids),
        f"engram_layer_ids={list(c.engram_layer_ids)} must rise strictly inside 0..{c.num_hidden_layers - 1}",
    )
    _require(c.engram_max_ngram_size >= 2, f"engram_max_ngram_size={c.engram_max_ngram_size} must be at least 2")
    _require(
        c.engram_vocab_size < (1 << 24) - (1 << 16),
        f"engram_vocab_size={c.engram_vocab_size} is too large: bucket primes must stay below 2^24",
    )
    _require(
        c.engram_compressed_vocab_size <= c.vocab_size,
        f"engram_compressed_vocab_size={c.engram_compressed_vocab_size} is larger than vocab_size={c.vocab_size}",
    )
    _require(
        c.engram_pad_token_id < c.vocab_size,
        f"engram_pad_token_id={c.engram_pad_token_id} is outside vocab_size={c.vocab_size}",
    )
    for rows in c.engram_num_embeddings:
        _require(0 < rows < 1 << 31, f"engram_num_embeddings={rows} must be positive and below 2^31")


def _check_draft(c: ModelConfig) -> None:
    _require(
        all(0 <= i < c.num_hidden_layers for i in c.dspark_target_layer_ids),
        f"dspark_target_layer_ids={list(c.dspark_target_layer_ids)} has an id outside the {c.num_hidden_layers} layers",
    )
    _require(
        c.dspark_noise_token_id < c.vocab_size,
        f"dspark_noise_token_id={c.dspark_noise_token_id} is outside vocab_size={c.vocab_size}",
    )


def _check_vision(v: VisionConfig) -> None:
    _require(
        v.hidden_size % (4 * v.num_attention_heads) == 0,
        f"vision_config.hidden_size={v.hidden_size} is not a multiple of 4 * num_attention_heads="
        f"{4 * v.num_attention_heads}: half of the pairs of a head turn by row, half by column",
    )
    _require(
        v.max_image_tokens >= 4,
        f"vision_config.max_image_tokens={v.max_image_tokens} is below 4: one token, its newline, start and end",
    )


def _check_tokens(c: ModelConfig) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        value = getattr(c, name)
        _require(value < c.vocab_size, f"{name}={value} is outside vocab_size={c.vocab_size}")
    _require(
        c.tokenizer_compatibility in ("release", "native"),
        f"tokenizer_compatibility={c.tokenizer_compatibility!r} must be 'release' or 'native'",
    )
