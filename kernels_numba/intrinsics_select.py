"""LLVM-level primitives of the selection kernels: bits of an f64, and reductions of one instruction over a warp.

Not imported in the simulator; `primitives_select` holds the twins.
"""

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic


@intrinsic
def bits_from_double(typing_context, value):
    """u64 bits of an f64."""

    def build(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.uint64(types.float64), build


def _redux(operation):
    """A builder of redux.sync over the full warp (sm_80 and later): the same result in every lane."""

    def build(context, builder, signature, arguments):
        word = ir.IntType(32)
        code = f"redux.sync.{operation} $0, $1, 0xffffffff;"
        assembly = ir.InlineAsm(ir.FunctionType(word, [word]), code, "=r,r", side_effect=True)
        result = builder.call(assembly, [arguments[0]])
        result.attributes.add("convergent")  # every lane must reach it together
        return result

    return build


@intrinsic
def redux_max(typing_context, value):
    """The greatest u32 of the warp."""
    return types.uint32(types.uint32), _redux("max.u32")


@intrinsic
def redux_add(typing_context, value):
    """The sum of the warp's i32."""
    return types.int32(types.int32), _redux("add.s32")
