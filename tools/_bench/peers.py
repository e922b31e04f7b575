"""Other implementations of the same work. Each adapter prepares what the other side wants and returns a call.

What an adapter prepares (views, padded copies, lengths) is not timed. Results go by the names that this package's ops
give them, so that they are compared with the same truth; an adapter that returns none of those names is not compared.
"""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import dsa_ops

from . import calls
from .calls import Result
from .inputs import Inputs

Adapter = Callable[[Inputs], Callable[[], Result]]


class Unsuitable(Exception):
    """The peer does not do this case; the text says why."""


@dataclass(frozen=True)
class Peer:
    """`adapters`: name of a call in `calls.NAMES` -> adapter. `context`: other work, shown for orientation."""

    name: str
    adapters: dict[str, Adapter]
    module: str | None = None
    context: bool = False

    def missing(self) -> str | None:
        if self.module is None or importlib.util.find_spec(self.module):
            return None
        return f"module {self.module} is not installed"


def _need(holds: bool, reason: str) -> None:
    if not holds:
        raise Unsuitable(reason)


def _on_cuda(x: Inputs) -> None:
    _need(x.device.type == "cuda" and x.dtype == torch.bfloat16, "takes bfloat16 on CUDA only")


def _one_sequence(x: Inputs) -> None:
    _need(x.case.pattern != "packed" and x.case.rows == x.case.length, "takes one causal sequence with T = S only")


# ------------------------------------------------------------------------------------------------- FlashMLA, forward


def _flash_mla(with_length: bool) -> Adapter:
    def prepare(x: Inputs) -> Callable[[], Result]:
        _on_cuda(x)
        s = x.sizes
        _need(s.head_dim in (576, 512) and s.v_dim == 512, "takes widths 576/512 and 512/512 only")
        _need(s.topk % 128 == 0, "takes a topk that is a multiple of 128 only")
        _need(s.heads <= 128, "takes at most 128 heads")
        from flash_mla import flash_mla_sparse_fwd as forward

        heads = 64 if s.heads <= 64 else 128
        q = x.q if s.heads == heads else F.pad(x.q, (0, 0, 0, heads - s.heads))
        options = dict(d_v=s.v_dim, topk_length=x.topk_length if with_length else None)
        hopper = torch.cuda.get_device_capability(x.device)[0] == 9
        if hopper and "use_legacy" in inspect.signature(forward).parameters:  # one build keeps its Hopper kernel there
            options["use_legacy"] = True
        kv, indices = x.kv.unsqueeze(1), x.indices.unsqueeze(1)

        def run() -> Result:
            out, _, lse = forward(q, kv, indices, x.scale, **options)
            return {"out": out[:, : s.heads], "lse": lse[:, : s.heads]}

        return run

    return prepare


# ----------------------------------------------------------------------------------------------- cuDNN frontend, DSA


def _cudnn_topk(x: Inputs) -> Callable[[], Result]:
    """Dense scores, then top-k of them."""
    _on_cuda(x)
    _one_sequence(x)
    from cudnn.deepseek_sparse_attention import DSA

    q, k, weights = x.index_q.unsqueeze(0), x.index_k[None, :, None], x.index_weights.unsqueeze(0)

    def run() -> Result:
        scores = DSA.indexer_forward_wrapper(q, k, weights, ratio=1)["scores"][0]
        best = DSA.indexer_top_k_wrapper(scores, x.ends, x.sizes.topk)
        return {"indices": best["indices"], "scores": best["values"]}

    return run


def _cudnn_target(x: Inputs) -> Callable[[], Result]:
    _on_cuda(x)
    from cudnn.deepseek_sparse_attention import DSA

    q, kv, lse, indices = (y.unsqueeze(0) for y in (x.q, x.kv, x.lse, x.indices))

    def run() -> Result:
        options = dict(qhead_per_kv_head=x.sizes.heads)
        return {"normalised": DSA.sparse_attn_score_recompute_wrapper(q, kv, lse, indices, x.scale, **options)[0][0]}

    return run


def _cudnn_index_backward(x: Inputs) -> Callable[[], Result]:
    """Takes both distributions and writes their difference over the target: the first call alone is right."""
    _on_cuda(x)
    _need(x.sizes.index_heads >= 64, "takes 64 indexer heads or more")
    _need(x.sizes.topk % 128 == 0, "takes a topk that is a multiple of 128 only")
    from cudnn.deepseek_sparse_attention import DSA

    q, k, indices = (y.unsqueeze(0) for y in (x.index_q, x.index_k, x.indices))
    weights = x.index_weights.to(x.dtype).unsqueeze(0)  # of half precision only
    target = (x.target / x.target.sum(-1, keepdim=True)).unsqueeze(0)
    predicted, one = x.scores.softmax(-1).unsqueeze(0), torch.ones(1, device=x.device)

    def run() -> Result:
        grads = DSA.indexer_backward_wrapper(q, weights, k, target, predicted, indices, one)
        return {f"grad_{name}": grads[f"d_{other}"][0] for name, other in _CUDNN_GRADS.items()}

    return run


