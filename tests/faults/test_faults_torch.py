"""torch.library, compile, checkpointing, export, autocast: what other projects got wrong."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import calls
import dsa_ops
import inputs
import steps
from inputs import ALL, BACKWARDS, DIFFERENTIABLE, OPS


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("name", ALL)
def test_the_fake_promises_the_strides_that_come(name, layout):
    """pytorch/pytorch#182328, NVIDIA/cuEquivariance#223: empty_like in the fake keeps the strides of its input, the
    kernel returns a contiguous tensor, and the compiled graph crashes; with contiguous inputs all is well."""
    args = inputs.arguments(name, layout=layout)
    real = calls.run(name, args)
    fake = calls.run(name, {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in args.items()})
    for n in real:
        assert (fake[n].shape, fake[n].stride(), fake[n].dtype) == (real[n].shape, real[n].stride(), real[n].dtype)


@pytest.mark.parametrize("case", ["plain", "no_rows", "no_keys", "one", "float64"])
@pytest.mark.parametrize("name", ALL)
def test_no_result_shares_memory_with_an_input_or_another_result(name, case):
    """pytorch/pytorch#134278: a custom op may not return its input or a view, not even where there is nothing to do."""
    args = inputs.arguments(name, inputs.CASES[case])
    tensors = [x for x in args.values() if isinstance(x, torch.Tensor)] + list(calls.run(name, args).values())
    found = [x.untyped_storage().data_ptr() for x in tensors if x.numel()]
    results = found[len([x for x in args.values() if isinstance(x, torch.Tensor) and x.numel()]) :]
    assert all(found.count(pointer) == 1 for pointer in results)


@pytest.mark.gpu
def test_inputs_that_inductor_has_padded():
    """pytorch/pytorch#137437: `.contiguous()` before the op, and still it saw the padded strides of a product."""
    torch._dynamo.reset()
    linear = torch.nn.Linear(100, 3 * 78, device="cuda", dtype=torch.bfloat16)
    kv, ids = torch.randn(9, 78, device="cuda", dtype=torch.bfloat16), steps.ids([[0, 4, -1]], 7).cuda()

    def f(x):
        return dsa_ops.sparse_mla(linear(x).view(-1, 3, 78).contiguous(), kv, ids, 0.1, 64).out

    x = torch.randn(7, 100, device="cuda", dtype=torch.bfloat16)
    calls.assert_near(torch.compile(f, fullgraph=True)(x), f(x), 3e-2)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_results_that_nobody_uses(name, device):
    """pytorch/pytorch#130282, pytorch/pytorch#38148: ids carry no gradient, and an unused result sends none, rather
    than zeros of full size."""
    args = steps.arguments(name, device=device)
    outputs = calls.run(name, args)
    for n, x in outputs.items():
        assert x.requires_grad == (n in OPS[name].through)
        assert not x.requires_grad or x.is_floating_point()
    for n in OPS[name].through:
        grad = {n: torch.randn_like(outputs[n])}
        got = calls.gradients(name, args, grad, calls.run(name, args))
        calls.assert_all_near(got, calls.reference_gradients(name, args, grad))
    unused = calls.run(name, args)
    leaf = next(args[n] for n in OPS[name].differentiable)
    (leaf.sum() + 0 * sum(x.detach().nan_to_num(0, 0, 0).float().sum() for x in unused.values())).backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))


@pytest.mark.parametrize("mixed", [torch.float16, torch.float64])
def test_mixed_dtypes_are_refused_without_autocast_and_cast_with_it(mixed, device):
    """ByteDance-Seed/VeOmni#1016, pytorch/pytorch#145588: a norm under autocast returned float32, the kernel wanted
    bfloat16, and a slow path ran without a word."""
    args = steps.arguments("sparse_mla", steps.ids([[0, 1, -1]], 4), device=device, sink=None)
    bad = {**args, "q": args["q"].detach().to(mixed)}
    with pytest.raises(TypeError, match=r"sparse_mla: kv must be torch\.float"):
        calls.run("sparse_mla", bad)
    with torch.autocast(device, torch.bfloat16):
        q = torch.nn.functional.rms_norm(args["q"], (8,)).float()
        out = dsa_ops.sparse_mla(q, args["kv"].bfloat16(), args["indices"]).out
        if mixed == torch.float16:
            assert calls.run("sparse_mla", bad)["out"].dtype == torch.bfloat16
        else:  # float64 is never cast
            with pytest.raises(TypeError, match=r"sparse_mla: kv must be torch\.float64"):
                calls.run("sparse_mla", bad)
    assert out.dtype == torch.bfloat16


def layer(q, kv, index_q, index_k, weights, seen=None):
    indices, scores = torch.ops.dsa.indexer_topk(index_q, index_k, weights, *steps.causal(len(q), q.device).values(), 3)
    if seen is not None:
        seen.append(indices.detach().clone())
    out, lse = torch.ops.dsa.sparse_mla(q, kv, indices, 0.3, 5)
    target = torch.ops.dsa.attention_target(q.detach(), kv.detach(), lse.detach(), indices, 0.3)
    return out.square().sum() + torch.ops.dsa.indexer_kl(target, scores, indices).sum()


