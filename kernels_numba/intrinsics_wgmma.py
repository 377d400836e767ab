"""LLVM-level primitives of warpgroup products (wgmma, sm_90a). Not imported in the simulator.

A warpgroup is 128 threads, four warps that stand at a multiple of four; every one of them must reach a product.

A product's sums are a flat local f32 array with constant indices, which LLVM keeps in registers. Products run on after
the call: `wait_products` says when sums, and what was read for them, may be touched again.
"""

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

from kernels_numba.intrinsics_mma import _element
from kernels_numba.intrinsics_shared import _statement

_WORD, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_STEP = 32 >> 4  # descriptor units of 16 bytes: 16 bf16 further along a row of 128 bytes
_PANEL = 8192 >> 4  # 64 rows of 128 bytes
_SIXTEEN_ROWS = 2048 >> 4


@intrinsic
def show_to_products(typing_context):
    """What this thread wrote to shared memory, or was shown, is seen by later products."""
    return types.void(), _statement("fence.proxy.async.shared::cta;")


def registers_of(count, more):
    """set_registers(): this warpgroup's threads have `count` registers each from here on, `more` or fewer than now."""
    change = "inc" if more else "dec"

    @intrinsic
    def set_registers(typing_context):
        return types.void(), _statement(f"setmaxnreg.{change}.sync.aligned.u32 {count};")

    return set_registers


@intrinsic
def power2(typing_context, value):
    """2**value in f32, to 2 units in the last place."""

    def build(context, builder, signature, arguments):
        kind = ir.FunctionType(_FLOAT, [_FLOAT])
        return builder.call(ir.InlineAsm(kind, "ex2.approx.ftz.f32 $0, $1;", "=f,f"), arguments)

    return types.float32(types.float32), build


def _places(context, builder, array_type, array, count):
    return [_element(context, builder, array_type, array, ir.Constant(_LONG, i)) for i in range(count)]


def _with_sums(context, builder, array_type, array, count, text, kinds, arguments):
    """An asm statement over sums $0 .. $count-1, changed in place, and inputs from $(2 * count) on."""
    places = _places(context, builder, array_type, array, count)
    values = [builder.load(place) for place in places]
    inputs = {"r": _WORD, "l": _LONG}
    kind = ir.FunctionType(
        ir.LiteralStructType([_FLOAT] * count), [_FLOAT] * count + [inputs[k] for k in kinds]
    )
    names = ",".join(["=f"] * count + [str(i) for i in range(count)] + [*kinds, "~{memory}"])
    found = builder.call(ir.InlineAsm(kind, text, names, side_effect=True), [*values, *arguments])
    for i, place in enumerate(places):
        builder.store(builder.extract_value(found, i), place)
    return context.get_dummy_value()


def _product(shape, sums, keep, across):
    """One wgmma over the operands described by a and b, into sums of these numbers."""
    names = ", ".join(f"${i}" for i in sums)
    return f"wgmma.mma_async.sync.aligned.{shape}.f32.bf16.bf16 {{{names}}}, a, b, {keep}, 1, 1, 0, {across};"


_OPENING = ["{", ".reg .b64 a, b;", ".reg .pred none, all;", "wgmma.fence.sync.aligned;"]
_CLOSING = ["wgmma.commit_group.sync.aligned;", "}"]


def _scores_text(first, last):
    lines = [*_OPENING, "setp.ne.s64 none, $64, $64;", "setp.eq.s64 all, $64, $64;"]
    for step in range(4 * first, 4 * last):
        at = step // 4 * _PANEL + step % 4 * _STEP
        lines += [f"add.s64 a, $64, {at};", f"add.s64 b, $65, {at};"]
        lines += [_product("m64n64k16", range(32), "all" if step else "none", 0)]
    return "\n".join([*lines, *_CLOSING])


def _weigh_text():
    """Two products of 128 columns a step: one of 256 wants more registers than a block of 512 threads starts with."""
    lines = [*_OPENING, "setp.eq.s64 all, $256, $256;"]
    for step in range(4):
        lines += [f"add.s64 a, $256, {step * _STEP};"]
        for half in range(2):
            lines += [f"add.s64 b, $257, {step * _SIXTEEN_ROWS + half * 2 * _PANEL};"]
            lines += [_product("m64n128k16", range(64 * half, 64 * half + 64), "all", 1)]
    return "\n".join([*lines, *_CLOSING])


