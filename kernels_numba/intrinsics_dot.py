"""GPU primitives of matrix products: 16-byte loads of f32 and bf16, rounding to bf16. Not imported in the simulator."""

from llvmlite import ir
from numba import types, uint32
from numba.cuda.extending import intrinsic

from kernels_numba.intrinsics import float_from_bits
from kernels_numba.primitives import device_function

# The address space: a pointer that is one array's or another's would be loaded from as a generic one.
GLOBAL = 1
# How weights, which no kernel writes, are loaded: L1 has better things to keep, and memory gives 128 bytes no slower
# than the 64 of one request.
WEIGHT_LOAD = ".nc.L1::no_allocate.L2::128B"


def _wide_load(element):
    """A builder of one aligned 16-byte load from a flat array in global memory, as a tuple of four elements."""

    def build(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(array.data, [arguments[1]])
        wide = builder.bitcast(
            pointer, ir.PointerType(ir.VectorType(element, 4), addrspace=pointer.type.addrspace)
        )
        place = builder.addrspacecast(wide, ir.PointerType(ir.VectorType(element, 4), addrspace=GLOBAL))
        vector = builder.load(place, align=16)
        lanes = [builder.extract_element(vector, ir.Constant(ir.IntType(32), i)) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, lanes)

    return build


@intrinsic
def load_floats(typing_context, array, index):
    """Four f32 at a flat global array's [index], 16-byte aligned."""
    return types.UniTuple(types.float32, 4)(array, types.int64), _wide_load(ir.FloatType())


def _load_if(kind, letter, form):
    """A builder of one aligned 16-byte load from a flat global array where a flag is set, else four zeros."""

    def build(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.ptrtoint(builder.gep(array.data, [arguments[1]]), ir.IntType(64))
        call = ir.FunctionType(ir.LiteralStructType([kind] * 4), [ir.IntType(64), ir.IntType(32)])
        zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(4))
        text = (
            f"{{ .reg .pred p; setp.ne.u32 p, $5, 0; {zeros} "
            f"@p ld.global{form}.v4.b32 {{$0, $1, $2, $3}}, [$4]; }}"
        )
        names = ",".join([f"=&{letter}"] * 4 + ["l", "r"])
        flag = builder.zext(arguments[2], ir.IntType(32))
        found = builder.call(ir.InlineAsm(call, text, names, side_effect=True), [address, flag])
        lanes = [builder.extract_value(found, i) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, lanes)

    return build


@intrinsic
def load_words_if(typing_context, array, index, flag):
    """Four u32 that hold the eight u16 of weights at a flat array's [index], 16-byte aligned, or zeros."""
    return types.UniTuple(types.uint32, 4)(array, types.int64, types.boolean), _load_if(
        ir.IntType(32), "r", WEIGHT_LOAD
    )


@intrinsic
def load_floats_if(typing_context, array, index, flag):
    """Four f32 at a flat array's [index], 16-byte aligned, or zeros."""
    return types.UniTuple(types.float32, 4)(array, types.int64, types.boolean), _load_if(
        ir.FloatType(), "f", ""
    )


@intrinsic
def _pack_bf16(typing_context, high, low):
    """u32 whose halves are two f32 rounded to bf16, nearest even (cvt.rn.bf16x2.f32, sm_80 and up)."""

    def build(context, builder, signature, arguments):
        word, value = ir.IntType(32), ir.FloatType()
        kind = ir.FunctionType(word, [value, value])
        return builder.call(ir.InlineAsm(kind, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f"), arguments)

    return types.uint32(types.float32, types.float32), build


@device_function
def unpack_pair(word):
    """The two bf16 in a u32 as f32, the low half first."""
    return float_from_bits(uint32(word << uint32(16))), float_from_bits(uint32(word & uint32(0xFFFF0000)))


@device_function
def round_pair(a, b):
    """(a, b), f32, each rounded to a value that bf16 holds, nearest even."""
    return unpack_pair(_pack_bf16(b, a))
