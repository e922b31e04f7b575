"""Bad input: an error that names the op, the argument, what was expected and what came. Through both doors.

Every case changes one argument of a good call. It must be refused by torch.ops.dsa.<op> on real tensors (the body), on
meta tensors (the fake), and by dsa_ops.<op>.
"""

import re

import pytest
import torch

import calls
import inputs
from calls import public
from inputs import ALL, BACKWARDS, DIFFERENTIABLE, OPS


def flat(x):
    return x.flatten()


def longer(x):
    """One row, key, head or slot more than the others say."""
    return torch.cat([x, x[:1]])


def wider(x):
    return torch.cat([x, x[..., :1]], -1)


def deeper(x):
    return x[None, None]


def as_int64(x):
    return x.long()


def as_float(x):
    return x.float()


def as_half(x):
    return x.half()


def as_int(x):
    return x.int()


# op: argument: changes that must be refused with a message that names this argument
REFUSED = {
    "indexer_topk": {
        "q": [flat, deeper, as_int],
        "k": [flat, wider, as_half],
        "weights": [flat, longer, wider, as_half, as_int],
        "starts": [deeper, longer, as_int64, as_float],
        "ends": [deeper, longer, as_int64, as_float],
    },
    "indexer_scores": {
        "q": [flat, deeper, as_int],
        "k": [flat, wider, as_half],
        "weights": [flat, longer, wider, as_int],
        "indices": [flat, deeper, longer, as_int64, as_float],
    },
    "sparse_mla": {
        "q": [flat, deeper, as_int],
        "kv": [flat, wider, as_half],
        "indices": [flat, deeper, longer, as_int64, as_float],
        "sink": [deeper, longer, as_int],
        "topk_length": [deeper, longer, as_int64, as_float],
    },
    "attention_target": {
        "q": [flat, deeper, as_int],
        "kv": [flat, wider, as_half],
        "lse": [flat, longer, wider, as_half],
        "indices": [flat, deeper, longer, as_int64, as_float],
        "topk_length": [deeper, longer, as_int64],
    },
    "indexer_kl": {
        "target": [flat, as_int],
        "scores": [flat, longer, wider, as_half],
        "indices": [flat, longer, wider, as_int64, as_float],
    },
    "dense_indexer_kl": {
        "index_q": [flat, deeper, as_int],
        "index_k": [flat, wider, as_half],
        "index_weights": [flat, longer, wider, as_int],
        "q": [flat, longer, as_int],
        "k": [flat, longer, wider, deeper, as_half],
        "lse": [flat, longer, wider, as_half],
        "starts": [deeper, longer, as_int64],
        "ends": [deeper, longer, as_int64],
        "row_weight": [deeper, longer, as_int],
    },
    "indexer_scores_backward": {
        "grad_scores": [flat, longer, wider, as_int],
        "q": [flat],
        "k": [wider],
        "weights": [longer],
        "indices": [flat, as_int64],
    },
    "sparse_mla_backward": {
        "grad_out": [flat, longer, wider, as_int],
        "grad_lse": [flat, longer, wider, as_int],
        "q": [flat],
        "kv": [wider],
        "indices": [longer, as_int64],
        "out": [flat, longer, wider, as_half],
        "lse": [flat, longer, wider, as_half],
        "sink": [longer],
        "topk_length": [longer, as_int64],
    },
    "indexer_kl_backward": {
        "grad_kl": [deeper, longer, as_int],
        "target": [flat],
        "scores": [wider, as_half],
        "indices": [longer, as_int64],
    },
    "dense_indexer_kl_backward": {
        "grad_loss": [deeper, as_int],
        "index_q": [flat],
        "index_k": [wider],
        "index_weights": [longer],
        "q": [flat],
        "k": [wider],
        "lse": [longer],
        "starts": [longer],
        "ends": [as_int64],
        "row_weight": [longer],
    },
}
CASES = [(op, name, change) for op, names in REFUSED.items() for name, changes in names.items() for change in changes]
IDS = [f"{op}-{name}-{change.__name__}" for op, name, change in CASES]
# The Python functions take int64 ids and bounds, and batched tensors of one dimension more.
ALLOWED_IN_PYTHON = {as_int64}


def assert_refused(call, op, name, change=None, got=None):
    with pytest.raises((ValueError, TypeError)) as info:
        call()
    text = str(info.value)
    assert text.startswith(f"{op}: {name} "), text
    assert "must" in text and "got" in text, text
    if got is not None:
        assert str(list(got.shape)) in text or str(got.dtype) in text, text


def test_every_tensor_argument_is_covered():
    for op in ALL:
        tensors = {a.name for a in calls.op(op)._schema.arguments if "Tensor" in str(a.type)}
        assert set(REFUSED[op]) == tensors, op


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("op", "name", "change"), CASES, ids=IDS)
def test_raw_op(op, name, change, device):
    args = inputs.arguments(op)
    bad = change(args[name])
    args = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in {**args, name: bad}.items()}
    assert_refused(lambda: calls.op(op)(*args.values()), op, name, change, bad)


@pytest.mark.parametrize(
    ("op", "name", "change"),
    [c for c in CASES if c[0] in OPS],
    ids=[i for c, i in zip(CASES, IDS, strict=True) if c[0] in OPS],
)
def test_public_function(op, name, change):
    args = inputs.arguments(op)
    bad = change(args[name])
    if change in ALLOWED_IN_PYTHON:
        calls.assert_all_near(
            dict(enumerate(calls.as_tuple(public(op, {**args, name: bad})))),
            dict(enumerate(calls.as_tuple(public(op, args)))),
            0,
        )
        return
    with pytest.raises((ValueError, TypeError), match=rf"^{op}: ") as info:
        public(op, {**args, name: bad})
    assert re.search(rf"\b{name}\b", str(info.value)) and "got" in str(info.value), info.value


