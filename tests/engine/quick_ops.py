"""The CUDA backend in the simulator with NumPy twins for its slow kernels, and a runner that replays as graphs do.

The state between rounds, and its kernels, are the real ones: whole decodes take a tenth of a second.
"""

import inspect

import numpy as np

from ddtree.ops.cuda_ops import CudaOps
from ddtree.ops.numpy_ops import NumpyOps
from ddtree.reference.gate import gate_device

TWINS = (
    *("embed", "linear", "head_linear", "rms_norm", "add_norm", "swiglu", "add", "copy_columns", "rope"),
    *("split_query", "append_latent", "append_rows", "attention", "block_attention", "experts"),
    *("topk_log_softmax", "wide_linear", "branch_scores"),
)


def host(array):
    """The NumPy array behind a simulated device array; anything else as it is."""
    return getattr(array, "_ary", array)


class QuickOps(CudaOps):
    """CudaOps whose forward, top-k, tree, choice, walk and move are NumPy's."""

    def gate(self, logits, bias, rule, gates):
        gate_device(host(logits), host(bias), rule, host(gates))

    def argmax_and_bad(self, logits, tokens, bad):
        self.scratch("argmax", 2 * logits.shape[0], np.uint64)
        NumpyOps.argmax(host(logits), host(tokens))
        self.row_is_bad(logits, bad)

    def row_is_bad(self, logits, bad):
        found = np.empty(bad.shape, bool)
        NumpyOps.row_is_bad(host(logits), found)
        host(bad)[:] = found

    def sample(self, logits, positions, settings, out):
        words = host(settings)
        rate, (top_k, top_p, low, high, sequence) = words[:1].view(np.float32)[0], map(int, words[1:])
        drawn = 2 / float(rate), top_k, (top_p + 1) / 2**32, low | high << 32, sequence
        NumpyOps.sample(host(logits), host(positions), *drawn, host(out))

    def build_tree(self, token_ids, log_probs, budget, max_depth, *out):
        *arrays, num_nodes = map(host, out)
        table = host(token_ids), host(log_probs)
        num_nodes[0] = NumpyOps.build_tree(*table, budget, int(host(max_depth)[0]), *arrays)

    def build_branch_tree(self, token_ids, places, log_probs, budget, max_depth, *out):
        *arrays, num_nodes = map(host, out)
        table = map(host, (token_ids, places, log_probs))
        num_nodes[0] = NumpyOps.build_branch_tree(*table, budget, int(host(max_depth)[0]), *arrays)

    def accept(self, parents, token_ids, target_tokens, num_nodes, path, result):
        rows = map(host, (parents, token_ids, target_tokens))
        host(result)[:] = NumpyOps.accept(*rows, int(host(num_nodes)[0]), host(path))

    def compact(self, cache, context_len, path, result):
        if length := int(host(result)[0]):
            NumpyOps.compact(list(host(cache)), int(host(context_len)[0]), host(path)[:length])


def _by_twin(twin):
    names = list(inspect.signature(twin).parameters)
    at = names.index("context_len") if "context_len" in names else None

    def run(self, *arguments):
        arguments = [host(argument) for argument in arguments]
        if at is not None:
            arguments[at] = int(arguments[at][0])
        twin(*arguments)

    return run


for _name in TWINS:
    setattr(QuickOps, _name, _by_twin(getattr(NumpyOps, _name)))


LAUNCHES = (
    *TWINS,
    *("gate", "argmax_and_bad", "row_is_bad", "sample", "build_tree", "build_branch_tree"),
    *("accept", "compact", "settle"),
    *("finish_chunk", "advance", "next_positions", "stamp"),
)


class Replays:
    """In place of GraphRunner: what a key's first body launched is launched again, whatever body comes with it.

    `stale` lists scratch that a graph would no longer find where it was.
    """

    def __init__(self, ops):
        self.graphs, self.scratch, self.used, self.stale = {}, {}, {}, []
        self.log = None
        for name in LAUNCHES:
            setattr(ops, name, self._logged(getattr(ops, name)))
        take = ops.scratch

        def scratch(name, *more):
            self.used[name] = take(name, *more)
            return self.used[name]

        ops.scratch = scratch

    def _logged(self, launch):
        def run(*arguments):
            if self.log is not None:
                self.log.append((launch, arguments))
            launch(*arguments)

        return run

    def run(self, key, body):
        self.used.clear()
        if key in self.graphs:
            for launch, arguments in self.graphs[key]:
                launch(*arguments)
        else:
            self.log = self.graphs[key] = []
            body()
            self.log = None
        had = self.scratch.setdefault(key, dict(self.used))
        self.stale += [(key, name) for name in had if had[name] is not self.used[name]]
