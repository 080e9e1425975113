"""The best of a row's scores, by one kernel with a block for each row; `topk` says what is chosen.

Roofline, 128 rows of 8,192 scores: 2 MB, half a microsecond. What takes time are the four barriers of a block, the
reading of a row, and starting the kernel at all.

A row is read once, into shared memory, and its scores become unsigned keys of 16 bits in the same order. Two histograms
of 256 bins give the key of the last kept score: of upper bytes, then of the lower bytes of keys with the upper byte
that was found. A warp has a run of neighbouring scores. What is kept of better and of equal ones is ranked by sums over
threads, steps and warps, in the order of the row; atomic additions only count, so that their order does not matter.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu
from jaxtyping import Array, BFloat16, Int

from deepinfer_jax.kernels import mosaic
from deepinfer_jax.kernels.mosaic import Register, i32, iadd, iand, imul, ior, shl, shr
from deepinfer_jax.kernels.ptx import global_address, inline, load_shared, ptx, row_address, scalar

MAX_WIDTH = 98_304  # scores of a row: 192 KiB of shared memory
PIECE = 8  # neighbouring scores that a thread reads at once, 16 bytes
_WARP, _WARPS = 32, 16
_WARPGROUPS = _WARPS // 4
_STEP = _WARP * PIECE  # scores that a warp reads at once
_BINS = 256
_LOWEST = 0x7F  # the key of -inf
_COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


def refuses(scores: Array) -> str | None:
    """Why the kernel cannot choose among such scores; None if it can."""
    if scores.dtype != jnp.bfloat16:
        return f"scores are {scores.dtype}, not bfloat16"
    if scores.shape[1] > MAX_WIDTH:
        return f"a row has {scores.shape[1]} scores; {MAX_WIDTH} fit in shared memory"
    return None


def choose(
    scores: BFloat16[Array, "B N"],
    num_visible: Int[Array, " B"] | None,
    listed: Int[Array, "B N"] | None,
    *,
    count: int,
) -> tuple[Int[Array, "B K"], Int[Array, "B K"]]:
    """Places of the `count` best scores of each row ascending, then -1; and what a list has there (None: the places).

    Scores from the row's num_visible on must be -inf, which is never taken, and are not read. count is at most N.
    """
    rows, width = scores.shape
    scores = jnp.pad(scores, ((0, 0), (0, -width % PIECE)), constant_values=-jnp.inf)
    limits, lists = (() if array is None else (array,) for array in (num_visible, listed))
    result = jax.ShapeDtypeStruct((rows, count), jnp.int32)
    kernel = plgpu.kernel(
        functools.partial(_choose_of_row, count=count, width=width, num_limits=len(limits), num_lists=len(lists)),
        kernel_name="best_entries",
        out_type=[result] * (1 + len(lists)),
        grid=(rows,),
        grid_names=("row",),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        scratch_types={
            "keys": plgpu.SMEM((-(-width // (_WARPS * _STEP)) * _WARPS * _STEP // 2,), jnp.int32),  # pairs
            "bins": plgpu.SMEM((2 * _BINS,), jnp.int32),  # of upper bytes, of lower bytes
            "sums": plgpu.SMEM((_WARPS,), jnp.int32),  # of each warp: better scores in the lower half, equal ones
        },
        compiler_params=_COMPILER_PARAMS,
    )
    found = kernel(scores, *limits, *lists)
    return found[0], found[-1]


def _choose_of_row(
    *refs: Any, count: int, width: int, num_limits: int, num_lists: int, keys: Any, bins: Any, sums: Any
) -> None:
    """One block. All its threads know the last kept key and how many of the scores that equal it are kept."""
    row_bytes, num_given = 2 * refs[0].shape[1], num_limits + num_lists

    def choose(_: Any, row: Any, scores: Any, *others: Any) -> None:
        *arrays, keys, bins, sums = others
        limits, lists, outs = arrays[:num_limits], arrays[num_limits:num_given], arrays[num_given:]
        keys_at, bins_at, sums_at = (mosaic.shared_address(ref) for ref in (keys, bins, sums))
        row, zero, thread = scalar(row), i32(0), mgpu.thread_idx()
        lane, warp = iand(thread, _WARP - 1), shr(thread, 5)
        visible = i32(width)
        for limit in limits:
            given = ptx("ld.global.b32 $0, [$1];", row_address(global_address(limit), row, 4, zero))
            visible = arith.minsi(arith.maxsi(given, zero), visible)
        # The warp's run of the row, in whole steps, and how many of these it has.
        most_steps = _steps(visible, _WARPS * _STEP)
        run = arith.muli(warp, imul(most_steps, _STEP))
        num_steps = arith.minui(_steps(arith.maxsi(arith.subi(visible, run), zero), _STEP), most_steps)
        first = iadd(run, imul(lane, PIECE))  # score of the thread in its first step
        own_keys = iadd(keys_at, shl(first, 1))
        source = row_address(global_address(scores), row, row_bytes, shl(first, 1))
        _copy(own_keys, source, first, visible, num_steps)
        assert 2 * _BINS == _WARP * _WARPS
        ptx("st.shared.b32 [$0], $1;", iadd(bins_at, imul(thread, 4)), zero, count=0)
        gpu.barrier()
        ptx("cp.async.wait_all;", count=0)
        _make_keys(own_keys, bins_at, num_steps)
        gpu.barrier()
        upper, wanted = _last_bin(bins_at, lane, i32(count))
        low_bins = iadd(bins_at, i32(4 * _BINS))
        _count_lower(own_keys, low_bins, upper, num_steps)
        gpu.barrier()
        lower, wanted = _last_bin(low_bins, lane, wanted)
        # Where fewer scores than asked for are above -inf, all of these are better than the last one.
        is_short = _is(arith.CmpIPredicate.slt, lower, zero)
        last = arith.select(is_short, i32(_LOWEST), ior(shl(upper, 8), lower))
        allowed = arith.select(is_short, zero, wanted)
        before, total = _warp_sums(own_keys, sums_at, lane, warp, last, num_steps)
        targets = [row_address(global_address(ref), row, 4 * count, zero) for ref in outs]
        sources = [row_address(global_address(ref), row, 4 * width, zero) for ref in lists]
        _write(own_keys, first, before, last, allowed, num_steps, targets, sources, lane)
        num_kept = iadd(total[0], arith.minui(total[1], allowed))
        for start in range(0, count, _WARP * _WARPS):
            _blank(iadd(thread, i32(start)), num_kept, count, targets)

    ref = plgpu.RefType()
    types = (plgpu.Layout.WG_SPLAT(shape=()), *(ref for _ in refs), ref, ref, ref)
    inline(choose, types)(lax.axis_index("row"), *refs, keys, bins, sums)


def _copy(keys: Register, source: Any, first: Register, visible: Register, num_steps: Register) -> None:
    """Starts to copy the thread's pieces of the row; pieces behind the visible scores become -inf."""
    i64 = ir.IntegerType.get_signless(64)

    @mgpu.utils.fori(num_steps, [])
    def _(step: Register, _: list[Register]) -> list[Register]:
        at = imul(step, 2 * _STEP)
        given = iadd(keys, at), arith.addi(source, arith.extui(i64, at)), iadd(first, imul(step, _STEP)), visible
        ptx(
            "{ .reg .pred p; .reg .b32 none;\n"
            "setp.lt.s32 p, $2, $3;  mov.b32 none, 0xff80ff80;\n"
            "@p cp.async.cg.shared.global [$0], [$1], 16;\n"
            "@!p st.shared.v4.b32 [$0], {none, none, none, none}; }",
            *given,
            count=0,
        )
        return []


