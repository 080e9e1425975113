"""What can go wrong with a grammar after its text was accepted."""


class GrammarError(RuntimeError):
    """A matcher cannot go on: a token that the grammar forbids, or a limit of the backend."""


class GrammarTimeout(TimeoutError):
    """A grammar was not ready within the time limit."""
