"""Conversations in, parsed messages out: `LLM.chat` (spec: checkpoint 6)."""

import contextlib
import dataclasses
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from tqdm import tqdm

from deepinfer_jax.engine.outputs import RequestOutput, fold_end
from deepinfer_jax.sampling.params import SamplingParams
from deepinfer_jax.text.chat import ChatEncoder, ChatPrompt, load_chat_encoder
from deepinfer_jax.text.chat_output import OutputParser, ParsedMessage
from deepinfer_jax.text.tokenizer import Tokenizer

type Conversation = Sequence[Mapping[str, Any]]
type Conversations = Conversation | Sequence[Conversation]


@runtime_checkable
class StreamsTokens(Protocol):
    """What `chat` needs of an `LLM`."""

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        ...

    def stream(self, *, sampling_params: Any, prompt_token_ids: Any, multi_modal_data: Any) -> Any:
        """(place of the prompt, output) as they come; the arguments are checked before anything is queued."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatCompletion:
    """The answer to one conversation."""

    message: ParsedMessage
    outputs: list[RequestOutput]  # its tokens, as `generate` gives them with decode_sequence=False
    finish_reason: str  # as in the last output, but "tool_calls" where the model ended its turn with calls
    prompt_len: int  # tokens, those of images included


# Building one reads the tokenizer file.
_encoders: "weakref.WeakKeyDictionary[Any, ChatEncoder]" = weakref.WeakKeyDictionary()


def chat(
    llm: StreamsTokens,
    messages: Conversations,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    thinking: bool = True,
    effort: str | int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    use_tqdm: bool = True,
) -> list[ChatCompletion]:
    """One completion for each conversation, in order.

    messages: a conversation, which is a list of Chat Completions messages, or a list of conversations. Images are
        parts {"type": "image_url", "image_url": {"url": source}}: a data URL, and beyond Chat Completions a Pillow
        image, an array, bytes, or a `pathlib.Path`.
    sampling_params: one for all conversations, or one for each; None is `SamplingParams()`.
    thinking: whether the model reasons before it answers. effort: how much, "low", "high" (as None), "xhigh", "max",
        or a number 1..100.
    tools, tool_choice: functions that the model may call, and whether it must; calls are parsed, never made.
    response_format: what the content must be, as in Chat Completions. The model is told, and JSON and regular
        expressions are enforced behind the reasoning, as `SamplingParams.so_args` would.

    Nothing runs before every argument is checked. What went wrong while a request ran is its finish reason, and a
    malformed tool call is a `note` of its message: neither raises.
    """
    conversations = _given_conversations(messages)
    encoder = _encoder_of(llm)
    prompts = []
    for index, conversation in enumerate(conversations):
        try:
            prompt = encoder.prepare(
                conversation,
                thinking=thinking,
                effort=effort,
                tools=tools,
                tool_choice=tool_choice,
                response_format=response_format,
            )
        except ValueError as error:
            raise ValueError(f"conversation {index}: {error}") from error
        prompts.append(prompt)
    params = _given_params(sampling_params, [_format_args(encoder, prompt) for prompt in prompts])
    results = _run(llm, prompts, params, use_tqdm=use_tqdm)
    return [_completion(encoder, prompt, outputs) for prompt, outputs in zip(prompts, results, strict=True)]


def _run(
    llm: StreamsTokens, prompts: Sequence[ChatPrompt], params: Any, *, use_tqdm: bool
) -> list[list[RequestOutput]]:
    results: list[list[RequestOutput]] = [[] for _ in prompts]
    stream = llm.stream(
        sampling_params=params,
        prompt_token_ids=[prompt.token_ids for prompt in prompts],
        multi_modal_data=[{"images": prompt.images} for prompt in prompts],
    )
    bar = tqdm(total=len(prompts), desc="chatting", unit="answer", disable=None if use_tqdm else True)
    # Closed at once, also by an interrupt: that takes unfinished requests out of the engine.
    with contextlib.closing(cast(Generator[tuple[int, RequestOutput]], stream)) as outputs, bar:
        for place, output in outputs:
            results[place].append(output)
            bar.update(output.finished)
    return [fold_end(found) for found in results]


def _completion(encoder: ChatEncoder, prompt: ChatPrompt, outputs: list[RequestOutput]) -> ChatCompletion:
    """Parses the texts of the outputs, which a stop string has cut where it should, up to the EOS token."""
    eos_id = encoder.tokenizer.eos_id
    end = next((place for place, output in enumerate(outputs) if output.token_id == eos_id), None)
    texts = [output.text for output in (outputs if end is None else outputs[: end + 1])]
    if end is not None:
        texts[end] = texts[end].removesuffix(encoder.tokenizer.decode([eos_id]))
    parser = OutputParser(encoder, prompt.request)
    parser.push_text("".join(texts))
    message = parser.finish(has_ended=end is not None)[1]
    finish_reason = outputs[-1].finish_reason
    if finish_reason == "stop" and message.is_complete and message.tool_calls:
        finish_reason = "tool_calls"
    return ChatCompletion(
        message=message, outputs=outputs, finish_reason=finish_reason, prompt_len=outputs[-1].prompt_len
    )


def _given_conversations(messages: Any) -> Sequence[Conversation]:
    entries = _as_list("messages", messages)
    if not entries:
        raise ValueError("messages is empty; give a conversation with at least one message")
    if isinstance(entries[0], Mapping):
        entries = [entries]
    for index, conversation in enumerate(entries):
        for place, message in enumerate(_as_list(f"conversation {index}", conversation)):
            if not isinstance(message, Mapping):
                raise TypeError(
                    f"message {place} of conversation {index} is of type {type(message).__name__}; "
                    'give a dict with "role" and "content"'
                )
    return entries


def _as_list(name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(
            f"{name} is of type {type(value).__name__}; give a list of messages, each a dict, or a list of such lists"
        )
    return value


def _encoder_of(llm: StreamsTokens) -> ChatEncoder:
    if llm not in _encoders:
        _encoders[llm] = load_chat_encoder(llm.get_tokenizer())
    return _encoders[llm]


def _format_args(encoder: ChatEncoder, prompt: ChatPrompt) -> dict[str, Any] | None:
    """The `so_args` that enforce the response format of a prompt, None where it asks for none."""
    constraint = prompt.request.inference_options.output_constraint
    if constraint is None or constraint.kind not in ("json", "regex"):
        return None
    # "json" without a schema is the format json_object.
    args: dict[str, Any] = {"schema_type": constraint.kind, "schema": constraint.schema or '{"type": "object"}'}
    if prompt.opens_reasoning:
        args["trigger_token_ids"] = [encoder.think_end_id]
    return args


def _given_params(given: Any, formats: Sequence[dict[str, Any] | None]) -> Any:
    """The same parameters with the response formats in them; a wrong type or number is left for `stream` to refuse."""
    if given is None or isinstance(given, SamplingParams):
        given = [given or SamplingParams()] * len(formats)
    if not isinstance(given, list | tuple) or len(given) != len(formats):
        return given
    return [
        _ready_params(params, index, format_args) if isinstance(params, SamplingParams) else params
        for index, (params, format_args) in enumerate(zip(given, formats, strict=True))
    ]


def _ready_params(params: SamplingParams, index: int, format_args: dict[str, Any] | None) -> SamplingParams:
    if params.n != 1:
        raise ValueError(
            f"sampling_params of conversation {index} has n={params.n}, and a chat gives one answer to a conversation; "
            "leave n at 1 and give the conversation that many times"
        )
    if format_args is None:
        return params
    if params.so_args is not None:
        raise ValueError(
            f"sampling_params of conversation {index} has so_args, and response_format was given; give one of the two"
        )
    return dataclasses.replace(params, so_args=format_args)