def _make_keys(keys: Register, bins: Register, num_steps: Register) -> None:
    """Scores of the thread become keys, in their place, and upper bytes of all that are above -inf are counted."""

    @mgpu.utils.fori(num_steps, [])
    def _(step: Register, _: list[Register]) -> list[Register]:
        at = iadd(keys, imul(step, 2 * _STEP))
        made = [_ordered(word) for word in _piece(at)]
        ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", at, *made, count=0)
        for word in made:
            ptx(_COUNT_UPPER, word, bins, count=0)
        return []


def _ordered(word: Register) -> Register:
    """The keys of two scores. A product with one and a sum with zero make both zeros the positive one."""
    text = "{ .reg .b32 one, zero; mov.b32 one, 0x3f803f80; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, one, zero; }"
    word = ptx(text, word)
    is_negative = iand(shr(word, 15), 0x00010001)
    return arith.xori(word, ior(imul(is_negative, 0x7FFF), i32(0x80008000)))


def _count_lower(keys: Register, bins: Register, upper: Register, num_steps: Register) -> None:
    """Counts the lower bytes of the thread's keys with this upper byte."""

    @mgpu.utils.fori(num_steps, [])
    def _(step: Register, _: list[Register]) -> list[Register]:
        for word in _piece(iadd(keys, imul(step, 2 * _STEP))):
            ptx(_COUNT_LOWER, word, bins, upper, count=0)
        return []


