"""The command line: parsing and printing. Each verb is a function; tyro makes its flags from its signature."""

import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

try:
    import tyro
except ModuleNotFoundError:  # the core package is for other people's models and comes without
    raise SystemExit("prism: the command line needs tyro: pip install 'prism-positions[train,plot]'") from None

from prism.arguments import (
    Minutes,
    Prompt,
    Run,
    Runs,
    TaskName,
    Text,
    Texts,
    TrainCommand,
    Whole,
    default_folder,
    parse_lengths,
    parse_train,
    split_names,
    with_own_encodings,
)
from prism.config import LONGEST, Preset
from prism.errors import Interrupted, RunError, UserError, is_out_of_memory, unknown
from prism.tasks import all_tasks


def quickstart(seed: int = 0, steps: Whole = None, out: str = "runs/quickstart") -> None:
    """Train PRISM and a sinusoidal baseline of its size to copy 10 digits; test both on up to 200.

    Example: prism quickstart --seed 1

    Args:
        seed: of weights and data.
        steps: of training, for each of the two; default: the quick preset's.
        out: folder for the two runs and the figure.
    """
    from prism.quickstart import run

    run(Path(out), seed, steps)


def tasks() -> None:
    """List the tasks, each with an example.

    Example: prism tasks
    """
    import random

    for name, task in all_tasks().items():
        length = min(task.training_length, 5) if task.has_curriculum else 60
        example = task().example(random.Random(0), length)
        print(f"{name:15} {task.summary}\n{'':15} length: {task.length_means}")
        print(f"{'':15} {task.separator.join(example)}")


def encodings() -> None:
    """List the positional encodings, and the architectures that take none: what each is, and where it comes from.

    Example: prism encodings
    """
    from prism.architectures import all_architectures
    from prism.encodings import all_encodings

    def show(kind: Any) -> None:
        more = f"; hinted ({kind.hint})" if kind.hint else ""
        reach = "extrapolates by construction" if kind.extrapolates else (
            "a longer sequence is something that training has never shown it")
        print(f"{kind.name:22} {kind.summary}\n{'':22} {kind.citation}\n{'':22} {reach}{more}")

    for encoding in all_encodings().values():
        show(encoding)
    print("\narchitectures without a positional encoding (--architecture, --architectures):\n")
    for architecture in all_architectures().values():
        if not architecture.takes_encoding:
            show(architecture)


def train(command: TrainCommand) -> None:
    from prism.device import pick_device, use_threads, wants_graph
    from prism.progress import for_terminal
    from prism.report import result_table
    from prism.train import train as run

    config = command.config
    out = command.out or default_folder(config)
    device = pick_device(command.device)
    graph = wants_graph(command.graph, device)
    use_threads(command.threads, config)
    try:
        result = run(config, out, resume=command.resume, device=device, progress=for_terminal(), graph=graph)
    except Interrupted as stop:
        stop.again = command.again(out)
        raise
    print(result_table(result))
    run_folder = shlex.quote(out)
    print(f"run folder: {out}\n"
          f"try next:   prism figures {run_folder} --out figures   ·   prism generate {run_folder} 'PROMPT'")


def evaluate(
    run: Run, lengths: str = "", examples: int = 1000, step: Whole = None, encoding: Text = None, device: Text = None
) -> None:
    """Test a trained run on chosen lengths: exact match of the whole completion, with 95 % intervals.

    Example: prism evaluate runs/quickstart/prism-seed0 --lengths 10,50,100,200

    Args:
        run: a run folder.
        lengths: test lengths, separated by commas; default: the run's own sweep.
        examples: per length.
        step: the checkpoint to test; default: the newest.
        encoding: the file of your own encoding, where the run has one.
        device: cpu or cuda; default: the GPU if there is one.
    """
    from prism.device import matmul_precision, pick_device, use_threads
    from prism.evaluate import score_subsets, sweep
    from prism.report import score_header, score_line
    from prism.trained import open_run

    wanted = parse_lengths(lengths)
    if examples < 1:
        raise UserError(f"--examples must be at least 1, got {examples}")
    trained = open_run(run, step, pick_device(device))
    trained.refuse_other_encoding(encoding)
    use_threads(None, trained.config)
    say_skipped(trained.skipped)
    task = trained.config.task
    print(f"{task.name} <= {trained.config.max_length}, {trained.config.label}, step {trained.step:,}")
    print(score_header())

    def show(name: str, score: Any) -> None:
        print(score_line(name, score), flush=True)

    with matmul_precision(trained.config.matmul):
        sweep(trained.model, task, wanted or trained.config.test_lengths(), examples, report=show)
        if not wanted:
            score_subsets(trained.model, task, report=show)


