"""One graph, forward and backward, with the values and gradients of eager."""

import pytest
import torch
import torch._dynamo.testing
from layers import LAYOUTS, gradients, hidden, layer

from dsa_ops.nn import dense, rotary_table, set_mode

MODES = ["dense", "warmup", "sparse", "frozen"]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(function, module, x, *args, **kwargs):
    module.zero_grad()
    x.grad = None
    got = function(x, *args, **kwargs)
    got.out.square().sum().backward()
    return got, gradients(module) | {"x": x.grad}


def same(compiled, eager, tolerance=1e-10):
    (got, got_grads), (want, want_grads) = compiled, eager
    for name in ("out", "indices", "loss", "kl"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, msg=name)
    for name, want in want_grads.items():
        got = got_grads[name]
        assert (got is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, msg=name)


def prepared(mode, **changes):
    return set_mode(layer(sink=True, index_hadamard=True, **changes), mode)


@pytest.mark.parametrize("layout", ["causal", "ragged", "packed", "one packed"])
@pytest.mark.parametrize("mode", MODES)
def test_fullgraph(mode, layout):
    module = prepared(mode)
    x, bounds = hidden(2, 19), {}
    if layout == "ragged":
        bounds = dict(zip(("starts", "ends"), LAYOUTS["ragged"](2, 19)[:2], strict=True))
    elif "packed" in layout:
        x = hidden(38)
    if layout == "packed":
        ids = torch.arange(38, dtype=torch.int32)
        bounds = {"starts": ids // 19 * 19, "ends": ids + 1}
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    same(step(compiled, module, x, **bounds), step(module, module, x, **bounds))


@pytest.mark.parametrize("mode", MODES)
def test_fullgraph_with_everything_given(mode):
    module, x = prepared(mode), hidden(2, 19)
    more = {"position_embeddings": rotary_table(torch.arange(19), 6, 100.0), "row_mask": torch.rand(2, 19) < 0.6}
    if mode in ("sparse", "frozen"):
        more["indices"] = torch.tril(torch.ones(19, 19)).cumsum(-1).sub(1).where(torch.ones(19, 19).tril() > 0, -1.0)
        more["indices"] = more["indices"].int().expand(2, 19, 19)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    same(step(compiled, module, x, **more), step(module, module, x, **more))


@pytest.mark.parametrize("mode", ["dense", "warmup"])
def test_fullgraph_in_recomputed_tiles(mode, monkeypatch):
    for budgets in (dense._MASK_BYTES, dense._LOGIT_BYTES):
        monkeypatch.setitem(budgets, "cpu", 700)
    monkeypatch.setitem(dense._MASKS_KEPT, "cpu", 0)
    module, x = prepared(mode), hidden(2, 19)
    bounds = dict(zip(("starts", "ends"), LAYOUTS["ragged"](2, 19)[:2], strict=True))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    same(step(compiled, module, x, **bounds), step(module, module, x, **bounds))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_inductor(mode):
    module = prepared(mode, dtype=torch.float32)
    x = hidden(2, 19, dtype=torch.float32)
    bounds = dict(zip(("starts", "ends"), LAYOUTS["ragged"](2, 19)[:2], strict=True))
    compiled = torch.compile(module, fullgraph=True)
    same(step(compiled, module, x, **bounds), step(module, module, x, **bounds), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "layout"), [("dense", "bounds"), ("warmup", "causal"), ("sparse", "bounds")])
def test_new_lengths_do_not_recompile(mode, layout):
    module = prepared(mode)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=True)
    frames = []
    for rows in (19, 23, 31, 40, 57, 64):
        x, ids = hidden(rows), torch.arange(rows, dtype=torch.int32)
        bounds = {"starts": ids // 16 * 16, "ends": ids + 1} if layout == "bounds" else {}
        same(step(compiled, module, x, **bounds), step(module, module, x, **bounds))
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1


def test_a_mode_is_its_own_graph():
    """Setting the mode after compiling takes effect."""
    module, x = prepared("dense"), hidden(2, 19)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for mode in MODES:
        set_mode(module, mode)
        same(step(compiled, module, x), step(module, module, x))


def test_errors_keep_their_text():
    module = layer("sparse", has_indexer=False)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="indices must be given in mode 'sparse'"):
        compiled(hidden(2, 19))
