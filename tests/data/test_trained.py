"""The shipped model's files are those that data/README.md names; figures said of the new drafter are those recorded."""

import hashlib
import json
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data"
README = (ROOT / "README.md").read_text("utf-8")
LOG = (ROOT / "docs" / "branch_log.md").read_text("utf-8")
RECORD = json.loads((DATA / "results" / "train_py12m.json").read_text("utf-8"))
SMALL, WIDE = (
    json.loads((DATA / "results" / f"train_{name}.json").read_text("utf-8")) for name in ("small", "wide")
)
TRAINING_LOG = (ROOT / "docs" / "training_log.md").read_text("utf-8")
ONE_LINE = {text: text.replace("\n", " ") for text in (README, TRAINING_LOG)}
WHICH = "marginal", "branch"
DRAFTER, BRANCH = RECORD["drafter"], RECORD["branch"]
BEFORE, AFTER = "the target's own", "trained"
SETS = {
    "shipped, greedy": "shipped prompts, temperature 0",
    "shipped, 0.6": "shipped prompts, temperature 0.6",
    "held-out files, greedy": "held-out files, temperature 0",
    "held-out files, 0.6": "held-out files, temperature 0.6",
}


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["target", "drafter", "drafter_branch"])
def test_the_files_are_those_named(name):
    (row,) = re.findall(
        rf"^\| `models/py12m/{name}\.kdtr` .*`([0-9a-f]{{64}})` \|$",
        (DATA / "README.md").read_text("utf-8"),
        re.M,
    )
    recorded = {"drafter": "drafter.kdtr, handed in"}.get(name, f"{name}.kdtr")
    assert sha256_of(DATA / "models" / "py12m" / f"{name}.kdtr") == row == RECORD["sha256"][recorded]


def test_the_head_is_of_that_drafter_and_text():
    assert BRANCH["made_of"]["drafter"] == RECORD["sha256"]["drafter.kdtr, trained here"]
    assert DRAFTER["made_of"]["target"] == BRANCH["made_of"]["target"] == RECORD["sha256"]["target.kdtr"]
    assert DRAFTER["made_of"]["corpus"] == BRANCH["made_of"]["corpus"] == RECORD["corpus"]["sha256"]
    assert RECORD["logs"]["drafter"][-1]["step"] == DRAFTER["drafter"]["steps"]


def of_drafter(which, budget, prompts="shipped prompts"):
    found = DRAFTER[f"{prompts}, {which}"][f"tree_{budget}"]
    return found["acceptance_outside"], found["acceptance"], found["rounds"]


DECODES = {
    "`drafter.kdtr`, `best_first`": "handed-in drafter, best_first",
    "`drafter_branch.kdtr`, `best_first`": "new drafter, best_first",
    "the same, `branch_aware`": "new drafter, branch_aware",
}