def generate(
    run: Run, prompt: Prompt, limit: Whole = None, step: Whole = None, encoding: Text = None, device: Text = None
) -> None:
    """Let a trained run complete a prompt, and say whether it is right.

    Example: prism generate runs/quickstart/prism-seed0 '314159265358979='

    Args:
        run: a run folder.
        prompt: the text up to and including '='.
        limit: most tokens to generate; default: what the right answer needs and a few more.
        step: the checkpoint to use; default: the newest.
        encoding: the file of your own encoding, where the run has one.
        device: cpu or cuda; default: the GPU if there is one.
    """
    from prism.device import matmul_precision, pick_device, use_threads
    from prism.generate import generate as complete
    from prism.trained import open_run

    trained = open_run(run, step, pick_device(device))
    trained.refuse_other_encoding(encoding)
    use_threads(None, trained.config)
    say_skipped(trained.skipped)
    trained.words.encode(prompt)  # an unknown symbol is said before anything about the task's form
    right, verdict = None, ""
    try:
        right = trained.config.task.answer(prompt)
    except UserError as error:  # the model may have something to say all the same
        verdict = f"({error})"
    if limit is None:
        limit = len(trained.words.split(right)) + 8 if right else 256
    with matmul_precision(trained.config.matmul):
        made = complete(trained.model, trained.words, [prompt], limit)[0]
    print(made)
    if right is not None:
        verdict = "right" if made == right else f"wrong; right would be\n{right}"
    print(verdict, file=sys.stderr)


def figures(
    runs: Runs, out: str = "figures", inside: bool = False, prompt: Text = None, length: Whole = None,
    beyond: Whole = None, beside: Text = None, encoding: Text = None, device: Text = None,
) -> None:
    """Draw extrapolation curves from run folders: one figure and table per task and training length, seeds as a band.

    Example: prism figures runs/* --out figures

    Args:
        runs: finished run folders, or their result.json.
        out: folder for the figures (PNG and PDF).
        inside: draw what goes on inside one run instead: gates, cursors, attention, sharpness.
        prompt: with --inside, the text it reads, up to and including '='; default: a test example.
        length: of that example; default: the training length.
        beyond: length of the example past training; default: up to five times that.
        beside: another run of the same task, whose attention is drawn below.
        encoding: the file of your own encoding, where the run has one.
        device: cpu or cuda; default: the GPU if there is one.
    """
    from prism.figures import draw_runs

    if not runs:
        raise UserError("prism figures needs at least one run folder")
    asked = {"prompt": prompt, "length": length, "beyond": beyond, "beside": beside}
    for name, value in asked.items():
        if value is not None and not inside:
            raise UserError(f"--{name} goes with --inside, which draws one run's inside; got {value!r} without it")
        if isinstance(value, int) and not 1 <= value <= LONGEST:
            raise UserError(f"--{name} must be from 1 to {LONGEST:,}, got {value}")
    if inside:
        draw_one_inside(runs, out, prompt, length, beyond, beside, device)
        return
    for drawing in draw_runs([Path(run) for run in runs], Path(out)):
        print(f"{drawing.title}: exact match in %, final weights (95 % interval of the examples)\n\n{drawing.table}\n")
        print(*drawing.files, "", sep="\n")


def export(run: Run, out: Text = None, encoding: Text = None) -> None:
    """Keep a finished run's final model: its weights without the optimiser's state, its result, and a card.

    Example: prism export runs/reverse --out models/reverse-10

    Args:
        run: a finished run folder.
        out: a new folder for the model, which evaluate, generate and figures open like a run; default:
            models/TASK-LENGTH.
        encoding: the file of your own encoding, where the run has one.
    """
    from prism.models import export as keep

    print(keep(run, out))


def models(folder: str = "models") -> None:
    """List the trained models of a folder, with their scores.

    Example: prism models

    Args:
        folder: where the models are.
    """
    from prism.models import kept_in

    for one in kept_in(folder):
        print(one.line())


def bench(repeats: int = 5, out: str = "results/bench", only: Texts = (), device: Text = None) -> None:
    """Measure this machine: the histogram scan's forms, training steps, long evaluations, generation, batches.

    Example: prism bench

    Args:
        repeats: timings of each; the median is shown, with the spread.
        out: folder for the JSON.
        only: sections: scans, growth, steps, runs, evaluations, generations, batches_per_second; default: all.
        device: cpu or cuda; default: the GPU if there is one.
    """
    from prism.bench import run
    from prism.device import pick_device

    run(repeats, Path(out), pick_device(device), only)


