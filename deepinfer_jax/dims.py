"""The glossary of dimension letters used in shape annotations.

One letter means one size in the whole project. Sizes that have no letter are written out (`"T C*D"`), or named
in the docstring of the function that uses them.
"""

GLOSSARY: dict[str, str] = {
    "T": "rows of a step: one row is one token of one request",
    "S": "slots: the per-request state rows that the engine owns",
    "P": "pages of the main KV and index K pools",
    "D": "hidden width",
    "C": "mHC residual streams",
    "H": "attention heads",
    "K": "head width",
    "L": "latent width (the shared key and value row)",
    "E": "routed experts",
    "A": "routed experts per token",
    "W": "sliding window",
    "N": "selected positions, or rows of a product where a docstring says so",
    "V": "vocabulary",
    "G": "drafts per step",
}
