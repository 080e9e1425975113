"""Seeded random model shapes: every mechanism alive, sizes small, boundaries in odd places."""

import numpy as np

from deepinfer_jax.config.model import ModelConfig, RopeScaling, VisionConfig

VOCAB_SIZE = 96


def random_config(seed: int) -> ModelConfig:
    """A valid model shape; windows below, at and above the 64-key block, and candidate pools that really filter."""
    rng = np.random.default_rng(seed)

    def pick(*values: int) -> int:
        return int(rng.choice(values))

    num_window = pick(0, 1, 2)
    encoder = _sources(rng, num_window, pick(1, 2, 3))
    boundary = num_window + int(encoder[1])
    reindex, num_decoder = [boundary + 2], pick(3, 4)
    num_layers = boundary + num_decoder
    block_size = pick(2, 4)
    index_topk = pick(4, 6, 70)
    candidate_blocks = -(-(index_topk + block_size - 1) // block_size) + pick(0, 1)
    engram_layers = tuple(sorted({0, pick(*range(num_layers))}))
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        moe_intermediate_size=pick(32, 64),
        num_hidden_layers=num_layers,
        num_attention_heads=pick(2, 4),
        head_dim=pick(32, 64),
        qk_rope_head_dim=pick(8, 16),
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=pick(1, 2),
        swiglu_limit=float(rng.choice([0.5, 10.0])),
        rms_norm_eps=1e-20,
        max_position_embeddings=4096,
        rope_theta=10000.0,
        rope_scaling=RopeScaling(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=32),
        compress_rope_theta=160000.0,
        n_routed_experts=pick(4, 9),
        n_shared_experts=1,
        num_experts_per_tok=pick(1, 3),
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        sliding_window=pick(5, 64, 100, 128),
        compress_ratios=(0,) * num_window + (2,) * int(encoder[1]) + (1,) * num_decoder,
        kv_source_layer_ids=(*encoder[0], boundary),
        index_source_layer_ids=(*encoder[0], boundary, *reindex),
        index_n_heads=pick(2, 4),
        index_head_dim=32,
        index_topk=index_topk,
        candidate_source_layer_id=boundary,
        candidate_topk_blocks=candidate_blocks,
        candidate_block_size=block_size,
        hc_mult=pick(2, 4),
        hc_sinkhorn_iters=pick(1, 5),
        hc_eps=1e-6,
        engram_layer_ids=engram_layers,
        engram_num_embeddings=tuple(pick(600, 700) for _ in engram_layers),
        engram_max_ngram_size=pick(2, 4),
        engram_vocab_size=40,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_pad_token_id=2,
        engram_compressed_vocab_size=pick(50, VOCAB_SIZE),
        num_nextn_predict_layers=0,
        dspark_block_size=5,
        dspark_noise_token_id=4,
        dspark_target_layer_ids=(num_layers - 1,),
        dspark_markov_rank=16,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
        vision=_VISION,
        image_token_id=3,
        tokenizer_compatibility="native",
    )


def _sources(rng: np.random.Generator, first: int, count: int) -> tuple[tuple[int, ...], int]:
    """Ratio-2 source layers, each followed by 0 to 2 layers that reuse it, and how many layers that makes."""
    sources, layer = [], first
    for _ in range(count):
        sources.append(layer)
        layer += 1 + int(rng.integers(0, 3))
    return tuple(sources), layer - first


_VISION = VisionConfig(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    intermediate_size=48,
    patch_size=4,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=40,
    min_pixels=400,
    max_wh_ratio=None,
)
