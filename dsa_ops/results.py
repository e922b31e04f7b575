"""Results of the public functions that return more than one tensor, named as in the op schemas."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree


class IndexerTopkOutput(NamedTuple):
    """indices [T, K] int32, ascending, -1 in empty slots; scores [T, K] float32, -inf in empty slots."""

    indices: Tensor
    scores: Tensor


class SparseMLAOutput(NamedTuple):
    """out [T, H, Dv] in q's dtype; lse [T, H] float32, natural logarithm, softmax_scale included, sink excluded."""

    out: Tensor
    lse: Tensor


class DenseIndexerKLOutput(NamedTuple):
    """loss [], the weighted sum; kl [T], its terms before weighting (not differentiable)."""

    loss: Tensor
    kl: Tensor


_RESULTS = (IndexerTopkOutput, SparseMLAOutput, DenseIndexerKLOutput)
# torch.export.save and torch.load refuse a NamedTuple whose class they do not know
torch.serialization.add_safe_globals([*_RESULTS])
for _cls in _RESULTS:
    _pytree._register_namedtuple(_cls, serialized_type_name=f"dsa_ops.{_cls.__name__}")
