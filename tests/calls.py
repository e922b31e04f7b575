"""Calling an op of the table, and what the answer should be: the same few steps in every test."""

import inspect

import torch
from hypothesis import HealthCheck, settings

import dsa_ops
import inputs
import oracle

TOLERANCE = {torch.int32: 0, torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
few = settings(derandomize=True, max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
# Arguments with one entry per query row, and with one per key.
ROWS = {"q", "index_q", "weights", "index_weights", "starts", "ends", "indices", "topk_length", "lse", "out", "target"}
ROWS |= {"scores", "row_weight", "grad_scores", "grad_out", "grad_lse", "grad_kl"}
KEYS = {"k", "kv", "index_k"}


def op(name):
    return getattr(torch.ops.dsa, name).default


def as_tuple(x):
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def run(name, args) -> dict[str, torch.Tensor]:
    """The op's outputs by name; a backward op's gradients by the name of the argument they belong to."""
    names = inputs.OPS[name].outputs if name in inputs.OPS else inputs.BACKWARDS[name].gradients
    return dict(zip(names, as_tuple(op(name)(*args.values())), strict=True))


def public_arguments(name, args) -> tuple[list, dict]:
    """The arguments of the schema as dsa_ops.<name> takes them: positional ones and keywords."""
    parameters = inspect.signature(getattr(dsa_ops, name)).parameters.values()
    positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    items = list(args.items())
    return [x for _, x in items[:positional]], dict(items[positional:])


def public(name, args):
    """dsa_ops.<name> with the arguments of the schema."""
    positional, keywords = public_arguments(name, args)
    return getattr(dsa_ops, name)(*positional, **keywords)


def on_cpu(args):
    return {n: x.detach().cpu() if isinstance(x, torch.Tensor) else x for n, x in args.items()}


def reference(name, args) -> dict[str, torch.Tensor]:
    """What `run` should return, by the oracle. A gradient that is not there (no sink) is an empty tensor."""
    args = on_cpu(args)
    if name in inputs.OPS:
        return dict(zip(inputs.OPS[name].outputs, as_tuple(getattr(oracle, name)(**args)), strict=True))
    backward = inputs.BACKWARDS[name]
    forward = getattr(oracle, backward.forward)
    mine = {n: args[n] for n in inspect.signature(forward).parameters}
    grads = [args.get(f"grad_{n}") if n in backward.incoming else None for n in inputs.OPS[backward.forward].outputs]
    wanted = [n for n in backward.gradients if args[n] is not None]
    empty = {n: torch.zeros(0, dtype=torch.float64) for n in backward.gradients}
    return empty | oracle.backward(forward, mine, grads, wanted)


def incoming(name, outputs) -> dict[str, torch.Tensor]:
    """A random gradient for every output that carries one."""
    return {n: torch.randn_like(outputs[n]) for n in inputs.OPS[name].through}


def gradients(name, args, grads, outputs=None) -> dict[str, torch.Tensor]:
    """Gradients of the op's differentiable arguments through autograd, given those of its outputs by name."""
    outputs = outputs or run(name, args)
    wanted = [n for n in inputs.OPS[name].differentiable if args[n] is not None and args[n].requires_grad]
    found = torch.autograd.grad([outputs[n] for n in grads], [args[n] for n in wanted], list(grads.values()))
    return dict(zip(wanted, found, strict=True))


def reference_gradients(name, args, grads) -> dict[str, torch.Tensor]:
    wanted = [n for n in inputs.OPS[name].differentiable if args[n] is not None and args[n].requires_grad]
    incoming = [grads[n].cpu() if n in grads else None for n in inputs.OPS[name].outputs]
    return oracle.backward(getattr(oracle, name), on_cpu(args), incoming, wanted)


def assert_near(got, want, tolerance=None, what=""):
    """Largest error below `tolerance` (by default that of got's dtype) times the largest value; infinities agree.

    Inputs are of size 1, so what comes out smaller than 0.25 came from cancellation and counts as that large.
    """
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    tolerance = TOLERANCE[got.dtype] if tolerance is None else tolerance
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    finite = want.isfinite()
    assert torch.equal(got[~finite], want[~finite]) and got[finite].isfinite().all(), f"{what}: not finite alike"
    if finite.any():
        error, size = (got - want)[finite].abs().max().item(), want[finite].abs().max().item()
        assert error <= tolerance * max(size, 0.25), f"{what}: error {error:.3g} at values up to {size:.3g}"


def assert_all_near(got, want, tolerance=None):
    assert got.keys() == want.keys()
    for n in got:
        assert_near(got[n], want[n], tolerance, n)


def assert_all_equal(got, want):
    """Bit for bit, NaN equal to NaN."""
    assert got.keys() == want.keys()
    for n in got:
        assert got[n].dtype == want[n].dtype and got[n].shape == want[n].shape, n
        assert torch.equal(bits(got[n]), bits(want[n])), f"{n} differs"


def bits(x):
    x = x.detach().contiguous()
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return x.view(whole[x.element_size()]) if x.is_floating_point() else x
