"""Shapes that a test installs for itself and its workers: a package with entry points on PYTHONPATH."""

import importlib
import os
import sys

SHAPES = {
    "slow": "time.sleep(0.005)",
    "crashing": "os._exit(1)",
    "failing": "raise ZeroDivisionError('a fault of the shape')",
}


def install(monkeypatch, folder):
    """Offer SHAPES under their names, each best_first after one statement; returns the folder of their modules."""
    entries = "".join(f"{name} = shape_{name}\n" for name in SHAPES)
    info = folder / "shapes_of_tests-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shapes-of-tests\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ddtree.shapes]\n{entries}")
    for name, statement in SHAPES.items():
        text = "import os, time\nfrom ddtree.shapes.best_first import build as best_first\n\n\n"
        text += f"def build(*table, **root):\n    {statement}\n    return best_first(*table, **root)\n"
        (folder / f"shape_{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, f"shape_{name}", raising=False)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    )
    importlib.invalidate_caches()
    return folder
