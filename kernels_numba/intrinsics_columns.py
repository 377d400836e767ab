"""A chunk of many rows times 32 columns of weight in one piece, and copies of weights. The simulator has its own."""

import functools

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

from kernels_numba.intrinsics_mma import _shared_address

_WORD, _FLOAT, _INDEX = ir.IntType(32), ir.FloatType(), ir.IntType(64)
_SUMS = ir.LiteralStructType([_FLOAT] * 4)
_MMA = ir.InlineAsm(
    ir.FunctionType(_SUMS, [_WORD] * 6 + [_FLOAT] * 4),
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
    ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
)
_PIECES = ir.InlineAsm(
    ir.FunctionType(ir.LiteralStructType([_WORD] * 4), [_WORD]),
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
    "=r,=r,=r,=r,r,~{memory}",
    side_effect=True,
)
_TOGETHER = ir.InlineAsm(
    ir.FunctionType(ir.VoidType(), []), "bar.warp.sync -1;", "~{memory}", side_effect=True
)
MANY_TILES = (
    5  # of more the assembler starts too many loads at once for the registers there are, unless told to wait
)


@functools.cache
def make_multiply_wide(tiles, across):
    """multiply(buffers, rows_at, columns_at, sums, exchange): as the simulator's, all indices of sums constants."""

    @intrinsic
    def multiply(typing_context, buffers, rows_at, columns_at, sums, exchange):
        def build(context, builder, signature, arguments):
            buffer_data, sums_data = (
                context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 3)
            )
            vector = ir.VectorType(_WORD, 4)

            def four(start, offset):
                pointer = builder.gep(start, [ir.Constant(_INDEX, offset)])
                pointer = builder.bitcast(pointer, ir.PointerType(vector, addrspace=pointer.type.addrspace))
                loaded = builder.load(pointer, align=16)
                return [builder.extract_element(loaded, ir.Constant(_WORD, i)) for i in range(4)]

            def pieces(index, offset):
                index = builder.add(index, ir.Constant(_INDEX, offset))
                address = _shared_address(context, builder, signature.args[0], arguments[0], index)
                found = builder.call(_PIECES, [address])
                return [builder.extract_value(found, i) for i in range(4)]

            rows = builder.gep(buffer_data, [arguments[1]])
            right = [pieces(arguments[2], 128 * j) for j in range(across)]
            for t in range(tiles):
                if tiles > MANY_TILES and t and t % 2 == 0:
                    builder.call(_TOGETHER, [])
                for step in range(2):
                    left = four(rows, 256 * t + 128 * step)
                    for j in range(across):
                        places = [
                            builder.gep(sums_data, [ir.Constant(_INDEX, (t * across + j) * 4 + i)])
                            for i in range(4)
                        ]
                        two = right[j][2 * step : 2 * step + 2]
                        found = builder.call(_MMA, [*left, *two, *(builder.load(one) for one in places)])
                        for i, one in enumerate(places):
                            builder.store(builder.extract_value(found, i), one)
            return context.get_dummy_value()

        return types.void(buffers, types.int64, types.int64, sums, exchange), build

    return multiply


def _copy(form):
    """A builder of a 16-byte cp.async to a shared array from a global one: of `count` bytes, then zeros."""

    def build(context, builder, signature, arguments):
        to, start = (
            builder.gep(
                context.make_array(signature.args[i])(context, builder, arguments[i]).data, [arguments[i + 1]]
            )
            for i in (0, 2)
        )
        shared = builder.addrspacecast(to, ir.PointerType(ir.IntType(8), addrspace=3))
        kind = ir.FunctionType(ir.VoidType(), [_WORD, _INDEX, _WORD])
        text = f"cp.async.{form} [$0], [$1], 16, $2;"
        values = [builder.ptrtoint(shared, _WORD), builder.ptrtoint(start, _INDEX), arguments[4]]
        builder.call(ir.InlineAsm(kind, text, "r,l,r,~{memory}", side_effect=True), values)
        return context.get_dummy_value()

    return build


@intrinsic
def copy_weights(typing_context, target, at, source, index, count):
    """As `primitives_mma.copy_or_zero`, of weights: memory gives 128 bytes no slower than the 64 asked for."""
    signature = types.void(target, types.int64, source, types.int64, types.uint32)
    return signature, _copy("cg.shared.global.L2::128B")


@intrinsic
def copy_shared(typing_context, target, at, source, index, count):
    """As `primitives_mma.copy_or_zero`, of what other warps of the multiprocessor copy too: L1 keeps it."""
    signature = types.void(target, types.int64, source, types.int64, types.uint32)
    return signature, _copy("ca.shared.global")