def leaves(device, T=6):
    sizes = ((T, 3, 6), (T, 6), (T, 2, 4), (T, 4), (T, 2))
    generator = torch.Generator().manual_seed(T)  # small integers: relu zeros and ties everywhere
    return [torch.randint(-1, 2, s, generator=generator).float().to(device).requires_grad_() for s in sizes]


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each op of ours ran."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dsa":
            self.calls[func._opname] = self.calls.get(func._opname, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep", [False, True])
def test_recomputation_selects_again_alike_or_not_at_all(keep, device):
    """InternLM/xtuner#1989, allenai/OLMo-core#713, pytorch/torchtitan#1117: recomputation selected other ids at ties,
    and cost the selection twice. A policy can keep the ids, because selecting is an op of its own."""
    want = leaves(device)
    layer(*want).backward()

    def policy(ctx, op, *args, **kwargs):
        kept = op is torch.ops.dsa.indexer_topk.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    got, seen = leaves(device), []
    options = {"context_fn": contexts} if keep else {}
    with Count() as count:
        checkpoint(layer, *got, seen, use_reentrant=False, **options).backward()
    assert count.calls["indexer_topk"] == (1 if keep else 2) and count.calls["sparse_mla"] == 2
    assert len(seen) == 2 and torch.equal(*seen)
    for a, b in zip(got, want, strict=True):
        calls.assert_near(a.grad, b.grad)


def test_ids_made_in_inference_mode_are_refused_by_backward_and_fine_without(device):
    """pytorch/pytorch#161164, pytorch/pytorch#77967: tensors of a rollout in inference mode cannot be kept for a
    backward. Never a wrong gradient: PyTorch's error, or a clone."""
    args = steps.arguments("sparse_mla", device=device)
    ids = args["indices"]
    with torch.inference_mode():
        made = ids + 0
    want = steps.run("sparse_mla", args, {"out": torch.ones(7, 3, 5, device=device)})
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        calls.run("sparse_mla", {**args, "indices": made})
    got = steps.run("sparse_mla", {**args, "indices": made.clone()}, {"out": torch.ones(7, 3, 5, device=device)})
    calls.assert_all_near(got, want, 1e-6)
    with torch.no_grad():
        calls.assert_near(calls.run("sparse_mla", {**args, "indices": made})["out"], want["out"])


@pytest.mark.parametrize("name", OPS)
def test_inference_mode(name, device):
    """pytorch/pytorch#161164: the ops themselves run in inference mode, on inputs of either kind."""
    args = inputs.arguments(name, device=device)
    want = calls.run(name, args)
    with torch.inference_mode():
        made = {n: x + 0 if isinstance(x, torch.Tensor) else x for n, x in args.items()}
        for given in (args, made):
            calls.assert_all_equal({n: x.clone() for n, x in calls.run(name, given).items()}, want)


def test_lengths_that_change_neither_recompile_nor_specialise(device):
    """NVIDIA/Megatron-LM#7343, allenai/OLMo-core#500, pytorch/pytorch#121080: every new pack compiled the layer again.
    Sizes of 1 and 0 are compiled apart by PyTorch, and right."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")

    def step(q, kv, indices, length):
        out, lse = dsa_ops.sparse_mla(q, kv, indices, 0.3, 5, topk_length=length)
        return out, lse

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for T, S, K in ((7, 9, 4), (12, 5, 8), (3, 30, 11), (1, 9, 4), (0, 9, 4), (7, 1, 4)):
        q, kv = torch.randn(T, 3, 6, device=device), torch.randn(S, 6, device=device)
        ids = torch.randint(-1, S, (T, K), dtype=torch.int32, device=device)
        length = torch.randint(0, K + 1, (T,), dtype=torch.int32, device=device)
        for a, b in zip(compiled(q, kv, ids, length), step(q, kv, ids, length), strict=True):
            assert torch.equal(a, b)
        if T > 1 and S > 1:
            assert backend.frame_count == 1


@pytest.mark.parametrize("name", ["indexer_kl", "dense_indexer_kl"])
def test_a_compiled_loss_whose_teacher_alone_requires_grad(name, device):
    """NVIDIA/Megatron-LM#4897: no graph in eager, none compiled."""
    torch._dynamo.reset()
    args = inputs.arguments(name, device=device)
    teacher = "target" if name == "indexer_kl" else "q"
    args[teacher] = args[teacher].requires_grad_()
    numbers = {n: x for n, x in args.items() if not isinstance(x, torch.Tensor)}
    tensors = {n: x for n, x in args.items() if isinstance(x, torch.Tensor)}
    call = functools.partial(getattr(torch.ops.dsa, name), **numbers)
    found = calls.as_tuple(torch.compile(lambda x: call(**x), fullgraph=True, backend="aot_eager")(tensors))
    for a, b in zip(found, calls.as_tuple(call(**tensors)), strict=True):
        assert not a.requires_grad and not b.requires_grad
        calls.assert_near(a, b)


def test_export_with_any_number_of_rows_and_keys():
    """pytorch/pytorch#143786, pytorch/pytorch#160646: a program with sizes that vary, and every op of ours in it. The
    limit of 2**31 keys is no constraint that a caller has to know of."""

    class Layer(torch.nn.Module):
        def forward(self, q, kv, index_q, index_k, weights, starts, ends):
            indices, scores = dsa_ops.indexer_topk(index_q, index_k, weights, starts=starts, ends=ends, topk=3)
            out, lse = dsa_ops.sparse_mla(q, kv, indices, 0.3, 5)
            return out, dsa_ops.indexer_loss(q, kv, lse, indices, scores, 0.3)

    def example(T, S):
        x = [torch.randn(T, 3, 6), torch.randn(S, 6), torch.randn(T, 2, 4), torch.randn(S, 4), torch.randn(T, 2)]
        return (*x, *steps.bounds([0] * T, [S] * T).values())

    rows, keys = {0: torch.export.Dim("rows")}, {0: torch.export.Dim("keys")}
    program = torch.export.export(Layer(), example(6, 9), dynamic_shapes=(rows, keys, rows, keys, rows, rows, rows))
    names = [str(n.target) for n in program.graph.nodes if "dsa" in str(n.target)]
    assert names == [f"dsa.{n}.default" for n in ("indexer_topk", "sparse_mla", "attention_target", "indexer_kl")]
    for T, S in ((6, 9), (2, 40), (11, 3)):
        given = example(T, S)
        for a, b in zip(program.module()(*given), Layer()(*given), strict=True):
            calls.assert_near(a, b)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_torch_func_grad_is_refused_by_name(name):
    """Ops registered with register_autograd are opaque to torch.func.grad; PyTorch's text is about a class that the
    user has never heard of."""
    args = steps.arguments(name, dtype=torch.float64)
    first = OPS[name].differentiable[0]
    changed = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in args.items() if n != first}

    def f(x):
        found = getattr(dsa_ops, name)(**{**args, **changed, first: x})
        output = dict(zip(OPS[name].outputs, calls.as_tuple(found), strict=True))[OPS[name].through[0]]
        return torch.where(output.isfinite(), output, 0.0).sum()

    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(RuntimeError, match=rf"dsa::{name} does not support torch\.func\.grad"):
            transform(f)(args[first].detach())


