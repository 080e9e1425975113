"""Chat messages to prompt ids, by calling `deepseek_recipe` (spec: checkpoint 6).

The recipe renders and encodes; added here are the integer effort and errors that say what to do.
Plain text inside messages is encoded without the added vocabulary, so it cannot forge a turn.
The way back, from what the model wrote to a message, is `text/chat_output.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deepinfer_jax.text.chat_images import StandIns
from deepinfer_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import deepseek_recipe

RECIPE_MODEL = "DeepSeek-V4.1-Flash"  # the recipe's own name of the prompt format
MIN_EFFORT, MAX_EFFORT = 1, 100
# The recipe takes names only: an integer is rendered as this name and its number replaced.
_SPLICE_NAME = "high"
_SPLICE_TEXT = "Reasoning Effort: {}"
_SPLICE_NUMBER = 75
_REQUIRED = ("Bos", "Eos", "System", "User", "Assistant", "ThinkingStart", "ThinkingEnd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A prompt, and the request that it came from, which says how the answer to it is to be read."""

    token_ids: tuple[int, ...]  # with one placeholder for each image
    images: tuple[object, ...] = dataclasses.field(default=(), repr=False, compare=False)  # in order of placeholders
    request: "deepseek_recipe.ConversationRequest" = dataclasses.field(repr=False, compare=False)

    @property
    def opens_reasoning(self) -> bool:
        """Whether the answer begins with reasoning."""
        stage = self.request.parsing_options.thinking_initial_stage
        return stage is not None and stage.starts_in_reasoning()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatEncoder:
    """The V4.1 prompt encoding of one tokenizer; build it once, it reads the tokenizer file."""

    tokenizer: Tokenizer
    think_end_id: int  # of the token that ends the reasoning
    options: "deepseek_recipe.ConversionOptions" = dataclasses.field(repr=False, compare=False)
    encoding: "deepseek_recipe.DeepseekV41Encoding" = dataclasses.field(repr=False, compare=False)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = True,
        effort: str | int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Prompt ids of Chat Completions messages, ending with the header of the answer.

        `effort` is a name of the recipe (low, high, xhigh, max; None is high) or an integer
        1..100, and needs `thinking`. Each image is one placeholder id: a part {"type": "image_url", "image_url":
        {"url": source}} with a source that `text/images.py` reads, a string being a data URL.
        """
        prompt = self.prepare(
            messages,
            thinking=thinking,
            effort=effort,
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
        )
        return list(prompt.token_ids)

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool = True,
        effort: str | int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """The same as `encode`, with the request that `chat_output` reads the answer by."""
        effort_name, effort_number = _split_effort(effort, thinking)
        stand_ins = StandIns()
        body: dict[str, Any] = {
            "messages": stand_ins.hide(messages),
            "thinking": {"type": "enabled" if thinking else "disabled"},
            "reasoning_effort": effort_name,
            "tools": None if tools is None else [dict(t) for t in tools],
            "tool_choice": tool_choice,
            "response_format": response_format,
        }
        request = self.convert({k: v for k, v in body.items() if v is not None})
        ids = self.encode_conversation(request.conversation, effort_number=effort_number)
        refuse_double_bos(self.tokenizer, ids)
        urls = [str(source.data_url) for message in request.conversation.messages for source in message.image_sources]
        return ChatPrompt(token_ids=tuple(ids), request=request, images=stand_ins.in_order(urls))

    def convert(self, body: Mapping[str, Any]) -> "deepseek_recipe.ConversationRequest":
        """The recipe's request for a Chat Completions body, whatever model name the body has."""
        recipe = load_recipe()
        try:
            request = recipe.ChatCompletionRequest({**body, "model": RECIPE_MODEL})
            return request.convert(self.options)
        except (ValueError, TypeError, recipe.ConversionError) as error:
            raise ValueError(f"deepseek_recipe refuses the chat request: {error}; correct that part of it") from error

    def encode_conversation(
        self, conversation: "deepseek_recipe.Conversation", *, effort_number: int | None = None
    ) -> list[int]:
        """Prompt ids of a recipe conversation; a number needs one converted at effort high."""
        try:
            ids = self.encoding.encode(conversation)
        except RuntimeError as error:
            raise ValueError(
                f"deepseek_recipe cannot encode the chat with {self.tokenizer.path}: {error}; "
                "give the V4.1 tokenizer.json or leave out the part that needs the token"
            ) from error
        return ids if effort_number is None else splice_effort(self.tokenizer, ids, effort_number)


