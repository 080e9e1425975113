"""`LLM`: prompts in, texts or token objects out (spec: interface 5)."""

import contextlib
import dataclasses
import difflib
import os
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

from deepinfer_jax.config.args import EngineArgs
from deepinfer_jax.engine import intake
from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.engine.outputs import RequestOutput, fold_end
from deepinfer_jax.scheduler.sequence import Sequence
from deepinfer_jax.text.tokenizer import Tokenizer

# Offline use differs from a service in these defaults.
_OFFLINE_DEFAULTS: dict[str, Any] = {
    "disable_log_stats": True,
    "stop_preempted_request": False,
    "offline_inference": True,
}


_ID_PREFIX = "generate-"  # of requests that `generate` makes, beside those that users add to the engine


class GenerationError(RuntimeError):
    """Some requests failed while they ran. `results` holds the outputs of all, in order."""

    def __init__(self, message: str, results: list[list[RequestOutput]]) -> None:
        super().__init__(message)
        self.results = results


class LLM:
    """A model that generates for lists of prompts.

    model: a directory in the released format, a Hugging Face id, or a config file (random weights of that shape);
        None is DEEPINFER_HF_MODEL_DIR, or else the embedded tiny model.
    tokenizer: another directory or file than the model's own.
    seed: sampling seeds that are not given follow from it and from a prompt's place in its call, so that a call can
        be repeated; `SamplingParams.seq_seed` is the seed of one request. None: another seed for every request.
    decode_sequence: True returns texts, False a list of `RequestOutput` for each prompt.
    Other keywords are those of `EngineArgs`. Everything that can fail fails here: the model is loaded, and every
    step compiled, unless DEEPINFER_ENFORCE_EAGER leaves that to the calls that need them.
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
        self._decode_sequence = decode_sequence
        self._engine: LLMEngine | None = LLMEngine.from_engine_args(args)
        if decode_sequence and self._engine.tokenizer is None:
            self.close()
            raise ValueError(
                "decode_sequence=True needs a tokenizer, and this model has none; "
                "give tokenizer=, or decode_sequence=False for token ids"
            )
        self._num_requests = 0

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
        argument is checked, and after an exception the engine can be used again. A request that fails while it runs
        has a finish reason that says so; where texts are wanted, `GenerationError` is raised once all have ended.
        """
        engine = self.engine
        sequences = self._add(prompts, prompt_token_ids, sampling_params, multi_modal_data)
        outputs: dict[str, list[RequestOutput]] = {sequence.request_id: [] for sequence in sequences}
        bar = tqdm(total=len(outputs), desc="generating", unit="prompt", disable=None if use_tqdm else True)
        with self._owning(outputs), bar:
            while any(not found or not found[-1].finished for found in outputs.values()):
                for output in engine.step():
                    if output.request_id in outputs:
                        outputs[output.request_id].append(output)
                        bar.update(output.finished)
        results = [fold_end(found) for found in outputs.values()]
        if not self._decode_sequence:
            return results
        _raise_failures(results, sequences)
        tokenizer = self.get_tokenizer()
        return [tokenizer.decode(sequence.output) for sequence in sequences]

    def stream(
        self,
        prompts: intake.Prompts = None,
        sampling_params: intake.ParamsArgument = None,
        prompt_token_ids: intake.TokenLists = None,
        multi_modal_data: Any = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """The outputs of `generate` as they come: (place of the prompt, output).

        The arguments are checked now, the requests run while the iterator is read, and closing it aborts them.
        """
        sequences = self._add(prompts, prompt_token_ids, sampling_params, multi_modal_data)
        return self._stream({sequence.request_id: place for place, sequence in enumerate(sequences)})

    def _stream(self, places: dict[str, int]) -> Iterator[tuple[int, RequestOutput]]:
        num_left = len(places)
        with self._owning(places):
            while num_left:
                for output in self.engine.step():
                    if output.request_id in places:
                        num_left -= output.finished
                        yield places[output.request_id], output

    def _add(
        self,
        prompts: intake.Prompts,
        prompt_token_ids: intake.TokenLists,
        sampling_params: intake.ParamsArgument,
        multi_modal_data: Any,
    ) -> list[Sequence]:
        """Checks every argument, then queues the requests."""
        engine = self.engine
        tasks = intake.read_tasks(
            prompts,
            prompt_token_ids,
            sampling_params,
            multi_modal_data,
            tokenizer=engine.tokenizer,
            model=engine.model,
            max_len=engine.max_prompt_len,
            has_replay=engine.runtime.replay_mode != "off",
        )
        first_id = self._num_requests
        self._num_requests += len(tasks)
        return [
            engine.add_task(f"{_ID_PREFIX}{first_id + index}", task, index=index) for index, task in enumerate(tasks)
        ]

    @contextlib.contextmanager
    def _owning(self, request_ids: Iterable[str]) -> Iterator[None]:
        """Whatever happens inside, these requests are gone afterwards."""
        try:
            yield
        finally:
            if self._engine is not None and self._engine.abort_request(request_ids)[0]:
                self._engine.flush_inflight_reqs()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError for a model that has none."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ValueError("this model has no tokenizer; give tokenizer= to LLM")
        return tokenizer

    @property
    def engine(self) -> LLMEngine:
        """The engine, to look inside. Raises ValueError once the LLM is closed."""
        if self._engine is None:
            raise ValueError("this LLM is closed; make a new one")
        return self._engine

    @property
    def computed_rows(self) -> dict[str, int]:
        """Rows that the encoder and the decoder layers have computed since the start, padding included."""
        pipeline = self.engine.pipeline
        return {"encoder": pipeline.num_encoder_rows, "decoder": pipeline.num_decoder_rows}

    def stats(self) -> dict[str, Any]:
        """What the engine has done so far, and how things stand (`LLMEngine.stats`)."""
        return self.engine.stats()

    def close(self) -> None:
        """Frees the model and the caches; `generate` cannot be used afterwards."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _raise_failures(results: list[list[RequestOutput]], sequences: list[Sequence]) -> None:
    """Raises for requests that neither stopped nor reached their length."""
    failed = [place for place, outputs in enumerate(results) if outputs[-1].finish_reason not in ("stop", "length")]
    if failed:
        reasons = ", ".join(f"prompt {place}: {results[place][-1].finish_reason}" for place in failed)
        error = GenerationError(f"{len(failed)} of {len(results)} requests failed ({reasons})", results)
        raise error from sequences[failed[0]].error


def _check_options(options: dict[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; options are {', '.join(names)}"
            raise TypeError(f"LLM has no option {name!r}{hint}")
