"""Costs and the budget that pays, against cases computed by hand."""

import numpy as np
import pytest
from study.recorded import round_of

from ddtree.decode import STAGES
from ddtree.errors import UsageError
from ddtree.study_tables import best_budget, cost_curve, point_of_rounds, points_of_records


def stages(draft, verify):
    return dict.fromkeys(STAGES, 0.0) | {"draft": draft, "verify": verify}


CURVE = cost_curve([(1, stages(0, 2)), (5, stages(3, 4)), (9, stages(5, 6))])


def test_between_measured_rows_the_line_is_straight():
    assert CURVE([1, 5, 7, 9]).tolist() == [2, 7, 9, 11]
    assert (
        CURVE.stages(3)["draft"] == 3 and CURVE.stages(3)["verify"] == 3
    )  # a draft is paid as soon as there is one
    assert CURVE.stages(1)["draft"] == 0


def test_nothing_is_told_of_rows_far_from_the_measured():
    assert CURVE(10) == 12 and np.isnan(CURVE([0, 11, 100])).all()  # 15% beyond the last
    assert np.isnan(cost_curve([(5, stages(3, 4))])(2)) and cost_curve([(5, stages(3, 4))])(5) == 7
    assert np.isnan(cost_curve([(1, stages(0, 2))])(2))
    with pytest.raises(UsageError, match="no stage times"):
        cost_curve([])


def test_equal_rows_are_averaged():
    assert cost_curve([(5, stages(3, 4)), (5, stages(5, 8))])(5) == 10


def test_best_budget_by_hand():
    best = best_budget({0: 1.0, 4: 3.5, 8: 4.4, 50: 9.0}, CURVE)
    assert best.tokens_per_second == pytest.approx({0: 500, 4: 500, 8: 400, 50: np.nan}, nan_ok=True)
    assert best.budget == 0  # a tie goes to the lower
    with pytest.raises(UsageError, match="1 to 9 rows"):
        best_budget({50: 9.0}, CURVE)


def test_points():
    records = [
        {"method": "ar", "temperature": 0.0, "nodes_per_round": 0.0, "stage_ms": stages(0, 2)},
        {"method": "tree", "temperature": 0.0, "nodes_per_round": 15.5, "stage_ms": stages(3, 4)},
        {"method": "tree", "temperature": 0.8, "nodes_per_round": 16.0, "stage_ms": stages(3, 4)},
        {"method": "chain", "temperature": 0.0, "nodes_per_round": 14.0, "stage_ms": stages(3, 4)},
        {"method": "tree", "temperature": 0.0, "nodes_per_round": 64.0, "stage_ms": None},
    ]
    assert [rows for rows, _ in points_of_records(records, 0.0)] == [1.0, 16.5]
    rounds = [round_of(0, [1])] + [round_of(1, [1]) | {"seconds": stages(0, n)} for n in (0.001, 0.003)]
    assert point_of_rounds(rounds) == (1.0, pytest.approx(stages(0, 2)))
    with pytest.raises(UsageError, match="no round after the prefill"):
        point_of_rounds(rounds[:1])