_CUDNN_GRADS = {"q": "index_q", "k": "index_k", "weights": "weights"}


def _cudnn_backward(x: Inputs) -> Callable[[], Result]:
    _on_cuda(x)
    _need(x.sizes.head_dim in (576, 512), "takes widths 576 and 512 only")
    from cudnn.deepseek_sparse_attention import DSA

    no_sink = torch.full((x.sizes.heads,), -torch.inf, device=x.device)
    tensors = (x.q, x.kv, x.out, x.grad_out, x.lse, no_sink, x.indices)

    def run() -> Result:
        grads = DSA.sparse_attention_backward_wrapper(*tensors, softmax_scale=x.scale, topk_length=x.topk_length)
        return {"grad_q": grads["dq"], "grad_kv": grads["dkv"]}

    return run


# --------------------------------------------------------------------------------------------- plain PyTorch, and ours


def _unfused(name: str) -> Adapter:
    return lambda x: dsa_ops.backend("unfused")(calls.call(name, x))


def _gathered(x: Inputs, q: Tensor, kv: Tensor) -> Tensor:
    """What one writes without this package; empty slots are masked by a bias."""
    keys = kv.index_select(0, x.indices.clamp(min=0).flatten()).view(*x.indices.shape, -1)
    bias = torch.zeros(x.indices.shape, device=x.device, dtype=x.dtype).masked_fill(x.indices < 0, -torch.inf)
    values = keys[:, None, :, : x.sizes.v_dim]
    return F.scaled_dot_product_attention(
        q[:, None], keys[:, None], values, attn_mask=bias[:, None, None], scale=x.scale
    )[:, 0]


def _plain(x: Inputs) -> Callable[[], Result]:
    return lambda: {"out": _gathered(x, x.q, x.kv)}


def _plain_backward(x: Inputs) -> Callable[[], Result]:
    """By autograd, through a graph that is made once."""
    q, kv = x.q.detach().requires_grad_(), x.kv.detach().requires_grad_()
    with torch.enable_grad():
        out = _gathered(x, q, kv)
    names = ("grad_q", "grad_kv")
    return lambda: dict(zip(names, torch.autograd.grad(out, (q, kv), x.grad_out, retain_graph=True), strict=True))


def _heads(x: Inputs) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[..., Tensor]]:
    """Dense attention as a model without sparsity runs it: every head with keys and values of its own."""
    _one_sequence(x)
    width, value = x.sizes.expanded
    shape = (1, x.sizes.heads, x.case.length)
    q, k = (torch.randn(*shape, width, device=x.device, dtype=x.dtype) for _ in range(2))
    v = torch.randn(*shape, value, device=x.device, dtype=x.dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # not the form that holds every probability
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    try:
        attend(q[:, :1, :64], k[:, :1, :64], v[:, :1, :64])
    except RuntimeError:  # equal widths it takes everywhere
        v = F.pad(v, (0, width - value))
    return (q, k, v), attend


def _dense(x: Inputs) -> Callable[[], Result]:
    tensors, attend = _heads(x)
    return lambda: {"dense": attend(*tensors)}


def _dense_backward(x: Inputs) -> Callable[[], Result]:
    tensors, attend = _heads(x)
    with torch.enable_grad():
        leaves = [y.requires_grad_() for y in tensors]
        out = attend(*leaves)
    grad = torch.randn_like(out)
    return lambda: {"dense": torch.autograd.grad(out, leaves, grad, retain_graph=True)[0]}


PEERS = (
    Peer("flash_mla", {"sparse_mla": _flash_mla(False)}, "flash_mla"),
    Peer("flash_mla_length", {"sparse_mla": _flash_mla(True)}, "flash_mla"),
    Peer(
        "cudnn",
        {
            "indexer_topk": _cudnn_topk,
            "indexer_backward": _cudnn_index_backward,
            "sparse_mla_backward": _cudnn_backward,
            "attention_target": _cudnn_target,
        },
        "cudnn",
    ),
    Peer("unfused", {name: _unfused(name) for name in calls.NAMES}),
    Peer("gather_sdpa", {"sparse_mla": _plain, "sparse_mla_backward": _plain_backward}),
    Peer("dense_sdpa", {"sparse_mla": _dense, "sparse_mla_backward": _dense_backward}, context=True),
)
NAMES = tuple(peer.name for peer in PEERS)
OWN = ("unfused", "gather_sdpa", "dense_sdpa")  # not somebody else's kernels
# The parts of a training step that somebody else has a kernel for. The KL is in that of the indexer's backward.
STEP = ("indexer_topk", "sparse_mla", "attention_target", "indexer_backward", "sparse_mla_backward")
