"""What every positional encoding owes a Transformer, checked in a second: a file of your own goes through this before
it is trained, so that a table never compares a method that looks ahead with methods that do not.

Dimensions: batch; time = tokens; width = of the residual stream; heads.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from prism.config import ModelConfig
from prism.encodings.encoding import Encoding, HintKind, Stream
from prism.errors import TooLong, UserError
from prism.ops.attention import visible
from prism.settings import Settings
from prism.transformer import Transformer

SIZE = ModelConfig(width=16, layers=2, heads=2, head_width=8, feedforward=2, vocabulary=12)
BATCH, TIME, LONGER = 3, 9, 40
ROUNDING = 1e-4  # of the logits' size, in float32: what another order of additions may cost
STIRRED = 0.1  # parameters are pushed this far from their start, so that what begins at zero has its say


def check_encoding(kind: type[Encoding], where: str, config: Settings | None = None) -> None:
    """Raises `UserError` with the file, the rule and what was observed, unless `kind` keeps every rule."""
    for text in ("name", "summary", "citation"):
        if not isinstance(getattr(kind, text, None), str):
            raise UserError(f"{where}: {kind.__name__} must say its {text}: a text, got {getattr(kind, text, None)!r}")
    if kind.hint not in (None, *typing.get_args(HintKind)):
        kinds = ", ".join(typing.get_args(HintKind))
        raise UserError(f"{where}: hint must be one of {kinds}, or None; got {kind.hint!r}")
    if not (issubclass(kind.Config, Settings) and dataclasses.is_dataclass(kind.Config)):
        raise UserError(f"{where}: Config must be a frozen dataclass that inherits from Settings, got {kind.Config!r}")
    if not isinstance(getattr(kind, "extrapolates", None), bool):
        raise UserError(f"{where}: {kind.name} must say whether it extrapolates by construction: True or False, "
                        f"got {getattr(kind, 'extrapolates', None)!r}")
    state = torch.get_rng_state()
    try:
        for rule, check in RULES.items():
            torch.manual_seed(0)
            try:
                observed = check(lambda: _model(kind, config))
            except Exception as error:  # whatever a stranger's code raises, its author wants to know where
                observed = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
            if observed is not None:
                raise UserError(f"{where}: {kind.name} breaks the rule '{rule}': {observed}")
    finally:
        torch.set_rng_state(state)


Make = Callable[[], Transformer]


def _model(kind: type[Encoding], config: Settings | None) -> Transformer:
    encoding = kind(SIZE.width, SIZE.layers, SIZE.heads, SIZE.head_width, config)
    if encoding.hint is not None:  # as a task would that tells plain places
        encoding.hints = lambda tokens: torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    model = Transformer(SIZE, encoding).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(STIRRED * torch.randn_like(parameter))
    return model


def _tokens(time: int = TIME, batch: int = BATCH) -> Int[Tensor, "batch time"]:
    return torch.randint(SIZE.vocabulary, (batch, time))


@torch.no_grad()
def _hooks_keep_their_shapes(make: Make) -> str | None:
    """Each hook is called as the Transformer calls it, so that the one at fault can be named."""
    return next(_misshapen(make().encoding), None)


def _misshapen(encoding: Encoding) -> Iterator[str]:
    tokens = _tokens()
    stream = encoding.start(TIME)
    stream.time, stream.tokens, stream.takes_bias = TIME, tokens, True
    x = encoding.embed(torch.randn(BATCH, TIME, SIZE.width), stream)
    yield from _other_shape("embed", x, (BATCH, TIME, SIZE.width))
    for layer in range(SIZE.layers):
        encoding.observe(x, layer, stream)
        encoding.attention_input(x, layer, stream)
        yield from _misshapen_attention(encoding, layer, stream)


def _misshapen_attention(encoding: Encoding, layer: int, stream: Stream) -> Iterator[str]:
    heads = (BATCH, SIZE.heads, TIME)
    given = torch.randn(2, *heads, SIZE.head_width)
    query, key = encoding.transform(given[0], given[1], layer, stream)
    yield from _other_shape("transform's query", query, (*heads, None))
    yield from _other_shape("transform's key", key, (*heads, query.shape[-1]))
    scores = query @ key.mT
    if type(encoding).score is Encoding.score:  # as it is, it adds the bias
        bias = encoding.bias(layer, stream)
        if bias is not None:
            shape = list(bias.shape)
            if len(shape) != 4 or shape[0] not in (1, BATCH) or shape[1] not in (1, SIZE.heads) or (
                shape[2:] != [TIME, TIME]
            ):
                yield f"bias has the shape {shape}, where [{BATCH} or 1, {SIZE.heads} or 1, {TIME}, {TIME}] belongs"
            scores = scores + bias
    else:
        scores = encoding.score(scores, layer, stream)
        yield from _other_shape("score", scores, (*heads, TIME))
    seen = visible(TIME, TIME, scores.device)
    weights = encoding.weigh(scores, seen, layer, stream)
    yield from _other_shape("weigh", weights, (*heads, TIME))
    hidden = float(weights.masked_fill(seen, 0).abs().max())
    if hidden > 0:
        yield f"weigh gave a weight of {hidden:.3g} to a key that is not visible yet"


def _other_shape(what: str, tensor: Any, wanted: tuple[int | None, ...]) -> Iterator[str]:
    if not isinstance(tensor, Tensor):
        yield f"{what} is {type(tensor).__name__}, where a tensor belongs"
    elif len(tensor.shape) != len(wanted) or any(
        want is not None and have != want for have, want in zip(tensor.shape, wanted, strict=True)
    ):
        sizes = ", ".join("any" if want is None else str(want) for want in wanted)
        yield f"{what} has the shape {list(tensor.shape)}, where [{sizes}] belongs"


@torch.no_grad()
def _no_look_ahead(make: Make) -> str | None:
    model, before = make(), _tokens()
    for place in (1, TIME // 2, TIME - 1):
        after = before.clone()
        after[:, place] = (after[:, place] + 1) % SIZE.vocabulary
        moved = _difference(model(after)[:, :place], model(before)[:, :place])
        if not moved <= ROUNDING:
            return f"changing token {place + 1} moved the logits of earlier tokens by {moved:.3g} of their size"
    return None


@torch.no_grad()
def _no_foresight(make: Make) -> str | None:
    """An answer's length is part of the answer: only an encoding that says so may make use of it."""
    model, tokens = make(), _tokens()
    if model.encoding.foresees:
        return None
    moved = _difference(model(tokens[:, :TIME - 1]), model(tokens)[:, : TIME - 1])
    return None if moved <= ROUNDING else (
        f"the logits of the first {TIME - 1} of {TIME} tokens are off by {moved:.3g} of their size if those "
        "are read alone: it makes use of stream.capacity, which has to be said: foresees = True")


