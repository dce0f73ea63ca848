"""The one list of cases, and the judge: inputs, the float64 oracle, comparison."""

from .cases import Case, cases, cases_like, quick_cases
from .check import Result, run_case

__all__ = ["Case", "Result", "cases", "cases_like", "quick_cases", "run_case"]
