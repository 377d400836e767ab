"""`bench kernels`: every kernel on this GPU, checked and timed, in one document that says what it was measured on."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.ops.graphs import GpuStream, require_gpu
from ddtree.versions import package_version

SCHEMA_VERSION = 1
PACKAGES = ("ddtree", "python", "numba", "numba-cuda", "cuda-core", "cuda-bindings", "numpy")

Progress = Callable[[dict[str, Any], int, int], None]


def run_kernel_bench(
    only: str | None = None, quick: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Check and time the cases whose name contains `only` (all by default); the document that --json prints.

    `quick` takes small sizes, for a check that all runs; `progress(record, number, total)` is called after each
    case. A case that fails its check, or does not run, says so in its `error` and has no times; see `failures`.
    Raises UsageError where there is no GPU, no `gpu` extra, or no such case.
    """
    require_gpu("bench kernels")
    chosen = choose_cases(only, quick)
    from ddtree.bench_ceilings import measure_ceilings
    from ddtree.bench_kernels import against_ceilings, run_checked, time_case

    stream = GpuStream()
    device = stream.device
    ceilings = measure_ceilings(stream, quick)
    records = []
    for number, case in enumerate(chosen, start=1):
        record = {name: getattr(case, name) for name in ("name", "launcher", "bytes", "flops", "note")}
        try:
            work = case.prepare()
            record["checked"] = work.checked
            run_checked(work, stream)
            record |= time_case(case, work, stream, device.properties.l2_cache_size)
            record |= against_ceilings(case, record["graph_us"], ceilings)
        except Exception as error:  # whatever one kernel does, what the others measured is kept
            record["error"] = " ".join(f"{type(error).__name__}: {error}".split())
        records.append(record)
        if progress:
            progress(record, number, len(chosen))
    return {
        "schema": SCHEMA_VERSION,
        "kind": "ddtree kernel bench",
        "quick": quick,
        **environment(stream),
        "ceilings": ceilings,
        "cases": records,
        "kernels": compiled_kernels(),
    }


def failures(document: dict[str, Any]) -> list[str]:
    """A line for each case that failed its check or did not run; the command exits 1 when there are any."""
    return [f"{case['name']}: {case['error']}" for case in document["cases"] if "error" in case]


def choose_cases(only: str | None, quick: bool) -> list[Any]:
    """The cases whose name contains `only`. Raises UsageError, naming the launchers there are, when none does."""
    from ddtree.bench_cases import all_cases

    cases = all_cases(quick)
    chosen = [case for case in cases if only is None or only in case.name]
    if not chosen:
        names = ", ".join(dict.fromkeys(case.name.split()[0] for case in cases))
        raise UsageError(f"bench kernels: no case's name contains {only!r}; they begin with {names}")
    return chosen


def document_head(kind: str, engine: Engine) -> dict[str, Any]:
    """What a document of an engine's figures begins with."""
    stream = getattr(engine.runner, "stream", None)
    model = engine.bundle.path
    return {"schema": SCHEMA_VERSION, "kind": kind, **environment(stream), "model": model.stem}


def environment(stream: GpuStream | None) -> dict[str, Any]:
    """What was measured on, with what, when, and of which commit; `gpu` is None where the host computed."""
    return {
        **(_gpu(stream) if stream else {"gpu": None}),
        "versions": {name: package_version(name) for name in PACKAGES},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def _gpu(stream: GpuStream) -> dict[str, Any]:
    device = stream.device
    properties = device.properties
    return {
        "gpu": device.name,
        "compute_capability": ".".join(str(part) for part in device.compute_capability),
        "multiprocessors": properties.multiprocessor_count,
        "l2_bytes": properties.l2_cache_size,
        **stream.driver_versions(),
    }


def _commit() -> str | None:
    """The commit of this checkout, with a + when files differ from it; None outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def compiled_kernels() -> list[dict[str, Any]]:
    """Registers, local and static shared bytes of every kernel launched so far, as the driver reports them.

    These are Numba's own compilation for this GPU, through link-time optimisation, which the recorded PTX is not.
    """
    modules = [sys.modules[name] for name in sorted(sys.modules) if name.startswith("kernels_numba.")]
    seen: dict[int, Any] = {}
    for spec in (spec for module in modules for spec in getattr(module, "SPECS", ())):
        seen.setdefault(id(spec.kernel), spec)
    return [
        {
            "kernel": spec.name,
            "signature": ", ".join(str(kind) for kind in signature),
            "registers": compiled.regs_per_thread,
            "local_bytes": compiled.local_mem_per_thread,
            "shared_bytes": compiled.shared_mem_per_block,
        }
        for spec in seen.values()
        for signature, compiled in spec.kernel.overloads.items()
    ]


def format_kernel_table(document: dict[str, Any]) -> str:
    """The document as text: one line a case, what it reaches of what bounds it, and what it was measured on."""
    rows = [("case", "graph us", "launch us", "GB/s", "TFLOP/s", "bound", "reached")]
    for case in document["cases"]:
        if "error" in case:
            rows.append((case["name"], "-", "-", "-", "-", "-", "FAILED"))
            continue
        rows.append(
            (
                case["name"],
                f"{case['graph_us']:.2f}",
                f"{case['launch_us']:.1f}",
                f"{case['gb_s']:.0f}",
                f"{case['tflop_s']:.2f}",
                case["bound"],
                f"{100 * case['fraction']:.0f}%",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rates = ", ".join(f"{name} {value:.1f}" for name, value in document["ceilings"].items())
    lines.append(f"{document['gpu']}, driver {document['driver']}; measured ceilings: {rates}")
    return "\n".join(lines + failures(document))