def reproduce(
    only: Texts = (), list_: Annotated[bool, tyro.conf.arg(name="list")] = False, minutes: Minutes = None,
    figures: bool = False, train: Text = None, at_once: int = 1, results: str = "results",
    runs: str = "runs/reproduce", device: Text = None,
) -> None:
    """Train what the paper's figures and our tables are made of, as far as time allows; draw them from what there is.

    Example: prism reproduce --minutes 60 --at-once 4

    Args:
        only: names of cells, or how they begin, or patterns with *; default: the whole matrix.
        list_: show what is done, running, stopped or missing, and what it would cost.
        minutes: train what is missing for so long, the most valuable first; what is cut off goes on the next time.
        figures: draw all figures and write RESULTS.md from the results alone; trains nothing.
        train: train this one cell, here, to its end.
        at_once: cells to train at the same time, each in a process of its own.
        results: folder of results, a small JSON a cell; figures go to its folder figures.
        runs: folder for the runs under way, with their checkpoints.
        device: cpu or cuda; default: the GPU if there is one.
    """
    from prism.device import pick_device, use_threads
    from prism.reproduce.matrix import chosen, find_cell
    from prism.reproduce.status import Places, overview, standing

    places = Places(Path(results), Path(runs))
    if train is not None:
        from prism.reproduce.runner import train_cell

        cell = find_cell(train)
        use_threads(None if at_once == 1 else 1, cell.config())
        train_cell(cell, places, pick_device(device))
    elif minutes is not None:
        from prism.reproduce.runner import Runner, reproduce_command

        if not 0 < minutes < 10**6:
            raise UserError(f"--minutes must be a number above 0, got {minutes}")
        command = reproduce_command(places, pick_device(device), at_once)
        if not Runner(chosen(only), places, command, at_once).run(minutes):
            raise RunError("not every cell could be trained: see the logs beside the run folders named above")
    elif figures:
        from prism.reproduce.page import draw_all

        for path in draw_all(places.results):
            print(path)
    else:
        if not list_:
            print("--minutes N trains, --figures draws, --train NAME trains one cell; this is where it all stands:\n")
        print(overview([standing(cell, places) for cell in chosen(only)]))


def compare(
    task: TaskName = "", encodings: str = "prism,nope,sinusoidal,rope,alibi,t5", architectures: str = "",
    seeds: int = 3, steps: Whole = None, minutes: Minutes = None, preset: Preset = "quick", max_length: Whole = None,
    lengths: str = "", at_once: Whole = None, out: Text = None,
    from_: Annotated[Text, tyro.conf.arg(name="from")] = None, train: Text = None, device: Text = None,
) -> None:
    """Train many positional encodings on one task on equal terms, several seeds each: one table, one figure.

    Example: prism compare copy --encodings prism,nope,rope,path/to/mine.py --seeds 3

    Args:
        task: a task; `prism tasks` lists them.
        encodings: names separated by commas (`prism encodings` lists them), files of your own, or all.
        architectures: the same for what has no positional encoding, such as lstm.
        seeds: how many: 0, 1, 2 ...
        steps: of training, for each; default: the preset's.
        minutes: stop after so long; the same command goes on. Default: until all is done.
        preset: quick, paper or best: size, steps, rates.
        max_length: longest training example; default: the task's own.
        lengths: test lengths, separated by commas; default: the task's own sweep.
        at_once: runs at the same time; default: one a core, or four on a GPU.
        out: folder for the run folders, the table and the figure; default: runs/compare/TASK-LENGTH-PRESET-STEPS.
        from_: redraw tables and figures from the results in this folder, without training.
        train: train this one run, MODEL-seedN, here, to its end.
        device: cpu or cuda; default: the GPU if there is one.
    """
    from prism.compare import Grid, redraw, run, train_one
    from prism.device import pick_device, use_threads
    from prism.tasks import find_task

    if from_ is not None:
        redraw(Path(from_), Path(out or from_))
        return
    if not task:
        raise UserError(f"prism compare needs a task first, e.g. prism compare copy (known: {', '.join(all_tasks())})")
    if minutes is not None and not 0 < minutes < 10**6:
        raise UserError(f"--minutes must be a number above 0, got {minutes}")
    chosen = find_task(task)()
    longest = chosen.training_length if max_length is None else max_length
    asked = Grid(
        chosen, longest, preset, split_names(encodings), split_names(architectures), seeds,
        Path(out or f"runs/compare/{task}-{longest}-{preset}{'' if steps is None else f'-{steps}'}"), steps,
        parse_lengths(lengths),
    )
    if train is not None:
        use_threads(1, asked.cells()[0].config())
        train_one(asked, train, pick_device(device))
    else:
        run(asked, minutes, at_once, pick_device(device))


