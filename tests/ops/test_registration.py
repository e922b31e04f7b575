"""What every op owes PyTorch: schema, fake, autograd, autocast, compile. One table, every op in it.

More of it: trace/ (fake tensors, autocast, checkpointing, FLOPs), compile/, export/.
"""

import functools

import pytest
import torch
from expecttest import assert_expected_inline

import calls
import dsa_ops  # noqa: F401
import inputs
from inputs import ALL, BACKWARDS, CASES, DIFFERENTIABLE, OPS, Case

OPCHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
OPCHECK_CASES = {
    "plain": CASES["plain"],
    "without optionals": CASES["without_optionals"],
    "no rows": CASES["no_rows"],
    "no keys": CASES["no_keys"],
    "transposed bfloat16": Case(layout="transposed", dtype=torch.bfloat16),
    "sliced float16": Case(layout="sliced", dtype=torch.float16, total_heads=6),
    "expanded float64": Case(layout="expanded", dtype=torch.float64, expanded_keys=True),
}


def test_the_table_names_every_registered_op():
    registered = {n.removeprefix("dsa::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("dsa::")}
    parts = {"attach_loss", "attach_loss_backward"}  # of dsa_ops.attach_loss, see tests/test_losses.py
    assert registered - parts == set(ALL)


def test_schemas():
    """Frozen: a later version may append arguments with defaults, nothing else."""
    assert_expected_inline(
        "\n".join(str(calls.op(name)._schema) for name in ALL),
        """\
dsa::indexer_topk(Tensor q, Tensor k, Tensor weights, Tensor starts, Tensor ends, SymInt topk, bool relu=True) -> (Tensor indices, Tensor scores)
dsa::indexer_scores(Tensor q, Tensor k, Tensor weights, Tensor indices, bool relu=True) -> Tensor
dsa::sparse_mla(Tensor q, Tensor kv, Tensor indices, float softmax_scale, SymInt d_v, Tensor? sink=None, Tensor? topk_length=None) -> (Tensor out, Tensor lse)
dsa::attention_target(Tensor q, Tensor kv, Tensor lse, Tensor indices, float softmax_scale, Tensor? topk_length=None) -> Tensor
dsa::indexer_kl(Tensor target, Tensor scores, Tensor indices) -> Tensor
dsa::dense_indexer_kl(Tensor index_q, Tensor index_k, Tensor index_weights, Tensor q, Tensor k, Tensor lse, Tensor starts, Tensor ends, float softmax_scale, Tensor row_weight, bool relu=True, SymInt total_heads=0) -> (Tensor loss, Tensor kl)
dsa::indexer_scores_backward(Tensor grad_scores, Tensor q, Tensor k, Tensor weights, Tensor indices, bool relu=True, bool need_q=True, bool need_k=True, bool need_weights=True) -> (Tensor grad_q, Tensor grad_k, Tensor grad_weights)
dsa::sparse_mla_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor kv, Tensor indices, Tensor out, Tensor lse, float softmax_scale, SymInt d_v, Tensor? sink=None, Tensor? topk_length=None, bool need_q=True, bool need_kv=True, bool need_sink=True) -> (Tensor grad_q, Tensor grad_kv, Tensor grad_sink)
dsa::indexer_kl_backward(Tensor grad_kl, Tensor target, Tensor scores, Tensor indices) -> Tensor
dsa::dense_indexer_kl_backward(Tensor grad_loss, Tensor index_q, Tensor index_k, Tensor index_weights, Tensor q, Tensor k, Tensor lse, Tensor starts, Tensor ends, float softmax_scale, Tensor row_weight, bool relu=True, SymInt total_heads=0, bool need_q=True, bool need_k=True, bool need_weights=True) -> (Tensor grad_index_q, Tensor grad_index_k, Tensor grad_index_weights)""",  # noqa: E501
    )


@pytest.mark.parametrize("case", OPCHECK_CASES)
@pytest.mark.parametrize("name", ALL)
def test_opcheck(name, case, device):
    args = tuple(inputs.arguments(name, OPCHECK_CASES[case], device=device, grad=True).values())
    if name == "indexer_topk":  # its gradient test adds up int32 indices and float scores, which torch cannot
        torch.library.opcheck(calls.op(name), args, test_utils=OPCHECK[:3])
        args = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
    torch.library.opcheck(calls.op(name), args, test_utils=OPCHECK)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_opcheck_without_gradients(name, device):
    torch.library.opcheck(calls.op(name), tuple(inputs.arguments(name, device=device).values()))


def test_opcheck_of_backwards_with_none_and_unwanted_gradients(device):
    args = inputs.arguments("sparse_mla_backward", device=device)
    for changes in ({"grad_out": None}, {"grad_lse": None}, {"need_kv": False, "need_sink": False}, {"need_q": False}):
        torch.library.opcheck(calls.op("sparse_mla_backward"), tuple({**args, **changes}.values()))


@torch._dynamo.config.patch(error_on_recompile=True)
@pytest.mark.parametrize("name", OPS)
def test_compiled_equals_eager(name, device):
    """Forward and backward in one graph each, compiled once for sizes that change."""
    torch._dynamo.reset()
    numbers = {n: x for n, x in inputs.arguments(name).items() if not isinstance(x, torch.Tensor)}
    call = functools.partial(getattr(torch.ops.dsa, name), **numbers)  # a float argument would recompile
    compiled = torch.compile(lambda tensors: call(**tensors), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (7, 10, 13):
        args = inputs.arguments(name, device=device, grad=True, T=rows)
        eager = calls.run(name, args)
        tensors = {n: x for n, x in args.items() if n not in numbers}
        found = dict(zip(OPS[name].outputs, calls.as_tuple(compiled(tensors)), strict=True))
        calls.assert_all_near(found, eager, 1e-6)
        if name in DIFFERENTIABLE:
            grads = calls.incoming(name, eager)
            calls.assert_all_near(
                calls.gradients(name, args, grads, found), calls.gradients(name, args, grads, eager), 1e-5
            )


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_profile_names_forward_and_backward(name):
    args = inputs.arguments(name, grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        outputs = calls.run(name, args)
        calls.gradients(name, args, calls.incoming(name, outputs), outputs)
    assert {f"dsa::{name}", f"dsa::{OPS[name].backward}"} <= {event.key for event in profile.key_averages()}


# ---- autocast: q, k, kv and index q, k are cast, nothing else --------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", OPS)
def test_autocast(name, compiled, device):
    args = inputs.arguments(name, device=device, grad=True, exact=name == "indexer_topk")
    cast = {n: x.bfloat16() if n in OPS[name].autocast else x for n, x in args.items()}
    torch._dynamo.reset()
    call = torch.compile(calls.op(name), fullgraph=True, backend="aot_eager") if compiled else calls.op(name)
    with torch.autocast(device, torch.bfloat16):
        found = dict(zip(OPS[name].outputs, calls.as_tuple(call(*args.values())), strict=True))
    calls.assert_all_equal(found, calls.run(name, cast))
    if name in DIFFERENTIABLE:
        grads = calls.incoming(name, found)
        got = calls.gradients(name, args, grads, found)
        assert all(g.dtype == torch.float32 for g in got.values())
        calls.assert_all_near(got, calls.gradients(name, args, grads, calls.run(name, cast)), 1e-5)


@pytest.mark.parametrize("name", BACKWARDS)
def test_autocast_does_not_reach_into_a_backward(name, device):
    """`backward()` may be called inside the region; eager autocast is then still on in the body."""
    args = inputs.arguments(name, device=device)
    want = calls.run(name, args)
    with torch.autocast(device, torch.bfloat16):
        calls.assert_all_near(calls.run(name, args), want, 1e-6)


@pytest.mark.parametrize("name", OPS)
def test_autocast_leaves_float64_alone(name, device):
    args = inputs.arguments(name, device=device, dtype=torch.float64)
    with torch.autocast(device, torch.bfloat16):
        found = calls.run(name, args)
    calls.assert_all_equal(found, calls.run(name, args))


# ---- meta ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_meta(name):
    """Shapes, dtypes and contiguous strides of the results without data."""
    for case in (CASES["plain"], CASES["transposed"], CASES["no_keys"]):
        real, meta = (
            calls.run(name, inputs.arguments(name, case)),
            calls.run(name, inputs.arguments(name, case, device="meta")),
        )
        for n in real:
            assert meta[n].is_meta and meta[n].is_contiguous()
            assert (meta[n].shape, meta[n].dtype) == (real[n].shape, real[n].dtype)


# ---- frozen inputs cost nothing --------------------------------------------------------------------------------------


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the name and arguments of every call of an op of ours."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dsa":
            defaults = [a.default_value if a.has_default_value() else None for a in func._schema.arguments]
            names = [a.name for a in func._schema.arguments]
            self.calls.append((func._schema.name, dict(zip(names, [*args, *defaults[len(args) :]], strict=True))))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [n for n in DIFFERENTIABLE if n != "indexer_kl"])
def test_gradients_nobody_wants_are_not_computed(name, device):
    args = inputs.arguments(name, device=device, grad=True)
    grads = calls.incoming(name, calls.run(name, args))
    everything = calls.gradients(name, args, grads)
    flags = dict(zip(OPS[name].differentiable, BACKWARDS[OPS[name].backward].needs, strict=True))
    for one in OPS[name].differentiable:
        frozen = {n: x.detach() if n in flags and n != one else x for n, x in args.items()}
        with Recorder() as recorder:
            got = calls.gradients(name, frozen, grads)
        ((_, backward),) = [c for c in recorder.calls if c[0] == f"dsa::{OPS[name].backward}"]
        assert {n: backward[f"need_{flag}"] for n, flag in flags.items()} == {n: n == one for n in flags}
        calls.assert_all_near(got, {one: everything[one]}, 1e-6)


@pytest.mark.parametrize("name", [n for n in BACKWARDS if BACKWARDS[n].needs])
def test_an_unwanted_gradient_is_an_empty_tensor(name, device):
    args = inputs.arguments(name, device=device)
    everything = calls.run(name, args)
    for flag, n in zip(BACKWARDS[name].needs, BACKWARDS[name].gradients, strict=True):
        got = calls.run(name, {**args, f"need_{flag}": False})
        assert got.pop(n).shape == (0,)
        calls.assert_all_near(got, {m: g for m, g in everything.items() if m != n}, 1e-6)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_which_outputs_carry_gradients(name):
    outputs = calls.run(name, inputs.arguments(name, grad=True))
    assert {n for n, x in outputs.items() if x.requires_grad} == set(OPS[name].through)


def test_attention_target_carries_none():
    args = inputs.arguments("attention_target")
    for n in ("q", "kv", "lse"):
        args[n].requires_grad_()
    assert not calls.op("attention_target")(*args.values()).requires_grad


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_inputs_are_not_changed(name):
    args = inputs.arguments(name, grad=True)
    before = {n: x.detach().clone() for n, x in args.items() if isinstance(x, torch.Tensor)}
    outputs = calls.run(name, args)
    calls.gradients(name, args, calls.incoming(name, outputs), outputs)
    calls.assert_all_equal({n: args[n].detach() for n in before}, before)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_checkpoint_gives_the_same_gradients(name):
    from torch.utils.checkpoint import checkpoint

    args = inputs.arguments(name, grad=True)
    grads = calls.incoming(name, calls.run(name, args))
    kept = calls.gradients(name, args, grads)
    outputs = calls.as_tuple(checkpoint(calls.op(name), *args.values(), use_reentrant=False))
    again = calls.gradients(name, args, grads, dict(zip(OPS[name].outputs, outputs, strict=True)))
    calls.assert_all_near(again, kept, 1e-6)
