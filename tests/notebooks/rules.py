"""What a committed notebook must be, as a list of what is wrong with one."""

import ast
import re

import nbformat
from notebooks.execute import KERNEL, code_hash
from workspace.test_imports import MACHINE_PATH

MOST_CELLS = 25
MOST_BYTES = 600_000
MOST_FUNCTION_LINES = 5
KINDS = {"text/plain", "text/html", "text/markdown", "text/latex", "image/png"}
METADATA = {"kernelspec", "language_info", "sources_sha256"}
WARNING = re.compile(r"\b\w*Warning:")
INTERPRETER_PATH = re.compile(r"/(?:usr|opt)/[\w./+-]*(?:lib|bin|site-packages)/")
REMEDY = "run `make notebooks`"


def problems(notebook: nbformat.NotebookNode, size: int) -> list[str]:
    """A line for each rule that a notebook of `size` bytes breaks."""
    cells = notebook.cells
    found = [] if len(cells) <= MOST_CELLS else [f"{len(cells)} cells, more than {MOST_CELLS}"]
    if size > MOST_BYTES:
        found.append(f"{size} bytes, more than {MOST_BYTES}")
    if not cells or cells[0].cell_type != "markdown" or not cells[0].source.startswith("# "):
        found.append("the first cell is no title")
    return found + _of_metadata(notebook) + _of_code(notebook) + _of_sections(cells) + _of_outputs(cells)


def _of_metadata(notebook: nbformat.NotebookNode) -> list[str]:
    metadata = notebook.metadata
    found = [f"metadata {key!r}: {REMEDY}" for key in sorted(metadata.keys() - METADATA)]
    found += [
        f"cell {number}: metadata: {REMEDY}" for number, cell in enumerate(notebook.cells) if cell.metadata
    ]
    if metadata.get("kernelspec") != KERNEL:
        found.append(f"another kernel than {KERNEL['name']}: {REMEDY}")
    if metadata.get("sources_sha256") != code_hash(notebook):
        found.append(f"the outputs are older than the code: {REMEDY}")
    return found


def _of_code(notebook: nbformat.NotebookNode) -> list[str]:
    """Execution counts, and functions that belong into ddtree/."""
    found, expected = [], 1
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        if cell.execution_count is None:
            found.append(f"cell {number}: no outputs: {REMEDY}")
        elif cell.execution_count != expected:
            found.append(f"cell {number}: execution count {cell.execution_count}, not {expected}: {REMEDY}")
        expected += 1
        for node in ast.walk(ast.parse(_python(cell.source))):
            lines = getattr(node, "end_lineno", 0) - getattr(node, "lineno", 0) + 1
            if isinstance(node, ast.ClassDef):
                found.append(f"cell {number}: class {node.name}: it belongs into ddtree/")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and lines > MOST_FUNCTION_LINES:
                found.append(
                    f"cell {number}: {node.name} has {lines} lines, more than {MOST_FUNCTION_LINES}: "
                    "it belongs into ddtree/"
                )
    return found


def _python(source: str) -> str:
    """A cell's source without IPython's magics."""
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())


def _of_sections(cells: list[nbformat.NotebookNode]) -> list[str]:
    """A section, from a heading `##` to the next, asserts something where it runs something."""
    title, code, found = "", "", []
    for cell in [*cells, nbformat.v4.new_markdown_cell("## ")]:
        if cell.cell_type == "code":
            code += _python(cell.source) + "\n"
        elif heading := re.match(r"## (.*)", cell.source):
            if title and code and not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code))):
                found.append(f"section {title!r} asserts nothing")
            title, code = heading[1], ""
    return found


def _of_outputs(cells: list[nbformat.NotebookNode]) -> list[str]:
    found = []
    for number, cell in enumerate(cells):
        for output in cell.get("outputs", ()):
            what = f"cell {number}"
            if output.output_type == "error":
                found.append(f"{what}: {output.ename}: {output.evalue}")
                continue
            if output.get("name") == "stderr":
                found.append(f"{what}: stderr: {output.text.strip()[:80]}")
            data = output.get("data", {})
            found += [f"{what}: an output of {kind}" for kind in sorted(data.keys() - KINDS)]
            texts = [output.get("text", ""), *(data[kind] for kind in data.keys() & KINDS - {"image/png"})]
            for text in texts:
                if hit := WARNING.search(text):
                    found.append(f"{what}: a warning: {hit.group()}")
                if hit := MACHINE_PATH.search(text) or INTERPRETER_PATH.search(text):
                    found.append(f"{what}: a path of one machine: {hit.group()}")
    return found


def kinds_of_outputs(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """For each code cell, what its outputs are: what the same code makes on any machine."""
    return [
        [kind for output in cell.outputs for kind in sorted(output.get("data", {output.get("name"): 0}))]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
