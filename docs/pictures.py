"""The pictures of README and of the site, drawn from what was measured.

python docs/pictures.py                           # docs/images/speed.png, of README
python docs/pictures.py --examples output         # docs/images/examples.png too, of what examples/ drew there
"""

import argparse
import csv
import io
import pathlib
import sys

import matplotlib

from jax_flash_jvp import visibility

matplotlib.use("Agg")
from matplotlib import colors, image, pyplot

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import regret_page  # noqa: E402

COLORS = {  # of whoever is measured, the same in every picture
    "jax-flash-jvp": "#c8553d", "portable": "#e0a458", "fa4-jax": "#7b5ea7", "cuDNN": "#2f6690", "SDPA flash": "#81a4cd",
    "jvp-flash-attention": "#588157", "XLA": "#6c757d",
}  # fmt: skip
NAMES = {"portable": "jax-flash-jvp, portable kernels", "SDPA flash": "FlashAttention 2 (SDPA)"}
JOBS = ("forward", "forward + JVP", "backward", "dual backward")
FONT = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "pictures"}


def svgs(root: pathlib.Path) -> dict[str, str]:
    """name → SVG of each picture that the site draws when it is built."""
    rows = measured(root / "benchmarks" / "h200.csv")
    drawn = {}
    with pyplot.rc_context(FONT):
        for head_dim in sorted({row["head_dim"] for row in rows}):
            figure = over_length(rows, JOBS, [head_dim], size=(10, 3.1))
            drawn[f"h200-{head_dim}"] = _svg(figure)
        drawn["timeline"] = _svg(timeline())
        drawn["visibility"] = _svg(who_sees_whom())
        if saved := sorted(root.glob("benchmarks/regret-*.json")):
            drawn["regret"] = _svg(regret_page.heat_map(regret_page.read(saved)))
    return drawn


def measured(path: pathlib.Path) -> list[dict]:
    with open(path, newline="") as file:
        numbers = dict(length=int, heads=int, head_dim=int, milliseconds=float, tflops=float, of_matmul=float)
        return [row | {name: kind(row[name]) for name, kind in numbers.items()} for row in csv.DictReader(file)]


def over_length(rows: list[dict], jobs, head_dims, size) -> pyplot.Figure:
    """TFLOP/s over the sequence length, a panel for each job and head dimension, and those of a matmul for comparison."""
    panels = [(job, head_dim) for head_dim in head_dims for job in jobs]
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
    matmul = sorted(row["tflops"] / row["of_matmul"] for row in rows)[len(rows) // 2]
    lengths = sorted({row["length"] for row in rows})
    for axis, (job, head_dim) in zip(axes[0], panels, strict=True):
        axis.axhline(matmul, color="#999999", linestyle="--", linewidth=1, label="matmul, 8192³")
        for who, color in COLORS.items():
            if not any(row["who"] == who and row["job"] in jobs for row in rows):
                continue
            line = sorted(
                (row["length"], row["tflops"])
                for row in rows
                if (row["job"], row["head_dim"], row["who"]) == (job, head_dim, who)
            )
            axis.plot(
                *(zip(*line, strict=True) if line else ([], [])),
                marker="o", markersize=4, linewidth=2.4 if who == "jax-flash-jvp" else 1.4, color=color,
                label=NAMES.get(who, who),
            )  # fmt: skip
        axis.set(title=f"{job}, D = {head_dim}", xscale="log", ylim=(0, None))
        axis.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.set_xlabel("sequence length")
    axes[0, 0].set_ylabel("TFLOP/s, one H200, bfloat16")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels) if len(labels) < 6 else 4, frameon=False)
    figure.tight_layout(rect=(0, (0.3 if len(labels) < 6 else 0.5) / size[1], 1, 1))
    return figure


