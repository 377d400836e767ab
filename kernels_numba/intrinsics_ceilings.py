"""The tensor-core step that `ceilings` counts with. Not imported in the simulator."""

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic


@intrinsic
def tensor_step(typing_context, a, b, c0, c1, c2, c3):
    """One lane's four f32 of a 16 x 8 tile after += 16 x 16 times 16 x 8, all words of the bf16 operands a and b."""

    def build(context, builder, signature, arguments):
        word, value = ir.IntType(32), ir.FloatType()
        kind = ir.FunctionType(ir.LiteralStructType([value] * 4), [word] * 2 + [value] * 4)
        text = (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$4, $4, $4, $4}, {$5, $5}, {$6, $7, $8, $9};"
        )
        asm = ir.InlineAsm(kind, text, "=f,=f,=f,=f,r,r,f,f,f,f")
        found = builder.call(asm, arguments)
        parts = [builder.extract_value(found, i) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(types.float32, 4)(*(types.uint32,) * 2, *(types.float32,) * 4), build
