"""Attention over all visible keys: values, gradients, log-sum-exp and memory, without the layer around it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsa_ops.nn import dense
from dsa_ops.nn.dense import dense_attention, visible_lse
from layers import LAYOUTS


@pytest.fixture(params=["one tile", "many tiles", "recomputed"])
def tiling(request, monkeypatch):
    """Budgets under which these small inputs take every path."""
    if request.param != "one tile":
        for budgets in (dense._MASK_BYTES, dense._LOGIT_BYTES):
            monkeypatch.setitem(budgets, "cpu", 700)
    if request.param == "recomputed":
        monkeypatch.setitem(dense._MASKS_KEPT, "cpu", 0)


def inputs(batch=2, length=23, heads=3, wide=16, narrow=16, dtype=torch.float64, sink=True):
    q, k = (torch.randn(batch, length, heads, wide, dtype=dtype, requires_grad=True) for _ in range(2))
    v = torch.randn(batch, length, heads, narrow, dtype=dtype, requires_grad=True)
    return q, k, v, torch.randn(heads, dtype=dtype, requires_grad=True) if sink else None


def plain(q, k, v, sinks, visible, scale):
    logits = torch.einsum("blhd,bshd->bhls", q, k) * scale
    weights = torch.where(visible[:, None], logits.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return torch.einsum("bhls,bshv->blhv", weights / torch.where(total > 0, total, 1.0), v)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize(("wide", "narrow"), [(16, 16), (16, 10), (10, 16), (9, 9)], ids=str)
def test_equals_masked_softmax(layout, sink, wide, narrow, tiling):
    arguments = inputs(wide=wide, narrow=narrow, sink=sink)
    starts, ends, visible, _ = LAYOUTS[layout](2, 23)
    got = dense_attention(*arguments[:3], sinks=arguments[3], softmax_scale=0.3, starts=starts, ends=ends)
    want = plain(*arguments, visible, 0.3)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    assert torch.all(got[~visible.any(-1)] == 0)
    grad = torch.randn_like(got)
    wanted = [t for t in arguments if t is not None]
    for a, b in zip(*(torch.autograd.grad(out, wanted, grad) for out in (got, want)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lse_is_of_the_visible_keys_alone(layout, tiling):
    q, k, _, _ = inputs(wide=10)
    starts, ends, visible, _ = LAYOUTS[layout](2, 23)
    got = visible_lse(q, k, softmax_scale=0.3, starts=starts, ends=ends)
    logits = torch.einsum("blhd,bshd->blhs", q, k) * 0.3
    want = logits.masked_fill(~visible[:, :, None], -torch.inf).logsumexp(-1)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    assert got.is_contiguous() and not got.requires_grad
    assert torch.all(got[~visible.any(-1)] == -torch.inf)


def test_lse_of_half_precision_is_float32_also_under_autocast():
    q, k, _, _ = (None if t is None else t.bfloat16() for t in inputs(sink=False))
    want = visible_lse(q.double(), k.double(), softmax_scale=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = visible_lse(q, k, softmax_scale=0.3)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", ["causal", "ragged"])
def test_sinks_keep_their_precision_in_bfloat16(layout):
    """A bfloat16 sink near 20 would be off by up to 0.06 and the output by as much, relatively."""
    q, k, v, _ = (t.bfloat16() for t in inputs())
    sinks = torch.tensor([20.06, 13.03, -7.7], requires_grad=True)
    starts, ends, visible, _ = LAYOUTS[layout](2, 23)
    got = dense_attention(q, k, v, sinks=sinks, softmax_scale=0.3, starts=starts, ends=ends)
    want = plain(q.double(), k.double(), v.double(), sinks.detach().double(), visible, 0.3)
    error = (got.double() - want).pow(2).sum((0, 1, 3)).sqrt() / want.pow(2).sum((0, 1, 3)).sqrt()
    assert error.max() < 0.01, error
    assert torch.autograd.grad(got.float().sum(), sinks)[0].dtype == torch.float32


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any call returned."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for out in result if isinstance(result, tuple | list) else (result,):
            if isinstance(out, torch.Tensor) and out.device.type != "meta":
                self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return result


def test_no_tensor_of_all_rows_times_all_keys():
    """Neither made in forward, backward or log-sum-exp, nor kept from forward to backward in parts."""
    rows = 6144
    q, k, v, _ = inputs(1, rows, 1, 8, 8, torch.float32, sink=False)
    bounds = {"starts": torch.zeros(1, rows, dtype=torch.int32), "ends": torch.full((1, rows), rows, dtype=torch.int32)}
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = dense_attention(q, k, v, softmax_scale=0.3, **bounds)
        out.sum().backward()
        visible_lse(q, k, softmax_scale=0.3, **bounds)
    assert largest.bytes < rows * rows / 2
    assert sum(kept.values()) < rows * rows / 2


def test_keys_that_no_row_of_a_tile_sees_are_skipped(monkeypatch):
    """Packed sequences cost what their own keys cost: counted in products, 8 sequences of 64."""
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setitem(dense._LOGIT_BYTES, "cpu", 64 * 3 * 4 * 512)
    ids = torch.arange(512, dtype=torch.int32)
    q, k, _, _ = inputs(1, 512, 1, 8, 8, torch.float32, sink=False)
    with FlopCounterMode(display=False) as flops:
        visible_lse(q, k, softmax_scale=0.3, starts=(ids // 64 * 64)[None], ends=(ids + 1)[None])
    assert flops.get_total_flops() <= 2 * 2 * 512 * 8 * 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [-float("inf"), -3e4, 3e4, float("inf")])
@pytest.mark.parametrize("layout", ["causal", "packed"])
def test_sinks_beyond_what_a_dtype_holds(layout, value, dtype):
    q, k, v, _ = (None if t is None else t.detach().to(dtype) for t in inputs(sink=False))
    sinks = torch.full((q.shape[2],), value)
    bounds = {}
    if layout == "packed":
        ends = torch.arange(1, q.shape[1] + 1, dtype=torch.int32).expand(q.shape[:2])
        bounds = dict(starts=(ends - 4).clamp(min=0), ends=ends)
    got = dense_attention(q, k, v, sinks=sinks, softmax_scale=0.3, **bounds)
    if value > 0:
        assert (got == 0).all()
    else:
        assert torch.equal(
            got, dense_attention(q, k, v, sinks=torch.full_like(sinks, -1e4), softmax_scale=0.3, **bounds)
        )
