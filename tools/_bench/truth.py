"""Float64 on some rows and keys of a case, and how far results are from it.

Rows stand alone in all ops, so a few of them show the whole result. The gradient of a key sums over all rows that
selected it: for three keys all of them are taken. The gradients of the dense loss sum over everything: they are
compared on a call with few rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .calls import Result, call
from .inputs import Inputs, some_rows

ROWS = 16
MOST_ROWS_OF_A_KEY = 16384
Errors = dict[str, float]
CHUNK = 32  # rows at a time


def relative(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius error; infinite where infinities are not in the same places."""
    got = got.double()
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return float("inf")
    got, want = got[finite], want[finite]
    return ((got - want).norm() / want.norm().clamp_min(1e-300)).item()


def at_rows(got: Result, rows: Tensor, want: dict[str, Tensor]) -> Errors:
    """Errors of the results that are there; `want` has the given rows."""
    return {name: relative(got[name][rows], truth) for name, truth in want.items() if name in got}


def some_keys(indices: Tensor) -> list[int]:
    """A key out of the middle of three rows' lists."""
    rows = indices[some_rows(indices.shape[0], 4, indices.device)[1:]]
    return sorted({int(row[row >= 0][int((row >= 0).sum()) // 2]) for row in rows if bool((row >= 0).any())})


class Attention:
    """sparse_mla and its gradients for given rows, [R, ...] in float64."""

    def __init__(self, x: Inputs, rows: Tensor, indices: Tensor):
        ids = indices[rows]
        self.empty = (ids < 0).unsqueeze(1)
        self.keys = x.kv[ids.clamp(min=0).long()].double()
        self.values = self.keys[..., : x.sizes.v_dim]
        self.q = x.q[rows].double()
        self.logits = x.scale * torch.einsum("rhd,rkd->rhk", self.q, self.keys)
        self.logits.masked_fill_(self.empty, -torch.inf)
        self.lse = self.logits.logsumexp(-1)
        self.p = (self.logits - self.lse.unsqueeze(-1)).exp()
        self.out = torch.einsum("rhk,rkd->rhd", self.p, self.values)
        self.scale = x.scale

    def backward(self, grad_out: Tensor) -> None:
        self.grad_out = grad_out.double()
        delta = (self.grad_out * self.out).sum(-1, keepdim=True)
        grad_p = torch.einsum("rhd,rkd->rhk", self.grad_out, self.values)
        self.grad_logits = self.scale * self.p * (grad_p - delta)

    @property
    def grad_q(self) -> Tensor:
        return torch.einsum("rhk,rkd->rhd", self.grad_logits, self.keys)

    def grad_of_slots(self, chosen: Tensor) -> Tensor:
        """[D]: what the chosen slots [R, K] contribute to their key's gradient."""
        grad = torch.einsum("rhk,rk,rhd->d", self.grad_logits, chosen.double(), self.q)
        grad[: self.values.shape[-1]] += torch.einsum("rhk,rk,rhd->d", self.p, chosen.double(), self.grad_out)
        return grad


class Index:
    """Index scores of given keys [R, N] and their gradients, float64."""

    def __init__(self, x: Inputs, rows: Tensor, ids: Tensor):
        self.q, self.weights = x.index_q[rows].double(), x.index_weights[rows].double()
        self.keys = x.index_k[ids.clamp(min=0).long()].double()
        self.products = torch.einsum("rhd,rkd->rhk", self.q, self.keys).relu()
        self.scores = torch.einsum("rhk,rh->rk", self.products, self.weights).masked_fill(ids < 0, -torch.inf)

    def backward(self, grad_scores: Tensor) -> dict[str, Tensor]:
        grad = grad_scores.double().unsqueeze(1)
        grad_products = grad * self.weights.unsqueeze(-1) * (self.products > 0)
        self.grad_of_keys = torch.einsum("rhk,rhd->rkd", grad_products, self.q)
        return {
            "q": torch.einsum("rhk,rkd->rhd", grad_products, self.keys),
            "weights": (grad * self.products).sum(-1),
        }


def kl(target: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """KL of each row and its gradient to the scores; empty slots have score -inf and target 0."""
    target = target / target.sum(-1, keepdim=True)
    log_p = scores.log_softmax(-1)
    each = torch.where(target > 0, target * (target.clamp_min(1e-300).log() - log_p), 0.0)
    return each.sum(-1), log_p.exp() - target


def rows_of(key: int, indices: Tensor) -> Tensor:
    return (indices == key).any(-1).nonzero().flatten()


def at_keys(got: Result, name: str, indices: Tensor, gradient: Callable[[Tensor, int], Tensor]) -> Errors:
    """Error of the gradients of a few keys; gradient(rows, key) is what these rows add to the truth of one."""
    keys = [key for key in some_keys(indices) if rows_of(key, indices).numel() <= MOST_ROWS_OF_A_KEY]
    if not keys or name not in got:
        return {}
    want = [torch.stack([gradient(rows, k) for rows in rows_of(k, indices).split(CHUNK)]).sum(0) for k in keys]
    return at_rows(got, torch.tensor(keys, device=indices.device), {name: torch.stack(want)})


def _kv_gradient(x: Inputs, indices: Tensor) -> Callable[[Tensor, int], Tensor]:
    def gradient(rows: Tensor, key: int) -> Tensor:
        a = Attention(x, rows, indices)
        a.backward(x.grad_out[rows])
        return a.grad_of_slots(indices[rows] == key)

    return gradient


def _topk(x: Inputs, got: Result) -> Errors:
    rows = some_rows(x.case.rows, ROWS, x.device)
    wanted, chosen, wrong = [], [], 0
    for row in rows.tolist():
        first, last = int(x.starts[row]), int(x.ends[row])
        ids = torch.arange(first, last, device=x.device)
        scores = Index(x, torch.tensor([row], device=x.device), ids.unsqueeze(0)).scores[0]
        picked = got["indices"][row]
        valid = picked >= 0
        count = min(x.sizes.topk, last - first)
        least, slack = scores.topk(count).values[-1], 1e-6 * scores.abs().max()
        seen = picked[valid].long().clamp(first, last - 1)
        # what float64 would not have taken, repeated or out of sight, or missing
        wrong += int((scores[seen - first] < least - slack).sum()) + int((seen != picked[valid]).sum())
        wrong += abs(count - seen.unique().numel())
        wanted.append(scores[seen - first])
        chosen.append(got["scores"][row][valid])
    return {"scores": relative(torch.cat(chosen), torch.cat(wanted)), "selection": float(wrong)}


def _scores(x: Inputs, got: Result) -> Errors:
    rows = some_rows(x.case.rows, ROWS, x.device)
    return at_rows(got, rows, {"scores": Index(x, rows, x.indices[rows]).scores})


def _index_backward(x: Inputs, got: Result) -> Errors:
    rows = some_rows(x.case.rows, ROWS, x.device)
    grads = Index(x, rows, x.indices[rows]).backward(x.grad_scores[rows].masked_fill(x.indices[rows] < 0, 0))

    def gradient(part: Tensor, key: int) -> Tensor:
        index = Index(x, part, torch.full((part.numel(), 1), key, device=x.device))
        index.backward((x.grad_scores[part] * (x.indices[part] == key)).sum(-1, keepdim=True))
        return index.grad_of_keys.sum((0, 1))

    want = {f"grad_{name}": grad for name, grad in grads.items()}
    return at_rows(got, rows, want) | at_keys(got, "grad_k", x.indices, gradient)


def _mla(x: Inputs, got: Result) -> Errors:
    rows = some_rows(x.case.rows, ROWS, x.device)
    a = Attention(x, rows, x.indices)
    return at_rows(got, rows, {"out": a.out, "lse": a.lse})


def _mla_backward(x: Inputs, got: Result) -> Errors:
    rows = some_rows(x.case.rows, ROWS, x.device)
    a = Attention(x, rows, x.indices)
    a.backward(x.grad_out[rows])
    found = at_rows(got, rows, {"grad_q": a.grad_q})
    return found | at_keys(got, "grad_kv", x.indices, _kv_gradient(x, x.indices))


def _target(x: Inputs, got: Result) -> Errors:
    rows = some_rows(x.case.rows, ROWS, x.device)
    a = Attention(x, rows, x.indices)
    want = (a.logits - x.lse[rows].double().unsqueeze(-1)).exp().sum(1)
    return at_rows(got, rows, {"target": want, "normalised": want / want.sum(-1, keepdim=True)})


def _kl(x: Inputs, got: Result) -> Errors:
    rows = some_rows(x.case.rows, ROWS, x.device)
    want, grad = kl(x.target[rows].double(), x.scores[rows].double())
    return at_rows(got, rows, {"kl": want, "grad_scores": grad * x.grad_kl[rows].double().unsqueeze(1)})


def _dense_rows(x: Inputs) -> list[tuple[Tensor, Tensor, Tensor, Index]]:
    """(row, KL, gradient to its scores, index scores of all visible keys) of four rows."""
    found = []
    for row in x.dense_rows.tolist():
        at = torch.tensor([row], device=x.device)
        ids = torch.arange(int(x.starts[row]), int(x.ends[row]), device=x.device).unsqueeze(0)
        logits = x.scale * torch.einsum("rhd,kd->rhk", x.q[at].double(), x.kv[ids[0]].double())
        target = (logits - x.dense_lse[at].double().unsqueeze(-1)).exp().sum(1)
        index = Index(x, at, ids)
        found.append((at, *kl(target, index.scores), index))
    return found


def _dense(x: Inputs, got: Result) -> Errors:
    return at_rows(got, x.dense_rows, {"kl": torch.cat([want for _, want, _, _ in _dense_rows(x)])})


def _dense_backward(x: Inputs, got: Result) -> Errors:
    small = call("dense_indexer_kl_backward", x.only(x.dense_rows))()
    grads: dict[str, list[Tensor]] = {"q": [], "weights": []}
    grad_k = torch.zeros_like(x.index_k, dtype=torch.float64)
    for at, _, grad_scores, index in _dense_rows(x):
        for name, grad in index.backward(grad_scores * x.grad_kl[at].double().unsqueeze(1)).items():
            grads[name].append(grad)
        grad_k[int(x.starts[at]) : int(x.ends[at])] += index.grad_of_keys[0]
    found = at_rows(got, x.dense_rows, {f"grad_index_{name}": torch.cat(want) for name, want in grads.items()})
    return found | {"grad_index_k": relative(small["grad_index_k"], grad_k)}


def _step(x: Inputs, got: Result) -> Errors:
    rows, indices = some_rows(x.case.rows, ROWS, x.device), got["indices"]
    a = Attention(x, rows, indices)
    a.backward(x.grad_out[rows])
    index = Index(x, rows, indices[rows])
    _, grad_scores = kl(a.p.sum(1), index.scores)
    grads = index.backward(grad_scores / x.case.rows)
    want = {"out": a.out, "lse": a.lse, "grad_q": a.grad_q}
    want |= {f"grad_index_{name}": grad for name, grad in grads.items()}
    return at_rows(got, rows, want) | at_keys(got, "grad_kv", indices, _kv_gradient(x, indices))


CHECKS: dict[str, Callable[[Inputs, Result], Errors]] = {
    "indexer_topk": _topk,
    "indexer_scores": _scores,
    "indexer_backward": _index_backward,
    "sparse_mla": _mla,
    "sparse_mla_backward": _mla_backward,
    "attention_target": _target,
    "indexer_kl": _kl,
    "indexer_kl_backward": _kl,
    "dense_indexer_kl": _dense,
    "dense_indexer_kl_backward": _dense_backward,
    "step": _step,
}


@torch.no_grad()
def errors(name: str, x: Inputs, got: Result) -> Errors:
    """Name of a result -> relative Frobenius error against float64; "selection" counts keys."""
    return CHECKS[name](x, got)


def wrong(found: Errors, dtype: torch.dtype) -> bool:
    """Far beyond what the precision explains."""
    limit = 3e-2 if dtype.itemsize == 2 else 1e-3
    return any(not error <= (0 if key == "selection" else limit) for key, error in found.items())
