"""`chat` over a stand-in that streams scripted answers, and once over a real engine."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine.chat import _given_conversations, chat
from deepinfer_jax.engine.outputs import Drawn, Emitter, RequestOutput
from deepinfer_jax.sampling.params import NO_TOKEN
from deepinfer_jax.testing import tiny
from deepinfer_jax.text import tiny_tokenizer
from deepinfer_jax.text.chat import load_chat_encoder
from deepinfer_jax.text.chat_output import ToolCall
from deepinfer_jax.text.tokenizer import Tokenizer
from tests.engine.pictures import picture
from tests.text.test_chat import EOS, EXTRA, HELLO, TOOL, tiny_chat_tokenizer
from tests.text.test_chat_output import CALL, CALL_ARGUMENTS

SYSTEM = {"role": "system", "content": "Answer in json."}
WEB_IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


class ScriptedLLM:
    """Streams the ids of these answers, one of each in turn; an answer without EOS ends for the given reason."""

    def __init__(self, tokenizer: Tokenizer, answers: Sequence[str], *, cut_reason: str = "length") -> None:
        self._tokenizer, self._answers, self._cut_reason = tokenizer, answers, cut_reason
        self.num_tokenizers = 0
        self.prompts: list[tuple[int, ...]] = []
        self.params: list[SamplingParams] = []
        self.images: list[tuple[object, ...]] = []
        self.was_closed = False

    def get_tokenizer(self) -> Tokenizer:
        self.num_tokenizers += 1
        return self._tokenizer

    def stream(self, *, sampling_params, prompt_token_ids, multi_modal_data) -> Iterator[tuple[int, RequestOutput]]:
        self.prompts, self.params = list(prompt_token_ids), sampling_params
        self.images = [entry["images"] for entry in multi_modal_data]
        return self._stream()

    def _stream(self) -> Iterator[tuple[int, RequestOutput]]:
        queues = [self._outputs(place) for place in range(len(self.prompts))]
        try:
            while any(queues):
                for place, queue in enumerate(queues):
                    if queue:
                        yield place, queue.pop(0)
        finally:
            self.was_closed = True

    def _ids(self, place: int) -> list[int]:
        return self._tokenizer.encode_bare(self._answers[place])

    def _outputs(self, place: int) -> list[RequestOutput]:
        emitter = Emitter(
            str(place),
            len(self.prompts[place]),
            self.params[place],
            tokenizer=self._tokenizer,
            max_num_batched_tokens=64,
        )
        outputs = []
        for token_id in self._ids(place):
            is_end = token_id == self._tokenizer.eos_id
            outputs.append(emitter.emit(Drawn(token_id, -0.5), finish_reason="stop" if is_end else ""))
            if emitter.is_finished:
                break
        return outputs if emitter.is_finished else [*outputs, emitter.end(self._cut_reason)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return tiny_chat_tokenizer(tmp_path_factory.mktemp("chat"))


def test_a_conversation_is_encoded_run_and_parsed(tokenizer):
    llm = ScriptedLLM(tokenizer, [f"hm</think>Hi é😀{EOS}"])
    (completion,) = chat(llm, HELLO, effort=33)
    prompt = load_chat_encoder(tokenizer).encode(HELLO, effort=33)
    assert llm.prompts == [tuple(prompt)]
    assert prompt.count(tokenizer.bos_id) == 1
    assert llm.params == [SamplingParams()]
    assert (completion.message.reasoning, completion.message.content) == ("hm", "Hi é😀")
    assert (completion.finish_reason, completion.prompt_len) == ("stop", len(prompt))
    assert [o.token_id for o in completion.outputs] == tokenizer.encode_bare(f"hm</think>Hi é😀{EOS}")
    assert completion.message.is_complete


def test_conversations_come_back_in_order_with_their_own_ends(tokenizer):
    answers = [f"a</think>long answer{EOS}", "cut in th", f"b</think>{EOS}"]
    llm = ScriptedLLM(tokenizer, answers)
    params = [SamplingParams(max_tokens=n) for n in (5, 6, 7)]
    found = chat(llm, [HELLO, HELLO, [SYSTEM, *HELLO]], params)
    assert [(c.message.reasoning, c.message.content) for c in found] == [
        ("a", "long answer"),
        ("cut in th", ""),
        ("b", ""),
    ]
    assert [c.finish_reason for c in found] == ["stop", "length", "stop"]
    assert [c.message.is_complete for c in found] == [True, False, True]
    assert [c.prompt_len for c in found] == [len(prompt) for prompt in llm.prompts]
    assert llm.params == params
    assert all(c.outputs[-1].finished and c.outputs[-1].token_id != NO_TOKEN for c in found)


def test_calls_are_a_finish_reason_of_their_own(tokenizer):
    llm = ScriptedLLM(tokenizer, [f"ok{CALL}{EOS}", f"ok{CALL}"])
    ended, cut = chat(llm, [HELLO, HELLO], thinking=False, tools=[TOOL])
    assert ended.message.tool_calls == (ToolCall(id="", name="f", arguments=CALL_ARGUMENTS),)
    assert (ended.finish_reason, ended.outputs[-1].finish_reason) == ("tool_calls", "stop")
    assert (cut.finish_reason, len(cut.message.tool_calls)) == ("length", 1)


def test_a_malformed_call_does_not_raise(tokenizer):
    llm = ScriptedLLM(tokenizer, [f"ok{CALL[: CALL.index('3')]}{EOS}"])
    (completion,) = chat(llm, HELLO, thinking=False, tools=[TOOL])
    assert completion.message.note.startswith("the arguments of tool call 0 ('f')")


def test_the_answer_to_a_required_tool_is_read_from_inside_its_block(tokenizer):
    llm = ScriptedLLM(tokenizer, [CALL.split("calls>\n", 1)[1] + EOS])
    (completion,) = chat(llm, HELLO, thinking=False, tools=[TOOL], tool_choice="required")
    assert [call.name for call in completion.message.tool_calls] == ["f"]
    assert completion.message.content == ""


def test_a_failed_request_is_told_by_its_finish_reason(tokenizer):
    llm = ScriptedLLM(tokenizer, ["", f"x</think>y{EOS}"], cut_reason="insufficient_system_resource")
    failed, good = chat(llm, [HELLO, HELLO])
    assert failed.finish_reason == "insufficient_system_resource"
    assert (failed.message.reasoning, failed.message.content, failed.message.is_complete) == ("", "", False)
    assert [output.token_id for output in failed.outputs] == [NO_TOKEN]
    assert good.message.content == "y"


def test_text_that_a_stop_string_cut_off_is_not_in_the_message(tokenizer):
    llm = ScriptedLLM(tokenizer, [f"ab##more{EOS}"])
    (completion,) = chat(llm, HELLO, SamplingParams(stop="##"), thinking=False)
    assert (completion.message.content, completion.finish_reason) == ("ab", "stop")
    assert not completion.message.is_complete


def test_an_unfinished_character_in_front_of_eos_is_shown(tokenizer):
    class Bytes(ScriptedLLM):
        def _ids(self, place):
            return [*tiny_tokenizer.byte_ids(b"a\xe2\x82"), self.get_tokenizer().eos_id]

    (completion,) = chat(Bytes(tokenizer, []), HELLO, thinking=False)
    assert (completion.message.content, completion.message.is_complete) == ("a\ufffd", True)


def test_what_is_written_behind_eos_is_no_part_of_the_message(tokenizer):
    class Deaf(ScriptedLLM):
        def _stream(self):
            for place, output in super()._stream():
                yield place, dataclasses.replace(output, finished=False, finish_reason="")
                yield place, dataclasses.replace(output, text="more", token_id=5, finish_reason="length")

    (completion,) = chat(Deaf(tokenizer, [EOS]), HELLO, SamplingParams(ignore_eos=True), thinking=False)
    assert (completion.message.content, completion.finish_reason) == ("", "length")


@pytest.mark.parametrize("thinking", [True, False])
def test_a_response_format_is_enforced_behind_the_reasoning(tokenizer, thinking):
    llm = ScriptedLLM(tokenizer, [f"{'hm</think>' * thinking}[1]{EOS}"])
    schema = {"type": "array"}
    response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    (completion,) = chat(llm, [SYSTEM, *HELLO], thinking=thinking, response_format=response_format)
    assert completion.message.content == "[1]"
    so_args = dict(llm.params[0].so_args or {})
    assert json.loads(so_args.pop("schema")) == schema
    trigger = {"trigger_token_ids": tokenizer.encode_bare("</think>")} if thinking else {}
    assert so_args == {"schema_type": "json", **trigger}


@pytest.mark.parametrize(
    "response_format, so_args",
    [
        ({"type": "json_object"}, {"schema_type": "json", "schema": '{"type": "object"}'}),
        ({"type": "regex", "regex": "a+"}, {"schema_type": "regex", "schema": "a+"}),
        ({"type": "text"}, None),
    ],
    ids=["object", "regex", "text"],
)
def test_response_formats_become_grammars(tokenizer, response_format, so_args):
    llm = ScriptedLLM(tokenizer, [f"{{}}{EOS}"] * 2)
    params = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=5)]
    chat(llm, [[SYSTEM, *HELLO]] * 2, params, thinking=False, response_format=response_format)
    assert llm.params == [dataclasses.replace(each, so_args=so_args) for each in params]


@pytest.mark.parametrize(
    "messages, options, kind, message",
    [
        ([], {}, ValueError, "messages is empty"),
        ([HELLO, []], {}, ValueError, "conversation 1: .*Empty input messages"),
        ([HELLO, [{"role": "bad", "content": ""}]], {}, ValueError, "conversation 1: .*unknown variant `bad`"),
        (HELLO, {"effort": 0}, ValueError, "conversation 0: effort=0 is not allowed"),
        (
            [HELLO, [{"role": "user", "content": [WEB_IMAGE]}]],
            {},
            ValueError,
            "conversation 1: .*nothing is downloaded",
        ),
        ([HELLO], {"sampling_params": [SamplingParams(n=2)]}, ValueError, "conversation 0 has n=2"),
        (
            HELLO,
            {
                "sampling_params": SamplingParams(so_args={"schema_type": "regex", "schema": "a"}),
                "response_format": {"type": "regex", "regex": "a"},
            },
            ValueError,
            "has so_args, and response_format was given; give one of the two",
        ),
    ],
)
def test_nothing_runs_before_every_argument_is_checked(tokenizer, messages, options, kind, message):
    llm = ScriptedLLM(tokenizer, [])
    with pytest.raises(kind, match=message):
        chat(llm, messages, **options)
    assert llm.prompts == []


@pytest.mark.parametrize(
    "messages, message",
    [
        ("Hello", "messages is of type str; give a list of messages"),
        (HELLO[0], "messages is of type dict; give a list of messages"),
        (["Hello"], "conversation 0 is of type str; give a list of messages"),
        ([HELLO, HELLO[0]], "conversation 1 is of type dict"),
        ([HELLO, ["Hello"]], "message 0 of conversation 1 is of type str; give a dict"),
        ([*HELLO, "Hello"], "message 1 of conversation 0 is of type str"),
    ],
)
def test_what_is_no_conversation_is_named(messages, message):
    with pytest.raises(TypeError, match=message):
        _given_conversations(messages)


def test_a_wrong_number_of_parameters_is_left_to_the_engine(tokenizer):
    given = [SamplingParams(max_tokens=4)] * 3
    llm = ScriptedLLM(tokenizer, [EOS])
    chat(llm, HELLO, given)
    assert llm.params is given


def test_an_exception_closes_the_stream(tokenizer):
    class Broken(ScriptedLLM):
        def _outputs(self, place):
            return [super()._outputs(place)[0], object()]  # breaks while the results are collected

    llm = Broken(tokenizer, [f"hm{EOS}"])
    with pytest.raises(AttributeError):
        chat(llm, HELLO)
    assert llm.was_closed


def test_the_encoder_is_built_once_for_each_llm(tokenizer):
    llm = ScriptedLLM(tokenizer, [EOS])
    for _ in range(2):
        chat(llm, HELLO)
    assert llm.num_tokenizers == 1


@pytest.fixture(scope="module")
def chat_files(tmp_path_factory) -> Path:
    """The TinyByte tokenizer with the tokens of chat prompts in the place of its last merged ones."""
    directory = tmp_path_factory.mktemp("tokenizer")
    file = tiny_tokenizer.write_tiny_byte(directory, extra_tokens=("<｜image｜>", "<｜draft｜>"))
    raw = json.loads(file.read_text(encoding="utf-8"))
    names = EXTRA[:6]
    first_id = tiny_tokenizer.VOCAB_SIZE - len(names)
    given = {token: i for token, i in raw["model"]["vocab"].items() if i < first_id}
    raw["model"]["vocab"] = given | {name: first_id + place for place, name in enumerate(names)}
    raw["model"]["merges"] = raw["model"]["merges"][: -len(names)]
    pattern = raw["added_tokens"][0]
    raw["added_tokens"][3:3] = [pattern | {"id": first_id + i, "content": name} for i, name in enumerate(names)]
    file.write_text(json.dumps(raw, ensure_ascii=False), encoding="utf-8")
    return directory


@pytest.mark.parametrize("decode_sequence", [True, False])
def test_an_engine_chats(tiny_model, chat_files, decode_sequence):
    llm = tiny.tiny_llm(tiny_model, tokenizer=chat_files, decode_sequence=decode_sequence)
    forced = [llm.get_tokenizer().encode_bare(text) for text in (f"hm</think>Hi €{EOS}", "hm</think>ok 3")]
    params = [SamplingParams(max_tokens=len(ids), golden_token_ids=ids) for ids in forced]
    found = chat(llm, [HELLO, [{"role": "user", "content": "Bye"}]], params, use_tqdm=False)
    assert [(c.message.reasoning, c.message.content) for c in found] == [("hm", "Hi €"), ("hm", "ok 3")]
    assert [c.finish_reason for c in found] == ["stop", "length"]
    assert [[o.token_id for o in c.outputs] for c in found] == forced
    assert [c.prompt_len for c in found] == [c.outputs[0].prompt_len for c in found]
    with pytest.raises(ValueError, match="conversation 1: "):
        chat(llm, [HELLO, []], params)
    assert not llm.engine.has_unfinished_requests()
    llm.close()


def test_an_engine_chats_about_images(tiny_model, chat_files):
    llm = tiny.tiny_llm(tiny_model, tokenizer=chat_files)
    image, params = picture("A"), SamplingParams(max_tokens=3, seq_seed=1, ignore_eos=True)
    parts = [{"type": "text", "text": "Is"}, {"type": "image_url", "image_url": {"url": image}}]
    talk = [{"role": "user", "content": parts}]
    with_image, without = chat(llm, [talk, HELLO], params, use_tqdm=False)
    prompt = load_chat_encoder(llm.get_tokenizer()).prepare(talk)
    [same] = llm.generate(None, params, [prompt.token_ids], False, [{"images": [image]}])
    facts = [[(o.token_id, o.token_logprobs) for o in outputs] for outputs in (with_image.outputs, same)]
    assert facts[0] == facts[1]
    assert with_image.prompt_len == len(prompt.token_ids) + 7 and without.finish_reason == "length"
    parts[1]["image_url"]["url"] = b"nothing"
    with pytest.raises(ValueError, match="image 0 of prompt 1: the data is no image"):
        chat(llm, [HELLO, talk], params)
    llm.close()


def test_an_engine_enforces_the_response_format_behind_the_reasoning(tiny_model, chat_files):
    llm = tiny.tiny_llm(tiny_model, tokenizer=chat_files)
    reasoning = llm.get_tokenizer().encode_bare("maybe</think>")
    params = SamplingParams(max_tokens=40, golden_token_ids=reasoning, seq_seed=1)
    response_format = {"type": "regex", "regex": "(yes|no) [0-9]{3}"}
    (completion,) = chat(llm, HELLO, params, response_format=response_format, use_tqdm=False)
    assert completion.message.reasoning == "maybe"
    assert re.fullmatch(response_format["regex"], completion.message.content)
    assert (completion.finish_reason, completion.message.is_complete) == ("stop", True)
    bad = {"type": "regex", "regex": "(?=a)"}
    with pytest.raises(ValueError, match="so_args"):
        chat(llm, HELLO, params, response_format=bad)
    assert not llm.engine.has_unfinished_requests()
    llm.close()
