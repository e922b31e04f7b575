"""What makes a compiled caller compile again, counted. The numbers expected are the table in docs/compile.md."""

import contextlib
import os
import re
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import dsa_ops
import inputs
from calls import as_tuple
from dsa_ops.layouts import packed_bounds
from inputs import OPS
from layers import hidden, layer

PAGE = Path(__file__).parents[2] / "docs/compile.md"


class Compiled:
    """A function compiled whole, and how often it was."""

    def __init__(self, function, backend="aot_eager"):
        self.backend = CompileCounterWithBackend(backend)
        self.function = torch.compile(function, fullgraph=True, backend=self.backend)

    def __call__(self, *args, **kwargs):
        """One step, forward and backward."""
        results = as_tuple(self.function(*args, **kwargs))
        losses = [x.sum() for x in results if x.requires_grad]
        if losses:
            sum(losses).backward()

    @property
    def recompilations(self):
        return self.backend.frame_count - 1


# ---- every op: sizes above 1, all of them new in every call ----------------------------------------------------------

SIZES = ((7, 9), (10, 13), (16, 20), (9, 30), (21, 11))


def arguments(name, T, S):
    return inputs.arguments(name, T=T, S=S, grad=True)


def op(name):
    """torch.ops.dsa.X with its arguments by name; numbers are constants of the caller."""

    def call(tensors, numbers):
        return getattr(torch.ops.dsa, name)(**tensors, **numbers)

    return call


def function(name):
    """dsa_ops.X likewise."""

    def call(tensors, numbers):
        return getattr(dsa_ops, name)(**tensors, **numbers)

    return call


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("form", [op, function], ids=["torch.ops.dsa", "dsa_ops"])
@pytest.mark.parametrize("name", OPS)
def test_new_lengths_compile_an_op_once_more_at_most_and_not_at_all_where_marked(name, form, marked):
    call = Compiled(form(name))
    for T, S in SIZES:
        args = arguments(name, T, S)
        tensors = {n: x for n, x in args.items() if isinstance(x, torch.Tensor)}
        if marked:
            for n, x in tensors.items():
                if n != "sink" and x.dim():
                    torch._dynamo.mark_dynamic(x, 0)
        call(tensors, {n: x for n, x in args.items() if n not in tensors})
    assert call.recompilations == (0 if marked else 1)


# ---- the table -------------------------------------------------------------------------------------------------------

H, D, DV, HI, DI = 3, 8, 5, 2, 4


def region(q, kv, index_q, index_k, weights, starts=None, ends=None, *, scale=None, length=None, mask=None, **more):
    """Selection, attention and the indexer's loss, with what `more` says in place of the defaults."""
    picked = dsa_ops.indexer_topk(
        index_q, index_k, weights, starts=starts, ends=ends, topk=more.get("topk", 4), relu=more.get("relu", True)
    )
    out, lse = dsa_ops.sparse_mla(
        q, kv, picked.indices, scale, more.get("d_v", DV), sink=more.get("sink"), topk_length=length
    )
    loss = dsa_ops.indexer_loss(
        q, kv, lse, *picked, scale, coeff=more.get("coeff", 1.0), row_mask=mask, topk_length=length
    )
    return dsa_ops.attach_loss(out, loss, more.get("attached"))


def tensors(T=7, S=9, *lead, bounds=True, marked=False, grad=True, dtype=torch.float32, ids=torch.int32):
    """Arguments of `region`; lead is the batch, without it they are packed."""
    shapes = {"q": (T, H, D), "kv": (S, D), "index_q": (T, HI, DI), "index_k": (S, DI), "weights": (T, HI)}
    made = {n: torch.randn(*lead, *shape, dtype=dtype, requires_grad=grad) for n, shape in shapes.items()}
    if bounds:
        made["starts"] = torch.randint(0, 3, (*lead, T), dtype=ids)
        made["ends"] = torch.randint(1, S + 1, (*lead, T), dtype=ids)
    if marked:
        for x in made.values():
            torch._dynamo.mark_dynamic(x, len(lead))
    return made


def sizes(*pairs, warm=1, **more):
    """Calls with these (T, S) or (T, S, B); the first `warm` are not counted but for what they share with the rest."""
    return warm, [tensors(*pair, **more) for pair in pairs]


