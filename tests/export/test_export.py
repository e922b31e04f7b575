"""torch.export, saved and loaded by a process of its own, for other lengths than it was exported with."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.export import Dim

import calls
import dsa_ops
import inputs
from dsa_ops.nn import DSAttentionOutput, set_mode
from layers import LAYOUTS, SMALL, gradients, layer

DOC = Path(__file__).resolve().parent.parent.parent / "docs" / "export.md"
# What a process hears that has not imported dsa_ops: PyTorch's words, which docs/export.md repeats.
UNREGISTERED = {
    "program": "ran into an error when deserializing the saved file",
    "result": "Unsupported global: GLOBAL dsa_ops.",
    "package": "Could not find schema for dsa::",
}


def test_the_errors_without_the_import_are_documented():
    for text in UNREGISTERED.values():
        assert text in DOC.read_text()


class Read(torch.nn.Module):
    """Selection and attention, with other numbers of queries and keys."""

    def forward(self, index_q, index_k, weights, q, kv, starts, ends):
        selected = dsa_ops.indexer_topk(index_q, index_k, weights, starts=starts, ends=ends, topk=4)
        return selected, dsa_ops.sparse_mla(q, kv, selected.indices, d_v=5)


def reads(rows, keys):
    index = inputs.arguments("indexer_topk", T=rows, S=keys)
    attention = inputs.arguments("sparse_mla", T=rows, S=keys)
    names = ("q", "k", "weights", "starts", "ends")
    index_q, index_k, weights, starts, ends = (index[n] for n in names)
    return index_q, index_k, weights, attention["q"], attention["kv"], starts, ends


def exported_read():
    rows, keys = {0: Dim("T", min=1, max=2**20)}, {0: Dim("S", min=1, max=2**20)}
    return torch.export.export(Read(), reads(7, 9), dynamic_shapes=(rows, keys, rows, rows, keys, rows, rows))


def frozen_layer(mode):
    return set_mode(layer("dense", dtype=torch.float32, sink=True), mode).eval().requires_grad_(False)


def packed(rows):
    starts, ends, *_ = (t[0] for t in LAYOUTS["ragged"](1, rows))
    return {"x": torch.randn(rows, SMALL["hidden_size"]), "starts": starts, "ends": ends}


def batched(batch, length):
    return {"x": torch.randn(batch, length, SMALL["hidden_size"])}


def exported_layer(module, kwargs, strict=False):
    rows, batch = Dim("T", min=0, max=2**20), Dim("B", min=1, max=2**10)
    shapes = {name: {0: rows} if x.dim() < 3 else {0: batch, 1: rows} for name, x in kwargs.items()}
    return torch.export.export(module, (), kwargs, dynamic_shapes=shapes, strict=strict)


# ---- another process ---------------------------------------------------------------------------------------------


OTHER_PROCESS = """
import sys, torch

def fails(call, text):
    try:
        call()
    except Exception as error:
        assert text in str(error), str(error)
        return
    raise AssertionError(f"no error, expected {text!r}")

folder, names, program_error, result_error = sys.argv[1], sys.argv[2].split(","), sys.argv[3], sys.argv[4]
fails(lambda: torch.export.load(f"{folder}/{names[0]}.pt2"), program_error)
fails(lambda: torch.load(f"{folder}/{names[0]}.pt"), result_error)
assert "dsa_ops" not in sys.modules

import dsa_ops

for name in names:
    module = torch.export.load(f"{folder}/{name}.pt2").module()
    for args, kwargs, want in torch.load(f"{folder}/{name}.pt"):
        got = module(*args, **kwargs)
        assert type(got) is type(want), (name, type(got), type(want))
        leaves, wanted = torch.utils._pytree.tree_flatten(got), torch.utils._pytree.tree_flatten(want)
        assert leaves[1] == wanted[1], (name, leaves[1])
        torch.testing.assert_close(leaves[0], wanted[0], atol=1e-5, rtol=1e-5)
print("same")
"""


def python(code, *args):
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def save(folder, name, program, module, cases):
    torch.export.save(program, folder / f"{name}.pt2")
    torch.save([(args, kwargs, module(*args, **kwargs)) for args, kwargs in cases], folder / f"{name}.pt")


@pytest.mark.slow
@torch.no_grad()
def test_programs_run_in_another_process_at_other_lengths(tmp_path):
    """Functions and layers. Results come back as the named tuples that eager gives, and load as such from a file."""
    sizes = ((7, 9), (1, 1), (12, 3), (3, 40))
    save(tmp_path, "read", exported_read(), Read(), [(reads(*s), {}) for s in sizes])
    module = frozen_layer("sparse")
    cases = [((), packed(n)) for n in (19, 40, 9)]
    save(tmp_path, "packed", exported_layer(module, packed(19)), module, cases)
    module = frozen_layer("frozen")
    cases = [((), batched(*s)) for s in ((2, 19), (3, 40), (1, 7))]
    save(tmp_path, "batched", exported_layer(module, batched(2, 19)), module, cases)
    names = ",".join(p.stem for p in tmp_path.glob("*.pt2"))
    assert python(OTHER_PROCESS, tmp_path, names, UNREGISTERED["program"], UNREGISTERED["result"]) == "same"


PACKAGE_PROCESS = """
import sys, torch

package, cases, error_text = sys.argv[1:]
try:
    torch._inductor.aoti_load_package(package)
except Exception as error:
    assert error_text in str(error), str(error)
else:
    raise AssertionError("no error without the import")

import dsa_ops