# Adds 1 to the bin of the upper byte of either key of $0 that is above -inf; bins begin at $1.
_COUNT_UPPER = """{ .reg .pred p; .reg .b32 key, at;
and.b32 key, $0, 0xffff;  setp.gt.u32 p, key, 0x7f;
shr.u32 at, key, 8;  mad.lo.u32 at, at, 4, $1;  @p red.shared.add.u32 [at], 1;
shr.u32 key, $0, 16;  setp.gt.u32 p, key, 0x7f;
shr.u32 at, key, 8;  mad.lo.u32 at, at, 4, $1;  @p red.shared.add.u32 [at], 1; }"""

# The same for the lower byte, of keys with upper byte $2.
_COUNT_LOWER = """{ .reg .pred p; .reg .b32 key, at;
and.b32 key, $0, 0xffff;  shr.u32 at, key, 8;  setp.eq.u32 p, at, $2;  setp.gt.and.u32 p, key, 0x7f, p;
and.b32 at, key, 0xff;  mad.lo.u32 at, at, 4, $1;  @p red.shared.add.u32 [at], 1;
shr.u32 key, $0, 16;  shr.u32 at, key, 8;  setp.eq.u32 p, at, $2;  setp.gt.and.u32 p, key, 0x7f, p;
and.b32 at, key, 0xff;  mad.lo.u32 at, at, 4, $1;  @p red.shared.add.u32 [at], 1; }"""


def _last_bin(bins: Register, lane: Register, wanted: Register) -> tuple[Register, Register]:
    """The greatest bin that `wanted` scores reach, -1 if none, and how many of it are still wanted.

    A thread has eight neighbouring bins; every warp does all of this.
    """
    each = _BINS // _WARP
    at = iadd(bins, imul(lane, 4 * each))
    counts = [word for offset in range(0, 4 * each, 16) for word in _piece(iadd(at, i32(offset)))]
    own = functools.reduce(iadd, counts)
    until = own
    for distance in (1, 2, 4, 8, 16):
        other = ptx(f"shfl.sync.down.b32 $0, $1, {distance}, 0x1f, 0xffffffff;", until)
        until = iadd(until, _below(lane, _WARP - distance, other, i32(0)))
    reaching = ptx("{ .reg .pred p; setp.ge.u32 p, $1, $2; vote.sync.ballot.b32 $0, p, 0xffffffff; }", until, wanted)
    owner = arith.subi(_ones(reaching), i32(1))  # counts only grow towards the first thread
    reached = above = arith.subi(until, own)
    found = arith.subi(imul(lane, each), i32(1))
    for one in reversed(counts):
        reached = iadd(reached, one)
        is_enough = _is(arith.CmpIPredicate.uge, reached, wanted)
        found = iadd(found, arith.select(is_enough, i32(1), i32(0)))
        above = arith.select(is_enough, above, reached)
    found, above = (ptx("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", x, iand(owner, 31)) for x in (found, above))
    return _below(owner, 0, i32(0xFFFFFFFF), found), arith.subi(wanted, above)


def _marks(words: Sequence[Register], last: Register) -> tuple[Register, Register]:
    """One bit for each of a thread's eight keys, the first one lowest: those above `last`, those that equal it."""
    better = equal = i32(0)
    for i, key in enumerate(half for word in words for half in (iand(word, 0xFFFF), shr(word, 16))):
        bit, none = i32(1 << i), i32(0)
        better = ior(better, arith.select(_is(arith.CmpIPredicate.ugt, key, last), bit, none))
        equal = ior(equal, arith.select(_is(arith.CmpIPredicate.eq, key, last), bit, none))
    return better, equal


def _packed(better: Register, equal: Register) -> Register:
    """How many bits are set in either, one number in each half of a word."""
    return ior(_ones(better), shl(_ones(equal), 16))


def _warp_sums(
    keys: Register, sums: Register, lane: Register, warp: Register, last: Register, num_steps: Register
) -> tuple[list[Register], list[Register]]:
    """How many scores are better and how many equal: in the warps before, and in all."""

    @mgpu.utils.fori(num_steps, [i32(0)])
    def counted(step: Register, carry: list[Register]) -> list[Register]:
        marks = _marks(_piece(iadd(keys, imul(step, 2 * _STEP))), last)
        return [iadd(carry[0], _packed(*marks))]

    # Halves do not meet: a warp has 6,144 scores at most.
    ptx("st.shared.b32 [$0], $1;", iadd(sums, imul(warp, 4)), _sum(counted.results[0]), count=0)
    gpu.barrier()
    of_warp = load_shared(iadd(sums, imul(iand(lane, _WARPS - 1), 4)))
    of_warp = _below(lane, _WARPS, of_warp, i32(0))
    is_before = _is(arith.CmpIPredicate.slt, lane, warp)
    halves = iand(of_warp, 0xFFFF), shr(of_warp, 16)
    return [_sum(arith.select(is_before, x, i32(0))) for x in halves], [_sum(x) for x in halves]


