"""One frozen configuration per run: made from a preset, changed by flags, saved resolved, read back strictly.

Every value is checked where it is made (settings.py), so a configuration that exists is one that can run.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prism.errors import UserError, unknown
from prism.settings import LARGEST, Settings, SizeConfig, check_type, field_types, setting
from prism.tasks import Task, find_task

Preset = Literal["quick", "paper", "best"]
PRESETS: tuple[Preset, ...] = typing.get_args(Preset)
Matmul = Literal["tf32", "float32"]
NO_ENCODING = "nope"  # of an architecture that takes none
LONGEST = 1_000_000  # length of an example: far beyond what attention can read, and still quick to draw


@dataclass(frozen=True)
class ModelConfig(SizeConfig):
    """The Transformer. Its width is that of the residual stream."""

    heads: int = setting(7, low=1, high=1_024)  # per layer
    head_width: int = setting(32, low=1, high=65_536)
    feedforward: int = setting(4, low=1, high=1_024)  # its width, in multiples of `width`
    # A learned token before the first: what a head may look at to find that there is nothing where it looks.
    start_token: bool = False


@dataclass(frozen=True)
class CurriculumConfig(Settings):
    """Which lengths training sees when: short first, then longer in stages up to the run's max_length."""

    stages: tuple[tuple[int, int], ...] = setting(((5, 5_000), (10, 5_000)), low=1)  # (longest, for this many steps)
    growth: int = setting(10, low=1)  # then this much longer ...
    growth_steps: int = setting(10_000, low=1)  # ... every so many steps


@dataclass(frozen=True)
class OptimizerConfig(Settings):
    """AdamW. An encoding may ask for groups of its own, with their own rates."""

    rate: float = setting(9e-5, above=0, high=10)
    betas: tuple[float, float] = setting((0.9, 0.98), low=0, high=0.9999)
    weight_decay: float = setting(0.01, low=0)
    clip: float = setting(5.0, above=0)  # largest gradient norm
    warmup: int = setting(0, low=0)  # steps of linear warm-up
    decay: Literal["constant", "linear", "cosine"] = "constant"
    final_rate: float = setting(0.0, low=0, high=1)  # where the decay ends, as a fraction of the rate


@dataclass(frozen=True)
class EvaluationConfig(Settings):
    """What is measured, and how often."""

    every: int = setting(1_000, low=1)  # steps
    below_loss: float = setting(0.1, above=0)  # no evaluation before the training loss has been this low
    lengths: tuple[int, ...] = setting((), low=1, high=LONGEST)  # test lengths; none: the task's own sweep
    examples: int = setting(100, low=1)  # per length, while training
    final_examples: int = setting(1_000, low=1)  # per length, at the end
    checkpoint_every: int = setting(1_000, low=1)  # steps


@dataclass(frozen=True)
class RunConfig(Settings):
    """Everything that decides a run's weights, and nothing else."""

    task: Task
    encoding: str
    positions: Settings  # the encoding's own options
    preset: Preset = "quick"  # where the other values started from
    max_length: int = setting(10, low=1, high=LONGEST)  # longest training example, in the task's own measure of length
    steps: int = setting(150_000, low=1)
    batch_size: int = setting(100, low=1)
    seed: int = setting(0, low=0, high=2**31 - 1)
    matmul: Matmul = "tf32"  # how a GPU multiplies matrices: tf32 keeps 10 bits of each factor; a CPU keeps all 23
    architecture: str = "transformer"
    model: SizeConfig = ModelConfig()  # the architecture's own size and options
    curriculum: CurriculumConfig = CurriculumConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def __post_init__(self) -> None:
        from prism.architectures import find_architecture
        from prism.encodings import find_encoding

        super().__post_init__()
        architecture = find_architecture(self.architecture)
        if type(self.model) is not architecture.Config:
            raise UserError(f"model must be the options of {self.architecture}, {architecture.Config.__name__}; "
                            f"got {type(self.model).__name__}")
        if not architecture.takes_encoding and self.encoding != NO_ENCODING:
            raise UserError(f"{self.architecture} takes no positional encoding: encoding must be '{NO_ENCODING}', "
                            f"got '{self.encoding}'")
        if type(self.positions) is not (wanted := find_encoding(self.encoding).Config):
            raise UserError(f"positions must be the options of {self.encoding}, {wanted.__name__}; "
                            f"got {type(self.positions).__name__}")
        if (hint := find_encoding(self.encoding).hint) is not None:
            from prism.hints import hints_of

            hints_of(self.task, hint, asked_by=self.encoding)
        if self.model.vocabulary < (needed := len(self.task.alphabet)):
            raise UserError(f"vocabulary must be at least {needed}, the symbols of {self.task.name}; "
                            f"got {self.model.vocabulary}")

    @property
    def label(self) -> str:
        """What is trained, in a word: the encoding of a Transformer, or an architecture that takes none."""
        return model_label({"architecture": self.architecture, "encoding": self.encoding})

    def test_lengths(self) -> tuple[int, ...]:
        """The lengths of this run's sweeps."""
        return self.evaluation.lengths or self.task.sweep(self.max_length)

    def changed(self, changes: Mapping[str, Any]) -> "RunConfig":
        """Another configuration, with some values under their dotted names: `{"optimizer.rate": 1e-3}`."""
        plain = self.to_json()
        for name, value in changes.items():
            *path, last = name.split(".")
            inner = plain
            for key in path:
                inner = inner[key]
            inner[last] = _plain(value)
        return RunConfig.from_json(plain)

    def to_json(self) -> dict[str, Any]:
        """Every value, resolved; `from_json` gives the same configuration back."""
        plain = typing.cast(dict[str, Any], _plain(self))
        plain["task"] = {"name": self.task.name, **plain["task"]}
        return plain

    @classmethod
    def from_json(cls, data: Any) -> "RunConfig":
        """Reads what `to_json` wrote. Unknown keys, wrong types and values out of range are refused."""
        from prism.architectures import DEFAULT, find_architecture
        from prism.encodings import find_encoding

        if not isinstance(data, Mapping):
            raise UserError(f"the configuration must be an object, got {data!r}")
        for key in ("task", "encoding", "positions"):
            if key not in data:
                raise UserError(f"the configuration lacks '{key}'")
        task = data["task"]
        if not isinstance(task, Mapping) or "name" not in task:
            raise UserError(f"task must be an object with a name, got {task!r}")
        check_type("task.name", task["name"], str)
        check_type("encoding", data["encoding"], str)
        architecture = data.get("architecture", DEFAULT)
        check_type("architecture", architecture, str)
        options = {key: value for key, value in task.items() if key != "name"}
        values: dict[str, Any] = {
            "task": _build(find_task(task["name"]), options, "task"),
            "positions": _build(find_encoding(data["encoding"]).Config, data["positions"], "positions"),
            "model": _build(find_architecture(architecture).Config, data.get("model", {}), "model"),
        }
        return _build(cls, data, "", values)


