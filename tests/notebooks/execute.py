"""Run notebooks from a fresh kernel and write them back with their outputs: what `make notebooks` calls.

    python tests/notebooks/execute.py NOTEBOOK... [--into FOLDER]

A written notebook holds execution counts 1..n, outputs in one piece a stream, and metadata of three keys: the kernel,
the language, and the hash of the code that made the outputs. It knows nothing of what the notebooks show.
"""

import argparse
import hashlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat

CELL_SECONDS = 180
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"  # means nothing without the kernel that made it

COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # of a traceback, for a terminal


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_hash(notebook: nbformat.NotebookNode) -> str:
    """sha256 of the code cells' sources, in order: outputs that another code made carry another hash."""
    digest = hashlib.sha256()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            digest.update(cell.source.encode() + b"\0")
    return digest.hexdigest()


def run(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh kernel working in `folder`. Raises nbclient's CellExecutionError.

    The kernel is this interpreter's, with settings, history and connection files in a folder that is removed.
    """
    with tempfile.TemporaryDirectory(prefix="ddtree-kernel-", ignore_cleanup_errors=True) as scratch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            os.environ[name] = scratch
        # The first: ipykernel's debugger otherwise warns of frozen modules. The second: this environment's kernel.
        os.environ |= {"PYDEVD_DISABLE_FILE_VALIDATION": "1", "JUPYTER_PREFER_ENV_PATH": "1"}
        from nbclient import NotebookClient  # reads those folders

        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name=KERNEL["name"],
            resources={"metadata": {"path": str(folder)}},
            store_widget_state=False,
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
        )
        return client.execute()


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Strip what differs from run to run or belongs to an editor, and number the cells' ids."""
    for number, cell in enumerate(notebook.cells, start=1):
        cell.metadata = {}
        cell.id = f"cell-{number:02}"
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET_VIEW, None)
            if "metadata" in output:
                output.metadata = {}
    language = {"name": "python"}
    notebook.metadata = {
        "kernelspec": KERNEL,
        "language_info": language,
        "sources_sha256": code_hash(notebook),
    }
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return nbformat.from_dict(notebook)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, help="write there instead of over the notebooks")
    options = parser.parse_args(arguments)
    from nbclient.exceptions import CellExecutionError

    for path in options.notebooks:
        start = time.perf_counter()
        try:
            done = tidy(run(read(path), path.resolve().parent))
        except CellExecutionError as error:
            print(f"{path.name}: {COLOURS.sub('', str(error))}", file=sys.stderr)
            return 1
        target = (options.into or path.parent) / path.name
        nbformat.write(done, target)
        print(f"{path.name}: {time.perf_counter() - start:.1f} s, {target.stat().st_size / 1000:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
