"""Documents and rounds that figures are drawn from in tests, in the form that benches and traces write them."""

import numpy as np

STAGES = ("draft", "build", "verify", "accept", "compact")
SHARED = ("linear qkv_a", "append_latent qkv_a_norm", "linear q_b", "split_query",
          "head_linear w_kc", "attention", "head_linear w_vc", "linear o", "add_norm post_norm")  # fmt: skip
DENSE = (*SHARED, "linear mlp.gate", "linear mlp.up", "swiglu", "linear mlp.down", "add_norm input_norm")
MOE = (*SHARED, "linear mlp.router", "gate mlp.bias", "experts mlp.experts.gate+mlp.experts.up+mlp.experts.down",
       "linear mlp.shared.gate", "linear mlp.shared.up", "swiglu", "linear mlp.shared.down", "add")  # fmt: skip
ENDS = ("embed embedding", "rms_norm input_norm", "copy_columns", "linear head")
STEPS = ("input_norm", "attention", "post_norm", "router", "gates", "mlp", "layer")


def record(method, budget, temperature=0.0, acceptance=3.0, speed=300.0, ms=10.0):
    """A row of compare's report."""
    return {
        "method": method,
        "budget": budget,
        "temperature": temperature,
        "nodes_per_round": float(budget),
        "mean_acceptance": acceptance,
        "mean_acceptance_outside_loops": acceptance,
        "tokens_per_second": speed,
        "speed_over_ar": None if speed is None else speed / 250,
        "stage_ms": None if ms is None else {stage: ms * (1 + i) / 15 for i, stage in enumerate(STAGES)},
    }


def layer_document(num_layers=8, rows=(1, 16), dtype="bf16"):
    """A layer bench with times and parity of a model whose first layer is dense."""
    rng = np.random.default_rng(0)

    def operation(kind, name):
        floor = float(rng.uniform(1, 20))
        return {"kind": kind, "operation": name, "us": floor * float(rng.uniform(1.1, 4)), "floor_us": floor}

    kinds = (("dense", DENSE), ("moe", MOE), ("ends", ENDS))
    operations = [operation(kind, name) for kind, names in kinds for name in names]
    layers = [{"layer": "embedding", "kind": "", "us": 4.0}]
    layers += [{"layer": i, "kind": "moe" if i else "dense", "us": 300.0 + 9 * i} for i in range(num_layers)]
    layers += [{"layer": "head", "kind": "", "us": 55.0}]
    whole = {"us": 2800.0, "floor_us": 1500.0}
    mode = {"backend": "cuda", "dtype": dtype, "context_len": 128}
    times = [mode | {"rows": n, "forward": whole, "layers": layers, "operations": operations} for n in rows]
    parity = [
        mode | {"rows": n, "steps": parity_steps(num_layers, 1e-7 if dtype == "f32" else 3e-3)} for n in rows
    ]
    return {"kind": "ddtree layer bench", "model": "py12m", "times": times, "parity": parity}


def parity_steps(num_layers, size):
    """Errors of every step, growing with depth; the embedding's is 0."""
    steps = [{"step": "embedding", "layer": 0, "error": 0.0}]
    for layer in range(num_layers):
        names = STEPS if layer else [name for name in STEPS if name not in ("router", "gates")]
        steps += [
            {"step": name, "layer": layer, "error": size * (1 + layer + i / 7)}
            for i, name in enumerate(names)
        ]
    return steps + [{"step": name, "layer": num_layers, "error": size * 9} for name in ("norm", "logits")]


def kernel_document(mma=True):
    """A kernel bench of a few cases, one of which failed."""
    cases = [
        case("linear bf16 1x7168x18432", 2.6e8, 2.6e8, 66.0, "copy", 0.95),
        case("linear f32 64x256x768", 2.5e7, 1.0e6, 4.0, "fma", 0.10),
        case("attention bf16 64x64x512+64 after 8192", 7.4e10, 2.7e7, 926.0, "mma" if mma else "fma", 0.4),
        case("experts bf16 16x7168 8 of 384x2048", 1.1e10, 9.9e9, 2417.0, "copy", 0.98),
        case("argmax f32 1x2048", 0, 8192, 3.0, "copy", 0.001),
        {"name": "gate noaux_tc 1x16 top 4, 1 of 1 groups", "error": "AssertionError: not equal"},
    ]
    ceilings = {"copy_gb_s": 4189.8, "fma_tflop_s": 61.83} | ({"mma_tflop_s": 640.0} if mma else {})
    return {"kind": "ddtree kernel bench", "gpu": "NVIDIA H200", "ceilings": ceilings, "cases": cases}


def case(name, flops, moved, us, bound, fraction):
    """A timed case."""
    rates = {"graph_us": us, "gb_s": moved / us / 1e3, "tflop_s": flops / us / 1e6}
    return {"name": name, "flops": flops, "bytes": moved, "bound": bound, "fraction": fraction} | rates


def gates(experts=16, tokens=17, chosen=4, seed=0):
    """Gates f32[experts, tokens] of random routing."""
    rng = np.random.default_rng(seed)
    found = np.zeros((experts, tokens), np.float32)
    for token in range(tokens):
        found[rng.choice(experts, chosen, replace=False), token] = rng.dirichlet(np.ones(chosen))
    return found
