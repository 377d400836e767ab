"""The HTML of a decoded text: whole, escaped, rounds and bonus tokens told apart."""

import re

from ddtree.plots import text_pieces, text_rounds_html


def round_dict(index, tokens, path):
    return {"index": index, "tokens": tokens, "path": path}


ROUNDS = [
    round_dict(0, [60], [0]),
    round_dict(1, [97, 98, 99], [0, 1, 2]),
    round_dict(2, [10, 100], [0, 3, 4]),  # cut by a stop token: no bonus
]


def decode(token_ids):
    return bytes(token_ids).decode("utf-8", errors="replace")


def test_pieces_and_html():
    pieces = text_pieces(ROUNDS, decode, "a&b")
    assert [(p.text, p.round, p.kind) for p in pieces] == [
        ("a&b", None, "prompt"), ("<", 0, "bonus"), ("a", 1, "drafted"), ("b", 1, "drafted"), ("c", 1, "bonus"),
        ("\n", 2, "drafted"), ("d", 2, "drafted"),
    ]  # fmt: skip
    page = text_rounds_html(pieces)
    assert "a&amp;b" in page and "&lt;" in page and 'title="round 1, bonus"' in page and "\u23ce\n" in page
    assert "2 rounds after the prefill" in page and "2.50 (bonus token included)" in page
    assert page.count("text-decoration:underline") == 2
    tints = re.findall(r'background:(#\w+);color:#000[^"]*" title="round (\d)', page)
    assert len(set(tints)) == 3, "a colour a round"


def test_half_a_character_waits_for_its_other_half():
    pieces = text_pieces([round_dict(1, [0xC3, 0xA9], [0, 1])], decode)
    assert [piece.text for piece in pieces] == ["", "é"]


def test_no_round_is_a_page_too():
    assert "0 rounds" in text_rounds_html([]) and "length none" in text_rounds_html([])
