"""dsa::attention_target, differentiable in nothing. Meaning: api.attention_target."""

from dsa_ops.checks import accumulation_dtype, check_attention_target, check_ids
from dsa_ops.ops._register import register_op
from dsa_ops.unfused.attention_target import attention_target_unfused

_op = register_op(
    "attention_target",
    "(Tensor q, Tensor kv, Tensor lse, Tensor indices, float softmax_scale, Tensor? topk_length=None) -> Tensor",
    check=check_attention_target,
    validate=lambda q, kv, lse, indices, softmax_scale, topk_length: check_ids(
        "attention_target", indices, kv.shape[0], topk_length
    ),
    outputs=lambda q, kv, lse, indices, softmax_scale, topk_length: q.new_empty(
        indices.shape, dtype=accumulation_dtype(q.dtype)
    ),
    unfused=attention_target_unfused,
    flops=lambda q, kv, lse, indices, softmax_scale, topk_length: 2 * q[0] * q[1] * indices[1] * q[2],
    autocast=(0, 1),
)


def _backward(ctx, grad):
    raise RuntimeError("dsa::attention_target is not differentiable")


_op.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(output))
