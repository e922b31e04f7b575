"""dsa::sparse_mla and dsa::sparse_mla_backward. Meaning: api.sparse_mla."""

import torch

from dsa_ops.checks import accumulation_dtype, check_ids, check_sparse_mla, check_sparse_mla_backward
from dsa_ops.ops._register import no_second_derivative, register_op
from dsa_ops.unfused.sparse_mla import sparse_mla_backward_unfused, sparse_mla_unfused


def _outputs(q, kv, indices, softmax_scale, d_v, sink, topk_length):
    rows, heads, _ = q.shape
    return q.new_empty(rows, heads, d_v), q.new_empty(rows, heads, dtype=accumulation_dtype(q.dtype))


_op = register_op(
    "sparse_mla",
    "(Tensor q, Tensor kv, Tensor indices, float softmax_scale, SymInt d_v, Tensor? sink=None, "
    "Tensor? topk_length=None) -> (Tensor out, Tensor lse)",
    check=check_sparse_mla,
    validate=lambda q, kv, indices, softmax_scale, d_v, sink, topk_length: check_ids(
        "sparse_mla", indices, kv.shape[0], topk_length
    ),
    outputs=_outputs,
    unfused=sparse_mla_unfused,
    flops=lambda q, kv, indices, softmax_scale, d_v, *_: 2 * q[0] * q[1] * indices[1] * (q[2] + d_v),
    autocast=(0, 1),
)


def _backward_outputs(
    grad_out, grad_lse, q, kv, indices, out, lse, softmax_scale, d_v, sink, topk_length, need_q, need_kv, need_sink
):
    return (
        q.new_empty(q.shape if need_q else 0),
        kv.new_empty(kv.shape if need_kv else 0),
        q.new_empty(0) if sink is None or not need_sink else sink.new_empty(sink.shape),
    )


def _backward_flops(
    grad_out, grad_lse, q, kv, indices, out, lse, softmax_scale, d_v, sink, topk_length, need_q, need_kv, need_sink
):
    # recomputed logits and dO.V, then dS.K for q, dS.Q and P.dO for kv
    width = (q[2] + d_v) + need_q * q[2] + need_kv * (q[2] + d_v)
    return 2 * q[0] * q[1] * indices[1] * width


_backward_op = register_op(
    "sparse_mla_backward",
    "(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor kv, Tensor indices, Tensor out, Tensor lse, "
    "float softmax_scale, SymInt d_v, Tensor? sink=None, Tensor? topk_length=None, bool need_q=True, "
    "bool need_kv=True, bool need_sink=True) -> (Tensor grad_q, Tensor grad_kv, Tensor grad_sink)",
    check=check_sparse_mla_backward,
    validate=lambda grad_out, grad_lse, q, kv, indices, out, lse, softmax_scale, d_v, sink, topk_length, *_: check_ids(
        "sparse_mla_backward", indices, kv.shape[0], topk_length
    ),
    outputs=_backward_outputs,
    unfused=sparse_mla_backward_unfused,
    flops=_backward_flops,
)
no_second_derivative(_backward_op, "sparse_mla")


def _setup_context(ctx, inputs, output):
    q, kv, indices, ctx.softmax_scale, ctx.d_v, sink, topk_length = inputs
    ctx.set_materialize_grads(False)  # an unused output gives None, not a tensor of zeros
    needs = ctx.needs_input_grad  # as long as the arguments that were passed
    ctx.needs = needs[0], needs[1], sink is not None and needs[5]
    ctx.save_for_backward(q, kv, indices, *output, sink, topk_length)


def _backward(ctx, grad_out, grad_lse):
    if (grad_out is None and grad_lse is None) or not any(ctx.needs):
        return (None,) * 7
    q, kv, indices, out, lse, sink, topk_length = ctx.saved_tensors
    grads = torch.ops.dsa.sparse_mla_backward.default(
        grad_out, grad_lse, q, kv, indices, out, lse, ctx.softmax_scale, ctx.d_v, sink, topk_length, *ctx.needs
    )
    grad_q, grad_kv, grad_sink = (grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))
    return grad_q, grad_kv, None, None, None, grad_sink, None


_op.register_autograd(_backward, setup_context=_setup_context)