def model_label(stored: Mapping[str, Any]) -> str:
    """`RunConfig.label` of a stored configuration, perhaps of before there were other architectures."""
    from prism.architectures import DEFAULT

    architecture = stored.get("architecture", DEFAULT)
    return str(stored["encoding"] if architecture == DEFAULT else architecture)


def means(stored: Any, config: RunConfig) -> bool:
    """Whether a stored configuration is this one. What is younger than it takes its default: that is what it was."""
    try:
        return RunConfig.from_json(stored) == config
    except UserError:
        return False


def preset(
    name: str, task: Task, encoding: str, max_length: int | None = None, seed: int = 0,
    architecture: str = "transformer", lengths: tuple[int, ...] = (),
) -> RunConfig:
    """The run that a preset means for this task and encoding, or for an architecture that takes no encoding.

    `lengths` are the test lengths, where they are not to be the task's own sweep.
    """
    from prism.architectures import find_architecture
    from prism.encodings import find_encoding

    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    chosen = find_encoding(encoding)
    base = RunConfig(
        task=task, encoding=encoding, positions=chosen.Config(), preset=name, seed=seed,
        max_length=task.training_length if max_length is None else max_length,
    )
    built = find_architecture(architecture)
    base = _PRESETS[name](base)
    base = dataclasses.replace(base, evaluation=dataclasses.replace(base.evaluation, lengths=lengths))
    if not built.takes_encoding:
        return dataclasses.replace(base, architecture=architecture, model=built.preset(name, base))
    made = chosen.preset(name, base)
    if not isinstance(made, RunConfig):
        raise UserError(f"the preset of {encoding} must return a run's configuration, got {made!r}")
    return made


def _paper(base: RunConfig) -> RunConfig:
    return base  # the defaults are the paper's


def _best(base: RunConfig) -> RunConfig:
    return dataclasses.replace(
        base,
        steps=50_000,
        curriculum=CurriculumConfig(stages=((5, 2_000), (10, 8_000))),
        optimizer=OptimizerConfig(rate=5e-4, weight_decay=0.1),
    )


def _quick(base: RunConfig) -> RunConfig:
    return dataclasses.replace(
        base,
        steps=1_200,
        batch_size=64,
        model=ModelConfig(width=64, layers=2, heads=2, head_width=32),
        curriculum=CurriculumConfig(stages=((5, 100), (10, 400)), growth_steps=200),
        optimizer=OptimizerConfig(rate=2e-3, weight_decay=0.01, clip=1.0, warmup=50, decay="cosine", final_rate=0.05),
        evaluation=EvaluationConfig(every=200, examples=50, final_examples=200, checkpoint_every=200),
    )


_PRESETS = {"paper": _paper, "best": _best, "quick": _quick}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(element) for element in value] if isinstance(value, tuple) else value


def _build(cls: type[Any], data: Any, at: str, given: Mapping[str, Any] | None = None) -> Any:
    """A dataclass from plain JSON values, nested ones included; missing keys take their defaults."""
    if not isinstance(data, Mapping):
        raise UserError(f"{at or 'the configuration'} must be an object, got {data!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = dict(given or {})
    for key, value in data.items():
        if key not in fields:
            raise unknown("setting", f"{at}.{key}".lstrip("."), [f"{at}.{name}".lstrip(".") for name in fields])
        if key not in values:
            values[key] = _value(value, field_types(cls)[key], f"{at}.{key}".lstrip("."))
    return cls(**values)


def _value(value: Any, annotation: Any, at: str) -> Any:
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _build(annotation, value, at)
    value = _tuples(value)
    if annotation is float:
        value = _float(value)
    if isinstance(annotation, types.GenericAlias) and isinstance(value, tuple):
        value = _floats(value, annotation)
    check_type(at, value, annotation)
    return value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(element) for element in value) if isinstance(value, list) else value


def _floats(value: tuple[Any, ...], annotation: types.GenericAlias) -> tuple[Any, ...]:
    wanted = typing.get_args(annotation)
    return tuple(map(_float, value)) if all(kind is float for kind in wanted if kind is not Ellipsis) else value


def _float(value: Any) -> Any:
    """A whole number as the same number with a point; what is no number, or too large for one, as it is."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and abs(value) <= LARGEST else value
