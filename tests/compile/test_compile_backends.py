"""Which implementation runs is decided when a compiled graph runs, never while it is traced."""

import pytest
import torch

import calls
import dsa_ops
import inputs

REFUSED = "backend 'tilelang' was asked for"


def block(*args):
    with dsa_ops.backend("tilelang"):
        return calls.op("sparse_mla")(*args)


@dsa_ops.backend("tilelang")
def decorated(*args):
    return calls.op("sparse_mla")(*args)


def nested(*args):
    return decorated(*args)


def after_a_break(*args):
    torch._dynamo.graph_break()
    return block(*args)


def compiled(function, fullgraph=True):
    return torch.compile(function, fullgraph=fullgraph, backend="aot_eager")


@pytest.mark.parametrize("function", [block, decorated, nested])
def test_refused_inside_a_compiled_function(function):
    text = "cannot be used inside a compiled function; put it around the call"
    if function is decorated:  # torch 2.9 keeps no more than the type of it
        text += r"|raised exception ExceptionVariable\(<class 'RuntimeError'>\)"
    with pytest.raises(Exception, match=text):
        compiled(function)(*inputs.arguments("sparse_mla").values())
    assert dsa_ops.dispatch.requested_backend() == "auto"


@pytest.mark.parametrize("function", [block, decorated, nested, after_a_break])
def test_honoured_where_torch_falls_back_to_eager(function):
    with pytest.raises(RuntimeError, match=REFUSED):
        compiled(function, fullgraph=False)(*inputs.arguments("sparse_mla").values())
    assert dsa_ops.dispatch.requested_backend() == "auto"


@pytest.mark.parametrize("name", inputs.DIFFERENTIABLE)
def test_read_when_forward_and_when_backward_runs(name, monkeypatch):
    function = compiled(calls.op(name))
    args = inputs.arguments(name, grad=True)

    def forward():
        return dict(zip(inputs.OPS[name].outputs, calls.as_tuple(function(*args.values())), strict=True))

    outputs = forward()
    grads = calls.incoming(name, outputs)
    with dsa_ops.backend("tilelang"):
        with pytest.raises(RuntimeError, match=rf"dsa::{name}: {REFUSED}"):
            forward()
        with pytest.raises(RuntimeError, match=rf"dsa::{inputs.OPS[name].backward}: {REFUSED}"):
            calls.gradients(name, args, grads, outputs)
    monkeypatch.setenv("DSA_OPS_BACKEND", "tilelang")
    with pytest.raises(RuntimeError, match=rf"dsa::{name}: {REFUSED}"):
        forward()
    with dsa_ops.backend("unfused"):
        calls.gradients(name, args, grads, forward())


def test_a_block_around_torch_compile_alone_changes_nothing():
    with dsa_ops.backend("tilelang"):
        function = compiled(calls.op("sparse_mla"))
    function(*inputs.arguments("sparse_mla").values())
