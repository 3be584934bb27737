"""Pictures and scalars of an overflow report: headroom of each layer in each step, and the loss scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8compile.observe.history import ValueHistory, by_severity, steps_of

Scales = Sequence[tuple[int, float]]  # (step, loss scale)

SHOWN = 48  # layers in the picture
DEEP = 16.0  # powers of two; all larger headroom has the same colour
OVERFLOW_COLOUR = "#cc4411"


def plot(layers: Sequence[ValueHistory], loss_scale: Scales, folder: Path) -> list[Path]:
    """Write ``headroom.png``, and ``loss_scale.png`` where there is a loss scale; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "headroom.png"]
    plot_headroom(layers, written[0])
    if loss_scale:
        written.append(folder / "loss_scale.png")
        plot_loss_scale(loss_scale, written[1])
    return written


def plot_headroom(layers: Sequence[ValueHistory], path: Path) -> None:
    """A row for each layer in the order in which they run, a column for each step; overflows stand out."""
    labels, steps, values = headroom_map(layers)
    figure, axes = _figure(height=2.4 + 0.18 * len(labels))
    colours = _colours()
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=colours, vmin=1e-6, vmax=DEEP)
    axes.set_yticks(range(len(labels)), labels, fontsize=6)
    ticks = range(0, len(steps), max(1, len(steps) // 10))
    axes.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
    axes.set(xlabel="step", title=f"Powers of two below the largest number, {len(labels)} layers; red: inf or NaN")
    figure.colorbar(image, ax=axes, extend="both", label="powers of two")
    figure.savefig(path, dpi=120)


def headroom_map(layers: Sequence[ValueHistory]) -> tuple[list[str], list[int], list[list[float]]]:
    """Names, steps and ``[layers, steps]`` of headroom: 0 where it overflowed, NaN where a layer did not run."""
    shown = set(map(id, by_severity(layers)[:SHOWN]))
    steps, rows = list(steps_of(layers)), []
    named = [layer for layer in layers if id(layer) in shown]
    for layer in named:
        known = {seen.step: layer.headroom_of(seen) for seen in layer.history}
        rows.append([min(known.get(step, math.nan), 1e3) for step in steps])
    return [layer.name for layer in named], steps, rows


def plot_loss_scale(loss_scale: Scales, path: Path) -> None:
    """The loss scale, step by step, in powers of two."""
    figure, axes = _figure(height=3.6)
    steps, scales = zip(*loss_scale, strict=True)
    axes.step(steps, scales, where="post", color="#4477aa")
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel="loss scale", title="Loss scale")
    figure.savefig(path, dpi=120)


def to_tensorboard(layers: Sequence[ValueHistory], loss_scale: Scales, writer: Any, since: int = 0) -> None:
    """See ``OverflowReport.to_tensorboard``."""
    own = isinstance(writer, (str, Path))
    writer = _writer(writer) if own else writer
    for layer in layers:
        for seen in (seen for seen in layer.history if seen.step >= since):
            writer.add_scalar(f"headroom/{layer.name}", min(layer.headroom_of(seen), DEEP * 8), seen.step)
            writer.add_scalar(f"amax/{layer.name}", seen.amax, seen.step)
            if layer.counted:
                writer.add_scalar(f"underflow/{layer.name}", seen.zero / max(1, seen.numel), seen.step)
    for step, scale in loss_scale:
        if step >= since:
            writer.add_scalar("loss_scale", scale, step)
    if own:
        writer.close()


def _writer(folder: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as missing:
        raise ImportError(
            f"to_tensorboard({str(folder)!r}) needs tensorboard, which is not installed: pip install tensorboard, or give "
            "an object with add_scalar(tag, value, step)"
        ) from missing
    return SummaryWriter(str(folder))


def _colours() -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"].with_extremes(under=OVERFLOW_COLOUR, bad="white")


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()
