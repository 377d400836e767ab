"""LLVM-level primitives of the attention kernels: asynchronous copies, loads from rows, 16-byte stores.

Not imported in the simulator.
"""

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

_GLOBAL, _SHARED = 1, 3  # address spaces


def _element(context, builder, array_type, array, index):
    """The address of array[index] of a flat array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def _row_address(context, builder, array_type, array, row, width, column):
    """The address, an i64, of element [row, column] of a flat global array of rows of `width`, in one instruction."""
    base = builder.ptrtoint(_element(context, builder, array_type, array, column), ir.IntType(64))
    size = ir.Constant(ir.IntType(32), array_type.dtype.bitwidth // 8)
    kind = ir.FunctionType(ir.IntType(64), [ir.IntType(32), ir.IntType(32), ir.IntType(64)])
    multiply = ir.InlineAsm(kind, "mad.wide.u32 $0, $1, $2, $3;", "=l,r,r,l")
    return builder.call(multiply, [row, builder.mul(width, size), base])


def _row_load(count, align):
    """A builder of an aligned load of `count` f32 from [row, column], as a tuple."""

    def build(context, builder, signature, arguments):
        address = _row_address(context, builder, signature.args[0], *arguments)
        vector = ir.VectorType(ir.FloatType(), count)
        loaded = builder.load(
            builder.inttoptr(address, ir.PointerType(vector, addrspace=_GLOBAL)), align=align
        )
        lanes = [builder.extract_element(loaded, ir.Constant(ir.IntType(32), i)) for i in range(count)]
        return context.make_tuple(builder, signature.return_type, lanes)

    return build


@intrinsic
def load_row4(typing_context, array, row, width, column):
    """Four f32 at [row, column] of a flat global f32 array of rows of `width`, 16-byte aligned."""
    signature = types.UniTuple(types.float32, 4)(array, types.uint32, types.uint32, types.int64)
    return signature, _row_load(4, 16)


@intrinsic
def load_row2(typing_context, array, row, width, column):
    """Four bf16 at [row, column] of a flat global u16 array of rows of `width`, 8-byte aligned, as two words."""
    signature = types.UniTuple(types.float32, 2)(array, types.uint32, types.uint32, types.int64)
    return signature, _row_load(2, 8)


@intrinsic
def copy16(typing_context, target, at, source, row, width, column):
    """Start a copy of 16 bytes to the shared target[at] from [row, column] of a flat global array of `width`.

    Both are 16-byte aligned.
    """

    def build(context, builder, signature, arguments):
        to = _element(context, builder, signature.args[0], arguments[0], arguments[1])
        shared = builder.addrspacecast(to, ir.PointerType(ir.IntType(8), addrspace=_SHARED))
        offset = builder.ptrtoint(shared, ir.IntType(32))
        address = _row_address(context, builder, signature.args[2], *arguments[2:])
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32), ir.IntType(64)])
        text = "cp.async.cg.shared.global [$0], [$1], 16;"
        builder.call(ir.InlineAsm(kind, text, "r,l,~{memory}", side_effect=True), [offset, address])
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.uint32, types.uint32, types.int64), build


@intrinsic
def thread_here(typing_context):
    """threadIdx.x, read anew: what is made of it is made here, and not kept in registers from before a loop."""

    def build(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(ir.InlineAsm(kind, "mov.u32 $0, %tid.x;", "=r", side_effect=True), [])

    return types.uint32(), build


@intrinsic
def wait_copies(typing_context):
    """Wait for all copies that this thread started; a barrier then shows them to the block."""

    def build(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(ir.InlineAsm(kind, "cp.async.wait_all;", "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def store4(typing_context, array, index, a, b, c, d):
    """array[index : index + 4] = a, b, c, d in one access of 16 bytes, aligned so."""

    def build(context, builder, signature, arguments):
        pointer = _element(context, builder, signature.args[0], arguments[0], arguments[1])
        vector = ir.VectorType(ir.FloatType(), 4)
        value = ir.Constant(vector, ir.Undefined)
        for i in range(4):
            value = builder.insert_element(value, arguments[2 + i], ir.Constant(ir.IntType(32), i))
        wide = builder.bitcast(pointer, ir.PointerType(vector, addrspace=pointer.type.addrspace))
        builder.store(value, wide, align=16)
        return context.get_dummy_value()

    return types.void(array, types.int64, *(types.float32,) * 4), build
