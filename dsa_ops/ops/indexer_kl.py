"""dsa::indexer_kl and dsa::indexer_kl_backward. Meaning: api.indexer_kl."""

import torch

from dsa_ops.checks import accumulation_dtype, check_indexer_kl, check_indexer_kl_backward
from dsa_ops.ops._register import no_second_derivative, register_op
from dsa_ops.unfused.indexer_kl import indexer_kl_backward_unfused, indexer_kl_unfused

_op = register_op(
    "indexer_kl",
    "(Tensor target, Tensor scores, Tensor indices) -> Tensor",
    check=check_indexer_kl,
    outputs=lambda target, scores, indices: target.new_empty(target.shape[0], dtype=accumulation_dtype(target.dtype)),
    unfused=indexer_kl_unfused,
    flops=lambda target, scores, indices: 6 * target[0] * target[1],
)

_backward_op = register_op(
    "indexer_kl_backward",
    "(Tensor grad_kl, Tensor target, Tensor scores, Tensor indices) -> Tensor",
    check=check_indexer_kl_backward,
    outputs=lambda grad_kl, target, scores, indices: scores.new_empty(scores.shape),
    unfused=indexer_kl_backward_unfused,
    flops=lambda grad_kl, target, scores, indices: 4 * target[0] * target[1],
)
no_second_derivative(_backward_op, "indexer_kl")


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.needs_scores = ctx.needs_input_grad[1]
    if not ctx.needs_scores:  # the target gets no gradient: there is nothing to go back to, and nothing to keep
        ctx.mark_non_differentiable(output)
        return
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_kl):
    if grad_kl is None or not ctx.needs_scores:
        return None, None, None
    return None, torch.ops.dsa.indexer_kl_backward.default(grad_kl, *ctx.saved_tensors), None


_op.register_autograd(_backward, setup_context=_setup_context)
