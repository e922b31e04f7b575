"""The numbers of one attention layer, and the published ones."""

import math
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["DSAConfig", "deepseek_v32", "glm5"]

_SIZES = (
    "hidden_size",
    "num_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
)
_SWITCHES = (
    "rope",
    "rope_interleaved",
    "index_rope_interleaved",
    "index_rope_first",
    "index_hadamard",
    "index_relu",
    "sink",
    "attention_bias",
)


@dataclass(frozen=True)
class DSAConfig:
    """One layer of multi-head latent attention with a lightning indexer.

    hidden_size, num_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: widths of the
        attention, named as in the published configurations. qk_rope_head_dim may be 0 (no rotated columns).
    index_n_heads, index_head_dim, index_topk: the indexer's heads, their width, and the keys it keeps per query.
    rope_theta: base of the rotation angles, used where the caller hands in no `position_embeddings`.
    rope: False rotates nothing in this layer, attention and indexer alike; widths stay.
    rope_interleaved, index_rope_interleaved: a rotated pair is two neighbouring columns (True), or column i of the
        first half with column i of the second (False); for attention and for the indexer.
    index_rope_first: the rotated qk_rope_head_dim columns of an index head are its first (True) or its last ones.
    index_hadamard: rotate index queries and keys by the orthonormal Hadamard matrix, which leaves their products
        unchanged and spreads outliers before a low-precision product; index_head_dim must be a power of two.
    index_relu: relu on the products inside the index score.
    sink: one learned logit per head in the softmax denominator.
    attention_bias: biases on q_a_proj, kv_a_proj_with_mqa and o_proj.
    norm_eps, index_norm_eps: of the two RMSNorms on the latents, and of the LayerNorm on the index key.
    softmax_scale: default (qk_nope_head_dim + qk_rope_head_dim) ** -0.5.
    loss_coeff: multiplies the indexer's loss.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float = 10000.0
    rope: bool = True
    rope_interleaved: bool = True
    index_rope_interleaved: bool = False
    index_rope_first: bool = True
    index_hadamard: bool = False
    index_relu: bool = True
    sink: bool = False
    attention_bias: bool = False
    norm_eps: float = 1e-6
    index_norm_eps: float = 1e-6
    softmax_scale: float | None = None
    loss_coeff: float = 1.0

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"DSAConfig: {name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"DSAConfig: {name} must be at least 1, got {value}")
        rope_dim = self.qk_rope_head_dim
        if not isinstance(rope_dim, int) or isinstance(rope_dim, bool):
            raise TypeError(f"DSAConfig: qk_rope_head_dim must be an int, got {rope_dim!r}")
        if rope_dim < 0 or rope_dim % 2:
            raise ValueError(f"DSAConfig: qk_rope_head_dim must be even and at least 0, got {rope_dim}")
        if rope_dim > self.index_head_dim:
            raise ValueError(
                f"DSAConfig: index_head_dim must be at least qk_rope_head_dim = {rope_dim}, got {self.index_head_dim}"
            )
        if self.index_hadamard and self.index_head_dim & (self.index_head_dim - 1):
            raise ValueError(
                f"DSAConfig: index_head_dim must be a power of two with index_hadamard, got {self.index_head_dim}"
            )

    def _check_numbers(self) -> None:
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"DSAConfig: {name} must be a bool, got {value!r}")
        for name in ("rope_theta", "norm_eps", "index_norm_eps", "softmax_scale", "loss_coeff"):
            value = getattr(self, name)
            if name == "softmax_scale" and value is None:
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"DSAConfig: {name} must be a float, got {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"DSAConfig: {name} must be finite, got {value}")
            if name == "rope_theta" and value <= 0:
                raise ValueError(f"DSAConfig: {name} must be above 0, got {value}")
            if name.endswith("eps") and value < 0:
                raise ValueError(f"DSAConfig: {name} must be at least 0, got {value}")

    @property
    def qk_head_dim(self) -> int:
        """Width of one attention query or expanded key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """What multiplies q . k before the softmax."""
        return self.qk_head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def rotates(self) -> bool:
        """Whether any column of this layer is rotated."""
        return self.rope and self.qk_rope_head_dim > 0


def deepseek_v32(**overrides: Any) -> DSAConfig:
    """DeepSeek-V3.2: half-split rotation in the indexer, interleaved in attention.

    The released model extends its context by rescaled angles (YaRN, factor 40): for its weights hand in such a table as
    `position_embeddings` and set `softmax_scale` to 192 ** -0.5 * (0.1 * ln(40) + 1) ** 2.
    """
    return replace(
        DSAConfig(
            hidden_size=7168,
            num_heads=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=2048,
        ),
        **overrides,
    )


def glm5(**overrides: Any) -> DSAConfig:
    """GLM-5: interleaved rotation in the indexer and in attention, base 1e6."""
    return replace(
        DSAConfig(
            hidden_size=6144,
            num_heads=64,
            q_lora_rank=2048,
            kv_lora_rank=512,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
            index_n_heads=32,
            index_head_dim=128,
            index_topk=2048,
            rope_theta=1e6,
            index_rope_interleaved=True,
        ),
        **overrides,
    )
