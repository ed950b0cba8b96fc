"""One training batch as host arrays.

Made by `lazyjax.data`, consumed by the executor, the evaluation and the test oracle. Axes:
B rows, T tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Int32

Tokens = Int32[np.ndarray, "B T"]


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """A rectangular batch of token rows.

    Attributes:
        tokens_BT: input token ids.
        targets_BT: the token that follows each input token (any value where masked out).
        loss_mask_BT: True where the target counts towards the loss (response tokens only).
        segment_ids_BT: 1, 2, ... for the packed rows of a sequence, 0 for padding. Tokens see
            only earlier tokens of their own segment.
        positions_BT: position inside the segment, restarting at 0.
    """

    tokens_BT: Tokens
    targets_BT: Tokens
    loss_mask_BT: Bool[np.ndarray, "B T"]
    segment_ids_BT: Tokens
    positions_BT: Tokens

    @property
    def rows(self) -> int:
        """B."""
        return self.tokens_BT.shape[0]

    @property
    def sequence_length(self) -> int:
        """T."""
        return self.tokens_BT.shape[1]

    @property
    def target_tokens(self) -> int:
        """Tokens that count towards the loss: the denominator of its mean."""
        return int(self.loss_mask_BT.sum())

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.segment_ids_BT > 0).sum())

    def with_rows(self, rows: int) -> Batch:
        """The batch with rows of padding after its own, so that it has `rows` in all.

        Padding is masked out of the loss and belongs to no segment: it changes neither the loss nor a
        gradient.
        """
        missing = rows - self.rows
        if not missing:
            return self
        padding = [(0, missing), (0, 0)]
        return Batch(*(np.pad(getattr(self, field.name), padding) for field in dataclasses.fields(self)))

    def slice_rows(self, start: int, stop: int) -> Batch:
        """Rows [start, stop) as views."""
        return Batch(*(getattr(self, field.name)[start:stop] for field in dataclasses.fields(self)))
