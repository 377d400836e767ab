"""What this GPU can do: copy bandwidth, the rates of f32 and of tensor-core multiply-adds, measured as cases are."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree.bench_data import bf16, generator, normal
from ddtree.bench_kernels import replay_times
from ddtree.ops.graphs import GpuStream

COPY_BYTES = 1 << 30
BLOCKS_PER_PROCESSOR = 16
CHAIN_ROUNDS = 512
TENSOR_ROUNDS = 16  # times as many: such a round has fewer steps, and they are faster
NODES = 4


def measure_ceilings(stream: GpuStream, quick: bool = False) -> dict[str, float]:
    """Copy bandwidth (read plus written, GB/s; the best of three grids), and multiply-adds (two FLOPs, TFLOP/s).

    `fma` in f32 on CUDA cores; `mma` of bf16 tiles on tensor cores by mma.sync, which is not their fastest instruction.
    """
    size = COPY_BYTES // (32 if quick else 1) // 4
    rounds = CHAIN_ROUNDS // (16 if quick else 1)
    return {
        "copy_gb_s": _copy(stream, size),
        "fma_tflop_s": _chain(stream, rounds),
        "mma_tflop_s": _tensor_chain(stream, rounds * TENSOR_ROUNDS),
    }


def _copy(stream: GpuStream, size: int) -> float:
    from numba import cuda

    from kernels_numba import ceilings

    block = normal(generator("copy"), min(size, 1 << 22))
    x, out = cuda.device_array(size, np.float32), cuda.device_array(size, np.float32)
    for start in range(0, size, block.size):
        x[start : start + block.size].copy_to_device(block)
    processors = stream.device.properties.multiprocessor_count
    rates = []
    for blocks in (16 * processors, 64 * processors, size // (4 * ceilings.UNROLL * ceilings.THREADS)):
        out[size - block.size :].copy_to_device(np.zeros_like(block))
        cuda.synchronize()
        microseconds = _microseconds(stream, functools.partial(ceilings.copy, x, out, blocks))
        assert np.array_equal(out[size - block.size :].copy_to_host(), block), "the copy kernel does not copy"
        rates.append(2 * x.nbytes / microseconds / 1e3)
    return max(rates)


def _chain(stream: GpuStream, rounds: int) -> float:
    from numba import cuda

    from kernels_numba import ceilings

    x, out = cuda.to_device(np.array([0.999, 0.5], np.float32)), _outputs(stream)
    flops = 2 * ceilings.CHAINS * ceilings.STEPS * rounds * out.size
    return flops / _microseconds(stream, functools.partial(ceilings.chain, x, rounds, out)) / 1e6


def _tensor_chain(stream: GpuStream, rounds: int) -> float:
    from numba import cuda

    from kernels_numba import ceilings

    values = bf16(normal(generator("tensor_chain"), 2 * ceilings.WARP, scale=0.01))
    words, out = cuda.to_device(values.view(np.uint32)), _outputs(stream)
    flops = ceilings.TILE_FLOPS * ceilings.TENSOR_CHAINS * rounds * (out.size // ceilings.WARP)
    return flops / _microseconds(stream, functools.partial(ceilings.tensor_chain, words, rounds, out)) / 1e6


def _outputs(stream: GpuStream) -> Any:
    """One f32 for each thread of a grid that fills the GPU."""
    from numba import cuda

    from kernels_numba import ceilings

    blocks = BLOCKS_PER_PROCESSOR * stream.device.properties.multiprocessor_count
    return cuda.device_array(blocks * ceilings.THREADS, np.float32)


def _microseconds(stream: GpuStream, launch: Callable[[Any], None]) -> float:
    """Median microseconds of a launch as a graph node, after one that compiles it."""
    from numba import cuda

    cuda.synchronize()  # copies on the default stream have ended
    launch(stream.numba)
    stream.sync()

    def launches(numba_stream: Any) -> None:
        for _ in range(NODES):
            launch(numba_stream)

    return statistics.median(replay_times(stream.capture(launches), stream, NODES))
