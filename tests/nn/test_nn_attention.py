"""The layer in its four modes against the float64 oracle of the whole layer."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import layer_oracle as oracle
from dsa_ops.nn import DSAttention, rotary_table, set_mode
from dsa_ops.nn.attention import MODES
from dsa_ops.nn.rotary import hadamard
from layers import LAYOUTS, SMALL, gradients, hidden, layer, split, state

B, L = 2, 19
VARIANTS = {
    "plain": {},
    "sink": {"sink": True},
    "norope": {"rope": False},
    "rope0": {"qk_rope_head_dim": 0},
    "conventions": {"rope_interleaved": False, "index_rope_interleaved": True, "index_rope_first": False},
    "hadamard": {"index_hadamard": True},
    "scale": {"softmax_scale": 0.5, "index_relu": False},
    "wide value": {"v_head_dim": 24, "sink": True},
    "width": {"index_head_dim": 6},
    "eps": {"norm_eps": 0.3, "index_norm_eps": 0.5},
}
variants = pytest.mark.parametrize("variant", VARIANTS)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def close(got, want, name="", tolerance=2e-6):
    """The layer turns by float32 angles, as published models do; the rest is float64."""
    assert (got - want).abs().max() <= tolerance * max(1.0, want.abs().max().item()), name


def run(module, x, layout, **more):
    starts, ends, visible, positions = LAYOUTS[layout](*x.shape[:2])
    return module(x, starts=starts, ends=ends, **more), visible, positions


def keep_of(indices, visible):
    keys = visible.shape[-1]
    chosen = torch.zeros(*indices.shape[:-1], keys + 1, dtype=torch.bool)
    return chosen.scatter(-1, torch.where(indices < 0, keys, indices).long(), True)[..., :keys]


def check_gradients(module, params, x, ours, theirs, wanted):
    """Gradients of `ours` (already backward) against those of the scalar `theirs` in the oracle, by name."""
    names = [name for name in params if name in wanted]
    expected = torch.autograd.grad(theirs, [params[name] for name in names] + [x], allow_unused=True)
    for name, want in zip(names, expected[:-1], strict=True):
        close(gradients(module)[name], want, name, 1e-5)
    if ours is not None:
        close(ours, expected[-1], "x", 1e-5)


@layouts
@variants
def test_dense(variant, layout):
    module, x = layer("dense", **VARIANTS[variant]), hidden(B, L)
    params = state(module)
    got, visible, positions = run(module, x, layout)
    assert got.indices is None and got.loss is None and got.kl is None
    want, _ = oracle.attention(params, module.config, x, positions, visible)
    close(got.out, want)
    assert torch.all(got.out[~visible.any(-1)] == 0)
    grad = torch.randn_like(want)
    (got.out * grad).sum().backward()
    index, others = split(gradients(module))
    assert all(value is None for value in index.values())
    check_gradients(module, params, x, x.grad, (want * grad).sum(), others)


@layouts
@variants
def test_sparse(variant, layout):
    """Attention over the selected keys; the indexer learns from its loss alone, everything else from `out` alone."""
    module, x = layer("sparse", loss_coeff=0.7, **VARIANTS[variant]), hidden(B, L)
    params, config = state(module), module.config
    got, visible, positions = run(module, x, layout)
    scores = oracle.index_scores(params, config, x, positions)
    keep = oracle.best(scores, visible, config.index_topk)
    assert torch.equal(keep_of(got.indices, visible), keep)
    assert got.indices.shape == (B, L, config.index_topk) and got.indices.dtype == torch.int32
    want, target = oracle.attention(params, config, x, positions, keep)
    close(got.out, want)
    kl = oracle.kl(target, scores, keep).mean()
    close(got.kl, kl)
    close(got.loss, 0.7 * kl)
    assert got.loss.requires_grad and not got.kl.requires_grad
    grad = torch.randn_like(want)
    (got.out * grad).sum().backward()
    index, others = split(gradients(module))
    check_gradients(module, params, x, x.grad, (want * grad).sum(), others)
    check_gradients(module, params, x, None, 0.7 * kl, index)


@layouts
@variants
def test_warmup(variant, layout):
    """Dense attention with a loss over all visible keys, from which only the indexer learns."""
    module, x = layer(loss_coeff=0.7, **VARIANTS[variant]), hidden(B, L)
    params, config = state(module), module.config
    set_mode(module, "warmup")
    got, visible, positions = run(module, x, layout)
    want, target = oracle.attention(params, config, x, positions, visible)
    close(got.out, want)
    assert got.indices is None
    kl = oracle.kl(target, oracle.index_scores(params, config, x, positions), visible).mean()
    close(got.kl, kl)
    close(got.loss, 0.7 * kl)
    grad = torch.randn_like(want)
    (got.out * grad).sum().backward()
    index, others = split(gradients(module))
    assert all(value is None for value in others.values())
    check_gradients(module, params, x, x.grad, (want * grad).sum(), [])
    check_gradients(module, params, x, None, 0.7 * kl, index)
    assert all(value.abs().max() > 0 for name, value in index.items() if "k_norm.bias" not in name)


@layouts
def test_frozen(layout):
    module, x = layer("sparse", sink=True), hidden(B, L)
    sparse = run(module, x, layout)[0]
    module.mode = "frozen"
    graphs = []
    module.indexer.register_forward_hook(lambda module, args, out: graphs.extend(t.requires_grad for t in out))
    got = run(module, x, layout)[0]
    assert graphs == [False] * 3
    assert torch.equal(got.indices, sparse.indices) and torch.equal(got.out, sparse.out)
    assert got.loss is None and got.kl is None
    got.out.sum().backward()
    index, others = split(gradients(module))
    assert all(value is None for value in index.values())
    assert all(value is not None for value in others.values())


@pytest.mark.parametrize("coeff", [0.0, 1.0, 1000.0])
def test_the_two_losses_do_not_meet(coeff):
    """The coefficient scales the indexer's gradients and leaves every bit of the others."""

    def run(coeff):
        torch.manual_seed(0)
        module = layer("sparse", sink=True, loss_coeff=coeff)
        x = hidden(B, L)
        module(x).out.square().sum().backward()
        index, others = split(gradients(module))
        return index, others | {"x": x.grad}

    (index, others), (index_1, others_1) = run(coeff), run(1.0)
    for name, value in others.items():
        assert torch.equal(value, others_1[name]), name
    for name, value in index.items():
        torch.testing.assert_close(value, index_1[name] * coeff, msg=name)


