"""Every op is one node of a compiled graph, forward and backward: what the compiler behind AOTAutograd is handed.

A snapshot has a line for each node that is not an input, an output, an element of a tuple or a detached result. Tensors
are shown as dtype and shape, so that it does not depend on how a release of torch names its nodes.
"""

import operator
import textwrap

import pytest
import torch
from expecttest import assert_expected_inline
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import calls
import dsa_ops  # noqa: F401
import inputs
from dsa_ops.layouts import packed_bounds
from inputs import OPS
from layers import layer

PLUMBING = operator.getitem, torch.ops.aten.detach.default  # autograd detaches what it saves, in some releases twice
SHORT = {torch.float32: "f32", torch.float64: "f64", torch.int32: "i32"}


class Graphs:
    """A backend that keeps what it is given."""

    def __init__(self):
        self.forward, self.backward = [], []
        self.backend = aot_autograd(fw_compiler=self._keep(self.forward), bw_compiler=self._keep(self.backward))

    def _keep(self, graphs):
        def compiler(module, example_inputs):
            graphs.append(module.graph)
            return make_boxed_func(module.forward)

        return compiler

    def text(self, only=""):
        assert len(self.forward) == 1 and len(self.backward) <= 1
        kept = [line for graph in self.forward + self.backward for line in lines(graph) if only in line]
        return "\n".join(textwrap.fill(line, 110, subsequent_indent="    ") for line in kept)


def lines(graph):
    for node in graph.nodes:
        if node.op == "call_function" and node.target not in PLUMBING:
            names = [a.name for a in node.target._schema.arguments]
            given = [*map(described, node.args)]
            named = [f"{n}={x}" for n, x in zip(names, given, strict=False)]
            named += [f"{n}={described(x)}" for n, x in node.kwargs.items()]
            yield f"{node.target._schema.name}({', '.join(named)})"
        else:  # nothing is hidden in a submodule
            assert node.op in ("placeholder", "output", "call_function"), node.op


def described(x):
    if not isinstance(x, torch.fx.Node):
        return repr(x)
    value = x.meta["val"]
    return (
        f"{SHORT.get(value.dtype, value.dtype)}[{','.join(map(str, value.shape))}]"
        if isinstance(value, torch.Tensor)
        else str(value)
    )


def captured(name):
    args = inputs.arguments(name, grad=True)
    tensors = {n: x for n, x in args.items() if isinstance(x, torch.Tensor)}
    numbers = {n: x for n, x in args.items() if n not in tensors}
    graphs = Graphs()
    call = torch.compile(
        lambda tensors: getattr(torch.ops.dsa, name)(**tensors, **numbers), fullgraph=True, backend=graphs.backend
    )
    outputs = dict(zip(OPS[name].outputs, calls.as_tuple(call(tensors)), strict=True))
    if OPS[name].differentiable:
        calls.gradients(name, args, calls.incoming(name, outputs), outputs)
    return graphs.text()


def test_indexer_topk():
    assert_expected_inline(
        captured("indexer_topk"),
        """\
dsa::indexer_topk(q=f32[7,2,4], k=f32[9,4], weights=f32[7,2], starts=i32[7], ends=i32[7], topk=4)
dsa::indexer_scores_backward(grad_scores=f32[7,4], q=f32[7,2,4], k=f32[9,4], weights=f32[7,2],
    indices=i32[7,4])""",
    )


def test_indexer_scores():
    assert_expected_inline(
        captured("indexer_scores"),
        """\
dsa::indexer_scores(q=f32[7,2,4], k=f32[9,4], weights=f32[7,2], indices=i32[7,4])
dsa::indexer_scores_backward(grad_scores=f32[7,4], q=f32[7,2,4], k=f32[9,4], weights=f32[7,2],
    indices=i32[7,4])""",
    )


def test_sparse_mla():
    assert_expected_inline(
        captured("sparse_mla"),
        """\
dsa::sparse_mla(q=f32[7,3,8], kv=f32[9,8], indices=i32[7,4], softmax_scale=0.4, d_v=5, sink=f32[3],
    topk_length=i32[7])
dsa::sparse_mla_backward(grad_out=f32[7,3,5], grad_lse=f32[7,3], q=f32[7,3,8], kv=f32[9,8], indices=i32[7,4],
    out=f32[7,3,5], lse=f32[7,3], softmax_scale=0.4, d_v=5, sink=f32[3], topk_length=i32[7])""",
    )


def test_attention_target():
    assert_expected_inline(
        captured("attention_target"),
        """\
dsa::attention_target(q=f32[7,3,8], kv=f32[9,8], lse=f32[7,3], indices=i32[7,4], softmax_scale=0.4,
    topk_length=i32[7])""",
    )


def test_indexer_kl():
    assert_expected_inline(
        captured("indexer_kl"),
        """\
dsa::indexer_kl(target=f32[7,4], scores=f32[7,4], indices=i32[7,4])
dsa::indexer_kl_backward(grad_kl=f32[7], target=f32[7,4], scores=f32[7,4], indices=i32[7,4])""",
    )


