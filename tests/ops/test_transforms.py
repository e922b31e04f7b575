"""vmap is right; second derivatives and forward-mode derivatives are right or an error that names the op."""

import pytest
import torch
from torch.autograd import forward_ad

import calls
import inputs
from inputs import BACKWARDS, DIFFERENTIABLE, OPS

CASE = inputs.Case(dtype=torch.float64)
B = 3


def samples(name, **changes):
    return [inputs.arguments(name, CASE, seed=seed, **changes) for seed in range(B)]


def batched(name, shared, **changes):
    """B inputs stacked, except for the names in `shared`: stack, in_dims and the B single inputs."""
    singles = samples(name, **changes)
    singles = [{**s, **{n: singles[0][n] for n in shared}} for s in singles]
    stack, dims = {}, {}
    for i, (n, x) in enumerate(singles[0].items()):
        is_batched = isinstance(x, torch.Tensor) and n not in shared
        dims[n] = (i % 2 if x.dim() else 0) if is_batched else None  # dimension 0 and 1 in turn
        stack[n] = torch.stack([s[n] for s in singles], dims[n]) if is_batched else x
    return stack, dims, singles


@pytest.mark.parametrize("shared", [(), ("k", "kv", "index_k"), ("q", "indices", "starts", "ends", "target")])
@pytest.mark.parametrize("name", [*OPS, *BACKWARDS])
def test_vmap(name, shared, device):
    shared = [n for n in shared if n in inputs.arguments(name)]
    stack, dims, singles = batched(name, shared, device=device)
    found = torch.vmap(lambda *a: calls.as_tuple(calls.op(name)(*a)), in_dims=tuple(dims.values()))(*stack.values())
    one_by_one = [calls.as_tuple(calls.op(name)(*s.values())) for s in singles]
    for got, *want in zip(found, *one_by_one, strict=True):
        if torch.device(device).type == "cpu":
            assert torch.equal(calls.bits(got), calls.bits(torch.stack(want)))
        else:  # sums over queries are in no fixed order there
            calls.assert_near(got.double(), torch.stack(want).double())


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward_through_vmap(name, device):
    stack, dims, singles = batched(name, (), device=device)
    leaves = [stack[n].requires_grad_() for n in OPS[name].differentiable]
    singles = [{n: x.requires_grad_() if n in OPS[name].differentiable else x for n, x in s.items()} for s in singles]
    found = torch.vmap(lambda *a: calls.as_tuple(calls.op(name)(*a)), in_dims=tuple(dims.values()))(*stack.values())
    found = dict(zip(OPS[name].outputs, found, strict=True))
    grads = calls.incoming(name, found)
    got = torch.autograd.grad([found[n] for n in grads], leaves, list(grads.values()))
    want = [calls.gradients(name, s, {n: g[i] for n, g in grads.items()}) for i, s in enumerate(singles)]
    for n, g in zip(OPS[name].differentiable, got, strict=True):
        calls.assert_near(g, torch.stack([w[n] for w in want], dims[n]), what=n)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_vmap_over_incoming_gradients(name, device):
    """`is_grads_batched` runs the backward op under vmap, as a vectorised jacobian does."""
    args = inputs.arguments(name, CASE, device=device, grad=True)
    outputs = calls.run(name, args)
    several = [calls.incoming(name, outputs) for _ in range(B)]
    leaves = [args[n] for n in OPS[name].differentiable]
    stacked = [torch.stack([g[n] for g in several]) for n in OPS[name].through]
    got = torch.autograd.grad([outputs[n] for n in OPS[name].through], leaves, stacked, is_grads_batched=True)
    want = [calls.gradients(name, args, g) for g in several]
    for n, g in zip(OPS[name].differentiable, got, strict=True):
        calls.assert_near(g, torch.stack([w[n] for w in want]), what=n)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("penalty", [False, True], ids=["random gradient", "constant gradient"])
def test_second_derivatives_are_refused_by_name(name, penalty):
    args = inputs.arguments(name, CASE, grad=True)
    output = calls.run(name, args)[OPS[name].through[0]]
    output = torch.where(output.isfinite(), output, 0.0)
    leaves = [args[n] for n in OPS[name].differentiable]
    first = torch.autograd.grad(output.sum() if penalty else output.square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=f"dsa::{'indexer_scores' if name == 'indexer_topk' else name}.*derivative"):
        sum(g.square().sum() for g in first).backward()


def tangents_of(name, args):
    """Tangents by finite differences of the op itself, for float outputs."""
    direction = {n: torch.randn_like(args[n]) for n in OPS[name].differentiable}
    step = 1e-6
    up, down = (
        calls.run(name, {**args, **{n: args[n] + sign * step * d for n, d in direction.items()}}) for sign in (1, -1)
    )
    return direction, {n: torch.nan_to_num((up[n] - down[n]) / (2 * step)) for n in OPS[name].through}


def assert_tangents(name, call, want):
    """`call` returns the right tangents, or raises an error that names the op."""
    try:
        found = call()
    except (RuntimeError, NotImplementedError) as error:
        assert f"dsa::{name}" in str(error), error
        return
    for n in OPS[name].through:
        assert found[n] is not None, f"the tangent of {n} is silently zero"
        calls.assert_near(found[n], want[n], 1e-5, n)


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "requires_grad"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_forward_mode(name, grad):
    args = inputs.arguments(name, CASE)
    direction, want = tangents_of(name, args)

    def call():
        with forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(args[n].clone().requires_grad_(grad), d) for n, d in direction.items()}
            return {n: forward_ad.unpack_dual(x).tangent for n, x in calls.run(name, {**args, **duals}).items()}

    assert_tangents(name, call, want)


@pytest.mark.parametrize("one", [True, False], ids=["one input", "every input"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_jvp(name, one):
    args = inputs.arguments(name, CASE)
    names = OPS[name].differentiable[: 1 if one else None]
    direction, want = tangents_of(name, args)
    if one:
        direction = {names[0]: direction[names[0]]}
        step = {names[0]: args[names[0]] + 1e-6 * direction[names[0]]}
        base = calls.run(name, args)
        want = {n: torch.nan_to_num((x - base[n]) / 1e-6) for n, x in calls.run(name, {**args, **step}).items()}

    def function(*leaves):
        outputs = calls.run(name, {**args, **dict(zip(names, leaves, strict=True))})
        return tuple(outputs[n] for n in OPS[name].through)

    def call():
        _, found = torch.func.jvp(function, tuple(args[n] for n in names), tuple(direction[n] for n in names))
        return dict(zip(OPS[name].through, found, strict=True))

    assert_tangents(name, call, want)


@pytest.mark.parametrize("name", BACKWARDS)
def test_forward_mode_over_a_backward_op_is_refused_by_name(name):
    """Forward over reverse would be a second derivative."""
    args = inputs.arguments(name, CASE)
    n = next(iter(args))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=f"dsa::{name}"):
        calls.run(name, {**args, n: forward_ad.make_dual(args[n].clone(), torch.ones_like(args[n]))})
