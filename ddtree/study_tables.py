"""What studies of recorded rounds offer: the drafter's tables held to what followed, budgets, and what rounds cost."""

from ddtree.study_budgets import BudgetCurve, budget_curve, expected_acceptance, mean_budget_curve, walk
from ddtree.study_cost import (
    BestBudget,
    CostCurve,
    best_budget,
    cost_curve,
    point_of_rounds,
    points_of_records,
)
from ddtree.study_draft import LOG_BINS, Calibration, SiblingTable, calibration, sibling_table, wilson
from ddtree.study_rounds import Seen, departure, seen_rounds, with_tables

__all__ = [
    "LOG_BINS",
    "BestBudget",
    "BudgetCurve",
    "Calibration",
    "CostCurve",
    "Seen",
    "SiblingTable",
    "best_budget",
    "budget_curve",
    "calibration",
    "cost_curve",
    "departure",
    "expected_acceptance",
    "mean_budget_curve",
    "point_of_rounds",
    "points_of_records",
    "seen_rounds",
    "sibling_table",
    "walk",
    "wilson",
    "with_tables",
]
