"""What the model wrote after the header of its answer, parsed by `deepseek_recipe` (spec: checkpoint 6).

The recipe finds the end of the reasoning, the content and the tool calls, also piece by piece. Added here are
the text of tokens (the recipe's own decoding loses all that it was pushed together with an unfinished character),
the end of a turn at EOS, which the recipe takes for content, and a look at what a malformed tool call left behind.

The recipe is lenient. Text between and behind tool calls is dropped, and so are newlines around reasoning and in
front of content; a block of calls that is never closed counts as closed; a call inside the reasoning ends it. Where
the answer was cut inside a marker, the half of it stays in the part before it.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from deepinfer_jax.text import detokenizer
from deepinfer_jax.text.chat import ChatEncoder, load_recipe

if TYPE_CHECKING:
    import deepseek_recipe

_ANY_TOOL = {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call of the model. Equal calls have the same name and arguments."""

    id: str = dataclasses.field(compare=False)  # random: it ties a result to this call, in a tool message
    name: str  # as the model wrote it, which may be no declared tool
    arguments: str  # a JSON object; something else where the call is malformed or cut

    @property
    def parsed(self) -> dict[str, Any] | None:
        """The arguments, None where they are no JSON object or name a parameter twice."""
        return _parse_object(self.arguments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParsedMessage:
    """A message of the model.

    A malformed or cut tool call raises nothing: `note` says what is wrong, `markup` has the text that the model wrote
    for its calls, and `tool_calls` what could be read of them.
    """

    reasoning: str | None  # without the think tokens; None where thinking is off
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    is_complete: bool  # the model ended its turn; otherwise it was cut, and so may be each of the parts
    note: str = ""
    markup: str = ""  # empty without a note

    def to_message(self) -> dict[str, Any]:
        """The Chat Completions message, to put behind the conversation for its next turn."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """A piece of a message. The pieces of a part join to that part."""

    part: Literal["reasoning", "content", "tool_call"]
    text: str  # of a tool call: a piece of its arguments, empty in the piece that begins it
    index: int = 0  # of the tool call
    id: str = ""  # of the tool call and, as its name, only in the piece that begins it
    name: str = ""


class OutputParser:
    """Reads one answer as it grows. request: of its prompt (`ChatPrompt.request`), or a `plain_request`."""

    def __init__(self, encoder: ChatEncoder, request: "deepseek_recipe.ConversationRequest") -> None:
        recipe = load_recipe()
        self._tokenizer = encoder.tokenizer
        self._is_thinking = request.conversation.thinking_mode
        options = request.parsing_options
        self._reads_calls, self._starts_in_calls = options.parse_tool_calls, options.starts_in_tool_calls
        self._call_opener = f"<{options.special_tokens.token(recipe.SpecialToken.Dsml)}"
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "", "")
        self._processor = recipe.StreamProcessor(generator, options)
        self._response = recipe.ChatCompletionResponse("", "", 0, 0, 0)
        self._unsettled = detokenizer.DetokenizerState()
        self._text = ""
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """Whether EOS was read; nothing behind it is."""
        return self._has_ended

    def push(self, token_ids: Iterable[int]) -> tuple[Delta, ...]:
        """What these ids settle, up to EOS; an unfinished character is held back."""
        if self._has_ended:
            return ()
        ids = list(token_ids)
        if self._tokenizer.eos_id in ids:
            self._has_ended = True
            ids = ids[: ids.index(self._tokenizer.eos_id)]
        text, self._unsettled = detokenizer.push(self._tokenizer, self._unsettled, ids)
        return self.push_text(text)

    def push_text(self, text: str) -> tuple[Delta, ...]:
        """What this text settles. Its end of a turn is told to `finish`, not spelled."""
        if not text:
            return ()
        self._text += text
        return self._deltas(self._processor.push(load_recipe().InferenceChunk.text(text)))

    def finish(self, *, has_ended: bool = False) -> tuple[tuple[Delta, ...], ParsedMessage]:
        """What was held back, and the whole message. has_ended: the model ended its turn, as an EOS read here says."""
        recipe = load_recipe()
        self._has_ended |= has_ended
        rest, self._unsettled = detokenizer.flush(self._tokenizer, self._unsettled)
        deltas = self.push_text(rest)
        reason = recipe.InferenceFinishReason.Stop if self._has_ended else recipe.InferenceFinishReason.Length
        deltas += self._deltas(self._processor.push(recipe.InferenceChunk.finish(reason)))
        deltas += self._deltas(self._processor.finish())
        return deltas, self._message()

    def _deltas(self, chunks: Sequence[Any]) -> tuple[Delta, ...]:
        deltas: list[Delta] = []
        for chunk in chunks:
            for choice in json.loads(chunk.to_json())["choices"]:
                deltas += _read_delta(choice["delta"])
            self._response.accumulate(chunk)
        return tuple(deltas)

    def _message(self) -> ParsedMessage:
        found = json.loads(self._response.to_json())["choices"][0]["message"]
        content, reasoning = found.get("content") or "", found.get("reasoning_content") or ""
        calls = tuple(
            ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in found.get("tool_calls") or ()
        )
        # The recipe leaves markup that it does not read where it is, so what is gone was read as calls.
        start = 0 if self._starts_in_calls else self._text.find(self._call_opener)
        was_read = self._reads_calls and start >= 0 and self._call_opener not in content + reasoning
        note = _note(calls, self._text[start:] if was_read else "")
        return ParsedMessage(
            reasoning=reasoning if self._is_thinking else None,
            content=content,
            tool_calls=calls,
            is_complete=self._has_ended,
            note=note,
            markup=self._text[start:] if note and start >= 0 else "",
        )


def parse_output(encoder: ChatEncoder, output: str | Sequence[int], *, thinking: bool) -> ParsedMessage:
    """The message of a whole answer to an ordinary prompt, one that may have declared tools.

    output: ids, or their text with the special tokens in it. `parse_answer` is for a prompt that opened a part itself.
    """
    return parse_answer(encoder, output, plain_request(encoder, thinking=thinking))


def parse_answer(
    encoder: ChatEncoder, output: str | Sequence[int], request: "deepseek_recipe.ConversationRequest"
) -> ParsedMessage:
    """The message of a whole answer to the prompt of this request (`ChatPrompt.request`).

    Tool calls are read only where tools were declared. A message that the prompt began (`prefix`) is not repeated.
    """
    parser = OutputParser(encoder, request)
    if not isinstance(output, str):
        parser.push(output)
        return parser.finish()[1]
    eos = encoder.tokenizer.token_text(encoder.tokenizer.eos_id) or ""
    text = output.removesuffix(eos)
    parser.push_text(text)
    return parser.finish(has_ended=text != output)[1]


def plain_request(encoder: ChatEncoder, *, thinking: bool) -> "deepseek_recipe.ConversationRequest":
    """The request of a prompt that ends with the header of the answer, and allows tool calls in it."""
    mode = "enabled" if thinking else "disabled"
    messages = [{"role": "user", "content": ""}]
    return encoder.convert({"messages": messages, "thinking": {"type": mode}, "tools": [_ANY_TOOL]})


def _read_delta(delta: dict[str, Any]) -> list[Delta]:
    found: list[Delta] = []
    if text := delta.get("reasoning_content"):
        found.append(Delta(part="reasoning", text=text))
    if text := delta.get("content"):
        found.append(Delta(part="content", text=text))
    for call in delta.get("tool_calls") or ():
        function = call["function"]
        found.append(
            Delta(
                part="tool_call",
                text=function.get("arguments") or "",
                index=call["index"],
                id=call.get("id") or "",
                name=function.get("name") or "",
            )
        )
    return found


def _note(calls: Sequence[ToolCall], markup: str) -> str:
    """What is wrong with the calls that this markup was read as."""
    if markup and not calls:
        return "the markup of tool calls holds no call"
    problems: list[str] = []
    for place, call in enumerate(calls):
        if not call.name:
            problems.append(f"tool call {place} has no name")
        if call.parsed is None:
            problems.append(
                f"the arguments of tool call {place} ({call.name!r}) are not one JSON object: {call.arguments}"
            )
    return "; ".join(problems)


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return members


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")