@layouts
@pytest.mark.parametrize("mode", MODES)
def test_packed_equals_batched(mode, layout):
    """The same sequences one after another: same output, same loss, ids moved by the sequence's first row."""
    module, x = layer(mode, sink=True), hidden(B, L)
    starts, ends, visible, _ = LAYOUTS[layout](B, L)
    mask = torch.rand(B, L) < 0.7
    batched = module(x, starts=starts, ends=ends, row_mask=mask)
    if starts is None:
        starts, ends = torch.zeros(B, L, dtype=torch.int32), torch.arange(1, L + 1, dtype=torch.int32).expand(B, L)
    first = torch.arange(B, dtype=torch.int32)[:, None] * L
    packed = module(
        x.flatten(0, 1), starts=(starts + first).flatten(), ends=(ends + first).flatten(), row_mask=mask.flatten()
    )
    # a row that sees nothing has no position of its own in a pack, which is as good as any
    close(packed.out.view_as(batched.out)[visible.any(-1)], batched.out[visible.any(-1)], tolerance=1e-12)
    assert (packed.loss is None) == (batched.loss is None) == (mode in ("dense", "frozen"))
    if packed.loss is not None:
        close(packed.loss, batched.loss, tolerance=1e-12)
    if packed.indices is not None:
        moved = torch.where(batched.indices < 0, -1, batched.indices + first[..., None])
        assert torch.equal(packed.indices.view_as(moved), moved)


def test_one_packed_sequence_needs_no_bounds():
    for mode in ("dense", "warmup", "sparse"):
        module, x = layer(mode), hidden(L)
        batched = module(x[None])
        got = module(x)
        assert got.out.shape == x.shape
        close(got.out, batched.out[0], tolerance=1e-12)
        if got.loss is not None:
            close(got.loss, batched.loss, tolerance=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["causal", "ragged"])
