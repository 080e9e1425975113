"""`LLM`: prompts in, texts or token objects out (spec: interface 5)."""

import dataclasses
import difflib
import os
import random
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from deepinfer_jax.config.args import EngineArgs, resolve
from deepinfer_jax.engine import intake
from deepinfer_jax.engine.buckets import LOGIT_ROWS, make_buckets, prefill_limit
from deepinfer_jax.engine.outputs import Drawn, RequestOutput, request_outputs
from deepinfer_jax.engine.pipeline import Pipeline
from deepinfer_jax.engine.setup import load_engine_model
from deepinfer_jax.sampling.params import request_seed
from deepinfer_jax.scheduler.request import Request
from deepinfer_jax.scheduler.slots import SlotScheduler
from deepinfer_jax.text.tokenizer import Tokenizer

# Offline use differs from a service in these defaults.
_OFFLINE_DEFAULTS: dict[str, Any] = {
    "disable_log_stats": True,
    "stop_preempted_request": False,
    "offline_inference": True,
}


class LLM:
    """A model that generates for lists of prompts.

    model: a directory in the released format, a Hugging Face id, or a config file (random weights of that shape);
        None is DEEPINFER_HF_MODEL_DIR, or else the embedded tiny model.
    tokenizer: another directory or file than the model's own.
    seed: sampling seeds that are not given follow from it and from a prompt's place in its call, so that a call can
        be repeated; `SamplingParams.seq_seed` is the seed of one request. None: another seed for every request.
    decode_sequence: True returns texts, False a list of `RequestOutput` for each prompt.
    Other keywords are those of `EngineArgs`. Everything that can fail fails here: the model is loaded, and the
    smallest step compiled, unless DEEPINFER_ENFORCE_EAGER leaves that to the first call.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        trust_remote_code: bool = False,
        expert_parallel_size: int | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int | None = None,
        gpu_memory_utilization: float = 0.9,
        decode_sequence: bool = True,
        **kwargs: Any,
    ) -> None:
        _check_options(kwargs)
        args = EngineArgs(
            model=model,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
            expert_parallel_size=expert_parallel_size,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            **(_OFFLINE_DEFAULTS | kwargs),
        )
        self._config = resolve(args)
        self._decode_sequence = decode_sequence
        loaded = load_engine_model(self._config)
        if decode_sequence and loaded.tokenizer is None:
            raise ValueError(
                "decode_sequence=True needs a tokenizer, and this model has none; "
                "give tokenizer=, or decode_sequence=False for token ids"
            )
        self._tokenizer, self._model_config = loaded.tokenizer, loaded.runtime.model
        self._max_model_len, self._tail_start = loaded.max_model_len, loaded.runtime.tail_start
        num_slots = min(self._config.max_num_seqs, self._config.max_num_batched_tokens)
        max_rows = prefill_limit(
            self._config.max_num_batched_tokens,
            is_chunked=self._config.chunked_prefill,
            target=loaded.runtime.target,
        )
        max_pages = -(-self._max_model_len // loaded.runtime.page_tokens)
        buckets = make_buckets(max_prefill_rows=max_rows, num_slots=num_slots, max_pages=max_pages)
        self._scheduler = SlotScheduler(
            num_slots, max_rows=max_rows, max_emitting=LOGIT_ROWS, is_chunked=self._config.chunked_prefill
        )
        self._pipeline: Pipeline | None = Pipeline(loaded, buckets, num_slots=num_slots)
        self._num_requests = 0
        if not self._config.enforce_eager:
            self._pipeline.warm_up()

    def generate(
        self,
        prompts: intake.Prompts = None,
        sampling_params: intake.ParamsArgument = None,
        prompt_token_ids: intake.TokenLists = None,
        use_tqdm: bool = True,
        multi_modal_data: Any = None,
    ) -> list[str] | list[list[RequestOutput]]:
        """One result for each prompt, in order.

        prompts: a string or a list of strings. prompt_token_ids: lists of ids; with both given, the ids are used.
        sampling_params: one for all prompts, or one for each; None is `SamplingParams()`. Nothing runs before every
        argument is checked, and after an exception the engine can be used again.
        """
        pipeline = self._require_open()
        tasks = intake.read_tasks(
            prompts,
            prompt_token_ids,
            sampling_params,
            multi_modal_data,
            tokenizer=self._tokenizer,
            model=self._model_config,
            max_model_len=self._max_model_len,
        )
        requests = [self._make_request(index, task) for index, task in enumerate(tasks)]
        drawn = self._run(pipeline, requests, use_tqdm=use_tqdm)
        first_id = self._num_requests
        self._num_requests += len(requests)
        if self._decode_sequence:
            return [self.get_tokenizer().decode(request.output) for request in requests]
        return [
            request_outputs(
                request,
                drawn[request.index],
                request_id=str(first_id + request.index),
                tokenizer=self._tokenizer,
                max_num_batched_tokens=self._config.max_num_batched_tokens,
            )
            for request in requests
        ]

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError for a model that has none."""
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer; give tokenizer= to LLM")
        return self._tokenizer

    @property
    def computed_rows(self) -> dict[str, int]:
        """Rows that the encoder and the decoder layers have computed since the start, padding included."""
        pipeline = self._require_open()
        return {"encoder": pipeline.num_encoder_rows, "decoder": pipeline.num_decoder_rows}

    def close(self) -> None:
        """Frees the model and the caches; `generate` cannot be used afterwards."""
        self._pipeline = None

    def _require_open(self) -> Pipeline:
        if self._pipeline is None:
            raise ValueError("this LLM is closed; make a new one")
        return self._pipeline

    def _make_request(self, index: int, task: intake.Task) -> Request:
        return Request(
            index=index,
            prompt=task.prompt,
            params=task.params,
            seed=request_seed(task.params, self._config.seed, index, random),
            max_model_len=self._max_model_len,
            tail_start=self._tail_start(len(task.prompt)),
        )

    def _run(self, pipeline: Pipeline, requests: Sequence[Request], *, use_tqdm: bool) -> list[list[Drawn]]:
        """Every request's drawn tokens, by index."""
        drawn: list[list[Drawn]] = [[] for _ in requests]
        bar = tqdm(total=len(requests), desc="generating", unit="prompt", disable=None if use_tqdm else True)
        try:
            for request in requests:
                self._scheduler.add(request)
            with bar:
                while plan := self._scheduler.schedule():
                    emitting, tokens = plan.emitting, pipeline.run(plan)
                    for chunk, one in zip(emitting, tokens, strict=True):
                        drawn[chunk.request.index].append(one)
                    self._scheduler.commit(plan, [one.token_id for one in tokens])
                    bar.update(len(requests) - self._scheduler.num_unfinished - bar.n)
        finally:
            if self._scheduler.num_unfinished:  # an exception, which may have cost the donated state
                self._scheduler.clear()
                pipeline.reset()
        return drawn


def _check_options(options: dict[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; options are {', '.join(names)}"
            raise TypeError(f"LLM has no option {name!r}{hint}")
