"""What was measured, as a table, as JSON and as a picture. Records are plain dicts: a file can be shown again."""

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import dsa_ops

from .measure import UNITS

Record = dict[str, Any]
PACKAGES = ("torch", "triton", "tilelang", "sgl-flash-mla", "flash-mla", "nvidia-cudnn-frontend")
SHORT = {"gemm": "GEMM", "copy": "copy", "gather": "gather", "reduction": "reduction", "sum of parts": "parts"}


def versions() -> dict[str, str]:
    found = {"dsa_ops": dsa_ops.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def driver() -> str | None:
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def machine(device: torch.device) -> Record:
    about: Record = {"device": device.type, "date": time.strftime("%Y-%m-%d"), "versions": versions()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "name": properties.name,
            "driver": driver(),
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
        }
    else:
        about |= {"name": f"CPU, {torch.get_num_threads()} threads", "driver": None}
    return about


# --------------------------------------------------------------------------------------------------------------- table


def head(run: Record) -> list[str]:
    about = run["machine"]
    lines = [", ".join(filter(None, (about["name"], about["driver"] and f"driver {about['driver']}", about["date"])))]
    lines.append(", ".join(f"{name} {version}" for name, version in about["versions"].items()))
    if about["device"] == "cpu":
        lines.append("Times are the host's (CPU, warm caches); memory is not measured.")
    else:
        lines.append("Times are CUDA events with a cold L2; extra memory is beside inputs and results, at the peak.")
    found = {name: rate for name, rate in run["ceilings"].items() if rate}
    if found:
        lines.append("ceilings measured in this run: " + ", ".join(f"{n} {rate_text(n, r)}" for n, r in found.items()))
    return lines + list(run["notes"])


def rate_text(name: str, rate: float) -> str:
    return f"{rate / 1e12:.0f} {UNITS[name]}" if name == "gemm" else f"{rate / 1e12:.2f} {UNITS[name]}"


COLUMNS = (
    f"{'op':26s}{'by':22s}{'ms':>10s}{'spread':>8s}{'n':>3s}{'TFLOP/s':>9s}{'of ceiling':>17s}{'ours is':>9s}"
    f"{'extra MiB':>11s}{'results':>9s}  error"
)


def mib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.0f}"


def line(record: Record) -> str:
    """One row of the table: a measurement, or why there is none."""
    start = f"{record['op']:26s}{record['by']:22s}"
    if record["status"] == "sum":
        return f"{start}{record['ms']:10.3f}{record['ratio']:45.2f}x  sum of {record['reason']}"
    if record["status"] != "ok":
        return f"{start}{record['status']}: {record['reason']}"
    spread = (record["ms_max"] - record["ms_min"]) / record["ms"]
    ceiling = f"{record['fraction']:.0%} {SHORT[record['bound']]}" if record["fraction"] else ""
    rate = "" if record["tflops"] is None else f"{record['tflops']:.{1 if record['tflops'] >= 1 else 4}f}"
    ratio = f"{record['ratio']:.2f}x" if record["ratio"] else ""
    errors = " ".join(
        f"{name} {error:.0f}" if name == "selection" else f"{name} {error:.1e}"
        for name, error in record["errors"].items()
    )
    return (
        f"{start}{record['ms']:10.3f}{spread:8.0%}{record['repeats']:3d}"
        f"{rate:>9s}{ceiling:>17s}{ratio:>9s}{mib(record['extra_bytes']):>11s}"
        f"{mib(record['result_bytes']):>9s}  {'WRONG ' if record['wrong'] else ''}{errors}"
    ).rstrip()


def show(run: Record) -> list[str]:
    """The whole table of a finished run."""
    lines, case = head(run), None
    for record in run["records"]:
        if record["case"] != case:
            case = record["case"]
            lines += ["", case, COLUMNS]
        lines.append(line(record))
    return lines


# ---------------------------------------------------------------------------------------------------------------- JSON


def write(run: Record, path: Path) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(run, indent=1) + "\n")
    os.replace(part, path)


def read(path: Path) -> Record:
    """Raises ValueError with one line where the file is not one that `write` has made."""
    try:
        run = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(run, dict) or not {"machine", "ceilings", "notes", "records"} <= run.keys():
        raise ValueError(f"{path}: not a file that this tool has written")
    return run


