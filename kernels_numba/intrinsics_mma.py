"""LLVM-level primitives of tensor-core tiles: mma, ldmatrix, packed bf16, asynchronous copies.

Not imported in the simulator.
"""

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

_SHARED = 3  # the address space
_WORD, _FLOAT = ir.IntType(32), ir.FloatType()


def _element(context, builder, array_type, array, index):
    """The address of array[index] of a flat array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def _shared_address(context, builder, array_type, array, index):
    """The shared-memory address, an i32, of array[index]."""
    pointer = _element(context, builder, array_type, array, index)
    shared = builder.addrspacecast(pointer, ir.PointerType(ir.IntType(8), addrspace=_SHARED))
    return builder.ptrtoint(shared, _WORD)


def _four(context, builder, signature, found):
    parts = [builder.extract_value(found, i) for i in range(4)]
    return context.make_tuple(builder, signature.return_type, parts)


@intrinsic
def mma_words(typing_context, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """One lane's part of a 16 x 8 tile += 16 x 16 times 16 x 8, bf16 pairs in u32, sums in f32."""

    def build(context, builder, signature, arguments):
        result = ir.LiteralStructType([_FLOAT] * 4)
        kind = ir.FunctionType(result, [_WORD] * 6 + [_FLOAT] * 4)
        text = (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        names = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
        return _four(context, builder, signature, builder.call(ir.InlineAsm(kind, text, names), arguments))

    return types.UniTuple(types.float32, 4)(*[types.uint32] * 6, *[types.float32] * 4), build


def _matrix_load(form):
    def build(context, builder, signature, arguments):
        address = _shared_address(context, builder, signature.args[0], *arguments)
        kind = ir.FunctionType(ir.LiteralStructType([_WORD] * 4), [_WORD])
        text = f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
        asm = ir.InlineAsm(kind, text, "=r,=r,=r,=r,r,~{memory}", side_effect=True)
        return _four(context, builder, signature, builder.call(asm, [address]))

    return build


@intrinsic
def load_matrices(typing_context, array, index):
    """Four 8 x 8 matrices of a shared u16 array; lane l gives the start of row l % 8 of matrix l // 8."""
    return types.UniTuple(types.uint32, 4)(array, types.int64), _matrix_load("")


@intrinsic
def load_matrices_across(typing_context, array, index):
    """As load_matrices, each matrix transposed."""
    return types.UniTuple(types.uint32, 4)(array, types.int64), _matrix_load(".trans")


@intrinsic
def pack_pair(typing_context, low, high):
    """The u32 of two f32, each rounded to bf16, nearest even."""

    def build(context, builder, signature, arguments):
        kind = ir.FunctionType(_WORD, [_FLOAT, _FLOAT])
        text = "cvt.rn.bf16x2.f32 $0, $1, $2;"
        return builder.call(ir.InlineAsm(kind, text, "=r,f,f"), [arguments[1], arguments[0]])

    return types.uint32(types.float32, types.float32), build


def _copy(context, builder, signature, arguments, tail, *more):
    """A 16-byte cp.async to the shared array's element from the global array's."""
    to = _shared_address(context, builder, signature.args[0], *arguments[:2])
    pointer = _element(context, builder, signature.args[2], *arguments[2:4])
    start = builder.ptrtoint(pointer, ir.IntType(64))
    kind = ir.FunctionType(ir.VoidType(), [_WORD, ir.IntType(64), *(_WORD for _ in more)])
    names = ",".join(["r", "l", *("r" for _ in more), "~{memory}"])
    text = f"cp.async.cg.shared.global [$0], [$1], 16{tail};"
    builder.call(ir.InlineAsm(kind, text, names, side_effect=True), [to, start, *more])
    return context.get_dummy_value()


@intrinsic
def copy_piece(typing_context, target, at, source, index):
    """Start a copy of 16 bytes to the shared target[at] from a flat global array's [index], both aligned so."""

    def build(context, builder, signature, arguments):
        return _copy(context, builder, signature, arguments, "")

    return types.void(target, types.int64, source, types.int64), build


@intrinsic
def copy_or_zero(typing_context, target, at, source, index, count):
    """As copy_piece, of the first `count` bytes; zeros behind them. With count 0 nothing is read."""

    def build(context, builder, signature, arguments):
        return _copy(context, builder, signature, arguments, ", $2", arguments[4])

    return types.void(target, types.int64, source, types.int64, types.uint32), build


def _bitcast(context, builder, array_type, array, index, kind):
    pointer = _element(context, builder, array_type, array, index)
    return builder.bitcast(pointer, ir.PointerType(kind, addrspace=pointer.type.addrspace))


@intrinsic
def put_words(typing_context, array, index, a, b, c, d):
    """Four u32 to the 16 bytes at an array's [index], aligned so."""

    def build(context, builder, signature, arguments):
        vector = ir.VectorType(_WORD, 4)
        value = ir.Constant(vector, ir.Undefined)
        for i in range(4):
            value = builder.insert_element(value, arguments[2 + i], ir.Constant(_WORD, i))
        builder.store(value, _bitcast(context, builder, signature.args[0], *arguments[:2], vector), align=16)
        return context.get_dummy_value()

    return types.void(array, types.int64, *(types.uint32,) * 4), build


@intrinsic
def get_words(typing_context, array, index):
    """Four u32 at a u32 array's [index], 16-byte aligned."""

    def build(context, builder, signature, arguments):
        vector = ir.VectorType(_WORD, 4)
        loaded = builder.load(_bitcast(context, builder, signature.args[0], *arguments, vector), align=16)
        parts = [builder.extract_element(loaded, ir.Constant(_WORD, i)) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(types.uint32, 4)(array, types.int64), build


@intrinsic
def put_floats(typing_context, array, index, a, b):
    """Two f32 to 8 aligned bytes from [index] of a u16 or an f32 array on."""

    def build(context, builder, signature, arguments):
        vector = ir.VectorType(_FLOAT, 2)
        value = ir.Constant(vector, ir.Undefined)
        for i in range(2):
            value = builder.insert_element(value, arguments[2 + i], ir.Constant(_WORD, i))
        builder.store(value, _bitcast(context, builder, signature.args[0], *arguments[:2], vector), align=8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.float32, types.float32), build


@intrinsic
def get_float(typing_context, array, index):
    """The f32 in a u16 array's [index : index + 2], index even."""

    def build(context, builder, signature, arguments):
        return builder.load(_bitcast(context, builder, signature.args[0], *arguments, _FLOAT), align=4)

    return types.float32(array, types.int64), build


@intrinsic
def get_floats(typing_context, array, index):
    """Two f32 at an f32 array's [index], 8-byte aligned."""

    def build(context, builder, signature, arguments):
        vector = ir.VectorType(_FLOAT, 2)
        loaded = builder.load(_bitcast(context, builder, signature.args[0], *arguments, vector), align=8)
        parts = [builder.extract_element(loaded, ir.Constant(_WORD, i)) for i in range(2)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(types.float32, 2)(array, types.int64), build


@intrinsic
def wait_copies(typing_context):
    """Wait for all copies that this thread started; a barrier then shows them to the block."""

    def build(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(kind, "cp.async.wait_all;", "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def thread_here(typing_context):
    """threadIdx.x, of which the compiler knows no bound: a loop from there on is not unrolled."""

    def build(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(ir.InlineAsm(kind, "mov.u32 $0, %tid.x;", "=r", side_effect=True), [])

    return types.int32(), build
