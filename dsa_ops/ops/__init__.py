"""The ops of namespace `dsa`: importing this package registers them all."""

from dsa_ops.ops import (  # noqa: F401  (imported for their registrations)
    attention_target,
    dense_indexer_kl,
    indexer_kl,
    indexer_scores,
    indexer_topk,
    sparse_mla,
)
