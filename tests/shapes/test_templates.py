"""The shipped templates are what their rates make, data/README.md names them, and files that are none are refused."""

import hashlib
import json
import re

import pytest

from ddtree.errors import ConfigError, UsageError
from ddtree.shapes import get_shape
from ddtree.shapes.fixed import TEMPLATES, load_template, template_of

SHIPPED = sorted(path.stem for path in TEMPLATES.glob("*.json"))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_template_is_what_its_rates_make(name):
    file = TEMPLATES / f"{name}.json"
    document = json.loads(file.read_text("utf-8"))
    paths, expected = template_of(document["rates"], 64)
    assert len(paths) == 64 and paths == document["paths"]
    assert round(expected, 4) == document["expected_tokens"]
    assert load_template(name) == load_template(str(file)) == [tuple(path) for path in paths]
    readme = (TEMPLATES.parent / "README.md").read_text("utf-8")
    (row,) = re.findall(rf"^\| `templates/{name}\.json` .*`([0-9a-f]{{64}})` \|$", readme, re.MULTILINE)
    assert row == hashlib.sha256(file.read_bytes()).hexdigest()


def test_two_are_shipped():
    assert SHIPPED == ["medusa64", "sequoia64"]


def test_a_template_takes_the_paths_of_most_accepted_tokens():
    assert template_of([[0.5, 0.25]] * 2, 4) == ([[0], [0, 0], [1], [0, 1]], 2.125)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[[0], [0, 0], [0]]", "path 2: .* is there twice"),
        ("[[0], [1, 0]]", "path 1: .* stands before its parent"),
        ("[[0], []]", "path 1: expected a list of ranks"),
        ("[[0], [-1]]", "path 1: expected a list of ranks"),
        ("[[0], [true]]", "path 1: expected a list of ranks"),
        ("[0]", "path 0: expected a list of ranks"),
        ('{"nodes": []}', "expected a list of rank paths, found NoneType"),
        ("7", "expected a list of rank paths, found int"),
    ],
)
def test_a_file_that_is_no_tree_is_refused(tmp_path, text, what):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"bad\.json: {what}"):
        get_shape(f"fixed:{file}")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "bad.json").write_bytes(b"[[0]\xff")
    with pytest.raises(UsageError, match="cannot be read as a JSON template"):
        get_shape(f"fixed:{tmp_path / 'bad.json'}")
    with pytest.raises(UsageError, match="nor one of the shipped templates: medusa64, sequoia64"):
        get_shape("fixed:none")
