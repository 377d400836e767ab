"""The GPU's nanosecond clock, with its simulator twin."""

import time

from kernels_numba.primitives import SIMULATED

if SIMULATED:

    def clock_ns():
        """Nanoseconds of a clock that all threads share, as an integer."""
        return time.perf_counter_ns()

else:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def clock_ns(typing_context):
        """%globaltimer as u64 nanoseconds."""

        def build(context, builder, signature, arguments):
            kind = ir.FunctionType(ir.IntType(64), [])
            return builder.call(ir.InlineAsm(kind, "mov.u64 $0, %globaltimer;", "=l", side_effect=True), [])

        return types.uint64(), build
