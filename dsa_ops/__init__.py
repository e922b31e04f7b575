"""DeepSeek Sparse Attention for training, as PyTorch operators (torch.ops.dsa.*)."""

from dsa_ops import layouts, nn
from dsa_ops.api import (
    attention_target,
    dense_indexer_kl,
    explain,
    indexer_kl,
    indexer_scores,
    indexer_topk,
    sparse_mla,
)
from dsa_ops.dispatch import Explanation, backend, warmup
from dsa_ops.losses import attach_loss, indexer_loss
from dsa_ops.results import DenseIndexerKLOutput, IndexerTopkOutput, SparseMLAOutput

__version__ = "0.1.0"

__all__ = [
    "DenseIndexerKLOutput",
    "Explanation",
    "IndexerTopkOutput",
    "SparseMLAOutput",
    "attach_loss",
    "attention_target",
    "backend",
    "dense_indexer_kl",
    "explain",
    "indexer_kl",
    "indexer_loss",
    "indexer_scores",
    "indexer_topk",
    "layouts",
    "nn",
    "sparse_mla",
    "warmup",
]
