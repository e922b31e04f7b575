"""A program exported and saved by an earlier version still loads and gives the same numbers.

tests/data/every_op.pt2 calls every op, backward ops included, most of them with the trailing arguments left to their
defaults. It was written with torch 2.9.1, the oldest that the package supports, by running this file:

    PYTHONPATH=tests python tests/export/test_saved_program.py

It is never written again: it stands for what users have saved. A newer one would go beside it.
"""

import json
from pathlib import Path

import pytest
import torch

import dsa_ops
import inputs
import oracle

PROGRAM = Path(__file__).resolve().parent.parent / "data" / "every_op.pt2"
SCALE, D_V, TOPK, ALL_KEYS = 0.5, 2, 2, 6
SIZES = {"T": 3, "S": 4, "H": 2, "D": 3, "Dv": D_V, "Hi": 2, "Di": 2}


class EveryOp(torch.nn.Module):
    """A training step written out: selection, attention, losses, and the gradients of all of them."""

    def forward(self, index_q, index_k, weights, q, kv, starts, ends, sink, topk_length, row_weight):
        ops = torch.ops.dsa
        best, best_scores = ops.indexer_topk(index_q, index_k, weights, starts, ends, TOPK)
        scores = ops.indexer_scores(index_q, index_k, weights, best, False)
        sunk, sunk_lse = ops.sparse_mla(q, kv, best, SCALE, D_V, sink, topk_length)

        indices, all_scores = ops.indexer_topk(index_q, index_k, weights, starts, ends, ALL_KEYS)
        out, lse = ops.sparse_mla(q, kv, indices, SCALE, D_V)
        target = ops.attention_target(q, kv, lse, indices, SCALE)
        kl = ops.indexer_kl(target, all_scores, indices)
        dense = index_q, index_k, weights, q, kv, lse, starts, ends, SCALE, row_weight
        loss, dense_kl = ops.dense_indexer_kl(*dense)

        grad_scores = ops.indexer_kl_backward(row_weight, target, all_scores, indices)
        index_grads = ops.indexer_scores_backward(grad_scores, index_q, index_k, weights, indices)
        dense_grads = ops.dense_indexer_kl_backward(loss, *dense)
        grads = ops.sparse_mla_backward(out, None, q, kv, indices, out, lse, SCALE, D_V)
        return {
            "best": dsa_ops.IndexerTopkOutput(best, best_scores),
            "scores": scores,
            "sunk": dsa_ops.SparseMLAOutput(sunk, sunk_lse),
            "attention": dsa_ops.SparseMLAOutput(out, lse),
            "target": target,
            "kl": kl,
            "dense": dsa_ops.DenseIndexerKLOutput(loss, dense_kl),
            "index_grads": index_grads,
            "dense_grads": dense_grads,
            "grads": grads[:2],
        }


def arguments(**changes):
    case = inputs.Case(**SIZES | changes)
    index = inputs.arguments("indexer_topk", case)
    attention = inputs.arguments("sparse_mla", case)
    return (
        *(index[n] for n in ("q", "k", "weights")),
        *(attention[n] for n in ("q", "kv")),
        *(index[n] for n in ("starts", "ends")),
        *(attention[n] for n in ("sink", "topk_length")),
        inputs.arguments("dense_indexer_kl", case)["row_weight"],
    )


def tensors(results):
    """Name -> tensor of everything in a result of `EveryOp`."""
    flat, _ = torch.utils._pytree.tree_flatten_with_path(results)
    return {torch.utils._pytree.keystr(path): x for path, x in flat}


def make(path):
    args = arguments()
    rows, keys = (torch.export.Dim(name, min=2, max=2**20) for name in ("T", "S"))
    per_row, per_key = {0: rows}, {0: keys}
    shapes = (per_row, per_key, per_row, per_row, per_key, per_row, per_row, None, per_row, per_row)
    program = torch.export.export(EveryOp(), args, dynamic_shapes=shapes, strict=False)
    for node in program.graph.nodes:  # where it was made is nobody's business, and takes more space than the program
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
            node.meta.pop(key, None)
    expected = {name: x.double().flatten().tolist() for name, x in tensors(EveryOp()(*args)).items()}
    expected = {name: [float(f"{x:.7g}") for x in values] for name, values in expected.items()}
    torch.export.save(program, path, extra_files={"expected.json": json.dumps(expected)})


def load():
    extra = {"expected.json": ""}
    program = torch.export.load(PROGRAM, extra_files=extra)
    return program, json.loads(extra["expected.json"])


def test_saved_program_gives_the_numbers_it_was_saved_with():
    program, expected = load()
    args, kwargs = program.example_inputs
    results = program.module()(*args, **kwargs)
    assert isinstance(results["best"], dsa_ops.IndexerTopkOutput)
    assert isinstance(results["attention"], dsa_ops.SparseMLAOutput)
    assert isinstance(results["dense"], dsa_ops.DenseIndexerKLOutput)
    found = tensors(results)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        want = torch.tensor(expected[name], dtype=torch.float64)
        torch.testing.assert_close(x.double().flatten(), want, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_numbers_it_was_saved_with_are_right():
    """Against the oracle, so that a file with wrong numbers in it cannot set the standard."""
    program, expected = load()
    index_q, index_k, weights, q, kv, starts, ends, sink, topk_length, _ = program.example_inputs[0]
    best, best_scores = oracle.indexer_topk(index_q, index_k, weights, starts, ends, TOPK)
    sunk, sunk_lse = oracle.sparse_mla(q, kv, best, SCALE, D_V, sink, topk_length)
    wants = {"['best'].indices": best, "['best'].scores": best_scores, "['sunk'].out": sunk, "['sunk'].lse": sunk_lse}
    for name, want in wants.items():
        got = torch.tensor(expected[name], dtype=torch.float64)
        torch.testing.assert_close(got, want.double().flatten(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [{"T": 9, "S": 5}, {"T": 2, "S": 6}], ids=str)
def test_saved_program_equals_eager_at_other_lengths(sizes):
    args = arguments(**sizes)
    found, want = tensors(load()[0].module()(*args)), tensors(EveryOp()(*args))
    for name, x in want.items():
        torch.testing.assert_close(found[name], x, atol=0, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_saved_program_calls_every_op():
    registered = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("dsa::")}
    called = {n.target.name() for n in load()[0].graph.nodes if n.op == "call_function" and "dsa." in str(n.target)}
    assert called == registered - {"dsa::attach_loss", "dsa::attach_loss_backward"}  # export and compile put them in


def test_saved_program_says_nothing_of_where_it_was_made():
    assert PROGRAM.stat().st_size < 64 << 10
    assert str(Path(__file__).resolve().parent.parent.parent).encode() not in PROGRAM.read_bytes()
    assert b"stack_trace" not in PROGRAM.read_bytes()


if __name__ == "__main__":
    assert not PROGRAM.exists(), f"{PROGRAM} stands for what users have saved; write to another name"
    make(PROGRAM)
