"""Results as plots: one SVG per scenario, and one of the eviction policies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.suite import policies
from benchmarks.suite.systems import SYSTEMS
from userkv.core.errors import InvalidSettingError

_OURS, _THEIRS = "#1f6feb", "#9aa4b2"


def draw(results: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write the plots of a run; returns their files.

    Raises:
        InvalidSettingError: matplotlib is not installed.

    """
    try:
        import matplotlib
    except ImportError as error:
        raise InvalidSettingError(
            "Plots need matplotlib: pip install 'userkv[bench]', or leave --plots away."
        ) from error
    matplotlib.use("svg")
    # Equal results make equal files.
    matplotlib.rcParams.update({"svg.hashsalt": "userkv", "font.size": 9, "svg.fonttype": "none"})
    directory.mkdir(parents=True, exist_ok=True)
    files = [_comparison(comparison, directory) for comparison in results["scenarios"] if comparison["systems"]]
    if rows := results.get("policies"):
        files.append(_policies(rows, directory))
    return files


def _comparison(comparison: Mapping[str, Any], directory: Path) -> Path:
    """Requests per second, token hit ratio and p99, side by side."""
    from matplotlib import pyplot

    names = list(comparison["systems"])[::-1]
    panels = (("requests_per_s", "requests/s"), ("hit_ratio", "tokens from cache"), ("ttft_p99_s", "TTFT p99, s"))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(9, 0.6 + 0.32 * len(names)), sharey=True)
    for axis, (key, title) in zip(axes, panels, strict=True):
        spreads = [comparison["systems"][name]["figures"][key] for name in names]
        medians = [spread["median"] for spread in spreads]
        reach = [
            [spread["median"] - spread["least"] for spread in spreads],
            [spread["most"] - spread["median"] for spread in spreads],
        ]
        colours = [_OURS if name.startswith("userkv") else _THEIRS for name in names]
        axis.barh([SYSTEMS[name].title for name in names], medians, xerr=reach, color=colours, height=0.7)
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
    return _save(figure, directory / f"{comparison['name']}.svg")


def _policies(rows: list[Mapping[str, Any]], directory: Path) -> Path:
    """Each policy's token hit ratio in HBM as a share of Belady's, by workload."""
    from matplotlib import pyplot

    running = list(rows[0]["hbm"])[len(rows[0]["hbm"]) // 2]
    names = [name for name in rows[0]["hbm"][running] if not name.startswith(policies.BELADY)]
    figure, axis = pyplot.subplots(figsize=(9, 3.2))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        shares = [row["hbm"][running][name] / row["hbm"][running][policies.BELADY] for row in rows]
        axis.bar([at + place * width for at in range(len(rows))], shares, width, label=name)
    axis.set_xticks([at + 0.4 - width / 2 for at in range(len(rows))], [row["workload"] for row in rows])
    axis.set_ylabel(f"hits, of Belady's ({running} at once)")
    axis.set_ylim(0, 1.05)
    axis.legend(ncols=len(names), loc="lower left")
    axis.spines[["top", "right"]].set_visible(False)
    return _save(figure, directory / "policies.svg")


def _save(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return file