def test_the_future_changes_nothing(mode, layout):
    module, x = layer(mode, sink=True), hidden(B, L)
    cut = L // 2
    later = torch.cat((x[:, :cut], torch.randn_like(x[:, cut:])), 1)
    before, after = (run(module, tokens, layout)[0] for tokens in (x, later))
    close(before.out[:, :cut], after.out[:, :cut], tolerance=1e-12)
    assert not torch.allclose(before.out[:, cut:], after.out[:, cut:])
    if before.indices is not None:
        assert torch.equal(before.indices[:, :cut], after.indices[:, :cut])
    grad = torch.autograd.grad(before.out[:, :cut].sum(), x)[0]
    assert torch.all(grad[:, cut:] == 0)


@layouts
@pytest.mark.parametrize("topk", [L, 3 * L])
def test_topk_beyond_the_length_is_dense(layout, topk):
    module, x = layer("dense", sink=True, index_topk=topk), hidden(B, L)
    dense = run(module, x, layout)[0].out
    grad = torch.randn_like(dense)
    dense_grads = torch.autograd.grad(dense, [x, module.sinks, module.kv_b_proj.weight], grad)
    module.mode = "sparse"
    sparse = run(module, x, layout)[0]
    assert sparse.indices.shape[-1] == topk
    close(sparse.out, dense, tolerance=1e-12)
    sparse_grads = torch.autograd.grad(sparse.out, [x, module.sinks, module.kv_b_proj.weight], grad)
    for got, want in zip(sparse_grads, dense_grads, strict=True):
        close(got, want, tolerance=1e-11)


def test_sparse_is_not_dense_below_the_length():
    module, x = layer("dense"), hidden(B, L)
    dense = module(x).out
    module.mode = "sparse"
    few = SMALL["index_topk"]
    close(module(x).out[:, :few], dense[:, :few], tolerance=1e-12)
    assert (module(x).out - dense)[:, few:].abs().max() > 0.1


def test_indices_are_shared_between_layers():
    first, second, shared = layer("sparse"), layer("sparse"), layer("sparse", has_indexer=False)
    shared.load_state_dict(split(second.state_dict())[1])
    x = hidden(B, L)
    middle = first(x)
    got = shared(middle.out, indices=middle.indices)
    assert got.indices is middle.indices and got.loss is None and got.kl is None
    assert not split(dict(shared.named_parameters()))[0]
    same = second(middle.out, indices=middle.indices)  # a layer with an indexer lets it rest, too
    assert torch.equal(got.out, same.out) and same.loss is None
    assert torch.equal(second(middle.out, indices=middle.indices.long()).out, same.out)
    got.out.sum().backward()
    # the first layer's loss travels with its output through the second layer
    assert all(value is not None for value in gradients(first).values())
    for mode in ("dense", "warmup"):
        shared.mode = mode
        assert shared(x).loss is None


def test_given_indices_are_what_is_read():
    module, x = layer("sparse", sink=True), hidden(B, L)
    params = state(module)
    indices = torch.full((B, L, 4), -1, dtype=torch.int32)
    for b, t in itertools.product(range(B), range(L)):
        count = min(t, 4)
        indices[b, t, :count] = torch.randperm(t + 1)[:count]
    got = module(x, indices=indices)
    keep = keep_of(indices, oracle.causal(B, L))
    want, _ = oracle.attention(params, module.config, x, torch.arange(L).expand(B, L), keep)
    close(got.out, want)
    assert torch.all(got.out[:, 0] == 0)


def test_row_mask_limits_the_loss():
    x, mask = hidden(B, L), torch.rand(B, L) < 0.4
    positions, causal = torch.arange(L).expand(B, L), oracle.causal(B, L)
    for mode in ("warmup", "sparse"):
        module = layer(mode)
        params, config = state(module), module.config
        scores = oracle.index_scores(params, config, x, positions)
        keep = causal if mode == "warmup" else oracle.best(scores, causal, config.index_topk)
        kl = oracle.kl(oracle.attention(params, config, x, positions, keep)[1], scores, keep)
        close(module(x, row_mask=mask).kl, kl[mask].mean())
        assert module(x, row_mask=torch.zeros_like(mask)).kl == 0
        assert (kl[mask].mean() - kl.mean()).abs() > 1e-3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_loss_scale_is_the_gradient_of_the_loss(mode, compiled):
    """Two micro-batches of a scaled main loss give the scaled gradients of the whole batch, the indexer's too."""
    module, x = layer(mode), hidden(B, L)
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    module(x).out.square().mean().backward()
    want = gradients(module)
    module.zero_grad()
    scale = torch.tensor(8.0 / B)
    for part in x.split(1):
        (call(part, loss_scale=scale).out.square().mean() * scale).backward()
    for name, grad in gradients(module).items():
        if want[name] is not None:
            close(grad, 8 * want[name])


