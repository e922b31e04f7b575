"""Stages of training for a whole model: which layer does what, and what learns."""

import copy
import io

import pytest
import torch
from torch import nn

from dsa_ops.nn import DSAttention, LightningIndexer, indexer_parameters, set_mode
from dsa_ops.nn.attention import MODES
from layers import hidden, layer


class Model(nn.Module):
    """Two layers, the second with the first's selection, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 32, dtype=torch.float64)
        self.full, self.shared = layer("dense"), layer("dense", has_indexer=False)
        self.norm = nn.LayerNorm(32, dtype=torch.float64)
        self.head = nn.Linear(32, 11, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        full = self.full(x)
        x = x + full.out
        x = x + self.shared(x, indices=full.indices).out
        return self.head(self.norm(x))


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def index_names(model):
    return {name for name, _ in model.named_parameters() if ".indexer." in name}


def moved(model, mode):
    """Names of the parameters that one optimizer step over everything moves."""
    set_mode(model, mode)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    model(torch.randint(11, (2, 17))).log_softmax(-1)[..., 0].mean().backward()
    optimizer.step()
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


@pytest.mark.parametrize("mode", MODES)
def test_what_learns(mode):
    model = Model()
    everything, index = {name for name, _ in model.named_parameters()}, index_names(model)
    want = {"dense": everything - index, "warmup": index, "sparse": everything, "frozen": everything - index}[mode]
    assert set_mode(model, mode) is model
    assert trainable(model) == want
    assert moved(model, mode) == want
    assert model.full.mode == model.shared.mode == mode


def test_a_whole_schedule_and_back():
    model = Model()
    everything, index = trainable(model), index_names(model)
    for mode in ("dense", "warmup", "sparse", "frozen", "warmup", "warmup", "dense", "sparse"):
        set_mode(model, mode)
    assert trainable(model) == everything
    set_mode(model, "frozen")
    assert trainable(model) == everything - index


def test_what_you_froze_stays_frozen():
    model = Model()
    yours = {"norm.weight", "full.q_a_proj.weight", "full.indexer.wk.weight"}
    for name in yours:
        model.get_parameter(name).requires_grad_(False)
    everything = {name for name, _ in model.named_parameters()}
    for mode in ("warmup", "dense", "sparse"):
        set_mode(model, mode)
    assert trainable(model) == everything - yours


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "in parts"])
def test_a_copy_knows_what_was_frozen(how):
    """One warm-up, then several copies trained from there."""
    model = Model()
    everything = trainable(model)
    set_mode(model, "warmup")
    if how == "deepcopy":
        model = copy.deepcopy(model)
    elif how == "pickle":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        model = torch.load(buffer, weights_only=False)
    if how == "in parts":
        set_mode(model.full, "sparse")
        assert trainable(model) == {name for name in everything if name.startswith("full.")}
    set_mode(model, "sparse")
    assert trainable(model) == everything


def test_indexer_parameters():
    model = Model()
    assert [id(p) for p in indexer_parameters(model)] == [id(p) for p in model.full.indexer.parameters()]
    assert len(list(indexer_parameters(model.full.indexer))) == 5
    assert not list(indexer_parameters(model.shared))


def test_a_single_layer_is_a_module_too():
    module = set_mode(layer("dense"), "warmup")
    assert isinstance(module, DSAttention) and isinstance(module.indexer, LightningIndexer)
    module(hidden(2, 9)).out.sum().backward()
    assert {name for name, p in module.named_parameters() if p.grad is not None} == {
        name for name, _ in module.named_parameters() if name.startswith("indexer.")
    }


def test_state_dict_knows_no_mode():
    """What is loaded elsewhere is weights alone."""
    module = layer("dense")
    names = set(module.state_dict())
    assert set(set_mode(module, "warmup").state_dict()) == names


def test_errors():
    with pytest.raises(ValueError, match="set_mode: mode must be one of dense, warmup, sparse, frozen, got 'train'"):
        set_mode(Model(), "train")
    with pytest.raises(ValueError, match="set_mode: module must hold a DSAttention, got Linear without one"):
        set_mode(nn.Linear(2, 2), "sparse")
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got list"):
        set_mode([], "sparse")
