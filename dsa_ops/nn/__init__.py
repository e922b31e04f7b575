"""Layers that put the operators together: optional, plain `torch.nn`, parameters named as in published checkpoints."""

from .attention import DSAttention, DSAttentionOutput
from .config import DSAConfig, deepseek_v32, glm5
from .indexer import LightningIndexer
from .modes import indexer_parameters, set_mode
from .rotary import rotary_table

__all__ = [
    "DSAConfig",
    "DSAttention",
    "DSAttentionOutput",
    "LightningIndexer",
    "deepseek_v32",
    "glm5",
    "indexer_parameters",
    "rotary_table",
    "set_mode",
]
