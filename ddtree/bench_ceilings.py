"""What this GPU can do: copy bandwidth, and the rate of f32 multiply-adds, measured as the cases are."""

from __future__ import annotations

import statistics

import numpy as np

from ddtree.bench_kernels import replay_times
from ddtree.ops.graphs import GpuStream

COPY_BYTES = 1 << 30
CHAIN_BLOCKS_PER_PROCESSOR = 16
CHAIN_ROUNDS = 512
NODES = 4


def measure_ceilings(stream: GpuStream, quick: bool = False) -> dict[str, float]:
    """Copy bandwidth (read plus written, GB/s) and f32 multiply-adds (two FLOPs each, TFLOP/s)."""
    size = COPY_BYTES // (32 if quick else 1) // 4
    return {
        "copy_gb_s": _copy(stream, size),
        "fma_tflop_s": _chain(stream, CHAIN_ROUNDS // (16 if quick else 1)),
    }


def _copy(stream: GpuStream, size: int) -> float:
    from numba import cuda

    from kernels_numba import ceilings

    block = np.random.default_rng(0).standard_normal(min(size, 1 << 22), np.float32)
    x, out = cuda.device_array(size, np.float32), cuda.device_array(size, np.float32)
    for start in range(0, size, block.size):
        x[start : start + block.size].copy_to_device(block)
    ceilings.copy(x, out)
    last = slice(size - block.size, size)
    assert np.array_equal(out[last].copy_to_host(), block), "the copy kernel does not copy"
    graph = stream.capture(lambda s: [ceilings.copy(x, out, s) for _ in range(NODES)])
    return 2 * x.nbytes / statistics.median(replay_times(graph, stream, NODES)) / 1e3


def _chain(stream: GpuStream, rounds: int) -> float:
    from numba import cuda

    from kernels_numba import ceilings

    blocks = CHAIN_BLOCKS_PER_PROCESSOR * stream.device.properties.multiprocessor_count
    out = cuda.device_array(blocks * ceilings.THREADS, np.float32)
    x = cuda.to_device(np.array([0.999, 0.5], np.float32))
    ceilings.chain(x, rounds, out)
    cuda.synchronize()
    graph = stream.capture(lambda s: [ceilings.chain(x, rounds, out, s) for _ in range(NODES)])
    flops = 2 * ceilings.CHAINS * ceilings.STEPS * rounds * out.size
    return flops / statistics.median(replay_times(graph, stream, NODES)) / 1e6
