"""What every kernel asks of its arguments: no GPU needed."""

import pytest
import torch

from csrc_tilelang import _arguments


def test_dense_tensors_are_not_copied():
    x = torch.randn(4, 8)
    assert _arguments.dense(x) is x


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[:, 1:], lambda x: x[:1].expand(4, 9), lambda x: x.flatten()[1:9]]
)
def test_other_layouts_become_dense_with_the_same_values(view):
    x = view(torch.randn(4, 9))
    got = _arguments.dense(x)
    assert torch.equal(got, x) and got.is_contiguous() and got.data_ptr() % 16 == 0


def test_refusals():
    bf16, fp32 = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    assert _arguments.not_bfloat16(q=bf16, kv=bf16) is None
    assert _arguments.not_bfloat16(q=bf16, kv=fp32) == "kv is float32, the kernel takes bfloat16"
    assert _arguments.not_among("Di", 128, (64, 128)) is None
    assert _arguments.not_among("Di", 96, (64, 128)) == "Di is 96, the kernel takes 64 or 128"


@pytest.mark.parametrize(("setting", "size"), [(None, 1 << 30), ("", 1 << 30), ("64", 64 << 20), ("0.5", 1 << 19)])
def test_the_workspace(setting, size, monkeypatch):
    monkeypatch.delenv("DSA_OPS_WORKSPACE_MB", raising=False)
    if setting is not None:
        monkeypatch.setenv("DSA_OPS_WORKSPACE_MB", setting)
    assert _arguments.workspace_bytes() == size


@pytest.mark.parametrize("setting", ["0", "-1", "nan", "inf", "much"])
def test_a_bad_workspace(setting, monkeypatch):
    monkeypatch.setenv("DSA_OPS_WORKSPACE_MB", setting)
    with pytest.raises(ValueError, match=f"DSA_OPS_WORKSPACE_MB must be a positive number of MiB, got '{setting}'"):
        _arguments.workspace_bytes()
