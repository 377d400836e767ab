"""Sixteen raw bytes to registers and back, for the GPU and for the simulator, whatever the array holds."""

import numpy as np

from kernels_numba.primitives import SIMULATED, device_function

if SIMULATED:

    def load16(array, index):
        """The 16 bytes at a flat array's [index], 16-byte aligned, as four u32."""
        return tuple(array[index : index + 16 // array.dtype.itemsize].view(np.uint32))

    def store16(array, index, words):
        """Four u32 to the 16 bytes at a flat array's [index], 16-byte aligned."""
        count = 16 // array.dtype.itemsize
        array[index : index + count] = np.array(words, np.uint32).view(array.dtype)

else:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    _WORD = ir.IntType(32)
    _FOUR = ir.VectorType(_WORD, 4)

    def _address(context, builder, array_type, array, index):
        """The address of array[index] as one of four words."""
        pointer = builder.gep(context.make_array(array_type)(context, builder, array).data, [index])
        return builder.bitcast(pointer, ir.PointerType(_FOUR, addrspace=pointer.type.addrspace))

    @intrinsic
    def load16(typing_context, array, index):
        def build(context, builder, signature, arguments):
            loaded = builder.load(_address(context, builder, signature.args[0], *arguments), align=16)
            words = [builder.extract_element(loaded, ir.Constant(_WORD, i)) for i in range(4)]
            return context.make_tuple(builder, signature.return_type, words)

        return types.UniTuple(types.uint32, 4)(array, types.int64), build

    @intrinsic
    def store16(typing_context, array, index, words):
        def build(context, builder, signature, arguments):
            value = ir.Constant(_FOUR, ir.Undefined)
            for i in range(4):
                word = builder.extract_value(arguments[2], i)
                value = builder.insert_element(value, word, ir.Constant(_WORD, i))
            address = _address(context, builder, signature.args[0], arguments[0], arguments[1])
            builder.store(value, address, align=16)
            return context.get_dummy_value()

        return types.void(array, types.int64, types.UniTuple(types.uint32, 4)), build


@device_function
def fetch16(array, index, held, at):
    """held[at : at + 4], u32 in registers, = the 16 bytes at a flat array's [index], 16-byte aligned."""
    held[at], held[at + 1], held[at + 2], held[at + 3] = load16(array, index)


@device_function
def put16(array, index, held, at):
    """The 16 bytes at a flat array's [index], 16-byte aligned, = held[at : at + 4]."""
    store16(array, index, (held[at], held[at + 1], held[at + 2], held[at + 3]))


@device_function
def fetch1(array, index, held, at):
    """held[at] = array[index]."""
    held[at] = array[index]


@device_function
def put1(array, index, held, at):
    """array[index] = held[at]."""
    array[index] = held[at]
