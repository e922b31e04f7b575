"""Multi-head latent attention with a lightning indexer: the attention layer of DeepSeek-V3.2 and GLM-5."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from dsa_ops import api
from dsa_ops.losses import attach_loss, indexer_loss

from .config import DSAConfig
from .dense import dense_attention, visible_lse
from .indexer import LightningIndexer
from .rotary import pair_tables, rotary_table, rotate

__all__ = ["MODES", "DSAttention", "DSAttentionOutput"]

MODES = ("dense", "warmup", "sparse", "frozen")


class DSAttentionOutput(NamedTuple):
    """What `DSAttention` returns.

    out: [T, hidden_size] or [B, L, hidden_size], with the indexer's loss attached where there is one.
    indices: int32 [T, K] or [B, L, K], the keys that were read; None in the modes that read all.
    loss: [], the attached loss, coefficient included, for logging (adding it to a loss counts it twice); else None.
    kl: [], the mean KL divergence behind it, without coefficient and gradient; else None.
    """

    out: Tensor
    indices: Tensor | None
    loss: Tensor | None
    kl: Tensor | None


torch.serialization.add_safe_globals([DSAttentionOutput])  # torch.load refuses a NamedTuple that it does not know
_pytree._register_namedtuple(DSAttentionOutput, serialized_type_name="dsa_ops.nn.DSAttentionOutput")


class DSAttention(nn.Module):
    """Self-attention over the keys that the layer's indexer, or another layer's, selected.

    Parameters have the names of the published checkpoints: `q_a_proj`, `q_a_layernorm`, `q_b_proj`,
    `kv_a_proj_with_mqa`, `kv_a_layernorm`, `kv_b_proj`, `o_proj`, `indexer.*` and, with config.sink, `sinks`.

    `mode` is one of
        "dense"   attention over all visible keys; the indexer does not run.
        "warmup"  the same, and the indexer learns attention's distribution over all visible keys.
        "sparse"  attention over the `index_topk` keys with the highest index score, on the latent rows; the indexer
                  learns attention's distribution over those keys.
        "frozen"  the same without the loss, the indexer without gradient.
    `set_mode` sets it for a whole model together with what is trainable.

    The indexer sees hidden states and low-rank queries detached: it learns from its loss alone, and nothing else learns
    from that loss. The loss rides on `out` (`dsa_ops.attach_loss`), so `backward` of any loss of the model includes it,
    with gradient 1 or `loss_scale`. It is computed in training mode and wherever gradients are enabled; `eval()` under
    `no_grad` leaves it out. A layer with `has_indexer=False` has none and reads the `indices` it is given.
    """

    def __init__(
        self,
        config: DSAConfig,
        *,
        has_indexer: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, DSAConfig):
            raise TypeError(f"DSAttention: config must be a DSAConfig, got {type(config).__name__}")
        self.config = config
        self._mode = "dense"

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        heads, latent = config.num_heads, config.kv_lora_rank
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank, config.attention_bias)
        self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=config.norm_eps, device=device, dtype=dtype)
        self.q_b_proj = linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, latent + config.qk_rope_head_dim, config.attention_bias)
        self.kv_a_layernorm = nn.RMSNorm(latent, eps=config.norm_eps, device=device, dtype=dtype)
        self.kv_b_proj = linear(latent, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = linear(heads * config.v_head_dim, config.hidden_size, config.attention_bias)
        if config.sink:
            self.sinks = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype))
        else:
            self.register_parameter("sinks", None)
        self.indexer = LightningIndexer(config, device=device, dtype=dtype) if has_indexer else None

    @property
    def mode(self) -> str:
        """Stage of training; see the class."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"DSAttention: mode must be one of {', '.join(MODES)}, got {mode!r}")
        self._mode = mode

    def extra_repr(self) -> str:
        return f"mode={self._mode!r}, {self.config}"

    def forward(
        self,
        x: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        starts: Tensor | None = None,
        ends: Tensor | None = None,
        indices: Tensor | None = None,
        row_mask: Tensor | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
        loss_scale: Tensor | None = None,
    ) -> DSAttentionOutput:
        """Attention of every token over keys of its own sequence.

        Args:
            x [T, hidden_size] packed or [B, L, hidden_size] batched: hidden states.
            position_embeddings: (cos, sin) as from `rotary_table`, [T, R / 2], [L, R / 2] or [B, L, R / 2] for
                R = qk_rope_head_dim; R columns are taken too if the second half repeats the first. Default: the row
                number in the sequence, without bounds, or the distance from the row's first visible key, with bounds.
            starts, ends [T] or [B, L]: int32 or int64 bounds of the keys that a row may see, in rows of x (of its own
                sequence when batched); default causal. See `dsa_ops.layouts`.
            indices [T, K] or [B, L, K]: int32 or int64 keys to read, from another layer or elsewhere, in modes sparse
                and frozen. The indexer does not run and there is no loss. They are read as they are: bounds are not
                applied to them.
            row_mask [T] or [B, L]: bool, the rows that count in the loss; default all.
            gather: context parallel: takes what belongs to the keys of this rank's rows, [T, W], and returns the same
                for the keys of all ranks in global order, [S, W], with a gradient. It is called for the latent rows
                with their rotated columns, W = kv_lora_rank + qk_rope_head_dim, and then, where the indexer runs, for
                the index keys, W = index_head_dim. Every rank calls in the same order. x must be packed, starts, ends
                and indices speak of global key rows, and position_embeddings are those of this rank's rows, must be
                given if the layer rotates. The loss is the mean over this rank's rows. See docs/layouts.md.
            loss_scale: floating-point tensor of one element, the gradient that the attached loss gets: what the main
                loss is multiplied with before `backward`, such as a gradient scaler's scale over the number of
                micro-batches. Its value at backward time counts. Default 1.

        A row without a key gives 0 before the output projection.

        Raises ValueError or TypeError where a shape, dtype or device does not fit, or indices are missing or not
        expected.
        """
        self._check(x, starts, ends, indices, row_mask)
        if gather is not None:
            self._check_gather(gather, x, starts, position_embeddings)
        if loss_scale is not None:
            _check_loss_scale(loss_scale, x)
        config = self.config
        table = self._table(x, position_embeddings, starts)
        q_resid = _normed(self.q_a_layernorm, self.q_a_proj(x))
        q = self.q_b_proj(q_resid).unflatten(-1, (config.num_heads, config.qk_head_dim))
        q_nope, q_rope = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((config.kv_lora_rank, config.qk_rope_head_dim), -1)
        latent = _normed(self.kv_a_layernorm, latent)
        if table is not None:
            cos, sin = table
            q_rope = rotate(q_rope, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved=config.rope_interleaved)
            k_rope = rotate(k_rope, cos, sin, interleaved=config.rope_interleaved)
        if self._mode in ("dense", "warmup"):
            q = torch.cat((q_nope, q_rope), -1)
            heads, loss, kl = self._dense(x, q_resid, table, q, latent, k_rope, starts, ends, row_mask, gather)
        else:
            heads, indices, loss, kl = self._sparse(
                x, q_resid, table, q_nope, q_rope, latent, k_rope, starts, ends, indices, row_mask, gather
            )
        out = self.o_proj(heads.flatten(-2))
        if loss is not None and loss.requires_grad:
            out = attach_loss(out, loss, loss_scale)
        return DSAttentionOutput(out, indices, loss, kl)

    def _dense(
        self,
        x: Tensor,
        q_resid: Tensor,
        table: tuple[Tensor, Tensor] | None,
        q: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        starts: Tensor | None,
        ends: Tensor | None,
        row_mask: Tensor | None,
        gather: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Keys and values expanded per head: at every key read by every row, cheaper than wide latent products."""
        config = self.config
        if gather is not None:
            kv = _gathered(gather, "latent rows", torch.cat((latent, k_rope), -1))
            latent, k_rope = kv.split((config.kv_lora_rank, config.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(latent).unflatten(-1, (config.num_heads, config.qk_nope_head_dim + config.v_head_dim))
        k_nope, v = kv.split((config.qk_nope_head_dim, config.v_head_dim), -1)
        k = torch.cat((k_nope, k_rope.unsqueeze(-2).expand(*k_nope.shape[:-1], -1)), -1)
        packed = x.dim() == 2

        def batch(t: Tensor) -> Tensor:
            return t.unsqueeze(0) if packed else t

        low, high = None if starts is None else batch(starts), None if ends is None else batch(ends)
        heads = dense_attention(
            batch(q), batch(k), batch(v), softmax_scale=config.scale, starts=low, ends=high, sinks=self.sinks
        )
        heads = heads.squeeze(0) if packed else heads
        if self._mode == "dense" or self.indexer is None or not self._learns():
            return heads, None, None
        q, k = q.detach(), k.detach()
        lse = visible_lse(batch(q), batch(k), softmax_scale=config.scale, starts=low, ends=high)
        lse = lse.squeeze(0) if packed else lse
        row_weight = None
        if row_mask is not None:
            row_weight = row_mask.to(lse.dtype) / row_mask.sum().clamp(min=1)
        index_q, index_k, weights = self.indexer(x.detach(), q_resid.detach(), table)
        index_k = _gathered(gather, "index keys", index_k, latent.shape[0])
        mean = api.dense_indexer_kl(
            index_q,
            index_k,
            weights,
            q,
            k,
            lse,
            starts=starts,
            ends=ends,
            softmax_scale=config.scale,
            row_weight=row_weight,
            relu=config.index_relu,
        ).loss
        return heads, mean * config.loss_coeff, mean.detach()

    def _sparse(
        self,
        x: Tensor,
        q_resid: Tensor,
        table: tuple[Tensor, Tensor] | None,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        starts: Tensor | None,
        ends: Tensor | None,
        indices: Tensor | None,
        row_mask: Tensor | None,
        gather: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Absorbed: queries carried into the latent space, so that a key is one row for all heads."""
        config = self.config
        kv = _gathered(gather, "latent rows", torch.cat((latent, k_rope), -1))
        scores = None
        if indices is None:
            if self.indexer is None:
                raise ValueError(
                    f"DSAttention: indices must be given in mode {self._mode!r} to a layer without an indexer, got None"
                )
            learns = self._mode == "sparse"
            # Nothing reads the scores of a frozen indexer: without a graph they are cheaper, which an exported program
            # need not be told. torch.export.load refuses what `set_grad_enabled` leaves in it.
            with nullcontext() if learns or torch.compiler._is_exporting_flag else torch.no_grad():
                selected = self.indexer.select(
                    x.detach(),
                    q_resid.detach(),
                    table,
                    starts=starts,
                    ends=ends,
                    gather=None if gather is None else partial(_gathered, gather, "index keys", keys=kv.shape[0]),
                )
            indices = selected.indices
            scores = selected.scores if learns and self._learns() else None
        # [H, nope + v, latent]
        up = self.kv_b_proj.weight.unflatten(0, (config.num_heads, -1))
        up_k, up_v = up.split((config.qk_nope_head_dim, config.v_head_dim), 1)
        q = torch.cat((torch.einsum("...hn,hnr->...hr", q_nope, up_k), q_rope), -1)
        sink = None if self.sinks is None else self.sinks.to(torch.promote_types(self.sinks.dtype, torch.float32))
        out, lse = api.sparse_mla(q, kv, indices, config.scale, config.kv_lora_rank, sink=sink)
        heads = torch.einsum("...hr,hvr->...hv", out, up_v)
        if scores is None:
            return heads, indices, None, None
        mean = indexer_loss(q.detach(), kv.detach(), lse.detach(), indices, scores, config.scale, row_mask=row_mask)
        return heads, indices, mean * config.loss_coeff, mean.detach()

    def _learns(self) -> bool:
        # training counts without gradients too: reentrant checkpointing runs its first forward that way
        return self.training or torch.is_grad_enabled()

    def _table(
        self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, starts: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        if not self.config.rotates:
            return None
        rope_dim = self.config.qk_rope_head_dim
        if position_embeddings is not None:
            return pair_tables("DSAttention", position_embeddings, x, rope_dim)
        positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.int32)
        if starts is not None:
            positions = positions - starts
        return rotary_table(positions, rope_dim, self.config.rope_theta)

    def _check(
        self,
        x: Tensor,
        starts: Tensor | None,
        ends: Tensor | None,
        indices: Tensor | None,
        row_mask: Tensor | None,
    ) -> None:
        _check_tensor("x", x)
        if x.dim() not in (2, 3) or x.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"DSAttention: x must be [T, {self.config.hidden_size}] or [B, L, {self.config.hidden_size}], "
                f"got {list(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(f"DSAttention: x must be a floating-point tensor, got {x.dtype}")
        _check_fits("x", x, self.q_a_proj)
        rows = list(x.shape[:-1])
        if (starts is None) != (ends is None):
            raise ValueError(
                f"DSAttention: starts and ends must be given together, got {'starts' if ends is None else 'ends'} alone"
            )
        ids = (torch.int32, torch.int64)
        for name, value, dtypes in (
            ("starts", starts, ids),
            ("ends", ends, ids),
            ("row_mask", row_mask, (torch.bool,)),
        ):
            if value is None:
                continue
            _check_tensor(name, value)
            if list(value.shape) != rows:
                raise ValueError(f"DSAttention: {name} must be of shape {rows} like x, got {list(value.shape)}")
            if value.dtype not in dtypes:
                raise TypeError(f"DSAttention: {name} must be {' or '.join(map(str, dtypes))}, got {value.dtype}")
            _check_device(name, value, x)
        if indices is None:
            return
        if self._mode in ("dense", "warmup"):
            raise ValueError(f"DSAttention: indices must be None in mode {self._mode!r}, which reads every visible key")
        _check_tensor("indices", indices)
        if indices.dim() != x.dim() or list(indices.shape[:-1]) != rows or indices.shape[-1] < 1:
            raise ValueError(f"DSAttention: indices must be of shape {rows} + [K], got {list(indices.shape)}")
        if indices.dtype not in ids:
            raise TypeError(f"DSAttention: indices must be int32 or int64, got {indices.dtype}")
        _check_device("indices", indices, x)

    def _check_gather(
        self,
        gather: Callable[[Tensor], Tensor],
        x: Tensor,
        starts: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None,
    ) -> None:
        if not callable(gather):
            raise TypeError(f"DSAttention: gather must be callable, got {type(gather).__name__}")
        if x.dim() != 2:
            raise ValueError(f"DSAttention: x must be packed, [T, {x.shape[-1]}], with gather, got {list(x.shape)}")
        if starts is None:
            raise ValueError("DSAttention: starts and ends must be given with gather, in global key rows, got None")
        if position_embeddings is None and self.config.rotates:
            raise ValueError(
                "DSAttention: position_embeddings must be given with gather, at the positions of this rank's rows, "
                "got None"
            )


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"DSAttention: {name} must be a tensor, got {type(value).__name__}")
    if value.is_nested:
        raise TypeError(f"DSAttention: {name} must be a strided tensor, got a nested one (see dsa_ops.layouts)")


