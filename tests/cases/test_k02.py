"""K02: one parameter object for many prompts."""

from deepinfer_jax import SamplingParams

PROMPT = "The quick brown fox jumps over"


def answers(llm, params) -> list[tuple[tuple[int, float], ...]]:
    results = llm.generate([PROMPT] * 8, params)
    return [tuple((o.token_id, o.token_logprobs) for o in outputs) for outputs in results]


def test_one_object_without_a_seed_gives_different_answers(llm):
    assert len(set(answers(llm, SamplingParams(max_tokens=20)))) > 1


def test_one_object_with_a_seed_gives_the_same_answer(llm):
    assert len(set(answers(llm, SamplingParams(max_tokens=20, seq_seed=7)))) == 1


def test_an_answer_depends_on_its_seed_only(llm):
    params = [SamplingParams(max_tokens=20, seq_seed=seed) for seed in range(8)]
    forwards, backwards = answers(llm, params), answers(llm, params[::-1])
    assert forwards == backwards[::-1]
    assert len(set(forwards)) == 8
    assert forwards[7] == answers(llm, SamplingParams(max_tokens=20, seq_seed=7))[0]
