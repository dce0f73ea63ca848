import os
from collections import Counter

# More threads than cores spin: workers, collection and the tests' processes have one each.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from gpu import AXES, STATES


@pytest.fixture(autouse=True)
def _one_thread():
    """Whatever an earlier test has set."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory):
    """A directory shared by all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request):
    return torch.device(request.param)


@pytest.fixture(params=AXES)
def axis(request):
    """The axis of the decay: "head" for GDN, "channel" for KDA."""
    return request.param


@pytest.fixture(params=STATES, ids=str)
def state_dtype(request):
    return request.param


def pytest_terminal_summary(terminalreporter):
    """Print a line for each reason to skip tests."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