@pytest.mark.parametrize("form", ["[L, R/2]", "[1, L, R/2]", "[B, L, R/2]", "[B, L, R]"])
def test_position_embeddings(form):
    for mode in ("dense", "sparse"):
        module, x = layer(mode), hidden(B, L)
        positions = torch.arange(L)
        if form.startswith("[B"):
            positions = positions.expand(B, L)
        elif form.startswith("[1"):
            positions = positions[None]
        table = rotary_table(positions, 6, 100.0)
        if form.endswith("R]"):
            table = tuple(torch.cat((t, t), -1) for t in table)
        assert torch.equal(module(x, position_embeddings=table).out, module(x).out)
        far = rotary_table(positions + 1000, 6, 100.0)
        close(module(x, position_embeddings=far).out, module(x).out, tolerance=1e-3)  # distances alone matter
        assert not torch.allclose(
            module(x, position_embeddings=rotary_table(positions * 2, 6, 100.0)).out, module(x).out
        )


def test_hadamard_leaves_scores_alone():
    plain, rotated = layer("sparse"), layer("sparse", index_hadamard=True)
    rotated.load_state_dict(plain.state_dict())
    x = hidden(B, L)
    q, k, _ = plain.indexer(x, torch.randn(B, L, 20, dtype=torch.float64), rotary_table(torch.arange(L), 6))
    torch.testing.assert_close(
        torch.einsum("blhd,bsd->blhs", hadamard(q), hadamard(k)), torch.einsum("blhd,bsd->blhs", q, k)
    )
    assert torch.equal(plain(x).indices, rotated(x).indices)
    close(rotated(x).loss, plain(x).loss, tolerance=1e-12)


def test_indexer_by_itself():
    """q and k in the module's dtype, weights in float32 with both scales folded in; nothing detached."""
    module = layer("sparse", dtype=torch.bfloat16).indexer
    x, resid = hidden(B, L, dtype=torch.bfloat16), hidden(B, L, size=20, dtype=torch.bfloat16)
    table = rotary_table(torch.arange(L), 6, 100.0)
    q, k, weights = module(x, resid, table)
    assert (q.shape, k.shape, weights.shape) == ((B, L, 2, 16), (B, L, 16), (B, L, 2))
    assert (q.dtype, k.dtype, weights.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    close(weights, torch.nn.functional.linear(x, module.weights_proj.weight).float() * 32**-0.5, tolerance=1e-6)
    sum(t.float().sum() for t in (q, k, weights)).backward()
    assert x.grad is not None and resid.grad is not None
    picked = module.select(x, resid, table, topk=3)
    assert picked.indices.shape == picked.scores.shape == (B, L, 3)
    assert module.select(x, resid, table).indices.shape == (B, L, SMALL["index_topk"])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["causal", "ragged"])
def test_checkpointing(mode, layout, reentrant):
    """Recomputing two layers gives every gradient of running them once, the indexers' too, and counts no loss twice."""
    starts, ends, _, _ = LAYOUTS[layout](B, L)
    first, second, x = layer(mode, sink=True), layer(mode, sink=True), hidden(B, L)

    def body(x):
        return second(first(x, starts=starts, ends=ends).out, starts=starts, ends=ends).out

    def run(forward):
        for module in (first, second):
            module.zero_grad()
        x.grad = None
        out = forward(x)
        out.square().sum().backward()
        return out, gradients(first) | {f"2.{n}": g for n, g in gradients(second).items()} | {"x": x.grad}

    out, want = run(body)
    again, got = run(lambda x: checkpoint(body, x, use_reentrant=reentrant))
    assert torch.equal(out, again)
    for name, value in want.items():
        assert (got[name] is None) == (value is None), name
        if value is not None:
            assert torch.equal(got[name], value), name


def test_no_loss_in_evaluation():
    x = hidden(B, L)
    for mode in ("warmup", "sparse"):
        module = layer(mode)
        with torch.no_grad():
            assert module(x).kl is not None  # the first pass of reentrant checkpointing
        module.eval()
        assert module(x).kl is not None
        with torch.no_grad():
            got = module(x)
        assert got.loss is None and got.kl is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["causal", "ragged"])
