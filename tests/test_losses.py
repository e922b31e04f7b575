"""indexer_loss against loops over rows, heads and slots; attach_loss against what autograd does with a sum."""

import math
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from dsa_ops import sparse_mla
from dsa_ops.losses import attach_loss, indexer_loss

SCALE = 0.3
nan, inf = math.nan, math.inf


# ---- indexer_loss


class Teacher:
    """Attention over a selection in which empty slots stand anywhere and some rows have no key at all."""

    def __init__(self, rows=6, keys=9, heads=3, width=4, slots=5, dtype=torch.float64, generator=None):
        def floats(*shape):
            return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

        self.q, self.kv = floats(rows, heads, width), floats(keys, width)
        self.indices = torch.randint(-2, max(keys, 1), (rows, slots), generator=generator).to(torch.int32)
        if keys == 0:
            self.indices.fill_(-1)
        self.indices[rows // 2 :][:1] = -1
        self.lse = sparse_mla(self.q, self.kv, self.indices, SCALE, width).lse
        scores = floats(rows, slots).to(torch.float64 if dtype == torch.float64 else torch.float32)
        self.scores = scores.requires_grad_()

    def loss(self, softmax_scale=SCALE, **options):
        return indexer_loss(self.q, self.kv, self.lse, self.indices, self.scores, softmax_scale, **options)


def rows_by_hand(teacher, topk_length=None):
    """The KL of every row, one exponential at a time; a graph on float64 scores."""
    rows, slots = teacher.indices.shape
    result = []
    for t in range(rows):
        used = [j for j in range(slots) if teacher.indices[t, j] >= 0 and (topk_length is None or j < topk_length[t])]
        target = {}
        for j in used:
            key = teacher.kv[int(teacher.indices[t, j])].double()
            logits = [SCALE * float(q @ key) for q in teacher.q[t].double()]
            target[j] = sum(math.exp(x - float(lse)) for x, lse in zip(logits, teacher.lse[t], strict=True))
        total = sum(target.values())
        kl = (teacher.scores[t] * 0).nan_to_num().sum()
        if used:
            log_p = teacher.scores[t].double()[used].log_softmax(0)
            for place, j in enumerate(used):
                share = target[j] / total
                kl = kl + share * (math.log(share) - log_p[place])
        result.append(kl)
    return result


def gradient(loss, scores):
    return torch.autograd.grad(loss, scores)[0]


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    st.tuples(st.integers(1, 5), st.integers(0, 7), st.integers(1, 3), st.integers(1, 5)),
    st.sampled_from(["mean", "sum"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**16),
)
@example((3, 5, 2, 4), "mean", True, True, 0)
def test_value_and_gradient(sizes, reduction, with_mask, with_length, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, keys, heads, slots = sizes
    teacher = Teacher(rows, keys, heads, slots=slots, generator=generator)
    mask = torch.rand(rows, generator=generator) < 0.6 if with_mask else None
    length = torch.randint(-1, slots + 2, (rows,), generator=generator) if with_length else None
    kept = list(range(rows)) if mask is None else mask.nonzero()[:, 0].tolist()
    by_hand = rows_by_hand(teacher, length)
    want = sum((by_hand[t] for t in kept), start=(teacher.scores * 0).sum())
    if reduction == "mean":
        want = want / max(len(kept), 1)
    got = teacher.loss(coeff=0.7, reduction=reduction, row_mask=mask, topk_length=length)
    torch.testing.assert_close(got, 0.7 * want)
    torch.testing.assert_close(gradient(got, teacher.scores), gradient(0.7 * want, teacher.scores))


def test_the_gradient_is_exactly_p_minus_t():
    teacher = Teacher(rows=1)
    teacher.indices = torch.tensor([[0, 1, -1, 2, -1]], dtype=torch.int32)
    teacher.lse = sparse_mla(teacher.q, teacher.kv, teacher.indices, SCALE, 4).lse
    used = [0, 1, 3]
    logits = SCALE * teacher.q[0] @ teacher.kv[:3].T
    t = logits.softmax(-1).mean(0)
    p = teacher.scores[0, used].softmax(-1)
    grad = gradient(teacher.loss(coeff=2.0), teacher.scores)[0]
    torch.testing.assert_close(grad[used], 2 * (p - t))
    assert grad[[2, 4]].tolist() == [0, 0]


def test_rows_without_a_key_count_in_the_mean():
    teacher = Teacher(rows=4)  # row 2 has none
    torch.testing.assert_close(teacher.loss() * 4, teacher.loss(reduction="sum"))
    mask = torch.tensor([True, False, True, False])
    torch.testing.assert_close(teacher.loss(row_mask=mask) * 2, teacher.loss(row_mask=mask, reduction="sum"))


def test_sums_add_up_over_any_split():
    teacher = Teacher(rows=7)
    whole = teacher.loss(reduction="sum")
    parts = [
        indexer_loss(
            teacher.q[a:b],
            teacher.kv,
            teacher.lse[a:b],
            teacher.indices[a:b],
            teacher.scores[a:b],
            SCALE,
            reduction="sum",
        )
        for a, b in ((0, 3), (3, 3), (3, 7))
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_masked_rows_may_hold_anything(reduction):
    teacher = Teacher()
    mask = torch.tensor([True, False, True, True, False, True])
    kept = mask.nonzero()[:, 0]
    want = indexer_loss(
        teacher.q[kept],
        teacher.kv,
        teacher.lse[kept],
        teacher.indices[kept],
        teacher.scores[kept],
        SCALE,
        reduction=reduction,
    )
    want_grad = gradient(want, teacher.scores)
    with torch.no_grad():
        for x in (teacher.q, teacher.lse, teacher.scores):
            x[~mask] = nan
        teacher.indices[~mask] = 10**6  # out of range: an IndexError in any row that counts
    got = teacher.loss(row_mask=mask, reduction=reduction)
    torch.testing.assert_close(got, want)
    grad = gradient(got, teacher.scores)
    assert grad[~mask].abs().max() == 0
    torch.testing.assert_close(grad, want_grad)


def test_a_nan_in_a_row_that_counts_shows():
    teacher = Teacher()
    teacher.indices[0] = torch.arange(5)
    with torch.no_grad():
        teacher.scores[0, 1] = nan
    assert teacher.loss().isnan()


@pytest.mark.parametrize("case", ["all masked", "all slots empty", "length 0", "no rows", "no keys"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_to_learn_is_zero_and_stays_in_the_graph(case, reduction):
    teacher = Teacher(rows=0 if case == "no rows" else 4, keys=0 if case == "no keys" else 9)
    options = {"reduction": reduction}
    if case == "all masked":
        options["row_mask"] = torch.zeros(4, dtype=torch.bool)
    if case == "all slots empty":
        teacher.indices.fill_(-1)
        teacher.lse.fill_(-inf)
    if case == "length 0":
        options["topk_length"] = torch.zeros(4, dtype=torch.int32)
    loss = teacher.loss(**options)
    loss.backward()
    assert loss.item() == 0
    assert teacher.scores.grad is not None and bool((teacher.scores.grad == 0).all())


@pytest.mark.parametrize("coeff", [0.0, torch.zeros(()), torch.zeros(1)])
def test_coefficient_zero_gives_zero_gradients_rather_than_none(coeff):
    teacher = Teacher()
    loss = teacher.loss(coeff=coeff)
    loss.backward()
    assert loss.shape == () and loss.item() == 0
    assert bool((teacher.scores.grad == 0).all())


def test_a_coefficient_may_be_a_tensor_of_any_dtype():
    teacher = Teacher()
    for coeff in (torch.tensor([0.25]), torch.tensor(0.25, dtype=torch.float64), torch.tensor(2)):
        got = teacher.loss(coeff=coeff)
        assert got.dtype == torch.float64 and got.shape == ()
        torch.testing.assert_close(got, teacher.loss(coeff=float(coeff)))


def test_topk_length_is_the_same_as_empty_slots():
    teacher = Teacher()
    length = torch.tensor([0, 1, 2, 3, 4, 9])
    got = teacher.loss(topk_length=length)
    got_grad = gradient(got, teacher.scores)
    for t in range(6):
        teacher.indices[t, int(length[t]) :] = -1
    want = teacher.loss()
    assert torch.equal(got, want) and torch.equal(got_grad, gradient(want, teacher.scores))
    assert got_grad[0].abs().max() == 0


def test_gradients_go_to_the_scores_alone():
    teacher = Teacher()
    for x in (teacher.q, teacher.kv, teacher.lse):
        x.requires_grad_()
    teacher.loss().backward()
    assert teacher.q.grad is None and teacher.kv.grad is None and teacher.lse.grad is None
    assert float(teacher.scores.grad.abs().max()) > 0


def test_a_frozen_indexer_builds_no_graph():
    teacher = Teacher()
    for x in (teacher.q, teacher.kv, teacher.lse):
        x.requires_grad_()
    teacher.scores = teacher.scores.detach()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        loss = teacher.loss(row_mask=torch.ones(6, dtype=torch.bool), topk_length=torch.full((6,), 4))
    assert not loss.requires_grad and saved == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype):
    teacher = Teacher(dtype=dtype)
    loss = teacher.loss(row_mask=torch.arange(6) % 3 != 0)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    kept = [t for t in range(6) if t % 3]
    by_hand = rows_by_hand(teacher)
    torch.testing.assert_close(loss, (sum(by_hand[t] for t in kept) / len(kept)).to(loss.dtype), rtol=1e-5, atol=1e-6)


def batch_of(*teachers):
    result = Teacher.__new__(Teacher)
    for name in ("q", "kv", "lse", "indices"):
        setattr(result, name, torch.stack([getattr(t, name) for t in teachers]))
    result.scores = torch.stack([t.scores.detach() for t in teachers]).requires_grad_()
    return result


def test_batched():
    single = [Teacher(), Teacher()]
    both = batch_of(*single)
    mask, length = torch.rand(2, 6) < 0.6, torch.randint(0, 6, (2, 6))
    mask[:, 0] = True
    options = [{"row_mask": mask[b], "topk_length": length[b], "reduction": "sum"} for b in range(2)]
    want = sum(teacher.loss(**o) for teacher, o in zip(single, options, strict=True)) / mask.sum()
    got = both.loss(row_mask=mask, topk_length=length)
    torch.testing.assert_close(got, want)
    grads = torch.autograd.grad(want, [t.scores for t in single])
    torch.testing.assert_close(gradient(got, both.scores), torch.stack(grads))
    torch.testing.assert_close(both.loss(), sum(t.loss() for t in single) / 2)


def test_default_scale_and_long_ids():
    teacher = Teacher()
    teacher.lse = sparse_mla(teacher.q, teacher.kv, teacher.indices, None, 4).lse
    want = indexer_loss(teacher.q, teacher.kv, teacher.lse, teacher.indices, teacher.scores, 4**-0.5)
    got = indexer_loss(teacher.q, teacher.kv, teacher.lse, teacher.indices.long(), teacher.scores, None)
    assert torch.equal(got, want)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_queries_and_keys_of_two_dtypes(compiled):
    """A norm returns float32 there, a projection bfloat16."""
    torch._dynamo.reset()
    teacher = Teacher(dtype=torch.bfloat16)
    want = teacher.loss()
    teacher.q = teacher.q.float()

    def loss():
        return indexer_loss(teacher.q, teacher.kv, teacher.lse, teacher.indices, teacher.scores, SCALE)

    with pytest.raises(TypeError, match=r"^indexer_loss: kv must be torch\.float32, got torch\.bfloat16"):
        loss()
    call = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(call(), want)


def test_compiles_whole_with_one_graph_for_every_length():
    def step(q, kv, lse, indices, scores, mask, length, coeff):
        options = {"coeff": coeff, "row_mask": mask, "topk_length": length}
        # a literal: a global float is first tried as an input of the graph, which counts as a graph of its own
        return indexer_loss(q, kv, lse, indices, scores, 0.3, **options)

    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for rows, keys, coeff in ((7, 11, 1.0), (8, 9, 0.5), (10, 13, 0.0)):  # equal sizes would be taken for one
        teacher = Teacher(rows, keys)
        options = torch.arange(rows) % 3 != 1, torch.arange(rows) % 6, torch.tensor(coeff)
        arguments = teacher.q, teacher.kv, teacher.lse, teacher.indices, teacher.scores, *options
        got, want = compiled(*arguments), step(*arguments)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(gradient(got, teacher.scores), gradient(want, teacher.scores))
    assert backend.frame_count == 1


def test_nothing_is_read_back():
    with FakeTensorMode():
        q, kv, lse = torch.empty(6, 2, 8), torch.empty(9, 8), torch.empty(6, 2)
        indices, scores = torch.empty(6, 4, dtype=torch.int32), torch.empty(6, 4)
        mask, length = torch.empty(6, dtype=torch.bool), torch.empty(6, dtype=torch.int32)
        loss = indexer_loss(q, kv, lse, indices, scores, SCALE, row_mask=mask, topk_length=length)
    assert loss.shape == () and loss.dtype == torch.float32


def tensor_parallel_worker(rank, world, path):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    teacher = Teacher(heads=4, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(6) % 4 != 0
    want = teacher.loss(row_mask=mask)
    want_grad = gradient(want, teacher.scores)
    shard = slice(rank * 4 // world, (rank + 1) * 4 // world)
    q, lse = teacher.q[:, shard].contiguous(), teacher.lse[:, shard].contiguous()

    def mine(group):
        return indexer_loss(q, teacher.kv, lse, teacher.indices, teacher.scores, SCALE, row_mask=mask, group=group)

    group = torch.distributed.group.WORLD
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
    alone = mine(None)
    assert not torch.allclose(alone, want), "half of the heads must not give the whole loss"
    compiled = torch.compile(mine, backend="aot_eager", fullgraph=True)
    for function, given_group in ((mine, group), (mine, mesh), (mine, (mesh, 0)), (compiled, group)):
        got = function(given_group)
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(gradient(got, teacher.scores), want_grad)
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_heads_sharded_over_two_ranks(tmp_path):
    torch.multiprocessing.spawn(tensor_parallel_worker, args=(2, tmp_path / "store"), nprocs=2)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, 'reduction must be "mean" or "sum", got \'none\'', {"reduction": "none"}),
        (TypeError, "coeff must be a number or a tensor of one element, got str", {"coeff": "1"}),
        (ValueError, "coeff must have one element, got torch.float32 [2]", {"coeff": torch.ones(2)}),
        (TypeError, "coeff must be a number or a tensor of one element, got complex", {"coeff": 1j}),
        (TypeError, "coeff must be a real number, got torch.complex64 [] on cpu", {"coeff": torch.tensor(1j)}),
        (TypeError, "coeff must be a real number, got torch.bool [] on cpu", {"coeff": torch.tensor(True)}),
        (ValueError, "coeff must be finite, got nan", {"coeff": nan}),
        (ValueError, "coeff must be finite, got -inf", {"coeff": -inf}),
        (
            ValueError,
            "coeff must not require grad (multiply the loss to train a factor), got torch.float32 [] on cpu",
            {"coeff": torch.ones((), requires_grad=True)},
        ),
        (
            ValueError,
            "coeff must be on cpu like scores, or a CPU scalar, got torch.float32 [] on meta",
            {"coeff": torch.ones((), device="meta")},
        ),
        (
            TypeError,
            "group must be a ProcessGroup, a one-dimensional DeviceMesh or (DeviceMesh, dimension), got int",
            {"group": 3},
        ),
        (TypeError, "group must be a ProcessGroup, a one-dimensional DeviceMesh", {"group": "tp"}),
        (TypeError, "group must be a ProcessGroup, a one-dimensional DeviceMesh", {"group": (3, 0)}),
        (TypeError, "softmax_scale must be a float, got str", {"softmax_scale": "1"}),
        (
            TypeError,
            "topk_length must be torch.int32 or torch.int64 of shape [6] on cpu, got list",
            {"topk_length": [5] * 6},
        ),
        (
            TypeError,
            "topk_length must be torch.int32 or torch.int64 of shape [6] on cpu, got torch.float32 [6] on cpu",
            {"topk_length": torch.ones(6)},
        ),
        (
            ValueError,
            "topk_length must be torch.int32 or torch.int64 of shape [6] on cpu, got torch.int32 [5] on cpu",
            {"topk_length": torch.ones(5, dtype=torch.int32)},
        ),
        (TypeError, "row_mask must be torch.bool of shape [6] on cpu, got list", {"row_mask": [True] * 6}),
        (
            TypeError,
            "row_mask must be torch.bool of shape [6] on cpu, got torch.float32 [6] on cpu",
            {"row_mask": torch.ones(6)},
        ),
        (
            ValueError,
            "row_mask must be torch.bool of shape [6] on cpu, got torch.bool [5] on cpu",
            {"row_mask": torch.ones(5, dtype=torch.bool)},
        ),
        (
            ValueError,
            "row_mask must be torch.bool of shape [6] on cpu, got torch.bool [6] on meta",
            {"row_mask": torch.ones(6, dtype=torch.bool, device="meta")},
        ),
    ],
)
def test_refusals(error, message, changes):
    with pytest.raises(error, match="^indexer_loss: " + re.escape(message)):
        Teacher().loss(**changes)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", ["q", "kv", "lse", "indices", "scores"])
def test_a_bad_tensor_is_named(name, batched):
    """Whichever part would trip over it, the message is that of the function that was called."""
    teacher = batch_of(Teacher(), Teacher()) if batched else Teacher()
    good = getattr(teacher, name)
    bad = [None, [1.0], 1.0, good.new_zeros(()), good.detach().to("meta"), good.bool(), good[..., None], good[:, :1]]
    for value in bad if name != "kv" or not batched else bad[:-1]:  # one key a sequence is no fault of its own
        setattr(teacher, name, value)
        with pytest.raises((TypeError, ValueError), match=r"^indexer_loss: \w+ must "):
            teacher.loss()
    setattr(teacher, name, None)
    with pytest.raises(TypeError, match=rf"^indexer_loss: {name} must be a torch.Tensor, got NoneType"):
        teacher.loss()


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("bad", [9, 2**31 - 1, 2**32 + 1])
def test_an_id_past_the_keys_is_named(bad, batched):
    teacher = Teacher()
    other = Teacher()
    teacher.indices = teacher.indices.long()
    other.indices = other.indices.long()
    teacher.indices[0, 0] = bad
    with pytest.raises(IndexError, match=rf"^indexer_loss: indices must be below .*got {bad}"):
        (batch_of(other, teacher) if batched else teacher).loss()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_keeps_its_dtype_whatever_that_of_the_coefficient(dtype):
    teacher = Teacher(dtype=dtype)
    assert teacher.loss(coeff=torch.tensor(0.5, dtype=torch.float64)).dtype == torch.float32


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_a_mesh_of_two_dimensions_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 1))
        with pytest.raises(ValueError, match=r"^indexer_loss: group must be .*got a DeviceMesh of 2 dimensions"):
            Teacher().loss(group=mesh)
        with pytest.raises(ValueError, match=r"^indexer_loss: group must be .*got dimension 2 of 2"):
            Teacher().loss(group=(mesh, 2))
    finally:
        torch.distributed.destroy_process_group()


def test_torch_func_grad_is_refused_by_name():
    teacher = Teacher()

    def loss(scores):
        return indexer_loss(teacher.q, teacher.kv, teacher.lse, teacher.indices, scores, SCALE)

    with pytest.raises(RuntimeError, match=r"dsa::indexer_kl does not support torch\.func\.grad"):
        torch.func.grad(loss)(teacher.scores.detach())


# ---- attach_loss


def leaves(*shapes, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def layer(x, w, scale, reentrant=None):
    """tanh(2 x) three times over, with a loss on w attached; checkpointed as a whole if `reentrant` says how."""

    def body(x, w):
        hidden = torch.tanh(2 * x)
        loss = ((x.detach() * w) ** 2).sum().to(w.dtype)
        return 3 * attach_loss(hidden, loss, scale)

    return body(x, w) if reentrant is None else checkpoint(body, x, w, use_reentrant=reentrant)


def check_layer(function, x, w, scale, final, reentrant=None):
    """The main loss's gradient reaches x unchanged, the attached one's w, with the scale of the time of backward."""
    y = function(x, w, scale, reentrant)
    assert torch.equal(y, 3 * torch.tanh(2 * x))
    if scale is not None and scale != final:
        scale.fill_(final)
    grad = torch.randn_like(y)
    y.backward(grad)
    torch.testing.assert_close(x.grad, 6 * grad * (1 - torch.tanh(2 * x.detach()) ** 2))
    torch.testing.assert_close(w.grad, final * 2 * x.detach() ** 2 * w.detach())
    x.grad = w.grad = None


reentrance = pytest.mark.parametrize("reentrant", [None, False, True])

# Earlier releases check the version of every tensor that a compiled region saves: there the change is an error.
VERSIONS_ALWAYS_CHECKED = "num_tensors_saved_with_no_vc_check" not in ViewAndMutationMeta.__dataclass_fields__


@reentrance
@pytest.mark.parametrize("scale_dtype", [None, torch.float32, torch.float64])
def test_the_scale_counts_at_backward(reentrant, scale_dtype):
    x, w = leaves(5, 5)
    if scale_dtype is None:
        check_layer(layer, x, w, None, 1, reentrant)
    else:
        check_layer(layer, x, w, torch.tensor(0.5, dtype=scale_dtype), 7, reentrant)


FLOATS = (torch.float32, torch.float64)


# inductor takes its time, so it compiles only the case most open to a copy: a scale that needs a cast, under recompute
@pytest.mark.parametrize(
    ("backend", "scale_dtypes", "reentrant"),
    [*(("aot_eager", FLOATS, reentrant) for reentrant in (None, False, True)), ("inductor", FLOATS[1:], False)],
)
def test_the_scale_counts_at_backward_of_a_compiled_region(backend, scale_dtypes, reentrant):
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x, w = leaves(5, 5, dtype=torch.float32)
    if backend == "aot_eager":
        check_layer(compiled, x, w, None, 1, reentrant)
    for dtype in scale_dtypes:
        scale = torch.tensor(0.5, dtype=dtype)
        check_layer(compiled, x, w, scale, 0.5, reentrant)
        if VERSIONS_ALWAYS_CHECKED:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                check_layer(compiled, x, w, scale, 7, reentrant)
        else:
            check_layer(compiled, x, w, scale, 7, reentrant)


@pytest.mark.skipif(VERSIONS_ALWAYS_CHECKED, reason="needs a torch that lets a compiled region save without versions")
def test_the_scale_of_a_compiled_region_may_be_part_of_a_tensor():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w, scale: attach_loss(x * 2, w**2, scale), backend="aot_eager", fullgraph=True)
    x, w = leaves(3, ())
    scales = torch.ones(3, dtype=torch.float64)
    y = compiled(x, w, scales[1])
    scales.mul_(3)
    y.sum().backward()
    torch.testing.assert_close(w.grad, 3 * 2 * w.detach())


def test_compiled_loss_of_many_elements_with_dynamic_sizes():
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, w, scale: attach_loss(x * 2, w**2, scale), backend=backend, fullgraph=True, dynamic=True
    )
    for size in (3, 5, 8):
        x, w = leaves((size, 2), size)
        scale = torch.rand(size, dtype=torch.float64)
        compiled(x, w, scale).sum().backward()
        torch.testing.assert_close(w.grad, 2 * w.detach() * scale)
        torch.testing.assert_close(x.grad, torch.full_like(x, 2))
    assert backend.frame_count == 1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (0, 3), ()])
