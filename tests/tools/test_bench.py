"""tools/bench: its parts, what it refuses, that failures do not stop it, and what it leaves. No time is asserted."""

import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

import dsa_ops

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SMALL = ("--device", "cpu", "--length", "40", "--repeats", "1")


@pytest.fixture(scope="module")
def bench():
    """The program as a module; its parts are its attributes."""
    before = list(sys.path)
    loader = importlib.machinery.SourceFileLoader("dsa_ops_bench", str(TOOLS / "bench"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = writes
    yield module
    sys.path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "_bench"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def inputs(bench, pattern="random", length=40, rows=None, preset="demo", device="cpu"):
    case = bench.presets.Case(preset, length, pattern, rows)
    return bench.Inputs(case, torch.device(device), torch.float32)


def run(bench, *arguments):
    return bench.main([*SMALL, *map(str, arguments)])


# ------------------------------------------------------------------------------------------------------------- inputs


def test_sizes_are_the_published_ones(bench):
    sizes = {name: (s.heads, s.head_dim, s.v_dim, s.topk) for name, s in bench.presets.PRESETS.items()}
    indexers = {name: (s.index_heads, s.index_dim) for name, s in bench.presets.PRESETS.items()}
    assert sizes["deepseek_v32"] == (128, 576, 512, 2048) and indexers["deepseek_v32"] == (64, 128)
    assert sizes["glm5"] == (64, 576, 512, 2048) and indexers["glm5"] == (32, 128)
    for heads in (8, 16, 32):
        assert sizes[f"shard{heads}"] == (heads, *sizes["deepseek_v32"][1:])
        assert indexers[f"shard{heads}"] == indexers["deepseek_v32"]
    for name, layer in (("deepseek_v32", dsa_ops.nn.deepseek_v32()), ("glm5", dsa_ops.nn.glm5())):
        assert sizes[name] == (
            layer.num_heads,
            layer.kv_lora_rank + layer.qk_rope_head_dim,
            layer.kv_lora_rank,
            layer.index_topk,
        )
        expanded = (layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim)
        assert bench.presets.PRESETS[name].expanded == expanded


@pytest.mark.parametrize("length", [1, 3, 16, 100])
def test_packed_sequences_cover_all_rows(bench, length):
    sequences = bench.presets.Case("demo", length, "packed").sequences()
    assert [row for first, last in sequences for row in range(first, last)] == list(range(length))
    if length == 100:
        assert len({last - first for first, last in sequences}) == len(sequences) == 4


@pytest.mark.parametrize("pattern", ["random", "overlapping", "packed"])
@pytest.mark.parametrize(("length", "rows"), [(1, None), (63, None), (300, None), (300, 170)])
def test_ids_are_distinct_visible_and_ascending(bench, pattern, length, rows):
    x = inputs(bench, pattern, length, rows)
    assert x.indices.shape == (rows or length, 64) and x.indices.dtype == torch.int32
    for row, first, last in zip(x.indices.tolist(), x.starts.tolist(), x.ends.tolist(), strict=True):
        ids = [i for i in row if i >= 0]
        assert ids == sorted(set(ids)) and row == ids + [-1] * (64 - len(ids))
        assert len(ids) == min(64, last - first) and all(first <= i < last for i in ids)
    assert x.pairs == int((x.indices >= 0).sum()) == int(x.topk_length.sum())
    assert x.ends.tolist() == list(range(length - (rows or length) + 1, length + 1))


def test_selections_drift_on_where_ids_are_drawn_in_several_chunks(bench, monkeypatch):
    monkeypatch.setattr(sys.modules["_bench.inputs"], "CHUNK", 1)
    x = inputs(bench, "overlapping", 700)
    shared = [
        len(set(a) & set(b) - {-1}) / 64
        for a, b in zip(x.indices[200:].tolist(), x.indices[201:].tolist(), strict=False)
    ]
    assert min(shared) > 0.5 and sum(shared) / len(shared) > 0.85


def test_neighbours_share_most_keys_in_the_overlapping_pattern_alone(bench):
    share = {}
    for pattern in ("random", "overlapping"):
        x = inputs(bench, pattern, 800, 100)
        indices = dsa_ops.indexer_topk(x.index_q, x.index_k, x.index_weights, starts=x.starts, ends=x.ends, topk=64)[0]
        share[pattern] = bench.overlap(x.indices), bench.overlap(indices)
    assert max(share["random"]) < 0.2
    assert min(share["overlapping"]) > 0.7  # what is drawn, and what the indexer selects in a training step


def test_the_same_case_has_the_same_values_in_any_order(bench):
    a, b = inputs(bench, "overlapping"), inputs(bench, "overlapping")
    names = ("q", "kv", "index_q", "index_k", "index_weights", "indices", "grad_out")
    for name in names:
        getattr(a, name)
    for name in reversed(names):
        assert torch.equal(getattr(b, name), getattr(a, name)), name
    assert not torch.equal(a.index_k[:, :8], a.kv[:, :8])


# ------------------------------------------------------------------------------------------------ work, floor, truth


def test_work_counts_valid_pairs(bench):
    x = inputs(bench, length=32768, preset="deepseek_v32")
    x.dtype = torch.bfloat16
    work = {name: bench.calls.work(name, x) for name in bench.calls.NAMES}
    assert x.pairs == 2048 * 2049 // 2 + (32768 - 2048) * 2048 and x.visible == 32768 * 32769 // 2
    in_tera = {"sparse_mla": 18.108, "sparse_mla_backward": 45.802, "indexer_topk": 8.796, "indexer_backward": 3.196}
    for name, flops in {**in_tera, "attention_target": 9.587}.items():
        assert work[name].flops / 1e12 == pytest.approx(flops, abs=1e-3), name
    assert work["sparse_mla"].gathered / 1e9 == pytest.approx(149.8 / 2, rel=1e-3)
    assert work["indexer_backward"].reduced / 1e9 == pytest.approx(33.3, rel=1e-3)
    assert work["sparse_mla"].moved / 1e9 == pytest.approx(9.450, abs=1e-3)
    assert work["step"].flops == sum(work[part].flops for part in bench.calls.STEP)


def test_floor_is_the_slowest_ceiling_and_a_step_is_the_sum_of_its_parts(bench):
    Work = bench.calls.Work
    rates = {"gemm": 10.0, "copy": 4.0, "gather": 2.0, "reduction": 1.0}
    assert Work(100, 20, 10, 5).floor(rates) == (10.0, "gemm")
    assert Work(10, 20, 10, 6).floor(rates) == (6.0, "reduction")
    assert Work(10, 20, 10, 6).floor({**rates, "reduction": None}) == (5.0, "gather")
    assert Work(parts=(Work(100), Work(0, 20))).floor(rates) == (15.0, "sum of parts")
    nothing = dict.fromkeys(rates)
    assert Work(100).floor(nothing) is None and Work(parts=(Work(100),)).floor(nothing) is None


@pytest.mark.parametrize("pattern", ["random", "packed"])
def test_every_op_agrees_with_the_truth_and_a_changed_row_does_not(bench, pattern):
    x = inputs(bench, pattern, 100, 90)
    for name in bench.calls.NAMES:
        result = bench.calls.call(name, x)()
        found = bench.truth.errors(name, x, result)
        assert found and not bench.truth.wrong(found, torch.float32), (name, found)
        assert max(found.values()) < 1e-5, (name, found)
        row = bench.truth.some_rows(90, 4, torch.device("cpu"))[2]  # among the rows that are looked at for any op
        for key in found.keys() & result.keys() - {"grad_k", "grad_kv", "grad_index_k"}:
            changed = {**result, key: result[key].clone()}
            changed[key][row] *= 1.5
            assert bench.truth.errors(name, x, changed)[key] > 1e-3, (name, key)


def test_gradients_of_keys_are_looked_at(bench):
    x = inputs(bench, length=100)
    keys = bench.truth.some_keys(x.indices)
    assert len(keys) == 3
    for name, key in (("indexer_backward", "grad_k"), ("sparse_mla_backward", "grad_kv"), ("step", "grad_kv")):
        result = bench.calls.call(name, x)()
        result[key] = result[key] * 1.01
        assert bench.truth.errors(name, x, result)[key] == pytest.approx(0.01, rel=1e-2)


def test_a_wrong_selection_is_counted(bench):
    x = inputs(bench, length=200)
    result = bench.calls.call("indexer_topk", x)()
    row, last = result["indices"][-1], result["scores"][-1]
    best = int(last.argmax())
    left_out = next(i for i in range(200) if i not in row.tolist())
    row[best] = left_out
    found = bench.truth.errors("indexer_topk", x, result)
    assert found["selection"] == 1 and bench.truth.wrong(found, torch.bfloat16)
    row[best] = row[best - 1]
    assert bench.truth.errors("indexer_topk", x, result)["selection"] == 1


def test_results_that_are_not_finite_are_infinitely_wrong(bench):
    want = torch.tensor([1.0, -torch.inf], dtype=torch.float64)
    assert bench.truth.relative(torch.tensor([1.0, -torch.inf]), want) == 0
    for got in ([torch.nan, -torch.inf], [1.0, 0.0], [torch.inf, -torch.inf]):
        assert bench.truth.relative(torch.tensor(got), want) == torch.inf
    assert bench.truth.wrong({"out": float("nan")}, torch.bfloat16)
    assert not bench.truth.wrong({"out": 2e-3}, torch.bfloat16) and bench.truth.wrong({"out": 2e-3}, torch.float32)


def test_bytes_of_results_count_each_storage_once(bench):
    x = torch.zeros(10)
    assert bench.measure.result_bytes({"a": x, "b": x[2:], "c": (torch.zeros(3, dtype=torch.int32), None)}) == 52
    assert bench.measure.result_bytes(None) == 0


def test_timing_counts_its_calls(bench):
    clock, calls, seen = bench.measure.Clock(torch.device("cpu"), 5, 60.0), [], []
    timing = clock.measure(lambda: calls.append(0) or torch.zeros(4), seen.append)
    assert len(calls) == 7 and timing.repeats == 5 and len(seen) == 1
    assert 0 < timing.ms_min <= timing.ms <= timing.ms_max
    assert timing.result_bytes == 16 and timing.extra_bytes is None
    slow = bench.measure.Clock(torch.device("cpu"), 5, 1e-9)
    assert slow.measure(lambda: torch.zeros(4)).repeats == 1


# --------------------------------------------------------------------------------------------------------------- peers


def test_plain_pytorch_gives_the_same(bench):
    x = inputs(bench, length=100)
    peer = next(peer for peer in bench.peers.PEERS if peer.name == "gather_sdpa")
    for name, adapter in peer.adapters.items():
        found = bench.truth.errors(name, x, adapter(x)())
        assert set(found) <= {"out", "grad_q", "grad_kv"} and max(found.values()) < 1e-5


@pytest.fixture
def as_on_cuda(bench, monkeypatch):
    """Adapters of CUDA peers, on a CPU: with sizes that the peers take and stand-ins that answer as they document."""
    monkeypatch.setattr(bench.peers, "_on_cuda", lambda x: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    sizes = bench.presets.Sizes(heads=3, index_heads=64, index_dim=8, topk=128)
    monkeypatch.setitem(bench.presets.PRESETS, "demo", sizes)
    return inputs(bench, length=150)


@pytest.mark.parametrize("peer", ["flash_mla", "flash_mla_length"])
def test_flash_mla_is_called_as_it_wants(bench, as_on_cuda, monkeypatch, peer):
    x = as_on_cuda

    def forward(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, use_legacy=False):
        assert q.shape == (150, 64, 576) and kv.shape == (150, 1, 576) and indices.shape == (150, 1, 128)
        assert use_legacy and (topk_length is not None) == (peer == "flash_mla_length")
        out, lse = dsa_ops.sparse_mla(q, kv[:, 0], indices[:, 0], sm_scale, d_v, topk_length=topk_length)
        return out, None, lse

    monkeypatch.setitem(sys.modules, "flash_mla", types.SimpleNamespace(flash_mla_sparse_fwd=forward))
    adapter = next(p for p in bench.peers.PEERS if p.name == peer).adapters["sparse_mla"]
    result = adapter(x)()
    assert result["out"].shape == (150, 3, 512)
    assert max(bench.truth.errors("sparse_mla", x, result).values()) < 1e-5


def test_cudnn_is_called_as_it_wants(bench, as_on_cuda, monkeypatch):
    x = as_on_cuda

    class DSA:
        @staticmethod
        def indexer_forward_wrapper(q, k, w, ratio=4):
            scores = torch.einsum("bthd,bskd->bhts", q, k).relu().mul(w.transpose(1, 2).unsqueeze(-1)).sum(1)
            return {"scores": scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)}

        @staticmethod
        def indexer_top_k_wrapper(scores, lengths, k):
            best = scores.topk(min(k, scores.shape[1]))
            indices = best.indices.masked_fill(best.values == -torch.inf, -1).int()
            return {"indices": indices, "values": best.values}

        @staticmethod
        def sparse_attn_score_recompute_wrapper(q, k, lse, indices, scale, qhead_per_kv_head):
            assert qhead_per_kv_head == q.shape[2]
            target = dsa_ops.attention_target(q, k, lse, indices, scale)
            return (target / target.sum(-1, keepdim=True),)

        @staticmethod
        def sparse_attention_backward_wrapper(q, kv, out, dout, lse, sink, ids, softmax_scale, topk_length):
            grads = torch.ops.dsa.sparse_mla_backward(
                dout, None, q, kv, ids, out, lse, softmax_scale, out.shape[-1], sink, topk_length
            )
            return {"dq": grads[0], "dkv": grads[1]}

        @staticmethod
        def indexer_backward_wrapper(q, w, k, target, predicted, indices, grad_loss):
            grad = grad_loss * (predicted - target) / (q.shape[0] * q.shape[1])
            target.copy_(grad)
            grads = torch.ops.dsa.indexer_scores_backward(grad[0], q[0], k[0], w[0], indices[0])
            return {f"d_{n}": g.unsqueeze(0) for n, g in zip(("index_q", "index_k", "weights"), grads, strict=True)}

    monkeypatch.setitem(sys.modules, "cudnn", types.ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, "cudnn.deepseek_sparse_attention", types.SimpleNamespace(DSA=DSA))
    adapters = next(p for p in bench.peers.PEERS if p.name == "cudnn").adapters
    for name in adapters:
        found = bench.truth.errors(name, x, adapters[name](x)())
        assert found and max(found.values()) < 1e-5, (name, found)
    for pattern, rows in (("packed", None), ("random", 20)):
        with pytest.raises(bench.peers.Unsuitable, match="one causal sequence"):
            adapters["indexer_topk"](inputs(bench, pattern, 40, rows))


def test_peers_say_what_they_do_not_take(bench):
    for peer in bench.peers.PEERS:
        for adapter in peer.adapters.values() if peer.module else ():
            with pytest.raises(bench.peers.Unsuitable, match="bfloat16 on CUDA"):
                adapter(inputs(bench))
        assert (peer.missing() is None) == (peer.module is None or importlib.util.find_spec(peer.module) is not None)


# ---------------------------------------------------------------------------------------------------------- whole runs


def test_a_run_leaves_a_table_a_file_and_a_picture(bench, tmp_path, capsys):
    json_file, picture = tmp_path / "run.json", tmp_path / "run.png"
    arguments = ("--pattern", "random", "packed", "--json", json_file)
    assert run(bench, *arguments) == 0
    printed = capsys.readouterr().out
    assert "host's" in printed and "WRONG" not in printed
    left = json.loads(json_file.read_text())
    assert left["complete"] and left["dtype"] == "float32" and left["seconds"] > 0
    about = left["machine"]
    assert torch.__version__.startswith(about["versions"]["torch"])  # of some wheels without the "+cu128"
    assert about["versions"]["dsa_ops"] == dsa_ops.__version__
    assert about["device"] == "cpu" and about["driver"] is None and len(about["date"]) == 10
    assert set(left["ceilings"]) == {"gemm", "copy", "gather", "reduction"}
    ours = [record for record in left["records"] if record["ours"]]
    assert [record["op"] for record in ours] == list(bench.calls.NAMES) * 2
    for record in ours:
        assert record["status"] == "ok" and record["by"] == "unfused" and not record["wrong"] and record["errors"]
        assert record["ms"] > 0 and record["repeats"] == 1 and record["extra_bytes"] is None
        assert record["result_bytes"] > 0 and record["fraction"] is None
        assert (record["preset"], record["length"], record["rows"]) == ("demo", 40, 40)
        assert set(record["kernels"].values()) == {"unfused"} and record["refusals"]
    plain = [record for record in left["records"] if record["by"] == "gather_sdpa"]
    assert {record["op"] for record in plain} == {"sparse_mla", "sparse_mla_backward"}
    assert all(record["ratio"] > 0 for record in plain)
    dense = [record for record in left["records"] if record["by"] == "dense_sdpa"]
    assert {record["status"] for record in dense} == {"ok", "refused"}  # packed: refused
    assert all(record["context"] for record in dense)
    for record in left["records"]:
        assert bench.report.line(record) in printed

    assert bench.main(["--from", str(json_file), "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert all(bench.report.line(record) in shown for record in left["records"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_options_choose_what_is_measured(bench, tmp_path):
    file = tmp_path / "run.json"
    chosen = ("--op", "indexer_kl", "sparse_mla", "--peers", "none", "--rows", "16", "--length", "24", "32")
    assert run(bench, *chosen, "--json", file) == 0
    records = json.loads(file.read_text())["records"]
    assert [(r["op"], r["length"], r["rows"]) for r in records] == [
        ("indexer_kl", 24, 16),
        ("sparse_mla", 24, 16),
        ("indexer_kl", 32, 16),
        ("sparse_mla", 32, 16),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "deepseek_v4"], "argument --preset: invalid choice: 'deepseek_v4'"),
        (["--length", "0"], "argument --length: must be at least 1, got 0"),
        (["--length", "many"], "argument --length: invalid number value: 'many'"),
        (["--rows", "-3"], "argument --rows: must be at least 1, got -3"),
        (["--max-seconds", "0"], "argument --max-seconds: must be positive, got 0"),
        (["--op", "softmax"], "argument --op: invalid choice: 'softmax'"),
        (["--pattern", "dense"], "argument --pattern: invalid choice: 'dense'"),
        (["--peers", "none", "cudnn"], "--peers: all and none stand alone, got none cudnn"),
        (["--json", "nowhere/run.json"], "--json nowhere/run.json: there is no such folder"),
        (["--plot", "."], "--plot .: is a folder"),
        (["--from", "nowhere.json"], "--from nowhere.json: No such file or directory"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_one_line(bench, arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == ""
    assert err.startswith(f"tools/bench: {words}") and err.count("\n") == 1, err


def test_files_of_other_tools_are_refused(bench, tmp_path, capsys):
    for text, words in (("{", "not JSON"), ("[1]", "not a file that this tool has written")):
        file = tmp_path / "other.json"
        file.write_text(text)
        with pytest.raises(SystemExit):
            bench.main(["--from", str(file)])
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1


def test_cuda_and_matplotlib_are_asked_for_at_the_start(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    for arguments, words in (
        (["--device", "cuda"], "--device cuda: needs a CUDA device and a CUDA build of torch"),
        (["--plot", str(tmp_path / "run.png")], "--plot: matplotlib is not installed"),
    ):
        with pytest.raises(SystemExit) as stopped:
            bench.main(arguments)
        err = capsys.readouterr().err
        assert stopped.value.code == 2 and words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(RuntimeError("no such kernel\nmore of it"), "failed", 1), (torch.OutOfMemoryError("full"), "out of memory", 0)],
    ids=["failed", "out of memory"],
)
def test_an_op_that_fails_gives_a_line(bench, tmp_path, capsys, monkeypatch, error, status, code):
    call = bench.calls.call

    def fail(name, x):
        if name == "indexer_kl":
            raise error
        return call(name, x)

    monkeypatch.setattr(bench.calls, "call", fail)
    file = tmp_path / "run.json"
    assert run(bench, "--op", "indexer_kl", "attention_target", "--peers", "none", "--json", file) == code
    failed, fine = json.loads(file.read_text())["records"]
    assert failed["status"] == status and "\n" not in failed["reason"] and fine["status"] == "ok"
    out = capsys.readouterr().out
    assert status in out and "Traceback" not in out


def test_a_wrong_result_is_named_and_fails_the_run(bench, capsys, monkeypatch):
    call = bench.calls.call

    def off(name, x):
        result = call(name, x)
        return lambda: {key: value * 1.1 for key, value in result().items()}

    monkeypatch.setattr(bench.calls, "call", off)
    assert run(bench, "--op", "attention_target", "--peers", "none") == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_peer_that_fails_or_is_missing_gives_a_line(bench, tmp_path, monkeypatch):
    def broken(x):
        raise ImportError("libcudart.so: cannot open shared object file")

    peers = (
        bench.peers.Peer("cudnn", {"sparse_mla": broken}),
        bench.peers.Peer("flash_mla", {"sparse_mla": broken}, "no_module_of_this_name"),
    )
    monkeypatch.setattr(bench.peers, "PEERS", peers)
    file = tmp_path / "run.json"
    assert run(bench, "--op", "sparse_mla", "--peers", "cudnn", "flash_mla", "--json", file) == 0
    ours, failed, missing = json.loads(file.read_text())["records"]
    assert ours["status"] == "ok"
    assert failed["status"] == "failed" and "ImportError: libcudart.so" in failed["reason"]
    assert missing["status"] == "refused" and missing["reason"] == "module no_module_of_this_name is not installed"
    # not asked for by name: said once, at the top
    assert run(bench, "--op", "sparse_mla", "--json", file) == 0
    left = json.loads(file.read_text())
    assert len(left["records"]) == 2
    assert "not measured: flash_mla, module no_module_of_this_name is not installed" in left["notes"]


def test_the_best_peers_of_a_step_are_summed(bench, tmp_path, monkeypatch):
    adapters = {name: lambda x, name=name: bench.calls.call(name, x) for name in bench.peers.STEP}
    monkeypatch.setattr(bench.peers, "PEERS", (bench.peers.Peer("cudnn", adapters),))
    file = tmp_path / "run.json"
    assert run(bench, "--op", *bench.calls.STEP, "step", "--json", file) == 0
    records = json.loads(file.read_text())["records"]
    best, rivals = records[-1], [r for r in records if r["by"] == "cudnn"]
    assert best["status"] == "sum" and best["ms"] == pytest.approx(sum(r["ms"] for r in rivals))
    step = next(r for r in records if r["op"] == "step" and r["ours"])
    assert best["ratio"] == pytest.approx(best["ms"] / step["ms"])
    assert bench.main(["--from", str(file)]) == 0


def test_time_limits_leave_the_rest_out(bench, tmp_path):
    file = tmp_path / "run.json"
    assert run(bench, "--op", "sparse_mla", "--max-seconds", "1e-9", "--json", file) == 0
    assert {r["status"] for r in json.loads(file.read_text())["records"]} == {"not started"}
    arguments = ("--op", "sparse_mla", "--peers", "none", "--length", "16", "40", "--max-call-seconds", "1e-9")
    assert run(bench, *arguments, "--json", file) == 0
    first, second = json.loads(file.read_text())["records"]
    assert first["status"] == "ok" and second["status"] == "left out" and "expected" in second["reason"]


def test_ctrl_c_leaves_what_was_measured(bench, tmp_path, capsys, monkeypatch):
    call = bench.calls.call

    def interrupted(name, x):
        if name == "sparse_mla":
            raise KeyboardInterrupt
        return call(name, x)

    monkeypatch.setattr(bench.calls, "call", interrupted)
    file = tmp_path / "run.json"
    assert run(bench, "--op", "indexer_topk", "sparse_mla", "--peers", "none", "--json", file) == 130
    left = json.loads(file.read_text())
    assert not left["complete"] and [r["op"] for r in left["records"]] == ["indexer_topk"]
    assert "stopped" in capsys.readouterr().out


def test_the_picture_can_be_drawn_of_nothing(bench, tmp_path):
    empty = {"machine": {"name": "none", "date": "2026-01-01"}, "ceilings": {}, "notes": [], "records": []}
    bench.report.plot(empty, tmp_path / "run.png")
    assert (tmp_path / "run.png").exists()


@pytest.mark.gpu
def test_a_run_on_cuda_has_ceilings_memory_and_shares(bench, tmp_path, capsys):
    file = tmp_path / "run.json"
    arguments = ("--device", "cuda", "--preset", "demo", "--length", "300", "--repeats", "2", "--json", str(file))
    assert bench.main([*arguments, "--op", "sparse_mla", "sparse_mla_backward", "step"]) == 0
    left = json.loads(file.read_text())
    assert left["dtype"] == "bfloat16" and left["machine"]["capability"]
    assert left["ceilings"]["gemm"] > left["ceilings"]["copy"] > 1e11
    for record in left["records"]:
        if record["ours"]:
            assert record["extra_bytes"] >= 0 and 0 < record["fraction"] < 1 and not record["wrong"], record