run = torch._inductor.aoti_load_package(package)
for args, _, want in torch.load(cases):
    got = run(*args)
    assert [type(x) for x in got] == [type(x) for x in want]
    for a, b in zip(got, want):
        torch.testing.assert_close(tuple(a), tuple(b), atol=1e-5, rtol=1e-5)
print("same")
"""


@pytest.mark.slow
@torch.no_grad()
def test_aot_inductor_package_runs_in_another_process(tmp_path):
    save(tmp_path, "read", program := exported_read(), Read(), [(reads(*s), {}) for s in ((7, 9), (1, 1), (3, 40))])
    path = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "package.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},  # of the wrapper around our ops
    )
    assert python(PACKAGE_PROCESS, path, tmp_path / "read.pt", UNREGISTERED["package"]) == "same"


@torch.no_grad()
def test_no_length_is_built_in():
    module = frozen_layer("sparse")
    program = exported_layer(module, packed(19)).module()
    for length in (0, 1, 2, 50):
        starts = torch.zeros(length, dtype=torch.int32)
        kwargs = {"x": torch.randn(length, SMALL["hidden_size"]), "starts": starts, "ends": starts + length}
        got, want = program(**kwargs), module(**kwargs)
        assert isinstance(got, DSAttentionOutput) and torch.equal(got.indices, want.indices)
        torch.testing.assert_close(got.out, want.out, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_dense_attention_exports_without_bounds():
    module = frozen_layer("dense")
    program = exported_layer(module, batched(2, 19)).module()
    kwargs = batched(3, 40)
    torch.testing.assert_close(program(**kwargs).out, module(**kwargs).out, atol=1e-5, rtol=1e-5)


# ---- training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", inputs.OPS)
def test_functions_export_for_training(name, strict):
    """One node of ours, which a program run at other lengths differentiates as eager does."""

    def split(args):
        is_tensor = {n: isinstance(x, torch.Tensor) for n, x in args.items()}
        return [{n: x for n, x in args.items() if is_tensor[n] == wanted} for wanted in (True, False)]

    tensors, numbers = split(inputs.arguments(name, grad=True))

    class Call(torch.nn.Module):
        def forward(self, tensors):
            return getattr(dsa_ops, name)(**tensors, **numbers)

    rows, keys = Dim("T", min=2, max=2**20), Dim("S", min=2, max=2**20)
    shapes = {n: {0: rows} if n in calls.ROWS else {0: keys} if n in calls.KEYS else {} for n in tensors}
    program = torch.export.export(Call(), (tensors,), dynamic_shapes=(shapes,), strict=strict)
    ours = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("dsa.")]
    assert ours == [f"dsa.{name}.default"]
    args = inputs.arguments(name, grad=True, T=11, S=5)
    result, want = program.module()(split(args)[0]), calls.run(name, args)
    assert type(result) is type(getattr(dsa_ops, name)(**args))
    found = dict(zip(want, calls.as_tuple(result), strict=True))
    calls.assert_all_equal(found, want)
    if name in inputs.DIFFERENTIABLE:
        grads = calls.incoming(name, want)
        calls.assert_all_equal(calls.gradients(name, args, grads, found), calls.gradients(name, args, grads, want))


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_an_attached_loss_stays_in_the_program(strict):
    """Of a torch.autograd.Function torch.export takes the forward alone; the loss has an op of its own there."""

    class Attach(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.side = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x, scale):
            return dsa_ops.attach_loss(self.main(x), self.side(x).square().mean(), scale)

    module, scale = Attach(), torch.tensor(3.0)
    shapes = ({0: Dim("T", min=2, max=2**20)}, None)
    program = torch.export.export(module, (torch.randn(3, 4), scale), dynamic_shapes=shapes, strict=strict).module()
    x = torch.randn(5, 4)
    for run in (module, program):
        out = run(x, scale.fill_(3))
        scale.fill_(7)  # what it holds at backward counts
        out.sum().backward()
    assert module.side.weight.grad.abs().sum() > 0
    want = gradients(module)
    assert all(torch.equal(grad, want[name]) for name, grad in gradients(program).items())


def test_the_op_of_an_attached_loss_is_well_registered():
    x, loss = torch.randn(3, 4, requires_grad=True), torch.randn((), requires_grad=True)
    for args in ((x, loss), (x.t(), loss, torch.tensor(2.0)), (x.detach(), loss), (x, loss.detach())):
        torch.library.opcheck(torch.ops.dsa.attach_loss.default, args)


@pytest.mark.parametrize(
    ("mode", "strict"), [("sparse", False), ("sparse", True), ("frozen", False), ("warmup", False)]
)
def test_a_layer_exported_for_training_is_saved_and_trains(mode, strict, tmp_path):
    """Indexer and all; and what is exported while gradients are enabled can be loaded again."""

    def arguments(length):
        made = batched(2, length) if mode == "warmup" else packed(length)
        return {name: t.double() if name == "x" else t for name, t in made.items()}

    module = set_mode(layer("dense"), mode)
    torch.export.save(exported_layer(module, arguments(19), strict), tmp_path / "layer.pt2")
    program, kwargs = torch.export.load(tmp_path / "layer.pt2").module(), arguments(31)
    for name, p in program.named_parameters():
        p.requires_grad_(module.get_parameter(name).requires_grad)  # torch 2.9 does not save it
    for run in (module, program):
        run(**kwargs).out.square().sum().backward()
    want = gradients(module)
    assert (mode == "frozen") == (want["indexer.wk.weight"] is None)
    for name, grad in gradients(program).items():
        if want[name] is None:
            assert grad is None, name
        else:
            torch.testing.assert_close(grad, want[name], msg=lambda m, n=name: f"{n}: {m}")
