import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests run side by side; more threads than cores only make them wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request):
    return torch.device(request.param)