def _write(
    keys: Register,
    first: Register,
    before: list[Register],
    last: Register,
    allowed: Register,
    num_steps: Register,
    targets: list[Any],
    lists: list[Any],
    lane: Register,
) -> None:
    """Writes the places of kept scores, and what lists have there, by rank. before: better and equal ones in front."""

    @mgpu.utils.fori(num_steps, before)
    def _(step: Register, carry: list[Register]) -> list[Register]:
        better, equal = _marks(_piece(iadd(keys, imul(step, 2 * _STEP))), last)
        own = until = _packed(better, equal)
        for distance in (1, 2, 4, 8, 16):
            other = ptx(f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;", until)
            until = iadd(until, _below(lane, distance, i32(0), other))
        front = arith.subi(until, own)
        better_front, equal_front = iadd(carry[0], iand(front, 0xFFFF)), iadd(carry[1], shr(front, 16))
        # None of them is kept where those in front are enough.
        equal = arith.select(_is(arith.CmpIPredicate.ult, equal_front, allowed), equal, i32(0))
        place = iadd(first, imul(step, _STEP))
        text = _WRITE_LISTED if lists else _WRITE
        ptx(text, better, equal, better_front, equal_front, allowed, place, *targets, *lists, count=0)
        step_sum = ptx("shfl.sync.idx.b32 $0, $1, 31, 0x1f, 0xffffffff;", until)
        return [iadd(carry[0], iand(step_sum, 0xFFFF)), iadd(carry[1], shr(step_sum, 16))]


# For each bit of $0 (better) and $1 (equal), the lowest first: its rank is the number of better scores in front, of
# which $2 are before bit 0, and of equal ones ($3 before bit 0), of which $4 are kept. Its place is $5 and the bit.
_WRITE_FORM = """{{ .reg .pred p; .reg .b32 left, bit, lower, rank, same, place; .reg .b64 at, item;
or.b32 left, $0, $1;
NEXT: setp.eq.u32 p, left, 0;  @p bra DONE;
sub.u32 lower, left, 1;  not.b32 bit, lower;  and.b32 bit, bit, left;
and.b32 left, left, lower;  sub.u32 lower, bit, 1;
and.b32 rank, $0, lower;  popc.b32 rank, rank;  add.u32 rank, rank, $2;
and.b32 same, $1, lower;  popc.b32 same, same;  add.u32 same, same, $3;
min.u32 place, same, $4;  add.u32 rank, rank, place;
and.b32 place, $0, bit;  setp.ne.u32 p, place, 0;  setp.lt.or.u32 p, same, $4, p;
bfind.u32 place, bit;  add.u32 place, place, $5;
mul.wide.u32 at, rank, 4;  add.s64 item, at, $6;
@p st.global.b32 [item], place;{listed}
bra NEXT;
DONE: }}"""
_WRITE = _WRITE_FORM.format(listed="")
_WRITE_LISTED = _WRITE_FORM.format(
    listed="""
mul.wide.u32 item, place, 4;  add.s64 item, item, $8;  add.s64 at, at, $7;
@p ld.global.b32 place, [item];  @p st.global.b32 [at], place;"""
)


def _blank(index: Register, num_kept: Register, count: int, targets: list[Any]) -> None:
    """Writes -1 to a place of the result behind what was kept."""
    for target in targets:
        ptx(
            f"{{ .reg .pred p; .reg .b32 none; mov.b32 none, -1;\n"
            f"setp.lt.u32 p, $1, {count};  setp.ge.and.u32 p, $1, $2, p;  @p st.global.b32 [$0], none; }}",
            row_address(target, index, 4, i32(0)),
            index,
            num_kept,
            count=0,
        )


def _piece(address: Register) -> tuple[Register, ...]:
    """Four words of shared memory, read at this place of the program."""
    return ptx("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", address, count=4)


def _steps(size: Register, step: int) -> Register:
    """How many steps of a power of two make up a size."""
    return shr(iadd(size, i32(step - 1)), step.bit_length() - 1)


def _ones(word: Register) -> Register:
    return ptx("popc.b32 $0, $1;", word)


def _sum(x: Register) -> Register:
    """Over the warp."""
    return ptx("redux.sync.add.s32 $0, $1, 0xffffffff;", x)


def _below(x: Register, limit: int, yes: Register, no: Register) -> Register:
    return arith.select(_is(arith.CmpIPredicate.slt, x, i32(limit)), yes, no)


def _is(relation: Any, x: Register, y: Register) -> Any:
    return arith.cmpi(relation, x, y)
