"""Shapes by name: the files of this folder, and those that installed packages offer. Knows none of them."""

import inspect
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from ddtree.errors import UsageError

GROUP = "ddtree.shapes"

# What a caller may offer to any shape; each takes what its `make` names, and a shape may name more.
CONTEXT = {
    "continuation": "the tokens that really follow the root",
    "cost": "rows verified -> time of a round, any unit; or a file of `bench decode --json`",
    "template": "rank paths, or a JSON file of them",
    "width": "nodes expanded at each depth: a number, or one a depth, the last for all below",
    "children": "children of an expanded node",
}


def get_shape(name, **context):
    """Return the function `build` of ddtree.shapes that `name` or `name:VALUE` stands for.

    Of the context a shape takes what it wants, so that one context does for all; what is None counts as not given.
    Raises UsageError for an unknown name, a word that is neither in CONTEXT nor the shape's, and for what it lacks.
    """
    bare, colon, value = name.partition(":") if isinstance(name, str) else (name, "", "")
    found = _load(bare)
    make = getattr(found, "make", None)
    wanted = inspect.signature(make).parameters if make else {}
    if colon:
        if not hasattr(found, "ARGUMENT"):
            raise UsageError(f"shape: {bare} takes nothing after a colon, found {name!r}")
        context[found.ARGUMENT] = value
    context = {word: given for word, given in context.items() if given is not None}
    if unknown := set(context) - set(CONTEXT) - set(wanted):
        raise UsageError(
            f"shape: {bare} knows no {', '.join(sorted(unknown))}; expected {', '.join(CONTEXT)}"
        )
    for word, parameter in wanted.items():
        if parameter.default is parameter.empty and word not in context:
            raise UsageError(f"shape: {bare} needs {word}: {CONTEXT.get(word, 'give it to get_shape')}")
    if make:
        return make(**{word: given for word, given in context.items() if word in wanted})
    return getattr(found, "build", found)


def is_conditional(build):
    """Return whether a build function takes log_probs [L, P, P], a candidate's below each parent."""
    return bool(getattr(build, "conditional", False))


def table_for(build, table, conditional=None):
    """Return the (token_ids, log_probs) that a build function takes, of a table [L, K] and f32 [L, P, P] or None.

    Raises UsageError where it takes the latter and there is none.
    """
    if not is_conditional(build):
        return table
    if conditional is None:
        raise UsageError(
            "shape: it reads a branch head's scores, and there are none: decode or record with a drafter that has one"
        )
    return table[0][:, : conditional.shape[-1]], conditional


class _Shapes(Mapping):
    """Every shape's name and line of description; packages are asked anew each time."""

    def __getitem__(self, name):
        try:
            found = _load(name)
        except UsageError as error:
            if name not in list(self):
                raise KeyError(name) from None
            return f"(broken) {error}"
        return (inspect.getdoc(found) or "").partition("\n")[0]

    def __iter__(self):
        yield from (names := _files())
        yield from sorted({entry.name for entry in entry_points(group=GROUP)} - set(names))

    def __len__(self):
        return len(list(iter(self)))


SHAPES = _Shapes()


def _files():
    """Names of this folder's shapes: its modules, those with an underscore apart."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def _load(name):
    """Return the module or function behind a name without a colon; this folder's files come before packages'."""
    if name in _files():
        source, load = f"ddtree/shapes/{name}.py", lambda: import_module(f"{__package__}.{name}")
    else:
        offers = {entry.value: entry for entry in entry_points(group=GROUP, name=name)} if name else {}
        if not offers:
            raise UsageError(f"shape: expected one of {', '.join(SHAPES)}, found {name!r}")
        if len(offers) > 1:
            raise UsageError(f"shape: {name} is offered twice: {', '.join(sorted(offers))}; remove a package")
        ((source, entry),) = offers.items()
        load = entry.load
    try:
        found = load()
    except Exception as error:  # another's code may fail in any way
        raise UsageError(f"shape: {name}: {source} cannot be loaded: {error}") from error
    if not any(hasattr(found, part) for part in ("make", "build")) and not callable(found):
        raise UsageError(f"shape: {name}: {source} offers neither build nor make")
    return found
