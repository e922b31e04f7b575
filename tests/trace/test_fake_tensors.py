"""Shapes without data: fake CUDA tensors where there is no CUDA, training graphs on fake CPU and on meta tensors."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import calls
import dsa_ops
import inputs
from dsa_ops.nn import DSAConfig, DSAttention, set_mode
from dsa_ops.nn.attention import MODES
from inputs import ALL, DIFFERENTIABLE, OPS
from layers import SMALL, layer

CASES = {"plain": inputs.Case(), "bfloat16": inputs.Case(dtype=torch.bfloat16, optional=False)}
CASES |= {"transposed": inputs.Case(layout="transposed"), "float64": inputs.Case(dtype=torch.float64, T=0)}
PLACES = ["fake cpu", "meta"]


def like(x):
    """What there is to know of a tensor without data, but for its device."""
    return None if x is None else (x.shape, x.dtype, x.stride(), x.requires_grad)


def without_data(args, device):
    """The same arguments as empty tensors, strides and requires_grad kept."""

    def empty(x):
        if not isinstance(x, torch.Tensor):
            return x
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return made.requires_grad_(x.requires_grad)

    return {n: empty(x) for n, x in args.items()}


@contextlib.contextmanager
def place(name):
    """The device, inside the mode if there is one."""
    if name == "meta":
        yield "meta"
        return
    with FakeTensorMode():
        yield name.removeprefix("fake ")


def assert_alike(found, want, device):
    assert found.keys() == want.keys()
    for n in want:
        assert like(found[n]) == like(want[n]), n
        assert found[n] is None or found[n].device.type == device, n


# ---- ops and functions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ALL)
def test_ops_on_fake_cuda(name, case):
    args = inputs.arguments(name, CASES[case])
    want = calls.run(name, args)
    with FakeTensorMode():
        assert_alike(calls.run(name, without_data(args, "cuda")), want, "cuda")


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_without_data(name, case, where):
    args = inputs.arguments(name, CASES[case], grad=True)
    outputs = calls.run(name, args)
    want = calls.gradients(name, args, calls.incoming(name, outputs), outputs)
    with place(where) as device:
        args = without_data(args, device)
        found = calls.run(name, args)
        assert_alike(found, outputs, device)
        grads = {n: torch.empty_like(found[n]) for n in OPS[name].through}
        assert_alike(calls.gradients(name, args, grads, found), want, device)


def public(name, args, batch):
    """Arguments for the public function: its defaults instead of bounds and the like; `batch` copies of the rest."""
    left_out = {"starts", "ends", "topk_length", "row_weight", "softmax_scale", "total_heads"}
    args = {n: x for n, x in args.items() if n not in left_out}
    if batch:
        once = {"sink"}
        args = {
            n: torch.stack([x] * batch).detach().requires_grad_(x.requires_grad)
            if isinstance(x, torch.Tensor) and n not in once
            else x
            for n, x in args.items()
        }
    return args


@pytest.mark.parametrize("where", [*PLACES, "fake cuda"])
@pytest.mark.parametrize("batch", [0, 2], ids=["packed", "batched"])
@pytest.mark.parametrize("name", OPS)
def test_public_functions_with_their_defaults(name, batch, where):
    """No values are read: causal bounds, local ids and the number of rows come from shapes."""
    args = public(name, inputs.arguments(name, T=9, S=9, grad=where != "fake cuda"), batch)
    function = getattr(dsa_ops, name)

    def run(args):
        result = function(**args)
        outputs = dict(zip(OPS[name].outputs, calls.as_tuple(result), strict=True))
        wanted = {n: args[n] for n in OPS[name].differentiable if args[n].requires_grad}
        if not wanted:
            return outputs, {}
        through = [outputs[n] for n in OPS[name].through]
        found = torch.autograd.grad(through, list(wanted.values()), [torch.ones_like(x) for x in through])
        return outputs, dict(zip(wanted, found, strict=True))

    wanted = run(args)
    with place(where) as device:
        for found, want in zip(run(without_data(args, device)), wanted, strict=True):
            assert_alike(found, want, device)


@pytest.mark.parametrize("where", [*PLACES, "fake cuda"])
@pytest.mark.parametrize("wide_ids", [False, True], ids=["int32", "int64"])
def test_indexer_loss_and_attach_loss(wide_ids, where):
    args = inputs.arguments("attention_target", T=9, S=9)
    args["indices"] = args["indices"].long() if wide_ids else args["indices"]
    args["scores"] = torch.randn(9, args["indices"].shape[1], requires_grad=where != "fake cuda")
    args |= {"row_mask": torch.rand(9) < 0.5, "x": torch.randn(9, 4), "scale": torch.ones(())}

    def run(x, scale, **args):
        loss = dsa_ops.indexer_loss(**args)
        out = dsa_ops.attach_loss(x, loss, scale)
        if not loss.requires_grad:
            return {"loss": loss, "out": out}
        (grad,) = torch.autograd.grad(out.sum(), args["scores"])
        return {"loss": loss, "out": out, "grad": grad}

    want = run(**args)
    with place(where) as device:
        assert_alike(run(**without_data(args, device)), want, device)


def test_a_bad_shape_is_refused_without_data():
    args = inputs.arguments("sparse_mla")
    args["kv"] = args["kv"][:, :-1]
    for where in (*PLACES, "fake cuda"):
        with place(where) as device, pytest.raises(ValueError, match=r"sparse_mla: kv must have shape \[S, D\]"):
            calls.run("sparse_mla", without_data(args, device))


# ---- the layer ---------------------------------------------------------------------------------------------------


def arguments_of_layer(form, grad, dtype):
    rows = 9
    x = torch.randn(*((2, rows) if form == "batched" else (rows,)), SMALL["hidden_size"], dtype=dtype)
    bounds = torch.zeros(rows, dtype=torch.int32), torch.arange(1, rows + 1, dtype=torch.int32)
    more = dict(zip(("starts", "ends"), bounds, strict=True)) if form == "bounds" else {}
    return {"x": x.requires_grad_(grad), **more}


@pytest.mark.parametrize("where", [*PLACES, "fake cuda"])
@pytest.mark.parametrize("form", ["packed", "bounds", "batched"])
@pytest.mark.parametrize("mode", MODES)
def test_layer(mode, form, where):
    """Forward on fake CUDA, forward and backward elsewhere (PyTorch's backward asks the device for its streams)."""
    grad = where != "fake cuda"
    if where == "fake cuda" and mode in MODES[:2] and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("scaled_dot_product_attention of a CUDA build asks the driver, and there is none")
    module = set_mode(layer("dense", dtype=torch.bfloat16, sink=form == "packed"), mode)
    args = arguments_of_layer(form, grad, torch.bfloat16)

    def run(module, args):
        with torch.set_grad_enabled(grad):
            result = module(**args)
            found = result._asdict()
            if grad:
                result.out.sum().backward()
                found |= {name: p.grad for name, p in module.named_parameters()} | {"x": args["x"].grad}
        return found

    want = run(module, args)
    module.zero_grad()
    with place(where) as device:
        found = run(fake_copy(module, device), without_data(args, device))
    for n in want:
        strides = n not in ("out", "x")  # attention's own kernels choose those
        a, b = like(found[n]), like(want[n])
        assert (a == b) if strides or a is None else (a[:2], a[3]) == (b[:2], b[3]), n
        assert found[n] is None or found[n].device.type == device, n


def fake_copy(module, device):
    """Made on meta and moved: to initialise asks for the device's generator, `to_empty` swaps what has references."""
    copy = DSAttention(module.config, device="meta", dtype=torch.bfloat16)
    for child in copy.modules():
        for name, p in child.named_parameters(recurse=False):
            setattr(child, name, torch.nn.Parameter(torch.empty_like(p, device=device)))
    assert all(isinstance(p, FakeTensor) or p.is_meta for p in copy.parameters())
    return set_mode(copy, module.mode)


@pytest.mark.parametrize("mode", MODES)
def test_layer_made_on_meta_gets_its_memory_later(mode):
    """The usual way to a model too large for one device: meta, to_empty, load_state_dict."""
    want = layer(mode, dtype=torch.float32, sink=True)
    with torch.device("meta"):
        made = DSAttention(DSAConfig(**SMALL | {"sink": True}))
    assert all(p.is_meta for p in made.parameters()) and not list(made.buffers())
    set_mode(made, mode)
    trained = {name for name, p in made.named_parameters() if p.requires_grad}
    made.to_empty(device="cpu")
    made.load_state_dict(want.state_dict())
    assert {name for name, p in made.named_parameters() if p.requires_grad} == trained
    x = torch.randn(2, 9, SMALL["hidden_size"])
    assert torch.equal(made(x).out, want(x).out)


@pytest.mark.parametrize("mode", MODES)
def test_default_device_of_meta_does_not_reach_into_a_layer(mode):
    """Tables and ids are made where x is, whatever the default device."""
    module, x = layer(mode, dtype=torch.float32), torch.randn(9, SMALL["hidden_size"])
    want = module(x).out
    with torch.device("meta"):
        assert torch.equal(module(x).out, want)