def load_chat_encoder(tokenizer: Tokenizer) -> ChatEncoder:
    """The chat encoder of a tokenizer.

    Raises ImportError without `deepseek_recipe`, ValueError when the tokenizer lacks a token that
    every V4.1 prompt needs.
    """
    recipe = load_recipe()
    spellings = {name: getattr(recipe.SpecialToken, name).default_str() for name in _REQUIRED}
    added = {str(t) for t in tokenizer.backend.get_added_tokens_decoder().values()}
    missing = [text for text in spellings.values() if text not in added]
    if missing:
        raise ValueError(
            f"{tokenizer.path} has no special token {', '.join(missing)}, needed by V4.1 chat "
            "prompts (a V4 tokenizer has no <｜System｜>); give the V4.1 tokenizer.json, or pass "
            "ready token ids or plain text instead of chat messages"
        )
    image = None if tokenizer.image_id is None else tokenizer.token_text(tokenizer.image_id)
    special = recipe.SpecialTokens(image=image)
    encoding = recipe.DeepseekV41Encoding().with_special_tokens(special)
    (think_end_id,) = tokenizer.encode_bare(spellings["ThinkingEnd"])
    return ChatEncoder(
        tokenizer=tokenizer,
        think_end_id=think_end_id,
        options=recipe.ConversionOptions().with_special_tokens(special),
        encoding=encoding.with_tokenizer(recipe.Tokenizer.from_file(str(tokenizer.path))),
    )


def refuse_double_bos(tokenizer: Tokenizer, token_ids: Sequence[int]) -> None:
    """Raises ValueError for a prompt that begins with BOS twice, as a rendered prompt does that got another one."""
    if list(token_ids[:2]) == [tokenizer.bos_id, tokenizer.bos_id]:
        raise ValueError(
            f"the prompt begins with BOS (id {tokenizer.bos_id}) twice; leave one out: chat prompts bring their own, "
            "and text that starts with its spelling gets no second one"
        )


def splice_effort(tokenizer: Tokenizer, ids: Sequence[int], effort_number: int) -> list[int]:
    """Ids of a prompt encoded at effort high, with its first effort number replaced."""
    _check_number(effort_number)
    old = tokenizer.encode_bare(_SPLICE_TEXT.format(_SPLICE_NUMBER))
    new = tokenizer.encode_bare(_SPLICE_TEXT.format(effort_number))
    for start in range(len(ids) - len(old) + 1):
        if list(ids[start : start + len(old)]) == old:
            return [*ids[:start], *new, *ids[start + len(old) :]]
    raise ValueError(
        f"the prompt does not hold {_SPLICE_TEXT.format(_SPLICE_NUMBER)!r}, so effort "
        f"{effort_number} has no place; encode it with thinking on and effort {_SPLICE_NAME!r}"
    )


def _split_effort(effort: str | int | None, thinking: bool) -> tuple[str | None, int | None]:
    """Name for the recipe, and the number to splice in afterwards."""
    if effort is None:
        return None, None
    if not thinking:
        raise ValueError(f"effort={effort!r} needs thinking=True; leave effort out or turn thinking on")
    if isinstance(effort, str):
        if effort == "none":
            raise ValueError("effort='none' means no thinking; set thinking=False and leave effort out")
        return effort, None
    _check_number(effort)
    return _SPLICE_NAME, effort


def _check_number(effort: int) -> None:
    if isinstance(effort, bool) or not MIN_EFFORT <= effort <= MAX_EFFORT:
        raise ValueError(
            f"effort={effort!r} is not allowed; give an integer {MIN_EFFORT}..{MAX_EFFORT} "
            "or one of 'low', 'high', 'xhigh', 'max'"
        )


def load_recipe() -> ModuleType:
    """The package `deepseek_recipe`. Raises ImportError that says what to install."""
    try:
        import deepseek_recipe
    except ImportError as error:
        raise ImportError(
            "chat prompts need the package deepseek-recipe, which cannot be imported "
            f"({error}); install deepseek-recipe 0.2 or pass token ids or plain text"
        ) from error
    return deepseek_recipe
