"""tools/demo: its parts, what it refuses, that it can be stopped, and on a small run that its claims hold."""

import argparse
import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

DEMO = Path(__file__).resolve().parents[2] / "tools" / "demo"


@pytest.fixture(scope="module")
def demo():
    loader = importlib.machinery.SourceFileLoader("dsa_ops_demo", str(DEMO))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up
    yield_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = yield_bytecode
    yield module
    del sys.modules[loader.name]


def start(*arguments, **popen):
    return subprocess.Popen(
        [sys.executable, str(DEMO), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DSA_OPS_DEMO_STARTED": "1"},  # never makes an environment from inside a test
        # a background job of a script inherits an ignored SIGINT, and hands it on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **popen,
    )


def small(demo, **changes):
    """About the smallest setting at which all claims hold with room to spare, whatever the seed."""
    settings = demo.Settings(
        vocabulary=400,
        context=256,
        topk=48,
        repeat_min=32,
        repeat_max=64,
        repeat_gap=64,
        eval_contexts=16,
        dense_steps=160,
        warmup_steps=30,
        sparse_steps=40,
    )
    return replace(settings, **changes)


# ---------------------------------------------------------------------------------------------------------------- text


def test_vocabulary_merges_the_most_frequent_pair_first_and_decodes_what_it_encoded(demo):
    data = b"low lower lowest low low\nnew newer"
    vocabulary = demo.Vocabulary(data, 260)
    assert vocabulary.pieces[256:258] == [b"ow", b"low"] or vocabulary.pieces[256] in (b"lo", b"ow")
    assert len(vocabulary) == 260
    assert vocabulary.decode(vocabulary.encode(data)) == data.decode()
    assert len(vocabulary.encode(data)) < len(data)


@pytest.mark.parametrize("data", [b"\x00\xff\xfe\x00\xff\xfe", "naïve café ünd naïve".encode(), b" \n\n  a", b"aaaaaa"])
def test_vocabulary_takes_any_bytes(demo, data):
    vocabulary = demo.Vocabulary(data, 512)
    assert b"".join(vocabulary.pieces[token] for token in vocabulary.encode(data)) == data
    unseen = b"zebra 42!"
    assert b"".join(vocabulary.pieces[token] for token in vocabulary.encode(unseen)) == unseen


def test_text_of_python_gives_enough_to_train_on(demo):
    data = demo.read_corpus(None, 1_000)
    vocabulary = demo.Vocabulary(data, 512)
    tokens = torch.tensor(vocabulary.encode(data))
    training, validation = demo.split(tokens, demo.Settings())
    assert len(vocabulary) == 512
    assert 150_000 < len(tokens) < len(data) / 2
    assert len(training) + len(validation) == len(tokens)
    assert 0.09 < len(validation) / len(tokens) < 0.12


@pytest.mark.parametrize("count", [130, 700, 5_000, 100_000])
def test_split_leaves_a_context_on_both_sides(demo, count):
    training, validation = demo.split(torch.arange(count), small(demo, context=64))
    assert min(len(training), len(validation)) > 64
    assert sorted(torch.cat((training, validation)).tolist()) == list(range(count))


def test_contexts_repeat_a_passage_after_a_gap(demo):
    settings = small(demo)
    contexts = demo.Contexts(torch.arange(10_000), settings, seed=3)
    repeats = 0
    for _ in range(50):
        batch = contexts.batch()
        whole = torch.cat((batch.tokens, batch.targets[:, -1:]), 1)
        for row, (source, target, length) in enumerate(batch.spans):
            if not length:
                assert torch.equal(whole[row], whole[row, 0] + torch.arange(settings.context + 1))
                assert not batch.repeat[row].any()
                continue
            repeats += 1
            assert settings.repeat_min <= length <= settings.repeat_max
            assert target - (source + length) >= settings.repeat_gap
            assert torch.equal(whole[row, target : target + length], whole[row, source : source + length])
            # the text goes on behind the repeat as if it were not there
            rest = torch.cat((whole[row, :target], whole[row, target + length :]))
            assert torch.equal(rest, rest[0] + torch.arange(len(rest)))
            marked = batch.repeat[row].nonzero().flatten() + 1
            assert torch.equal(marked, torch.arange(target + 1, target + length))
    assert 0.55 < repeats / 200 < 0.85


def test_contexts_are_the_same_for_the_same_seed(demo):
    first, second, other = (demo.Contexts(torch.arange(5_000), small(demo), seed) for seed in (1, 1, 2))
    one = first.batch()
    assert torch.equal(one.tokens, second.batch().tokens)
    assert not torch.equal(one.tokens, other.batch().tokens)


def test_curriculum_repeats_random_tokens_of_the_text(demo):
    settings = small(demo)
    text = torch.arange(5_000) % 97 + 3
    batch = demo.Contexts(text, settings, 1).curriculum_batch()
    half = settings.curriculum_batch // 2
    assert batch.tokens.shape == (settings.curriculum_batch, settings.curriculum_context)
    assert torch.isin(batch.tokens, text).all()
    assert not batch.repeat[:half].any()
    whole = torch.cat((batch.tokens, batch.targets[:, -1:]), 1)
    for row in range(half, settings.curriculum_batch):
        marked = batch.repeat[row].nonzero().flatten() + 1
        period = int(marked[0]) - 1
        assert torch.equal(whole[row, marked], whole[row, marked - period])


# ----------------------------------------------------------------------------------------------------------- measuring


def test_last_keys(demo):
    assert demo.last_keys(4, 3, "cpu").tolist() == [[[-1, -1, 0], [-1, 0, 1], [0, 1, 2], [1, 2, 3]]]
    assert demo.last_keys(4, 3, "cpu").dtype == torch.int32


def test_recall_counts_rows_with_enough_keys_only(demo):
    mass = torch.zeros(1, 4, 4)
    mass[0, 1, 0] = 1.0  # would count as 0: this row sees two keys, fewer than 2 * topk
    mass[0, 3] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    indices = torch.tensor([[[-1, -1], [-1, 1], [0, 1], [1, 3]]], dtype=torch.int32)
    assert demo.recall(demo.View(mass, ()), indices, 2) == pytest.approx(0.6)


@pytest.fixture(scope="module")
def model(demo):
    torch.manual_seed(0)
    settings = small(demo, context=64, topk=8, vocabulary=300)
    return settings, demo.set_mode(demo.Model(settings, 300), "sparse")


def test_views_are_full_attention_of_the_sparse_model(demo, model):
    settings, network = model
    tokens = torch.randint(300, (2, settings.context))
    seen = demo.views(network, tokens)
    assert len(seen) == 2
    assert all(layer.mode == "sparse" for layer in network.modules() if isinstance(layer, demo.DSAttention))
    for view in seen:
        assert view.mass.shape == (2, settings.context, settings.context)
        torch.testing.assert_close(view.mass.sum(-1), torch.ones(2, settings.context))
        assert not view.mass.triu(1).any()
    # with every key selected nothing is missed, and the same model read densely has the same first layer
    every = torch.arange(settings.context, dtype=torch.int32).expand(2, settings.context, -1)
    assert demo.recall(seen[0], every, settings.topk) == pytest.approx(1.0)
    arm = demo.Arm("trained", network)
    for value, view in zip(demo.recalls(seen, arm, settings.topk), seen, strict=True):
        best = view.mass.topk(settings.topk, -1).values.sum(-1)[:, 2 * settings.topk - 1 :].mean()
        assert 0.0 < value <= best + 1e-6


def test_audit_sees_one_changed_bit_and_an_idle_indexer(demo, model):
    _, network = model
    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    indexer = [name for name in before if ".indexer." in name]
    assert demo.audit(network, before) == ([], indexer)
    before["previous.weight"].view(torch.int32)[0, 0] ^= 1
    before[indexer[0]] += 1
    assert demo.audit(network, before) == (["previous.weight"], indexer[1:])


def test_warm_up_trains_the_indexers_alone_even_with_a_wrong_optimizer(demo, model):
    settings, network = model
    arm = demo.Arm("trained", demo.set_mode(demo.copy.deepcopy(network), "warmup"))
    before = {name: weight.detach().clone() for name, weight in arm.model.named_parameters()}
    trainer = demo.Trainer(arm, settings, 1e-2, 1e-2, warmup=True)
    trainer.step(demo.Contexts(torch.randint(300, (5_000,)), replace(settings, repeat_share=0.0), 1).batch())
    assert demo.audit(arm.model, before) == ([], [])


@pytest.mark.parametrize("mode, keys", [("warmup", 0), ("sparse", 0), ("frozen", 8)])
def test_compiled_training_is_one_graph_with_the_same_numbers(demo, model, monkeypatch, mode, keys):
    settings, network = model
    compile_ = torch.compile  # without the code generator, whose C++ compiler takes a minute
    monkeypatch.setattr(torch, "compile", lambda module, **options: compile_(module, backend="aot_eager", **options))
    batch = demo.Contexts(torch.randint(300, (5_000,)), replace(settings, repeat_share=0.0), 1).batch()
    results = []
    for compiled in (False, True):
        torch.compiler.reset()
        arm = demo.Arm("arm", demo.set_mode(demo.copy.deepcopy(network), mode), keys=keys)
        trainer = demo.Trainer(arm, replace(settings, compile=compiled), 1e-3, 1e-2, warmup=mode == "warmup")
        assert (trainer.forward is arm.model) != compiled
        results.append([trainer.step(batch), trainer.step(batch)])
    eager, compiled = results
    for one, other in zip(eager, compiled, strict=True):
        assert one == pytest.approx(other, rel=1e-4, nan_ok=True)
    assert eager[0] != eager[1]


def finished(demo, **changes):
    row = {"loss": 2.0, "fresh": 2.5, "repeats": 1.0, "recall": 0.7, "recall_per_layer": [0.6, 0.8]}
    run = demo.Run(small(demo), demo.Vocabulary(b"ab", 256), torch.arange(9_000) % 90, torch.arange(900) % 90)
    run.complete = True
    run.before_warmup = {"fresh": 2.6, "repeats": 1.0}
    run.audited = ([], [])
    run.table = {
        "dense": dict(row),
        "trained": row | {"loss": 2.03},
        "random": row | {"repeats": 1.6, "recall": 0.3},
        "last": row | {"repeats": 1.6, "recall": 0.4},
    }
    for name, numbers in changes.items():
        if name in run.table:
            run.table[name] |= numbers
        else:
            setattr(run, name, numbers)
    return run


def test_checks_pass_only_where_every_claim_holds(demo):
    assert len(demo.check(finished(demo))) == 8
    assert all(entry["passed"] for entry in demo.check(finished(demo)))


@pytest.mark.parametrize(
    "changes, claim",
    [
        ({"before_warmup": {"fresh": 2.6, "repeats": 2.2}}, "before warm-up"),
        ({"audited": (["previous.weight"], [])}, "outside the indexers"),
        ({"audited": ([], ["indexer.wk.weight"])}, "did not change"),
        ({"random": {"recall": 0.6}}, "over random"),
        ({"last": {"recall": 0.6}}, "over last keys"),
        ({"trained": {"loss": 2.05}}, "over dense control"),
        ({"random": {"repeats": 1.4}}, "random indexer minus"),
        ({"last": {"repeats": float("nan")}}, "last keys minus"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_check_can_fail(demo, changes, claim):
    failed = [entry["claim"] for entry in demo.check(finished(demo, **changes)) if not entry["passed"]]
    assert len(failed) == 1 and claim in failed[0]


# ------------------------------------------------------------------------------------------------------- the small run


@pytest.mark.slow
def test_claims_hold_on_a_small_run(demo, tmp_path, capsys):
    arguments = argparse.Namespace(corpus=None, device="cpu", compile=False, seed=1, steps=None, out=str(tmp_path))
    code = demo.main(arguments, small(demo))
    printed = capsys.readouterr().out
    numbers = json.loads((tmp_path / "demo.json").read_text())
    assert code == 0, printed
    assert numbers["complete"] and numbers["passed"]
    assert len(numbers["checks"]) == 8
    table = numbers["table"]
    assert set(table) == {"dense", "trained", "random", "last"}
    # once more from the table, apart from the demo's own judgement
    assert numbers["before_warmup"]["repeats"] <= numbers["before_warmup"]["fresh"] - 0.5
    assert table["trained"]["loss"] <= 1.02 * table["dense"]["loss"]
    for rival in ("random", "last"):
        assert table["trained"]["recall"] >= 1.3 * table[rival]["recall"]
        assert table["trained"]["repeats"] <= table[rival]["repeats"] - 0.5
    for words in ("warm-up", "kl ", "recall ", "dense control", "audit: 0 parameters", "sample", "layer 2"):
        assert words in printed
    assert printed.count("pass  ") == 8
    assert (tmp_path / "demo.png").stat().st_size > 50_000


# --------------------------------------------------------------------------------------------- refusals, stopping early


def refused(*arguments):
    process = start(*arguments)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2, (out, err)
    assert out == ""
    assert err.startswith("tools/demo: ") and err.count("\n") == 1, err
    return err


def test_a_bad_corpus_is_one_line(tmp_path):
    empty, short, repetitive = (tmp_path / name for name in ("empty.txt", "short.txt", "repetitive.txt"))
    empty.touch()
    short.write_text("one two three " * 50)
    repetitive.write_text("one two three " * 300)  # long enough in bytes, not in tokens
    assert "no such file or directory" in refused("--corpus", tmp_path / "missing.txt", "--out", tmp_path)
    assert "is a directory" in refused("--corpus", tmp_path, "--out", tmp_path)
    assert "the file is empty" in refused("--corpus", empty, "--out", tmp_path)
    assert "two contexts of text, 1026 tokens, got 700 bytes" in refused("--corpus", short, "--out", tmp_path)
    assert "two contexts of text, 1026 tokens, got 901" in refused("--corpus", repetitive, "--out", tmp_path)


def test_a_bad_device_or_folder_is_one_line(tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert "--device nowhere" in refused("--device", "nowhere", "--out", tmp_path)
    assert "--out" in refused("--out", file / "below")


def test_compile_without_a_compiler_is_refused(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    arguments = argparse.Namespace(corpus=None, device="cpu", compile=True, seed=1, steps=None, out=str(tmp_path))
    with pytest.raises(demo.Refusal, match=r"--compile: needs a C\+\+ compiler"):
        demo.prepare(arguments)


def test_bad_numbers_are_refused_by_name():
    for option, value in (("--steps", "0"), ("--steps", "many"), ("--seed", "-1")):
        process = start(option, value)
        err = process.communicate(timeout=60)[1]
        assert process.returncode == 2
        assert option in err.splitlines()[-1] and "Traceback" not in err


def test_ctrl_c_leaves_what_was_reached(tmp_path):
    corpus = tmp_path / "text.txt"
    corpus.write_text(
        "".join(f"{number} bottles stand on wall {number * 7 % 31}, one falls.\n" for number in range(4_000))
    )
    process = start("--steps", 40, "--corpus", corpus, "--out", tmp_path)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("dense"):
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    out = "".join(lines) + out
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in out + err
    assert "stopped in train dense" in out and "dense control" in out
    numbers = json.loads((tmp_path / "demo.json").read_text())
    assert not numbers["complete"] and not numbers["passed"]
    assert numbers["curves"]["curriculum"] and numbers["table"]["dense"]["loss"] > 0
    assert (tmp_path / "demo.png").exists()


@pytest.mark.parametrize("stopped, reached", [("trained", 2), ("last", 4)])
def test_ctrl_c_in_a_later_stage(demo, tmp_path, monkeypatch, capsys, stopped, reached):
    settings = small(demo, context=64, topk=8, repeat_min=8, repeat_max=16, repeat_gap=10, eval_contexts=4)
    settings = replace(settings, curriculum_steps=2, dense_steps=2, dense_rounds=0, warmup_steps=2, sparse_steps=2)
    step = demo.Trainer.step

    def interrupted(trainer, *given):
        if trainer.arm.name == stopped and not trainer.warmup and trainer.done == 1:
            raise KeyboardInterrupt
        return step(trainer, *given)

    monkeypatch.setattr(demo.Trainer, "step", interrupted)
    arguments = argparse.Namespace(corpus=None, device="cpu", compile=False, seed=1, steps=None, out=str(tmp_path))
    assert demo.main(arguments, settings) == 130
    assert "stopped in train sparse" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "demo.json").read_text())
    assert not numbers["complete"] and not numbers["passed"]
    # arms that have not had a step are left out
    assert list(numbers["table"]) == ["dense", "trained", "random", "last"][:reached]
    assert numbers["table"]["trained"]["recall"] > 0
    assert len(numbers["checks"]) == 3
    assert (tmp_path / "demo.png").exists()


def test_without_matplotlib_the_rest_works(demo, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    reason = demo.draw(finished(demo), tmp_path / "demo.png")
    assert "matplotlib is not installed" in reason and "\n" not in reason
    assert not (tmp_path / "demo.png").exists()


# ---------------------------------------------------------------------------------------------------------- bootstrap


@pytest.fixture
def no_restart(demo, monkeypatch, tmp_path):
    """The bootstrap with its effects noted instead of made."""
    made = []
    monkeypatch.setattr(demo, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(demo.os, "execv", lambda path, arguments: made.append(("restart", str(path), arguments[1:])))
    monkeypatch.delenv(demo.STARTED, raising=False)
    return made


def test_an_environment_that_has_everything_is_used_as_it_is(demo, no_restart):
    demo.bootstrap([])
    assert no_restart == []


def test_elsewhere_the_demo_starts_again_in_its_environment(demo, no_restart, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(demo, "make_environment", lambda: Path("python-of-venv"))
    demo.bootstrap(["--seed", "2"])
    assert no_restart == [("restart", "python-of-venv", [str(DEMO), "--seed", "2"])]
    # the restarted process does not do it a second time
    with pytest.raises(demo.Refusal, match="cannot import torch and dsa_ops"):
        demo.bootstrap([])


def completed(code):
    return subprocess.CompletedProcess([], code, "", "")


def test_environment_is_made_and_completed_once(demo, no_restart, monkeypatch):
    have, commands = set(), []

    def fake_run(command, **options):
        commands.append([str(part) for part in command])
        if "venv" in command:
            have.add("pip")
        if "--editable" in command:
            have.add("torch, dsa_ops.nn")
        return completed(0)

    monkeypatch.setattr(demo, "can_import", lambda python, modules="torch, dsa_ops.nn": modules in have)
    monkeypatch.setattr(demo, "has_cuda_device", lambda: False)
    monkeypatch.setattr(demo.subprocess, "run", fake_run)
    python = demo.make_environment()
    assert python.parent.parent == demo.VENV
    assert [("venv" in c, "torch>=2.9" in c, "--editable" in c) for c in commands] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    commands.clear()
    assert demo.make_environment() == python and commands == []
    # half made, such as after Ctrl-C: completed, not made anew
    have.discard("torch, dsa_ops.nn")
    demo.make_environment()
    assert len(commands) == 2


def test_torch_fits_the_machine(demo):
    cpu = demo.install_commands(Path("python"), False, Path("constraints.txt"))
    cuda = demo.install_commands(Path("python"), True, Path("constraints.txt"))
    assert all("constraints.txt" in command for command in cpu)
    assert not any("constraints.txt" in command for command in cuda)
    assert all(command[-1].endswith("[demo]") for command in (cpu[-1], cuda[-1]))
    assert "torch==2.13.0" in demo.CONSTRAINTS.read_text()


@pytest.mark.parametrize("failing, words", [("venv", "python3-venv"), ("pip", "pip failed with exit code 1")])
def test_a_failing_installation_is_one_sentence(demo, no_restart, monkeypatch, failing, words):
    monkeypatch.setattr(demo, "can_import", lambda *given: False)
    monkeypatch.setattr(demo.subprocess, "run", lambda command, **options: completed(int(failing in command)))
    with pytest.raises(demo.Refusal, match=words) as refusal:
        demo.make_environment()
    assert "\n" not in str(refusal.value)


def test_can_import_looks_inside_the_other_interpreter(demo, tmp_path):
    assert demo.can_import(sys.executable, "json")
    assert not demo.can_import(sys.executable, "no_module_of_this_name")
    assert not demo.can_import(tmp_path / "python", "json")


def test_bootstrap_needs_the_standard_library_only():
    """Up to the restart nothing else may be imported: an interpreter without site-packages gets that far."""
    done = subprocess.run([sys.executable, "-I", "-S", str(DEMO), "--help"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    for option in ("--steps", "--corpus", "--device", "--compile", "--seed", "--out"):
        assert option in done.stdout