def test_no_rows(mode, layout):
    module = layer(mode, sink=True)
    for shape in ((0,), (2, 0), (0, 5)):
        x = hidden(*shape)
        bounds = None if layout == "causal" else torch.zeros(shape, dtype=torch.int32)
        got = module(x, starts=bounds, ends=bounds)
        assert got.out.shape == x.shape
        got.out.sum().backward()
        assert x.grad is None or x.grad.shape == x.shape


def test_padding_rows_of_nan_stay_out():
    """What a row holds that nobody sees and that sees nobody cannot matter, in the sparse modes."""
    starts, ends, visible, _ = LAYOUTS["ragged"](B, L)
    padding = ~visible.any(-1)
    for mode in ("sparse", "frozen"):
        module = layer(mode)
        x = hidden(B, L).detach()
        want = module(x, starts=starts, ends=ends, row_mask=~padding)
        x[padding] = torch.nan
        got = module(x, starts=starts, ends=ends, row_mask=~padding)
        assert torch.equal(got.out[~padding], want.out[~padding])
        assert want.loss is None or torch.equal(got.loss, want.loss)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_half_precision(mode, how):
    module = layer(mode, sink=True, dtype=torch.float32)
    x = hidden(B, L, dtype=torch.float32)
    want = module(x).out
    if how == "bfloat16":
        module, inputs = module.bfloat16(), x.detach().bfloat16().requires_grad_()
        module.indexer.weights_proj.float()  # as checkpoints keep it
    else:
        inputs = x
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        got = module(inputs)
    assert got.out.dtype == torch.bfloat16
    if mode in ("dense", "warmup"):  # a selection may differ in a key
        assert (got.out - want).norm() < 0.05 * want.norm()
    got.out.float().square().sum().backward()
    for name, parameter in module.named_parameters():
        learns = "indexer." not in name or mode in ("warmup", "sparse")
        assert (parameter.grad is not None) == learns, name
        if learns:
            assert parameter.grad.dtype == parameter.dtype and parameter.grad.isfinite().all(), name


def x_of(*shape, dtype=torch.float64):
    return torch.zeros(*shape, dtype=dtype)


