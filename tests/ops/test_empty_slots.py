"""What a row may not see is never read, outputs are fully written, bounds and lengths are clamped."""

import pytest
import torch

import calls
import inputs
import oracle
from inputs import ALL, BACKWARDS, CASES, DIFFERENTIABLE, OPS

NAN = float("nan")
CASE = inputs.Case(T=6, S=12, K=5, Hi=2, dtype=torch.float64)


def seen(args, t):
    """Ids that row t reads."""
    S = next(args[n] for n in ("k", "kv", "index_k", "indices") if n in args).shape[0]
    if "starts" in args:
        return oracle.visible(args["starts"], args["ends"], t, S)
    return oracle.slots(args["indices"], t, 2**31, args.get("topk_length"))[1]


def used(args):
    """Mask [T, K] of slots in use."""
    mask = torch.zeros(args["indices"].shape, dtype=torch.bool)
    for t in range(mask.shape[0]):
        mask[t, oracle.slots(args["indices"], t, 2**31, args.get("topk_length"))[0]] = True
    return mask


def poison_keys(args):
    """NaN in every key that no row sees, kv[0] among them."""
    hidden = sorted(set(range(12)) - {s for t in range(6) for s in seen(args, t)})
    assert 0 in hidden
    keys = {n: args[n].detach().clone() for n in ("k", "kv", "index_k") if n in args}
    for key in keys.values():
        key[hidden] = NAN
    return {**args, **keys}, hidden


def poison_slots(args):
    """In empty slots: any negative id, past topk_length any id at all; NaN scores, targets and gradients."""
    empty = ~used(args)
    past = torch.zeros_like(empty)
    if args.get("topk_length") is not None:
        past = torch.arange(5) >= args["topk_length"].clamp(0, 5)[:, None]
    ids = args["indices"].masked_fill(empty, -(2**31)).masked_fill(past & empty, 2**31 - 1)
    ids[:, ::2] = ids[:, ::2].masked_fill((past & empty)[:, ::2], 0)  # a valid id whose key holds NaN
    floats = {n: args[n].masked_fill(empty, NAN) for n in ("target", "scores", "grad_scores") if n in args}
    return {**args, "indices": ids, **floats}


def poison_empty_rows(args):
    """NaN in everything a row without a key brings along, but what only scales its result."""
    rows = [t for t in range(6) if not seen(args, t)]
    assert rows
    changed = {}
    for n in args.keys() & {*calls.ROWS} - {
        "starts",
        "ends",
        "indices",
        "topk_length",
        "out",
        "row_weight",
        *calls.KEYS,
    }:
        if args[n] is not None and args[n].is_floating_point():
            changed[n] = args[n].clone()
            changed[n][rows] = NAN
    return {**args, **changed}


def build(name):
    """Inputs where nothing sees key 0 and row 1 sees nothing."""
    args = inputs.arguments(name, CASE)
    if "starts" in args:
        args["starts"], args["ends"] = args["starts"].clamp(min=2), args["ends"].clamp(max=9)
    if "indices" in args:
        args["indices"] = args["indices"].masked_fill(args["indices"] == 0, 1)
    forward = BACKWARDS[name].forward if name in BACKWARDS else name
    if "lse" in args and forward != "sparse_mla":  # again for the changed ids
        if "starts" in args:
            args["lse"] = inputs.dense_lse(args["q"], args["k"], args["starts"], args["ends"], inputs.SCALE)
        else:
            names = ("q", "kv", "indices", "softmax_scale", "topk_length")
            args["lse"] = oracle.sparse_mla(d_v=1, **{n: args[n] for n in names})[1]
    elif "lse" in args:
        args["out"], args["lse"] = oracle.sparse_mla(
            **{n: args[n] for n in ("q", "kv", "indices", "softmax_scale", "d_v", "sink", "topk_length")}
        )
    return args


def on(device, args):
    return {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in args.items()}


@pytest.mark.parametrize("name", [n for n in ALL if not n.startswith("indexer_kl")])
def test_keys_nobody_sees_are_never_read(name, device):
    args = build(name)
    poisoned, hidden = poison_keys(args)
    got, want = calls.run(name, on(device, poisoned)), calls.run(name, on(device, args))
    calls.assert_all_near(got, want, 1e-12)
    for n in ("k", "kv", "index_k"):
        if n in got:  # a gradient: keys nobody saw get exactly nothing
            assert not got[n][hidden].any()


@pytest.mark.parametrize("name", [n for n in ALL if "indices" in inputs.arguments(n)])
def test_empty_slots_are_never_read(name, device):
    args = build(name)
    poisoned, _ = poison_keys(args) if "kv" in args or "k" in args else (args, None)
    got, want = calls.run(name, on(device, poison_slots(poisoned))), calls.run(name, on(device, args))
    calls.assert_all_near(got, want, 1e-12)


@pytest.mark.parametrize("name", ALL)
def test_nothing_of_an_empty_row_is_read(name, device):
    args = build(name)
    got, want = calls.run(name, on(device, poison_empty_rows(args))), calls.run(name, on(device, args))
    calls.assert_all_near(got, want, 1e-12)


