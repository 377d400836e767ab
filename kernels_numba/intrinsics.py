"""LLVM-level primitives for the GPU: launch order, bit casts, fma and 16-byte loads. Not imported in the simulator."""

from llvmlite import ir
from numba import cuda, types, uint32
from numba.cuda.extending import intrinsic


@intrinsic
def float_from_bits(typing_context, bits):
    """f32 of u32 bits."""

    def build(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), build


@intrinsic
def bits_from_float(typing_context, value):
    """u32 bits of an f32."""

    def build(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), build


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c in f32, rounded once (fma.rn.f32)."""

    def build(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), build


def _wide_load(vector_type, count):
    """A builder of one aligned 16-byte load from a flat array, as a tuple of its elements."""

    def build(context, builder, signature, arguments):
        array_type, _ = signature.args
        array = context.make_array(array_type)(context, builder, arguments[0])
        pointer = builder.gep(array.data, [arguments[1]])
        space = pointer.type.addrspace
        wide = builder.bitcast(pointer, ir.PointerType(vector_type, addrspace=space))
        vector = builder.load(wide, align=16)
        lanes = [builder.extract_element(vector, ir.Constant(ir.IntType(32), i)) for i in range(count)]
        return context.make_tuple(builder, signature.return_type, lanes)

    return build


@intrinsic
def load4(typing_context, array, index):
    """Four f32 at array[index], 16-byte aligned."""
    signature = types.UniTuple(types.float32, 4)(array, types.int64)
    return signature, _wide_load(ir.VectorType(ir.FloatType(), 4), 4)


@intrinsic
def load_settled(typing_context, array, index):
    """The f32 or i32 at a flat index of a global array as the L2 cache has it, no sooner than earlier accesses."""

    def build(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.ptrtoint(builder.gep(array.data, [arguments[1]]), ir.IntType(64))
        kind = ir.FunctionType(ir.IntType(32) if whole else ir.FloatType(), [ir.IntType(64)])
        names = f"={'r' if whole else 'f'},l,~{{memory}}"
        load = ir.InlineAsm(kind, "ld.global.cg.b32 $0, [$1];", names, side_effect=True)
        return builder.call(load, [address])

    whole = array.dtype == types.int32
    return array.dtype(array, types.int64), build


@intrinsic
def store4(typing_context, array, index, a, b, c, d):
    """Four f32 to array[index], 16-byte aligned."""

    def build(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(array.data, [arguments[1]])
        vector_type = ir.VectorType(ir.FloatType(), 4)
        wide = builder.bitcast(pointer, ir.PointerType(vector_type, addrspace=pointer.type.addrspace))
        vector = ir.Constant(vector_type, ir.Undefined)
        for i, value in enumerate(arguments[2:]):
            vector = builder.insert_element(vector, value, ir.Constant(ir.IntType(32), i))
        builder.store(vector, wide, align=16)
        return context.get_dummy_value()

    return types.void(array, types.int64, *(types.float32,) * 4), build


@intrinsic
def _load_words(typing_context, array, index):
    """Four u32 at a u16 array's [index], 16-byte aligned."""
    signature = types.UniTuple(types.uint32, 4)(array, types.int64)
    return signature, _wide_load(ir.VectorType(ir.IntType(32), 4), 4)


@cuda.jit(device=True, forceinline=True)
def load8(array, index):
    """Eight bf16 at array[index] as f32, 16-byte aligned; the low half of a word is the earlier element."""
    a, b, c, d = _load_words(array, index)
    high, shift = uint32(0xFFFF0000), uint32(16)
    return (
        float_from_bits(uint32(a << shift)),
        float_from_bits(uint32(a & high)),
        float_from_bits(uint32(b << shift)),
        float_from_bits(uint32(b & high)),
        float_from_bits(uint32(c << shift)),
        float_from_bits(uint32(c & high)),
        float_from_bits(uint32(d << shift)),
        float_from_bits(uint32(d & high)),
    )


@intrinsic
def after_previous(typing_context):
    """griddepcontrol, which GPUs from compute capability 9.0 on have; __CUDA_ARCH is known when PTX is made."""

    def build(context, builder, signature, arguments):
        integer, byte = ir.IntType(32), ir.PointerType(ir.IntType(8))
        name = builder.addrspacecast(context.insert_const_string(builder.module, "__CUDA_ARCH"), byte)
        reflect = builder.module.globals.get("__nvvm_reflect")
        if reflect is None:
            reflect = ir.Function(builder.module, ir.FunctionType(integer, [byte]), "__nvvm_reflect")
        with builder.if_then(
            builder.icmp_signed(">=", builder.call(reflect, [name]), ir.Constant(integer, 900))
        ):
            kind = ir.FunctionType(ir.VoidType(), [])
            text = "griddepcontrol.wait; griddepcontrol.launch_dependents;"
            builder.call(ir.InlineAsm(kind, text, "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(), build
