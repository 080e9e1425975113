"""One request on the host: what was asked, what came out, and how far its caches are."""

import dataclasses
from collections.abc import Sequence

from deepinfer_jax.sampling.params import SamplingParams


@dataclasses.dataclass(kw_only=True, eq=False)
class Request:
    """A prompt on its way through the engine. `output`, `num_written` and `slot` change, the rest does not."""

    index: int  # place among the results of its call
    prompt: Sequence[int]
    params: SamplingParams  # with the model's EOS as eos_id
    seed: int  # 64 bits
    max_model_len: int  # tokens of prompt and output that the caches hold
    tail_start: int = 0  # bounded replay: first position that runs the decoder layers
    output: list[int] = dataclasses.field(default_factory=list)
    num_written: int = 0  # tokens whose rows are in the caches
    slot: int = -1

    @property
    def is_in_prefill(self) -> bool:
        """Whether rows of the prompt are still to be computed."""
        return self.num_written < len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Prompt and output; the next token is drawn for this position."""
        return len(self.prompt) + len(self.output)

    def tokens_from(self, start: int, count: int) -> Sequence[int]:
        """`count` tokens of the prompt, or of the output behind it, from position `start` on."""
        if start < len(self.prompt):
            return self.prompt[start : start + count]
        start -= len(self.prompt)
        return self.output[start : start + count]

    @property
    def finish_reason(self) -> str:
        """Why the request ended with its last token, "" while it goes on (spec: interface 5.6)."""
        if not self.output:
            return ""
        if self.output[-1] == self.params.eos_id and not self.params.ignore_eos:
            return "stop"
        if len(self.output) >= self.params.max_tokens or self.num_tokens > self.max_model_len:
            return "length"
        return ""
