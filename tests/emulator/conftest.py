import pytest


@pytest.fixture
def kernels(run_directory):
    return run_directory / "emulated"
