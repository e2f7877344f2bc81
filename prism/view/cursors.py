"""PRISM's cursors for the page: which there are, which of them tell most, and where they stand.

Dimensions: shown = the cursors asked for; time = all tokens; bins = offsets, after cropping.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prism.encodings.encoding import Encoding
from prism.encodings.prism import Prism
from prism.errors import UserError
from prism.view.block import block, block_bytes

PAIRS = 8  # of a query cursor and its key cursor, that a trace begins with
AT_ONCE = 24 << 20  # bytes of JSON that more pairs than the first may take
VISIBLE = 1 / 512  # less than this rounds to nothing in a byte
MOVES = 3  # offsets a cursor's mode visits before it counts as moving
UNMOVED = 0.1  # what a cursor that stays where it is counts for

Recorded = Mapping[str, Tensor]


class Place(NamedTuple):
    """Where a cursor is found: in the model by layer, head and number, in a recording by depth, side and slot."""

    side: str
    layer: int
    head: int
    cursor: int
    depth: int
    slot: int

    def of(self, recorded: Recorded, what: str) -> Tensor:
        """This cursor's histograms, gates or gamma."""
        whole = recorded[f"prism.{self.depth}.{what}.{self.side}"]
        return whole[self.slot] if what == "gamma" else whole[0, self.slot]


def places(encoding: Encoding) -> list[Place]:
    """All cursors, in the order of their indices; none, where the encoding is not PRISM."""
    if not isinstance(encoding, Prism):
        return []
    found, heads, each = [], encoding.heads, encoding.config.cursors
    for depth, served in encoding.served.items():
        for side in ("query", "key"):
            for slot in range(len(served) * heads * each):
                layer, within = divmod(slot, heads * each)
                found.append(Place(side, served[layer], within // each, within % each, depth, slot))
    return found


def quantities(encoding: Encoding, depths: Sequence[int] | None = None) -> list[str]:
    """What to record for `RecordedCursors`, of all PRISM layers or of some."""
    if not isinstance(encoding, Prism):
        return []
    wanted = ["prism.alpha"]
    for depth in encoding.served if depths is None else depths:
        wanted += [f"prism.{depth}.{what}.*" for what in ("histograms", "gates", "gamma")]
        if _copying(encoding, depth):
            wanted.append(f"prism.{depth}.copy")
    return wanted


class RecordedCursors:
    """All cursors of a model, as recorded over one sequence."""

    def __init__(self, encoding: Encoding, recorded: Recorded, time: int) -> None:
        self.encoding, self.recorded, self.time = encoding, recorded, time
        self.places = places(encoding)
        self._extents: dict[int, tuple[int, int]] = {}

    def table(self) -> list[dict[str, Any]]:
        """What the page says of every cursor."""
        return [self._row(index, place) for index, place in enumerate(self.places)]

    def most_important(self, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        """Query cursors by importance, each followed by the key cursor it is read against; as many as are light."""
        index_of = {place: index for index, place in enumerate(self.places)}
        queries = [index for index, place in enumerate(self.places) if place.side == "query"]
        queries.sort(key=lambda index: -rows[index]["importance"])
        shown: list[int] = []
        for query in queries[:PAIRS]:
            more = [*shown, query, index_of[self.places[query]._replace(side="key")]]
            if shown and self.bytes(more) > AT_ONCE:
                break
            shown = more
        return shown

    def details(self, indices: Sequence[int]) -> dict[str, Any]:
        """Histograms and gates of some cursors, token by token, in the order asked for."""
        first, after = self._extent(indices)
        histograms, gates, home = torch.zeros(len(indices), self.time, after - first), [], 0
        for row, index in enumerate(indices):
            histogram = self.places[index].of(self.recorded, "histograms")
            home = histogram.shape[-1] // 2
            histograms[row] = histogram[:, first:after]
            gates.append(self._gates(self.places[index]))
        return {
            "shown": list(indices), "offset": first - home, "histograms": block(histograms),
            "gates": block(torch.stack(gates) if gates else torch.zeros(0, self.time, 5)),
        }

    def bytes(self, indices: Sequence[int]) -> int:
        """What `details` takes in JSON."""
        first, after = self._extent(indices)
        return len(indices) * cursor_bytes(self.time, after - first)

    def _row(self, index: int, place: Place) -> dict[str, Any]:
        assert isinstance(self.encoding, Prism)
        positioned = place.layer - self.encoding.config.depths[0]
        alpha = float(self.recorded["prism.alpha"][positioned, place.head, place.cursor])
        gamma = float(place.of(self.recorded, "gamma"))
        largest, mode = place.of(self.recorded, "histograms").max(dim=-1)
        sharpness, moves = float(largest.mean()), len(mode.unique()) >= MOVES
        return {
            "index": index, "side": place.side, "layer": place.layer, "head": place.head, "cursor": place.cursor,
            "depth": place.depth, "alpha": _short(alpha), "gamma": _short(gamma) if math.isfinite(gamma) else None,
            "copies": place.side == "query" and place.slot in _copying(self.encoding, place.depth),
            "sharpness": _short(sharpness), "importance": _short(abs(alpha) * sharpness * (1 if moves else UNMOVED)),
        }

    def _extent(self, indices: Sequence[int]) -> tuple[int, int]:
        """The bins, from the first to before the last, where any of these cursors ever has mass that can be seen."""
        for index in set(indices) - set(self._extents):
            most = self.places[index].of(self.recorded, "histograms").amax(dim=0)  # at each offset, over the tokens
            visited = (most > min(VISIBLE, float(most.max()) / 2)).nonzero()  # the widest histogram has its peak
            self._extents[index] = int(visited.min()), int(visited.max()) + 1
        first, after = zip(*(self._extents[index] for index in indices), strict=True) if indices else ((0,), (0,))
        return min(first), max(after)

    def _gates(self, place: Place) -> Float[Tensor, "time 5"]:
        """Increment, keep, decrement; reset; and copy, for a cursor that may."""
        gates = place.of(self.recorded, "gates")
        copying = _copying(self.encoding, place.depth) if place.side == "query" else []
        copy = torch.zeros(gates.shape[0])
        if place.slot in copying:
            copy = 1 - self.recorded[f"prism.{place.depth}.copy"][0, copying.index(place.slot), :, -1]
        return torch.cat((gates.float(), copy.float()[:, None]), dim=-1)


def cursor_bytes(time: int, bins: int) -> int:
    """What a cursor's histograms and gates take in JSON."""
    return block_bytes(time, bins) + block_bytes(time, 5)


def check_indices(encoding: Encoding, indices: object) -> list[int]:
    """`indices` as somebody from outside gave them, if they are of cursors that there are."""
    count = len(places(encoding))
    if not isinstance(indices, list) or not indices:
        raise UserError("cursors must be a list of at least one cursor's index")
    for index in indices:
        if type(index) is not int or not 0 <= index < count:
            there = f"the model has cursors 0 to {count - 1}" if count else "this model has no cursors"
            raise UserError(f"{there}, and {index!r:.40} was asked for")
    if len(set(indices)) < len(indices):
        raise UserError("cursors names a cursor twice")
    return indices


def _copying(encoding: Encoding, depth: int) -> list[int]:
    """The slots of a PRISM layer's query cursors that may copy."""
    assert isinstance(encoding, Prism)
    return encoding.prism_layers[str(depth)].copying  # type: ignore[return-value]


def _short(number: float) -> float:
    return float(f"{number:.6g}")