@pytest.mark.parametrize("name", ALL)
def test_a_nan_key_reaches_only_rows_that_see_it(name, device):
    args = build(name)
    keys = [n for n in ("k", "kv", "index_k") if n in args]
    want = calls.run(name, on(device, args))
    for s in (3, 7) if keys else ():
        changed = {n: args[n].clone() for n in keys}
        for key in changed.values():
            key[s] = NAN
        got = calls.run(name, on(device, {**args, **changed}))
        blind = [t for t in range(6) if s not in seen(args, t)]
        for n in set(got) - {"k", "kv", "index_k", "sink", "loss"}:  # these sum over rows
            calls.assert_near(got[n][blind], want[n][blind], 1e-12, n)


@pytest.mark.parametrize("name", ALL)
def test_results_of_empty_rows(name, device):
    args = inputs.arguments(name, CASES["all_rows_empty"], device=device)
    for n, x in calls.run(name, args).items():
        if n == "indices":
            assert (x == -1).all()
        elif n == "lse" or (n == "scores" and name in OPS):
            assert (x == -torch.inf).all()
        else:
            assert not x.any(), n


@pytest.mark.parametrize("case", ["plain", "without_optionals", "no_keys", "all_rows_empty", "more_slots_than_keys"])
@pytest.mark.parametrize("name", ALL)
def test_outputs_are_fully_written(name, case, poisoned, device):
    """Fresh memory holds NaN here."""
    args = inputs.arguments(name, CASES[case], device=device)
    assert torch.empty(1).isnan()
    calls.assert_all_near(calls.run(name, args), calls.reference(name, args))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_fully_written(name, poisoned, device):
    args = inputs.arguments(name, device=device, grad=True)
    outputs = calls.run(name, args)
    grads = calls.incoming(name, outputs)
    calls.assert_all_near(calls.gradients(name, args, grads, outputs), calls.reference_gradients(name, args, grads))


@pytest.mark.parametrize("name", ["indexer_topk", "dense_indexer_kl", "dense_indexer_kl_backward"])
def test_bounds_are_clamped(name, device):
    args = inputs.arguments(name, CASE)
    wide = {
        "starts": args["starts"] - 10**9 * (args["starts"] <= 0),
        "ends": args["ends"] + 10**9 * (args["ends"] >= 12),
    }
    wide = {n: b.int() for n, b in wide.items()}
    assert any((wide[n] != args[n]).any() for n in wide)
    calls.assert_all_equal(calls.run(name, on(device, {**args, **wide})), calls.run(name, on(device, args)))


@pytest.mark.parametrize("name", ["sparse_mla", "attention_target", "sparse_mla_backward"])
def test_topk_length_is_clamped(name, device):
    args = inputs.arguments(name, CASE, device=device)
    length = args["topk_length"]
    wide = torch.where(length >= 5, 2**31 - 1, torch.where(length <= 0, -(2**31), length)).int()
    assert (wide != length).any()
    calls.assert_all_equal(calls.run(name, {**args, "topk_length": wide}), calls.run(name, args))


@pytest.mark.parametrize("place", ["first", "last", "middle"])
def test_the_place_of_empty_slots_does_not_matter(place):
    """128 empty slots before, after or between 32 valid ones."""
    q, kv = torch.randn(3, 2, 8, dtype=torch.float64), torch.randn(40, 8, dtype=torch.float64)
    ids, empty = torch.arange(32, dtype=torch.int32).repeat(3, 1), torch.full((3, 128), -1, dtype=torch.int32)
    parts = {"first": (empty, ids), "last": (ids, empty), "middle": (ids[:, :7], empty, ids[:, 7:])}[place]
    want = calls.op("sparse_mla")(q, kv, ids, 0.3, 6)
    for got, expected in zip(calls.op("sparse_mla")(q, kv, torch.cat(parts, 1), 0.3, 6), want, strict=True):
        calls.assert_near(got, expected, 1e-12)


def test_a_huge_gradient_of_an_empty_row_does_nothing():
    args = inputs.arguments("sparse_mla_backward", CASES["all_rows_empty"])
    args["grad_out"] = torch.full_like(args["grad_out"], 3e38)
    assert not any(g.any() for g in calls.run("sparse_mla_backward", args).values())


@pytest.mark.parametrize("value", [3e38, -3e38, float("inf"), float("nan")])
def test_dense_kl_of_keys_and_rows_that_do_not_count(value, device):
    """Finite values can overflow in a product that nobody may see."""
    args = inputs.arguments("dense_indexer_kl", device=device, grad=True)
    S = args["index_k"].shape[0]
    args["ends"] = args["ends"].clamp(max=S - 1)
    args["row_weight"] = args["row_weight"].clone()
    args["row_weight"][0] = 0

    def gradients(poison):
        leaves = {n: args[n].detach().clone() for n in ("index_q", "index_k", "index_weights")}
        leaves["index_k"][S - 1] = poison
        leaves["index_q"][0] = poison
        leaves = {n: x.requires_grad_() for n, x in leaves.items()}
        calls.run("dense_indexer_kl", {**args, **leaves})["loss"].backward()
        return {n: x.grad for n, x in leaves.items()}

    clean, poisoned = gradients(1.0), gradients(value)
    for n in clean:
        calls.assert_near(poisoned[n], clean[n], what=n)


def test_infinite_sinks(device):
    args = inputs.arguments("sparse_mla", device=device, grad=True)
    sink = torch.full_like(args["sink"], float("inf")).requires_grad_()
    out = calls.run("sparse_mla", {**args, "sink": sink})["out"]
    out.sum().backward()
    assert (out == 0).all() and (sink.grad == 0).all()
