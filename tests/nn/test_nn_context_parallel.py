"""The layer shard by shard in one process, with keys gathered from all shards, against the layer on the whole pack."""

import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dsa_ops.layouts import contiguous_cp, packed_bounds, zigzag_cp
from dsa_ops.nn import rotary_table, set_mode
from dsa_ops.nn.attention import MODES
from layers import gradients, hidden, layer

LAYOUTS = {"zigzag": zigzag_cp, "contiguous": contiguous_cp}
# three sequences, the second empty, with padding rows between them and behind them
REAL, PADDED, TOTAL = torch.tensor([0, 13, 13, 34]), torch.tensor([0, 16, 16, 48]), 56
modes = pytest.mark.parametrize("mode", MODES)


class Ranks:
    """All ranks of one process group, one after another: `gather(rank)` is what that rank's layer is given.

    In the first pass every rank hands in its rows, which are kept with their graph, and gets zeros for the others'. In
    the second pass it gets all ranks' rows, so gradients reach every rank's part as through a real all-gather.
    """

    def __init__(self, name, cp_size):
        self.layouts = [LAYOUTS[name](REAL, cp_size, r, total=TOTAL, cu_seqlens_padded=PADDED) for r in range(cp_size)]
        self.handed_in = [[] for _ in self.layouts]

    def inputs(self, rank):
        layout = self.layouts[rank]
        table = rotary_table(layout.rows - layout.starts, 6, 100.0)
        return {"starts": layout.starts, "ends": layout.ends, "position_embeddings": table}

    def first(self, rank):
        def gather(x):
            self.handed_in[rank].append(x)
            return x.new_zeros(TOTAL, x.shape[1]).index_copy(0, self.layouts[rank].rows, x)

        return gather

    def second(self, rank):
        calls = iter(range(9))

        def gather(x):
            call = next(calls)
            parts = [handed_in[call] for handed_in in self.handed_in]
            assert torch.equal(parts[rank], x), "the same call in both passes"
            parts[rank] = x
            return torch.cat(parts)[self.layouts[rank].gather_order]

        return gather

    def run(self, module, x, mask=None):
        """Outputs of all ranks. Losses are weighted so that their sum is the mean over all rows of `mask`."""
        outputs = []
        for rank, layout in enumerate(self.layouts):
            module(x[layout.rows], gather=self.first(rank), **self.inputs(rank))
        config = module.config
        for rank, layout in enumerate(self.layouts):
            if mask is None:
                part, more = len(layout.rows) / TOTAL, {}
            else:
                part, more = mask[layout.rows].sum().item() / mask.sum().item(), {"row_mask": mask[layout.rows]}
            module.config = dataclasses.replace(config, loss_coeff=config.loss_coeff * part)
            outputs.append(module(x[layout.rows], gather=self.second(rank), **self.inputs(rank), **more))
        module.config = config
        return outputs

    def scattered(self, outputs, name):
        parts = [getattr(output, name) for output in outputs]
        whole = parts[0].new_zeros(TOTAL, *parts[0].shape[1:])
        for layout, part in zip(self.layouts, parts, strict=True):
            whole = whole.index_copy(0, layout.rows, part)
        return whole


def close(got, want, name="", tolerance=1e-12):
    assert (got - want).abs().max() <= tolerance * max(1.0, want.abs().max().item()), name


@pytest.mark.parametrize("masked", [False, True], ids=["all rows", "row_mask"])
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", LAYOUTS)
@modes
def test_shards_are_the_whole_layer(mode, name, cp_size, masked):
    module = set_mode(layer("dense", sink=True, loss_coeff=0.7), mode)
    x, mask = hidden(TOTAL), None
    if masked:
        mask = torch.rand(TOTAL) < 0.6
    starts, ends = packed_bounds(REAL, num_rows=TOTAL, cu_seqlens_q_padded=PADDED)
    want = module(x, starts=starts, ends=ends, row_mask=mask)
    factor = torch.randn_like(want.out)
    (want.out * factor).sum().backward()
    want_grads = {n: None if g is None else g.clone() for n, g in (gradients(module) | {"x": x.grad}).items()}
    module.zero_grad()
    x.grad = None

    ranks = Ranks(name, cp_size)
    outputs = ranks.run(module, x, mask)
    got = ranks.scattered(outputs, "out")
    close(got, want.out)
    if want.indices is not None:
        assert torch.equal(ranks.scattered(outputs, "indices"), want.indices)
    assert all((output.loss is None) == (want.loss is None) for output in outputs)
    if want.loss is not None:
        close(sum(output.loss for output in outputs), want.loss)
        assert want.loss > 1e-3
    (got * factor).sum().backward()
    got_grads = gradients(module) | {"x": x.grad}
    for n, want_grad in want_grads.items():
        assert (got_grads[n] is None) == (want_grad is None), n
        if want_grad is not None:
            close(got_grads[n], want_grad, n, 1e-11)
            assert want_grad.abs().max() > 1e-6, n


