"""FlopCounterMode counts what docs/flops.md says: its table and its text are the expected values."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import calls
import inputs
from inputs import BACKWARDS, DIFFERENTIABLE, OPS

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "flops.md").read_text()
TABLE = {
    name: formulas for name, *formulas in re.findall(r"^\| `(\w+)` \| `([^`]+)` \| `([^`]+)` \|$", PAGE, re.MULTILINE)
}
CASE = inputs.Case(T=7, S=9, H=3, D=8, Dv=5, Hi=2, Di=4, K=6)
LETTERS = {letter: getattr(CASE, letter) for letter in ("T", "S", "H", "D", "Dv", "Hi", "Di", "K")}


def value(formula):
    return eval(formula, {"__builtins__": {}}, LETTERS)


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_the_table_has_every_op():
    assert set(TABLE) == set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_forward(name):
    args = inputs.arguments(name, CASE)
    assert counted(lambda: calls.run(name, args)) == value(TABLE[name][0])


def backward_flops(name, frozen=()):
    args = {n: x.detach() if n in frozen else x for n, x in inputs.arguments(name, CASE, grad=True).items()}
    outputs = calls.run(name, args)
    grads = calls.incoming(name, outputs)
    return counted(lambda: calls.gradients(name, args, grads, outputs))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward(name):
    """Through autograd, and the backward op by itself, with its flags left to their defaults."""
    assert backward_flops(name) == value(TABLE[name][1])
    backward = OPS[name].backward
    if BACKWARDS[backward].forward == name:  # indexer_topk shares that of indexer_scores
        args = inputs.arguments(backward, CASE)
        args = {n: x for n, x in args.items() if not n.startswith("need_")}
        assert counted(lambda: calls.op(backward)(*args.values())) == value(TABLE[name][1])


@pytest.mark.parametrize("name", [n for n in DIFFERENTIABLE if n != "indexer_kl"])
def test_backward_without_a_gradient(name):
    """The text below the table, with the bracket's factor from the formula itself."""
    if name == "sparse_mla":
        factor, widths = "2*T*K*H", {"q": "D", "kv": "D + Dv", "sink": "0"}
    else:
        prefix, pairs = ("index_", "S") if name == "dense_indexer_kl" else ("", "K")
        factor, widths = f"2*T*{pairs}*Hi", {f"{prefix}q": "Di", f"{prefix}k": "Di", f"{prefix}weights": "1"}
    for n, width in widths.items():
        assert backward_flops(name, frozen=(n,)) == value(f"{TABLE[name][1]} - {factor}*({width})"), n


def test_nothing_is_counted_for_attention_target_in_backward():
    args = inputs.arguments("attention_target", CASE)
    args["q"].requires_grad_()
    assert not torch.ops.dsa.attention_target(*args.values()).requires_grad
    assert TABLE["attention_target"][1] == "0"
