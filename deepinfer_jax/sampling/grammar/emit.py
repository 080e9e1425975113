"""Trees without rules and anchors as the text of a regular expression of the backend (Rust syntax).

Every character is written as a code point, so nothing in the source can be read as syntax.
"""

from deepinfer_jax.sampling.grammar.nodes import Chars, Concat, Either, Node, Ranges, Repeat

MAX_TEXT = 4_000_000  # characters of one emitted expression
MAX_STEPS = 100_000  # sets of characters of one expression with its counted repetitions written out


def emit_regex(node: Node) -> str:
    """The expression that matches exactly the texts of a pruned node; ValueError when it is too large."""
    steps = _num_steps(node)
    if steps > MAX_STEPS:
        raise ValueError(
            f"the expression is too large: with its repetitions written out it has {steps} characters, "
            f"and {MAX_STEPS} are the limit; lower the counts of nested repetitions"
        )
    budget = [MAX_TEXT]
    return _emit(node, budget)


def _num_steps(node: Node) -> int:
    if isinstance(node, Repeat):
        return _num_steps(node.item) * max(node.low, node.high or 1, 1)
    members = node.items if isinstance(node, Concat) else node.options if isinstance(node, Either) else ()
    return sum(map(_num_steps, members)) if not isinstance(node, Chars) else 1


def _emit(node: Node, budget: list[int]) -> str:
    if isinstance(node, Chars):
        text = _emit_chars(node)
    elif isinstance(node, Concat):
        text = "".join(_emit(item, budget) for item in node.items)
    elif isinstance(node, Either):
        assert node.options, "a pruned tree holds no empty choice"
        text = "(?:" + "|".join(_emit(option, budget) for option in node.options) + ")"
    else:
        assert isinstance(node, Repeat), f"{type(node).__name__} has no regular expression"
        text = f"(?:{_emit(node.item, budget)}){_emit_bounds(node)}"
    budget[0] -= len(text)
    if budget[0] < 0:
        raise ValueError(f"the grammar expands to more than {MAX_TEXT} characters; make it smaller")
    return text


def _emit_bounds(node: Repeat) -> str:
    if node.high is None:
        return {0: "*", 1: "+"}.get(node.low, f"{{{node.low},}}")
    return "?" if (node.low, node.high) == (0, 1) else f"{{{node.low},{node.high}}}"


def _emit_chars(node: Chars) -> str:
    spans = _emit_spans(node.ranges)
    if not node.categories:
        return f"[{spans}]"
    for name in node.categories:
        spans += rf"\P{{{name[1:]}}}" if name.startswith("^") else rf"\p{{{name}}}"
    text = f"[{'^' if node.is_negated else ''}{spans}]"
    return f"[{text}&&[^{_emit_spans(node.outside)}]]" if node.outside else text


def _emit_spans(ranges: Ranges) -> str:
    return "".join(rf"\x{{{low:x}}}" if low == high else rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in ranges)
