"""The lightning indexer: a small attention of its own that says which keys the large one should read."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsa_ops import api
from dsa_ops.results import IndexerTopkOutput

from .config import DSAConfig
from .rotary import hadamard, pair_tables, rotate_slice

__all__ = ["LightningIndexer"]


class LightningIndexer(nn.Module):
    """Index queries, keys and head weights from hidden states, and the selection made with them.

    Parameters are named as in the published checkpoints: `wq_b`, `wk`, `k_norm` (LayerNorm with bias), `weights_proj`.
    Nothing here detaches its inputs: `DSAttention` does before it calls.
    """

    def __init__(
        self, config: DSAConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        heads, width = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, heads * width, bias=False, device=device, dtype=dtype)
        self.wk = nn.Linear(config.hidden_size, width, bias=False, device=device, dtype=dtype)
        self.k_norm = nn.LayerNorm(width, eps=config.index_norm_eps, device=device, dtype=dtype)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False, device=device, dtype=dtype)

    def forward(
        self, hidden: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [..., Hi, Di], k [..., Di] and float32 weights [..., Hi] for `dsa_ops.indexer_topk`.

        Args:
            hidden [..., hidden_size]: hidden states, packed [T, ...] or batched [B, L, ...].
            q_resid [..., q_lora_rank]: attention's normalised low-rank query.
            position_embeddings: (cos, sin), see `rotary_table`; may be None only where the layer rotates nothing.

        Hi ** -0.5 * Di ** -0.5 is folded into weights: the score is sum_h weights[h] * relu(q[h] . k).
        """
        config = self.config
        for name, x, width in (("hidden", hidden, config.hidden_size), ("q_resid", q_resid, config.q_lora_rank)):
            if not isinstance(x, Tensor):
                raise TypeError(f"LightningIndexer: {name} must be a tensor, got {type(x).__name__}")
            if x.dim() < 1 or x.shape[-1] != width or x.shape[:-1] != hidden.shape[:-1]:
                tokens = "..." if x is hidden else ", ".join(map(str, hidden.shape[:-1]))
                raise ValueError(f"LightningIndexer: {name} must be of shape [{tokens}, {width}], got {list(x.shape)}")
        q = self.wq_b(q_resid).unflatten(-1, (config.index_n_heads, config.index_head_dim))
        k = self.k_norm(self.wk(hidden)).to(q.dtype)
        if config.rotates:
            if position_embeddings is None:
                raise ValueError("LightningIndexer: position_embeddings must be (cos, sin) with rope=True, got None")
            cos, sin = pair_tables("LightningIndexer", position_embeddings, hidden, config.qk_rope_head_dim)
            first, interleaved = config.index_rope_first, config.index_rope_interleaved
            q = rotate_slice(q, cos.unsqueeze(-2), sin.unsqueeze(-2), first=first, interleaved=interleaved)
            k = rotate_slice(k, cos, sin, first=first, interleaved=interleaved)
        if config.index_hadamard:
            q, k = hadamard(q), hadamard(k)
        # float32 whatever the rest is kept in: checkpoints store this projection in float32 beside bfloat16
        weights = F.linear(hidden.to(self.weights_proj.weight.dtype), self.weights_proj.weight)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return q, k, weights * (config.index_n_heads * config.index_head_dim) ** -0.5

    def select(
        self,
        hidden: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        *,
        starts: Tensor | None = None,
        ends: Tensor | None = None,
        topk: int | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> IndexerTopkOutput:
        """The `topk` (default `config.index_topk`) best visible keys of every token, see `dsa_ops.indexer_topk`.

        gather: makes the index keys of all ranks [S, Di] of this rank's [T, Di]; see `DSAttention`.
        """
        q, k, weights = self(hidden, q_resid, position_embeddings)
        if gather is not None:
            k = gather(k)
        topk = self.config.index_topk if topk is None else topk
        return api.indexer_topk(q, k, weights, starts=starts, ends=ends, topk=topk, relu=self.config.index_relu)
