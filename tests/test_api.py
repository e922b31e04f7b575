"""The public functions: defaults, named results, int64 ids, batched tensors."""

import inspect

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import calls
import dsa_ops
import inputs
from calls import few
from calls import public as call
from inputs import OPS, Case

T, S, B = 6, 6, 3


def same(got, want, tolerance=1e-6):
    got, want = calls.as_tuple(got), calls.as_tuple(want)
    calls.assert_all_near(dict(enumerate(got)), dict(enumerate(want)), tolerance)


def test_signatures():
    """Those of the contract; names and defaults only."""

    def signature(name):
        parameters = inspect.signature(getattr(dsa_ops, name)).parameters.values()
        bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
        return f"{name}{inspect.Signature(bare)}"

    assert_expected_inline(
        "\n".join(signature(name) for name in OPS),
        """\
indexer_topk(q, k, weights, *, starts=None, ends=None, topk, relu=True)
indexer_scores(q, k, weights, indices, *, relu=True)
sparse_mla(q, kv, indices, softmax_scale=None, d_v=None, *, sink=None, topk_length=None)
attention_target(q, kv, lse, indices, softmax_scale=None, *, topk_length=None)
indexer_kl(target, scores, indices)
dense_indexer_kl(index_q, index_k, index_weights, q, k, lse, *, starts=None, ends=None, softmax_scale=None, row_weight=None, relu=True, total_heads=None)""",  # noqa: E501
    )


def test_everything_public_is_documented_and_typed():
    for name in dsa_ops.__all__:
        thing = getattr(dsa_ops, name)
        assert thing.__doc__, name
        if name in OPS:
            signature = inspect.signature(thing, eval_str=True)
            assert signature.return_annotation is not inspect.Signature.empty
            assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values()), name


def test_results_have_the_names_of_the_schema():
    for name in OPS:
        result = call(name, arguments(name))
        if len(OPS[name].outputs) == 1:
            assert type(result) is torch.Tensor
        else:
            assert result._fields == OPS[name].outputs


# ---- packed: what the public functions add to the op -----------------------------------------------------------------


def arguments(name, **changes):
    return inputs.arguments(name, T=T, S=S, **changes)


@pytest.mark.parametrize("name", OPS)
def test_same_as_the_op(name, device):
    args = arguments(name, device=device)
    same(call(name, args), calls.op(name)(*args.values()), 0)


def test_bounds_left_out_are_causal(device):
    causal = {
        "starts": torch.zeros(T, dtype=torch.int32, device=device),
        "ends": torch.arange(1, T + 1, dtype=torch.int32, device=device),
    }
    for name in ("indexer_topk", "dense_indexer_kl"):
        args = {n: x for n, x in arguments(name, device=device).items() if n not in causal}
        same(call(name, args), call(name, {**args, **causal}), 0)


@pytest.mark.parametrize("name", ["indexer_topk", "dense_indexer_kl"])
def test_bounds_left_out_need_as_many_rows_as_keys(name):
    args = {n: x for n, x in inputs.arguments(name, T=5, S=6).items() if n not in ("starts", "ends")}
    with pytest.raises(ValueError, match=f"{name}: starts and ends must be given.*got 5 .*6"):
        call(name, args)


@pytest.mark.parametrize("missing", ["starts", "ends"])
def test_one_bound_alone_is_refused(missing):
    args = {n: x for n, x in arguments("indexer_topk").items() if n != missing}
    with pytest.raises(ValueError, match=f"indexer_topk: {missing} must be given"):
        call("indexer_topk", args)


def test_other_defaults(device):
    scale = {"softmax_scale": 8**-0.5}
    mla, target = arguments("sparse_mla", device=device), arguments("attention_target", device=device)
    plain = dsa_ops.sparse_mla(mla["q"], mla["kv"], mla["indices"])
    full = {**mla, **scale, "d_v": 8, "sink": None, "topk_length": None}
    same(plain, call("sparse_mla", full), 0)
    same(call("attention_target", {**target, "softmax_scale": None}), call("attention_target", {**target, **scale}), 0)
    dense = arguments("dense_indexer_kl", device=device)
    default = call("dense_indexer_kl", {**dense, "softmax_scale": None, "row_weight": None, "total_heads": None})
    spelled = {**dense, **scale, "row_weight": torch.full((T,), 1 / T, device=device), "total_heads": 0}
    same(default, call("dense_indexer_kl", spelled))