def test_x_without_grad_keeps_the_loss(compiled, shape):
    torch._dynamo.reset()
    function = torch.compile(attach_loss, backend="aot_eager", fullgraph=True) if compiled else attach_loss
    x, (w,) = torch.randn(shape), leaves(())
    y = function(x, w * 3, torch.tensor(2.0))
    assert y.requires_grad and torch.equal(y, x)
    y.sum().backward()
    assert float(w.grad) == 6 and x.grad is None


def test_the_gradient_has_the_dtype_of_the_loss_and_memory_of_its_own():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for scale_dtype in (torch.bfloat16, torch.float64):
            loss = torch.zeros((), dtype=dtype, requires_grad=True)
            scale = torch.tensor(0.5, dtype=scale_dtype)
            attach_loss(torch.ones(2, dtype=torch.bfloat16), loss, scale).sum().backward()
            assert loss.grad.dtype == dtype
            scale.zero_()
            loss.grad.mul_(2)
            assert float(loss.grad) == 1 and float(scale) == 0


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 3)])
def test_scales_of_every_shape(shape):
    x, w = leaves(4, (2, 3))
    scale = torch.rand(shape, dtype=torch.float64)
    attach_loss(x, w, scale).sum().backward()
    assert torch.equal(w.grad, scale.reshape(shape if len(shape) == 2 else ()).expand(2, 3))


