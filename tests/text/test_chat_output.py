import pytest

from deepinfer_jax.text import chat, chat_output, tiny_tokenizer
from deepinfer_jax.text.chat_output import Delta, OutputParser, ToolCall, parse_answer, parse_output, plain_request
from tests.text.test_chat import EOS, EXTRA, HELLO, TOOL, tiny_chat_tokenizer

OTHER_TOOL = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
OPEN, CLOSE = "\n\n<｜DSML｜ calls>\n", "</｜DSML｜ calls>"


def param(name: str, value: str, *, is_string: bool) -> str:
    kind = "true" if is_string else "false"
    return f'<｜DSML｜ parameter name="{name}" string="{kind}">{value}</｜DSML｜ parameter>\n'


def invoke(name: str, *params: str) -> str:
    return f'<｜DSML｜ invoke name="{name}">\n{"".join(params)}</｜DSML｜ invoke>\n'


CALL = OPEN + invoke("f", param("a", "3", is_string=False), param("s", 'é "q"', is_string=True)) + CLOSE
CALL_ARGUMENTS = '{"a": 3, "s": "é \\"q\\""}'


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> chat.ChatEncoder:
    return chat.load_chat_encoder(tiny_chat_tokenizer(tmp_path_factory.mktemp("chat")))


def called(name: str, arguments: str, call_id: str = "") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def stream(parser: OutputParser, ids: list[int]) -> list[Delta]:
    """One id at a time."""
    return [delta for token_id in ids for delta in parser.push([token_id])]


@pytest.mark.parametrize(
    "text, thinking, reasoning, content",
    [
        ("hm</think>Hi", True, "hm", "Hi"),
        ("\nh\n\nm\n</think>\n\nHi\n", True, "h\n\nm", "Hi\n"),
        ("</think>Hi", True, "", "Hi"),
        ("hm", True, "hm", ""),
        ("Hi", False, None, "Hi"),
        ("", False, None, ""),
        ("h😀</think>é€", True, "h😀", "é€"),
    ],
    ids=["reasoned", "newlines", "no_reasoning", "only_reasoning", "not_thinking", "empty", "wide"],
)
@pytest.mark.parametrize("form", ["text", "ids"])
def test_reasoning_and_content_are_told_apart(encoder, text, thinking, reasoning, content, form):
    output = text + EOS
    message = parse_output(
        encoder, output if form == "text" else encoder.tokenizer.encode_bare(output), thinking=thinking
    )
    assert message == chat_output.ParsedMessage(reasoning=reasoning, content=content, is_complete=True)


def test_a_call_is_read_from_its_markup(encoder):
    message = parse_output(encoder, f"hm</think>ok{CALL}{EOS}", thinking=True)
    assert (message.reasoning, message.content, message.note, message.markup) == ("hm", "ok", "", "")
    assert message.tool_calls == (called("f", CALL_ARGUMENTS),)
    assert message.tool_calls[0].parsed == {"a": 3, "s": 'é "q"'}
    assert message.tool_calls[0].id


def test_several_calls_keep_their_order_and_have_ids_of_their_own(encoder):
    text = OPEN + invoke("g") + invoke("f", param("a", "[1, null]", is_string=False)) + invoke("g") + CLOSE + EOS
    message = parse_output(encoder, text, thinking=False)
    assert message.tool_calls == (called("g", "{}"), called("f", '{"a": [1, null]}'), called("g", "{}"))
    assert len({call.id for call in message.tool_calls}) == 3
    assert message.note == ""


@pytest.mark.parametrize(
    "markup, calls, note",
    [
        (
            OPEN + invoke("f", param("a", "{oops", is_string=False)) + CLOSE,
            (called("f", '{"a": {oops}'),),
            """the arguments of tool call 0 ('f') are not one JSON object: {"a": {oops}""",
        ),
        (
            OPEN + invoke("f", param("a", "1", is_string=False), param("a", "2", is_string=False)) + CLOSE,
            (called("f", '{"a": 1, "a": 2}'),),
            """the arguments of tool call 0 ('f') are not one JSON object: {"a": 1, "a": 2}""",
        ),
        (
            OPEN + invoke("f", param("a", "NaN", is_string=False)) + CLOSE,
            (called("f", '{"a": NaN}'),),
            """the arguments of tool call 0 ('f') are not one JSON object: {"a": NaN}""",
        ),
        (OPEN + invoke("") + CLOSE, (called("", "{}"),), "tool call 0 has no name"),
        (OPEN + "call f please\n" + CLOSE, (), "the markup of tool calls holds no call"),
        (OPEN + CLOSE, (), "the markup of tool calls holds no call"),
    ],
    ids=["value", "twice", "nan", "nameless", "prose", "empty"],
)
def test_a_malformed_call_is_visible(encoder, markup, calls, note):
    message = parse_output(encoder, f"ok{markup}{EOS}", thinking=False)
    assert (message.content, message.tool_calls, message.note) == ("ok", calls, note)
    assert message.markup == markup.lstrip("\n")
    assert message.is_complete
    for call in message.tool_calls:
        assert call.parsed is None or not call.name


