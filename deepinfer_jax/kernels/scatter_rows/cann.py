"""Cache rows written by aclnnScatterNdUpdate; `ops.paged.put_array` is the reference for indices that are kept."""

from collections.abc import Sequence

from deepinfer_jax.kernels.ascend_call import Operand, ascend_call, like

TARGET = "deepinfer.cann.scatter_rows.v2"


def scatter_rows(cache: Operand, index: Operand, rows: Operand, *, after: Sequence[Operand] = ()) -> Operand:
    """cache [P, D] with rows [T, D] written at index [T] (int32, different, 0 to P - 1; others are a device fault).

    A device array cache is written in place: its old handle is void, and what read it belongs into `after`.
    """
    return ascend_call(TARGET, (cache, index, rows), [like(cache)], after=after)[0]