def test_the_scale_gets_no_gradient():
    x, w, scale = leaves(4, (), ())
    attach_loss(x, w, scale).sum().backward()
    assert scale.grad is None and torch.equal(w.grad, scale.detach())


def test_x_itself_where_there_is_nothing_to_attach():
    x, w = leaves(3, ())
    assert attach_loss(x, w.detach()) is x
    with torch.no_grad():
        assert attach_loss(x, w) is x
    y = attach_loss(x, w)
    assert y.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("compiled", [False, True])
def test_an_x_made_in_inference_mode_keeps_the_loss(compiled):
    torch._dynamo.reset()
    function = torch.compile(attach_loss, backend="aot_eager", fullgraph=True) if compiled else attach_loss
    with torch.inference_mode():
        x = torch.randn(3)
    (w,) = leaves(())
    y = function(x, w * 3)
    assert torch.equal(y, x)
    y.sum().backward()
    assert float(w.grad) == 3


def test_losses_attached_in_many_layers_add_up():
    x, w = leaves(3, ())
    for _ in range(4):
        x = attach_loss(x * 2, w**2)
    x.sum().backward()
    torch.testing.assert_close(w.grad, 8 * w.detach())


def test_nothing_is_saved():
    x, w = leaves(3, ())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        attach_loss(x, w, torch.ones(()))
    assert saved == []


