"""What a branch head is worth: acceptance of its trees beside the marginal's, and what follows a second-best sibling.

Intervals are 95%, bootstrap over prompts: the two sides of a ratio draw the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddtree.lab import dash_or
from ddtree.metrics import in_loop
from ddtree.study_summary import DRAWS, interval_of
from ddtree.train.acceptance import Build, Continuation, branch_tree, marginal_tree, mean_acceptance
from ddtree.train.branch import BranchHead
from ddtree.train.drafter import Drafter
from ddtree.train.evaluate import continuations
from ddtree.train.target import Target

BUDGETS = (8, 16, 32, 64)
WHERE = {"all": "", "outside_loops": "_outside"}


def report(
    target: Target,
    drafter: Drafter,
    branch: BranchHead,
    prompts: Sequence[Sequence[int]],
    new: int,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """Both kinds of tree at each of BUDGETS over the prompts' own continuations, and `siblings`."""
    made, _ = continuations(target, drafter, branch, prompts, new, temperature)
    made = [this for this in made if len(this.tokens) > 1]
    drawn = np.random.default_rng([seed, 6]).integers(len(made), size=(DRAWS, len(made)))
    found: dict[str, Any] = {"prompts": len(made), "new_tokens": new, "temperature": temperature}
    for budget in BUDGETS:
        sides = {"marginal": marginal_tree, "branch": branch_tree}
        counts = {name: _counts(made, build, budget) for name, build in sides.items()}
        found[f"budget_{budget}"] = {
            where: _compared({name: each[where] for name, each in counts.items()}, drawn) for where in WHERE
        }
    events = np.array([siblings(this) for this in made])
    found["siblings"] = {"first_misses_of_rank_1": int(events[:, 0].sum())} | _compared(
        {name: events[:, [column, 0]] for name, column in (("marginal", 1), ("branch", 2))}, drawn
    )
    return found


def _counts(made: list[Continuation], build: Build, budget: int) -> dict[str, np.ndarray]:
    """Tokens and rounds of each prompt, f64 [prompts, 2], by where their roots are."""
    each = [mean_acceptance([this], build, budget) for this in made]
    return {
        where: np.array([[r[f"acceptance{end}"] * r[f"rounds{end}"], r[f"rounds{end}"]] for r in each])
        for where, end in WHERE.items()
    }


def _compared(sides: dict[str, np.ndarray], drawn: np.ndarray) -> dict[str, Any]:
    """Each side's mean of counts [prompts, 2] (sum over number), and the branch's over the marginal's."""
    draws = {name: counts[drawn].sum(axis=1) for name, counts in sides.items()}
    with np.errstate(invalid="ignore", divide="ignore"):
        means = {name: counts[:, 0].sum() / counts[:, 1].sum() for name, counts in sides.items()}
        drawn_means = {name: each[:, 0] / each[:, 1] for name, each in draws.items()}
        ratio = means["branch"] / means["marginal"]
        ratios = drawn_means["branch"] / drawn_means["marginal"]
    found = {name: _number(mean) for name, mean in means.items()}
    spread = {f"{name}_interval": _rounded(each) for name, each in drawn_means.items()}
    return found | spread | {"ratio": _number(ratio), "ratio_interval": _rounded(ratios)}


def _number(value: float) -> float | None:
    """Four decimals; None for what is no number, which JSON has not."""
    return round(float(value), 4) if np.isfinite(value) else None


def _rounded(draws: np.ndarray) -> list[float]:
    """The 95% interval of the draws that are numbers; empty without one."""
    draws = draws[np.isfinite(draws)]
    return [round(end, 4) for end in interval_of(draws)] if len(draws) else []


def siblings(this: Continuation) -> tuple[int, int, int]:
    """First misses of the marginal's spine where its second-best was right and one more token is known; how often the
    marginal's best one deeper was that token, and the branch head's best below the sibling.

    Every root outside loops counts, whether a decode would start a round there or not.
    """
    looping = in_loop([*this.prompt, *this.tokens])[len(this.prompt) :]
    events = marginal = branch = 0
    for root in np.flatnonzero(~looping[: len(this.tokens) - 1]):
        ids, truth = this.token_ids[root], this.tokens[root + 1 :][: this.token_ids.shape[1]]
        missed = np.flatnonzero(ids[: len(truth), 0] != truth)
        if len(missed) and (depth := missed[0]) + 1 < len(truth) and ids[depth, 1] == truth[depth]:
            best = this.conditional[root, depth + 1, 1].argmax()
            events += 1
            marginal += int(ids[depth + 1, 0] == truth[depth + 1])
            branch += int(ids[depth + 1, best] == truth[depth + 1])
    return events, marginal, branch


def lines(name: str, found: dict[str, Any]) -> list[str]:
    """A report as text."""
    drawn = f"at temperature {found['temperature']:g}" if found["temperature"] else "greedy"
    text = [f"{name}: {found['prompts']} prompts, {found['new_tokens']} tokens each, {drawn}"]
    for budget in BUDGETS:
        for where, each in found[f"budget_{budget}"].items():
            text.append(
                f"  budget {budget:3d}, {where.replace('_', ' '):14s} marginal {dash_or(each['marginal'], 3)}, branch "
                f"{dash_or(each['branch'], 3)} tokens a round with the bonus token, {_gain(each)}"
            )
    each = found["siblings"]
    text.append(
        f"  child of a right second-best sibling ({each['first_misses_of_rank_1']}): marginal "
        f"{dash_or(each['marginal'], 3)}, branch {dash_or(each['branch'], 3)}, {_gain(each)}"
    )
    return text


def _gain(each: dict[str, Any]) -> str:
    ends = ", ".join(f"{end:.3f}" for end in each["ratio_interval"])
    return f"ratio {dash_or(each['ratio'], 3)}{f' [{ends}]' if ends else ''}"
