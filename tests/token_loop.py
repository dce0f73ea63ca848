"""What the adapters' tests share: the recurrence once more, token by token in float64, and comparisons."""

import torch
from torch import Tensor


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def token_loop(x: dict[str, Tensor], log_decay, beta, starts, scale, l2norm) -> tuple[Tensor, Tensor]:
    """o [N, T, HV, V], and the states after each token [N, T, HV, V, K], of q, k, v in x from states starts[n] [HV, V, K].

    log_decay: [N, T, HV, 1] or [N, T, HV, K]. It shares nothing with gated_delta, and works on the peers' own tensors.
    """
    q, k, v = (x[name].double() for name in ("q", "k", "v"))
    decay = log_decay.exp()
    if l2norm:
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    q, k = (y.repeat_interleave(v.shape[2] // y.shape[2], 2) for y in (q, k))
    o, after = torch.zeros_like(v), torch.zeros(*v.shape, k.shape[3], dtype=torch.float64)
    for n in range(v.shape[0]):
        S = starts[n].double()
        for t in range(v.shape[1]):
            S = S * decay[n, t][:, None, :]
            error = v[n, t] - torch.einsum("hvk,hk->hv", S, k[n, t])
            S = S + torch.einsum("hv,hk->hvk", beta[n, t, :, None] * error, k[n, t])
            o[n, t] = scale * torch.einsum("hvk,hk->hv", S, q[n, t])
            after[n, t] = S
    return o, after


def close(got: Tensor, want: Tensor, tolerance: float = 1e-6) -> None:
    """Within `tolerance` of the largest value, and half a unit in the last place of a 16-bit tensor."""
    assert got.shape == want.shape
    ulp = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps / 2
    error = (got.double() - want).abs() - ulp * want.abs()
    assert error.max() <= tolerance * want.abs().max(), f"{error.max():.2e} over {want.abs().max():.2e}"


def check_pool(got: Tensor, before: Tensor, written: dict[int, Tensor]) -> None:
    """The slots of `written` hold those states, every other one has its very bits."""
    for slot in range(len(before)):
        if slot in written:
            close(got[slot], written[slot])
        else:
            assert torch.equal(got[slot], before[slot]), f"slot {slot} was written"