def each(name, *values):
    return 1, [tensors() | {name: value} for value in values]


def each_tensors(*changes):
    return 1, [tensors(**change) for change in changes]


def square(lengths, *lead, **more):
    return 1, [tensors(n, n, *lead, bounds=False, **more) for n in lengths]


def strides(**other):
    return 1, [tensors(), tensors() | other, tensors()]


TOGETHER, APART = ((7, 9), (10, 13), (16, 20), (9, 30)), ((7, 9), (10, 9), (10, 13), (11, 14))
OPTIONAL = torch.ones(7, dtype=torch.int32), torch.ones(7, dtype=torch.bool), torch.ones(H)

# first column of the table -> (how many calls come before the count, the arguments of all calls)
CASES = {
    "T and S together": lambda: sizes(*TOGETHER),
    "T and S together, marked": lambda: sizes(*TOGETHER, marked=True),
    "T alone, later S alone": lambda: sizes(*APART),
    "T alone, later S alone, marked": lambda: sizes(*APART, marked=True),
    "T == S at first, later not": lambda: sizes((7, 7), (9, 9), (11, 12)),
    "T == S at first, later not, marked": lambda: sizes((7, 7), (9, 9), (11, 12), marked=True),
    "causal by default, new lengths": lambda: square((7, 9, 12)),
    "causal by default, new lengths, marked": lambda: square((7, 9, 12), marked=True),
    "T is 1 in some calls": lambda: sizes((7, 9), (10, 13), (1, 20), (9, 30), (1, 12), warm=2),
    "S is 1 in some calls": lambda: sizes((7, 9), (10, 13), (8, 1), (9, 30), (12, 1), warm=2),
    "T is 0 in some calls": lambda: sizes((7, 9), (10, 13), (0, 20), (9, 30), (0, 12), warm=2),
    "batched, B and L together": lambda: (1, [tensors(n, n, b, bounds=False) for b, n in ((2, 7), (3, 9), (4, 12))]),
    "batched after packed": lambda: (1, [tensors(7, 7, bounds=False), tensors(7, 7, 2, bounds=False)]),
    "bounds given after none": lambda: (1, [tensors(7, 7, bounds=False), tensors(7, 7)]),
    "values of bounds and ids": lambda: sizes((7, 9), (7, 9), (7, 9)),
    "`topk`, any number of values above 1": lambda: each("topk", 4, 5, 6, 7),
    "`d_v`, any number of values above 1": lambda: each("d_v", 5, 4, 3, 2),
    "`softmax_scale`, three new values": lambda: each("scale", 0.4, 0.5, 0.6, 0.7),
    "`relu`": lambda: each("relu", True, False, True),
    "`coeff` of `indexer_loss`, a number": lambda: each("coeff", 0.4, 0.5, 0.6, 0.7),
    "`coeff` of `indexer_loss`, value of a tensor": lambda: each("coeff", *torch.tensor([0.4, 0.5, 0.6])),
    "`scale` of `attach_loss`, value of the tensor": lambda: each("attached", *torch.tensor([0.4, 0.5, 0.6])),
    "`topk_length` given or not": lambda: each("length", None, OPTIONAL[0], None),
    "`row_mask` given or not": lambda: each("mask", None, OPTIONAL[1], None),
    "`sink` given or not": lambda: each("sink", None, OPTIONAL[2], None),
    "dtype": lambda: each_tensors({}, {"dtype": torch.bfloat16}, {}),
    "int64 bounds after int32": lambda: each_tensors({}, {"ids": torch.int64}, {}),
    "`requires_grad` of inputs": lambda: each_tensors({}, {"grad": False}, {}),
    "an input transposed": lambda: strides(q=torch.randn(D, H, 7).permute(2, 1, 0)),
    "an input that is a slice of columns": lambda: strides(q=torch.randn(7, H, 2 * D)[..., :D]),
    "an input that is a slice of rows": lambda: strides(q=torch.randn(14, H, D)[7:]),
}


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def variables():
    names = {"DSA_OPS_BACKEND": "unfused", "DSA_OPS_VALIDATE": "1", "DSA_OPS_WORKSPACE_MB": "8"}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


