"""What tests of fused kernels share: draws of what kernels serve, measures of error, memory with poison around it."""

import torch

import dsa_ops

GUARD = 4096  # elements of poison on either side


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error, in float64. Infinities and NaN must be where they should be."""
    got, want = got.detach().double(), want.detach().to(got.device).double()
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    finite = want.isfinite()
    assert torch.equal(got[~finite].nan_to_num(1.5), want[~finite].nan_to_num(1.5)), "infinities or NaN differ"
    assert got[finite].isfinite().all(), "not finite where it should be"
    got, want = got[finite], want[finite]
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


def assert_as_good(got, baseline, want, what="", floor=2e-5, factor=1.5):
    """No further from the float64 truth than `factor` times the baseline's error, plus a floor.

    The baseline is the same mathematics in the precision that a kernel may use: bfloat16 inputs, float32 logits and
    softmax, P and dS rounded to bfloat16 before they are multiplied, bfloat16 results.
    """
    mine, allowed = error(got, want), factor * error(baseline, want) + floor
    assert mine <= allowed, f"{what}: relative error {mine:.3g}, allowed {allowed:.3g}"


def assert_close(got, want, what="", tolerance=1e-5):
    """For float32 results."""
    mine = error(got, want)
    assert mine <= tolerance, f"{what}: relative error {mine:.3g}, allowed {tolerance:.3g}"


def guarded(x: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous and aligned, amid memory full of NaN (floats) or of large ids (integers)."""
    poison = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
    buffer = x.new_full((x.numel() + 2 * GUARD,), poison)
    inner = buffer[GUARD : GUARD + x.numel()].view(x.shape)
    inner.copy_(x.detach())
    return inner


def fused():
    """Inside it a call that no kernel serves raises."""
    return dsa_ops.backend("tilelang")


def unfused():
    return dsa_ops.backend("unfused")
