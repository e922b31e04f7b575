"""Inputs of every op: one table of ops, named cases, hypothesis strategies. Used by the tests and by tools alike.

A `Case` says sizes, dtype, layout and what is left out. `arguments("sparse_mla", case)` turns it into the op's
arguments, a dict in the order of the schema, always the same values for the same case.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import oracle


@dataclass(frozen=True)
class Case:
    """T rows, S keys, H heads of width D (values Dv), Hi indexer heads of width Di, K slots."""

    T: int = 7
    S: int = 9
    H: int = 3
    D: int = 8
    Dv: int = 5
    Hi: int = 2
    Di: int = 4
    K: int = 4
    dtype: torch.dtype = torch.float32
    wide: bool = True  # weights, sink and row_weight in the accumulator's dtype instead of `dtype`
    optional: bool = True  # sink, topk_length present
    relu: bool = True
    expanded_keys: bool = False  # dense_indexer_kl: k is [S, H, D] instead of [S, D]
    total_heads: int = 0
    empty: bool = False  # every row without a key
    exact: bool = False  # small integers: every product and sum is exact in float32, so scores compare bit for bit
    layout: str = "contiguous"  # or "transposed", "sliced", "expanded"
    seed: int = 0

    @property
    def accumulator(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


CASES = {
    "plain": Case(),
    "without_optionals": Case(optional=False, relu=False, expanded_keys=True),
    "no_rows": Case(T=0),
    "no_keys": Case(S=0),
    "nothing": Case(T=0, S=0),
    "one": Case(T=1, S=1, H=1, D=1, Dv=1, Hi=1, Di=1, K=1),
    "all_rows_empty": Case(empty=True),
    "more_slots_than_keys": Case(S=3, K=11),
    "odd": Case(T=13, S=37, H=5, D=19, Dv=7, Hi=3, Di=11, K=17),
    "one_head": Case(H=1, Hi=1, T=5, expanded_keys=True),
    "heads_elsewhere": Case(total_heads=12),
    "transposed": Case(layout="transposed"),
    "sliced": Case(layout="sliced", expanded_keys=True),
    "expanded": Case(layout="expanded"),
    "narrow_weights": Case(dtype=torch.bfloat16, wide=False),
    "float16": Case(dtype=torch.float16),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float64": Case(dtype=torch.float64),
}


class _Source:
    """Draws the tensors of one case, always from the CPU generator, and gives them the case's layout."""

    def __init__(self, case: Case):
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)

    def floats(self, *shape: int, wide: bool = False, integers: int = 2) -> torch.Tensor:
        if self.case.exact:
            x = torch.randint(-integers, integers + 1, shape, generator=self.generator).double()
        else:
            x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return relayout(x.to(self.case.accumulator if wide else self.case.dtype), self.case.layout)

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        x = torch.randint(low, max(high, low + 1), shape, generator=self.generator)
        return relayout(x.to(torch.int32), self.case.layout)

    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that see nothing, a few keys or all of them; some bounds lie outside [0, S] or the wrong way round."""
        T, S = self.case.T, self.case.S
        starts = self.ints(-2, S // 2 + 1, T)
        ends = starts.clone() if self.case.empty else self.ints(S // 4, S + 3, T).clone()
        if T > 2:
            ends[1] = starts[1]
        return starts, relayout(ends, self.case.layout)

    def indices(self) -> torch.Tensor:
        """-1 anywhere, repeats likely, one row without a key."""
        T, S, K = self.case.T, self.case.S, self.case.K
        ids = self.ints(-1, 0 if self.case.empty else S, T, K).clone()
        if T > 2:
            ids[1] = -1
        return relayout(ids, self.case.layout)

    def weights(self) -> torch.Tensor:
        return self.floats(self.case.T, self.case.Hi, wide=self.case.wide)


def relayout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same shape in other strides; "sliced" lies in a larger buffer of poison, "expanded" repeats the first row."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded" and x.shape[0] > 0:
        return x[:1].expand(x.shape)
    if layout == "sliced" or layout == "transposed":
        poison = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
        buffer = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), poison)
        view = buffer[..., 1::2]
        return view.copy_(x)
    return x.clone(memory_format=torch.contiguous_format)


SCALE = 0.4


def _indexer(s: _Source) -> dict[str, Any]:
    c = s.case
    return {"q": s.floats(c.T, c.Hi, c.Di), "k": s.floats(c.S, c.Di), "weights": s.weights()}


def _indexer_topk(s: _Source) -> dict[str, Any]:
    head = _indexer(s)
    starts, ends = s.bounds()
    return {**head, "starts": starts, "ends": ends, "topk": s.case.K, "relu": s.case.relu}


def _indexer_scores(s: _Source) -> dict[str, Any]:
    return {**_indexer(s), "indices": s.indices(), "relu": s.case.relu}


def _sparse_mla(s: _Source) -> dict[str, Any]:
    c = s.case
    args = {"q": s.floats(c.T, c.H, c.D), "kv": s.floats(c.S, c.D), "indices": s.indices()}
    args |= {"softmax_scale": SCALE, "d_v": c.Dv, "sink": None, "topk_length": None}
    if c.optional:
        args |= {"sink": s.floats(c.H, wide=c.wide), "topk_length": s.ints(-1, c.K + 2, c.T)}
    return args


def _attention_target(s: _Source) -> dict[str, Any]:
    args = _sparse_mla(s)
    del args["sink"]
    lse = oracle.sparse_mla(**args)[1].to(s.case.accumulator)
    args = {"q": args["q"], "kv": args["kv"], "lse": relayout(lse, s.case.layout), **args}
    del args["d_v"]
    return args


def _indexer_kl(s: _Source) -> dict[str, Any]:
    c = s.case
    indices = s.indices()
    target = s.floats(c.T, c.K, wide=True).square()
    scores = s.floats(c.T, c.K, wide=True)
    target, scores = target.masked_fill(indices < 0, 0.0), scores.masked_fill(indices < 0, -torch.inf)
    if c.T > 2 and c.layout != "expanded":
        target[2] = 0.0  # a row whose target sums to nothing counts as empty
    return {"target": relayout(target, c.layout), "scores": relayout(scores, c.layout), "indices": indices}


def dense_lse(q, k, starts, ends, softmax_scale) -> torch.Tensor:
    """Attention's own logsumexp over exactly the visible keys [T, H], float64."""
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for t in range(q.shape[0]):
        keys = k[oracle.visible(starts, ends, t, k.shape[0])].double()
        lse[t] = (
            softmax_scale * torch.einsum("hd,s...d->hs" if k.dim() == 2 else "hd,shd->hs", q[t].double(), keys)
        ).logsumexp(-1)
    return lse