@pytest.mark.parametrize("row", DECODES)
def test_the_readme_s_decodes(row):
    """A chain has no use for a head, so the last row has none."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {row} |")]
    rows = RECORD["decodes"][DECODES[row]]["rows"]
    assert [(r["method"], r["budget"], r["tokens_equal"]) for r in rows] == [
        ("chain", 15, True),
        ("tree", 16, True),
        ("tree", 64, True),
    ]
    cells = [f"{r['acceptance_outside']:.2f} / {r['acceptance']:.2f}" for r in rows] + [
        str(rows[-1]["rounds"])
    ]
    if "branch_aware" in row:
        cells[0] = ""
    assert [cell.strip() for cell in line.split("|")[2:-1]] == cells


@pytest.mark.parametrize("budget", [16, 64])
def test_decodes_on_a_cpu_are_what_training_found_on_a_gpu(budget):
    rows = {
        name: next(
            r for r in RECORD["decodes"][name]["rows"] if (r["method"], r["budget"]) == ("tree", budget)
        )
        for name in DECODES.values()
    }
    for name, which in (("handed-in drafter, best_first", BEFORE), ("new drafter, best_first", AFTER)):
        outside, whole, rounds = of_drafter(which, budget)
        found = rows[name]
        assert found["rounds"] == rounds and abs(found["acceptance"] - whole) < 1e-4
        assert abs(found["acceptance_outside"] - outside) < 1e-4
    head, found = BRANCH[SETS["shipped, greedy"]][f"budget_{budget}"], rows["new drafter, branch_aware"]
    assert abs(head["all"]["branch"] - found["acceptance"]) < 2e-4
    assert abs(head["outside_loops"]["branch"] - found["acceptance_outside"]) < 2e-4


def test_the_readme_s_head():
    best = BRANCH[SETS["shipped, greedy"]]["budget_64"]["outside_loops"]
    text = README.replace("\n", " ")
    assert f"{of_drafter(AFTER, 64)[0] / of_drafter(BEFORE, 64)[0]:.3f} times as many" in text
    low, high = best["ratio_interval"]
    assert f"{best['ratio']:.3f} times more ({low:.3f} to {high:.3f}, 95% over prompts)" in text
    before, after = (of_drafter(which, 64, "held-out files") for which in (BEFORE, AFTER))
    held = BRANCH[SETS["held-out files, greedy"]]["budget_64"]["outside_loops"]["branch"]
    assert (
        f"{before[0]:.2f} outside loops with the first drafter, {after[0]:.2f} with the new one, {held:.2f}"
        in text
    )
    assert f"{before[1]:.2f} for {after[1]:.2f}" in text


@pytest.mark.parametrize("budget", [8, 16, 32, 64])
@pytest.mark.parametrize("name", SETS)
def test_the_log_s_rows(name, budget):
    found = BRANCH[SETS[name]][f"budget_{budget}"]
    outside = found["outside_loops"]
    cells = [(outside[part], outside[f"{part}_interval"]) for part in ("marginal", "branch", "ratio")]
    cells.append((found["all"]["ratio"], found["all"]["ratio_interval"]))
    row = " | ".join(f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, (low, high) in cells)
    assert f"| {name} | {budget} | {row} |" in LOG.split("## 5.")[1]


def trees_of_small(run):
    """Greedy trees of 64 outside loops, by marginals and with the head: of the shipped prompts, of held-out files."""
    for prompts in ("shipped prompts", "held-out files"):
        yield run["branch"][f"{prompts}, temperature 0"]["budget_64"]["outside_loops"]


def test_the_readme_s_two_runs_of_small():
    """One run was stopped and gone on with, the other not: only their times differ."""
    table = README.split("| `small`, greedy, outside loops |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[2:4]] for line in table.splitlines()[2:]]
    runs = [each["seconds"] for each in (SMALL, SMALL["again"])]
    cells = [[f"{sum(each['commands']):.0f}" for each in runs]]
    cells += [[f"{each[stage]:.0f}" for each in runs] for stage in ("target", "drafter")]
    cells.append([f"{SMALL['target']['nats_per_token']:.3f}", "the same"])
    for trees in trees_of_small(SMALL):
        for which in ("marginal", "branch"):
            low, high = trees[f"{which}_interval"]
            cells.append([f"{trees[which]:.2f} ({low:.2f} to {high:.2f})", "the same"])
    assert rows == cells
    assert SMALL["again"]["sha256"] == SMALL["sha256"] and len(SMALL["sha256"]) == 10
    alike = SMALL["again"]["logged_losses"]
    assert all(alike[stage]["equal"] == alike[stage]["alike"] > 200 for stage in ("target", "drafter"))
    assert f"all {alike['target']['alike']} and {alike['drafter']['alike']} logged losses" in TRAINING_LOG
    assert SMALL["target"]["run"]["steps"] == 4600 and SMALL["drafter"]["drafter"]["steps"] == 30_000
    assert SMALL["branch"]["held-out files, temperature 0"]["prompts"] == 256
    assert SMALL["corpus"]["sha256"] == WIDE["corpus"]["sha256"] == RECORD["corpus"]["sha256"]


def test_what_is_said_of_runs_in_any_order():
    runs = SMALL["any_order"]["runs"]
    (one, twenty), again = [[(r["step"], r["loss"]) for r in run["target_log"]] for run in runs]
    assert one == again[0] and twenty[0] == again[1][0] == 20 and twenty != again[1]
    (shipped, held), (shipped_2, held_2) = (list(trees_of_small(run)) for run in runs)
    nats = "{:.3f} and {:.3f} nats a token".format(*(run["nats_per_token"] for run in runs))
    rounds = f"{held['marginal']:.2f} and {held_2['marginal']:.2f} on 64 prompts of these files"
    ends = f"{shipped['marginal']:.2f} and {shipped_2['marginal']:.2f} on the 64 shipped ones"
    assert f"{nats} of the held-out files, tokens a round at {rounds}, {ends}" in ONE_LINE[TRAINING_LOG]
    pairs = [(shipped, shipped_2), (held, held_2)]
    apart = max(abs(b[which] / a[which] - 1) for a, b in pairs for which in WHICH)
    assert f"were up to {apart:.1%} apart in such means, each over 64 prompts" in ONE_LINE[README]


def test_how_they_compare_with_the_runs_that_repeat():
    runs = SMALL["any_order"]["runs"]
    now, held = trees_of_small(SMALL)
    before = [next(trees_of_small(run)) for run in runs]
    more = [run[which] / now[which] - 1 for run in before for which in WHICH]
    means = {which: "{:.2f} and {:.2f}".format(*(run[which] for run in before)) for which in WHICH}
    least, most = f"{min(more):.0%}", f"{max(more):.0%}"
    said = (
        f"{least} to {most} more than this one on the 64 shipped prompts ({means['marginal']}, with the head"
    )
    many = runs[0]["held-out files, 256 prompts"]["tree_64"]["acceptance_outside"]
    assert (
        f"{said} {means['branch']}), but the first of them had no more on the 256 ({many:.2f})"
        in ONE_LINE[README]
    )
    log, nats = ONE_LINE[TRAINING_LOG], SMALL["target"]["nats_per_token"]
    assert f"target has {nats:.3f} nats" in log and held["marginal"] > many
    assert (
        f"a tree brings {held['marginal']:.2f} tokens a round, where the first run of section 0 had {many:.2f}"
        in log
    )
    ends = ["{:.2f} ({:.2f} to {:.2f})".format(now[which], *now[f"{which}_interval"]) for which in WHICH]
    assert f"on the 64 shipped prompts {ends[0]}, and with the head {ends[1]}" in log
    assert f"section 0's runs had {means['marginal']}, {means['branch']}: on these" in log
    assert f"both are better, by {least} to {most}." in log


def test_the_times_that_are_said_of_training():
    (first, rest), (whole,) = (each["seconds"]["commands"] for each in (SMALL, SMALL["again"]))
    log = ONE_LINE[TRAINING_LOG]
    assert f"gone on with, {first:.0f} and {rest:.0f} s, the other in one command, {whole:.0f} s" in log
    (seconds,), steps = WIDE["seconds"]["commands"], WIDE["drafter"]["drafter"]["steps"]
    said = ONE_LINE[README]
    assert f"`wide` took {seconds:.0f} s in one command ({steps:,} steps of the drafter" in said
    target, drafter = (
        1e3 * tokens / median(row["tokens_per_second"] for row in SMALL["logs"][stage])
        for stage, tokens in (("target", 32 * 1024), ("drafter", 128 * 32 * 16))
    )
    before = SMALL["any_order"]["runs"][0]["ms_a_step"]
    steps = f"{before['target']:.1f} -> {target:.1f} ms a step of the target, {before['drafter']:.1f} -> {drafter:.1f}"
    assert f"{steps} of the drafter" in log
    cost = f"{target / before['target'] - 1:.0%} and one of the drafter {drafter / before['drafter'] - 1:.0%}"
    assert f"a step of the target {cost}" in said