def test_second_derivatives():
    x, w = leaves(3, ())
    scale = torch.tensor(2.0, dtype=torch.float64)
    y = attach_loss(x**3, w**3, scale).sum()
    grad_x, grad_w = torch.autograd.grad(y, (x, w), create_graph=True)
    second = torch.autograd.grad(grad_x.sum() + grad_w, (x, w))
    torch.testing.assert_close(second, (6 * x.detach(), 2 * 6 * w.detach()))


def test_torch_func_grad_and_vmap():
    scale = torch.rand(4, dtype=torch.float64)
    x, w = (leaf.detach() for leaf in leaves((4, 3), 4))

    def total(x, w, scale):
        return attach_loss(x * 3, w**2, scale).sum()

    grad_x, grad_w = torch.func.grad(total, (0, 1))(x[0], w[0], scale[0])
    torch.testing.assert_close((grad_x, grad_w), (torch.full_like(x[0], 3), 2 * w[0] * scale[0]))
    grads = torch.vmap(torch.func.grad(total, (0, 1)))(x, w, scale)
    torch.testing.assert_close(grads, (torch.full_like(x, 3), 2 * w * scale))


@pytest.mark.parametrize(
    "batched", [(0, 0, 0), (None, 0, 0), (0, None, None), (1, 1, 1), (None, None, 0), (0, 1, None)]
)
def test_gradients_through_vmap(batched):
    """As many losses as samples, each with its scale: the gradients are those of a loop."""
    x_dim, w_dim, scale_dim = batched
    x, w = leaves((4, 4), (4, 4))
    scale = torch.rand(4, 4, dtype=torch.float64)
    in_dims = (x_dim, w_dim, scale_dim, 0)

    def sample(tensor, dim, i):
        return tensor[0] if dim is None else tensor.select(dim, i)

    want = 0
    for i in range(4):
        want = want + (sample(w, w_dim, i) * sample(scale, scale_dim, i)).sum()
    want_w = torch.autograd.grad(want, w)[0]
    arguments = (t if dim is not None else t[0] for t, dim in zip((x, w, scale), in_dims[:3], strict=True))
    y = torch.vmap(lambda x, w, scale, _: attach_loss(x, w, scale), in_dims)(*arguments, torch.zeros(4))
    y.sum().backward()
    torch.testing.assert_close(w.grad, want_w)
    assert float(x.grad.sum()) == 16