@modes
def test_what_is_gathered_in_which_order(mode):
    """The latent row with its rotated columns, with a gradient; then the index key where the indexer runs."""
    ranks = Ranks("zigzag", 2)
    module, x = set_mode(layer("dense"), mode), hidden(TOTAL)[ranks.layouts[0].rows]
    module(x, gather=ranks.first(0), **ranks.inputs(0))
    widths = [18] if mode == "dense" else [18, 16]
    calls = ranks.handed_in[0]
    assert [tuple(call.shape) for call in calls] == [(TOTAL // 2, width) for width in widths]
    assert calls[0].requires_grad
    if mode != "dense":
        assert calls[1].requires_grad == (mode != "frozen")
    if mode in ("sparse", "frozen"):
        ids = module(x, gather=ranks.first(0), **ranks.inputs(0)).indices
        calls.clear()
        got = module(x, gather=ranks.first(0), indices=ids, **ranks.inputs(0))
        assert [tuple(call.shape) for call in calls] == [(TOTAL // 2, 18)]
        assert torch.equal(got.indices, ids)
    if mode == "warmup":
        calls.clear()
        with torch.no_grad():
            module.eval()(x, gather=ranks.first(0), **ranks.inputs(0))
        assert len(calls) == 1, "nothing to learn, nothing to gather"


@pytest.mark.parametrize("mode", ["sparse", "frozen"])
def test_ids_may_come_from_another_layer(mode):
    module, x, ranks = set_mode(layer("dense", sink=True), mode), hidden(TOTAL), Ranks("zigzag", 4)
    starts, ends = packed_bounds(REAL, num_rows=TOTAL, cu_seqlens_q_padded=PADDED)
    ids = torch.where(torch.rand(TOTAL, 4) < 0.7, (starts[:, None] + torch.randint(0, 13, (TOTAL, 4))), -1).int()
    ids[starts == ends] = -1
    want = module(x, starts=starts, ends=ends, indices=ids).out
    for rank, layout in enumerate(ranks.layouts):
        module(x[layout.rows], gather=ranks.first(rank), indices=ids[layout.rows], **ranks.inputs(rank))
    for rank, layout in enumerate(ranks.layouts):
        got = module(x[layout.rows], gather=ranks.second(rank), indices=ids[layout.rows], **ranks.inputs(rank))
        close(got.out, want[layout.rows])


@modes
def test_no_rotation_needs_no_table(mode):
    module, x, ranks = set_mode(layer("dense", rope=False), mode), hidden(TOTAL), Ranks("contiguous", 2)
    starts, ends = packed_bounds(REAL, num_rows=TOTAL, cu_seqlens_q_padded=PADDED)
    want = module(x, starts=starts, ends=ends).out
    for gather in (ranks.first, ranks.second):
        for rank, layout in enumerate(ranks.layouts):
            got = module(x[layout.rows], gather=gather(rank), starts=layout.starts, ends=layout.ends).out
            if gather == ranks.second:
                close(got, want[layout.rows])


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_recomputed_and_compiled(mode):
    """A gather of plain tensor operations becomes part of the graph, and is called again by checkpointing."""
    module, x = set_mode(layer("dense", sink=True), mode), hidden(TOTAL)
    layout = zigzag_cp(REAL, 2, 1, total=TOTAL, cu_seqlens_padded=PADDED)
    table = rotary_table(layout.rows - layout.starts, 6, 100.0)
    factor = torch.randn(TOTAL // 2, 32, dtype=torch.float64)

    def gather(k):
        return torch.cat((k.detach().flip(0), k))[layout.gather_order]

    def run(x):
        return module(
            x[layout.rows], starts=layout.starts, ends=layout.ends, position_embeddings=table, gather=gather
        ).out

    torch._dynamo.reset()
    results = []
    for forward in (
        run,
        lambda x: checkpoint(run, x, use_reentrant=False),
        torch.compile(run, backend="aot_eager", fullgraph=True),
    ):
        module.zero_grad()
        x.grad = None
        out = forward(x)
        (out * factor).sum().backward()
        grads = {n: g for n, g in (gradients(module) | {"x": x.grad}).items() if g is not None}
        results.append({"out": out.detach()} | {n: g.clone() for n, g in grads.items()})
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        for n, want in results[0].items():
            close(other[n], want, n)


def test_the_indexer_alone():
    module, ranks = layer("sparse").indexer, Ranks("zigzag", 2)
    x, resid = hidden(TOTAL), hidden(TOTAL, size=20)
    starts, ends = packed_bounds(REAL, num_rows=TOTAL, cu_seqlens_q_padded=PADDED)
    positions = torch.arange(TOTAL, dtype=torch.int32) - starts
    want = module.select(x, resid, rotary_table(positions, 6, 100.0), starts=starts, ends=ends, topk=4)
    for gather in (ranks.first, ranks.second):
        for rank, layout in enumerate(ranks.layouts):
            inputs = ranks.inputs(rank)
            table = inputs.pop("position_embeddings")
            got = module.select(x[layout.rows], resid[layout.rows], table, topk=4, gather=gather(rank), **inputs)
            if gather == ranks.second:
                assert torch.equal(got.indices, want.indices[layout.rows])
                close(got.scores.nan_to_num(neginf=0), want.scores[layout.rows].nan_to_num(neginf=0))


def keys(size, **more):
    return lambda k: k.new_zeros(size, k.shape[1], **more)


def second_only(size):
    """Fits for the latent rows, one row off for the index keys."""
    sizes = iter((size, size + 1))
    return lambda k: k.new_zeros(next(sizes), k.shape[1])


bounds = {"starts": torch.zeros(6, dtype=torch.int32), "ends": torch.ones(6, dtype=torch.int32)}
table = {"position_embeddings": rotary_table(torch.arange(6), 6)}
ERRORS = [
    (TypeError, "gather must be callable, got int", 6, bounds | table | {"gather": 3}),
    (ValueError, r"x must be packed, \[T, 32\], with gather, got \[1, 6, 32\]", (1, 6), {"gather": keys(6)}),
    (ValueError, "starts and ends must be given with gather, in global key rows", 6, table | {"gather": keys(6)}),
    (ValueError, "position_embeddings must be given with gather, .* got None", 6, bounds | {"gather": keys(6)}),
    (
        TypeError,
        "gather must return a tensor for the latent rows, got list",
        6,
        bounds | table | {"gather": lambda k: [k, k]},
    ),
    (
        ValueError,
        r"gather must return \[S, 18\] for the latent rows of shape \[6, 18\], got \[2, 6, 18\]",
        6,
        bounds | table | {"gather": lambda k: torch.stack((k, k))},
    ),
    (
        ValueError,
        r"gather must return \[S, 18\] for the latent rows of shape \[6, 18\], got \[6, 36\]",
        6,
        bounds | table | {"gather": lambda k: torch.cat((k, k), 1)},
    ),
    (
        TypeError,
        "gather must return torch.float64 for the latent rows, got torch.float32",
        6,
        bounds | table | {"gather": keys(6, dtype=torch.float32)},
    ),
    (
        ValueError,
        "what gather returns for the latent rows must be on cpu like x, got meta",
        6,
        bounds | table | {"gather": keys(6, device="meta")},
    ),
]


@pytest.mark.parametrize(("error", "text", "shape", "more"), ERRORS)
@modes
def test_errors(mode, error, text, shape, more):
    x = hidden(*shape) if isinstance(shape, tuple) else hidden(shape)
    with pytest.raises(error, match="^DSAttention: " + text):
        layer(mode)(x, **more)


@pytest.mark.parametrize("mode", MODES[1:])
def test_both_gathers_must_give_as_many_rows(mode):
    with pytest.raises(ValueError, match=r"gather must return \[12, 16\] for the index keys .* got \[13, 16\]"):
        layer(mode)(hidden(6), gather=second_only(12), **bounds, **table)
