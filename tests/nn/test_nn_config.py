"""The numbers of a layer: presets and refusals."""

import dataclasses
import sys

import pytest
import torch

from dsa_ops.nn import DSAConfig, DSAttention, deepseek_v32, glm5

SAME_NAME = (
    "hidden_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "attention_bias",
)

SWITCHES = [field.name for field in dataclasses.fields(DSAConfig) if field.type is bool]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.24 starts at Python 3.11")
@pytest.mark.parametrize(("preset", "published"), [(deepseek_v32, "DeepseekV32Config"), (glm5, "GlmMoeDsaConfig")])
def test_presets_are_the_published_widths(preset, published):
    import transformers

    theirs, ours = getattr(transformers, published)(), preset()
    assert {name: getattr(ours, name) for name in SAME_NAME} == {name: getattr(theirs, name) for name in SAME_NAME}
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.scale == theirs.qk_head_dim**-0.5


def test_presets_rotate_as_published():
    ds, glm = deepseek_v32(), glm5()
    assert (ds.rope_interleaved, ds.index_rope_interleaved, ds.index_rope_first) == (True, False, True)
    assert (glm.rope_interleaved, glm.index_rope_interleaved, glm.index_rope_first) == (True, True, True)
    assert (ds.rope_theta, glm.rope_theta) == (1e4, 1e6)


def test_overrides():
    assert glm5(index_topk=7, sink=True) == DSAConfig(**{**vars(glm5()), "index_topk": 7, "sink": True})
    with pytest.raises(TypeError, match="no_such_field"):
        deepseek_v32(no_such_field=1)


def test_whole_numbers_are_numbers():
    config = glm5(rope_theta=1000000, softmax_scale=1, loss_coeff=0, norm_eps=0)
    assert config.scale == 1 and config.rope_theta == 1e6
    assert len(SWITCHES) == 8


def test_presets_build_on_meta():
    for config in (deepseek_v32(), glm5(index_hadamard=True)):
        layer = DSAttention(config, device="meta")
        assert layer.kv_b_proj.weight.shape == (config.num_heads * (config.qk_nope_head_dim + config.v_head_dim), 512)
        assert layer.indexer.wq_b.weight.shape == (config.index_n_heads * 128, config.q_lora_rank)


@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (ValueError, "num_heads must be at least 1, got 0", {"num_heads": 0}),
        (TypeError, "index_topk must be an int, got 2.0", {"index_topk": 2.0}),
        (TypeError, "q_lora_rank must be an int, got None", {"q_lora_rank": None}),
        (ValueError, "qk_rope_head_dim must be even and at least 0, got 7", {"qk_rope_head_dim": 7}),
        (ValueError, "qk_rope_head_dim must be even and at least 0, got -2", {"qk_rope_head_dim": -2}),
        (TypeError, "qk_rope_head_dim must be an int", {"qk_rope_head_dim": 8.0}),
        (ValueError, "index_head_dim must be at least qk_rope_head_dim = 64, got 32", {"index_head_dim": 32}),
        (TypeError, "rope_theta must be a float, got '1e6'", {"rope_theta": "1e6"}),
        (ValueError, "rope_theta must be above 0, got 0", {"rope_theta": 0}),
        (ValueError, "rope_theta must be finite, got inf", {"rope_theta": float("inf")}),
        (TypeError, "norm_eps must be a float, got None", {"norm_eps": None}),
        (ValueError, "norm_eps must be at least 0, got -1e-06", {"norm_eps": -1e-6}),
        (ValueError, "index_norm_eps must be finite, got nan", {"index_norm_eps": float("nan")}),
        (TypeError, "index_norm_eps must be a float, got True", {"index_norm_eps": True}),
        (TypeError, r"softmax_scale must be a float, got tensor\(", {"softmax_scale": torch.tensor(0.5)}),
        (ValueError, "softmax_scale must be finite, got -inf", {"softmax_scale": -float("inf")}),
        (TypeError, r"loss_coeff must be a float, got \[1.0\]", {"loss_coeff": [1.0]}),
        (ValueError, "loss_coeff must be finite, got nan", {"loss_coeff": float("nan")}),
        *((TypeError, f"DSAConfig: {name} must be a bool, got 1", {name: 1}) for name in SWITCHES),
        (TypeError, "sink must be a bool, got None", {"sink": None}),
        (ValueError, "power of two with index_hadamard, got 96", {"index_head_dim": 96, "index_hadamard": True}),
    ],
)
def test_errors(error, text, change):
    with pytest.raises(error, match=text):
        glm5(**change)
