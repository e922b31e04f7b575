"""A whole layer with its loss in one graph: the values and gradients of eager."""

import contextlib

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.utils import parametrize

import calls
from dsa_ops.layouts import contiguous_cp, packed_bounds, zigzag_cp
from dsa_ops.nn import dense, rotary_table, set_mode
from layers import LAYOUTS, gradients, hidden, layer

MODES = ["dense", "warmup", "sparse", "frozen"]


def prepared(mode, **changes):
    return set_mode(layer(sink=True, **changes), mode)


def step(function, module, x, *args, **kwargs):
    """One training step: `function` returns the layer's output and a main loss made of it."""
    module.zero_grad()
    x.grad = None
    result, loss = function(x, *args, **kwargs)
    loss.backward()
    return result, gradients(module) | {"x": x.grad}


def same(compiled, eager, tolerance=1e-10):
    (got, got_grads), (want, want_grads) = compiled, eager
    got, want = got._asdict() | got_grads, want._asdict() | want_grads
    assert got.keys() == want.keys()
    for name in want:
        assert (got[name] is None) == (want[name] is None), name
        if want[name] is not None:
            assert got[name].dtype == want[name].dtype, name
            calls.assert_near(got[name], want[name], tolerance, name)


def with_loss(module):
    def call(x, **kwargs):
        result = module(x, **kwargs)
        return result, result.out.square().sum()

    return call


def check(function, module, x, *args, backend="aot_eager", tolerance=1e-10, **kwargs):
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    want = step(function, module, x, *args, **kwargs)
    same(step(compiled, module, x, *args, **kwargs), want, tolerance)
    return compiled, want


# ---- batched, packed, context parallel -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_batched_and_causal(mode):
    module = prepared(mode, index_hadamard=mode == "sparse")
    check(with_loss(module), module, hidden(2, 19))


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_batched_and_ragged(mode):
    module = prepared(mode, rope=False)
    check(
        with_loss(module),
        module,
        hidden(2, 19),
        **dict(zip(("starts", "ends"), LAYOUTS["ragged"](2, 19)[:2], strict=True)),
    )


def packed(module, causal=True):
    """A step that makes its bounds of cu_seqlens, inside the region."""

    def call(x, cu_seqlens):
        starts, ends = packed_bounds(cu_seqlens, num_rows=x.shape[0], causal=causal)
        return with_loss(module)(x, starts=starts, ends=ends)

    return call


CU_SEQLENS = torch.tensor([0, 5, 5, 16, 34])  # with an empty sequence, and padding behind the last


@pytest.mark.parametrize("mode", MODES)
def test_packed_bounds_made_inside(mode):
    module = prepared(mode, rope=mode == "sparse")
    compiled, _ = check(packed(module), module, hidden(38), CU_SEQLENS)
    other = hidden(38), torch.tensor([0, 9, 20, 21, 38])  # other values, the same graph
    with torch._dynamo.config.patch(error_on_recompile=True):
        same(step(compiled, module, *other), step(packed(module), module, *other))


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_packed_bounds_passed_in(mode):
    module = prepared(mode, rope=False)
    starts, ends = packed_bounds(CU_SEQLENS, num_rows=38)
    check(with_loss(module), module, hidden(38), starts=starts, ends=ends)


REAL, PLACES, TOTAL, RANKS = torch.tensor([0, 13, 13, 34]), torch.tensor([0, 16, 16, 40]), 48, 2


