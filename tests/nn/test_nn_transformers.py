"""Against transformers' own attention of both published models, with far fewer selected than visible keys."""

import itertools
import sys

import pytest
import torch

from dsa_ops.nn import DSAttention, deepseek_v32, glm5, set_mode
from layers import gradients, split

if sys.version_info < (3, 11):
    pytest.skip("transformers 5.24 starts at Python 3.11", allow_module_level=True)

from transformers.models.deepseek_v32 import modeling_deepseek_v32 as ds
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

WIDTHS = {
    "hidden_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    # with few heads many scores are exactly 0, no head's product being positive: ties, that theirs breaks arbitrarily
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 8,
}
LENGTH, THETA = 40, 10000.0
MODELS = {"deepseek_v32": (ds, "DeepseekV32", deepseek_v32), "glm5": (glm, "GlmMoeDsa", glm5)}


class Pair:
    """Their layer and ours with the same weights."""

    def __init__(self, model, layer_idx=0, spread=1.5, **changes):
        module, prefix, preset = MODELS[model]
        self.config = getattr(module, f"{prefix}Config")(
            **WIDTHS,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_hidden_layers=2,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            **changes,
        )
        self.config._attn_implementation = "sdpa"
        self.theirs = getattr(module, f"{prefix}Attention")(self.config, layer_idx).eval()
        with torch.no_grad():
            for parameter in self.theirs.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=spread * parameter.shape[1] ** -0.5)
                else:
                    parameter.normal_(mean=1.0, std=0.2)
        self.rotary = getattr(module, f"{prefix}RotaryEmbedding")(self.config)
        self.ours = DSAttention(
            preset(num_heads=4, rope_theta=THETA, attention_bias=self.config.attention_bias, **WIDTHS),
            has_indexer=self.theirs.indexer is not None,
        )
        self.ours.load_state_dict(self.theirs.state_dict(), strict=True)
        set_mode(self.ours, "sparse")

    def run_theirs(self, x, visible, table):
        """out, and the selected sets as a mask [B, L, S]."""
        seen = []
        handle = self.theirs.indexer.register_forward_hook(lambda module, args, out: seen.append(out))
        out = self.theirs(x, table, visible[:, None])[0]
        handle.remove()
        return out, selected(seen[0], x.shape[1]) & visible


def selected(indices, keys):
    """Mask [B, L, S] of ids; empty slots name nothing."""
    mask = torch.zeros(*indices.shape[:-1], keys + 1, dtype=torch.bool)
    return mask.scatter(-1, torch.where(indices < 0, keys, indices).long(), True)[..., :keys]


def causal(batch, length=LENGTH):
    return torch.ones(length, length).tril().bool().expand(batch, length, length)


def agreeing_rows(pair, x, visible, table, theirs, ours):
    """[B, L]: rows with the same selection. The others must be ties at float32's precision, measured in float64."""
    same = (theirs == ours).all(-1)
    if same.all():
        return same
    indexer = DSAttention(pair.ours.config).double()
    indexer.load_state_dict(pair.ours.state_dict())
    wide = x.detach().double()
    resid = indexer.q_a_layernorm(indexer.q_a_proj(wide))
    q, k, weights = indexer.indexer(wide, resid, tuple(t.double() for t in table))
    scores = torch.einsum("blhs,blh->bls", torch.einsum("blhd,bsd->blhs", q, k).relu(), weights)
    for b, t in (~same).nonzero().tolist():
        row, size = scores[b, t], scores[b, t][visible[b, t]].abs().max()
        differ = theirs[b, t] ^ ours[b, t]
        margin = row[differ].max() - row[differ].min()
        print(
            f"row {b, t}: selections differ in {int(differ.sum())} keys, margin {margin:.2e} of scores up to {size:.2e}"
        )
        assert margin <= 1e-5 * size
    return same


def compare(pair, x, visible, table, run):
    """Outputs to 5e-5, gradients of inputs and parameters to 1e-4 relative, on rows with the same selection."""
    theirs_in, ours_in = (x.clone().requires_grad_() for _ in range(2))
    want, theirs = pair.run_theirs(theirs_in, visible, table)
    got, ours = run(ours_in)
    same = agreeing_rows(pair, x, visible, table, theirs, ours)
    assert same.float().mean() > 0.9
    assert (visible.sum(-1) > pair.ours.config.index_topk).float().mean() > 0.5
    assert (got - want)[same].abs().max() <= 5e-5
    # rows read keys of their own sequence through their own selection alone, so a row left out leaves no trace
    grad = torch.randn_like(want) * same[..., None]
    for out in (want, got):
        out.backward(grad)
    pairs = {"x": (ours_in.grad, theirs_in.grad)}
    theirs_grads = split(gradients(pair.theirs))[1]
    pairs |= {name: (grad, theirs_grads[name]) for name, grad in split(gradients(pair.ours))[1].items()}
    assert len(pairs) == len(theirs_grads) + 1 >= 8
    for name, (a, b) in pairs.items():
        error = ((a - b).norm() / b.norm()).item()
        assert error <= 1e-4, (name, error)
        assert (a - b).abs().max() <= 1e-4 * b.abs().max(), name
    return got


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("model", MODELS)
def test_batched(model, bias):
    pair = Pair(model, attention_bias=bias)
    x = torch.randn(3, LENGTH, 64)
    table = pair.rotary(x, torch.arange(LENGTH)[None])

    def run(x):
        out = pair.ours(x, position_embeddings=table)
        return out.out, selected(out.indices, LENGTH)

    got = compare(pair, x, causal(3), table, run)
    # without a table the layer derives the positions itself
    torch.testing.assert_close(pair.ours(x).out, got, atol=1e-5, rtol=0)


