"""dsa::indexer_scores, and dsa::indexer_scores_backward, which serves dsa::indexer_topk too.

Meaning: api.indexer_scores.
"""

import torch

from dsa_ops.checks import (
    accumulation_dtype,
    check_ids,
    check_indexer_scores,
    check_indexer_scores_backward,
)
from dsa_ops.ops._register import no_second_derivative, register_op
from dsa_ops.unfused.indexer_scores import indexer_scores_backward_unfused, indexer_scores_unfused

_op = register_op(
    "indexer_scores",
    "(Tensor q, Tensor k, Tensor weights, Tensor indices, bool relu=True) -> Tensor",
    check=check_indexer_scores,
    validate=lambda q, k, weights, indices, relu: check_ids("indexer_scores", indices, k.shape[0]),
    outputs=lambda q, k, weights, indices, relu: q.new_empty(indices.shape, dtype=accumulation_dtype(q.dtype)),
    unfused=indexer_scores_unfused,
    flops=lambda q, k, weights, indices, relu: 2 * indices[0] * indices[1] * q[1] * (q[2] + 1),
    autocast=(0, 1),
)


def _backward_outputs(grad_scores, q, k, weights, indices, relu, need_q, need_k, need_weights):
    wanted = ((q, need_q), (k, need_k), (weights, need_weights))
    return tuple(x.new_empty(x.shape if need else 0) for x, need in wanted)


def _backward_flops(grad_scores, q, k, weights, indices, relu, need_q, need_k, need_weights):
    products = 1 + need_q + need_k  # the recomputed dot products, and one more for each wanted gradient
    return 2 * indices[0] * indices[1] * q[1] * (products * q[2] + need_weights)


_backward_op = register_op(
    "indexer_scores_backward",
    "(Tensor grad_scores, Tensor q, Tensor k, Tensor weights, Tensor indices, bool relu=True, bool need_q=True, "
    "bool need_k=True, bool need_weights=True) -> (Tensor grad_q, Tensor grad_k, Tensor grad_weights)",
    check=check_indexer_scores_backward,
    validate=lambda grad_scores, q, k, weights, indices, *_: check_ids("indexer_scores_backward", indices, k.shape[0]),
    outputs=_backward_outputs,
    unfused=indexer_scores_backward_unfused,
    flops=_backward_flops,
)
no_second_derivative(_backward_op, "indexer_scores", "indexer_topk")


def scores_gradients(ctx, grad_scores):
    """Gradients of q, k and weights (None where not needed) from what `save_for_scores_gradients` kept."""
    if grad_scores is None or not any(ctx.needs):
        return None, None, None
    q, k, weights, indices = ctx.saved_tensors
    grads = torch.ops.dsa.indexer_scores_backward.default(grad_scores, q, k, weights, indices, ctx.relu, *ctx.needs)
    return tuple(grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))


def save_for_scores_gradients(ctx, q, k, weights, indices, relu):
    ctx.set_materialize_grads(False)  # an unused output gives None, not a tensor of zeros
    ctx.relu, ctx.needs = relu, ctx.needs_input_grad[:3]
    ctx.save_for_backward(q, k, weights, indices)


_op.register_autograd(
    lambda ctx, grad_scores: (*scores_gradients(ctx, grad_scores), None, None),
    setup_context=lambda ctx, inputs, output: save_for_scores_gradients(ctx, *inputs),
)
