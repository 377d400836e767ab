"""`bench layers`: is every step of the forward what f64 makes it, and what does each layer and operation cost?

Parity holds the named steps of a backend's forward to the NumPy backend's in f64. Times need a GPU: the forward as one
graph, its layers inside it, and each operation of one layer of each kind alone, against what it must move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddtree.bench import document_head
from ddtree.bench_equality import host_copy
from ddtree.bench_errors import STEP_OF_LAYER, Steps, experts_differing, layer_errors, step_errors
from ddtree.bench_estimate import format_estimate
from ddtree.bench_forward import ForwardTimes, commit, random_context, tree_forward, verify_tree
from ddtree.checkpoint_names import expected_tensors
from ddtree.config import ModelConfig
from ddtree.engine import Engine
from ddtree.lab import counted
from ddtree.prompts import load_prompts

# The relative error of a layer's hidden states up to which the check passes. In bf16 a few experts are chosen
# otherwise: 3.7e-2 was measured; a layer that computes something else errs by about 1.
WORST = {"f32": 1e-4, "f64": 1e-4, "bf16": 0.1}
MOST_PARAMETERS = 1 << 26  # of a model that the NumPy backend computes in f64 while one waits
MORE_POSITIONS = 32  # than the context, for the tree on top


def num_parameters(config: ModelConfig) -> int:
    """Weights of a target."""
    return sum(int(np.prod(shape)) for shape in expected_tensors(config).values())


def has_tokenizer(bundle: Any) -> bool:
    """Whether the bundle turns text into tokens; a model of random weights does not."""
    return getattr(bundle, "tokenizer", None) is not None


def tokens_for(bundle: Any, count: int) -> list[int]:
    """That many token ids out of the shipped prompts, or random ones where the bundle has no tokenizer."""
    if not has_tokenizer(bundle):
        return np.random.default_rng(count).integers(0, bundle.config.vocab_size, count).tolist()
    found: list[int] = []
    prompts = load_prompts()
    while len(found) < count:
        found += [token for prompt in prompts for token in bundle.encode(prompt.text)]
    return found[:count]


def observe(
    engine: Engine, tokens: Sequence[int], context: int, rows: int
) -> dict[tuple[str, int], np.ndarray]:
    """Every named step, by (step, layer), of a verify of `rows` rows on a context of the first `context` tokens."""
    commit(engine, tokens[:context])
    seen: dict[tuple[str, int], np.ndarray] = {}

    def see(step: str, layer: int, array: Any) -> None:
        seen[step, layer] = host_copy(engine, array).astype(np.float64)

    batch = tree_forward(engine, verify_tree(tokens[context:], rows, engine.config.vocab_size))
    logits, _ = engine.model.forward(batch, engine.cache, see)
    see("logits", engine.config.num_hidden_layers, logits)
    return seen


def parity(
    engine: Engine,
    reference: Engine,
    tokens: Sequence[int],
    context: int,
    rows: int,
    unquantised: Engine | None = None,
) -> dict[str, Any]:
    """Relative error ||x - y|| / ||y|| of each named step against the reference engine's, and the worst layer.

    `experts_differing` counts pairs of row and expert that one chose and the other did not; `passed` says whether no
    layer's hidden states err by more than WORST of the engine's dtype. `layer_errors` are those of the hidden states,
    `quantisation` has the reference's own against an engine of the weights that the quantised ones were made from, and
    the experts that those would not have chosen; it is None without such an engine.
    """
    mine, theirs = (observe(each, tokens, context, rows) for each in (engine, reference))
    steps = step_errors(mine, theirs)
    plain = None if unquantised is None else observe(unquantised, tokens, context, rows)
    layers = [record for record in steps if record["step"] == STEP_OF_LAYER]
    worst = max(layers, key=lambda record: _ordered(record["error"]))
    passed = worst["error"] <= WORST[engine.ops.dtype_name]  # false for a NaN
    return {
        **mode_of(engine),
        **{"rows": rows, "context_len": context},
        **{
            "passed": passed,
            "worst_layer": worst,
            "worst_step": max(steps, key=lambda r: _ordered(r["error"])),
        },
        "layer_errors": layer_errors(mine, theirs),
        "quantisation": None if plain is None else _quantisation(theirs, plain),
        **{"experts_differing": experts_differing(mine, theirs), "steps": steps},
    }


def _quantisation(quantised: Steps, plain: Steps) -> dict[str, Any]:
    return {
        "layer_errors": layer_errors(quantised, plain),
        "experts_differing": experts_differing(quantised, plain),
    }


def _ordered(error: float) -> float:
    """A NaN is worse than anything."""
    return np.inf if np.isnan(error) else error


def mode_of(engine: Engine) -> dict[str, Any]:
    """What every line says of how it was made."""
    ops, runner = engine.ops, engine.runner
    mode = "host" if runner is None else "graphs" if runner.graphs else "eager"
    return {
        "backend": ops.name,
        "dtype": ops.dtype_name,
        "gemm": ops.gemm,
        "mode": mode,
    }


def time_forward(
    engine: Engine, tokens: Sequence[int], context: int, rows: int, copy_gb_s: float
) -> dict[str, Any]:
    """The forward of `rows` rows after that many tokens: whole, by layer, by operation.

    A model without a tokenizer, of random weights, gets random rows for its context.
    """
    if has_tokenizer(engine.bundle):
        commit(engine, tokens[:context])
    else:
        random_context(engine, context)
    forward = ForwardTimes(engine, verify_tree(tokens[context:], rows, engine.config.vocab_size), copy_gb_s)
    record = mode_of(engine) | {"rows": rows, "context_len": context} | {"forward": forward.whole()}
    return record | {"layers": forward.by_layer(), "operations": forward.by_operation()}


def run_layer_bench(
    engine: Engine, rows: Sequence[int], contexts: Sequence[int], progress: Any = lambda total: None
) -> dict[str, Any]:
    """The document that --json prints: `parity` (None where the model is too large for it) and `times` (None without
    a GPU and graphs), a record for each context and number of rows; `progress(total)` is called after each. `weights`
    says how those of a random model are stored; `estimate` is for `bench_estimate` to fill.
    """
    small = num_parameters(engine.config) <= MOST_PARAMETERS
    timed = engine.runner is not None and engine.runner.graphs
    cases = [(context, count) for context in contexts for count in rows]
    tokens = tokens_for(engine.bundle, max(contexts) + MORE_POSITIONS)
    total = len(cases) * (small + timed)
    document = document_head("ddtree layer bench", engine)
    document |= {"weights": getattr(engine.bundle, "weights", None)}
    document |= {"parity": None, "times": None, "estimate": None}
    if small:
        reference = Engine(
            engine.bundle, dtype="f64", max_budget=max(engine.max_budget, 1), max_context=engine.max_context
        )
        document["parity"] = []
        for context, count in cases:
            document["parity"].append(parity(engine, reference, tokens, context, count))
            progress(total)
    if timed:
        from ddtree.bench_ceilings import measure_ceilings

        ceilings = measure_ceilings(engine.runner.stream)
        document |= {"ceilings": ceilings, "times": []}
        for context, count in cases:
            document["times"].append(time_forward(engine, tokens, context, count, ceilings["copy_gb_s"]))
            progress(total)
    return document


def passed(document: dict[str, Any]) -> bool:
    """Whether no parity check of the document failed."""
    return all(record["passed"] for record in document["parity"] or ())


def format_layer_table(document: dict[str, Any]) -> str:
    """The document as text."""
    lines = []
    for record in document["parity"] or ():
        worst, step = record["worst_layer"], record["worst_step"]
        lines.append(
            f"parity {_mode(record)}: {'ok' if record['passed'] else 'FAILED'}, worst layer {worst['layer']} "
            f"{worst['error']:.2e}, worst step {step['step']} of layer {step['layer']} {step['error']:.2e}, "
            f"{record['experts_differing']} experts chosen otherwise; relative to numpy f64"
        )
        if quantisation := record.get("quantisation"):
            errors = zip(record["layer_errors"], quantisation["layer_errors"], strict=True)
            listed = ", ".join(f"{n} {mine:.1e} / {other:.1e}" for n, (mine, other) in enumerate(errors))
            lines.append(
                f"layers, error of arithmetic / of quantisation: {listed}; {quantisation['experts_differing']} experts "
                "chosen otherwise than by the weights before"
            )
    if document["parity"] is None:
        lines.append("parity: the model is too large for the NumPy backend; not computed")
    if document["times"] is None:
        lines.append("times: they need a GPU and graphs (--backend cuda)")
    for record in document["times"] or ():
        lines += ["", *_time_lines(record)]
    if document.get("estimate"):
        lines += ["", format_estimate(document["estimate"])]
    return "\n".join(lines)


def _mode(record: dict[str, Any]) -> str:
    names = ("backend", "dtype", "gemm", "mode")
    settings = ", ".join(str(record[name]) for name in names)
    return f"{counted(record['rows'], 'row')} after {record['context_len']} ({settings})"


def _time_lines(record: dict[str, Any]) -> list[str]:
    whole = record["forward"]
    touched = whole["experts_touched"]
    experts = f", {np.mean(touched):.1f} experts a layer" if touched else ""
    lines = [
        f"forward {_mode(record)}: {whole['us']:.1f} us, floor {whole['floor_us']:.1f} us "
        f"({100 * whole['fraction']:.0f}%), {whole['bytes'] / 1e6:.1f} MB, {whole['launches']} operations{experts}",
        "layers us: "
        + ", ".join(
            f"{layer['layer']}{' ' + layer['kind'] if layer['kind'] else ''} {layer['us']:.1f}"
            for layer in record["layers"]
        ),
        f"{'kind':6} {'operation':28} {'us':>8} {'MB':>9} {'GB/s':>7} {'TFLOP/s':>8} {'floor':>6}",
    ]
    for one in record["operations"]:
        note = "  L2" if one["weights_stay_in_l2"] else ""
        lines.append(
            f"{one['kind']:6} {one['operation'][:28]:28} {one['us']:8.2f} {one['bytes'] / 1e6:9.3f} "
            f"{one['gb_s']:7.0f} {one['tflop_s']:8.2f} {100 * one['fraction']:5.0f}%{note}"
        )
    return lines
