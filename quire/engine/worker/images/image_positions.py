from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from quire.engine.common.scheduler_output import NewRequestData, ScheduledRequest
from quire.engine.families.base.vision.vision_spec import VisionSpec
from quire.kernels.backend import AttentionMetadata, BidirectionalSpans
from quire.kernels.gpu.host_transfer import upload_arrays


class ImagePositions:
    def __init__(self, vision: VisionSpec) -> None:
        self._vision = vision
        self.uses_mrope = vision.uses_mrope
        """True if tokens after an image have rotary positions other than their positions in the sequence."""
        self._coordinates_by_slot: dict[int, tuple[NewRequestData, np.ndarray]] = {}

    def has_rows_before_last_image_end(
        self, rows: Sequence[ScheduledRequest], get_new_request: Callable[[ScheduledRequest], NewRequestData]
    ) -> bool:
        ends = ((row.start, get_new_request(row).spans) for row in rows)
        return any(spans and start < spans[-1].start + spans[-1].count for start, spans in ends)

    def apply_to_metadata(
        self,
        metadata: AttentionMetadata,
        rows: Sequence[ScheduledRequest],
        get_new_request: Callable[[ScheduledRequest], NewRequestData],
    ) -> AttentionMetadata:
        new_requests = [get_new_request(row) for row in rows]
        if not any(each.spans for each in new_requests):
            return metadata
        return self._add_bidirectional_spans(
            self._add_mrope_positions(metadata, rows, new_requests), rows, new_requests
        )

    def _add_mrope_positions(
        self, metadata: AttentionMetadata, rows: Sequence[ScheduledRequest], new_requests: Sequence[NewRequestData]
    ) -> AttentionMetadata:
        parts = [self._scheduled_token_coordinates(row, each) for row, each in zip(rows, new_requests, strict=True)]
        if all(part is None for part in parts):
            return metadata
        coordinates_by_row = (
            np.arange(row.start, row.start + row.num_tokens)[:, None].repeat(3, 1) if part is None else part
            for row, part in zip(rows, parts, strict=True)
        )
        axes = np.concatenate(list(coordinates_by_row))
        axes_differ = bool((axes != axes[:, :1]).any())
        rope_positions, *device_axes = upload_arrays(
            [axes[:, 0], *([axes] if axes_differ else [])], metadata.positions.device
        )
        return _map_metadata_groups(
            metadata,
            lambda each: replace(
                each, rope_position_override=rope_positions, mrope_positions=device_axes[0] if device_axes else None
            ),
        )

    def rope_offset(self, new_request: NewRequestData) -> int:
        table = self._coordinate_table(new_request)
        return int(table[-1].max()) + 1 - len(table) if len(table) else 0

    def _coordinate_table(self, new_request: NewRequestData) -> np.ndarray:
        cached = self._coordinates_by_slot.get(new_request.slot)
        if cached is None or cached[0] is not new_request:
            self._coordinates_by_slot[new_request.slot] = cached = (
                new_request,
                mrope_coordinates(new_request, self._vision),
            )
        return cached[1]

    def _scheduled_token_coordinates(self, row: ScheduledRequest, new_request: NewRequestData) -> np.ndarray | None:
        """Returns [num_tokens, 3] int64."""
        if not new_request.spans:
            return None
        table, end = self._coordinate_table(new_request), row.start + row.num_tokens
        if not len(table):
            return None
        text_positions = np.arange(max(row.start, len(table)), end) - len(table) + 1 + table[-1].max()
        return np.concatenate((table[row.start : end], text_positions[:, None].repeat(3, 1)))

    def _add_bidirectional_spans(
        self, metadata: AttentionMetadata, rows: Sequence[ScheduledRequest], new_requests: Sequence[NewRequestData]
    ) -> AttentionMetadata:
        image_spans: list[tuple[int, int, int, int]] = []  # row, first token in the step, count, end
        begin = 0
        for number, (row, new_request) in enumerate(zip(rows, new_requests, strict=True)):
            for span in new_request.spans if self._vision.is_bidirectional else ():
                first, end = max(span.start, row.start), span.start + span.count
                if first < end and first < row.start + row.num_tokens:
                    assert end <= row.start + row.num_tokens, "a step that ends within a whole span"
                    image_spans.append((number, begin + first - row.start, end - first, end))
            begin += row.num_tokens
        if not image_spans:
            return metadata
        owners, _, counts, ends = (np.array(each) for each in zip(*image_spans, strict=True))
        narrow = [np.concatenate(([0], each.cumsum())).astype(np.int32) for each in (counts, ends)]
        standing = np.concatenate([np.arange(first, first + count) for _, first, count, _ in image_spans])
        arrays = [*narrow, ends.astype(np.int32), owners, standing]
        starts, contexts, lens, sequences, places = upload_arrays(arrays, metadata.positions.device)
        shapes = tuple(zip(counts.tolist(), ends.tolist(), strict=True))

        def add_spans(each: AttentionMetadata) -> AttentionMetadata:
            own = AttentionMetadata(
                query_start=starts,
                context_lens=lens,
                key_start=contexts,
                block_table=each.block_table[sequences],
                positions=each.positions[places],
                slot_mapping=each.slot_mapping[places],
                max_query_len=int(counts.max()),
                max_context_len=int(ends.max()),
                query_key_lens=shapes,
            )
            return replace(each, bidirectional_spans=BidirectionalSpans(places, own))

        return _map_metadata_groups(metadata, add_spans)


def mrope_coordinates(new_request: NewRequestData, vision: VisionSpec) -> np.ndarray:
    """Returns (time, row, column) of each token up to the last image's end, [tokens, 3] int64, or [0, 3] without mRoPE.
    Text after an image continues after the largest coordinate (Wang et al., 2024).
    """
    contents = {each.digest: each for each in new_request.images}
    parts = []
    end = 0
    following = 0
    for span in new_request.spans:
        grid = vision.token_rows_and_columns(contents[span.digest])
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


def _map_metadata_groups(
    metadata: AttentionMetadata, change: Callable[[AttentionMetadata], AttentionMetadata]
) -> AttentionMetadata:
    return replace(change(metadata), other_groups=tuple(change(each) for each in metadata.other_groups))