@pytest.mark.parametrize(
    ("loss_shape", "scale_shape"), [((2, 3), ()), ((2,), (1,)), ((2,), (2,)), ((), (1, 1)), ((2, 3), (2, 3))]
)
def test_scales_of_a_vmap(loss_shape, scale_shape):
    x, w = leaves((4, 3), (4, *loss_shape))
    scale = torch.rand(4, *scale_shape, dtype=torch.float64)
    torch.vmap(attach_loss)(x, w, scale).sum().backward()
    for i in range(4):
        want = scale[i] if scale_shape == loss_shape else scale[i].reshape(()).expand(loss_shape)
        assert torch.equal(w.grad[i], want)


def test_forward_mode_is_refused():
    x, w = leaves(3, ())
    message = "^attach_loss: forward-mode AD is not supported"
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match=message):
            attach_loss(forward_ad.make_dual(x.detach(), torch.ones_like(x)), w)
        with pytest.raises(RuntimeError, match=message):
            attach_loss(x, forward_ad.make_dual(w.detach(), torch.ones_like(w)))
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(attach_loss, (x.detach(), w.detach()), (torch.ones_like(x), torch.ones_like(w)))


def test_vmap_inside_a_compiled_region_is_refused():
    torch._dynamo.reset()
    compiled = torch.compile(torch.vmap(attach_loss), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"attach_loss: torch\.vmap inside torch\.compile would lose the loss"):
        compiled(*leaves((4, 3), 4))


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_backward_op_is_well_registered(shape, dtype):
    for scale in (torch.tensor(2.0), torch.rand(shape, dtype=torch.float64), torch.rand(1, 1)):
        arguments = (torch.randn(0, 3), scale, shape, dtype)
        torch.library.opcheck(torch.ops.dsa.attach_loss_backward.default, arguments)
        got = torch.ops.dsa.attach_loss_backward(*arguments)
        assert got.dtype == dtype and got.shape == shape and got.data_ptr() != scale.data_ptr()
        assert torch.equal(got, (scale if scale.shape == shape else scale.reshape(())).to(dtype).expand(shape))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "x must be a tensor, got float", lambda: attach_loss(1.0, torch.ones(()))),
        (TypeError, "loss must be a tensor, got float", lambda: attach_loss(torch.ones(2), 1.0)),
        (
            TypeError,
            "x must be floating point, got torch.int64 [2]",
            lambda: attach_loss(torch.ones(2).long(), torch.ones(())),
        ),
        (
            TypeError,
            "loss must be floating point, got torch.int64 []",
            lambda: attach_loss(torch.ones(2), torch.tensor(1)),
        ),
        (
            ValueError,
            "loss must be on cpu like x, got meta",
            lambda: attach_loss(torch.ones(2), torch.ones((), device="meta")),
        ),
        (
            TypeError,
            "scale must be a floating-point tensor of one element or of shape [3] like loss "
            "(torch.compile would freeze a number), got float",
            lambda: attach_loss(torch.ones(2), torch.ones(3), 1.0),
        ),
        (
            TypeError,
            "scale must be a floating-point tensor of one element or of shape [] like loss, got torch.int64 [] on cpu",
            lambda: attach_loss(torch.ones(2), torch.ones(()), torch.tensor(1)),
        ),
        (
            ValueError,
            "scale must be a floating-point tensor of one element or of shape [3] like loss, "
            "got torch.float32 [2] on cpu",
            lambda: attach_loss(torch.ones(2), torch.ones(3), torch.ones(2)),
        ),
        (
            ValueError,
            "scale must be on cpu like loss, or a CPU scalar, got torch.float32 [] on meta",
            lambda: attach_loss(torch.ones(2), torch.ones(3), torch.ones((), device="meta")),
        ),
    ],
)
def test_attach_refusals(error, message, call):
    with pytest.raises(error, match="^attach_loss: " + re.escape(message)):
        call()


def test_both_together_train_the_indexer_through_a_checkpoint():
    """The use they are made for: a layer that attaches its own KL loss, made again in backward."""
    teacher = Teacher()
    scale = torch.ones((), dtype=torch.float64)

    def body(q, scores):
        out, lse = sparse_mla(q, teacher.kv, teacher.indices, SCALE, 4)
        loss = indexer_loss(q, teacher.kv, lse, teacher.indices, scores, SCALE)
        return attach_loss(out, loss, scale)

    want = gradient(teacher.loss(), teacher.scores)
    q = teacher.q.requires_grad_()
    want_q = torch.autograd.grad(sparse_mla(q, teacher.kv, teacher.indices, SCALE, 4).out.sum(), q)[0]
    for reentrant in (False, True):
        out = checkpoint(body, q, teacher.scores, use_reentrant=reentrant)
        scale.fill_(3)
        out.sum().backward()
        torch.testing.assert_close(teacher.scores.grad, 3 * want)
        torch.testing.assert_close(q.grad, want_q)
        q.grad = teacher.scores.grad = None
        scale.fill_(1)