@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla", "attention_target", "indexer_kl"])
def test_int64_ids(name, device):
    args = arguments(name, device=device, optional=False)
    want = call(name, args)
    args["indices"] = args["indices"].long()
    args["indices"][args["indices"] < 0] = -(2**40)
    same(call(name, args), want, 0)


@pytest.mark.parametrize("bad", [2**31, 2**32, 2**32 + 1, 2**40])
@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla", "attention_target"])
def test_int64_ids_past_int32_never_wrap_around(name, bad):
    args = arguments(name, optional=False)
    args["indices"] = args["indices"].long()
    args["indices"][3, 1] = bad
    with pytest.raises(IndexError, match=f"{name}: indices must be below .*{bad}"):
        call(name, args)


def test_int64_bounds_and_lengths(device):
    topk, mla = arguments("indexer_topk", device=device), arguments("sparse_mla", device=device)
    wide = {n: topk[n].long() for n in ("starts", "ends")}
    same(call("indexer_topk", {**topk, **wide}), call("indexer_topk", topk), 0)
    wide["ends"] = torch.where(topk["ends"] >= S, 2**40, wide["ends"])
    same(call("indexer_topk", {**topk, **wide}), call("indexer_topk", topk), 0)
    same(call("sparse_mla", {**mla, "topk_length": mla["topk_length"].long()}), call("sparse_mla", mla), 0)


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("indexer_topk", "topk", 2.5),
        ("indexer_topk", "topk", True),
        ("indexer_topk", "k", [1.0]),
        ("sparse_mla", "d_v", 2.0),
        ("sparse_mla", "softmax_scale", "1"),
        ("sparse_mla", "sink", 1.0),
        ("sparse_mla", "indices", None),
        ("attention_target", "lse", None),
        ("indexer_kl", "target", 0),
        ("dense_indexer_kl", "total_heads", 1.5),
        ("dense_indexer_kl", "row_weight", 1.0),
    ],
)
def test_not_a_tensor_or_not_a_number(name, argument, value):
    with pytest.raises(TypeError, match=f"{name}: {argument} must be .*got {type(value).__name__}"):
        call(name, {**arguments(name), argument: value})


# ---- batched: B independent sequences, everything local --------------------------------------------------------------

UNBATCHED = {"sink"}


def batch(name, **changes):
    """B single sequences, and the same stacked; sequences share the sink."""
    singles = [arguments(name, seed=seed, **changes) for seed in range(B)]
    for single in singles:
        single.update({n: singles[0][n] for n in UNBATCHED & single.keys()})
    stacked = {
        n: torch.stack([s[n] for s in singles]) if isinstance(x, torch.Tensor) and n not in UNBATCHED else x
        for n, x in singles[0].items()
    }
    return singles, stacked


def unstacked(name, results):
    """One result per sequence -> the batched result; the loss is a sum."""
    return tuple(sum(x) if x[0].dim() == 0 else torch.stack(x) for x in zip(*map(calls.as_tuple, results), strict=True))


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("name", OPS)
def test_batched(name, optional, device):
    singles, stacked = batch(name, optional=optional, expanded_keys=optional, device=device)
    result = call(name, stacked)
    same(result, unstacked(name, [call(name, s) for s in singles]))
    assert not isinstance(result, tuple) or result._fields == OPS[name].outputs


@few
@given(case=st.builds(Case, T=st.integers(0, 4), S=st.integers(0, 5), K=st.integers(1, 7), seed=st.integers(0, 999)))
def test_batched_sizes(case):
    for name in OPS:
        singles = [inputs.arguments(name, case), inputs.arguments(name, case, empty=True)]
        for single in singles:
            single.update({n: singles[0][n] for n in UNBATCHED & single.keys()})
        stacked = {
            n: torch.stack([s[n] for s in singles]) if isinstance(x, torch.Tensor) and n not in UNBATCHED else x
            for n, x in singles[0].items()
        }
        same(call(name, stacked), unstacked(name, [call(name, s) for s in singles]))


