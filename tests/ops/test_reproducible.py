"""Bits: a result does not depend on the memory budget, on the other rows of the call, or on the run."""

import pytest
import torch

import calls
import inputs
from inputs import ALL, BACKWARDS, Case

# Sums over rows; everything else is reproducible bit for bit, whatever the budget.
SUMS = {"k", "kv", "sink", "index_k", "loss"}
CASES = {
    "some heads": Case(T=150, S=700, H=5, D=24, Dv=16, Hi=3, Di=16, K=130),
    "one head": Case(T=150, S=700, H=1, D=24, Dv=16, Hi=1, Di=16, K=130, expanded_keys=True),
    "bfloat16": Case(T=70, S=300, H=4, D=24, Dv=16, Hi=4, Di=16, K=70, dtype=torch.bfloat16),
}
BUDGETS = ["0.01", "0.3", "1", "3", "7", "256"]


@pytest.fixture(scope="module")
def built():
    """The inputs take the oracle a while: once per op and case."""
    cache = {}

    def build(name, case, device):
        if (name, case) not in cache:
            cache[name, case] = fast_arguments(name, CASES[case])
        return {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in cache[name, case].items()}

    return build


def fast_arguments(name, case):
    """As `inputs.arguments`, but lse and out from the ops themselves: only bits are compared here."""
    small = inputs.arguments(name, case, T=0)
    forward = BACKWARDS[name].forward if name in BACKWARDS else name
    source = inputs._Source(case)
    args = dict(small)
    T, K = case.T, case.K
    wide = {"lse", "row_weight", "target", "scores", "grad_scores", "grad_lse", "grad_kl", "weights", "index_weights"}
    for n, x in small.items():
        if isinstance(x, torch.Tensor) and n in calls.ROWS and x.is_floating_point():
            args[n] = source.floats(T, *x.shape[1:], wide=n in wide)
    if "starts" in args:
        args["starts"], args["ends"] = source.bounds()
    if "indices" in args:
        args["indices"] = source.indices()
    if "topk_length" in args:
        args["topk_length"] = source.ints(-1, K + 2, T)
    if "row_weight" in args:
        args["row_weight"] = args["row_weight"].abs()
    if "target" in args:
        args["target"] = args["target"].square()
    if "lse" in args and forward != "dense_indexer_kl":
        names = ("q", "kv", "indices", "softmax_scale")
        extra = (args.get("d_v", 1), args.get("sink"), args["topk_length"])
        out, args["lse"] = calls.op("sparse_mla")(*(args[n] for n in names), *extra)
        if "out" in args:
            args["out"] = out
    elif "lse" in args:
        args["lse"] = inputs.dense_lse(args["q"], args["k"], args["starts"], args["ends"], inputs.SCALE).float()
    return args


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ALL)
def test_every_budget_gives_the_same_bits(name, case, built, monkeypatch, device):
    args = built(name, case, device)
    want = calls.run(name, args)
    for budget in BUDGETS:
        monkeypatch.setenv("DSA_OPS_WORKSPACE_MB", budget)
        got = calls.run(name, args)
        for n in got:
            if n in SUMS:
                calls.assert_near(got[n], want[n], 2e-2 if case == "bfloat16" else 1e-5, n)
            else:
                calls.assert_all_equal({n: got[n]}, {n: want[n]})


@pytest.mark.parametrize("name", ALL)
def test_deterministic_mode_reproduces_sums_too(name, built, monkeypatch, device):
    args = built(name, "some heads", device)
    torch.use_deterministic_algorithms(True)
    try:
        want = calls.run(name, args)
        for budget in ("", "0.3"):
            monkeypatch.setenv("DSA_OPS_WORKSPACE_MB", budget)
            calls.assert_all_equal(calls.run(name, args), want)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ALL)
def test_a_row_alone_gives_the_same_bits_as_in_a_batch(name, case, built, device):
    args = built(name, case, device)
    together = calls.run(name, args)
    rows = len(next(args[n] for n in calls.ROWS if n in args))
    for part in (slice(0, 1), slice(17, 18), slice(40, 63), slice(rows - 1, rows), slice(1, None, 7)):
        alone = {
            n: x[part] if n in calls.ROWS and n != "k" and isinstance(x, torch.Tensor) else x for n, x in args.items()
        }
        got = calls.run(name, alone)
        calls.assert_all_equal(
            {n: x for n, x in got.items() if n not in SUMS}, {n: x[part] for n, x in together.items() if n not in SUMS}
        )


@pytest.mark.parametrize("name", ALL)
def test_run_to_run(name, built, device):
    args = built(name, "some heads", device)
    first, second = calls.run(name, args), calls.run(name, args)
    kept = [n for n in first if torch.device(device).type == "cpu" or n not in SUMS]
    calls.assert_all_equal({n: first[n] for n in kept}, {n: second[n] for n in kept})


@pytest.mark.parametrize("budget", ["0", "-1", "much", "nan", "inf"])
@pytest.mark.parametrize("name", ["indexer_topk", "sparse_mla"])
def test_a_budget_that_is_none(name, budget, monkeypatch):
    monkeypatch.setenv("DSA_OPS_WORKSPACE_MB", budget)
    with pytest.raises(ValueError, match=f"DSA_OPS_WORKSPACE_MB must be a positive number.*{budget}"):
        calls.run(name, inputs.arguments(name))


def test_strides_of_an_incoming_gradient_do_not_change_a_row(device):
    q, kv = torch.randn(700, 8, 64, device=device), torch.randn(300, 64, device=device)
    indices = torch.randint(0, 300, (700, 32), device=device, dtype=torch.int32)
    incoming = torch.randn(700, 64, 8, device=device)

    def grad_q(rows):
        leaf = q[rows].clone().requires_grad_()
        out = calls.op("sparse_mla")(leaf, kv, indices[rows], 0.1, 64)[0]
        out.backward(incoming[rows].transpose(1, 2))
        return leaf.grad

    together = grad_q(slice(None))
    for row in range(0, 700, 50):
        assert torch.equal(grad_q(slice(row, row + 1))[0], together[row])
