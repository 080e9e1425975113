"""`LLM`: prompts in, texts or token objects out (spec: interface 5)."""

import contextlib
import dataclasses
import difflib
import os
from collections import abc
from collections.abc import Generator, Iterable, Iterator
from typing import Any, cast

from tqdm import tqdm

from deepinfer_jax.config.args import EngineArgs
from deepinfer_jax.engine import intake
from deepinfer_jax.engine.chat import ChatCompletion, Conversations, chat
from deepinfer_jax.engine.engine import LLMEngine
from deepinfer_jax.engine.outputs import RequestOutput, fold_end
from deepinfer_jax.sampling.grammar import GrammarTicket, GrammarTimeout
from deepinfer_jax.sampling.params import SamplingParams
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
        on_error: str = "raise",
    ) -> list[Any]:
        """One result for each prompt, in order: a text, or the list of its `RequestOutput`s (decode_sequence=False).

        prompts: a string or a list of strings. prompt_token_ids: lists of ids; with both given, the ids are used.
        sampling_params: one for all prompts, or one for each; None is `SamplingParams()`. With n > 1 a prompt's result
        is the list of its n answers. multi_modal_data: {"images": [...]} where prompts is a string, else a list with
        such a dict, or None, for each prompt: one image for each image token, in order; a Pillow image, an array, a
        path, the bytes of a file, or a data URL (docs/vision.md).

        Nothing runs before every argument is checked, grammars and images included, and after an exception the engine
        can be used again. on_error: "finish" lets a request whose grammar is refused end with its finish reason
        instead. A request that fails while it runs has a finish reason that says so; where texts are wanted,
        `GenerationError` is raised once all have ended.
        """
        outbox: list[RequestOutput] = []
        calls = self._add(prompts, prompt_token_ids, sampling_params, multi_modal_data, outbox, on_error=on_error)
        results = self._run([sequence for _, sequence in calls], outbox, use_tqdm=use_tqdm)
        if self._decode_sequence:
            _raise_failures(results, [sequence for _, sequence in calls])
            texts = [self._text_of(sequence, outputs) for (_, sequence), outputs in zip(calls, results, strict=True)]
            return _by_prompt(calls, texts)
        return _by_prompt(calls, results)

    def _run(
        self, sequences: list[Sequence], outbox: list[RequestOutput], *, use_tqdm: bool
    ) -> list[list[RequestOutput]]:
        """The outputs of each, once all have ended."""
        outputs: dict[str, list[RequestOutput]] = {sequence.request_id: [] for sequence in sequences}
        num_left = len(outputs)
        bar = tqdm(total=num_left, desc="generating", unit="answer", disable=None if use_tqdm else True)
        with self._owning(outputs), bar:
            while num_left:
                for output in self._advance(outbox):
                    outputs[output.request_id].append(output)
                    num_left -= output.finished
                    bar.update(output.finished)
        return [fold_end(found) for found in outputs.values()]

    def _advance(self, outbox: list[RequestOutput]) -> list[RequestOutput]:
        """What came for a call; a step is made only where nothing waits."""
        if not outbox:
            self.engine.advance()
        outputs = outbox.copy()
        outbox.clear()
        return outputs

    def _text_of(self, sequence: Sequence, outputs: list[RequestOutput]) -> str:
        """The whole text; a stop string is cut from it, so it is that of the outputs then."""
        if sequence.options.params.stop_strings:
            return "".join(output.text for output in outputs)
        return self.get_tokenizer().decode(sequence.output)

    def stream(
        self,
        prompts: intake.Prompts = None,
        sampling_params: intake.ParamsArgument = None,
        prompt_token_ids: intake.TokenLists = None,
        multi_modal_data: Any = None,
    ) -> Generator[tuple[int, RequestOutput]]:
        """The outputs of `generate` as they come: (place of the prompt, output).

        The arguments are checked now, the requests run while the iterator is read, and closing it aborts them. With
        n > 1 the answers of a prompt are told apart by their `request_id`.
        """
        outbox: list[RequestOutput] = []
        calls = self._add(prompts, prompt_token_ids, sampling_params, multi_modal_data, outbox)
        stream = self._stream({sequence.request_id: place for place, sequence in calls}, outbox)
        next(stream)  # from here on closing it aborts, read or not
        return cast(Generator[tuple[int, RequestOutput]], stream)

    def chat(
        self,
        messages: Conversations,
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[ChatCompletion]:
        """Answers to one conversation or several; options are those of `engine.chat.chat`."""
        return chat(self, messages, sampling_params, **options)

    def _stream(
        self, places: dict[str, int], outbox: list[RequestOutput]
    ) -> Generator[tuple[int, RequestOutput] | None]:
        num_left = len(places)
        with self._owning(places):
            yield None
            while num_left:
                for output in self._advance(outbox):
                    num_left -= output.finished
                    yield places[output.request_id], output

    def _add(
        self,
        prompts: intake.Prompts,
        prompt_token_ids: intake.TokenLists,
        sampling_params: intake.ParamsArgument,
        multi_modal_data: Any,
        outbox: list[RequestOutput],
        *,
        on_error: str = "raise",
    ) -> list[tuple[int, Sequence]]:
        """Checks every argument, then queues the requests: (place of the prompt, request), n for each prompt.

        outbox: gets their outputs.
        """
        if on_error not in ("raise", "finish"):
            raise ValueError(f"on_error={on_error!r} is unknown; choose 'raise' or 'finish'")
        engine = self.engine
        tasks = engine.intake.read_tasks(prompts, prompt_token_ids, sampling_params, multi_modal_data)
        tickets = _compile_all(engine, tasks, raises=on_error == "raise")
        calls: list[tuple[int, Sequence]] = []
        try:
            for place, (task, ticket) in enumerate(zip(tasks, tickets, strict=True)):
                for sample in range(task.params.n):
                    sequence = engine.add_task(
                        self._new_id(), task, index=place, sample=sample, ticket=ticket, outbox=outbox
                    )
                    calls.append((place, sequence))
        except BaseException:
            engine.abort_request(sequence.request_id for _, sequence in calls)
            raise
        return calls

    def _new_id(self) -> str:
        """An id that no unfinished request has."""
        while True:
            name = f"{_ID_PREFIX}{self._num_requests}"
            self._num_requests += 1
            if not self.engine.is_known(name):
                return name

    @contextlib.contextmanager
    def _owning(self, request_ids: Iterable[str]) -> Iterator[None]:
        """Whatever happens inside, these requests are gone afterwards."""
        try:
            yield
        finally:
            if self._engine is not None:
                self._engine.abort_request(request_ids)
                self._engine.settle()

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


def _compile_all(engine: LLMEngine, tasks: list[intake.Task], *, raises: bool) -> list[GrammarTicket | None]:
    """The grammars of all requests, compiled at the same time. Raises ValueError for the first that is refused."""
    tickets = []
    for place, task in enumerate(tasks):
        try:
            tickets.append(engine.compile_grammar(task.params))
        except ValueError as error:
            raise ValueError(f"prompt {place}: {error}") from error
    for place, ticket in enumerate(tickets):
        if ticket is not None and raises:
            try:
                ticket.result()
            except (ValueError, GrammarTimeout) as error:
                raise ValueError(f"prompt {place}: so_args: {error}") from error
    return tickets


def _by_prompt(calls: list[tuple[int, Sequence]], results: list[Any]) -> list[Any]:
    """One entry for each prompt: its result, or the list of its n results."""
    grouped: dict[int, list[Any]] = {}
    for (place, _), result in zip(calls, results, strict=True):
        grouped.setdefault(place, []).append(result)
    has_several = {place: sequence.options.params.n > 1 for place, sequence in calls}
    return [found if has_several[place] else found[0] for place, found in grouped.items()]


def _raise_failures(results: list[list[RequestOutput]], sequences: list[Sequence]) -> None:
    """Raises for requests that neither stopped nor reached their length."""
    failed = [place for place, outputs in enumerate(results) if outputs[-1].finish_reason not in ("stop", "length")]
    if failed:
        reasons = ", ".join(f"answer {place}: {results[place][-1].finish_reason}" for place in failed)
        error = GenerationError(f"{len(failed)} of {len(results)} requests failed ({reasons})", results)
        raise error from sequences[failed[0]].error


def _check_options(options: dict[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; options are {', '.join(names)}"
            raise TypeError(f"LLM has no option {name!r}{hint}")
