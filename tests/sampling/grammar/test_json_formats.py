"""Texts that each format of a JSON string allows and forbids."""

import json

import pytest

from deepinfer_jax.sampling.grammar.json_formats import FORMATS

GOOD_FORMATS = {
    "date": (["0001-01-01", "2400-02-29"], ["0000-01-01", "2100-02-29", "2024-1-1", "2024-04-31"]),
    "time": (["00:00:00Z", "23:59:59.5+01:30"], ["24:00:00Z", "10:00:00", "10:60:00Z", "10:00Z"]),
    "date-time": (["2024-02-29T10:00:00Z"], ["2024-02-30T10:00:00Z", "2024-02-29 10:00:00Z", "2024-02-29"]),
    "duration": (["P1Y2M3DT4H5M6S", "PT1M", "P3W", "P1YT1S"], ["P", "PT", "P1D1Y", "P1W1D", "P1Y3D"]),
    "email": (["a.b+c@d-e.org"], ["@d.org", "a@", "a..b@d.org", "a b@d.org"]),
    "hostname": (["a", "a-1.b.org"], ["-a", "a-", "a..b", "a_b", ""]),
    "ipv4": (["0.0.0.0", "255.1.20.199"], ["256.0.0.0", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (["::", "::1", "1::", "1:2:3:4:5:6:7:8", "fe80::1:2"], [":", "1:2:3:4:5:6:7", "1::2::3", "12345::", ":::"]),
    "uuid": (["12345678-90ab-cdef-1234-567890ABCDEF"], ["12345678-90ab-cdef-1234-567890ABCDE", "x"]),
    "uri": (["http://a.org", "ftp://a.b:80/c%20d?e=f#g"], ["a.org", "http://", "http://a b", "http://a/%2"]),
    "json-pointer": (["", "/a/b~0~1", "/"], ["a", "/~", "/~2"]),
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_format(tools, name):
    grammar = tools.compile("json", {"type": "string", "format": name})
    good, bad = GOOD_FORMATS[name]
    assert [text for text in good if not tools.accepts(grammar, json.dumps(text))] == []
    assert [text for text in bad if tools.accepts(grammar, json.dumps(text))] == []
