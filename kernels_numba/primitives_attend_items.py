"""How rows of attention are cut for blocks of warpgroups: a unit is a row's group of 64 heads, an item one split of it.

A row of so many keys is cut in splits of `span_tiles` tiles of TILE positions, a matter of that number alone. Which
block makes an item changes no bit: blocks take runs of items of about as many tiles each.
"""

from numba import int32, uint32

from kernels_numba.primitives import device_function

TILE = 64  # positions
HEADS = 64  # of a unit
MAX_SPLITS = 128


@device_function
def tiles_of(keys):
    """Tiles of a row that sees that many keys."""
    return int32(uint32(uint32(keys) + uint32(TILE - 1)) // uint32(TILE))


@device_function
def over(tiles, parts):
    """tiles / parts, rounded up."""
    return int32(uint32(uint32(tiles) + uint32(parts - 1)) // uint32(parts))


@device_function
def span_tiles(tiles):
    """Tiles of each split, the last one's aside, of a row of that many tiles; at least 1."""
    short, long = min(over(tiles, 8), int32(4)), min(over(tiles, 16), int32(8))
    return max(max(short, long), max(over(tiles, MAX_SPLITS), int32(1)))


@device_function
def run_of(block, blocks, most, units):
    """(unit, tile of it, stop) of a block's run, of units of `most` tiles: it has the items that start from there on.

    `stop` counts the tiles of all units, one after another. The unit is 0 where that is the only one.
    """
    tiles, block = uint32(most * units), uint32(block)
    even, rest = uint32(tiles // uint32(blocks)), uint32(tiles % uint32(blocks))
    first = uint32(block * even + min(block, rest))
    stop = uint32(first + even + (uint32(1) if block < rest else uint32(0)))
    unit = uint32(0) if units == 1 else uint32(first // uint32(most))
    return int32(unit), int32(first - unit * uint32(most)), int32(stop)


@device_function
def starts_item(unit, most, tile, tiles, stop):
    """Whether a run that stops there has the item that starts at that tile of a unit, of a row of `tiles` tiles."""
    return tile < tiles and unit * most + tile < stop


def splits_for(keys):
    """The most splits that a row of up to `keys` keys has."""
    tiles = -(-keys // TILE)
    return max(1, min(tiles, 8), min(-(-tiles // 4), 16), min(-(-tiles // 8), MAX_SPLITS))
