"""LLVM-level primitives of copies that are waited for a stage at a time. Not imported in the simulator."""

import functools

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic


def _order(text):
    """An intrinsic that is one instruction without operands, which no access to memory may pass."""

    @intrinsic
    def order(typing_context):
        def build(context, builder, signature, arguments):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(ir.InlineAsm(kind, text, "~{memory}", side_effect=True), [])
            return context.get_dummy_value()

        return types.void(), build

    return order


commit_copies = _order("cp.async.commit_group;")


@functools.cache
def wait_copies_but(count):
    """What waits for all groups of copies that this thread committed but the last `count`."""
    return _order(f"cp.async.wait_group {count};")
