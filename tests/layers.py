"""Small layers and inputs for them: what every test of a layer starts from."""

import torch

from dsa_ops.nn import DSAConfig, DSAttention
from layer_oracle import bounded, causal

SMALL = {
    "hidden_size": 32,
    "num_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 5,
    "rope_theta": 100.0,
}


def layer(mode="sparse", *, dtype=torch.float64, has_indexer=True, **changes) -> DSAttention:
    """A layer with attention and selection far from uniform, and norms and sinks off their defaults."""
    made = DSAttention(DSAConfig(**SMALL | changes), has_indexer=has_indexer, dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=2 * parameter.shape[1] ** -0.5)
            else:
                parameter.normal_(mean=0.5, std=0.5)
    made.mode = mode
    return made


def hidden(*shape, dtype=torch.float64, size=SMALL["hidden_size"]):
    return torch.randn(*shape, size, dtype=dtype, requires_grad=True)


def state(module):
    """float64 leaves by name, for the oracle."""
    return {name: value.detach().double().requires_grad_() for name, value in module.state_dict().items()}


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def split(named):
    """(indexer's, the others') of a dict by parameter name."""
    index = {name: value for name, value in named.items() if "indexer." in name}
    return index, {name: value for name, value in named.items() if name not in index}


# How tokens are laid out: (starts, ends, visible, positions) for x [B, L, hidden]; starts None is the causal default.
def _causal(batch, length):
    return None, None, causal(batch, length), torch.arange(length).expand(batch, length)


def _ragged(batch, length):
    """Two sequences a row, of other lengths in each, then padding that sees nothing."""
    starts = torch.zeros(batch, length, dtype=torch.int32)
    ends = torch.zeros(batch, length, dtype=torch.int32)
    positions = torch.zeros(batch, length, dtype=torch.long)
    for b in range(batch):
        cut, stop = length // 3 + b, length - 3 - b
        for first, last in ((0, cut), (cut, stop)):
            starts[b, first:last] = first
            ends[b, first:last] = torch.arange(first + 1, last + 1)
            positions[b, first:last] = torch.arange(last - first)
    positions[ends == 0] = torch.arange(length).expand(batch, length)[ends == 0]
    return starts, ends, bounded(starts, ends, length), positions


def _full(batch, length):
    starts = torch.zeros(batch, length, dtype=torch.int32)
    ends = torch.full((batch, length), length, dtype=torch.int32)
    return starts, ends, bounded(starts, ends, length), torch.arange(length).expand(batch, length)


LAYOUTS = {"causal": _causal, "ragged": _ragged, "full": _full}
