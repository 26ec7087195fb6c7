"""Which head an instrument is asked about: a pair (layer, head), or the record that scored it.

In a pair, head None is the whole mixer. A number counts the heads of softmax and linear attention and of
Mamba-2, and the channels of Mamba-1, which has no heads. A `HeadScore` of a whole layer stands for
(layer, None); its own `head` reads 0.
"""

from interp.errors import InterventionError
from interp.records import HeadScore

Pair = tuple[int, int | None]
Head = Pair | HeadScore


def pair_of(head: Head) -> Pair:
    """The pair (layer, head) that is meant.

    Raises:
        InterventionError: neither a pair nor a record; a record of a state index or a cluster of channels.
    """
    if isinstance(head, HeadScore):
        return head.unit_key
    if not (isinstance(head, tuple | list) and len(head) == 2):
        raise InterventionError(
            f"heads holds {head!r}; accepted: pairs (layer, head), like [(1, 0)], or HeadScore records"
        )
    return head[0], head[1]


def layer_and_head(layer: int | HeadScore, head: int | None = 0) -> Pair:
    """The pair of two arguments, where a record may stand in the layer's place.

    Raises:
        InterventionError: as `pair_of`, or another head than 0 beside a record.
    """
    if not isinstance(layer, HeadScore):
        return layer, head
    if head != 0:
        raise InterventionError(f"head {head!r} is given beside a record; accepted: the record alone")
    return pair_of(layer)
