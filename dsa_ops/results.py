"""Results of the public functions that return more than one tensor, named as in the op schemas."""

from typing import NamedTuple

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


# torch.export.save refuses a NamedTuple whose class it does not know
for _cls in (IndexerTopkOutput, SparseMLAOutput, DenseIndexerKLOutput):
    _pytree._register_namedtuple(_cls, serialized_type_name=f"dsa_ops.{_cls.__name__}")
