"""LLVM-level primitives of tiles of quantised weights: sized copies in groups, shared u32 words, packed bf16.

Places in shared memory are bytes, u32, from the start of a u32 array on, so that addresses are 32 bits wide and sums of
them are addresses. Not imported in the simulator.
"""

import functools

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

_SHARED = 3  # the address space
_WORD = ir.IntType(32)
_FOUR = ir.VectorType(_WORD, 4)
_NOTHING = ir.VoidType()


def _place(context, builder, array_type, array, at, kind=_WORD):
    """A pointer, in the shared space, to byte `at` of a u32 array."""
    data = context.make_array(array_type)(context, builder, array).data
    start = builder.addrspacecast(data, ir.PointerType(ir.IntType(8), addrspace=_SHARED))
    return builder.bitcast(builder.gep(start, [at]), ir.PointerType(kind, addrspace=_SHARED))


def _assembled(builder, result, text, names, arguments):
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(ir.InlineAsm(kind, text, names, side_effect=True), arguments)


@intrinsic
def address_of(typing_context, array, index):
    """The address of a flat global array's [index], u64: what is known of it beside a register costs nothing later."""

    def build(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(builder.gep(data, [arguments[1]]), ir.IntType(64))

    return types.uint64(array, types.int64), build


def _copy(size, form):
    """A builder of cp.async: `size` bytes at an address and so many bytes on to a shared place, or as many zeros."""

    def build(context, builder, signature, arguments):
        to = builder.ptrtoint(_place(context, builder, signature.args[0], *arguments[:2]), _WORD)
        start = builder.add(arguments[3], builder.sext(arguments[4], ir.IntType(64)))
        count = builder.select(arguments[5], ir.Constant(_WORD, size), ir.Constant(_WORD, 0))
        text = f"cp.async.{form} [$0], [$1], {size}, $2;"
        _assembled(builder, _NOTHING, text, "r,l,r,~{memory}", [to, start, count])
        return context.get_dummy_value()

    return build


def _start(target, source):
    return types.void(target, types.uint32, source, types.uint64, types.int32, types.boolean)


@intrinsic
def start16(typing_context, target, at, source, base, more, flag):
    """Start a copy of 16 bytes to byte `at` of target from `more` bytes behind `base` in source, or of zeros."""
    return _start(target, source), _copy(16, "cg.shared.global.L2::128B")


@intrinsic
def start4(typing_context, target, at, source, base, more, flag):
    """As start16, 4 bytes."""
    return _start(target, source), _copy(4, "ca.shared.global")


@intrinsic
def half_at(typing_context, source, base, more):
    """The u16 `more` bytes behind `base` in source, as u32."""

    def build(context, builder, signature, arguments):
        start = builder.add(arguments[1], builder.sext(arguments[2], ir.IntType(64)))
        kind = ir.PointerType(ir.IntType(16), addrspace=1)
        return builder.zext(builder.load(builder.inttoptr(start, kind), align=2), _WORD)

    return types.uint32(source, types.uint64, types.int32), build


@intrinsic
def close_group(typing_context):
    """The copies that this thread started since the last call are a group."""

    def build(context, builder, signature, arguments):
        _assembled(builder, _NOTHING, "cp.async.commit_group;", "~{memory}", [])
        return context.get_dummy_value()

    return types.void(), build


@functools.cache
def make_wait_groups(pending):
    """A function that waits until at most `pending` of this thread's groups are under way."""

    @intrinsic
    def wait_groups(typing_context):
        def build(context, builder, signature, arguments):
            _assembled(builder, _NOTHING, f"cp.async.wait_group {pending};", "~{memory}", [])
            return context.get_dummy_value()

        return types.void(), build

    return wait_groups


@intrinsic
def load_matrices(typing_context, array, at):
    """Four 8 x 8 matrices of bf16; lane l gives the byte where row l % 8 of matrix l // 8 starts."""

    def build(context, builder, signature, arguments):
        address = builder.ptrtoint(_place(context, builder, signature.args[0], *arguments), _WORD)
        result = ir.LiteralStructType([_WORD] * 4)
        text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
        found = _assembled(builder, result, text, "=r,=r,=r,=r,r,~{memory}", [address])
        parts = [builder.extract_value(found, i) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(types.uint32, 4)(array, types.uint32), build


def _load(count):
    def build(context, builder, signature, arguments):
        vector = ir.VectorType(_WORD, count)
        place = _place(context, builder, signature.args[0], *arguments, vector)
        loaded = builder.load(place, align=4 * count)
        parts = [builder.extract_element(loaded, ir.Constant(_WORD, i)) for i in range(count)]
        return context.make_tuple(builder, signature.return_type, parts)

    return build


@intrinsic
def take4(typing_context, array, at):
    """Four words at byte `at` of a shared u32 array."""
    return types.UniTuple(types.uint32, 4)(array, types.uint32), _load(4)


@intrinsic
def take2(typing_context, array, at):
    """Two words at byte `at` of a shared u32 array."""
    return types.UniTuple(types.uint32, 2)(array, types.uint32), _load(2)


@intrinsic
def take1(typing_context, array, at):
    """The word at byte `at` of a shared u32 array."""

    def build(context, builder, signature, arguments):
        return builder.load(_place(context, builder, signature.args[0], *arguments), align=4)

    return types.uint32(array, types.uint32), build


@intrinsic
def leave4(typing_context, array, at, a, b, c, d):
    """Four words to byte `at` of a shared u32 array."""

    def build(context, builder, signature, arguments):
        value = ir.Constant(_FOUR, ir.Undefined)
        for i in range(4):
            value = builder.insert_element(value, arguments[2 + i], ir.Constant(_WORD, i))
        builder.store(value, _place(context, builder, signature.args[0], *arguments[:2], _FOUR), align=16)
        return context.get_dummy_value()

    return types.void(array, types.uint32, *(types.uint32,) * 4), build


@intrinsic
def fma_pair(typing_context, a, b, c):
    """a * b + c of both bf16 in u32 words, rounded once; subnormals are kept."""

    def build(context, builder, signature, arguments):
        kind = ir.FunctionType(_WORD, [_WORD] * 3)
        asm = ir.InlineAsm(kind, "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r")
        return builder.call(asm, arguments)

    return types.uint32(*(types.uint32,) * 3), build