def _dense_indexer_kl(s: _Source) -> dict[str, Any]:
    c = s.case
    args = {"index_" + n: x for n, x in _indexer(s).items()}
    q, k = s.floats(c.T, c.H, c.D), s.floats(c.S, *([c.H] if c.expanded_keys else []), c.D)
    starts, ends = s.bounds()
    lse = dense_lse(q, k, starts, ends, SCALE).to(c.accumulator)
    args |= {"q": q, "k": k, "lse": relayout(lse, c.layout), "starts": starts, "ends": ends, "softmax_scale": SCALE}
    return args | {"row_weight": s.floats(c.T, wide=True).abs(), "relu": c.relu, "total_heads": c.total_heads}


def _backward_of(forward: str) -> Callable[[_Source], dict[str, Any]]:
    def build(s: _Source) -> dict[str, Any]:
        args = OPS[forward].build(s)
        outputs = getattr(oracle, forward)(**args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        dtypes = {"out": s.case.dtype}
        named = {
            n: relayout(x.to(dtypes.get(n, s.case.accumulator)), s.case.layout if x.dim() else "contiguous")
            for n, x in zip(OPS[forward].outputs, outputs, strict=True)
        }
        op = BACKWARDS[f"{forward}_backward"]
        incoming = {
            f"grad_{n}": s.floats(*named[n].shape, wide=n != "out").detach()
            if named[n].dim()
            else torch.tensor(0.7, dtype=s.case.accumulator)
            for n in op.incoming
        }
        needs = {f"need_{n}": True for n in op.needs}
        pool = {**args, **named, **incoming, **needs}
        return {n: pool[n] for n in op.arguments}

    return build


@dataclass(frozen=True)
class Op:
    """What the tests need to know of an op. Names are those of the schema."""

    build: Callable[[_Source], dict[str, Any]]
    outputs: tuple[str, ...]
    differentiable: tuple[str, ...] = ()
    through: tuple[str, ...] = ()  # outputs that carry gradients
    backward: str | None = None
    autocast: tuple[str, ...] = ()  # arguments that autocast casts


@dataclass(frozen=True)
class Backward:
    """A backward op: the forward it belongs to, its arguments, which outputs' gradients come in, its need_ flags."""

    forward: str
    arguments: tuple[str, ...]
    incoming: tuple[str, ...]
    needs: tuple[str, ...]
    gradients: tuple[str, ...]

    @property
    def build(self) -> Callable[[_Source], dict[str, Any]]:
        return _backward_of(self.forward)


OPS = {
    "indexer_topk": Op(
        _indexer_topk,
        ("indices", "scores"),
        ("q", "k", "weights"),
        ("scores",),
        "indexer_scores_backward",
        autocast=("q", "k"),
    ),
    "indexer_scores": Op(
        _indexer_scores, ("scores",), ("q", "k", "weights"), ("scores",), "indexer_scores_backward", autocast=("q", "k")
    ),
    "sparse_mla": Op(
        _sparse_mla,
        ("out", "lse"),
        ("q", "kv", "sink"),
        ("out", "lse"),
        "sparse_mla_backward",
        autocast=("q", "kv"),
    ),
    "attention_target": Op(_attention_target, ("target",), autocast=("q", "kv")),
    "indexer_kl": Op(_indexer_kl, ("kl",), ("scores",), ("kl",), "indexer_kl_backward"),
    "dense_indexer_kl": Op(
        _dense_indexer_kl,
        ("loss", "kl"),
        ("index_q", "index_k", "index_weights"),
        ("loss",),
        "dense_indexer_kl_backward",
        autocast=("index_q", "index_k", "q", "k"),
    ),
}

BACKWARDS = {
    "indexer_scores_backward": Backward(
        "indexer_scores",
        ("grad_scores", "q", "k", "weights", "indices", "relu", "need_q", "need_k", "need_weights"),
        ("scores",),
        ("q", "k", "weights"),
        ("q", "k", "weights"),
    ),
    "sparse_mla_backward": Backward(
        "sparse_mla",
        (
            *("grad_out", "grad_lse", "q", "kv", "indices", "out", "lse", "softmax_scale", "d_v", "sink"),
            *("topk_length", "need_q", "need_kv", "need_sink"),
        ),
        ("out", "lse"),
        ("q", "kv", "sink"),
        ("q", "kv", "sink"),
    ),
    "indexer_kl_backward": Backward("indexer_kl", ("grad_kl", "target", "scores", "indices"), ("kl",), (), ("scores",)),
    "dense_indexer_kl_backward": Backward(
        "dense_indexer_kl",
        (
            *("grad_loss", "index_q", "index_k", "index_weights", "q", "k", "lse", "starts", "ends", "softmax_scale"),
            *("row_weight", "relu", "total_heads", "need_q", "need_k", "need_weights"),
        ),
        ("loss",),
        ("q", "k", "weights"),
        ("index_q", "index_k", "index_weights"),
    ),
}

ALL = {**OPS, **BACKWARDS}
DIFFERENTIABLE = [name for name, op in OPS.items() if op.differentiable]


def arguments(name: str, case: Case = CASES["plain"], *, device="cpu", grad: bool = False, **changes) -> dict[str, Any]:
    """The op's arguments by schema name and in schema order; `grad` makes the differentiable ones require it."""
    case = replace(case, **changes)
    args = ALL[name].build(_Source(case))
    wanted = OPS[name].differentiable if grad and name in OPS else ()
    return {n: _placed(x, device, case.layout, n in wanted) for n, x in args.items()}


def _placed(x, device, layout, grad):
    if not isinstance(x, torch.Tensor):
        return x
    if torch.device(device).type != "cpu":  # strides may be lost on the way
        x = relayout(x.to(device), layout) if x.dim() else x.to(device)
    return x.requires_grad_(grad)


# ---- hypothesis: `cases` needs it, everything above does not


def cases(**fixed):
    """Strategy for small cases of any shape; a field given is kept, the others are drawn and shrink towards 0 or 1."""
    from hypothesis import strategies as st

    drawn = {
        "T": st.integers(0, 6),
        "S": st.integers(0, 12),
        "H": st.integers(1, 3),
        "D": st.integers(3, 6),
        "Dv": st.integers(1, 3),
        "Hi": st.integers(1, 3),
        "Di": st.integers(1, 5),
        "K": st.integers(1, 15),
        "optional": st.booleans(),
        "relu": st.booleans(),
        "expanded_keys": st.booleans(),
        "layout": st.sampled_from(["contiguous", "transposed", "sliced", "expanded"]),
        "seed": st.integers(0, 2**16),
    }
    return st.builds(
        Case, **{n: s for n, s in drawn.items() if n not in fixed}, **{n: st.just(v) for n, v in fixed.items()}
    )
