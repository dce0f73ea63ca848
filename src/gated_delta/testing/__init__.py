"""The one list of cases, and the judge: inputs, the float64 oracle, comparison."""

from .cases import AnyCase, Case, cases, cases_like, listed, quick_cases
from .check import Result, run_case

__all__ = ["AnyCase", "Case", "Result", "cases", "cases_like", "listed", "quick_cases", "run_case"]
