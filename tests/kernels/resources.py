"""Registers, spills, stack and shared memory of every kernel, as ptxas reports them, and the table that records them.

`python tests/kernels/resources.py` measures all and writes data/results/kernels_resources.json.
"""

import importlib.metadata
import json
import sys
from pathlib import Path

from kernels_numba import compiling, registry

TABLE = Path(__file__).resolve().parents[2] / "data" / "results" / "kernels_resources.json"
RECORD = "make record-resources"
COMPILERS = ("numba-cuda", "nvidia-nvvm")  # what makes the PTX; ptxas stands beside them in the table


def versions(ptxas):
    """What compiled and assembled: ptxas's release and the versions of the packages before it."""
    return {"ptxas": compiling.ptxas_version(ptxas)} | {
        name: importlib.metadata.version(name) for name in COMPILERS
    }


def measure(spec, capability, ptxas):
    """The PTX of a spec and its row of the table."""
    ptx = compiling.compile_to_ptx(spec, capability)
    resources = compiling.assemble(ptx, capability, ptxas, spec.kernel.targetoptions.get("max_registers"))
    row = {
        "kernel": spec.name,
        "arch": compiling.arch_name(capability),
        "registers": resources.registers,
        "spills": resources.spill_bytes,
        "stack": resources.stack_bytes,
        "shared": resources.shared_bytes,
    }
    return ptx, row


def load_table():
    """The recorded versions, and the rows by (kernel, arch)."""
    table = json.loads(TABLE.read_text("utf-8"))
    rows = {(row["kernel"], row["arch"]): row for row in table.pop("rows")}
    return table, rows


def record(ptxas):
    """Measure every kernel and write the table, a row a line."""
    rows = [
        measure(spec, capability, ptxas)[1]
        for spec in registry.all_specs()
        for capability in compiling.capabilities_of(spec)
    ]
    head = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in versions(ptxas).items())
    body = ",\n  ".join(json.dumps(row) for row in rows)
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(f'{{\n{head} "rows": [\n  {body}\n ]\n}}\n', "utf-8")
    return rows


def main():
    """Write the table; exit with a line on stderr when there is no ptxas."""
    ptxas = compiling.find_ptxas()
    if ptxas is None:
        sys.exit("no ptxas: install the extra `ptx` (pip install -e .[ptx])")
    rows = record(ptxas)
    print(f"{TABLE.relative_to(TABLE.parents[2])}: {len(rows)} rows")


if __name__ == "__main__":
    main()
