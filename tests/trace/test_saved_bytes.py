"""What forward keeps for backward is what docs/activation_memory.md says: its tables are the expected values."""

import re
import sys
from pathlib import Path

import pytest
import torch

import calls
import inputs
from dsa_ops.nn import deepseek_v32, set_mode
from dsa_ops.nn.attention import MODES
from layers import SMALL, layer

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "activation_memory.md").read_text()
TABLE = {
    name: (formula, example)
    for name, formula, example in re.findall(
        r"^\| `(\w+)` \|[^|]*\| `([^`|]+)` \| ([\d.]+ \w+) \|$", PAGE, re.MULTILINE
    )
}
BYTES = {torch.bfloat16: {"e": 2, "a": 4}, torch.float32: {"e": 4, "a": 4}, torch.float64: {"e": 8, "a": 8}}
LETTERS = ("T", "S", "H", "D", "Dv", "Hi", "Di", "K")


def formula(name, **letters):
    return eval(TABLE[name][0], {"__builtins__": {}}, letters)


def kept(run, by_ops_alone=False):
    """Memory that autograd keeps for what happens in `run`, each storage once: address -> bytes."""
    found = {}

    def pack(x):
        if not by_ops_alone or _of_a_custom_op(sys._getframe(1)):
            assert not x.is_leaf or not isinstance(x, torch.nn.Parameter)
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = run()
    return found, result


def _of_a_custom_op(frame):
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith("torch/_library/autograd.py"):
            return True
        frame = frame.f_back
    return False


def test_the_tables_have_every_op_and_mode():
    assert set(TABLE) == {*inputs.OPS, *MODES}


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("name", inputs.OPS)
def test_bytes_an_op_keeps(name, dtype):
    case = inputs.Case(dtype=dtype, optional=False)
    args = inputs.arguments(name, case, grad=True)
    letters = {letter: getattr(case, letter) for letter in LETTERS}
    found, result = kept(lambda: calls.run(name, args))
    assert sum(found.values()) == formula(name, **letters, **BYTES[dtype])
    tensors = [x for x in (*args.values(), *result.values()) if isinstance(x, torch.Tensor)]
    assert found.keys() <= {x.untyped_storage().data_ptr() for x in tensors}, "a copy is kept"


def test_what_the_optional_arguments_add():
    case = inputs.Case()
    letters = {letter: getattr(case, letter) for letter in LETTERS} | BYTES[case.dtype]
    args = inputs.arguments("sparse_mla", case, grad=True)
    found, _ = kept(lambda: calls.run("sparse_mla", args))
    assert sum(found.values()) == formula("sparse_mla", **letters) + letters["a"] * case.H + 4 * case.T
    args = inputs.arguments("dense_indexer_kl", case, expanded_keys=True, grad=True)
    found, _ = kept(lambda: calls.run("dense_indexer_kl", args))
    more = letters["e"] * case.S * case.D * (case.H - 1)
    assert sum(found.values()) == formula("dense_indexer_kl", **letters) + more


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("name", inputs.DIFFERENTIABLE)
def test_inputs_of_any_strides_are_kept_as_they_are(name, layout):
    args = inputs.arguments(name, layout=layout, grad=True)
    found, result = kept(lambda: calls.run(name, args))
    tensors = [x for x in (*args.values(), *result.values()) if isinstance(x, torch.Tensor)]
    assert found.keys() <= {x.untyped_storage().data_ptr() for x in tensors}


@pytest.mark.parametrize("name", inputs.OPS)
def test_nothing_is_kept_for_inputs_that_get_no_gradient(name):
    differentiable = inputs.OPS[name].differentiable
    for n, x in inputs.arguments(name).items():
        if n in differentiable or not isinstance(x, torch.Tensor) or not x.is_floating_point():
            continue
        args = inputs.arguments(name)
        args[n].requires_grad_()
        found, result = kept(lambda args=args: calls.run(name, args))
        assert not found and not any(r.requires_grad for r in result.values()), n
    args = inputs.arguments(name, grad=True)
    with torch.no_grad():
        assert not kept(lambda: calls.run(name, args))[0]


@pytest.mark.parametrize("mode", MODES)
def test_bytes_the_ops_of_a_layer_keep(mode):
    """Two ops that keep the same tensor keep it once."""
    rows, module = 37, set_mode(layer("dense", dtype=torch.bfloat16), mode)
    x = torch.randn(rows, SMALL["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    found, _ = kept(lambda: module(x), by_ops_alone=True)
    assert sum(found.values()) == formula(mode, **letters_of(module.config, mode, rows), **BYTES[torch.bfloat16])


def test_batched_ids_are_kept_once_for_each_call():
    module = set_mode(layer("dense", dtype=torch.bfloat16), "sparse")
    x = torch.randn(2, 19, SMALL["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    found, _ = kept(lambda: module(x), by_ops_alone=True)
    letters = letters_of(module.config, "sparse", 38) | BYTES[torch.bfloat16]
    assert "`8*T*K` more" in PAGE
    assert sum(found.values()) == formula("sparse", **letters) + 8 * letters["T"] * letters["K"]


def letters_of(config, mode, rows):
    expanded = mode in ("dense", "warmup")
    width = config.qk_head_dim if expanded else config.kv_lora_rank + config.qk_rope_head_dim
    value = config.v_head_dim if expanded else config.kv_lora_rank
    index = {"Hi": config.index_n_heads, "Di": config.index_head_dim, "K": config.index_topk}
    return {"T": rows, "S": rows, "H": config.num_heads, "D": width, "Dv": value, **index}


@pytest.mark.parametrize("name", TABLE)
def test_the_example_is_what_the_formula_gives(name):
    letters = letters_of(deepseek_v32(), name if name in MODES else "sparse", 32768)
    assert TABLE[name][1] == f"{formula(name, **letters, **BYTES[torch.bfloat16]) / 2**30:.2f} GiB"
