"""Ways to choose a tree's nodes, one file each.

A shape is a function `build(token_ids i32 [L, K], log_probs f32 [L, K], budget, max_depth, *, root_token)`
that returns a valid DraftTree of at most budget nodes, none deeper than max_depth, from per-depth candidates
in descending order. It gives the same tree for the same table, breaks ties by the smaller tuple of ranks, leaves out
what is not finite, and raises ConfigError for a negative budget or max_depth.

A build function with a true attribute `conditional` takes log_probs [L, P, P] instead: a candidate's below each one of
the depth before, which a drafter with a branch head gives (`branch_aware` says more). `is_conditional(build)` tells
them, and `table_for` gives a build function what it takes.

A file whose trees need the table alone offers `build`; one that needs more offers `make(**context)`, which returns
such a function, and may name in ARGUMENT the one that `NAME:VALUE` gives. `get_shape(name, **context)` returns the
function either way; SHAPES maps every name to one line of description, the first of the file's docstring.

A new shape is one more file here, or one in any installed package that names its module (or its build function) under
the entry point group `ddtree.shapes`.
"""

from ddtree.shapes._registry import CONTEXT, SHAPES, get_shape, is_conditional, table_for

__all__ = ["CONTEXT", "SHAPES", "get_shape", "is_conditional", "table_for"]
