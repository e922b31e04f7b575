"""Which backend runs, how the choice is forced, and that every refusal has a reason."""

import warnings
from pathlib import Path

import pytest
import torch

import calls
import dsa_ops
import inputs
from csrc_tilelang import CompileError
from dsa_ops import dispatch
from inputs import ALL, OPS

SPARSE = ("q", "kv", "indices", "softmax_scale", "d_v")


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch):
    monkeypatch.delenv("DSA_OPS_BACKEND", raising=False)


def explain(name, device="cpu", **changes):
    args = inputs.arguments(name, device=device, **changes)
    if name not in OPS:
        return dsa_ops.explain(name, *args.values())
    positional, keywords = calls.public_arguments(name, args)
    return dsa_ops.explain(name, *positional, **keywords)


@pytest.mark.parametrize("name", ALL)
def test_explain(name):
    found = explain(name)
    assert (found.op, found.backend, found.kernel) == (name, "unfused", None)
    assert found.refusals and all("cpu" in reason for reason in found.refusals.values())
    assert str(found).splitlines()[0] == f"dsa::{name} runs unfused"


def test_explain_runs_nothing():
    args = inputs.arguments("sparse_mla", optional=False)
    args["indices"] = torch.full_like(args["indices"], 9)  # the op itself would raise an IndexError
    dsa_ops.explain("sparse_mla", *(args[n] for n in SPARSE))


def test_explain_of_batched_tensors():
    q, kv, ids = torch.randn(2, 3, 1, 4), torch.randn(2, 5, 4), torch.zeros(2, 3, 2, dtype=torch.int64)
    assert dsa_ops.explain("sparse_mla", q, kv, ids).backend == "unfused"


def test_explain_of_an_unknown_op():
    with pytest.raises(ValueError, match=r"explain: op must be one of .*sparse_mla.*got 'sparse_attention'"):
        dsa_ops.explain("sparse_attention")


@pytest.mark.parametrize("how", ["context", "environment"])
def test_a_forced_backend_that_cannot_serve_raises_with_the_reason(how, monkeypatch):
    args = inputs.arguments("sparse_mla")
    if how == "environment":
        monkeypatch.setenv("DSA_OPS_BACKEND", "tilelang")
        with pytest.raises(RuntimeError, match=r"dsa::sparse_mla: backend 'tilelang' .*on cpu"):
            calls.public("sparse_mla", args)
    else:
        with dsa_ops.backend("tilelang"), pytest.raises(RuntimeError, match=r"dsa::sparse_mla: backend 'tilelang'"):
            calls.run("sparse_mla", args)


@pytest.mark.parametrize("name", ALL)
def test_forced_unfused_equals_auto(name):
    args = inputs.arguments(name)
    want = calls.run(name, args)
    with dsa_ops.backend("unfused"):
        calls.assert_all_equal(calls.run(name, args), want)
        assert explain(name).refusals == {"tilelang": "the unfused backend is forced"}


def test_context_wins_over_the_environment_and_nests(monkeypatch):
    monkeypatch.setenv("DSA_OPS_BACKEND", "tilelang")
    assert dispatch.requested_backend() == "tilelang"
    with dsa_ops.backend("unfused"):
        assert dispatch.requested_backend() == "unfused"
        with dsa_ops.backend("auto"):
            assert dispatch.requested_backend() == "auto"
        assert dispatch.requested_backend() == "unfused"
    assert dispatch.requested_backend() == "tilelang"


def test_context_ends_with_an_exception():
    with pytest.raises(KeyError), dsa_ops.backend("unfused"):
        raise KeyError
    assert dispatch.requested_backend() == "auto"


