"""The parts of the command line that need more than a signature: shared argument types, and the flags of `train`.

The flags of `prism train` are the fields of a `RunConfig`; tyro makes them, with the preset's values as defaults.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from prism.config import LONGEST, NO_ENCODING, RunConfig, preset
from prism.errors import UserError
from prism.tasks import all_tasks, find_task

Run = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Runs = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Prompt = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")]
Whole = Annotated[int | None, tyro.conf.arg(metavar="INT")]
TaskName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TASK")]
Text = Annotated[str | None, tyro.conf.arg(metavar="STR")]
Texts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")]
Minutes = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]


@dataclass(frozen=True)
class TrainCommand:
    """Train a model on a task (`prism tasks` lists them).

    Example: prism train reverse --preset quick --max-length 10 --out runs/reverse

    The defaults below are those of the preset you name; every one of them is a flag. A run that was stopped goes on
    with the same command and --resume.
    """

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    out: Text = None  # run folder; default: runs/TASK-ENCODING-PRESET-...
    resume: bool = False  # go on with the run in --out
    device: Text = None  # cpu, cuda; default: the GPU if there is one
    threads: Whole = None  # of the CPU; default: 1 for a small model (width <= 128), else all cores
    graph: bool = False  # take each step as one CUDA graph: faster, the same numbers; on wherever there is a GPU

    def again(self, out: str) -> str:
        """The command that goes on with this run in `out`: same task, same device, same threads, same steps."""
        from prism.encodings import own_file

        flags = "".join(
            f" --{name} {value}" for name in ("device", "threads") if (value := getattr(self, name)) is not None
        )
        if own := own_file(self.config.encoding):
            flags += f" --encoding {shlex.quote(str(own))}"
        if self.graph != graph_is_default(self.device):
            flags += " --graph" if self.graph else " --no-graph"
        return f"prism train {self.config.task.name} --out {shlex.quote(out)} --resume{flags}"


def parse_train(arguments: list[str]) -> TrainCommand:
    """Two passes: task, model and preset first, since they decide what the other flags are and default to."""
    from prism.architectures import DEFAULT, find_architecture  # with torch, which nothing else here needs

    looks_for_help = bool({"-h", "--help"} & set(arguments))
    task_name = next((word for word in arguments[:1] if not word.startswith("-")), None)
    if task_name is None and not looks_for_help:
        raise UserError(f"prism train needs a task first, e.g. prism train copy (known: {', '.join(all_tasks())})")
    if flag_value(arguments, "--resume", takes_value=False) and (out := flag_value(arguments, "--out")):
        from prism.runs import RunFolder

        base = RunConfig.from_json(RunFolder.open(out).config)
        if base.task.name != task_name:
            raise UserError(f"{out} is a run of {base.task.name}, not of {task_name}")
    else:
        architecture = flag_value(arguments, "--architecture") or DEFAULT
        own = "prism" if find_architecture(architecture).takes_encoding else NO_ENCODING
        base = preset(
            flag_value(arguments, "--preset") or "quick", find_task(task_name or "copy")(),
            flag_value(arguments, "--encoding") or own,
            whole_number(arguments, "--max-length"), whole_number(arguments, "--seed") or 0, architecture,
        )
    command: TrainCommand = tyro.cli(
        TrainCommand, args=arguments[task_name is not None :],
        default=TrainCommand(base, graph=graph_is_default(flag_value(arguments, "--device"))),
        prog=f"prism train {task_name or 'TASK'}",
    )
    return command


def graph_is_default(device: str | None) -> bool:
    """Whether steps are CUDA graphs unless something else is asked for; a device that is not there is said later."""
    from prism.device import pick_device, wants_graph

    return wants_graph(None, pick_device(None) if device is None else device)


def flag_value(arguments: Sequence[str], flag: str, takes_value: bool = True) -> str | None:
    """The value of `--flag value` or `--flag=value`, before the real parser has seen it; the last one counts."""
    found = None
    for here, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = here.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else (following if takes_value else "true")
    return found


def whole_number(arguments: Sequence[str], flag: str) -> int | None:
    """The value of a flag as a whole number of at least 0, if it is there."""
    text = flag_value(arguments, flag)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{flag} must be a whole number, got {text!r}") from None


def split_names(text: str) -> tuple[str, ...]:
    """`prism,rope` -> ("prism", "rope").

    >>> split_names("prism, my encodings/one.py,")
    ('prism', 'my encodings/one.py')
    """
    return tuple(name.strip() for name in text.split(",") if name.strip())


def with_own_encodings(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the files that --encoding and --encodings name read, and their names in their places."""
    given = list(arguments)
    for place, argument in enumerate(given):
        flag, equals, value = argument.partition("=")
        if flag not in ("--encoding", "--encodings") or not (equals or place + 1 < len(given)):
            continue
        named = value if equals else given[place + 1]
        names = ",".join(map(_own_encoding, split_names(named) if flag == "--encodings" else [named]))
        if equals:
            given[place] = f"{flag}={names}"
        else:
            given[place + 1] = names
    return given


def _own_encoding(name: str) -> str:
    if not name.endswith(".py"):
        return name
    from prism.encodings import add_encoding

    return add_encoding(name).name


def parse_lengths(text: str) -> tuple[int, ...]:
    """`10,20,40` -> (10, 20, 40).

    >>> parse_lengths("10, 20,40")
    (10, 20, 40)
    """
    lengths = []
    for word in text.replace(" ", "").split(",") if text else []:
        if not (word.isdecimal() and len(word) < 20 and 1 <= int(word) <= LONGEST):
            raise UserError(f"--lengths must be whole numbers from 1 to {LONGEST:,}, separated by commas; got {word!r}")
        lengths.append(int(word))
    return tuple(lengths)


def default_folder(config: RunConfig) -> str:
    """Where a run goes if it is not told."""
    return f"runs/{config.task.name}-{config.label}-{config.preset}-{config.max_length}-seed{config.seed}"