def everything_public(device):
    """Every public function once, with defaults, on batched inputs."""
    generator = torch.Generator().manual_seed(0)

    def floats(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return x.to(device).requires_grad_()

    q, kv, index_q, index_k, weights = (
        floats(2, 6, 3, 8),
        floats(2, 6, 8),
        floats(2, 6, 2, 4),
        floats(2, 6, 4),
        floats(2, 6, 2),
    )
    indices, scores = dsa_ops.indexer_topk(index_q, index_k, weights, topk=3)
    again = dsa_ops.indexer_scores(index_q, index_k, weights, indices.long())
    out, lse = dsa_ops.sparse_mla(q, kv, indices)
    target = dsa_ops.attention_target(q, kv, lse, indices)
    kl = dsa_ops.indexer_kl(target, scores, indices)
    dense = dsa_ops.dense_indexer_kl(index_q, index_k, weights, q, kv, lse)
    compact, length = dsa_ops.layouts.compact_topk(indices)
    loss = dsa_ops.indexer_loss(q, kv, lse, compact, scores, None, topk_length=length, row_mask=length > 1)
    starts, ends = dsa_ops.layouts.packed_bounds(torch.nn.functional.pad(length.flatten().cumsum(0), (1, 0)))
    dsa_ops.attach_loss(out, loss + dense.loss).sum().backward()
    grads = [x.grad for x in (q, kv, index_q, index_k, weights)]
    found = (indices, scores, again, out, lse, target, kl, dense.loss, dense.kl, compact, length, loss, starts, ends)
    return [x.detach() for x in (*found, *grads)]


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16, "meta", "cpu"], ids=str)
def test_the_default_dtype_and_device_play_no_part(default, device):
    """pytorch/ao#2286, mistralai/mistral-inference#215, pytorch/pytorch#178684: a tensor made inside without a dtype or
    a device of its own gets the user's default."""
    want = everything_public(device)
    before = torch.get_default_dtype()
    try:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
            got = everything_public(device)
        else:
            with torch.device(default):
                got = everything_public(device)
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.device == b.device
        if device == "cpu":
            assert torch.equal(calls.bits(a), calls.bits(b))
        else:
            calls.assert_near(a, b)


@pytest.mark.parametrize("name", BACKWARDS)
def test_backward_ops_take_what_a_compiled_graph_hands_them(name):
    """pytorch/pytorch#137219: gradients of a compiled graph may come as zeros with strides 0, or not at all."""
    args = inputs.arguments(name)
    want = calls.run(name, args)
    for n in (n for n in args if n.startswith("grad_")):
        spread = torch.zeros((), dtype=args[n].dtype).expand(args[n].shape)
        got = calls.run(name, {**args, n: spread})
        calls.assert_all_near(got, calls.run(name, {**args, n: torch.zeros_like(args[n])}))
        assert got.keys() == want.keys()