CONTEXTS = {
    "`torch.no_grad`": torch.no_grad,
    "`torch.inference_mode`": torch.inference_mode,
    "`torch.autocast`": lambda: torch.autocast("cpu", torch.bfloat16),
    "`torch.use_deterministic_algorithms`": deterministic,
    "`dsa_ops.backend` around the call": lambda: dsa_ops.backend("unfused"),
    "environment variables `DSA_OPS_*`": variables,
}


class Packed:
    """A layer, its bounds made of cu_seqlens inside the region, and calls of it."""

    def __init__(self, mode="sparse", **changes):
        self.module = layer(mode, dtype=torch.float32, rope=False, **changes)

    def __call__(self, x, cu_seqlens):
        starts, ends = packed_bounds(cu_seqlens, num_rows=x.shape[0])
        return self.module(x, starts=starts, ends=ends).out

    def inputs(self, rows=19, sequences=2, marked=False):
        x, cu_seqlens = hidden(rows, dtype=torch.float32), torch.arange(sequences + 1, dtype=torch.int32) * 5
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(cu_seqlens, 0)
        return x, cu_seqlens


def lengths(call, packed, marked):
    for rows in (19, 26, 37):
        call(*packed.inputs(rows, marked=marked))


def sequences(call, packed, marked):
    for number in (2, 3, 4, 2):
        call(*packed.inputs(23, number, marked=marked))


def values(call, packed):
    x, _ = packed.inputs()
    for first in (5, 9, 0):
        call(x, torch.tensor([0, first, 19], dtype=torch.int32))
        with torch.no_grad():
            for parameter in packed.module.parameters():
                parameter.mul_(0.9)


def modes(call, packed):
    for mode in ("sparse", "frozen", "dense", "sparse"):
        packed.module.mode = mode
        call(*packed.inputs())


def evaluation(call, packed):
    call(*packed.inputs())
    packed.module.eval()
    call(*packed.inputs())


# first column -> (torch.compile's backend, the steps); "eager" compiles the least, and counts what needs no more
LAYER = {
    "`DSAttention`: number of tokens": ("aot_eager", lambda *run: lengths(*run, marked=False)),
    "`DSAttention`: number of tokens, marked": ("aot_eager", lambda *run: lengths(*run, marked=True)),
    "`DSAttention`: number of sequences": ("eager", lambda *run: sequences(*run, marked=False)),
    "`DSAttention`: number of sequences, marked": ("eager", lambda *run: sequences(*run, marked=True)),
    "`DSAttention`: lengths of the sequences, values of parameters": ("eager", values),
    "`DSAttention`: two new modes": ("eager", modes),
    "`DSAttention`: `eval()` after `train()`": ("eager", evaluation),
}


def table():
    """{first column: number} of the table in docs/compile.md."""
    section = PAGE.read_text().split("\n## What compiles again\n")[1].split("\n## ")[0]
    return {name: int(number) for name, number in re.findall(r"^\| (.+?) \| (\d+) \|", section, re.MULTILINE)}


def test_the_table_has_every_case_and_no_other():
    assert list(table()) == [*CASES, *CONTEXTS, *LAYER]


@pytest.mark.parametrize("case", CASES)
def test_recompilations(case):
    warm, all_arguments = CASES[case]()
    call, before = Compiled(region), 0
    for number, arguments in enumerate(all_arguments):
        call(**arguments)
        if number == warm - 1:
            before = call.recompilations
    assert call.recompilations - before == table()[case]


@pytest.mark.parametrize("case", CONTEXTS)
def test_recompilations_for_a_context(case):
    call = Compiled(region)
    for context in (contextlib.nullcontext, CONTEXTS[case], contextlib.nullcontext, CONTEXTS[case]):
        with context():
            call.function(**tensors())
    assert call.recompilations == table()[case]


@pytest.mark.parametrize("case", LAYER)
def test_recompilations_of_the_layer(case):
    backend, steps = LAYER[case]
    packed = Packed()
    call = Compiled(packed, backend)
    steps(call, packed)
    assert call.recompilations == table()[case]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "marked"), [("eager", False), ("aot_eager", True)])
def test_new_lengths_of_the_warm_up(backend, marked):
    packed = Packed("warmup")
    call = Compiled(packed, backend)
    lengths(call, packed, marked)
    assert call.recompilations == (0 if marked else 1)
