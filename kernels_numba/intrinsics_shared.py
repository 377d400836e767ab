"""LLVM-level primitives of shared memory by address and of barriers between warps, for large blocks (sm_90 on).

Addresses are u32, as wgmma's descriptors want them. Not imported in the simulator.
"""

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

from kernels_numba.intrinsics_mma import _element, _shared_address

_WORD, _LONG, _FLOAT, _NONE = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()


def _statement(text, kinds="", result=_NONE, output=""):
    """A builder of one volatile asm statement whose arguments have these kinds: r, l or f each."""
    types_of = {"r": _WORD, "l": _LONG, "f": _FLOAT}

    def build(context, builder, signature, arguments):
        names = ",".join([*([output] if output else []), *kinds, "~{memory}"])
        kind = ir.FunctionType(result, [types_of[name] for name in kinds])
        found = builder.call(ir.InlineAsm(kind, text, names, side_effect=True), arguments)
        return found if output else context.get_dummy_value()

    return build


@intrinsic
def shared_address(typing_context, array):
    """The u32 address of a shared array."""

    def build(context, builder, signature, arguments):
        return _shared_address(context, builder, signature.args[0], *arguments, ir.Constant(_LONG, 0))

    return types.uint32(array), build


@intrinsic
def put_word(typing_context, address, word):
    """A u32 to a shared address."""
    return types.void(types.uint32, types.uint32), _statement("st.shared.b32 [$0], $1;", "rr")


@intrinsic
def put_two(typing_context, address, a, b):
    """Two u32 to a shared address, 8-byte aligned."""
    return types.void(*[types.uint32] * 3), _statement("st.shared.v2.b32 [$0], {$1, $2};", "rrr")


@intrinsic
def put_real(typing_context, address, value):
    """An f32 to a shared address."""
    return types.void(types.uint32, types.float32), _statement("st.shared.f32 [$0], $1;", "rf")


@intrinsic
def get_real(typing_context, address):
    """The f32 at a shared address."""
    return types.float32(types.uint32), _statement("ld.shared.f32 $0, [$1];", "r", _FLOAT, "=f")


@intrinsic
def policy_of(typing_context, once):
    """How `copy_row_piece` leaves the L2 cache: what is read once goes first."""
    text = (
        "{\n.reg .b64 a, b;\n.reg .pred p;\nsetp.ne.u32 p, $1, 0;\n"
        "createpolicy.fractional.L2::evict_first.b64 a, 1.0;\n"
        "createpolicy.fractional.L2::evict_normal.b64 b, 1.0;\nselp.b64 $0, a, b, p;\n}"
    )
    return types.uint64(types.uint32), _statement(text, "r", _LONG, "=l")


@intrinsic
def copy_row_piece(typing_context, address, source, index, count, policy):
    """Start a copy of `count` bytes, 16 or 0, of a flat global array's [index] to a shared address; zeros for 0."""

    def build(context, builder, signature, arguments):
        pointer = _element(context, builder, signature.args[1], *arguments[1:3])
        start = builder.ptrtoint(pointer, _LONG)
        text = "cp.async.cg.shared.global.L2::cache_hint.L2::128B [$0], [$1], 16, $2, $3;"
        return _statement(text, "rlrl")(context, builder, signature, [arguments[0], start, *arguments[3:]])

    return types.void(types.uint32, source, types.int64, types.uint32, types.uint64), build


@intrinsic
def make_barrier(typing_context, address, arrivals):
    """A barrier in the 8 bytes at a shared address, whose phase ends after that many arrivals."""
    text = "mbarrier.init.shared::cta.b64 [$0], $1;"
    return types.void(types.uint32, types.uint32), _statement(text, "rr")


@intrinsic
def arrive(typing_context, address):
    """Arrive at a barrier."""
    text = "{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [$0];\n}"
    return types.void(types.uint32), _statement(text, "r")


@intrinsic
def arrive_with_copies(typing_context, address):
    """Arrive at a barrier once all copies that this thread has started are there."""
    text = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"
    return types.void(types.uint32), _statement(text, "r")


@intrinsic
def wait_phase(typing_context, address, parity):
    """Wait until a barrier's phase of that parity has ended; before the first phase the one of parity 1 has."""
    text = (
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n@done bra OVER;\nbra AGAIN;\nOVER:\n}"
    )
    return types.void(types.uint32, types.uint32), _statement(text, "rr")


@intrinsic
def meet(typing_context, number, threads):
    """Wait at the block's barrier `number` until that many threads have come to it."""
    return types.void(types.uint32, types.uint32), _statement("bar.sync $0, $1;", "rr")


@intrinsic
def pass_by(typing_context, number, threads):
    """Come to the block's barrier `number`, and go on at once."""
    return types.void(types.uint32, types.uint32), _statement("bar.arrive $0, $1;", "rr")
