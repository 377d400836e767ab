"""Fixed: the same tree every round, from a file of rank paths (Medusa, arXiv 2401.10774; Sequoia, 2402.12374)."""

import json
from math import exp, isfinite, log
from pathlib import Path

from ddtree.bundle import DATA
from ddtree.errors import ConfigError, UsageError
from ddtree.reference.tree_build import take_best
from ddtree.shapes._nodes import check_bounds, path_sum, tree_of

ARGUMENT = "template"
TEMPLATES = DATA / "templates"


def make(template):
    """Return the `build` of a template: rank paths, or a JSON file of them (see `load_template`)."""
    named = isinstance(template, (str, Path))
    paths = load_template(template) if named else check_paths(template, "template")

    def build(token_ids, log_probs, budget, max_depth, *, root_token):
        """Return the template's first `budget` nodes that the table and max_depth hold; as in ddtree.shapes."""
        check_bounds("fixed", budget, max_depth)
        table = log_probs[:max_depth].tolist()
        rows, parents, weights = {(): 0}, [], [0.0]
        for path in paths:
            depth, parent = len(path), rows.get(path[:-1])
            if len(rows) > budget:
                break
            if parent is None or depth > len(table) or path[-1] >= len(table[depth - 1]):
                continue
            weight = path_sum(weights[parent], table[depth - 1], path[-1])
            if isfinite(weight):
                rows[path] = len(rows)
                parents.append(parent)
                weights.append(weight)
        return tree_of(token_ids, list(rows)[1:], parents, weights[1:], root_token)

    return build


def load_template(name):
    """Return the rank tuples of a JSON file, or of one in data/templates by its name without .json.

    The file holds a list of paths, or an object with such a list under "paths". A path lists the rank taken at each
    depth; it stands after its parent. Raises UsageError for what cannot be read, ConfigError for what is no tree.
    """
    found = next((path for path in (Path(name), TEMPLATES / f"{name}.json") if path.is_file()), None)
    if found is None:
        shipped = ", ".join(sorted(path.stem for path in TEMPLATES.glob("*.json")))
        raise UsageError(f"shape: fixed: {name}: no such file, nor one of the shipped templates: {shipped}")
    try:
        document = json.loads(found.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{found}: cannot be read as a JSON template: {error}") from None
    return check_paths(document.get("paths") if isinstance(document, dict) else document, str(found))


def check_paths(paths, where):
    """Return rank paths as tuples; ConfigError naming the first that is no path, is there twice or lacks its parent."""
    if not isinstance(paths, (list, tuple)):
        raise ConfigError(f"{where}: expected a list of rank paths, found {type(paths).__name__}")
    seen = {(): None}
    for index, path in enumerate(paths):
        if not isinstance(path, (list, tuple)) or not path or any(type(r) is not int or r < 0 for r in path):
            raise ConfigError(f"{where}: path {index}: expected a list of ranks >= 0, found {path!r}")
        path = tuple(path)
        if path in seen:
            raise ConfigError(f"{where}: path {index}: {list(path)} is there twice")
        if path[:-1] not in seen:
            raise ConfigError(f"{where}: path {index}: {list(path)} stands before its parent")
        seen[path] = None
    return list(seen)[1:]


def template_of(rates, budget):
    """Return the rank paths of most accepted tokens when rank r at depth d + 1 is right `rates[d][r]` of the time.

    Rates descend along r and are taken as independent along a path: Medusa's greedy choice and, with the same rates at
    every depth, Sequoia's tree. Returns (at most `budget` paths, tokens a round to expect, bonus token included).
    """
    paths, _, weights = take_best([[log(rate) for rate in level] for level in rates], budget)
    return [list(path) for path in paths], 1.0 + sum(exp(weight) for weight in weights)
