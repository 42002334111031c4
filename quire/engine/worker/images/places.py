"""Where the tokens of images stand: rotations by row and column, and tokens that see each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from quire.engine.core.scheduler_output import NewRequestData, ScheduledRequest
from quire.engine.images.vision import Vision
from quire.kernels.backend import AttentionMetadata, Together
from quire.kernels.gpu.transfer import upload


class ImagePlaces:
    """What images change of a step's metadata, beside the features in the place of embeddings."""

    def __init__(self, vision: Vision) -> None:
        self._vision = vision
        self.turns = vision.turns
        """Whether positions behind an image are rotated by others than their own."""
        self._known: dict[int, tuple[NewRequestData, np.ndarray]] = {}
        """By slot: the last owner's admission, and `coordinates` of it."""

    def reach(self, rows: Sequence[ScheduledRequest], owner: Callable[[ScheduledRequest], NewRequestData]) -> bool:
        """Whether some of these rows' tokens do not stand behind all images of their prompt."""
        ends = ((row.start, owner(row).spans) for row in rows)
        return any(spans and start < spans[-1].start + spans[-1].count for start, spans in ends)

    def put(
        self,
        metadata: AttentionMetadata,
        rows: Sequence[ScheduledRequest],
        owner: Callable[[ScheduledRequest], NewRequestData],
    ) -> AttentionMetadata:
        """The metadata of these rows with what their images change of it; itself where none has some."""
        admissions = [owner(row) for row in rows]
        if not any(each.spans for each in admissions):
            return metadata
        return self._together(self._turned(metadata, rows, admissions), rows, admissions)

    def _turned(
        self, metadata: AttentionMetadata, rows: Sequence[ScheduledRequest], admissions: Sequence[NewRequestData]
    ) -> AttentionMetadata:
        """With a row and a column for each token, where some stand in an image."""
        parts = [self._coordinates(row, each) for row, each in zip(rows, admissions, strict=True)]
        if all(part is None for part in parts):
            return metadata
        counted = (
            np.arange(row.start, row.start + row.num_tokens)[:, None].repeat(3, 1) if part is None else part
            for row, part in zip(rows, parts, strict=True)
        )
        axes = np.concatenate(list(counted))
        apart = bool((axes != axes[:, :1]).any())
        turns, *given = upload([axes[:, 0], *([axes] if apart else [])], metadata.positions.device)
        return _changed(metadata, lambda each: replace(each, turns=turns, axes=given[0] if given else None))

    def behind(self, admission: NewRequestData) -> int:
        """What is added to the position of a token behind a prompt's last image for what it is rotated by."""
        table = self._table(admission)
        return int(table[-1].max()) + 1 - len(table) if len(table) else 0

    def _table(self, admission: NewRequestData) -> np.ndarray:
        known = self._known.get(admission.slot)
        if known is None or known[0] is not admission:
            self._known[admission.slot] = known = admission, coordinates(admission, self._vision)
        return known[1]

    def _coordinates(self, row: ScheduledRequest, admission: NewRequestData) -> np.ndarray | None:
        """Of a row's tokens, [count, 3] int64; None where each has its position in all three."""
        if not admission.spans:
            return None
        table, end = self._table(admission), row.start + row.num_tokens
        if not len(table):
            return None
        behind = np.arange(max(row.start, len(table)), end) - len(table) + 1 + table[-1].max()
        return np.concatenate((table[row.start : end], behind[:, None].repeat(3, 1)))

    def _together(
        self, metadata: AttentionMetadata, rows: Sequence[ScheduledRequest], admissions: Sequence[NewRequestData]
    ) -> AttentionMetadata:
        """With those tokens that see each other."""
        found: list[tuple[int, int, int, int]] = []  # number of the row, first token in the step, count, end
        begin = 0
        for number, (row, admission) in enumerate(zip(rows, admissions, strict=True)):
            for span in admission.spans if self._vision.whole else ():
                first, end = max(span.start, row.start), span.start + span.count
                if first < end and first < row.start + row.num_tokens:
                    assert end <= row.start + row.num_tokens, "a step that ends within a whole span"
                    found.append((number, begin + first - row.start, end - first, end))
            begin += row.num_tokens
        if not found:
            return metadata
        owners, _, counts, ends = (np.array(each) for each in zip(*found, strict=True))
        narrow = [np.concatenate(([0], each.cumsum())).astype(np.int32) for each in (counts, ends)]
        standing = np.concatenate([np.arange(first, first + count) for _, first, count, _ in found])
        arrays = [*narrow, ends.astype(np.int32), owners, standing]
        starts, contexts, lens, sequences, places = upload(arrays, metadata.positions.device)
        shapes = tuple(zip(counts.tolist(), ends.tolist(), strict=True))

        def seen(each: AttentionMetadata) -> AttentionMetadata:
            own = AttentionMetadata(
                query_start=starts,
                context_lens=lens,
                key_start=contexts,
                block_table=each.block_table[sequences],
                positions=each.positions[places],
                slots=each.slots[places],
                max_query_len=int(counts.max()),
                max_context_len=int(ends.max()),
                shapes=shapes,
            )
            return replace(each, together=Together(places, own))

        return _changed(metadata, seen)


def coordinates(admission: NewRequestData, vision: Vision) -> np.ndarray:
    """Time, row and column of a prompt's tokens up to the end of its last image, [tokens, 3] int64; [0, 3] where the
    family counts positions alone. Text goes on behind the largest coordinate before it (Wang et al., 2024)."""
    contents, parts, end, following = {each.digest: each for each in admission.images}, [], 0, 0
    for span in admission.spans:
        grid = vision.grid(contents[span.digest])
        if grid is None:
            return np.zeros((0, 3), dtype=np.int64)
        parts.append(np.arange(following, following + span.start - end)[:, None].repeat(3, 1))
        following += span.start - end
        rows, columns = grid
        assert rows * columns == span.count, "a span is not as long as its image's grid"
        place = np.arange(span.count)
        parts.append(following + np.stack((np.zeros_like(place), place // columns, place % columns), axis=1))
        following, end = following + max(rows, columns), span.start + span.count
    return np.concatenate(parts) if parts else np.zeros((0, 3), dtype=np.int64)


def _changed(
    metadata: AttentionMetadata, change: Callable[[AttentionMetadata], AttentionMetadata]
) -> AttentionMetadata:
    """That of every group of layers."""
    return replace(change(metadata), others=tuple(change(each) for each in metadata.others))
