"""dsa::indexer_topk. Meaning: api.indexer_topk. Its gradient, through the scores, is dsa::indexer_scores_backward."""

from dsa_ops.checks import accumulation_dtype, check_indexer_topk
from dsa_ops.ops._register import register_op
from dsa_ops.ops.indexer_scores import save_for_scores_gradients, scores_gradients
from dsa_ops.unfused.indexer_topk import indexer_topk_unfused


def _outputs(q, k, weights, starts, ends, topk, relu):
    rows = q.shape[0]
    return (
        starts.new_empty(rows, topk),
        q.new_empty(rows, topk, dtype=accumulation_dtype(q.dtype)),
    )


_op = register_op(
    "indexer_topk",
    "(Tensor q, Tensor k, Tensor weights, Tensor starts, Tensor ends, SymInt topk, bool relu=True) "
    "-> (Tensor indices, Tensor scores)",
    check=check_indexer_topk,
    outputs=_outputs,
    unfused=indexer_topk_unfused,
    flops=lambda q, k, weights, starts, ends, topk, relu: 2 * q[0] * k[0] * q[1] * (q[2] + 1),
    autocast=(0, 1),
)


def _setup_context(ctx, inputs, output):
    q, k, weights, _, _, _, relu = inputs
    indices, _ = output
    ctx.mark_non_differentiable(indices)
    save_for_scores_gradients(ctx, q, k, weights, indices, relu)


_op.register_autograd(
    lambda ctx, grad_indices, grad_scores: (*scores_gradients(ctx, grad_scores), None, None, None, None),
    setup_context=_setup_context,
)
