"""A list of candidates that has room for all entries is left out before a kernel, and no choice changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config.runtime import RuntimeConfig
from deepinfer_jax.model import selection
from deepinfer_jax.model.backbone import forward
from deepinfer_jax.model.batch import make_batch
from tests.model.running import COMPILER_OPTIONS, new_state, padded

CHOICES = ("layers.*.topk_idxs", "layers.*.candidate_mask")


@pytest.mark.slow
@pytest.mark.parametrize("pages_per_slot, has_list", [(1, False), (4, True)])
def test_choices_do_not_depend_on_a_list_of_all_entries(tiny_a, monkeypatch, pages_per_slot, has_list):
    params, base = tiny_a
    model = dataclasses.replace(base.model, candidate_topk_blocks=32)  # of 2 entries each, and a page has 64
    config = RuntimeConfig(model=model, is_invariant=False)
    tokens = np.random.default_rng(0).integers(3, base.model.vocab_size, 61).tolist()
    widths = []
    plain = selection.index_choice.best_entries

    def noted(queries, weights, listed, *rest, **given):
        widths.append(None if listed is None else listed.shape[1])
        return plain(queries, weights, listed, *rest, **given)

    def choices():
        widths.clear()
        state, pages = new_state(config, pages_per_slot=pages_per_slot)
        batch = padded(make_batch([tokens], [0], [1], pages, logits="all"))
        step = functools.partial(forward, config=config, capture=CHOICES)
        output, _ = jax.jit(step, compiler_options=COMPILER_OPTIONS)(params, state, batch)
        return output.stages

    monkeypatch.setattr(selection.index_choice, "best_entries", noted)
    reference = choices()
    assert any(width is not None for width in widths)
    monkeypatch.setattr(selection, "_in_kernel", lambda *_, **__: True)
    found = choices()
    assert any(width is not None for width in widths) == has_list
    assert found.keys() == reference.keys()
    for name, value in reference.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_candidates_that_the_caller_gives_keep_their_list(tiny_a, monkeypatch):
    params, base = tiny_a
    config = RuntimeConfig(model=dataclasses.replace(base.model, candidate_topk_blocks=32), is_invariant=False)
    has_list = []
    plain = selection.index_choice.best_entries

    def noted(queries, weights, listed, *rest, **given):
        has_list.append(listed is not None)
        return plain(queries, weights, listed, *rest, **given)

    monkeypatch.setattr(selection.index_choice, "best_entries", noted)
    monkeypatch.setattr(selection, "_in_kernel", lambda *_, **__: True)
    state, pages = new_state(config, pages_per_slot=1)
    batch = make_batch([[5] * 8], [0], [1], pages, logits="all")
    name = f"layers.{config.model.candidate_source_layer_id}.candidate_mask"
    for forced, want in ({}, False), ({name: jnp.ones((8, config.page_tokens), bool)}, True):
        has_list.clear()
        jax.eval_shape(functools.partial(forward, config=config, forced_selection=forced), params, state, batch)
        assert any(has_list) == want
