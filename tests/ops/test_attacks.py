"""Odd callers: other kinds of tensors, memory that overlaps or moves, threads, modes and tracers. Right, or refused."""

import sys
import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import calls
import dsa_ops
import inputs
from calls import public
from inputs import ALL, DIFFERENTIABLE, OPS, Case

SMALL = Case(T=4, S=5)


def tensors(args):
    return {n: x for n, x in args.items() if isinstance(x, torch.Tensor)}


def values_and_gradients(name, args, door=None):
    """Outputs, then gradients for incoming ones; through the op or through `door`."""
    outputs = calls.run(name, args)
    if door is not None:
        outputs = dict(zip(OPS[name].outputs, calls.as_tuple(door(name, args)), strict=True))
    found = {n: x.detach() for n, x in outputs.items()}
    if name in DIFFERENTIABLE:
        ones = {n: torch.ones_like(outputs[n]) for n in OPS[name].through}
        found |= {f"grad_{n}": g for n, g in calls.gradients(name, args, ones, outputs).items()}
    return found


# ---- what is no strided tensor ---------------------------------------------------------------------------------------

KINDS = {
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.to_sparse_csr() if x.dim() == 2 else None,
    "mkldnn": lambda x: x.to_mkldnn() if x.dtype == torch.float32 and x.dim() else None,
}
NESTED = {
    "nested": lambda x: torch.nested.nested_tensor(list(x)) if x.dim() > 1 else None,
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged) if x.dim() > 1 else None,
}


@pytest.mark.filterwarnings("ignore")  # torch announces what is in beta
@pytest.mark.parametrize("kind", [*KINDS, *NESTED])
@pytest.mark.parametrize("name", ALL)
def test_a_tensor_that_is_not_strided_is_named(name, kind):
    """Nested ones are refused by PyTorch before a raw op sees them."""
    args = inputs.arguments(name, SMALL)
    doors = ([public] if name in OPS else []) + ([] if kind in NESTED else [lambda op, a: calls.run(op, a)])
    for n, x in tensors(args).items():
        odd = {**KINDS, **NESTED}[kind](x)
        for door in doors if odd is not None else ():
            with pytest.raises(TypeError, match=rf"^{name}: {n} must be a strided tensor, got a .* one"):
                door(name, {**args, n: odd})


@pytest.mark.parametrize("name", ALL)
def test_none_for_a_tensor_is_named(name):
    args = inputs.arguments(name, SMALL)
    for argument in calls.op(name)._schema.arguments:
        if str(argument.type) == "Tensor":
            with pytest.raises(TypeError, match=f"^{name}: {argument.name} must be a torch.Tensor, got NoneType"):
                calls.run(name, {**args, argument.name: None})


@pytest.mark.parametrize(
    ("name", "number"),
    [("indexer_topk", "topk"), ("sparse_mla", "d_v"), ("dense_indexer_kl", "total_heads")],
)
def test_an_int_beyond_64_bits_is_named(name, number):
    args = inputs.arguments(name, SMALL)
    with pytest.raises(ValueError, match=f"^{name}: {number} must fit in 64 bits, got {2**63}"):
        public(name, {**args, number: 2**63})


@pytest.mark.parametrize("name", ["indexer_scores", "sparse_mla", "attention_target"])
def test_ids_without_a_dimension_are_named(name):
    args = inputs.arguments(name, SMALL)
    length = {"topk_length": torch.tensor(1)} if "topk_length" in args else {}
    for ids in (torch.tensor(1), torch.tensor(1, dtype=torch.int32)):
        with pytest.raises(ValueError, match=rf"^{name}: indices must have shape \[T, K\]"):
            public(name, {**args, "indices": ids, **length})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*KINDS, *NESTED])