@pytest.mark.parametrize("name", inputs.DIFFERENTIABLE)
def test_batched_gradients(name, device):
    singles, stacked = batch(name, device=device, dtype=torch.float64)
    wanted = [n for n in OPS[name].differentiable if n not in UNBATCHED]
    leaves = [stacked[n].requires_grad_() for n in wanted]
    output = calls.as_tuple(call(name, stacked))[-1 if name != "dense_indexer_kl" else 0]
    grad = torch.randn_like(output)
    got = torch.autograd.grad(output, leaves, grad)
    for i, single in enumerate(singles):
        inner = [single[n].requires_grad_() for n in wanted]
        result = calls.as_tuple(call(name, single))[-1 if name != "dense_indexer_kl" else 0]
        want = torch.autograd.grad(result, inner, grad if grad.dim() == 0 else grad[i])
        same(tuple(g[i] for g in got), want)


def test_batched_causal_default(device):
    for name in ("indexer_topk", "dense_indexer_kl"):
        singles, stacked = batch(name, device=device)
        for args in (*singles, stacked):
            del args["starts"], args["ends"]
        same(call(name, stacked), unstacked(name, [call(name, s) for s in singles]))


def test_batched_default_row_weight_is_one_over_all_rows(device):
    _, stacked = batch("dense_indexer_kl", device=device)
    loss, kl = call("dense_indexer_kl", {**stacked, "row_weight": None})
    torch.testing.assert_close(loss, kl.mean())


def test_batched_bounds_are_clamped_to_their_own_sequence(device):
    _, stacked = batch("indexer_topk", device=device)
    stacked |= {"starts": torch.full_like(stacked["starts"], -99), "ends": torch.full_like(stacked["ends"], 99)}
    indices = call("indexer_topk", {**stacked, "topk": 3 * S}).indices
    assert (indices[..., :S] == torch.arange(S, device=device)).all() and (indices[..., S:] == -1).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [S, S + 1, 2 * S, 2**31 - 1])
@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla", "attention_target"])
def test_an_id_past_its_sequence_never_reaches_the_next(name, bad, dtype):
    _, stacked = batch(name, optional=False)
    stacked["indices"] = stacked["indices"].to(dtype)
    stacked["indices"][0, 2, 1] = bad
    with pytest.raises(IndexError, match=f"{name}: indices must be below .*{bad}"):
        call(name, stacked)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla", "attention_target"])
def test_an_id_past_its_sequence_is_an_empty_slot_on_cuda(name):
    _, stacked = batch(name, optional=False, device="cuda")
    stacked["indices"][0, 2, 1] = S
    got = call(name, stacked)
    stacked["indices"][0, 2, 1] = -1
    same(got, call(name, stacked), 0)


@pytest.mark.parametrize(
    ("name", "argument", "label"),
    [
        ("indexer_topk", "k", "[B, M]"),
        ("indexer_topk", "weights", "[B, L]"),
        ("indexer_topk", "starts", "[B, L]"),
        ("indexer_topk", "ends", "[B, L]"),
        ("indexer_scores", "indices", "[B, L]"),
        ("sparse_mla", "kv", "[B, M]"),
        ("sparse_mla", "indices", "[B, L]"),
        ("sparse_mla", "topk_length", "[B, L]"),
        ("attention_target", "lse", "[B, L]"),
        ("indexer_kl", "scores", "[B, L]"),
        ("indexer_kl", "indices", "[B, L]"),
        ("dense_indexer_kl", "index_weights", "[B, L]"),
        ("dense_indexer_kl", "q", "[B, L]"),
        ("dense_indexer_kl", "k", "[B, M]"),
        ("dense_indexer_kl", "lse", "[B, L]"),
        ("dense_indexer_kl", "row_weight", "[B, L]"),
    ],
)
def test_batched_sizes_that_disagree(name, argument, label):
    _, stacked = batch(name)
    stacked[argument] = stacked[argument][:2]
    with pytest.raises(ValueError, match=f"^{name}: {argument} must .*got") as info:
        call(name, stacked)
    assert label in str(info.value) and f"[{B}, " in str(info.value)


