"""LLVM-level primitives of `linear` on warpgroup products (sm_90a). Not imported in the simulator.

Shared memory is a flat f32 array; places in it, barriers' too, are given as an index of 32-bit words.
"""

import functools

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

from kernels_numba.intrinsics_mma import _element, _shared_address
from kernels_numba.intrinsics_shared import _statement
from kernels_numba.intrinsics_wgmma import _with_sums

_WORD, _LONG = ir.IntType(32), ir.IntType(64)
PREFETCH = 256  # bytes that come to the L2 cache with a weight
_STEPS = 4  # of 16 elements of K, 32 bytes, in a row of 128 bytes
_DESCRIBED = 1024 >> 4 << 32 | 1 << 62  # groups of 8 rows are 1024 bytes apart; swizzled in 128 bytes


def _start_of(context, builder, signature, arguments, array=0):
    """The shared address, an i32, of a place: an array and an i32 index."""
    index = builder.sext(arguments[array + 1], _LONG)
    return _shared_address(context, builder, signature.args[array], arguments[array], index)


def _at_place(text, kinds=""):
    """A builder of a statement on the address of a place, and on what follows that."""

    def build(context, builder, signature, arguments):
        address = _start_of(context, builder, signature, arguments)
        return _statement(text, "r" + kinds)(context, builder, signature, [address, *arguments[2:]])

    return build


@intrinsic
def start_next(typing_context):
    """Let the launch after this start, though what goes before this is not done."""
    return types.void(), _statement("griddepcontrol.launch_dependents;")


@intrinsic
def align_words(typing_context, buffers):
    """The index of the first word of shared memory that lies at a multiple of 1024 bytes."""

    def build(context, builder, signature, arguments):
        zero = ir.Constant(_LONG, 0)
        address = _shared_address(context, builder, signature.args[0], arguments[0], zero)
        missing = builder.and_(builder.neg(address), ir.Constant(_WORD, 1023))
        return builder.lshr(missing, ir.Constant(_WORD, 2))

    return types.int32(buffers), build


@intrinsic
def make_barrier(typing_context, buffers, at, arrivals):
    """A barrier in two words, whose phase ends after that many arrivals."""
    signature = types.void(buffers, types.int32, types.int32)
    return signature, _at_place("mbarrier.init.shared::cta.b64 [$0], $1;", "r")


@intrinsic
def arrive(typing_context, buffers, at):
    """Arrive at a barrier."""
    text = "{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [$0];\n}"
    return types.void(buffers, types.int32), _at_place(text)


@intrinsic
def arrive_for_bytes(typing_context, buffers, at, count):
    """Arrive at a barrier whose phase shall not end before `count` bytes more have been copied for it."""
    text = "{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [$0], $1;\n}"
    return types.void(buffers, types.int32, types.int32), _at_place(text, "r")


@intrinsic
def arrive_with_copies(typing_context, buffers, at):
    """Arrive at a barrier once all 16-byte copies that this thread has started are there."""
    text = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"
    return types.void(buffers, types.int32), _at_place(text)


@intrinsic
def wait_phase(typing_context, buffers, at, parity):
    """Wait until a barrier's phase of that parity has ended; before the first phase the one of parity 1 has."""
    text = (
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n@done bra OVER;\nbra AGAIN;\nOVER:\n}"
    )
    return types.void(buffers, types.int32, types.int32), _at_place(text, "r")


@intrinsic
def place_in(typing_context, source, index):
    """Where a flat global array's [index] is, for `copy_from`: its address."""

    def build(context, builder, signature, arguments):
        return builder.ptrtoint(_element(context, builder, signature.args[0], *arguments), _LONG)

    return types.int64(source, types.int64), build


@intrinsic
def copy_from(typing_context, buffers, to, source, place, count):
    """Start a copy of `count` bytes, 16 or 0, then zeros, from a place in `source` to shared memory."""

    def build(context, builder, signature, arguments):
        address = _start_of(context, builder, signature, arguments)
        text = f"cp.async.cg.shared.global.L2::{PREFETCH}B [$0], [$1], 16, $2;"
        return _statement(text, "rlr")(context, builder, signature, [address, *arguments[3:]])

    return types.void(buffers, types.int32, source, types.int64, types.uint32), build


@intrinsic
def copy_run(typing_context, buffers, to, source, index, count, at):
    """Start a copy of `count` bytes, a multiple of 16, of a flat f32 array's [index] to shared memory.

    The barrier at `at` is told of the bytes.
    """

    def build(context, builder, signature, arguments):
        target = _start_of(context, builder, signature, arguments)
        pointer = _element(context, builder, signature.args[2], *arguments[2:4])
        start = builder.ptrtoint(pointer, _LONG)
        index = builder.sext(arguments[5], _LONG)
        barrier = _shared_address(context, builder, signature.args[0], arguments[0], index)
        text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
        values = [target, start, arguments[4], barrier]
        return _statement(text, "rlrr")(context, builder, signature, values)

    return types.void(buffers, types.int32, source, types.int64, types.int32, types.int32), build


def _product_text(rows):
    count = rows // 2
    sums = ", ".join(f"${i}" for i in range(count))
    left, right = f"${2 * count}", f"${2 * count + 1}"
    lines = ["{", ".reg .b64 a, b;", ".reg .pred all;", f"setp.eq.s64 all, {left}, {left};"]
    lines += ["wgmma.fence.sync.aligned;"]
    for step in range(_STEPS):
        lines += [f"add.s64 a, {left}, {2 * step};", f"add.s64 b, {right}, {2 * step};"]
        lines += [
            f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{sums}}}, a, b, all, 1, 1, 0, 0;"
        ]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
    return "\n".join(lines)


@functools.cache
def product_of(rows):
    """multiply(buffers, columns_at, rows_at, sums): 64 x `rows` sums += 64 weight rows times `rows` rows of input.

    Both are 64 elements of K wide, swizzled, at places that are multiples of 1024 bytes. All in one statement, with the
    wait for it: ptxas 13.5 serialises products that are still under way when a warpgroup goes on (C7518).
    """
    text = _product_text(rows)

    @intrinsic
    def multiply(typing_context, buffers, columns_at, rows_at, sums):
        def build(context, builder, signature, arguments):
            described = []
            for index in arguments[1:3]:
                index = builder.sext(index, _LONG)
                address = _shared_address(context, builder, signature.args[0], arguments[0], index)
                low = builder.lshr(builder.and_(address, ir.Constant(_WORD, 0x3FFFF)), ir.Constant(_WORD, 4))
                described.append(builder.or_(builder.zext(low, _LONG), ir.Constant(_LONG, _DESCRIBED)))
            return _with_sums(
                *(context, builder, signature.args[3], arguments[3], rows // 2, text, "ll", described)
            )

        return types.void(buffers, types.int32, types.int32, sums), build

    return multiply