def test_a_good_call_beside_a_malformed_one_can_be_used(encoder):
    text = OPEN + invoke("f", param("a", "]", is_string=False)) + invoke("g") + CLOSE
    message = parse_output(encoder, text, thinking=False)
    assert [call.parsed for call in message.tool_calls] == [None, {}]
    assert message.note.startswith("the arguments of tool call 0 ('f')")


@pytest.mark.parametrize("form", ["text", "ids"])
def test_a_cut_is_never_an_error_and_loses_no_text_before_it(encoder, form):
    whole = f"hm</think>ok{CALL}"
    for length in range(len(whole) + 1):
        text = whole[:length]
        output = text if form == "text" else encoder.tokenizer.encode_bare(text)
        message = parse_output(encoder, output, thinking=True)
        assert not message.is_complete
        assert (message.reasoning or "").startswith("hm"[:length])
        for call in message.tool_calls:
            whole_part, _, marker = call.arguments.partition("<")  # half a marker stays where it stands
            assert CALL_ARGUMENTS.startswith(whole_part)
            assert "/｜DSML｜".startswith(marker)
            assert (call.parsed is None) == bool(message.note)
        if message.note:
            assert message.markup == text[text.index("<｜DSML｜") :]


def test_a_call_cut_in_the_middle_says_so(encoder):
    message = parse_output(encoder, f"ok{CALL[: CALL.index('3') + 1]}", thinking=False)
    assert message.tool_calls == (called("f", '{"a": 3'),)
    assert message.tool_calls[0].parsed is None
    assert message.note == """the arguments of tool call 0 ('f') are not one JSON object: {"a": 3"""


def test_an_unfinished_character_takes_no_text_with_it(encoder):
    ids = [*encoder.tokenizer.encode_bare("hello"), *tiny_tokenizer.byte_ids("😀".encode()[:2])]
    assert parse_output(encoder, ids, thinking=False).content == "hello\ufffd"


def test_nothing_behind_eos_is_read(encoder):
    ids = encoder.tokenizer.encode_bare(f"Hi{EOS}more{EOS}")
    message = parse_output(encoder, ids, thinking=False)
    assert (message.content, message.is_complete) == ("Hi", True)


def test_markup_stays_text_where_no_tool_was_declared(encoder):
    prompt = encoder.prepare(HELLO, thinking=False)
    message = parse_answer(encoder, f"ok{CALL}{EOS}", prompt.request)
    assert (message.content, message.tool_calls, message.note) == (f"ok{CALL}", (), "")


def test_a_block_that_the_prompt_opened_is_read_from_inside(encoder):
    prompt = encoder.prepare(HELLO, thinking=False, tools=[TOOL], tool_choice="required")
    message = parse_answer(encoder, CALL.removeprefix(OPEN) + EOS, prompt.request)
    assert (message.content, message.tool_calls, message.note) == ("", (called("f", CALL_ARGUMENTS),), "")
    message = parse_answer(encoder, f"no thanks{EOS}", prompt.request)
    assert (message.note, message.markup) == ("the markup of tool calls holds no call", "no thanks")


@pytest.mark.parametrize(
    "begun, output, reasoning, content",
    [
        ({"content": "", "reasoning_content": "h"}, "\nm</think>Hi", "\nm", "Hi"),
        ({"content": "H", "reasoning_content": "hm"}, "\ni", "", "\ni"),
    ],
    ids=["reasoning", "content"],
)
def test_a_begun_message_goes_on_where_the_prompt_left_it(encoder, begun, output, reasoning, content):
    prompt = encoder.prepare([*HELLO, {"role": "assistant", "prefix": True, **begun}])
    message = parse_answer(encoder, output + EOS, prompt.request)
    assert (message.reasoning, message.content) == (reasoning, content)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("num_calls", [0, 1, 2])