def scores_over(first, last):
    """start_scores(sums, left, right): 64 x 64 sums += rows times rows over panels first .. last - 1; from 0: =."""
    text = _scores_text(first, last)

    @intrinsic
    def start_scores(typing_context, sums, left, right):
        def build(context, builder, signature, arguments):
            return _with_sums(
                context, builder, signature.args[0], arguments[0], 32, text, "ll", arguments[1:]
            )

        return types.void(sums, types.uint64, types.uint64), build

    return start_scores


@intrinsic
def start_weighing(typing_context, sums, weights, values):
    """64 x 256 sums += 64 x 64 weights, a panel in shared memory, times values; both by descriptor."""

    def build(context, builder, signature, arguments):
        return _with_sums(
            context, builder, signature.args[0], arguments[0], 128, _weigh_text(), "ll", arguments[1:]
        )

    return types.void(sums, types.uint64, types.uint64), build


def wait_for(count, pending):
    """wait(sums): until all but the last `pending` of this warpgroup's products are done; `count` sums are usable."""

    @intrinsic
    def wait(typing_context, sums):
        def build(context, builder, signature, arguments):
            _statement(f"wgmma.wait_group.sync.aligned {pending};")(context, builder, signature, [])
            return _with_sums(context, builder, signature.args[0], arguments[0], count, "", "", [])

        return types.void(sums), build

    return wait


@intrinsic
def scale_sums(typing_context, sums, upper, lower):
    """128 sums times a factor each for a thread's two rows."""

    def build(context, builder, signature, arguments):
        for i, place in enumerate(_places(context, builder, signature.args[0], arguments[0], 128)):
            factor = arguments[2] if i & 2 else arguments[1]
            builder.store(builder.fmul(builder.load(place), factor), place)
        return context.get_dummy_value()

    return types.void(sums, types.float32, types.float32), build


@intrinsic
def clear_sums(typing_context, sums):
    """128 sums = 0."""

    def build(context, builder, signature, arguments):
        for place in _places(context, builder, signature.args[0], arguments[0], 128):
            builder.store(ir.Constant(_FLOAT, 0.0), place)
        return context.get_dummy_value()

    return types.void(sums), build


@intrinsic
def leave_sums(typing_context, sums, target, upper, lower):
    """128 sums to a flat f32 array: a thread's first row from [upper], its second from [lower] on, 16 columns a step.

    Neighbours exchange pairs, so that a thread has four columns in a row: of the first eight of a step or, odd threads,
    of the second; [upper] and [lower] are these columns' places.
    """

    def build(context, builder, signature, arguments):
        vector = ir.VectorType(_FLOAT, 4)
        swap = ir.InlineAsm(
            ir.FunctionType(_FLOAT, [_FLOAT]),
            "shfl.sync.bfly.b32 $0, $1, 1, 31, -1;",
            "=f,f",
            side_effect=True,
        )
        thread = builder.call(ir.InlineAsm(ir.FunctionType(_WORD, []), "mov.u32 $0, %tid.x;", "=r"), [])
        odd = builder.trunc(thread, ir.IntType(1))
        places = _places(context, builder, signature.args[0], arguments[0], 128)
        rows = [_element(context, builder, signature.args[1], arguments[1], at) for at in arguments[2:]]
        for i in (8 * group + 2 * side for group in range(16) for side in range(2)):
            own, other = ([builder.load(places[i + at + n]) for n in range(2)] for at in (0, 4))
            sent = [builder.select(odd, own[n], other[n]) for n in range(2)]
            came = [builder.call(swap, [value]) for value in sent]
            four = [builder.select(odd, came[n], own[n]) for n in range(2)]
            four += [builder.select(odd, other[n], came[n]) for n in range(2)]
            value = ir.Constant(vector, ir.Undefined)
            for n in range(4):
                value = builder.insert_element(value, four[n], ir.Constant(_WORD, n))
            place = builder.gep(rows[i // 2 % 2], [ir.Constant(_LONG, i // 8 * 16)])
            wide = builder.bitcast(place, ir.PointerType(vector, addrspace=place.type.addrspace))
            builder.store(value, wide, align=16)
        return context.get_dummy_value()

    return types.void(sums, target, types.int64, types.int64), build
