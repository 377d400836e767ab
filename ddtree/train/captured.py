"""A training step as one CUDA graph: launching hundreds of small kernels takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

EAGER = 3  # calls before the capture: they compile what is compiled and make the optimizers' state
Parts = dict[str, Tensor]


class Captured:
    """Calls of `take(*tensors)`: on a GPU the first EAGER run as they are, then one is captured and replayed.

    A capture holds addresses: a call's arrays are copied to where the first call's lie, so they have its shapes, and
    what a call returns is overwritten by the next. Random numbers are those of an eager call after the same seed.
    """

    def __init__(self, take: Callable[..., Parts], device: torch.device):
        self.take, self.device = take, device
        self.inputs: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls, self.parts = 0, Parts()

    def __call__(self, arrays: Sequence[np.ndarray], seed: int) -> Parts:
        """Take a step of those arrays with PyTorch's generators seeded; the host does not wait for a GPU."""
        torch.manual_seed(seed)
        if self.device.type != "cuda":
            return self.take(*map(torch.from_numpy, arrays))
        host = [torch.from_numpy(array).pin_memory() for array in arrays]
        if not self.inputs:
            self.inputs = [torch.empty_like(values, device=self.device) for values in host]
        for there, here in zip(self.inputs, host, strict=True):
            there.copy_(here, non_blocking=True)
        self.calls += 1
        if self.calls <= EAGER:
            return self._eager()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.parts = self.take(*self.inputs)
            torch.manual_seed(seed)
        self.graph.replay()
        return self.parts

    def _eager(self) -> Parts:
        """On a stream of its own, as a capture that follows wants it."""
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            parts = self.take(*self.inputs)
        main.wait_stream(side)
        return parts