@pytest.mark.parametrize("op", ALL)
def test_wrong_device(op):
    args = inputs.arguments(op)
    tensors = [n for n, x in args.items() if isinstance(x, torch.Tensor)]
    for name in tensors:
        mixed = {**args, name: args[name].to("meta")}
        with pytest.raises((ValueError, TypeError), match=f"^{op}: .* must be on .*got") as info:
            calls.op(op)(*mixed.values())
        assert "meta" in str(info.value) and "cpu" in str(info.value)
        if op in OPS:
            with pytest.raises((ValueError, TypeError), match=f"^{op}: .*must be on .*got"):
                public(op, mixed)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("op", "changes", "text"),
    [
        ("indexer_topk", {"topk": 0}, "topk must be at least 1.*got 0"),
        ("indexer_topk", {"topk": -3}, "topk must be at least 1.*got -3"),
        ("sparse_mla", {"d_v": 0}, "d_v must be between 1 and D = 8, got 0"),
        ("sparse_mla", {"d_v": 9}, "d_v must be between 1 and D = 8, got 9"),
        ("dense_indexer_kl", {"total_heads": 2}, "total_heads must be 0 or at least H = 3, got 2"),
        ("dense_indexer_kl", {"total_heads": -1}, "total_heads must be 0 or at least H = 3, got -1"),
    ],
)
def test_numbers_out_of_range(op, changes, text, device):
    args = {**inputs.arguments(op, device=device), **changes}
    for call in (lambda: calls.op(op)(*args.values()), lambda: public(op, args)):
        with pytest.raises(ValueError, match=f"{op}: {text}"):
            call()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("indexer_scores", "indices"),
        ("sparse_mla", "indices"),
        ("attention_target", "indices"),
        ("indexer_kl", "target"),
    ],
)
def test_no_slots(op, name, device):
    args = inputs.arguments(op, device=device)
    args |= {n: args[n][:, :0] for n in ("indices", "target", "scores") if n in args}
    for call in (lambda: calls.op(op)(*args.values()), lambda: public(op, args)):
        with pytest.raises(ValueError, match=rf"{op}: {name} must have K >= 1"):
            call()


@pytest.mark.parametrize("bad", [9, 2**31 - 1])
@pytest.mark.parametrize("op", ["indexer_scores", "sparse_mla", "attention_target", *list(BACKWARDS)[:2]])
def test_id_past_the_keys(op, bad):
    args = inputs.arguments(op, optional=False)
    args["indices"][4, 2] = bad
    doors = [lambda: calls.op(op)(*args.values())] + [lambda: public(op, args)] * (op in OPS)
    for call in doors:
        with pytest.raises(IndexError, match=rf"{op}: indices must be below S = 9 .*got {bad} in row 4, slot 2"):
            call()


@pytest.mark.parametrize("op", ["sparse_mla", "attention_target", "sparse_mla_backward"])
def test_id_past_the_keys_in_an_empty_slot_is_fine(op):
    args = inputs.arguments(op)
    args["topk_length"] = args["topk_length"].clamp(max=3)
    expected = calls.run(op, args)
    args["indices"] = args["indices"].clone()
    args["indices"][:, 3] = 2**31 - 1
    calls.assert_all_equal(calls.run(op, args), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["indexer_scores", "sparse_mla", "attention_target"])
def test_id_past_the_keys_on_cuda(op, monkeypatch):
    args = inputs.arguments(op, optional=False, device="cuda")
    empty = calls.run(op, {**args, "indices": args["indices"].index_fill(1, torch.tensor([2], device="cuda"), -1)})
    args["indices"][:, 2] = 9
    calls.assert_all_near(calls.run(op, args), empty)
    monkeypatch.setenv("DSA_OPS_VALIDATE", "1")
    with pytest.raises(IndexError, match="in row 0, slot 2"):
        calls.run(op, args)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_refused_under_compile(op):
    """Any exception will do there, as long as its text holds ours."""
    name, change = next((n, c) for n, changes in REFUSED[op].items() for c in changes if c is not as_int64)
    args = inputs.arguments(op)
    bad = {**args, name: change(args[name])}
    compiled = torch.compile(lambda *a: calls.op(op)(*a), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=f"{op}: {name} must"):
        compiled(*bad.values())


def test_one_message_per_kind_of_fault():
    """Word for word: op, argument, expected, got."""
    args = inputs.arguments("sparse_mla")

    def message(**changes):
        with pytest.raises((ValueError, TypeError, IndexError)) as info:
            calls.op("sparse_mla")(*{**args, **changes}.values())
        return f"{type(info.value).__name__}: {info.value}"

    ids = args["indices"]
    lines = [
        message(indices=ids[:5]),
        message(indices=ids.float()),
        message(kv=args["kv"].half()),
        message(topk_length=ids),
        message(sink=args["sink"].to("meta")),
        message(d_v=9),
    ]
    from expecttest import assert_expected_inline

    assert_expected_inline(
        "\n".join(lines),
        """\
ValueError: sparse_mla: indices must have shape [T, K] with T = 7, got torch.int32 [5, 4]
TypeError: sparse_mla: indices must be torch.int32, got torch.float32 [7, 4]
TypeError: sparse_mla: kv must be torch.float32, got torch.float16 [9, 8]
ValueError: sparse_mla: topk_length must have shape [T] with T = 7, got torch.int32 [7, 4]
ValueError: sparse_mla: sink must be on cpu like q, got meta
ValueError: sparse_mla: d_v must be between 1 and D = 8, got 9""",
    )
