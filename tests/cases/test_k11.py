"""K11: the end token inside an accepted block, and the length cap in the same block."""

import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.testing import tiny

GOLDEN = [10, 11, 1, 20, 21, 22]
EOS = 1


@pytest.fixture(scope="module", params=[0, 5], ids=["plain", "drafts"])
def llm(agreeing_model, request):
    return tiny.tiny_llm(agreeing_model, num_draft_tokens=request.param)


def run(llm, **options):
    params = SamplingParams(golden_token_ids=GOLDEN, seq_seed=1, **options)
    [outputs] = llm.generate(prompt_token_ids=[[0, 40, 41]], sampling_params=params, use_tqdm=False)
    return outputs


def test_the_end_token_ends_the_request_inside_a_block(llm):
    outputs = run(llm, max_tokens=5)
    assert [one.token_id for one in outputs] == [10, 11, EOS]
    assert [one.num_output_tokens for one in outputs] == [1, 2, 3]
    assert [one.finished for one in outputs] == [False, False, True]
    assert [one.finish_reason for one in outputs] == ["", "", "stop"]


def test_the_length_cap_ends_it_in_the_same_block(llm):
    outputs = run(llm, max_tokens=5, ignore_eos=True)
    assert [one.token_id for one in outputs] == [10, 11, EOS, 20, 21]
    assert [one.finish_reason for one in outputs] == ["", "", "", "", "length"]
    assert [one.finished for one in outputs] == [False] * 4 + [True]


def test_a_block_is_accepted_so_that_both_ends_are_inside_it(agreeing_model):
    """Drafts are forced as the tokens are, so the first decode step gives them all at once."""
    llm = tiny.tiny_llm(agreeing_model, num_draft_tokens=5)
    ended = run(llm, max_tokens=5)
    assert [one.accept_tok for one in ended] == [1, 1, 2], "the third token is cut off behind the end token"
    capped = run(llm, max_tokens=5, ignore_eos=True)
    assert [one.accept_tok for one in capped] == [1, 1, 1, 1, 4]
    assert capped[-1].draft_tok == 4, "no draft is verified that could not be emitted"