def timeline() -> pyplot.Figure:
    """Forward + tangent on Hopper: what the producer and two consumer warpgroups do, tile after tile."""
    figure, axis = pyplot.subplots(figsize=(10, 3.4))
    lanes = {"producer warp (TMA)": 4, "warpgroup 0: matmuls": 3, "warpgroup 0: math": 2, "warpgroup 1: matmuls": 1,
             "warpgroup 1: math": 0}  # fmt: skip
    load, matmul, math = "#81a4cd", "#e08e79", "#f0c987"

    def box(lane: str, start: float, length: float, text: str, color: str) -> None:
        axis.barh(lanes[lane], length, left=start, height=0.8, color=color, edgecolor="white")
        axis.text(start + length / 2, lanes[lane], text, ha="center", va="center", fontsize=8)

    for tile in range(3):
        box("producer warp (TMA)", 4 * tile - 2, 0.95, f"K, K̇\nof tile {tile}", load)
        box("producer warp (TMA)", 4 * tile - 1, 0.95, f"V, V̇\nof tile {tile}", load)
    for group, delay in ((0, 0.0), (1, 2.0)):
        for tile in range(2):
            start = 4 * tile + delay
            box(f"warpgroup {group}: matmuls", start, 0.95, f"S, Ṡ\nof tile {tile}", matmul)
            box(f"warpgroup {group}: math", start + 1, 0.95, "softmax,\nmean c", math)
            box(f"warpgroup {group}: matmuls", start + 2, 0.95, "P V, P V̇", matmul)
            box(f"warpgroup {group}: math", start + 2, 0.95, "P∘(Ṡ − c)", math)
            box(f"warpgroup {group}: matmuls", start + 3, 0.95, "P∘(Ṡ − c)\ntimes V", matmul)
            box(f"warpgroup {group}: math", start + 3, 0.95, "rescale", math)
    axis.set_yticks(list(lanes.values()), list(lanes))
    axis.set_xticks([])
    axis.set_xlabel("time →")
    axis.spines["left"].set_visible(False)
    axis.tick_params(left=False)
    figure.tight_layout()
    return figure


def who_sees_whom() -> pyplot.Figure:
    """A panel for each constructor of ranges: queries downwards, keys to the right."""
    n = 32
    tiles = visibility.sliding_tile((4, 8), (2, 2), (1, 3))
    panels = {
        "causal": visibility.causal(n), "window(left=6, right=2)": visibility.window(n, 6, 2),
        "prefix(10)": visibility.prefix(n, 10), "block_causal(8)": visibility.block_causal(n, 8),
        "teacher_forcing(4)": visibility.teacher_forcing(n, 4),
        "documents": visibility.documents(n, [0, 7, 20, 32]),
        "documents, causal": visibility.documents(n, [0, 7, 20, 32], is_causal=True),
        "sliding_tile": tiles["key_ranges"],
    }  # fmt: skip
    figure, axes = pyplot.subplots(2, 4, figsize=(10, 5.6))
    for axis, (title, ranges) in zip(axes.flat, panels.items(), strict=True):
        axis.imshow(
            visibility.matrix(ranges, n)[0, 0], cmap=colors.ListedColormap(["#eef0f2", "#2f6690"]), vmin=0, vmax=1
        )
        axis.set(title=title, xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    axes[0, 0].set(ylabel="queries ↓", xlabel="keys →")
    figure.tight_layout()
    return figure


def examples(folder: pathlib.Path) -> pyplot.Figure:
    """Of four pictures that the examples drew a part each, side by side."""
    drawn = {  # by title: the file, and the part, as shares of its height and width
        "MeanFlow, in one step": ("meanflow_jax/samples.png", (0.065, 0.505), (0.01, 0.485)),
        "terminal velocity matching": ("tvm_jax/samples.png", (0.065, 0.505), (0.01, 0.485)),
        "eigenvalues of a Hessian": ("hvp_jax/hessian.png", (0.19, 1), (0.67, 1)),
        "tiles, as they are visited": ("from_scratch/tiles.png", (0.1, 0.9), (0, 0.44)),
    }
    pictures = {}
    for title, (path, rows, columns) in drawn.items():
        picture = image.imread(folder / path)
        height, width = picture.shape[:2]
        pictures[title] = picture[
            int(rows[0] * height) : int(rows[1] * height), int(columns[0] * width) : int(columns[1] * width)
        ]
    widths = [picture.shape[1] / picture.shape[0] for picture in pictures.values()]
    figure, axes = pyplot.subplots(1, 4, figsize=(12, 12 / sum(widths) + 0.4), width_ratios=widths)
    for axis, (title, picture) in zip(axes, pictures.items(), strict=True):
        axis.imshow(picture, interpolation="antialiased")
        axis.set_title(title)
        axis.axis("off")
    figure.tight_layout()
    return figure


def _svg(figure: pyplot.Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)  # style.css inverts it in dark mode
    pyplot.close(figure)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=pathlib.Path, help="the folder that examples/ wrote to")
    options = parser.parse_args()
    images = ROOT / "docs" / "images"
    images.mkdir(exist_ok=True)
    with pyplot.rc_context(FONT):
        by_default = lambda row: row["who"] != "portable"
        rows = list(filter(by_default, measured(ROOT / "benchmarks" / "h200.csv")))
        figure = over_length(rows, ("forward + JVP", "dual backward"), sorted({r["head_dim"] for r in rows}), (12, 3.3))
        figure.savefig(images / "speed.png", dpi=100)
        if options.examples:
            examples(options.examples).savefig(images / "examples.png", dpi=100)


if __name__ == "__main__":
    main()