@torch.no_grad()
def _chunks_are_the_whole(make: Make) -> str | None:
    model, tokens = make(), _tokens()
    for sizes in ([1] * TIME, [4, 1, TIME - 5]):
        cache = model.new_cache(TIME)
        parts = torch.cat([model(chunk, cache) for chunk in tokens.split(sizes, dim=1)], dim=1)
        moved = _difference(parts, model(tokens))
        if not moved <= ROUNDING:
            return (f"read in chunks of {sizes} with a cache, the logits are off by {moved:.3g} of their size "
                    "(stream.seen counts the tokens of earlier chunks)")
    return None


@torch.no_grad()
def _sequences_do_not_touch(make: Make) -> str | None:
    model, tokens = make(), _tokens()
    moved = _difference(model(tokens[:1]), model(tokens)[:1])
    return None if moved <= ROUNDING else f"a sequence read alone differs by {moved:.3g} from itself in a batch"


@torch.no_grad()
def _longer_sequences(make: Make) -> str | None:
    model = make()
    most = model.longest()
    if most is not None and most < LONGER:
        try:
            model(_tokens(most + 1))
        except TooLong:
            return None
        return f"longest() says {most} tokens, and {most + 1} were read all the same"
    for time in (1, 2, LONGER):
        logits = model(_tokens(time))
        if not logits.isfinite().all():
            return f"the logits of {time} tokens are not all finite"
    return None


@torch.no_grad()
def _the_same_again(make: Make) -> str | None:
    model, tokens = make(), _tokens()
    first = model(tokens)
    model.train()
    if not model(_tokens()).isfinite().all():
        return "the logits in training mode are not all finite"
    model.eval()
    moved = _difference(model(tokens), first)
    return None if moved == 0 else f"the same tokens, read again after a training pass, differ by {moved:.3g}"


def _every_parameter_learns(make: Make) -> str | None:
    model = make().train()
    most = model.longest()
    time = LONGER if most is None else min(most, LONGER)  # what acts at a distance only has room to
    loss = cross_entropy(model(_tokens(time, 8)).flatten(0, 1), _tokens(time, 8).flatten())
    penalty = model.penalty()
    (loss if penalty is None else loss + penalty).backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.encoding.named_parameters():
        if parameter.grad is None or not parameter.grad.abs().max() > 0:
            return f"no gradient reaches its parameter {name}"
        if not parameter.grad.isfinite().all():
            return f"the gradient of its parameter {name} is not finite"
    return None


@torch.no_grad()
def _saved_and_loaded(make: Make) -> str | None:
    model, other, tokens = make(), make(), _tokens()
    other.load_state_dict(model.state_dict())
    moved = _difference(other(tokens), model(tokens))
    return None if moved == 0 else (f"another model with the same saved weights differs by {moved:.3g}: something "
                                    "that counts is neither a parameter nor a buffer, nor set by the options")


def _difference(one: Tensor, other: Tensor) -> float:
    """Relative to the size of the logits; NaN where one is not finite, which no comparison passes."""
    return float((one - other).norm() / other.norm())


# What is checked, in this order: the first rule broken is the one that is said.
RULES: dict[str, Callable[[Make], str | None]] = {
    "hooks keep their shapes": _hooks_keep_their_shapes,
    "causality: a later token never changes an earlier logit": _no_look_ahead,
    "no foresight: how long a sequence will be changes nothing": _no_foresight,
    "chunks with a cache give what the whole gives": _chunks_are_the_whole,
    "sequences of a batch do not touch": _sequences_do_not_touch,
    "longer sequences are read, or refused by longest()": _longer_sequences,
    "in eval mode the same tokens give the same logits": _the_same_again,
    "a gradient reaches every parameter": _every_parameter_learns,
    "weights saved and loaded are the same model": _saved_and_loaded,
}
