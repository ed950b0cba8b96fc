"""One training batch as host arrays.

Made by `lazyjax.data`, consumed by the executor, the evaluation and the test oracle. Axes:
B rows, T tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float32, Int32

Tokens = Int32[np.ndarray, "B T"]
LossMask = Bool[np.ndarray, "B T"] | Float32[np.ndarray, "B T"]


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """A rectangular batch of token rows.

    Attributes:
        tokens_BT: input token ids.
        targets_BT: the token that follows each input token (any value where masked out).
        loss_mask_BT: True where the target counts towards the loss (response tokens only); or, in float32,
            with what weight it counts, 0 for not at all. The loss is the weighted mean.
        segment_ids_BT: 1, 2, ... for the packed rows of a sequence, 0 for padding. Tokens see
            only earlier tokens of their own segment.
        positions_BT: position inside the segment, restarting at 0.
    """

    tokens_BT: Tokens
    targets_BT: Tokens
    loss_mask_BT: LossMask
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
        """Tokens that count towards the loss."""
        return int(np.count_nonzero(self.loss_mask_BT))

    @property
    def target_weight(self) -> float:
        """The sum of their weights: the denominator of the loss. Their number where all weights are 1."""
        return float(self.loss_mask_BT.sum(dtype=np.float64))

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

    def check_vocabulary(self, size: int) -> None:
        """Refuses ids that an embedding table of `size` rows does not have; masked targets may be any.

        Raises:
            ValueError: naming the row, the position and the id.
        """
        targets_BT = np.where(self.loss_mask_BT != 0, self.targets_BT, 0)
        for name, ids_BT in (("token", self.tokens_BT), ("target", targets_BT)):
            if ids_BT.size and not (ids_BT.min() >= 0 and ids_BT.max() < size):
                row, position = np.argwhere((ids_BT < 0) | (ids_BT >= size))[0]
                raise ValueError(
                    f"row {row}, position {position} of the batch: {name} {ids_BT[row, position]} is outside "
                    f"the model's vocabulary of {size}"
                )

    def slice_rows(self, start: int, stop: int) -> Batch:
        """Rows [start, stop) as views."""
        return Batch(*(getattr(self, field.name)[start:stop] for field in dataclasses.fields(self)))