# ---------------------------------------------------------------------------------------------------------------- plot


def plot(run: Record, path: Path) -> None:
    """A roofline of the longest case of each op, and time against S for each op. Needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    records = [record for record in run["records"] if record["status"] == "ok"]
    # lines of one picture differ in length alone: the first preset and pattern of the run
    if records:
        first = records[0]
        records = [r for r in records if (r["preset"], r["pattern"]) == (first["preset"], first["pattern"])]
    others = dict.fromkeys(record["by"] for record in records if not record["ours"])
    colours = {by: f"C{i}" for i, by in enumerate(others)}
    ops = list(dict.fromkeys(record["op"] for record in records))
    columns = 4
    rows = 1 + -(-len(ops) // columns)
    figure = pyplot.figure(figsize=(4.2 * columns, 4.4 + 3.2 * (rows - 1)), layout="constrained")
    grid = figure.add_gridspec(rows, columns, height_ratios=[1.6] + [1] * (rows - 1))
    _roofline(figure.add_subplot(grid[0, :]), run, records)
    for i, op in enumerate(ops):
        axes = figure.add_subplot(grid[1 + i // columns, i % columns])
        for by in dict.fromkeys(record["by"] for record in records if record["op"] == op):
            points = sorted((r["length"], r["ms"]) for r in records if (r["op"], r["by"]) == (op, by))
            ours = any(r["ours"] for r in records if (r["op"], r["by"]) == (op, by))
            style = dict(color="#c23b22", linewidth=2) if ours else dict(color=colours[by], linewidth=1, ls="--")
            axes.plot(*zip(*points, strict=True), marker="o", label=by, **style)
        axes.set(xscale="log", yscale="log", title=op, xlabel="S", ylabel="ms")
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        lengths = sorted({record["length"] for record in records})
        axes.set_xticks(lengths, [str(length) for length in lengths], fontsize=8)
        axes.legend(frameon=False, fontsize=8)
    about = run["machine"]
    what = f"{first['preset']}, {first['pattern']}" if records else "nothing measured"
    figure.suptitle(f"{what}: {about['name']}, {about['date']}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


COLOURS = {"copy": "#444444", "gather": "#2f6db5", "reduction": "#c23b22"}


def _roofline(axes: Any, run: Record, records: list[Record]) -> None:
    """Operations a second against operations per byte of the traffic that weighs most; each kind has its own slope."""
    ceilings = {name: rate for name, rate in run["ceilings"].items() if rate}
    longest: dict[tuple[str, str], Record] = {}
    for record in records:
        if record["op"] == "step" or record["context"]:
            continue
        if record["length"] >= longest.get((record["op"], record["by"]), record)["length"]:
            longest[record["op"], record["by"]] = record
    intensities = []
    for record in longest.values():
        work, rates = record["work"], {kind: ceilings.get(kind, 1.0) for kind in COLOURS}
        kind = max(COLOURS, key=lambda kind: work[kind] / rates[kind])
        if not work[kind] or not work["gemm"]:
            continue
        intensities.append(work["gemm"] / work[kind])
        face = COLOURS[kind] if record["ours"] else "none"
        axes.plot(intensities[-1], record["tflops"], "o", color=COLOURS[kind], markerfacecolor=face)
        if record["ours"]:
            axes.annotate(
                record["op"],
                (intensities[-1], record["tflops"]),
                xytext=(6, -3),
                textcoords="offset points",
                fontsize=8,
            )
    low, high = (min(intensities) / 3, max(intensities) * 4) if intensities else (1, 1e4)
    xs = [low * (high / low) ** (i / 99) for i in range(100)]
    top = ceilings.get("gemm", float("inf"))
    for kind, colour in COLOURS.items():
        if kind in ceilings:
            label = f"{kind}: {rate_text(kind, ceilings[kind])}"
            axes.plot(xs, [min(x * ceilings[kind], top) / 1e12 for x in xs], color=colour, linewidth=1, label=label)
    if "gemm" in ceilings:
        axes.axhline(top / 1e12, color="#bbbbbb", linewidth=1, label=f"GEMM: {rate_text('gemm', top)}")
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    title = "roofline, longest S (filled: ours, hollow: others; colour: the traffic that weighs most)"
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of that traffic", ylabel="TFLOP/s", title=title)
