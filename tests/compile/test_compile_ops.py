"""Ops in compiled regions whose inputs and gradients have strides that the code generator, not the caller, chose."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import calls
import dsa_ops
import inputs
from inputs import ALL, DIFFERENTIABLE, OPS

LAYOUTS = ["contiguous", "transposed", "sliced", "expanded"]


# ---- fakes -----------------------------------------------------------------------------------------------------------


def strides(results):
    return {n: (x.shape, x.stride(), x.dtype) for n, x in results.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ALL)
def test_strides_of_a_fake_are_those_of_the_result(name, layout, device):
    for changes in ({}, {"optional": False, "expanded_keys": True}, {"dtype": torch.bfloat16, "wide": False}):
        args = inputs.arguments(name, device=device, layout=layout, **changes)
        real = calls.run(name, args)
        with FakeTensorMode() as mode:
            fakes = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in args.items()}
            assert all(f.stride() == args[n].stride() for n, f in fakes.items() if isinstance(f, torch.Tensor))
            assert strides(calls.run(name, fakes)) == strides(real)


@pytest.mark.parametrize("name", ALL)
def test_strides_of_a_fake_without_rows_or_keys(name):
    for changes in ({"T": 0}, {"S": 0}, {"T": 0, "S": 0}, {"T": 1, "S": 1, "K": 1}):
        args = inputs.arguments(name, **changes)
        real = calls.run(name, args)
        with FakeTensorMode() as mode:
            fakes = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in args.items()}
            assert strides(calls.run(name, fakes)) == strides(real)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_have_the_strides_that_a_graph_was_compiled_for(name, layout, device):
    args = inputs.arguments(name, device=device, layout=layout, grad=True)
    compiled = torch.compile(calls.op(name), fullgraph=True, backend="aot_eager")
    outputs = dict(zip(OPS[name].outputs, calls.as_tuple(compiled(*args.values())), strict=True))
    eager = calls.run(name, args)
    assert strides(outputs) == strides(eager)
    grads = {n: torch.ones_like(g).sum().expand(g.shape) for n, g in calls.incoming(name, outputs).items()}
    got, want = calls.gradients(name, args, grads, outputs), calls.gradients(name, args, grads, eager)
    assert strides(got) == strides(want)
    calls.assert_all_near(got, want, 1e-5)


# ---- inductor --------------------------------------------------------------------------------------------------------

T, S, H, D, HI, DI, K = 12, 15, 3, 9, 2, 7, 4  # odd widths: rows of products are padded where that is quicker


def step(q, kv, index_q, index_k, weights, starts, ends):
    """All six ops, and one number made of their results; the gradients that go back into the ops are expanded."""
    picked = dsa_ops.indexer_topk(index_q, index_k, weights, starts=starts, ends=ends, topk=K)
    scores = dsa_ops.indexer_scores(index_q, index_k, weights, picked.indices)
    out, lse = dsa_ops.sparse_mla(q, kv, picked.indices, 0.3, D - 2)
    target = dsa_ops.attention_target(q, kv, lse, picked.indices, 0.3)
    kl = dsa_ops.indexer_kl(target, picked.scores, picked.indices)
    warm = dsa_ops.dense_indexer_kl(
        index_q, index_k, weights, q.detach(), kv.detach(), lse.detach(), starts=starts, ends=ends
    )
    return out.sum() + kl.sum() + warm.loss + scores.masked_fill(picked.indices < 0, 0).sum()


def transposed_product(x, w, *shape):
    """[T, ...] as a view of a product that was written the other way round."""
    return (w.t() @ x.t()).t().unflatten(1, shape)


def odd_linear(x, w, *shape):
    return F.linear(x, w.t()).unflatten(1, shape)


def permuted(x, w, *shape):
    """Heads in front, as many models keep them; for rows alone, columns in front."""
    y = (x @ w).unflatten(1, shape)
    return (y + 1).permute(*range(1, y.dim()), 0).contiguous().permute(-1, *range(y.dim() - 1))


def channels_last(x, w, *shape):
    y = (x @ w).unflatten(1, shape)
    image = y.reshape(1, len(y), -1, shape[-1]).to(memory_format=torch.channels_last)
    return image.relu().view(y.shape) if len(shape) == 1 else image.relu().squeeze(0)


def sliced(x, w, *shape):
    return F.pad((x @ w).unflatten(1, shape), (3, 2))[..., 3:-2]


PRODUCERS = [transposed_product, odd_linear, permuted, channels_last, sliced]
SHAPES = {"q": (H, D), "kv": (D,), "index_q": (HI, DI), "index_k": (DI,), "weights": (HI,)}


def leaves(device):
    rows, keys = torch.randn(T, 5, device=device), torch.randn(S, 5, device=device)
    # small, so that logits are: the dense target divides by the lse of the selected keys and could be huge
    weights = {n: 0.3 * torch.randn(5, torch.Size(shape).numel(), device=device) for n, shape in SHAPES.items()}
    ids = torch.arange(T, dtype=torch.int32, device=device)
    return [x.requires_grad_() for x in (rows, keys, *weights.values())], (ids // 5, ids + 3)


def model(rotation=0):
    """`step` with its inputs made of leaves, every one by another producer."""
    producers = dict(zip(SHAPES, PRODUCERS[rotation:] + PRODUCERS[:rotation], strict=True))

    def call(rows, keys, *rest):
        *weights, starts, ends = rest
        made = {
            n: producers[n](keys if n in ("kv", "index_k") else rows, w, *SHAPES[n])
            for n, w in zip(SHAPES, weights, strict=True)
        }
        return step(**made, starts=starts, ends=ends)

    return call


def losses_and_gradients(function, inner, bounds):
    inner = [x.detach().clone().requires_grad_() for x in inner]
    loss = function(*inner, *bounds)
    loss.backward()
    return [loss.detach().clone(), *(x.grad.clone() for x in inner)]


@pytest.mark.slow
@pytest.mark.parametrize("rotation", [0, 2])
def test_strides_chosen_by_inductor(rotation, device):
    """With CUDA graphs too, where there is CUDA: new values in each step, forward and backward."""
    compiled = torch.compile(model(rotation), fullgraph=True, mode="reduce-overhead")
    counters.clear()
    for _ in range(4):
        inner, bounds = leaves(device)
        torch.compiler.cudagraph_mark_step_begin()
        got = losses_and_gradients(compiled, inner, bounds)
        want = losses_and_gradients(model(rotation), inner, bounds)
        for mine, eager in zip(got, want, strict=True):
            calls.assert_near(mine, eager, 1e-5)
    assert device == "cpu" or counters["inductor"]["cudagraph_skips"] == 0


# ---- the indexer's loss ----------------------------------------------------------------------------------------------


def with_loss(q, kv, index_q, index_k, weights, starts, ends, scale):
    picked = dsa_ops.indexer_topk(index_q, index_k, weights, starts=starts, ends=ends, topk=K)
    out, lse = dsa_ops.sparse_mla(q, kv, picked.indices)
    loss = dsa_ops.indexer_loss(q, kv, lse, *picked, None)
    return dsa_ops.attach_loss(out, loss, scale).sum()


def tensors_with_loss(scale):
    inner = [torch.randn(S if n in ("kv", "index_k") else T, *shape) for n, shape in SHAPES.items()]
    return inner, (*leaves("cpu")[1], torch.tensor(scale))


# Earlier releases check the version of every tensor that a compiled region saves: there the change is an error.
VERSIONS_ALWAYS_CHECKED = "num_tensors_saved_with_no_vc_check" not in ViewAndMutationMeta.__dataclass_fields__


@pytest.mark.skipif(VERSIONS_ALWAYS_CHECKED, reason="needs a torch that lets a compiled region save without versions")
def test_the_scale_of_the_loss_counts_at_backward():
    inner, (*bounds, scale) = tensors_with_loss(0.5)
    compiled = torch.compile(with_loss, fullgraph=True, backend="aot_eager")
    results = []
    for function, first in ((with_loss, 3.0), (compiled, 0.5), (compiled, 7.0)):
        mine = [x.clone().requires_grad_() for x in inner]
        scale.fill_(first)
        loss = function(*mine, *bounds, scale)
        scale.fill_(3.0)
        loss.backward()
        results.append([x.grad for x in mine])
    assert results[0][3].abs().sum() > 0
    for got in results[1:]:
        torch.testing.assert_close(got, results[0])


def test_compiled_autograd():
    """The backward of an eager forward as one graph, that of the attached loss in it."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    inner, rest = tensors_with_loss(0.5)
    want = losses_and_gradients(with_loss, inner, rest)
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    with compiled_autograd._enable(lambda module: torch.compile(module, fullgraph=True, backend=keep)):
        got = losses_and_gradients(with_loss, inner, rest)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert len(graphs) == 1
