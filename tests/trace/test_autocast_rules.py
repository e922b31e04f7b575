"""Autocast casts queries and keys alone, to any dtype: what tests/ops/test_registration.py leaves open."""

import pytest
import torch

import calls
import dsa_ops
import inputs
from dsa_ops.nn import set_mode
from dsa_ops.nn.attention import MODES
from inputs import BACKWARDS, DIFFERENTIABLE, OPS
from layers import SMALL, layer

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_dtypes_of_results_and_gradients(name, half, device):
    """Results as from inputs in the autocast dtype, gradients in the dtype of the inputs as they were."""
    args = inputs.arguments(name, device=device, grad=True)
    with torch.autocast(device, half):
        found = calls.run(name, args)
    narrow = {"out": half, "indices": torch.int32}
    assert {n: x.dtype for n, x in found.items()} == {n: narrow.get(n, torch.float32) for n in found}
    if name in DIFFERENTIABLE:
        grads = calls.incoming(name, found)
        got = calls.gradients(name, args, grads, found)
        assert all(g.dtype == torch.float32 for g in got.values())
        cast = {n: x.to(half) if n in OPS[name].autocast else x for n, x in args.items()}
        want = calls.gradients(name, args, grads, calls.run(name, cast))
        calls.assert_all_near(got, want, 1e-5)


@pytest.mark.parametrize("name", [n for n in OPS if OPS[n].autocast])
def test_inputs_of_two_dtypes_meet_in_the_autocast_dtype(name, device):
    args = inputs.arguments(name, device=device, dtype=torch.float32)
    first, second, *_ = OPS[name].autocast
    mixed = {**args, first: args[first].half(), second: args[second].bfloat16()}
    cast = {n: x.bfloat16() if n in OPS[name].autocast else x for n, x in mixed.items()}
    with pytest.raises(TypeError, match=name):
        calls.run(name, mixed)
    with torch.autocast(device, torch.bfloat16):
        found = calls.run(name, mixed)
    calls.assert_all_equal(found, calls.run(name, cast))


@pytest.mark.parametrize("name", [*OPS, *BACKWARDS])
def test_autocast_that_is_off_inside_is_off(name, device):
    args = inputs.arguments(name, device=device)
    want = calls.run(name, args)
    with torch.autocast(device, torch.bfloat16), torch.autocast(device, enabled=False):
        found = calls.run(name, args)
    calls.assert_all_near(found, want, 1e-6)
    assert {n: x.dtype for n, x in found.items()} == {n: x.dtype for n, x in want.items()}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_half_of_what_was_given_is_kept(name, device):
    """For backward the cast copies are kept, not the float32 originals."""
    args, kept = inputs.arguments(name, device=device, grad=True), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with torch.autocast(device, torch.bfloat16), hooks:
        calls.run(name, args)
    assert {x.dtype for x in kept if x.is_floating_point()} == {torch.float32} | (
        {torch.bfloat16} if OPS[name].autocast else set()
    )
    originals = {args[n].data_ptr() for n in OPS[name].autocast}
    assert not originals & {x.data_ptr() for x in kept}


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_whole_layer(mode, half, inside, device):
    module = set_mode(layer("dense", dtype=torch.float32, sink=True), mode).to(device)
    x = torch.randn(2, 19, SMALL["hidden_size"], device=device, requires_grad=True)
    with torch.autocast(device, half):
        result = module(x)
        loss = result.out.float().square().mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert result.out.dtype == half
    assert result.indices is None or result.indices.dtype == torch.int32
    assert result.loss is None or (result.loss.dtype == result.kl.dtype == torch.float32)
    for name, p in module.named_parameters():
        assert (p.grad is not None) == p.requires_grad, name
        assert p.grad is None or (p.grad.dtype == torch.float32 and p.grad.isfinite().all()), name


@pytest.mark.gpu
def test_gradient_scaler_and_attached_loss():
    """The scaler's factor, handed to attach_loss as a tensor, comes out again when it unscales."""
    module = set_mode(layer("dense", dtype=torch.float32), "sparse").cuda()
    x = torch.randn(2, 19, SMALL["hidden_size"], device="cuda")
    side, scaler = torch.nn.Linear(SMALL["hidden_size"], 1).cuda(), torch.amp.GradScaler("cuda", init_scale=256.0)
    optimizer = torch.optim.SGD([*module.parameters(), *side.parameters()], lr=0.0)

    def gradient(scaled):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            auxiliary = side(x).float().square().mean()
            factor = scaler.scale(torch.ones((), device="cuda")) if scaled else None
            loss = dsa_ops.attach_loss(module(x).out, auxiliary, factor).float().mean()
        (scaler.scale(loss) if scaled else loss).backward()
        if scaled:
            scaler.unscale_(optimizer)
        return side.weight.grad.clone()

    torch.testing.assert_close(gradient(True), gradient(False), atol=1e-3, rtol=1e-2)