@pytest.mark.parametrize(
    ("cut", "mode", "rank"),
    [(zigzag_cp, "warmup", 1), (zigzag_cp, "sparse", 0), (contiguous_cp, "sparse", 1)],
)
def test_context_parallel_rank(cut, mode, rank):
    """Layout, rotary table and gathering inside the region; what other ranks put in comes from outside."""
    module = prepared(mode)

    def call(x, cu_seqlens, places, others):
        layout = cut(cu_seqlens, RANKS, rank, total=RANKS * x.shape[0], cu_seqlens_padded=places)
        remaining = iter(others)

        def gather(mine):
            parts = [next(remaining), mine] if rank == 1 else [mine, next(remaining)]
            return torch.cat(parts)[layout.gather_order]

        table = rotary_table(layout.rows - layout.starts, 6, 100.0)
        return with_loss(module)(x, starts=layout.starts, ends=layout.ends, position_embeddings=table, gather=gather)

    x = hidden(TOTAL // RANKS)
    others = [torch.randn(TOTAL // RANKS, width, dtype=x.dtype, requires_grad=True) for width in (18, 16)]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, call):
        result, grads = step(function, module, x, REAL, PLACES, others)
        # the gradients that go back to the other ranks
        results.append((result, grads | {f"other{i}": y.grad for i, y in enumerate(others)}))
        for y in others:
            y.grad = None
    same(*results)
    assert results[0][1]["other0"].abs().sum() > 0


def gathering_rank(rank, path):
    from torch.distributed import _functional_collectives as collectives

    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    name = "all_gather_single_autograd"  # before torch 2.13 under the other name
    all_gather = getattr(collectives, name, None) or collectives.all_gather_tensor_autograd
    module, whole = prepared("sparse", rope=False), hidden(TOTAL)

    def call(x, cu_seqlens):
        layout = zigzag_cp(cu_seqlens, RANKS, rank, total=RANKS * x.shape[0])

        def gather(mine):
            return all_gather(mine.contiguous(), 0, torch.distributed.group.WORLD)[layout.gather_order]

        return with_loss(module)(x, starts=layout.starts, ends=layout.ends, gather=gather)

    x = whole.detach()[zigzag_cp(PLACES, RANKS, rank, total=TOTAL).rows].requires_grad_()
    check(call, module, x, PLACES)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_context_parallel_with_a_collective_inside(tmp_path):
    torch.multiprocessing.spawn(gathering_rank, args=(tmp_path / "store",), nprocs=RANKS)


# ---- everything else that the layer takes ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["warmup", "sparse", "frozen"])
def test_everything_given(mode):
    module, x = prepared(mode), hidden(2, 19)
    more = {"position_embeddings": rotary_table(torch.arange(19), 6, 100.0), "row_mask": torch.rand(2, 19) < 0.6}
    if mode == "frozen":
        visible = torch.ones(19, 19).tril() > 0
        more["indices"] = torch.where(visible, torch.arange(19), -1).int().expand(2, 19, 19)
    check(with_loss(module), module, x, **more)


def test_recomputed_tiles(monkeypatch):
    monkeypatch.setitem(dense._MASK_BYTES, "cpu", 1100)  # two tiles of 11 rows each
    monkeypatch.setitem(dense._LOGIT_BYTES, "cpu", 20000)
    monkeypatch.setitem(dense._MASKS_KEPT, "cpu", 0)
    module = prepared("warmup", rope=False)
    check(packed(module), module, hidden(22), torch.tensor([0, 9, 22]))


def test_a_mode_is_its_own_graph():
    """Setting the mode after compiling takes effect."""
    module, x = prepared("dense", rope=False), hidden(12)
    compiled = torch.compile(with_loss(module), fullgraph=True, backend="eager")
    for mode in ("dense", "sparse", "frozen", "dense"):
        set_mode(module, mode)
        same(step(compiled, module, x), step(with_loss(module), module, x))


def test_errors_keep_their_text():
    module = layer("sparse", has_indexer=False)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="indices must be given in mode 'sparse'"):
        compiled(hidden(2, 19))


# ---- grad modes, autocast, weights from elsewhere --------------------------------------------------------------------


# inference_mode inside a region fails in torch's own tracing, of a projection or of detach
@pytest.mark.parametrize(
    ("around", "inside"),
    [
        (torch.no_grad, contextlib.nullcontext),
        (torch.inference_mode, contextlib.nullcontext),
        (contextlib.nullcontext, torch.no_grad),
    ],
)
def test_without_gradients(around, inside):
    module, x = prepared("sparse", rope=False), hidden(12)

    def call(x):
        with inside():
            return module(x)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with around():
        got, want = compiled(x), call(x)
    assert not got.out.requires_grad and torch.equal(got.indices, want.indices)
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.loss, want.loss)


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_autocast(mode):
    module = prepared(mode, dtype=torch.float32, rope=False)

    def call(x):
        with torch.autocast("cpu", torch.bfloat16):
            return with_loss(module)(x)

    check(call, module, hidden(12, dtype=torch.float32), tolerance=1.6e-2)


def test_functional_call():
    module, x = prepared("sparse", rope=False), hidden(12)
    names = [name for name, _ in module.named_parameters()]

    def call(x, factor):
        # weights that are made inside the region and are nobody's parameters
        weights = {name: parameter * factor for name, parameter in module.named_parameters()}
        result = torch.func.functional_call(module, weights, (x,))
        return result, result.out.square().sum()

    factor = torch.tensor(1.25, dtype=x.dtype)
    _, (_, grads) = check(call, module, x, factor)
    assert all(grads[name] is not None for name in names)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_parametrized_weights():
    module = prepared("sparse", rope=False)
    for owner, name in ((module.q_b_proj, "weight"), (module.indexer.wk, "weight"), (module.kv_b_proj, "weight")):
        parametrize.register_parametrization(owner, name, Doubled())
    _, (_, grads) = check(with_loss(module), module, hidden(12))
    assert grads["indexer.wk.parametrizations.weight.original"].abs().sum() > 0


# ---- the code generator ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_inductor_with_cuda_graphs(mode, device):
    """Several steps with new values in the same graph, forward and backward; on a CPU without a CUDA graph."""
    module = prepared(mode, dtype=torch.float32).to(device)
    compiled = torch.compile(packed(module), fullgraph=True, mode="reduce-overhead")
    counters.clear()
    for number in range(4):
        x = torch.randn(24, 32, device=device, requires_grad=True)
        cu_seqlens = torch.tensor([0, 5 + number, 20], device=device)
        torch.compiler.cudagraph_mark_step_begin()
        result, grads = step(compiled, module, x, cu_seqlens)
        # a graph's results are its own until it runs again
        kept = type(result)(*copies(result)), dict(zip(grads, copies(grads.values()), strict=True))
        same(kept, step(packed(module), module, x, cu_seqlens), 1e-4)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.9)
    assert device == "cpu" or counters["inductor"]["cudagraph_skips"] == 0


def copies(tensors):
    return [None if x is None else x.detach().clone() for x in tensors]