# ---- in a compiled region --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [False, True], ids=["packed", "batched"])
def test_compiled_with_defaults(batched):
    """Every function in one graph, int64 ids and named results included."""

    def layer(q, kv, index_q, index_k, weights):
        picked = dsa_ops.indexer_topk(index_q, index_k, weights, topk=3)
        attention = dsa_ops.sparse_mla(q, kv, picked.indices.long())
        target = dsa_ops.attention_target(q, kv, attention.lse.detach(), picked.indices)
        kl = dsa_ops.indexer_kl(target, picked.scores, picked.indices)
        again = dsa_ops.indexer_scores(index_q, index_k, weights, picked.indices)
        warm = dsa_ops.dense_indexer_kl(index_q, index_k, weights, q, kv, attention.lse.detach())
        again = torch.where(again.isfinite(), again, 0.0)
        return attention.out.square().mean() + kl.mean() + again.mean() + warm.loss

    lead = (2,) if batched else ()
    shapes = (T, 3, 8), (T, 8), (T, 2, 4), (T, 4), (T, 2)
    leaves = [torch.randn(*lead, *shape) for shape in shapes]
    torch._dynamo.reset()
    results = []
    for f in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        inner = [x.clone().requires_grad_() for x in leaves]
        loss = f(*inner)
        loss.backward()
        results.append([loss.detach(), *(x.grad for x in inner)])
    torch.testing.assert_close(*results)


def test_named_results_leave_a_compiled_region():
    f = torch.compile(lambda *a: dsa_ops.sparse_mla(*a), fullgraph=True, backend="aot_eager")
    args = arguments("sparse_mla")
    result = f(args["q"], args["kv"], args["indices"])
    assert isinstance(result, dsa_ops.SparseMLAOutput)
    same(result, dsa_ops.sparse_mla(args["q"], args["kv"], args["indices"]))


def test_export_keeps_the_op_as_one_node_and_round_trips(tmp_path):
    class Layer(torch.nn.Module):
        def forward(self, q, kv, indices):
            return dsa_ops.sparse_mla(q, kv, indices, 0.3)

    rows = torch.export.Dim("T", min=2)
    args = arguments("sparse_mla")
    example = args["q"], args["kv"], args["indices"]
    program = torch.export.export(Layer(), example, dynamic_shapes=({0: rows}, None, {0: rows}))
    assert [str(n.target) for n in program.graph.nodes if "dsa" in str(n.target)] == ["dsa.sparse_mla.default"]
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    half = args["q"][:3], args["kv"], args["indices"][:3]
    same(loaded(*half), Layer()(*half))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("batched", [False, True])
def test_functions_under_transforms_and_fake_tensors(dtype, batched):
    """Ids are looked at where they can be, and nowhere else."""
    q, kv = torch.randn(2, 5, 3, 8), torch.randn(2, 7, 8)
    ids = torch.randint(-1, 7, (2, 5, 4), dtype=dtype)
    want = torch.stack([dsa_ops.sparse_mla(*one).out for one in zip(q, kv, ids, strict=True)])
    if batched:
        q, kv, ids, want = (x[None] for x in (q, kv, ids, want))
    same(torch.vmap(lambda *x: dsa_ops.sparse_mla(*x).out)(q, kv, ids), want, 0)
    one = [x[0] for x in (q, kv, ids)]
    with FakeTensorMode() as mode:
        out = dsa_ops.sparse_mla(*map(mode.from_tensor, one)).out
        assert out.shape == want.shape[1:]


def test_results_load_with_the_default_of_torch_load(tmp_path):
    result = dsa_ops.sparse_mla(*(arguments("sparse_mla")[n] for n in ("q", "kv", "indices")))
    torch.save(result, tmp_path / "result.pt")
    found = torch.load(tmp_path / "result.pt")
    assert type(found) is type(result)
    same(found, result, 0)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_what_is_no_tensor_or_no_bool_is_named(ids):
    q, kv, indices = (arguments("sparse_mla")[n] for n in ("q", "kv", "indices"))
    with pytest.raises(TypeError, match=r"sparse_mla: topk_length must be a torch\.Tensor, got list"):
        dsa_ops.sparse_mla(q, kv, indices.to(ids), topk_length=[3] * len(q))
    with pytest.raises(TypeError, match="indexer_topk: relu must be a bool, got str"):
        call("indexer_topk", {**arguments("indexer_topk"), "relu": "x"})


def test_autocast_does_not_hide_a_wrong_dtype():
    q, kv, indices = (arguments("sparse_mla")[n] for n in ("q", "kv", "indices"))
    with torch.autocast("cpu"), pytest.raises(TypeError, match=r"sparse_mla: q must be .*got torch\.int64"):
        dsa_ops.sparse_mla(q.long(), kv, indices)
