"""The arguments of `generate`, checked as a whole before anything is queued (spec: interface 5.2, 5.4)."""

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np

from deepinfer_jax.config.args import EngineConfig
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.engine.images import (
    ImageReader,
    count_images,
    given_images,
    moved_position,
    place_images,
)
from deepinfer_jax.engine.setup import LoadedModel
from deepinfer_jax.engine.sizes import EngineSizes
from deepinfer_jax.sampling.params import NO_TOKEN, SamplingParams, check_vocabulary
from deepinfer_jax.scheduler.images import ImageSpan
from deepinfer_jax.scheduler.policy import SchedulerConfig
from deepinfer_jax.scheduler.sequence import Limits
from deepinfer_jax.text.tokenizer import Tokenizer

type TokenIds = Sequence[SupportsIndex] | np.ndarray
type TokenLists = Sequence[TokenIds] | np.ndarray | None
type Prompts = str | Sequence[str | TokenIds] | None
type ParamsArgument = SamplingParams | Sequence[SamplingParams] | None


@dataclasses.dataclass(frozen=True)
class Task:
    """One prompt, ready to run."""

    prompt: tuple[int, ...]  # with the tokens of its images
    params: SamplingParams  # with the model's EOS as eos_id
    images: tuple[ImageSpan, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intake:
    """Checks what comes to one engine. Errors are ValueError or TypeError and name the prompt's index."""

    model: ModelConfig
    tokenizer: Tokenizer | None
    max_len: int  # tokens of the longest prompt that can ever run
    has_replay: bool  # whether bounded replay is on
    sizes: SchedulerConfig
    images: ImageReader | None  # None: there are no weights for images

    def read_tasks(
        self,
        prompts: Prompts,
        prompt_token_ids: TokenLists,
        sampling_params: ParamsArgument,
        multi_modal_data: Any,
    ) -> list[Task]:
        """One task for each prompt, in order."""
        given = _given_prompts(prompts, prompt_token_ids)
        params = _given_params(sampling_params, len(given))
        is_single = isinstance(prompts, str) and prompt_token_ids is None
        data = given_images(multi_modal_data, len(given), is_single=is_single)
        ids = [_prompt_ids(prompt, index, self.tokenizer, self.model) for index, prompt in enumerate(given)]
        are_texts = [isinstance(prompt, str) for prompt in given]
        placed = self._with_images(ids, data, are_texts)
        tasks: list[Task] = []
        for index, ((prompt, images), options) in enumerate(zip(placed, params, strict=True)):
            if len(prompt) > self.max_len:
                what = f" with its {len(images)} images" if images else ""
                raise ValueError(
                    f"prompt {index}{what} has {len(prompt)} tokens, more than the {self.max_len} that can run here "
                    "(max_model_len, num_kv_tokens and ignore_len); shorten it or raise these"
                )
            ready = _ready_params(options, index, self.model, has_replay=self.has_replay)
            tasks.append(Task(prompt, ready, images))
        return tasks

    def read_request(self, prompt_token_ids: TokenIds, params: SamplingParams, multi_modal_data: Any) -> Task:
        """The task of a single request, which has one answer."""
        if isinstance(prompt_token_ids, str):
            raise TypeError("prompt_token_ids is a string; encode it, or use LLM.generate")
        ids = _prompt_ids(prompt_token_ids, 0, None, self.model)
        [(prompt, images)] = self._with_images([ids], [multi_modal_data], [False])
        return Task(prompt, self.read_params(params), images)

    def read_params(self, params: SamplingParams) -> SamplingParams:
        """The parameters of a single request."""
        if params.n != 1:
            raise ValueError(f"n={params.n}: an engine request has one answer; use LLM.generate, or fork_request")
        return _ready_params(params, 0, self.model, has_replay=self.has_replay)

    def read_checkpoints(
        self, positions: Iterable[int] | None, token_ids: TokenIds, images: Sequence[ImageSpan]
    ) -> frozenset[int]:
        """Where a prompt is to be cut. positions: in the prompt as it was given, an image being one token."""
        checkpoints, prompt_len = frozenset(positions or ()), len(token_ids)
        for position in checkpoints:
            if isinstance(position, bool) or not isinstance(position, int) or not 0 < position <= prompt_len:
                raise ValueError(
                    f"chunk_checkpoints has {position!r}; give positions from 1 to {prompt_len}, the prompt"
                )
        ids, image_id = [int(token) for token in token_ids], self.model.image_token_id
        return frozenset(moved_position(position, ids, images, image_id) for position in checkpoints)

    def close(self) -> None:
        """Lets the threads that decode images end."""
        if self.images is not None:
            self.images.close()

    def _with_images(
        self, prompts: Sequence[tuple[int, ...]], data: Sequence[Any], are_texts: Sequence[bool]
    ) -> list[tuple[tuple[int, ...], tuple[ImageSpan, ...]]]:
        """The prompts with their images in them; whatever can be told without decoding is told first."""
        for index, (prompt, entry, is_text) in enumerate(zip(prompts, data, are_texts, strict=True)):
            self._check_count(prompt, entry, index, is_text=is_text)
        if self.images is None:
            return [(prompt, ()) for prompt in prompts]
        found, image_id = self.images.read(data), self.model.image_token_id
        placed = [
            place_images(prompt, own, image_id) if own else (prompt, ())
            for prompt, own in zip(prompts, found, strict=True)
        ]
        for index, (_, images) in enumerate(placed):
            self._check_budget(images, index)
        return placed

    def _check_count(self, prompt: tuple[int, ...], entry: Any, index: int, *, is_text: bool) -> None:
        """Raises ValueError unless there is an image for each placeholder.

        Ids without any data are taken as they are: an earlier answer among them may hold a drawn image token.
        """
        image_id = self.model.image_token_id
        num_places, num_images = prompt.count(image_id), count_images(entry, index)
        if num_places and entry is None and not is_text:
            warnings.warn(
                f"prompt {index} has {num_places} image tokens ({image_id}) and no multi_modal_data: they stand for no "
                "image; give images if they should",
                stacklevel=2,
            )
        elif num_places != num_images:
            raise ValueError(
                f"prompt {index} has {num_places} image placeholders (token {image_id}) and {num_images} images; "
                "give one image for each placeholder in multi_modal_data"
            )
        if num_images and self.images is None:
            raise ValueError(f"prompt {index} has images, and this model has no vision weights; leave them out")

    def _check_budget(self, images: Sequence[ImageSpan], prompt: int) -> None:
        """Raises ValueError for images that no step has room for."""
        most = self.sizes.max_num_batched_tokens
        for index, image in enumerate(images):
            if image.length > most:
                raise ValueError(
                    f"image {index} of prompt {prompt} takes {image.length} tokens, and a step has {most} "
                    "(max_num_batched_tokens); an image is never split: give a smaller one, or raise it"
                )
        if not self.sizes.is_chunked and len(images) > self.sizes.max_images:
            raise ValueError(
                f"prompt {prompt} has {len(images)} images, and a step takes {self.sizes.max_images} of them "
                "(DEEPINFER_MULTI_MODAL_BUFFER_SIZE); raise it, or set chunked_prefill=True"
            )


def _given_prompts(prompts: Prompts, prompt_token_ids: TokenLists) -> Sequence[str | TokenIds]:
    if prompts is None and prompt_token_ids is None:
        raise ValueError("generate got neither prompts nor prompt_token_ids; give one of them")
    texts = _as_list("prompts", prompts)
    ids = _as_list("prompt_token_ids", prompt_token_ids)
    if texts is not None and ids is not None and len(texts) != len(ids):
        raise ValueError(
            f"{len(texts)} prompts and {len(ids)} prompt_token_ids were given; give one of the two, or equally many"
        )
    given = ids if ids is not None else texts
    if not given:
        raise ValueError("the list of prompts is empty; give at least one prompt")
    return given


def _as_list(name: str, value: Any) -> Sequence[Any] | None:
    if value is None or isinstance(value, str):
        if isinstance(value, str) and name == "prompt_token_ids":
            raise TypeError("prompt_token_ids is a string; give it as prompts")
        return value if value is None else [value]
    if isinstance(value, np.ndarray) and value.ndim == 2:
        return list(value)
    if isinstance(value, bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{name} is of type {type(value).__name__}; give a list with one entry for each prompt")
    for index, entry in enumerate(value):
        is_ids = isinstance(entry, np.ndarray) or (isinstance(entry, Sequence) and not isinstance(entry, str | bytes))
        if not is_ids and (name == "prompt_token_ids" or not isinstance(entry, str)):
            raise TypeError(
                f"{name}[{index}] is of type {type(entry).__name__}; give a list with one "
                f"{'list of token ids' if name == 'prompt_token_ids' else 'string'} for each prompt"
            )
    return value


def _given_params(sampling_params: ParamsArgument, num_prompts: int) -> Sequence[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    if not isinstance(sampling_params, list | tuple):
        raise TypeError(
            f"sampling_params is of type {type(sampling_params).__name__}; "
            "give one SamplingParams, or a list with one for each prompt"
        )
    for index, options in enumerate(sampling_params):
        if not isinstance(options, SamplingParams):
            raise TypeError(f"sampling_params[{index}] is of type {type(options).__name__}, not SamplingParams")
    if len(sampling_params) != num_prompts:
        raise ValueError(
            f"{num_prompts} prompts and {len(sampling_params)} sampling_params were given; "
            "give one for all, or one for each prompt"
        )
    return sampling_params


def _prompt_ids(prompt: str | TokenIds, index: int, tokenizer: Tokenizer | None, model: ModelConfig) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                f"prompt {index} is a text, and this model has no tokenizer; "
                "give tokenizer= to LLM, or prompts as token ids"
            )
        try:
            return tuple(tokenizer.encode(prompt))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
    if len(prompt) == 0:
        raise ValueError(f"prompt {index}: prompt must not be empty; give at least one token id")
    ids = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
    for place, token_id in enumerate(ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
            raise TypeError(f"prompt {index} has {token_id!r} at place {place}; give integers, the token ids")
        if not 0 <= token_id < model.vocab_size:
            raise ValueError(
                f"prompt {index} has token id {token_id} at place {place}, "
                f"outside the vocabulary 0..{model.vocab_size - 1}; correct the ids"
            )
    if list(ids[:2]) == [model.bos_token_id] * 2:
        warnings.warn(
            f"prompt {index} begins with two BOS tokens ({model.bos_token_id}); texts get one from the tokenizer, so "
            "leave it out of ids that already have it",
            stacklevel=2,
        )
    return tuple(int(token_id) for token_id in ids)


def _ready_params(params: SamplingParams, index: int, model: ModelConfig, *, has_replay: bool) -> SamplingParams:
    """Checked parameters, with what the engine sets."""
    if params.prompt_logprobs and has_replay:
        warnings.warn(
            "prompt_logprobs is off: with bounded replay most of a prompt has none "
            "(set DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE to off to get them)",
            stacklevel=2,
        )
        params = dataclasses.replace(params, prompt_logprobs=False)
    try:
        check_vocabulary(params, model.vocab_size)
    except ValueError as error:
        raise ValueError(f"prompt {index}: {error}") from error
    for place, token_id in enumerate(params.golden_token_ids or ()):
        if token_id != NO_TOKEN and token_id >= model.vocab_size:
            raise ValueError(
                f"golden_token_ids[{place}]={token_id} of prompt {index} is outside the vocabulary "
                f"0..{model.vocab_size - 1}; correct it, or give -1 to sample there"
            )
    return dataclasses.replace(params, eos_id=model.eos_token_id)


def make_intake(config: EngineConfig, model: LoadedModel, sizes: EngineSizes) -> Intake:
    """What an engine of these sizes takes in."""
    own = sizes.scheduler
    vision, timeout_s = model.runtime.model.vision, config.image_worker_timeout_s
    return Intake(
        model=model.runtime.model,
        tokenizer=model.tokenizer,
        max_len=min(model.max_model_len, own.num_pages * own.page_tokens, config.ignore_len),
        has_replay=model.runtime.has_replay,
        sizes=own,
        images=None if model.params.vision is None else ImageReader(vision, timeout_s=timeout_s),
    )


def limits_of(params: SamplingParams) -> Limits:
    """When a request with these parameters ends by itself."""
    return Limits(
        max_tokens=params.max_tokens,
        eos_id=params.eos_id,
        ignore_eos=params.ignore_eos,
        stop_ids=frozenset(params.stop_token_ids or ()),
    )