def test_the_loss_names_what_is_not_strided(kind):
    q, kv, indices, scores = torch.randn(6, 2, 4), torch.randn(6, 4), torch.zeros(6, 3).int(), torch.randn(6, 3)
    args = {"q": q, "kv": kv, "lse": torch.randn(6, 2), "indices": indices, "scores": scores, "softmax_scale": None}
    args |= {"row_mask": torch.ones(6, dtype=torch.bool), "topk_length": torch.full((6,), 2), "coeff": torch.ones(1)}
    for n, x in tensors(args).items():
        odd = {**KINDS, **NESTED}[kind](x)
        if odd is not None:
            with pytest.raises(TypeError, match=rf"^indexer_loss: {n} must be a strided tensor, got a .* one"):
                dsa_ops.indexer_loss(**{**args, n: odd})


def test_the_loss_names_ids_as_they_came_where_a_length_is_given():
    args = [torch.randn(6, 2, 4), torch.randn(6, 4), torch.randn(6, 2)]
    length = torch.full((6,), 2)
    with pytest.raises(IndexError, match=f"^indexer_loss: indices must be below .* got {2**40}"):
        dsa_ops.indexer_loss(*args, torch.full((6, 3), 2**40), torch.randn(6, 3), None, topk_length=length)
    with pytest.raises(ValueError, match=r"^indexer_loss: indices must have shape \[T, K\]"):
        dsa_ops.indexer_loss(*args, torch.tensor(1), torch.randn(6, 3), None, topk_length=torch.tensor(1))


# ---- settings and sizes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "checked"), [("", False), ("0", False), ("1", True), ("yes", None), ("2", None)])
def test_validate_is_0_or_1(setting, checked, monkeypatch):
    monkeypatch.setenv("DSA_OPS_VALIDATE", setting)
    assert dsa_ops.checks.validates(torch.device("cpu"))
    if checked is None:
        with pytest.raises(ValueError, match=f"DSA_OPS_VALIDATE must be 0 or 1, got '{setting}'"):
            dsa_ops.checks.validates(torch.device("cuda"))
    else:
        assert dsa_ops.checks.validates(torch.device("cuda")) is checked


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "dtype must be a floating-point torch.dtype, got 'bf16'", {"dtype": "bf16"}),
        (TypeError, "dtype must be a floating-point torch.dtype, got torch.int32", {"dtype": torch.int32}),
        (ValueError, "device must be a torch.device or the name of one, got 'gpu'", {"device": "gpu"}),
        (ValueError, "device must be a torch.device or the name of one, got 0.5", {"device": 0.5}),
    ],
)
def test_warmup_names_what_it_cannot_compile_for(error, message, changes):
    with pytest.raises(error, match=f"^warmup: {message}"):
        dsa_ops.warmup(heads=1, index_heads=1, **changes)


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_batches_of_every_small_size(batch):
    """Shapes and a backward pass where there are no sequences, no rows or no keys."""
    for rows, keys in ((0, 0), (0, 3), (2, 0), (2, 3)):
        q, k = torch.randn(batch, rows, 2, 4, requires_grad=True), torch.randn(batch, keys, 4, requires_grad=True)
        weights = torch.randn(batch, rows, 2, requires_grad=True)
        starts = torch.zeros(batch, rows, dtype=torch.int64)
        bounds = {"starts": starts, "ends": starts + 2}
        indices, scores = dsa_ops.indexer_topk(q, k, weights, **bounds, topk=4)
        out, lse = dsa_ops.sparse_mla(q, k, indices.long(), d_v=3, topk_length=starts + 3)
        loss = dsa_ops.indexer_loss(q, k, lse, indices, scores, None, row_mask=starts == 0)
        dense, kl = dsa_ops.dense_indexer_kl(q, k, weights, q, k, lse, **bounds)
        assert indices.shape == scores.shape == (batch, rows, 4) and kl.shape == (batch, rows)
        assert out.shape == (batch, rows, 2, 3) and lse.shape == (batch, rows, 2)
        assert loss.isfinite() and dense.isfinite()
        (out.sum() + loss + dense).backward()
        assert all(x.grad.shape == x.shape for x in (q, k, weights))


@pytest.mark.parametrize("backward", [False, True])
def test_a_target_whose_sum_overflows_shows(backward, device):
    """Not a KL of 0, nor a gradient that takes every share for 0."""
    target = torch.full((2, 3), 1.5e38, device=device)
    target[1] = 1.0
    scores = torch.randn(2, 3, device=device)
    indices = torch.zeros(2, 3, dtype=torch.int32, device=device)
    if backward:
        found = calls.op("indexer_kl_backward")(torch.ones(2, device=device), target, scores, indices).sum(-1)
    else:
        found = calls.op("indexer_kl")(target, scores, indices)
    assert found.isnan().tolist() == [True, False]