def test_dense_indexer_kl():
    assert_expected_inline(
        captured("dense_indexer_kl"),
        """\
dsa::dense_indexer_kl(index_q=f32[7,2,4], index_k=f32[9,4], index_weights=f32[7,2], q=f32[7,3,8], k=f32[9,8],
    lse=f32[7,3], starts=i32[7], ends=i32[7], softmax_scale=0.4, row_weight=f32[7])
dsa::dense_indexer_kl_backward(grad_loss=f32[], index_q=f32[7,2,4], index_k=f32[9,4], index_weights=f32[7,2],
    q=f32[7,3,8], k=f32[9,8], lse=f32[7,3], starts=i32[7], ends=i32[7], softmax_scale=0.4, row_weight=f32[7])""",
    )


def layer_nodes(mode):
    """Nodes of ours in a layer with packed bounds, its loss and their backward; the rest is torch's to change."""
    module = layer(mode, dtype=torch.float32, rope=False)

    def step(x, cu_seqlens):
        starts, ends = packed_bounds(cu_seqlens, num_rows=x.shape[0])
        result = module(x, starts=starts, ends=ends)
        return result.out.square().sum(), result.loss  # a loss that nobody reads would be cut out of the forward

    graphs = Graphs()
    x = torch.randn(19, 32, requires_grad=True)
    torch.compile(step, fullgraph=True, backend=graphs.backend)(x, torch.tensor([0, 5, 16]))[0].backward()
    return graphs.text(only="dsa::")


def test_sparse_layer():
    assert_expected_inline(
        layer_nodes("sparse"),
        """\
dsa::indexer_topk(q=f32[19,2,16], k=f32[19,16], weights=f32[19,2], starts=i32[19], ends=i32[19], topk=5)
dsa::sparse_mla(q=f32[19,3,18], kv=f32[19,18], indices=i32[19,5], softmax_scale=0.25, d_v=12)
dsa::attention_target(q=f32[19,3,18], kv=f32[19,18], lse=f32[19,3], indices=i32[19,5], softmax_scale=0.25)
dsa::indexer_kl(target=f32[19,5], scores=f32[19,5], indices=i32[19,5])
dsa::indexer_kl_backward(grad_kl=f32[19], target=f32[19,5], scores=f32[19,5], indices=i32[19,5])
dsa::sparse_mla_backward(grad_out=f32[19,3,12], grad_lse=None, q=f32[19,3,18], kv=f32[19,18],
    indices=i32[19,5], out=f32[19,3,12], lse=f32[19,3], softmax_scale=0.25, d_v=12, sink=None,
    topk_length=None, need_q=True, need_kv=True, need_sink=False)
dsa::indexer_scores_backward(grad_scores=f32[19,5], q=f32[19,2,16], k=f32[19,16], weights=f32[19,2],
    indices=i32[19,5])""",
    )


def test_frozen_layer():
    assert_expected_inline(
        layer_nodes("frozen"),
        """\
dsa::indexer_topk(q=f32[19,2,16], k=f32[19,16], weights=f32[19,2], starts=i32[19], ends=i32[19], topk=5)
dsa::sparse_mla(q=f32[19,3,18], kv=f32[19,18], indices=i32[19,5], softmax_scale=0.25, d_v=12)
dsa::sparse_mla_backward(grad_out=f32[19,3,12], grad_lse=None, q=f32[19,3,18], kv=f32[19,18],
    indices=i32[19,5], out=f32[19,3,12], lse=f32[19,3], softmax_scale=0.25, d_v=12, sink=None,
    topk_length=None, need_q=True, need_kv=True, need_sink=False)""",
    )


def test_warmup_layer():
    assert_expected_inline(
        layer_nodes("warmup"),
        """\
dsa::dense_indexer_kl(index_q=f32[19,2,16], index_k=f32[19,16], index_weights=f32[19,2], q=f32[19,3,16],
    k=f32[19,3,16], lse=f32[19,3], starts=i32[19], ends=i32[19], softmax_scale=0.25, row_weight=f32[19])
dsa::dense_indexer_kl_backward(grad_loss=f32[], index_q=f32[19,2,16], index_k=f32[19,16],
    index_weights=f32[19,2], q=f32[19,3,16], k=f32[19,3,16], lse=f32[19,3], starts=i32[19], ends=i32[19],
    softmax_scale=0.25, row_weight=f32[19])""",
    )


@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla", "indexer_kl", "dense_indexer_kl"])
def test_no_backward_is_traced_where_nothing_requires_grad(name):
    graphs = Graphs()
    torch.compile(calls.op(name), fullgraph=True, backend=graphs.backend)(*inputs.arguments(name).values())
    assert [line.split("(")[0] for line in lines(graphs.forward[0])] == [f"dsa::{name}"]
    assert graphs.backward == []
