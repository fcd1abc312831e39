"""What a call uses beyond plain attention, and how its programs are scheduled: one constant of the kernels, FEATURES.

A kernel compiles what its FEATURES name, and nothing else.  Conditions of kernels must be bool, and `in` does not compile
there: what is asked of several fields at once is a property.  Axes are passed on as a constexpr of their own, since Triton
3.6 takes no field of a constant for an argument.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Axes:
    """Along which axes of the scores an array [1|B, 1|K|N, 1|T, 1|S] varies."""

    present: bool = False  # is there such an array at all?
    batch: bool = False
    heads: bool = False  # of queries
    groups: bool = False  # heads of keys, each of which serves a group of heads of queries
    rows: bool = False  # queries
    columns: bool = False  # keys

    @property
    def matrix(self) -> bool:
        return self.rows and self.columns


@dataclasses.dataclass(frozen=True)
class Features:
    left: bool = False  # a query sees keys from `left` before it on
    right: bool = False  # and up to `right` behind it; causality is a `right` of zero
    cap: bool = False  # of scores, soft
    query_lengths: bool = False  # of each batch entry; what lies beyond is padding
    key_lengths: bool = False
    segments: bool = False
    dropout: bool = False
    partial: bool = False  # the keys are some of those that queries see
    queries_aligned: bool = False  # their number is a multiple of 16
    keys_aligned: bool = False
    bias: Axes = Axes()
    mask: Axes = Axes()
    mask_rows: int = 1  # queries for which a row of the mask stands, see `Problem.mask_block`
    mask_columns: int = 1  # keys for which a column does
    mask_pages: bool = False  # blocks name pages of bits, one for each of their elements
    ranges: Axes = Axes()  # of keys, for each query
    intervals: int = 0  # in these
    tiles: Axes = Axes()  # the lists of tiles to visit, where there are masks, segments or ranges
    # Queries of a head, where the query heads that share a head of keys are the rows of one block, one after the other.  Heads
    # are those of keys then.  0: a block has rows of one query head.
    rows_of_head: int = 0
    key_shares: bool = False  # the keys of a block are divided among programs
    row_means: bool = False  # each row of scores has a mean key of its own, else each head of keys

    # of the Hopper kernels alone
    empty_rows: bool = False  # rows may see nothing
    persistent: bool = False  # a program computes one block after the other
    ahead: bool = False  # and loads resident rows of the next one while it computes one, if there is room
    dynamic: bool = False  # programs take the numbers of their blocks from a counter in memory
    waves: bool = False  # programs come in waves, each of one for every multiprocessor
    shared: bool = False  # the last blocks are shared among programs, tile by tile
    deferred: bool = False  # the backward's last product of a tile is issued with the next tile's scores
    late_dp: bool = False  # and its dP behind the softmax, not with the scores
    one_loop: bool = False  # tiles that need no mask go with the others
    heads_in_turn: bool = False  # one block of each of a few heads begins, then the next of each
    makes_statistics: bool = False  # the query side makes those of its rows

    @property
    def sees_all(self) -> bool:
        """Does every query see every key, within the lengths, and no others?"""
        hidden = self.left or self.right or self.segments or self.ranges.present or self.mask.present
        return not (self.partial or hidden or self.bias.columns)

    @property
    def tile_classes(self) -> int:
        """The classes of listed tiles: seen whole, in part, and, of ranges, in part with rows nobody sees (`nobody_sees`)."""
        return 3 if self.ranges.present else 2

    @property
    def later_longer(self) -> bool:
        """Do later queries see more keys?  Under causality, and in most of what ranges are for."""
        return self.right or self.ranges.present

    @property
    def lengths(self) -> bool:
        return self.query_lengths or self.key_lengths
