"""`prism view`: a trained run on a page, live or as one file."""

from pathlib import Path

from prism.errors import RunError, UserError
from prism.view.bundle import Bundle
from prism.view.trace import LiveModel

PORT = 8765


def view(
    run: str, port: int = PORT, host: str = "127.0.0.1", open_browser: bool = True, export: str | None = None,
    prompt: str | None = None, device: str | None = None, step: int | None = None, encoding: str | None = None,
) -> None:
    """Serves the page of a run until Ctrl-C, or with `export` writes it to that file."""
    from prism.device import pick_device, use_threads
    from prism.trained import open_run

    bundle = Bundle.read()
    trained = open_run(run, step, pick_device(device))
    trained.refuse_other_encoding(encoding)
    use_threads(None, trained.config)
    live = LiveModel(trained)
    if export is not None:
        print(write_page(live, bundle, Path(export), prompt))
        return
    if prompt is not None:
        live.asked(prompt)  # what is wrong with it is better said here than on the page
    try:
        from prism.view.server import serve
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("starlette", "uvicorn"):
            raise
        raise RunError(f"prism view needs {missing}: pip install 'prism-positions[train,view]'; --export does "
                       "without") from None
    serve(live, bundle, host, port, open_browser, prompt)


def write_page(live: LiveModel, bundle: Bundle, path: Path, prompt: str | None = None) -> str:
    """Writes one file that plays this prompt, or the task's own first example; says what is in it."""
    from prism.disk import replace_file

    if path.is_dir():
        raise UserError(f"--export is a file to write, and {path} is a folder")
    if prompt is None:
        examples = live.examples()
        if not examples:
            raise UserError("no example of the task is short enough to show: give a prompt with --prompt")
        prompt = examples[0]["prompt"]
    trace = live.complete(prompt)
    page = bundle.alone(trace)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, page)
    return f"{path}: {len(trace['tokens']):,} tokens, {trace['verdict']}, {len(page) / 1e6:.1f} MB"
