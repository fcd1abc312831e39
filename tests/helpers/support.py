"""The table of features on the site, written from what tests ran on the machine that is to be spoken of, by COMMAND."""

import pathlib

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "features.md"
COMMAND = "pytest --write-support -m 'slow or not slow' tests/jax/test_features.py tests/torch/test_torch_features.py"
START, END = f"<!-- support: {COMMAND} -->\n", "<!-- /support -->\n"
FEATURES = {  # by what the names of the cases start with
    "bias": "additive bias, its gradient and tangent",
    "mask": "boolean mask",
    "key": "sequence lengths",
    "query": "sequence lengths",
    "lengths": "sequence lengths",
    "segments": "segment ids",
    "ranges": "ranges of keys",
    "blocks": "masks of blocks",
    "window": "sliding window",
    "long": "sliding window",
    "lower": "causal from the lower right corner",
    "soft": "logit soft cap",
    "sinks": "attention sinks",
    "dropout": "dropout",
    "values": "values of another width",
    "grouped": "these with grouped queries",
    "everything": "mixtures of these",
}


def claim(case: str, column: str) -> tuple[str, str]:
    """The property "supports" of a test: a feature and a column of the table."""
    return FEATURES[case.split("-")[0]], column


def write(claims: list[tuple[str, str, bool]]) -> None:
    """(feature, column, passed): a feature has a tick where all its tests passed, and a cross where one failed."""
    columns = sorted({column for _, column, _ in claims})
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for feature in dict.fromkeys(FEATURES.values()):
        outcomes = ([passed for f, c, passed in claims if (f, c) == (feature, column)] for column in columns)
        cells = ("" if not found else "✓" if all(found) else "✗" for found in outcomes)
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(before + START + "\n".join(lines) + "\n" + END + rest.split(END)[1])
