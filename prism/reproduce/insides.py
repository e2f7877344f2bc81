"""The figures of the paper's appendix B, from the trained models that are kept here, as a section of RESULTS.md."""

from pathlib import Path

MODELS = {  # kept model -> a baseline whose attention stands beside its own
    "copy-10": None,
    "reverse-10": "reverse-10-randomized",
}
FIGURES = {
    "gates": "Gates before and after training (the paper's `fig:init-gate-probs`, `fig:trained-gate-probs`).",
    "modes": "The likeliest offset of every cursor, token by token, before and after (`fig:tokencopy-init`, "
             "`fig:tokencopy-trained`, `fig:reverse`, `fig:reverse-queries`).",
    "counter": "The whole histogram of the most telling cursors, within and beyond the training length (the paper "
               "shows it on addition, `fig:addition-ood`; no model here adds beyond its training yet).",
    "displacement": "How far apart two tokens' cursors stand.",
    "parameters": "How sharply each cursor is read (alpha), the content's share (mu), sharpening exponents (gamma).",
    "sharpness": "Does the counter stay sharp? Peak, entropy and edge mass over test lengths.",
    "attention": "Attention at the training length (`fig:reverse-mask`).",
    "attention-beyond": "Attention far beyond it (`fig:reverse-mask-ood`); on reversing, beside the same of a baseline "
                        "with randomized positions (`fig:dm-randomized-pe`).",
}


def draw(models: Path, out: Path) -> list[Path]:
    """Draws them all from the folder of models, a folder each."""
    from prism.inside.figures import draw_inside

    written: list[Path] = []
    for name, other in MODELS.items():
        beside = None if other is None else models / other
        written += draw_inside(models / name, out / name, beside=beside)
    return written


def section(figures: Path) -> str:
    """`figures` is their folder, as the page refers to it."""
    lines = ["## Inside\n", "From the models in `models/`; `prism figures RUN --inside` draws them for any run, and "
             "`prism view RUN` plays them.\n"]
    for name in MODELS:
        lines.append(f"### {name}\n")
        for stem, caption in FIGURES.items():
            lines.append(f"{caption}\n\n![{caption}]({(figures / name / stem).as_posix()}.png)\n")
    return "\n".join(lines)
