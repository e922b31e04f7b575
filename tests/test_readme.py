"""What README and docs say is run: every Python block as it stands, every link, the table of ops."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dsa_ops  # registers the ops

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks():
    for page in PAGES:
        for match in re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            line = page.read_text()[: match.start()].count("\n") + 1
            yield pytest.param(match[1], id=f"{page.relative_to(ROOT)}:{line}")


def registered_ops():
    """Ops in namespace dsa that are not a backward, nor what an exported program holds of dsa_ops.attach_loss."""
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name[:5] == "dsa::"}
    return {name for name in names if not name.endswith("_backward")} - {"attach_loss"}


def table_ops(page, heading):
    section = page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


@pytest.mark.parametrize("source", list(python_blocks()))
# torch.compile makes such an object of every autograd.Function that it traces
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, loading its own file
@pytest.mark.filterwarnings("error")
def test_python_block_runs_as_it_stands(source, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "register_op(" in source:  # an op cannot be taken back
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=with_the_package())
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip(), "an example shows something"
        return
    exec(source, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip(), "an example shows something"


def with_the_package():
    """Variables for a process that starts in another folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def test_every_fenced_block_is_python():
    """So that none escapes the test above; commands stand in indented blocks, see below."""
    for page in PAGES:
        fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)
        assert fences == ["python", ""] * (len(fences) // 2), page.name


def commands():
    """Lines of indented blocks that call something in tools/."""
    for page in PAGES:
        for line in re.findall(r"^    (tools/.*)$", page.read_text(), re.MULTILINE):
            yield pytest.param(line.partition(" #")[0].split("   ")[0], id=f"{page.relative_to(ROOT)}: {line[:30]}")


@pytest.mark.parametrize("command", list(commands()))
def test_commands_exist_with_their_options(command):
    tool, *arguments = command.split()
    assert os.access(ROOT / tool, os.X_OK)
    source = (ROOT / tool).read_text()
    for argument in arguments:
        if argument.startswith("--"):
            assert f'"{argument}"' in source, f"{tool} knows no {argument}"
        if argument.startswith("tests/"):
            assert (ROOT / argument).exists()


def test_first_example_is_short_and_a_program_of_its_own(tmp_path):
    code = next(python_blocks()).values[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=with_the_package())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "heading"), [("README.md", "The ops"), ("docs/contract.md", "The ops")])
def test_table_lists_the_registered_ops(page, heading):
    listed = table_ops(ROOT / page, heading)
    assert sorted(listed) == sorted(registered_ops())
    assert all(callable(getattr(dsa_ops, name)) for name in listed)


def test_contract_has_the_registered_schemas():
    written = re.findall(r"^    (dsa::\w+\(.*)$", (ROOT / "docs/contract.md").read_text(), re.MULTILINE)
    assert sorted(written) == sorted(str(getattr(torch.ops.dsa, name).default._schema) for name in registered_ops())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("https:", "http:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{target} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{target}: no such heading"


def test_every_page_is_reachable_from_the_index():
    index = (ROOT / "docs/index.md").read_text()
    for page in PAGES[1:]:
        name = str(page.relative_to(ROOT / "docs"))
        assert name == "index.md" or f"({name})" in index, f"docs/index.md does not link {name}"
