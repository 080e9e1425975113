"""The requests of the matrix: the base set that is compared, and the neighbours beside it."""

import dataclasses
from typing import Any

import numpy as np

from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.text.tokenizer import Tokenizer

# Tokens that a request may still draw when its state is read: two steps of a newest token and five drafts.
SPARE = 12
LONG_PROMPT = 290  # tokens: more than two windows and four pages of the shipped model
PICTURE = "picture"  # name of the request of the base set that has an image
ROOM = 20  # tokens: what neighbours draw beyond the base set, and images

_LINES = (
    "import collections\n",
    "class Queue:\n    def __init__(self, items):\n        self.items = list(items)\n",
    "    def push(self, item):\n        self.items.append(item)\n        return len(self.items)\n",
    "    def pop(self):\n        if not self.items:\n            raise IndexError('the queue is empty')\n",
    "def mean(values):\n    total = sum(values)\n    return total / len(values)\n",
    "for index, line in enumerate(open(path)):\n    print(index, line.rstrip())\n",
)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 40}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
JSON_ANSWER: dict[str, Any] = {"schema_type": "json", "schema": _SCHEMA}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One request: its name in reports, its prompt and what it asks for."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    images: tuple[np.ndarray, ...] = ()  # uint8 [height, width, 3], one for each image token of the prompt
    cuts: tuple[int, ...] = ()  # positions at which the prompt is cut into chunks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """What requests are made of."""

    tokenizer: Tokenizer
    image_token: int
    num_tokens: int  # output tokens of each request of the base set

    def prompt(self, num_tokens: int, *, first_line: int = 0) -> tuple[int, ...]:
        """The first so many tokens of a text that begins with BOS and one of the lines."""
        ids: list[int] = [self.tokenizer.bos_id]
        line = first_line
        while len(ids) < num_tokens:
            ids += self.tokenizer.encode_bare(_LINES[line % len(_LINES)])
            line += 1
        return tuple(ids[:num_tokens])

    @property
    def state_at(self) -> int:
        """Output tokens after which the state of a request is read."""
        return self.num_tokens - SPARE


def longest_request(num_tokens: int) -> int:
    """Tokens of the longest prompt and answer, and room beside them."""
    return LONG_PROMPT + num_tokens + ROOM


def base_requests(texts: Texts, *, has_vision: bool) -> tuple[Request, ...]:
    """One request for each way to draw, with prompts from one token to several pages; each has its own seed.

    has_vision: one more, with a picture in its prompt.
    """
    count = texts.num_tokens
    # Lengths around a page (64): so that some requests open a page while they draw.
    asked: dict[str, tuple[int, dict[str, Any]]] = {
        "greedy": (13, {"temperature": 0.0}),
        "sampled": (58, {"temperature": 1.0}),
        "long": (LONG_PROMPT, {"temperature": 1.0}),
        "nucleus": (62, {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01}),
        "penalties": (
            55,
            {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": {5: 1.5}},
        ),
        "alternatives": (1, {"temperature": 1.0, "top_logprobs": 5}),
        "json": (20, {"so_args": JSON_ANSWER, "ignore_eos": False}),
        "stops": (60, {"stop": ("return", "\n\n"), "min_tokens": count - SPARE // 2}),
    }
    common: dict[str, Any] = {"max_tokens": count, "ignore_eos": True}
    if has_vision:
        asked[PICTURE] = (40, {"temperature": 1.0})
    requests = tuple(
        Request(
            name=name,
            prompt=texts.prompt(length, first_line=place),
            params=SamplingParams.from_dict({**common, "seq_seed": 1000 + place, **options}),
        )
        for place, (name, (length, options)) in enumerate(asked.items())
    )
    shown = with_pictures(texts, requests)
    return tuple(shown[place] if one.name == PICTURE else one for place, one in enumerate(requests))


def neighbours(texts: Texts, number: int, **options: Any) -> tuple[Request, ...]:
    """Requests that live as long as the base set, with short prompts of unlike lengths; options: of sampling."""
    return tuple(_neighbour(texts, place, options) for place in range(number))


def _neighbour(texts: Texts, place: int, options: dict[str, Any]) -> Request:
    usual: dict[str, Any] = {
        "temperature": (1.0, 0.0, 0.7)[place % 3],
        "max_tokens": texts.num_tokens + 4 + place % 4,
        "seq_seed": place,
        "ignore_eos": True,
    }
    return Request(
        name=f"neighbour {place}",
        prompt=texts.prompt(2 + place % 5, first_line=place),
        params=SamplingParams.from_dict(usual | options),
    )


def with_pictures(texts: Texts, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """The requests, each with a picture of its own in front of its last token."""
    size = (84, 84, 3)
    return tuple(
        dataclasses.replace(
            request,
            prompt=(*request.prompt[:-1], texts.image_token, request.prompt[-1]),
            images=(np.random.default_rng(place).integers(0, 256, size).astype(np.uint8),),
        )
        for place, request in enumerate(requests)
    )