def _check_fits(name: str, x: Tensor, linear: nn.Module) -> None:
    """Dtype and device of x against the weight it meets first, where that is plain to see.

    Wrappers, subclasses and hooks may bring the weight along, or cast x, when the module is called.
    """
    if type(linear) is not nn.Linear or linear._forward_pre_hooks or linear.weight.is_meta:
        return
    weight = linear.weight
    if x.device != weight.device:
        raise ValueError(f"DSAttention: {name} must be on {weight.device} like the parameters, got {x.device}")
    if x.dtype == weight.dtype:
        return
    # autocast makes one dtype of them, but leaves float64 alone
    if torch.float64 in (x.dtype, weight.dtype) or not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"DSAttention: {name} must be {weight.dtype} like the parameters, got {x.dtype}")


def _check_loss_scale(value: object, x: Tensor) -> None:
    want = "a floating-point tensor of one element"
    if not isinstance(value, Tensor):
        raise TypeError(f"DSAttention: loss_scale must be {want}, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"DSAttention: loss_scale must be {want}, got {value.dtype}")
    if value.numel() != 1:
        raise ValueError(f"DSAttention: loss_scale must be {want}, got {list(value.shape)}")
    if value.dim() or value.device.type != "cpu":  # a CPU scalar goes everywhere
        _check_device("loss_scale", value, x)


def _check_device(name: str, value: Tensor, x: Tensor) -> None:
    if value.device != x.device:
        raise ValueError(f"DSAttention: {name} must be on {x.device} like x, got {value.device}")


def _gathered(gather: Callable[[Tensor], Tensor] | None, what: str, x: Tensor, keys: int | None = None) -> Tensor:
    """What all ranks have of `what`, of which x [T, W] is this rank's; `keys` rows of it where that is known."""
    if gather is None:
        return x
    got = gather(x)
    if not isinstance(got, Tensor):
        raise TypeError(f"DSAttention: gather must return a tensor for the {what}, got {type(got).__name__}")
    if got.dim() != 2 or got.shape[1] != x.shape[1] or (keys is not None and got.shape[0] != keys):
        rows = "S" if keys is None else keys
        raise ValueError(
            f"DSAttention: gather must return [{rows}, {x.shape[1]}] for the {what} of shape {list(x.shape)}, "
            f"got {list(got.shape)}"
        )
    if got.dtype != x.dtype:
        raise TypeError(f"DSAttention: gather must return {x.dtype} for the {what}, got {got.dtype}")
    _check_device(f"what gather returns for the {what}", got, x)
    return got


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    # under autocast x is narrower than the weight, which torch's fused norm does not take
    return norm(x.to(norm.weight.dtype)).to(x.dtype)