def test_unknown_backends(monkeypatch):
    with pytest.raises(ValueError, match=r"backend: name must be one of auto, tilelang, unfused, got 'cuda'"):
        dsa_ops.backend("cuda")
    monkeypatch.setenv("DSA_OPS_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"DSA_OPS_BACKEND must be one of .*got 'cuda'"):
        calls.run("sparse_mla", inputs.arguments("sparse_mla"))


def test_forward_and_backward_choose_each_for_itself():
    args = inputs.arguments("sparse_mla", grad=True)
    out = calls.run("sparse_mla", args)["out"]
    with (
        dsa_ops.backend("tilelang"),
        pytest.raises(RuntimeError, match=r"dsa::sparse_mla_backward: backend 'tilelang'"),
    ):
        out.sum().backward()
    out.sum().backward()


# ---- the table, with kernels that exist for the test only ------------------------------------------------------------


class FakeKernel:
    """What a module of csrc_tilelang offers."""

    def __init__(self, refusal=None):
        self.refusal, self.launched = refusal, 0

    def refuse(self, *args):
        return self.refusal

    def launch(self, *args):
        self.launched += 1
        return torch.full((7, 3, 5), 2.0), torch.zeros(7, 3)


@pytest.fixture
def kernels(monkeypatch):
    """Installs kernels for sparse_mla that are asked wherever the tensors are, on a CPU when TileLang is forced."""

    def install(**modules):
        table = tuple(dispatch.Kernel(name, name) for name in modules)
        monkeypatch.setitem(dispatch.KERNELS, "sparse_mla", table)
        monkeypatch.setattr(dispatch, "_backend_refusal", lambda op, device: None)
        monkeypatch.setattr(dispatch, "_kernel_module", lambda kernel: modules[kernel.name])

    return install


def test_the_first_kernel_that_says_yes_runs(kernels):
    no, yes, late = FakeKernel("K is odd"), FakeKernel(), FakeKernel()
    kernels(wide=no, narrow=yes, other=late)
    with dsa_ops.backend("tilelang"):
        out, _ = calls.op("sparse_mla")(*inputs.arguments("sparse_mla").values())
    assert (out == 2).all() and (no.launched, yes.launched, late.launched) == (0, 1, 0)
    found = explain("sparse_mla")
    assert (found.backend, found.kernel, found.refusals) == ("tilelang", "narrow", {"wide": "K is odd"})
    assert "narrow" in str(found) and "K is odd" in str(found)


def test_when_every_kernel_refuses_the_call_runs_unfused(kernels, monkeypatch):
    args = inputs.arguments("sparse_mla")
    kernels(wide=FakeKernel("K is odd"), broken="broken cannot be imported: ImportError: no libcuda")
    monkeypatch.setattr(dispatch, "_warned", set())
    with pytest.warns(UserWarning, match=r"dsa::sparse_mla runs unfused on CUDA: wide: K is odd; broken: .*no libcuda"):
        assert dispatch.run("sparse_mla", lambda *a: "unfused", tuple(args.values()), True) == "unfused"
    with dsa_ops.backend("tilelang"), pytest.raises(RuntimeError, match=r"wide: K is odd; broken: .*no libcuda"):
        calls.run("sparse_mla", args)


def test_forced_unfused_asks_no_kernel(kernels):
    yes = FakeKernel()
    kernels(wide=yes)
    with dsa_ops.backend("unfused"):
        calls.run("sparse_mla", inputs.arguments("sparse_mla"))
    assert yes.launched == 0


def test_a_kernel_that_cannot_be_imported_is_a_reason():
    ghost = dispatch.Kernel("ghost", "csrc_tilelang.no_such_file", needs="torch")
    assert "csrc_tilelang.no_such_file cannot be imported: ModuleNotFoundError" in dispatch._kernel_module(ghost)


def test_a_package_that_is_not_installed_is_a_reason():
    ghost = dispatch.Kernel("ghost", "csrc_tilelang.no_such_file", needs="no_such_package")
    assert dispatch._kernel_module(ghost) == "no_such_package is not installed (pip install dsa-ops[no_such_package])"


def test_a_kernel_that_does_not_compile_is_a_reason_and_is_not_tried_again(kernels, monkeypatch):
    class Broken(FakeKernel):
        def launch(self, *args):
            super().launch()
            raise CompileError("wide did not compile: there is no nvcc")

    monkeypatch.setattr(dispatch, "_broken", {})
    monkeypatch.setattr(dispatch, "_warned", set())
    wide, narrow = Broken(), FakeKernel()
    kernels(wide=wide, narrow=narrow)
    args = inputs.arguments("sparse_mla")
    with dsa_ops.backend("tilelang"):
        for _ in range(2):
            calls.run("sparse_mla", args)
    assert (wide.launched, narrow.launched) == (1, 2)
    assert explain("sparse_mla").refusals == {"wide": "wide did not compile: there is no nvcc"}

    kernels(wide=wide)
    with dsa_ops.backend("tilelang"), pytest.raises(RuntimeError, match=r"cannot serve this call: wide: .*no nvcc"):
        calls.run("sparse_mla", args)
    with pytest.warns(UserWarning, match=r"dsa::sparse_mla runs unfused on CUDA: wide: .*no nvcc"):
        assert dispatch.run("sparse_mla", lambda *a: "unfused", tuple(args.values()), True) == "unfused"


def test_other_errors_of_a_kernel_are_not_taken_for_a_refusal(kernels):
    class Wrong(FakeKernel):
        def launch(self, *args):
            raise RuntimeError("an illegal memory access was encountered")

    kernels(wide=Wrong())
    with dsa_ops.backend("tilelang"), pytest.raises(RuntimeError, match="illegal memory access"):
        calls.run("sparse_mla", inputs.arguments("sparse_mla"))


def test_every_row_of_the_table_is_a_kernel_file():
    files = {path.stem for path in (Path(dsa_ops.__file__).parents[1] / "csrc_tilelang").glob("*.py")}
    assert set(dispatch.KERNELS) == set(ALL)
    for op, kernels in dispatch.KERNELS.items():
        assert kernels, op
        for kernel in kernels:
            assert kernel.module == f"csrc_tilelang.{kernel.name}" and kernel.name in files, kernel


def test_a_fallback_on_a_gpu_warns_once_per_reason(monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for reason in ("a", "a", "b"):
            dispatch._warn_once("sparse_mla", reason)
    assert [str(w.message) for w in caught] == [f"dsa::sparse_mla runs unfused on CUDA: {r}" for r in "ab"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_explain_on_cuda(name):
    found = explain(name, device="cuda")
    assert found.backend == "tilelang" or found.refusals


def test_refusals_on_cuda_name_their_reason(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(dispatch, "_capability", lambda device: (8, 0))
    assert "8.0" in dispatch._backend_refusal("sparse_mla", cuda)
    monkeypatch.setattr(dispatch, "_capability", lambda device: (9, 0))
    assert dispatch._backend_refusal("sparse_mla", cuda) is None
    monkeypatch.setitem(dispatch.KERNELS, "sparse_mla", ())
    assert dispatch._backend_refusal("sparse_mla", cuda) == "this version has no fused kernel for sparse_mla"


# ---- warmup ----------------------------------------------------------------------------------------------------------


def test_warmup_reports_every_op():
    report = dsa_ops.warmup(heads=16, index_heads=8, device="cpu")
    assert set(report) == set(ALL) and all("cpu" in reason for reason in report.values())


def test_warmup_names_what_refused_and_what_did_not_compile(kernels, monkeypatch):
    class Compiles(FakeKernel):
        def __init__(self, answer):
            super().__init__()
            self.answer = answer

        def compile_for(self, **widths):
            assert set(widths) == {"heads", "index_heads", "head_dim", "v_dim", "index_dim", "dtype", "device"}
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    monkeypatch.setattr(dispatch, "KERNELS", {"sparse_mla": ()})  # the others' kernels would really compile

    def report(**modules):
        kernels(**modules)
        return dsa_ops.warmup(heads=16, index_heads=8, device="cpu")["sparse_mla"]

    broken = Compiles(CompileError("wide did not compile: there is no nvcc"))
    assert report(wide=Compiles("head_dim is 5"), narrow=Compiles(None)) == "compiled"
    assert report(wide=broken, narrow=Compiles("head_dim is 5")) == (
        "wide: wide did not compile: there is no nvcc; narrow: head_dim is 5"
    )


@pytest.mark.gpu
def test_warmup_compiles_every_op():
    report = dsa_ops.warmup(heads=16, index_heads=8)
    if dispatch._backend_refusal("sparse_mla", torch.device("cuda", 0)) is None:
        assert report == dict.fromkeys(ALL, "compiled")
    refused = dsa_ops.warmup(heads=16, index_heads=7, head_dim=100, v_dim=50, dtype=torch.float16)
    assert set(refused) == set(ALL) and "compiled" not in refused["sparse_mla"] + refused["indexer_topk"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"index_heads": 1.5}, "index_heads must be an int, got float"),
        ({"heads": True}, "heads must be an int, got bool"),
        ({"v_dim": 600}, "v_dim must be at most head_dim = 576, got 600"),
    ],
)
def test_warmup_with_bad_widths(changes, text):
    with pytest.raises((ValueError, TypeError), match=f"warmup: {text}"):
        dsa_ops.warmup(**{"heads": 16, "index_heads": 8, **changes})


def test_explain_of_a_backward_op_takes_the_ops_arguments():
    args = inputs.arguments("indexer_kl_backward")
    assert dsa_ops.explain("indexer_kl_backward", **args).backend == "unfused"
    target = args.pop("target")
    with pytest.raises(TypeError, match="explain: indexer_kl_backward takes grad_kl, target, scores, indices; got"):
        dsa_ops.explain("indexer_kl_backward", **args)
    with pytest.raises(TypeError, match=r"explain: indexer_kl_backward takes .* got .*kv"):
        dsa_ops.explain("indexer_kl_backward", **args, target=target, kv=target)


def test_explain_refuses_what_the_op_refuses():
    q, kv, indices = (inputs.arguments("sparse_mla")[n] for n in SPARSE[:3])
    with pytest.raises(ValueError, match="sparse_mla: q must have shape"):
        dsa_ops.explain("sparse_mla", q[0], kv, indices)
    with pytest.raises(TypeError, match=r"sparse_mla\(\) missing 3 required positional arguments"):
        dsa_ops.explain("sparse_mla")


def test_explain_of_a_forced_backend_that_cannot_serve():
    with dsa_ops.backend("tilelang"):
        found = explain("sparse_mla")
    assert found.backend == "none" and "raises" in str(found)


def test_blocks_that_close_in_another_order_leave_nothing_forced():
    first, second = dsa_ops.backend("unfused"), dsa_ops.backend("tilelang")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert dispatch.requested_backend() == "tilelang"
    second.__exit__(None, None, None)
    assert dispatch.requested_backend() == "auto"
