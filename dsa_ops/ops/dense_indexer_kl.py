"""dsa::dense_indexer_kl and dsa::dense_indexer_kl_backward. Meaning: api.dense_indexer_kl."""

import torch

from dsa_ops.checks import accumulation_dtype, check_dense_indexer_kl, check_dense_indexer_kl_backward
from dsa_ops.ops._register import no_second_derivative, register_op
from dsa_ops.unfused.dense_indexer_kl import dense_indexer_kl_backward_unfused, dense_indexer_kl_unfused


def _outputs(index_q, *_):
    dtype = accumulation_dtype(index_q.dtype)
    return index_q.new_empty((), dtype=dtype), index_q.new_empty(index_q.shape[0], dtype=dtype)


_op = register_op(
    "dense_indexer_kl",
    "(Tensor index_q, Tensor index_k, Tensor index_weights, Tensor q, Tensor k, Tensor lse, Tensor starts, "
    "Tensor ends, float softmax_scale, Tensor row_weight, bool relu=True, SymInt total_heads=0) "
    "-> (Tensor loss, Tensor kl)",
    check=check_dense_indexer_kl,
    outputs=_outputs,
    unfused=dense_indexer_kl_unfused,
    flops=lambda index_q, index_k, index_weights, q, *_: (
        2 * q[0] * index_k[0] * (index_q[1] * (index_q[2] + 1) + q[1] * q[2])
    ),
    autocast=(0, 1, 3, 4),
)


def _backward_outputs(grad_loss, index_q, index_k, index_weights, *rest):
    wanted = zip((index_q, index_k, index_weights), rest[-3:], strict=True)
    return tuple(x.new_empty(x.shape if need else 0) for x, need in wanted)


def _backward_flops(grad_loss, index_q, index_k, index_weights, q, *rest):
    need_q, need_k, need_weights = rest[-3:]
    index = index_q[1] * ((2 + need_q + need_k) * index_q[2] + 1 + need_weights)
    return 2 * q[0] * index_k[0] * (index + q[1] * q[2])


_backward_op = register_op(
    "dense_indexer_kl_backward",
    "(Tensor grad_loss, Tensor index_q, Tensor index_k, Tensor index_weights, Tensor q, Tensor k, Tensor lse, "
    "Tensor starts, Tensor ends, float softmax_scale, Tensor row_weight, bool relu=True, SymInt total_heads=0, "
    "bool need_q=True, bool need_k=True, bool need_weights=True) "
    "-> (Tensor grad_index_q, Tensor grad_index_k, Tensor grad_index_weights)",
    check=check_dense_indexer_kl_backward,
    outputs=_backward_outputs,
    unfused=dense_indexer_kl_backward_unfused,
    flops=_backward_flops,
)
no_second_derivative(_backward_op, "dense_indexer_kl")


def _setup_context(ctx, inputs, output):
    *tensors, ctx.softmax_scale, row_weight, ctx.relu, ctx.total_heads = inputs
    ctx.set_materialize_grads(False)
    ctx.needs = ctx.needs_input_grad[:3]
    if not any(ctx.needs):  # the teacher alone requires grad: there is nothing to go back to, and nothing to keep
        ctx.mark_non_differentiable(*output)
        return
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, row_weight)


def _backward(ctx, grad_loss, grad_kl):
    if grad_loss is None or not any(ctx.needs):
        return (None,) * 12
    *tensors, row_weight = ctx.saved_tensors
    grads = torch.ops.dsa.dense_indexer_kl_backward.default(
        grad_loss, *tensors, ctx.softmax_scale, row_weight, ctx.relu, ctx.total_heads, *ctx.needs
    )
    wanted = tuple(grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))
    return (*wanted, *(None,) * 9)


_op.register_autograd(_backward, setup_context=_setup_context)