def separate(
    task: TaskName, methods: str = "looped", seeds: int = 1, steps: Whole = None, preset: Preset = "quick",
    max_length: Whole = None, lengths: str = "", out: str = "runs/separate", device: Text = None,
) -> None:
    """Train and test what cannot stand in one table with the rest: methods that are told more, or answer all at once.

    Example: prism separate reverse --methods looped

    Args:
        task: a task the method is defined for.
        methods: names separated by commas: looped.
        seeds: how many: 0, 1, 2 ...
        steps: of training, for each; default: the preset's.
        preset: quick, paper or best: size, steps, rates.
        max_length: longest training example; default: the task's own.
        lengths: test lengths, separated by commas; default: the task's own sweep.
        out: folder for the results, a JSON file a seed; what is there is not trained again.
        device: cpu or cuda; default: the GPU if there is one.
    """
    from prism.device import pick_device, use_threads
    from prism.separate.table import run_missing, table_lines, terms

    if seeds < 1:
        raise UserError(f"--seeds must be at least 1, got {seeds}")
    wanted = [terms(task, preset, max_length, seed, steps, parse_lengths(lengths)) for seed in range(seeds)]
    use_threads(None, wanted[0])
    results = run_missing(split_names(methods), wanted, Path(out), pick_device(device))
    print("", *table_lines(results), sep="\n")


def view(
    run: Run, port: int = 8765, host: str = "127.0.0.1",
    open_browser: Annotated[bool, tyro.conf.arg(name="open")] = True,
    export: Text = None, prompt: Text = None, step: Whole = None, encoding: Text = None, device: Text = None,
) -> None:
    """Watch a trained run at work in the browser, or keep one prompt's play as a file that needs nothing.

    Example: prism view models/copy-10

    Args:
        run: a run folder.
        port: where the page is served; if it is taken, the next free one. 0: any.
        host: the address to listen at; anything but this machine's own lets others in, and is warned of.
        open_browser: open the page in the browser.
        export: write one self-contained page to this file, and serve nothing.
        prompt: with --export, what it plays (default: an example of the task); else checked before serving.
        step: the checkpoint to use; default: the newest.
        encoding: the file of your own encoding, where the run has one.
        device: cpu or cuda; default: the GPU if there is one.
    """
    from prism.view import view as show

    show(run, port, host, open_browser, export, prompt, device, step, encoding)


VERBS: dict[str, Callable[..., None]] = {
    "quickstart": quickstart, "tasks": tasks, "encodings": encodings, "train": train, "evaluate": evaluate,
    "generate": generate, "figures": figures, "bench": bench,
    "compare": compare, "separate": separate, "reproduce": reproduce, "export": export, "models": models, "view": view,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command. Bad input ends with one sentence and exit code 2, work that could not be done with 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an arrow is no reason to fail on a terminal that lacks it
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(overview())
        elif arguments[0] == "--version":
            import prism

            print(prism.__version__)
        else:
            dispatch(arguments[0], arguments[1:])
    except UserError as error:
        fail(error, 2)
    except RunError as error:
        fail(error, 1)
    except Interrupted as stop:
        fail(f"{stop}\ngo on with:  {stop.again}", 128 + stop.signal)
    except KeyboardInterrupt:
        fail("stopped", 130)
    except BrokenPipeError:  # the reader of our output (`| head`) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        fail(error, 1)
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "matplotlib"):
            raise
        fail(f"this needs {error.name}: pip install 'prism-positions[train,plot]'", 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        fail("out of memory: a smaller model, batch, length or limit is the cure", 1)


def dispatch(verb: str, arguments: list[str]) -> None:
    """Parses the flags of one verb and runs it."""
    if verb not in VERBS:
        raise unknown("command", verb, VERBS)
    arguments = with_own_encodings(arguments)
    if verb == "train":
        train(parse_train(arguments))
    else:
        tyro.cli(VERBS[verb], args=arguments, prog=f"prism {verb}")


def draw_one_inside(
    runs: Sequence[str], out: str, prompt: str | None, length: int | None, beyond: int | None, beside: str | None,
    device: str | None,
) -> None:
    from prism.config import RunConfig
    from prism.device import pick_device, use_threads
    from prism.inside.figures import draw_inside
    from prism.runs import RunFolder

    if len(runs) > 1:
        raise UserError(f"--inside draws one run, got {len(runs)}; another's attention goes --beside it")
    use_threads(None, RunConfig.from_json(RunFolder.open(runs[0]).config))
    other = None if beside is None else Path(beside)
    for path in draw_inside(Path(runs[0]), Path(out), prompt, length, beyond, other, pick_device(device)):
        print(path)


def say_skipped(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        print(sentence, file=sys.stderr)


def overview() -> str:
    """The help of `prism` itself."""
    lines = ["prism: learned relative positions for Transformers\n", "usage: prism COMMAND ...; prism COMMAND --help\n"]
    for name, verb in VERBS.items():
        summary = (TrainCommand if verb is train else verb).__doc__ or ""
        lines.append(f"  {name:12} {summary.splitlines()[0]}")
    return "\n".join(lines)


def fail(message: object, code: int) -> None:
    print(f"prism: {message}", file=sys.stderr)
    raise SystemExit(code)
