"""A decoded text as HTML for a notebook: a colour a round, bonus tokens underlined."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ddtree.study_rounds import AnyRound

# Pale tints of the palette, told apart in grey print by their neighbours: every second one is lighter
TINTS = ("#CFE8F7", "#FFF3D6", "#BFE3D5", "#FBE4D5", "#D9C7DD", "#F2F2F2")
UNFINISHED = "\ufffd"  # what a decoder makes of half a character


@dataclass(frozen=True)
class Piece:
    """A stretch of text of one round: `kind` is prompt (round None), drafted or bonus."""

    text: str
    round: int | None
    kind: str


def text_pieces(
    rounds: Iterable[AnyRound], decode: Callable[[list[int]], str], prompt: str = ""
) -> list[Piece]:
    """A piece for every returned token of one decode, the prompt first; `decode` makes text of token ids.

    The prefill's token counts as bonus of round 0. A token that ends inside a character gives its text to the next.
    """
    pieces = [Piece(prompt, None, "prompt")] if prompt else []
    token_ids: list[int] = []
    done = ""
    for index, token, kind in _tokens(rounds):
        token_ids.append(token)
        whole = decode(token_ids).rstrip(UNFINISHED)
        pieces.append(Piece(whole[len(done) :], index, kind))
        done = max(done, whole, key=len)
    return pieces


def _tokens(rounds: Iterable[AnyRound]) -> Iterable[tuple[int, int, str]]:
    """Round, token and kind of each returned token; a round cut by a stop token has no bonus."""
    for this in rounds:
        index, tokens, path = (_get(this, name) for name in ("index", "tokens", "path"))
        for place, token in enumerate(tokens):
            yield index, int(token), "bonus" if place == len(path) - 1 else "drafted"


def _get(this: AnyRound, name: str) -> Any:
    return this[name] if isinstance(this, dict) else getattr(this, name)


def text_rounds_html(pieces: Iterable[Piece]) -> str:
    """The pieces as one HTML block: the prompt grey, rounds in turning colours, bonus tokens bold and underlined.

    A line under it counts rounds and says the mean acceptance length, bonus token included, prefill left out.
    """
    pieces = list(pieces)
    body = "".join(_span(piece) for piece in pieces)
    lengths: dict[int, int] = {}
    for piece in pieces:
        if piece.round:
            lengths[piece.round] = lengths.get(piece.round, 0) + 1
    mean = f"{sum(lengths.values()) / len(lengths):.2f}" if lengths else "none"
    note = (
        f"{len(lengths)} rounds after the prefill, a colour each; plain: drafted, <b><u>underlined</u></b>: the bonus "
        f"token; mean acceptance length {mean} (bonus token included)"
    )
    style = "white-space:pre-wrap;line-height:1.6;color:#000;background:#fff;padding:6px"
    return f'<pre style="{style}">{body}</pre><div style="font-size:small">{note}</div>'


def _span(piece: Piece) -> str:
    text = html.escape(piece.text)
    if piece.round is None:
        return f'<span style="color:#6b6b6b">{text}</span>'
    style = f"background:{TINTS[piece.round % len(TINTS)]};color:#000"
    if piece.kind == "bonus":
        style += ";font-weight:bold;text-decoration:underline"
    text = text.replace("\n", "\u23ce\n")
    return f'<span style="{style}" title="round {piece.round}, {piece.kind}">{text}</span>'