@pytest.mark.parametrize("model", MODELS)
def test_packed(model):
    """Three sequences in a row of tokens; theirs gets a block-diagonal mask."""
    pair = Pair(model)
    cuts = [0, 33, 53, 100]
    starts, positions = torch.zeros(2, 100, dtype=torch.int32)
    for first, last in itertools.pairwise(cuts):
        starts[first:last], positions[first:last] = first, torch.arange(last - first)
    ends = torch.arange(1, 101, dtype=torch.int32)
    ids = torch.arange(100)
    visible = ((ids >= starts[:, None]) & (ids < ends[:, None]))[None]
    x = torch.randn(1, 100, 64)

    def run(x):
        out = pair.ours(x[0], starts=starts, ends=ends)
        return out.out[None], selected(out.indices[None], 100)

    compare(pair, x, visible, pair.rotary(x, positions[None]), run)


@pytest.mark.parametrize("model", MODELS)
def test_ties_are_the_only_disagreements(model):
    """Tokens that occur twice, at no position: every score is a tie, and who wins it is no one's fault."""
    pair = Pair(model)
    x = torch.randn(2, LENGTH // 2, 64).repeat_interleave(2, 1)
    table = torch.ones(1, LENGTH, 8), torch.zeros(1, LENGTH, 8)
    out = pair.ours(x, position_embeddings=table)
    _, theirs = pair.run_theirs(x, causal(2), table)
    ours = selected(out.indices, LENGTH)
    agreeing_rows(pair, x, causal(2), table, theirs, ours)
    # one token changed is not a tie
    with pytest.raises(AssertionError):
        moved = x.clone()
        moved[:, 5] = torch.randn(64)
        agreeing_rows(
            pair, x, causal(2), table, theirs, selected(pair.ours(moved, position_embeddings=table).indices, LENGTH)
        )


@pytest.mark.parametrize("wrong", ["index_rope_interleaved", "rope_interleaved", "index_rope_first"])
@pytest.mark.parametrize("model", MODELS)
def test_every_rope_convention_matters(model, wrong):
    pair = Pair(model)
    config = pair.ours.config
    other = DSAttention(MODELS[model][2](**{**vars(config), wrong: not getattr(config, wrong)}))
    other.load_state_dict(pair.theirs.state_dict())
    other.mode = "sparse"
    x = torch.randn(2, LENGTH, 64)
    table = pair.rotary(x, torch.arange(LENGTH)[None])
    want, theirs = pair.run_theirs(x, causal(2), table)
    right, indices, *_ = pair.ours(x)
    same = agreeing_rows(pair, x, causal(2), table, theirs, selected(indices, LENGTH))
    assert (right - want)[same].abs().max() <= 5e-5
    assert ((other(x).out - want)[same].abs().amax(-1) > 0.05).float().mean() > 0.5


def test_the_models_differ():
    """Loading one model's weights under the other's conventions must be seen, or the two presets test nothing."""
    pair = Pair("deepseek_v32")
    other = DSAttention(glm5(num_heads=4, rope_theta=THETA, **WIDTHS))
    other.load_state_dict(pair.theirs.state_dict())
    other.mode = "sparse"
    x = torch.randn(2, LENGTH, 64)
    assert (pair.ours(x).out - other(x).out).abs().max() > 0.05


@pytest.mark.parametrize("model", MODELS)
def test_state_dict_goes_both_ways(model):
    pair = Pair(model)
    assert set(pair.ours.state_dict()) == set(pair.theirs.state_dict())
    fresh = type(pair.theirs)(pair.config, 0)
    fresh.load_state_dict(pair.ours.state_dict(), strict=True)
    for name, value in pair.theirs.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)


@pytest.mark.parametrize("model", MODELS)
def test_what_no_state_dict_holds(model):
    """The models' own norms differ from their configurations' rms_norm_eps; the scale is of the expanded width."""
    pair = Pair(model)
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        assert getattr(pair.ours, name).eps == getattr(pair.theirs, name).variance_epsilon
    assert pair.ours.indexer.k_norm.eps == pair.theirs.indexer.k_norm.eps
    assert pair.ours.config.scale == pair.theirs.scaling


def test_shared_layer():
    """A layer that reuses the selection of an earlier one has no indexer weights, there and here."""
    first = Pair("glm5", indexer_types=["full", "shared"])
    second = Pair("glm5", layer_idx=1, indexer_types=["full", "shared"])
    assert second.theirs.indexer is None and second.ours.indexer is None
    x = torch.randn(2, LENGTH, 64)
    table = first.rotary(x, torch.arange(LENGTH)[None])
    mask = causal(2)[:, None]
    middle, _, indices = first.theirs(x, table, mask)
    want = second.theirs(middle, table, mask, prev_topk_indices=indices)[0]
    ours = first.ours(x)
    got = second.ours(ours.out, indices=ours.indices)
    same = agreeing_rows(
        first, x, causal(2), table, selected(indices, LENGTH) & causal(2), selected(ours.indices, LENGTH)
    )
    # a row that differs changes the second layer's input, and through it every later row of its sequence
    same = same.cumprod(1).bool()
    assert same.float().mean() > 0.5
    assert (got.out - want)[same].abs().max() <= 5e-5
