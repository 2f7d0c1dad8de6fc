"""Keys and values that a model has computed for the beginning of a text.

Attention is causal, so the keys and values of a token depend only on this token and on earlier ones. A text
that begins with tokens that were read before can therefore go on from their keys and values:

    known = engine.read(values_K, ids_S)                        # reads the beginning once
    later = remembering(engine).after(known)                    # an engine for texts that begin with it
    losses = later.token_losses(values_K, batch)                # rows continue at position S
    ids = later.generate(values_K, prompt_ids, sampling)        # and so does a prompt

The losses and logits are those of the whole text, up to rounding. Two things in the product use this: the
memory of a personal model, and conversations whose earlier turns are not read again.

- Keys are stored as the layers use them: rotated to their positions, which begin at 0.
- They belong to the values of the model that computed them. A change of the values makes them wrong.
- A layer with a sliding window forgets the beginning, as it does when it reads the text.
- BOS, if the model has one, stands at position 0. Whatever follows must not begin with another.

# Legend: S tokens, B key-value heads, D numbers of a head.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyValues:
    """Keys and values of the first S tokens of a text.

    Attributes:
        id_S: the tokens, int64.
        layers: keys and values of each decoder layer, float32 [S, B, D]. They are not changed.
    """

    id_S: NDArray[np.int64]
    layers: tuple[tuple[Array, Array], ...]

    def __len__(self) -> int:
        return len(self.id_S)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all keys and values."""
        return sum(key.nbytes + value.nbytes for key, value in self.layers)

    def first(self, tokens: int) -> "KeyValues":
        """Return the keys and values of the first tokens alone. The arrays are views."""
        return self.between(0, tokens)

    def between(self, first: int, end: int) -> "KeyValues":
        """Return the keys and values of the tokens from `first` to before `end`. The arrays are views."""
        part = slice(first, end)
        return KeyValues(
            id_S=self.id_S[part], layers=tuple((key[part], value[part]) for key, value in self.layers)
        )

    def common(self, id_T: NDArray[np.int64]) -> int:
        """Return the number of tokens in which another text begins as this one does.

        Example:
            >>> known = KeyValues(id_S=np.array([5, 6, 7]), layers=())
            >>> known.common(np.array([5, 6, 8, 9])), known.common(np.array([1]))
            (2, 0)
        """
        both = min(len(self.id_S), len(id_T))
        differs = self.id_S[:both] != id_T[:both]
        return int(differs.argmax()) if differs.any() else both