ids = torch.zeros(B, L, 3, dtype=torch.int32)
bounds = torch.zeros(B, L, dtype=torch.int32)
good = x_of(B, L, 32)
ERRORS = [
    (ValueError, r"x must be \[T, 32\] or \[B, L, 32\], got \[32\]", "dense", x_of(32), {}),
    (ValueError, r"x must be .* got \[1, 2, 3, 32\]", "dense", x_of(1, 2, 3, 32), {}),
    (ValueError, r"x must be .* got \[2, 19, 31\]", "sparse", x_of(B, L, 31), {}),
    (TypeError, "x must be a tensor, got list", "dense", [1.0], {}),
    (
        TypeError,
        "x must be torch.float64 like the parameters, got torch.float32",
        "dense",
        x_of(B, L, 32, dtype=torch.float32),
        {},
    ),
    (ValueError, "x must be on cpu like the parameters, got meta", "sparse", good.to("meta"), {}),
    (
        ValueError,
        "starts must be on cpu like x, got meta",
        "dense",
        good,
        {"starts": bounds.to("meta"), "ends": bounds},
    ),
    (ValueError, "ends must be on cpu like x, got meta", "warmup", good, {"starts": bounds, "ends": bounds.to("meta")}),
    (
        ValueError,
        "row_mask must be on cpu like x, got meta",
        "warmup",
        good,
        {"row_mask": bounds.bool().to("meta")},
    ),
    (ValueError, "indices must be on cpu like x, got meta", "frozen", good, {"indices": ids.to("meta")}),
    (
        ValueError,
        r"position_embeddings \(sin\) must be on cpu like the tokens, got meta",
        "dense",
        good,
        {"position_embeddings": (torch.ones(L, 3), torch.ones(L, 3, device="meta"))},
    ),
    (TypeError, "x must be a floating-point tensor, got torch.int64", "dense", x_of(B, L, 32, dtype=torch.int64), {}),
    (ValueError, "starts and ends must be given together, got starts alone", "dense", good, {"starts": bounds}),
    (ValueError, "starts and ends must be given together, got ends alone", "sparse", good, {"ends": bounds}),
    (
        ValueError,
        r"ends must be of shape \[2, 19\] like x, got \[19\]",
        "dense",
        good,
        {"starts": bounds, "ends": bounds[0]},
    ),
    (
        TypeError,
        "starts must be torch.int32 or torch.int64, got torch.float32",
        "dense",
        good,
        {"starts": bounds.float(), "ends": bounds},
    ),
    (ValueError, r"row_mask must be of shape \[2, 19\]", "sparse", good, {"row_mask": torch.ones(L) > 0}),
    (TypeError, "row_mask must be torch.bool, got torch.int32", "warmup", good, {"row_mask": bounds}),
    (
        TypeError,
        "loss_scale must be a floating-point tensor of one element, got float",
        "dense",
        good,
        {"loss_scale": 1.0},
    ),
    (TypeError, "loss_scale must be .* got torch.int32", "sparse", good, {"loss_scale": bounds[0, 0]}),
    (ValueError, r"loss_scale must be .* got \[2\]", "sparse", good, {"loss_scale": torch.ones(2)}),
    (
        ValueError,
        "loss_scale must be on cpu like x, got meta",
        "frozen",
        good,
        {"loss_scale": torch.ones(1, device="meta")},
    ),
    (ValueError, "indices must be None in mode 'dense'", "dense", good, {"indices": ids}),
    (ValueError, "indices must be None in mode 'warmup'", "warmup", good, {"indices": ids}),
    (
        ValueError,
        r"indices must be of shape \[2, 19\] \+ \[K\], got \[2, 19\]",
        "sparse",
        good,
        {"indices": ids[..., 0]},
    ),
    (ValueError, r"indices must be of shape .* got \[2, 18, 3\]", "sparse", good, {"indices": ids[:, 1:]}),
    (ValueError, r"indices must be of shape .* got \[2, 19, 0\]", "frozen", good, {"indices": ids[..., :0]}),
    (TypeError, "indices must be int32 or int64, got torch.float32", "frozen", good, {"indices": ids.float()}),
    (TypeError, "indices must be a tensor, got list", "sparse", good, {"indices": [0]}),
    (TypeError, "position_embeddings must be a pair", "sparse", good, {"position_embeddings": bounds}),
    (
        TypeError,
        r"position_embeddings \(cos\) must be a floating-point",
        "dense",
        good,
        {"position_embeddings": (bounds, bounds)},
    ),
    (
        ValueError,
        r"position_embeddings \(sin\) must .* got \[19, 4\]",
        "dense",
        good,
        {"position_embeddings": (x_of(L, 3), x_of(L, 4))},
    ),
    (
        ValueError,
        r"position_embeddings \(cos\) must .* got \[18, 3\]",
        "dense",
        good,
        {"position_embeddings": (x_of(18, 3), x_of(18, 3))},
    ),
]


@pytest.mark.parametrize(
    ("error", "text", "mode", "x", "arguments"), ERRORS, ids=[f"{e[2]}-{e[1][:30]}" for e in ERRORS]
)
def test_errors(error, text, mode, x, arguments):
    with pytest.raises(error, match=f"DSAttention: .*{text}"):
        layer(mode)(x, **arguments)


@pytest.mark.parametrize("mode", ["sparse", "frozen"])
def test_missing_indices(mode):
    with pytest.raises(
        ValueError, match=f"indices must be given in mode '{mode}' to a layer without an indexer, got None"
    ):
        layer(mode, has_indexer=False)(good)


def test_id_out_of_range():
    with pytest.raises(IndexError, match="indices must be below"):
        layer("sparse")(good, indices=ids + L)


def test_unknown_mode():
    module = layer("dense")
    with pytest.raises(ValueError, match="mode must be one of dense, warmup, sparse, frozen, got 'Sparse'"):
        module.mode = "Sparse"
    assert module.mode == "dense"


def test_config_type():
    with pytest.raises(TypeError, match="config must be a DSAConfig, got dict"):
        DSAttention(SMALL)


def test_indexer_needs_positions():
    module = layer("sparse")
    with pytest.raises(ValueError, match="position_embeddings must be"):
        module.indexer(good, x_of(B, L, 20))
    layer("sparse", rope=False).indexer(good, x_of(B, L, 20))