# ---- memory ----------------------------------------------------------------------------------------------------------


def negated(x):
    """A view with the negative bit set."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag if x.dtype in (torch.float32, torch.float64) else x


def unaligned(x):
    """Behind one element of poison."""
    buffer = x.new_full((x.numel() + 2,), float("nan") if x.is_floating_point() else 2**31 - 1)
    return buffer[1:-1].view(x.shape).copy_(x)


def wild_strides(x):
    """Dimensions of size 1 with strides that nobody may use."""
    x = x.contiguous()
    return x.as_strided(x.shape, [s if n > 1 else 10**9 for n, s in zip(x.shape, x.stride(), strict=True)])


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize(
    "change",
    [negated, unaligned, wild_strides, lambda x: x.as_subclass(Plain), lambda x: torch.nn.Parameter(x, False)],
    ids=["negated", "unaligned", "wild strides", "subclass", "parameter"],
)
@pytest.mark.parametrize("case", [SMALL, inputs.CASES["one"]], ids=["small", "one"])
@pytest.mark.parametrize("name", ALL)
def test_views_and_subclasses(name, case, change, device):
    args = inputs.arguments(name, case, device=device)
    want = calls.run(name, args)
    got = calls.run(name, {n: change(x) if isinstance(x, torch.Tensor) else x for n, x in args.items()})
    calls.assert_all_near({n: x.as_subclass(torch.Tensor) for n, x in got.items()}, want, 1e-6)


@pytest.mark.parametrize("name", ALL)
def test_inputs_as_large_as_a_tile_are_not_written(name, device):
    """A tile without padding may be the input itself."""
    args = inputs.arguments(name, Case(T=256, S=256, H=16, D=16, Dv=16, Hi=16, Di=16, K=16), device=device)
    before = {n: x.clone() for n, x in tensors(args).items()}
    results = calls.run(name, args)
    calls.assert_all_equal({n: args[n] for n in before}, before)
    places = {x.untyped_storage().data_ptr() for x in before.values()} | {
        x.untyped_storage().data_ptr() for x in tensors(args).values()
    }
    assert not places & {x.untyped_storage().data_ptr() for x in results.values()}


def test_one_tensor_as_several_arguments(device):
    """Queries that are a view of the keys, index queries that are the index keys, a teacher that is the student."""
    keys = torch.randn(6, 8, dtype=torch.float64, device=device, requires_grad=True)
    ends = torch.arange(1, 7, device=device, dtype=torch.int32)
    starts = torch.zeros_like(ends)
    weights = torch.randn(6, 1, dtype=torch.float64, device=device)
    queries = keys[:, None]
    apart = {"q": keys.detach()[:, None].clone().requires_grad_(), "k": keys.detach().clone().requires_grad_()}

    def total(q, k):
        indices, scores = dsa_ops.indexer_topk(q, k, weights, starts=starts, ends=ends, topk=3)
        out, lse = dsa_ops.sparse_mla(q, k, indices)
        teacher = dsa_ops.dense_indexer_kl(q, k, weights, q, k, lse.detach(), starts=starts, ends=ends, relu=False)
        return torch.where(indices >= 0, scores, 0).sum() + out.sum() + teacher.loss

    together = torch.autograd.grad(total(queries, keys), keys)[0]
    split = torch.autograd.grad(total(**apart), list(apart.values()))
    torch.testing.assert_close(together, split[0][:, 0] + split[1])


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_change_in_place_before_backward_raises_or_does_not_matter(name):
    for n in tensors(inputs.arguments(name, SMALL)):
        args = inputs.arguments(name, SMALL, grad=True)
        want = values_and_gradients(name, args)
        outputs = calls.run(name, args)
        with torch.no_grad():
            args[n].add_(1)
        ones = {m: torch.ones_like(outputs[m]) for m in OPS[name].through}
        try:
            got = calls.gradients(name, args, ones, outputs)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            calls.assert_all_equal(got, {m: want[f"grad_{m}"] for m in got})


# ---- modes, hooks, threads -------------------------------------------------------------------------------------------


class _DefaultDtype:
    def __init__(self, dtype):
        self.dtype = dtype

    def __enter__(self):
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_):
        torch.set_default_dtype(self.before)


class _Transparent(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _spread(x):
    return inputs.relayout(x, "transposed") if x.dim() else x


MODES = {
    "default float64": lambda: _DefaultDtype(torch.float64),
    "default bfloat16": lambda: _DefaultDtype(torch.bfloat16),
    "default device meta": lambda: torch.device("meta"),
    "dispatch mode": _Transparent,
    "anomaly": torch.autograd.detect_anomaly,
    "saved as copies of other strides": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), _spread),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "saved tensors may change": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPS)
def test_modes_change_nothing(name, mode, device):
    args = inputs.arguments(name, SMALL, device=device, grad=True)
    want = values_and_gradients(name, args)
    for door in (None, public):
        with MODES[mode]():
            got = values_and_gradients(name, args, door)
        calls.assert_all_near(got, want, 1e-6)


def test_threads_do_not_meet():
    """Forward and backward at once: plain, under autocast, and with a backend forced."""
    names = [*OPS]
    plain = {n: values_and_gradients(n, inputs.arguments(n, SMALL, grad=True)) for n in names}
    with torch.autocast("cpu", torch.bfloat16):
        narrow = {n: values_and_gradients(n, inputs.arguments(n, SMALL, grad=True)) for n in names}
    faults = []

    def work(context, want):
        try:
            for _ in range(3):
                for n in names:
                    with context():
                        got = values_and_gradients(n, inputs.arguments(n, SMALL, grad=True))
                    calls.assert_all_equal(got, want[n])
        except BaseException as fault:
            faults.append(fault)

    jobs = [
        (lambda: torch.autocast("cpu", torch.bfloat16), narrow),
        (lambda: dsa_ops.backend("unfused"), plain),
        (lambda: dsa_ops.backend("auto"), plain),
        (torch.enable_grad, plain),
    ]
    threads = [threading.Thread(target=work, args=job) for job in jobs * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert not dsa_ops.dispatch._forced


def test_backend_blocks_of_many_threads_leave_nothing_forced():
    """A block that two threads changed the list of blocks around stayed open for good."""
    seen = set()

    def work():
        for _ in range(3000):
            with dsa_ops.backend("unfused"):
                seen.add(dsa_ops.dispatch.requested_backend())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen == {"unfused"}
    assert dsa_ops.dispatch.requested_backend() == "auto"
    assert not dsa_ops.dispatch._forced


def test_a_backend_block_is_entered_again_and_inside_itself():
    block = dsa_ops.backend("unfused")
    for _ in range(2):
        with block:
            with block, dsa_ops.backend("auto"), block:
                assert dsa_ops.dispatch.requested_backend() == "unfused"
            assert dsa_ops.dispatch.requested_backend() == "unfused"
        assert dsa_ops.dispatch.requested_backend() == "auto"


# ---- tracers ---------------------------------------------------------------------------------------------------------


def of_tensors(name, args, wide):
    """The public function of its tensors alone; `wide` gives int64 ids and bounds, whose values eager looks at."""

    def call(*leaves):
        given = dict(zip(tensors(args), leaves, strict=True))
        if wide:
            given = {n: x.long() if x.dtype == torch.int32 else x for n, x in given.items()}
        return calls.as_tuple(public(name, {**args, **given}))

    return call


@pytest.mark.filterwarnings("ignore")  # of jit.trace: that it is deprecated, and that sizes become constants
@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("tracer", ["real", "fake", "symbolic", "jit", "functionalize"])
@pytest.mark.parametrize("name", OPS)
def test_tracers_see_through_the_public_functions(name, tracer, wide):
    args = inputs.arguments(name, SMALL)
    call, given = of_tensors(name, args, wide), tuple(tensors(args).values())
    if tracer == "jit":
        traced = torch.jit.trace(call, given, check_trace=False)
    elif tracer == "functionalize":
        traced = torch.func.functionalize(call)
    else:
        traced = make_fx(call, tracing_mode=tracer)(*given)
    got, want = (dict(zip(OPS[name].outputs, f(*given), strict=True)) for f in (traced, call))
    calls.assert_all_equal(got, want)


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_linearize_is_refused_by_name(name, wide):
    args = inputs.arguments(name, SMALL)
    given = tuple(tensors(args).values())
    wanted = next(i for i, n in enumerate(tensors(args)) if n in OPS[name].differentiable)

    def call(x):
        return of_tensors(name, args, wide)(*given[:wanted], x, *given[wanted + 1 :])[-1]

    with pytest.raises(RuntimeError, match=f"dsa::{name}"):
        torch.func.linearize(call, given[wanted])


@pytest.mark.parametrize("mode", ["dense", "warmup", "sparse", "frozen"])
def test_make_fx_of_a_layer_with_bounds(mode):
    sizes = dict(hidden_size=16, num_heads=2, q_lora_rank=8, kv_lora_rank=8, index_n_heads=2, index_head_dim=8)
    config = dsa_ops.nn.deepseek_v32(**sizes, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, index_topk=2)
    layer = dsa_ops.nn.DSAttention(config)
    layer.mode = mode
    starts, ends = torch.tensor([0, 0, 2, 2]), torch.tensor([1, 2, 3, 4])

    def call(x):
        return layer(x, starts=starts, ends=ends).out

    first, second = torch.randn(2, 4, 16)
    with torch.no_grad():
        traced = make_fx(call)(first)
        torch.testing.assert_close(traced(second), call(second))


# ---- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in OPS if n != "indexer_kl"])
def test_explain_under_autocast_takes_what_the_op_takes(name):
    args = inputs.arguments(name, SMALL)
    query = next(n for n in ("q", "index_q") if n in args)
    args[query] = args[query].bfloat16()
    positional, keywords = calls.public_arguments(name, args)
    with torch.autocast("cpu", torch.bfloat16):
        public(name, args)
        explanation = dsa_ops.explain(name, *positional, **keywords)
    assert explanation.backend == "unfused"
    with pytest.raises(TypeError, match=f"^{name}: "):
        public(name, args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((["sparse_mla"],), "explain: op must be a str, got list"),
        (("indexer_kl_backward", 1, 2, 3, 4), "indexer_kl_backward: grad_kl must be a torch.Tensor, got int"),
    ],
)
def test_explain_of_what_is_no_call(args, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        dsa_ops.explain(*args)


def test_explain_inside_a_compiled_function():
    args = list(tensors(inputs.arguments("sparse_mla", SMALL)).values())[:3]
    compiled = torch.compile(lambda *a: dsa_ops.explain("sparse_mla", *a).backend, fullgraph=True, backend="eager")
    assert compiled(*args) == "unfused"


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_loss_of_two_dtypes_is_refused_where_autocast_does_not_cast(device, autocast):
    q, kv, lse, scores = (torch.randn(*s, device=device) for s in ((6, 2, 4), (6, 4), (6, 2), (6, 3)))
    args = (q.bfloat16(), kv, lse, torch.zeros(6, 3, dtype=torch.int32, device=device), scores, None)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if autocast and device == "cpu":
            assert dsa_ops.indexer_loss(*args).isfinite()
        else:
            with pytest.raises(TypeError, match=r"^indexer_loss: kv must be torch.bfloat16, got torch.float32"):
                dsa_ops.indexer_loss(*args)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_layer_names_a_nested_tensor():
    sizes = dict(hidden_size=16, num_heads=2, q_lora_rank=8, kv_lora_rank=8, index_n_heads=2, index_head_dim=8)
    config = dsa_ops.nn.deepseek_v32(**sizes, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, index_topk=2)
    x = torch.nested.nested_tensor([torch.randn(2, 16), torch.randn(3, 16)])
    with pytest.raises(TypeError, match=r"^DSAttention: x must be a strided tensor, got a nested one"):
        dsa_ops.nn.DSAttention(config)(x)
