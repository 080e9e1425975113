"""Values of `format` that are enforced, each as a regular expression for the whole string.

Some are narrower than their standard (noted beside each): every string they allow is valid, not every
valid string is allowed.
"""

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # by 4, not by 100; by 400
)
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_MINUTE})"
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_HEX = "[0-9a-fA-F]"
_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,28}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,15}"
_PCHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"


def _ipv6() -> str:
    """All lengths of the two halves around "::", and the full form."""
    group = f"{_HEX}{{1,4}}"
    forms = [f"{group}(?::{group}){{7}}"]
    for left in range(8):
        head = f"{group}(?::{group}){{{left - 1}}}" if left else ""
        right = 7 - left
        tail = f"(?:{group}(?::{group}){{0,{right - 1}}})?" if right else ""
        forms.append(f"{head}::{tail}")
    return "|".join(forms)


FORMATS: dict[str, str] = {
    "date": _DATE,  # years from 0001
    "time": _TIME,  # no leap second, at most 9 digits of a second
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,3}}@{_HOST}",  # no quoted local part, no address literal
    "hostname": _HOST,  # at most 4 labels, no two hyphens in a row
    "ipv4": _IPV4,
    "ipv6": _ipv6(),  # no embedded IPv4 form
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*://{_HOST}(?::[0-9]{{1,5}})?(?:/{_PCHAR}*)*(?:\?(?:{_PCHAR}|[/?])*)?"
    rf"(?:\#(?:{_PCHAR}|[/?])*)?",  # with an authority that is a host name
    "json-pointer": "(?:/(?:[^~/]|~[01])*)*",
}