def test_an_encoded_message_comes_back_equal(encoder, thinking, num_calls):
    calls = (called("f", CALL_ARGUMENTS, "1"), called("g", "{}", "2"))[:num_calls]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
    known = chat_output.ParsedMessage(
        reasoning="hm\n\nso" if thinking else None, content="Hi é😀", tool_calls=calls, is_complete=True
    )
    question = {"messages": HELLO, "tools": [TOOL, OTHER_TOOL]}
    mode = {"thinking": {"type": "enabled" if thinking else "disabled"}}
    prompt = encoder.encode_conversation(encoder.convert({**question, **mode}).conversation)
    whole_request = encoder.convert({**question, **mode, "messages": [*HELLO, known.to_message(), *results]})
    whole = encoder.encode_conversation(whole_request.conversation)
    assert whole[: len(prompt)] == prompt
    answer = whole[len(prompt) : whole.index(encoder.tokenizer.eos_id) + 1]
    assert parse_output(encoder, answer, thinking=thinking) == known


def test_malformed_calls_can_be_sent_back(encoder):
    message = parse_output(encoder, f"ok{CALL[: CALL.index('3') + 1]}", thinking=False).to_message()
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "bad arguments"}
    ids = encoder.encode([*HELLO, message, result], thinking=False, tools=[TOOL])
    assert "<tool_result>bad arguments</tool_result>" in encoder.tokenizer.decode(ids)


def test_deltas_join_to_the_message(encoder):
    ids = encoder.tokenizer.encode_bare(f"h😀</think>ok é{CALL}{EOS}")
    parser = OutputParser(encoder, plain_request(encoder, thinking=True))
    deltas = stream(parser, ids)
    assert parser.has_ended
    rest, message = parser.finish()
    deltas += rest
    joined = {part: "".join(d.text for d in deltas if d.part == part) for part in ("reasoning", "content", "tool_call")}
    assert joined == {"reasoning": "h😀", "content": "ok é", "tool_call": CALL_ARGUMENTS}
    assert message == parse_output(encoder, ids, thinking=True)
    named = [delta for delta in deltas if delta.name]
    assert [(d.part, d.index, d.name, d.id) for d in named] == [("tool_call", 0, "f", message.tool_calls[0].id)]


def test_deltas_come_early_and_never_with_half_a_character(encoder):
    parser = OutputParser(encoder, plain_request(encoder, thinking=False))
    pieces = [[delta.text for delta in parser.push([i])] for i in tiny_tokenizer.byte_ids("a€b".encode())]
    assert pieces == [["a"], [], [], ["€"], ["b"]]


def test_what_may_be_a_marker_is_held_back(encoder):
    parser = OutputParser(encoder, plain_request(encoder, thinking=True))
    pieces = [[delta.text for delta in parser.push_text(text)] for text in ("hm", "</", "thi", "s")]
    assert pieces == [["hm"], [], [], ["</", "thi", "s"]]
    deltas, message = parser.finish()
    assert deltas == ()
    assert (message.reasoning, message.is_complete) == ("hm</this", False)


def test_two_bos_in_front_are_refused(encoder):
    ids = encoder.encode(HELLO)
    chat.refuse_double_bos(encoder.tokenizer, ids)
    chat.refuse_double_bos(encoder.tokenizer, [])
    with pytest.raises(ValueError, match=r"begins with BOS \(id 0\) twice; leave one out"):
        chat.refuse_double_bos(encoder.tokenizer, [encoder.tokenizer.bos_id, *ids])


def test_a_rendered_prompt_gets_no_second_bos(encoder):
    ids = encoder.encode(HELLO)
    assert encoder.tokenizer.encode(encoder.tokenizer.decode(ids)) == ids


def test_a_prompt_knows_its_images_and_how_its_answer_begins(encoder):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    prompt = encoder.prepare([{"role": "user", "content": [image, image]}])
    assert (len(prompt.images), prompt.opens_reasoning) == (2, True)
    prompt = encoder.prepare(HELLO, thinking=False)
    assert (len(prompt.images), prompt.opens_reasoning) == (0, False)
    assert encoder.tokenizer.token_text(encoder.think_end_id) == EXTRA[4]
