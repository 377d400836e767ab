"""`ddtree study --shapes`: every shape with its line, as text and as JSON."""

import json

from ddtree.shapes import SHAPES


def test_the_shapes_are_listed(command):
    code, out, err = command("study", "--shapes")
    assert (code, err) == (0, "")
    assert [line.split(maxsplit=1) for line in out.splitlines()] == [list(item) for item in SHAPES.items()]
    code, out, err = command("study", "--shapes", "--json")
    assert (code, err) == (0, "") and json.loads(out) == {"shapes": dict(SHAPES)}


def test_a_study_of_nothing_is_refused(command):
    code, out, err = command("study")
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and "--shapes" in err
