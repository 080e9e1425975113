import pytest

from deepinfer_jax.sampling.grammar import GrammarRequest, compile_grammar, parse_so_args

REGEX = {"schema_type": "regex", "schema": "[0-9]{3}"}


def test_all_fields():
    got = parse_so_args({**REGEX, "trigger_token_ids": [5, 0], "bound_token_id": 0})
    want = GrammarRequest(schema_type="regex", schema="[0-9]{3}", trigger_token_ids=(5, 0), bound_token_id=0)
    assert got == want


@pytest.mark.parametrize("trigger", [None, [], ()])
def test_no_trigger(trigger):
    assert parse_so_args({**REGEX, "trigger_token_ids": trigger}).trigger_token_ids == ()


def test_dict_schema_keeps_its_order():
    got = parse_so_args({"schema_type": "json", "schema": {"b": "é", "a": [1, None, True]}})
    assert got.schema == '{"b":"é","a":[1,null,true]}'


@pytest.mark.parametrize(
    "change, text",
    [
        ({"bound_token_id": 35}, "'bound_token_id'.*=35 needs a non-empty 'trigger_token_ids'"),
        ({"bound_token_id": 35, "trigger_token_ids": []}, "needs a non-empty"),
        ({"bound_token_id": [35], "trigger_token_ids": [1]}, r"=\[35\] is no token id"),
        ({"bound_token_id": -1, "trigger_token_ids": [1]}, "=-1 is no token id"),
        ({"bound_token_id": True, "trigger_token_ids": [1]}, "=True is no token id"),
        ({"trigger_token_ids": "abc"}, "='abc' is no list of token ids"),
        ({"trigger_token_ids": [1, 1.0]}, r"'trigger_token_ids'\]\[1\]=1.0 is no token id"),
        ({"trigger_token_ids": [-2]}, r"\[0\]=-2 is no token id"),
        ({"trigger_token_ids": [False]}, r"\[0\]=False is no token id"),
        ({"bound_token_ids": [35]}, "'bound_token_ids'.*give one id as 'bound_token_id'"),
        ({"serialized": "x"}, "'serialized'.*give the text of the grammar"),
        ({"schema_type": "xml"}, "'xml' is not one of 'json', 'regex', 'ebnf'"),
        ({"schema_type": None}, "'schema_type'"),
        ({"schema_type": ["json"]}, "'schema_type'"),
        ({"schema": None}, "'schema'.* is missing"),
        ({"schema": 5}, "is a int and must be a string"),
        ({"schema": {"a": 1}}, "is a dict and must be a string"),
        ({"schema_type": "json", "schema": {"a": {1, 2}}}, "is a dict that is no JSON value"),
        ({"schemas": "x"}, "'schemas'.* is unknown; the keys are schema_type, schema, trigger_token_ids"),
    ],
)
def test_refused(change, text):
    with pytest.raises(ValueError, match=text):
        parse_so_args({**REGEX, **change})


@pytest.mark.parametrize("key", ["schema", "schema_type"])
def test_missing_key(key):
    with pytest.raises(ValueError, match=f"'{key}'.* is missing"):
        parse_so_args({k: v for k, v in REGEX.items() if k != key})


def test_no_dict():
    with pytest.raises(ValueError, match="must be a dict"):
        parse_so_args([("schema", "x")])


@pytest.mark.parametrize("field, value", [("trigger_token_ids", [0, 999]), ("bound_token_id", 999)])
def test_ids_beyond_the_model(tools, field, value):
    request = parse_so_args({**REGEX, "trigger_token_ids": [1], field: value})
    with pytest.raises(ValueError, match=f"{field}.* holds 999, and the model's ids are 0..328"):
        compile_grammar(request, tools.vocabulary)
