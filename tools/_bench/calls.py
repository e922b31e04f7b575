"""This package's ops as calls without arguments, and the work that each of them cannot avoid.

T query rows, S key rows, H heads of width D (values Dv), Hi indexer heads of width Di, K slots; a pair is a row and one
of its valid slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import dsa_ops

from .inputs import Inputs

Result = dict[str, Tensor]


def _index(x: Inputs) -> tuple:
    return x.index_q, x.index_k, x.index_weights


def _dense(x: Inputs) -> tuple:
    return (*_index(x), x.q, x.kv, x.dense_lse, x.starts, x.ends, x.scale, x.grad_kl)


# name -> (op, its arguments in the order of the schema)
OPS: dict[str, tuple[str, Callable[[Inputs], tuple]]] = {
    "indexer_topk": ("indexer_topk", lambda x: (*_index(x), x.starts, x.ends, x.sizes.topk)),
    "indexer_scores": ("indexer_scores", lambda x: (*_index(x), x.indices)),
    "indexer_backward": ("indexer_scores_backward", lambda x: (x.grad_scores, *_index(x), x.indices)),
    "sparse_mla": ("sparse_mla", lambda x: (x.q, x.kv, x.indices, x.scale, x.sizes.v_dim)),
    "sparse_mla_backward": (
        "sparse_mla_backward",
        lambda x: (x.grad_out, None, x.q, x.kv, x.indices, x.out, x.lse, x.scale, x.sizes.v_dim),
    ),
    "attention_target": ("attention_target", lambda x: (x.q, x.kv, x.lse, x.indices, x.scale)),
    "indexer_kl": ("indexer_kl", lambda x: (x.target, x.scores, x.indices)),
    "indexer_kl_backward": ("indexer_kl_backward", lambda x: (x.grad_kl, x.target, x.scores, x.indices)),
    "dense_indexer_kl": ("dense_indexer_kl", _dense),
    "dense_indexer_kl_backward": (
        "dense_indexer_kl_backward",
        lambda x: (torch.ones((), device=x.device), *_dense(x)),
    ),
}
# What a training step consists of.
STEP = (
    "indexer_topk",
    "sparse_mla",
    "attention_target",
    "indexer_kl",
    "indexer_kl_backward",
    "indexer_backward",
    "sparse_mla_backward",
)
NAMES = (*OPS, "step")
RESULTS = {"indexer_scores": ("scores",), "attention_target": ("target",), "indexer_kl": ("kl",)}
RESULTS["indexer_kl_backward"] = ("grad_scores",)


def call(name: str, x: Inputs) -> Callable[[], Result]:
    """The op with its arguments made, ready to be timed."""
    if name == "step":
        return step(x)
    op, arguments = OPS[name]
    overload, args = getattr(torch.ops.dsa, op).default, arguments(x)
    names = RESULTS.get(name) or [result.name for result in overload._schema.returns]

    def run() -> Result:
        result = overload(*args)
        return dict(zip(names, result if isinstance(result, tuple) else (result,), strict=True))

    return run


def step(x: Inputs) -> Callable[[], Result]:
    """One layer's training step as a user writes it: selection, attention, the indexer's loss, one backward."""
    names = ("q", "kv", "index_q", "index_k", "index_weights")
    leaves = {name: getattr(x, name).detach().requires_grad_() for name in names}
    grad_out, bounds = x.grad_out, dict(starts=x.starts, ends=x.ends)

    @torch.enable_grad()
    def run() -> Result:
        q, kv, *index = leaves.values()
        indices, scores = dsa_ops.indexer_topk(*index, **bounds, topk=x.sizes.topk)
        out, lse = dsa_ops.sparse_mla(q, kv, indices, x.scale, x.sizes.v_dim)
        loss = dsa_ops.indexer_loss(q, kv, lse, indices, scores, x.scale)
        grads = torch.autograd.grad(dsa_ops.attach_loss(out, loss), tuple(leaves.values()), grad_out)
        named = {f"grad_{name}": grad for name, grad in zip(names, grads, strict=True)}
        return {"out": out.detach(), "loss": loss.detach(), "indices": indices, "lse": lse.detach(), **named}

    return run


def explain(name: str, x: Inputs) -> dict[str, dsa_ops.dispatch.Explanation]:
    """What dispatch does with the call, for each op in it."""
    found = {}
    for part in STEP if name == "step" else (name,):
        op, arguments = OPS[part]
        names = (argument.name for argument in getattr(torch.ops.dsa, op).default._schema.arguments)
        found[op] = dsa_ops.explain(op, **dict(zip(names, arguments(x), strict=False)))
    return found


@dataclass(frozen=True)
class Work:
    """Least work: operations in products of valid pairs, bytes in and out once, one gather and one fp32 reduction of a
    key's row per pair. What is done in series stands in `parts`."""

    flops: float = 0
    moved: float = 0
    gathered: float = 0
    reduced: float = 0
    parts: tuple["Work", ...] = field(default=(), repr=False)

    def amounts(self) -> dict[str, float]:
        return {"gemm": self.flops, "copy": self.moved, "gather": self.gathered, "reduction": self.reduced}

    def floor(self, ceilings: dict[str, float | None]) -> tuple[float, str] | None:
        """Seconds at the measured ceilings, and which of them it is that bounds. None without ceilings."""
        if self.parts:
            floors = [part.floor(ceilings) for part in self.parts]
            return None if None in floors else (sum(seconds for seconds, _ in floors), "sum of parts")
        times = [(amount / ceilings[name], name) for name, amount in self.amounts().items() if ceilings.get(name)]
        return max(times) if times else None


def work(name: str, x: Inputs) -> Work:
    s, T, S, e = x.sizes, x.case.rows, x.case.length, x.dtype.itemsize
    H, D, Dv, K, Hi, Di = s.heads, s.head_dim, s.v_dim, s.topk, s.index_heads, s.index_dim
    q, kv, out, lse, slots = T * H * D * e, S * D * e, T * H * Dv * e, T * H * 4, T * K * 4
    index = T * Hi * Di * e + S * Di * e + T * Hi * 4
    pairs, visible = x.pairs, x.visible
    score, rows, index_rows = Hi * Di, pairs * D, pairs * Di
    if name == "step":
        parts = tuple(work(part, x) for part in STEP)
        total = {key: sum(getattr(part, key) for part in parts) for key in ("flops", "moved", "gathered", "reduced")}
        return Work(**total, parts=parts)
    return {
        "indexer_topk": Work(2 * visible * score, index + 2 * slots),
        "indexer_scores": Work(2 * pairs * score, index + 2 * slots, index_rows * e),
        "indexer_backward": Work(6 * pairs * score, 2 * index + 2 * slots, index_rows * e, index_rows * 4),
        "sparse_mla": Work(2 * pairs * H * (D + Dv), q + kv + out + lse + slots, rows * e),
        "sparse_mla_backward": Work(
            2 * pairs * H * (3 * D + 2 * Dv), 2 * (q + kv + out) + lse + slots, rows * e, rows * 4
        ),
        "attention_target": Work(2 * pairs * H * D, q + kv + lse + 2 * slots, rows * e),
        "indexer_kl": Work(6 * pairs, 3 * slots),
        "indexer_kl_backward": Work(4 * pairs, 4 * slots),
        "dense_indexer_kl": Work(2 * visible * (score + H * D), index + q + kv + lse),
        "dense_indexer_kl_backward": Work(2 * visible * (3 * score + H * D), 2 * index + q + kv + lse),
    }[name]
