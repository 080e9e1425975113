"""From a request to a grammar that the backend (llguidance) enforces, or a ValueError that says why not."""

import dataclasses
import json
from typing import TYPE_CHECKING

from deepinfer_jax.sampling.grammar import ebnf_lark, json_schema
from deepinfer_jax.sampling.grammar.emit import emit_regex
from deepinfer_jax.sampling.grammar.json_keywords import SchemaError
from deepinfer_jax.sampling.grammar.matcher import Matcher
from deepinfer_jax.sampling.grammar.nodes import EMPTY, NOTHING, prune
from deepinfer_jax.sampling.grammar.regex_syntax import parse_regex, resolve_anchors
from deepinfer_jax.sampling.grammar.request import GrammarRequest
from deepinfer_jax.sampling.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import llguidance
    from llguidance._lib import JsonCompileOptions

DEFAULT_WHITESPACE = 8

# Work of the backend for one mask. Above its defaults, which end the requests of useful recursive grammars and still
# allow masks of 100 ms: a slow mask is better than an ended request, and `MaskJobs` keeps it from others.
_STEP_LEXER_FUEL = 2_000_000
_STEP_MAX_ITEMS = 1_000_000
# An estimate for the cache: the backend does not tell what a compiled grammar holds.
_BASE_BYTES = 64 * 1024
_BYTES_PER_CHARACTER = 64

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Part of a backend message -> keywords that can cause it.
_CAUSES = (
    ("min/maxProperties", ("minProperties", "maxProperties")),
    ("patternPropert", ("patternProperties",)),
    ("circular references", ("$ref",)),
    ("Regex is empty", ("pattern", "format", "minLength", "maxLength")),
    ("regex is empty", ("pattern", "format", "minLength", "maxLength")),
    ("multiple", ("multipleOf", *_BOUNDS)),
    ("inimum", (*_BOUNDS, "const", "enum")),
    ("integer", (*_BOUNDS, "multipleOf", "const", "enum")),
    ("required property", ("required", "const", "enum")),
    ("maxProperties", ("maxProperties", "required")),
    ("incompatible types", ("type", "allOf", "$ref", "anyOf")),
    ("Length", ("minLength", "maxLength")),
    ("Items", ("minItems", "maxItems", "items", "prefixItems")),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
    """A compiled grammar. It is shared by requests and never changes; each request takes a `matcher`."""

    request: GrammarRequest
    vocabulary: Vocabulary
    text: str = dataclasses.field(repr=False)  # what the backend was given
    may_be_slow: bool  # whether a mask can take longer than a step
    size_bytes: int  # estimate of the memory that it holds
    template: "llguidance.LLMatcher" = dataclasses.field(repr=False, compare=False)

    def matcher(self) -> Matcher:
        """A matcher at the first output position."""
        return Matcher(
            backend=self._own_backend() if self.may_be_slow else self.template.deep_copy(),
            vocabulary=self.vocabulary,
            trigger=self.request.trigger_token_ids,
            bound_id=self.request.bound_token_id,
            make_backend=self._own_backend if self.may_be_slow else None,
        )

    def _own_backend(self) -> "llguidance.LLMatcher":
        """A backend that shares nothing.

        Copies of the template share the states of the lexer, and one of them that advances waits for the mask of
        another with the interpreter lock held.
        """
        return _backend(self.text, self.vocabulary)

    def for_request(self, request: GrammarRequest) -> "Grammar":
        """The same compiled schema with another request's trigger and bound."""
        check_ids(request, self.vocabulary.vocab_size)
        return dataclasses.replace(self, request=request)


def compile_grammar(
    request: GrammarRequest, vocabulary: Vocabulary, *, whitespace: int = DEFAULT_WHITESPACE
) -> Grammar:
    """The grammar of a request; ValueError names the construct that is wrong or not enforced.

    `whitespace` is the longest run of white space between the tokens of a JSON text; 0 allows none.
    """
    if whitespace < 0:
        raise ValueError(
            f"whitespace={whitespace} must be 0 or more characters; correct DEEPINFER_JAX_GRAMMAR_WHITESPACE"
        )
    check_ids(request, vocabulary.vocab_size)
    rewritten, may_be_slow = None, False
    try:
        if request.schema_type == "json":
            rewritten = json_schema.rewrite_schema(request.schema)
            text = _json_grammar(rewritten, whitespace)
        elif request.schema_type == "regex":
            text = _regex_grammar(request.schema)
        else:
            lark = ebnf_lark.translate(request.schema)
            text, may_be_slow = _lark_grammar(lark.text), lark.is_recursive
    except RecursionError as error:
        raise ValueError(f"the {request.schema_type} grammar is nested too deeply; flatten it") from error
    template = _build(text, vocabulary, rewritten)
    size = _BASE_BYTES + _BYTES_PER_CHARACTER * len(text)
    return Grammar(
        request=request,
        vocabulary=vocabulary,
        text=text,
        may_be_slow=may_be_slow,
        size_bytes=size,
        template=template,
    )


def check_ids(request: GrammarRequest, vocab_size: int) -> None:
    """Raises ValueError for trigger and bound ids that a model of so many ids cannot emit."""
    named = [("trigger_token_ids", token_id) for token_id in request.trigger_token_ids]
    if request.bound_token_id is not None:
        named.append(("bound_token_id", request.bound_token_id))
    for name, token_id in named:
        if token_id >= vocab_size:
            raise ValueError(
                f"so_args[{name!r}] holds {token_id}, and the model's ids are 0..{vocab_size - 1}; "
                "give ids of this model"
            )


def _json_grammar(rewritten: json_schema.RewrittenSchema, whitespace: int) -> str:
    import llguidance

    options: JsonCompileOptions = {
        # No \uXXXX: with it the name of an undeclared property could spell a declared one.
        "json_allowed_escapes": 'nrbtf\\"',
        "whitespace_flexible": False,
    }
    if whitespace:
        options["whitespace_pattern"] = rf"[\x20\x0A\x0D\x09]{{1,{whitespace}}}"
    schema = json.dumps(rewritten.schema, ensure_ascii=False)
    return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _regex_grammar(pattern: str) -> str:
    import llguidance

    node = prune(resolve_anchors(parse_regex(pattern), pattern, filler=EMPTY))
    if node == NOTHING:
        raise ValueError(f"regex {pattern!r}: no text matches; correct the pattern")
    return llguidance.LLMatcher.grammar_from_regex(emit_regex(node))


def _lark_grammar(text: str) -> str:
    import llguidance

    return llguidance.LLMatcher.grammar_from_lark(text)


def _backend(text: str, vocabulary: Vocabulary) -> "llguidance.LLMatcher":
    """A matcher of the backend at the beginning; its `is_error` says whether the text was refused."""
    import llguidance

    limits = llguidance.LLParserLimits(
        step_lexer_fuel=_STEP_LEXER_FUEL, step_max_items=_STEP_MAX_ITEMS, verbose_errors=False
    )
    return llguidance.LLMatcher(vocabulary.backend, text, log_level=0, limits=limits)


def _build(text: str, vocabulary: Vocabulary, rewritten: json_schema.RewrittenSchema | None) -> "llguidance.LLMatcher":
    matcher = _backend(text, vocabulary)
    if matcher.is_error():
        raise _explain(matcher.get_error(), rewritten)
    if not matcher.is_accepting() and not any(matcher.compute_bitmask()):
        if matcher.is_error():
            raise _explain(matcher.get_error(), rewritten)
        raise ValueError("the grammar has no finite sentence that the tokenizer can spell; correct it")
    return matcher


def _explain(message: str, rewritten: json_schema.RewrittenSchema | None) -> ValueError:
    """The backend's refusal in the words of the given schema."""
    message = message.split("\n<state>")[0].strip()
    if len(message) > 400:
        message = message[:400] + "..."
    if rewritten is None:
        return ValueError(f"the grammar is not enforced by the backend: {message}; make it smaller or simpler")
    for name, pointer in rewritten.definitions.items():
        message = message.replace(f"#/$defs/{name}", f"#{pointer}")
    keywords = next((causes for part, causes in _CAUSES if part in message), ())
    places = [f"#{place}" for keyword in keywords for place in rewritten.places.get(keyword, ())]
    if not places:
        places = [f"#{place}" for used in rewritten.places.values() for place in used]
    where = f" (look at {', '.join(places[:8])})" if places else ""
    return SchemaError(f"JSON schema: it cannot be enforced{where}: {message}; change the schema there")
