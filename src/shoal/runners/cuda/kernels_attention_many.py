"""Attention of a prompt's rows, and of many rows that are alone in their sequence, in Gluon.

Warps have parts, as in `kernels_many.py`. One brings splits of keys and values to shared memory with the copy engine,
in a ring, also those of the next item. In a prompt two groups of four take 64 queries each over the same keys and
values, so that one's instructions run while the other takes its exponents; a lone row has one group. Bits are those of
`kernels_attention`: its splits, in each the same chains of instructions, and the same order of splits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from shoal.runners.cuda.kernels_attention import BLOCK, LOG2E, SPLIT, _merge

GROUP_QUERIES = gl.constexpr(64)  # queries of one group of warps: what an instruction takes
ONES = gl.constexpr(8)  # equal columns of ones, by which weights are summed: the fewest that an instruction takes
PANEL = gl.constexpr(64)  # of D in one copy: 128 bytes, as wide as shared memory is swizzled


@gluon.jit
def _bring_split(source, held, full, empty, rows, blocks, turn, D: gl.constexpr, SLOTS: gl.constexpr):
    """Ask for a split of keys or values, number `turn` in the ring, as soon as its place there is free.

    `rows` are where its blocks begin; of them the first `blocks` are brought, and behind them lies anything.
    """
    BLOCKS: gl.constexpr = SPLIT // BLOCK
    PANELS: gl.constexpr = D // PANEL
    slot = turn % SLOTS
    ready = full.index(slot)
    mbarrier.wait(empty.index(slot), (turn // SLOTS & 1) ^ 1)
    for block in gl.static_range(BLOCKS):
        mbarrier.expect(ready, BLOCK * D * 2, pred=block < blocks)
        mbarrier.arrive(ready, pred=block >= blocks)
        for panel in gl.static_range(PANELS):
            place = held.index((slot * PANELS + panel) * BLOCKS + block)
            tma.async_copy_global_to_shared(source, [rows[block], panel * PANEL], ready, place, pred=block < blocks)


@gluon.jit
def _rows(table, split, last, kv_head, KV: gl.constexpr):
    """Where the blocks of a split begin that have tokens up to `last`."""
    rows = ()
    for block in gl.static_range(SPLIT // BLOCK):
        number = split * (SPLIT // BLOCK) + block
        rows = rows + ((gl.load(table + number, mask=number * BLOCK <= last, other=0) * KV + kv_head) * BLOCK,)
    return rows


@gluon.jit
def _bring(
    keys, values, held, full, empty, table, begin, last, turn, kv_head,
    KV: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Bring splits from `begin` to that of token `last`, keys before values; the first is number `turn` in the ring.

    Returns the number behind the last; none are brought where `last` is below 0.
    """
    rows = _rows(table, begin, last, kv_head, KV)
    for split in range(begin, (last + SPLIT) // SPLIT):
        following = _rows(table, split + 1, last, kv_head, KV)  # asked for before the wait
        blocks = (last - split * SPLIT) // BLOCK + 1
        _bring_split(keys, held, full, empty, rows, blocks, turn, D, SLOTS)
        _bring_split(values, held, full, empty, rows, blocks, turn + 1, D, SLOTS)
        rows = following
        turn += 2
    return turn


@gluon.jit
def _item(number):
    """Which item is a program's number so many. Long ones come first, so they are dealt out to and fro."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return number * programs + gl.where(number % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _count(items):
    """How many items are this program's."""
    whole = items // gl.num_programs(0)
    return whole + (_item(whole) < items).to(gl.int32)


@gluon.jit
def _ring(keys, D: gl.constexpr, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Shared memory of a ring as blocks and as whole splits, and the barriers of its places."""
    PIECES: gl.constexpr = D // PANEL * (SPLIT // BLOCK)
    held = gl.allocate_shared_memory(gl.bfloat16, [SLOTS * PIECES, BLOCK, PANEL], keys.layout)
    whole = held._reinterpret(gl.bfloat16, [SLOTS, SPLIT, D], keys.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=SPLIT // BLOCK)
        mbarrier.init(empty.index(slot), count=READERS)
    fence_async_shared()
    return held, whole, full, empty


@gluon.jit
def _forget_behind(held, begin, last, D: gl.constexpr):
    """Make the values of tokens after `last` zeros: whatever was kept there before must not become part of a sum."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    token = begin + gl.arange(0, SPLIT, layout=gl.SliceLayout(1, L))[:, None]
    value = held.load(L)
    held.store(gl.where(token <= last, value, gl.zeros_like(value)))
    fence_async_shared()


@gluon.jit
def _scored(
    score, split, position, least, scale, cap, window, CAPPED: gl.constexpr, WINDOW: gl.constexpr, C: gl.constexpr
):
    """From products of queries and keys to weights bf16 [M, SPLIT], and the largest score [M]; see `_partial`.

    Queries are at `position`, none before `least`.
    """
    if CAPPED:
        score = cap * (2.0 / (1.0 + gl.exp(-2.0 * (score * scale) / cap)) - 1.0) * LOG2E
    else:
        score = score * (scale * LOG2E)
    token = split * SPLIT + gl.arange(0, SPLIT, layout=gl.SliceLayout(0, C))[None, :]
    if WINDOW:
        score = gl.where((token <= position) & (token > position - window), score, float("-inf"))
    elif (split + 1) * SPLIT > least + 1:
        score = gl.where(token <= position, score, float("-inf"))
    most = gl.max(score, axis=1)
    base = gl.where(most == float("-inf"), 0.0, most)
    return gl.exp2(score - base[:, None]).to(gl.bfloat16), most


@gluon.jit
def _begin(sinks, head, M: gl.constexpr, D: gl.constexpr, SINKS: gl.constexpr, C: gl.constexpr):
    """`kernels_attention._begin` for a layout [M, D]."""
    R: gl.constexpr = gl.SliceLayout(1, C)
    most = gl.full([M], float("-inf"), gl.float32, R)
    total = gl.zeros([M], gl.float32, R)
    if SINKS:
        most = gl.load(sinks + head) * LOG2E
        total = gl.full([M], 1.0, gl.float32, R)
    return most, total, gl.zeros([M, D], gl.float32, C)


@gluon.jit
def _tile(tiles, positions, slots, tables, T, window, number, WINDOW: gl.constexpr):
    """Tile `number`: its first row, how many, its block table, first split and last token (-1 where it is no work)."""
    first, rows = gl.load(tiles + number * 2), gl.load(tiles + number * 2 + 1)
    last = gl.where(rows > 0, gl.load(positions + first + gl.maximum(rows - 1, 0)), -1)
    begin = 0
    if WINDOW:
        begin = gl.maximum(gl.load(positions + first) - window + 1, 0) // SPLIT
    return first, rows, tables + gl.load(slots + first).to(gl.int64) * T, begin, last


@gluon.jit
def _bring_tiles(
    keys, values, held, full, empty, tables, positions, slots, tiles, T, window, count,
    KV: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """What the tiles of this program read."""
    turn = 0
    for number in range(_count(count * KV)):
        item = _item(number)
        _, _, table, begin, last = _tile(tiles, positions, slots, tables, T, window, count - 1 - item // KV, WINDOW)
        turn = _bring(keys, values, held, full, empty, table, begin, last, turn, item % KV, KV, D, SLOTS)


@gluon.jit
def _attend(
    q, held, q_held, ones, full, empty, begun, tables, positions, slots, tiles, sinks, out, T, scale, cap, window,
    count, GROUP: gl.constexpr, HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, G: gl.constexpr,
    CAPPED: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Queries GROUP * 64 .. of the tiles of this program."""
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SPLIT, 16])
    V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 16])
    R: gl.constexpr = gl.SliceLayout(1, V)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    turn = 0
    if GROUP == 1:  # half a split behind: each group's instructions run while the other takes its exponents
        mbarrier.wait(begun, 0)
    for number in range(_count(count * KV)):
        item = _item(number)
        kv_head = item % KV
        first, rows, _, begin, last = _tile(tiles, positions, slots, tables, T, window, count - 1 - item // KV, WINDOW)
        i = GROUP * GROUP_QUERIES + gl.arange(0, GROUP_QUERIES, layout=gl.SliceLayout(1, L))
        place = (first + gl.maximum(gl.minimum(i // G, rows - 1), 0)) * HEADS + kv_head * G + i % G
        d = gl.arange(0, D, layout=gl.SliceLayout(0, L))[None, :]
        q_held.store(gl.load(q + place[:, None] * D + d))
        fence_async_shared()
        i = GROUP * GROUP_QUERIES + gl.arange(0, GROUP_QUERIES, layout=R)
        row = first + gl.maximum(gl.minimum(i // G, rows - 1), 0)
        position = gl.convert_layout(gl.load(positions + row), gl.SliceLayout(1, C))[:, None]
        least = gl.load(positions + first)
        most, total, mixed = _begin(sinks, kv_head * G + i % G, GROUP_QUERIES, D, SINKS, V)
        for split in range(begin, (last + SPLIT) // SPLIT):
            slot = turn % SLOTS
            mbarrier.wait(full.index(slot), turn // SLOTS & 1)
            score = warpgroup_mma_init(gl.zeros([GROUP_QUERIES, SPLIT], gl.float32, C))
            score = warpgroup_mma(q_held, held.index(slot).permute((1, 0)), score, use_acc=False, is_async=True)
            score = warpgroup_mma_wait(0, (score,))
            mbarrier.arrive(empty.index(slot))
            if GROUP == 0:
                mbarrier.arrive(begun, pred=turn == 0)
            weight, most2 = _scored(score, split, position, least, scale, cap, window, CAPPED, WINDOW, C)
            slot = (turn + 1) % SLOTS
            mbarrier.wait(full.index(slot), (turn + 1) // SLOTS & 1)
            if (split + 1) * SPLIT - 1 > last:
                _forget_behind(held.index(slot), split * SPLIT, last, D)
            mixed2 = warpgroup_mma_init(gl.zeros([GROUP_QUERIES, D], gl.float32, V))
            left = gl.convert_layout(weight, gl.DotOperandLayout(0, V, 2))
            mixed2 = warpgroup_mma(left, held.index(slot), mixed2, use_acc=False, is_async=True)
            left = gl.convert_layout(weight, gl.DotOperandLayout(0, S, 2))
            shares = warpgroup_mma_init(gl.zeros([GROUP_QUERIES, ONES], gl.float32, S))
            shares = warpgroup_mma(left, ones, shares, use_acc=False, is_async=True)
            mixed2, shares = warpgroup_mma_wait(0, (mixed2, shares))
            mbarrier.arrive(empty.index(slot))
            total2 = gl.convert_layout(gl.max(shares, axis=1), R)  # equal columns
            most, total, mixed = _merge(most, total, mixed, gl.convert_layout(most2, R), total2, mixed2)
            turn += 2
        place = row * HEADS + kv_head * G + i % G
        d = gl.arange(0, D, layout=gl.SliceLayout(0, V))[None, :]
        result = (mixed / total[:, None]).to(gl.bfloat16)
        gl.store(out + place[:, None] * D + d, result, mask=(i // G < rows)[:, None] & (d >= 0))
    if GROUP == 0:
        mbarrier.arrive(begun, pred=turn == 0)


@gluon.jit
def attend_many(
    q, keys, values, tables, positions, slots, tiles, sinks, out, T, scale, cap, window, count,
    HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, G: gl.constexpr, CAPPED: gl.constexpr,
    WINDOW: gl.constexpr, SINKS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """`attend_tiles` of `count` tiles with KV in bf16 and D up to 128. Programs take a tile and KV head in turns.

    The last tile comes first: it sees most. keys and values are descriptors of bf16 [blocks * KV * BLOCK, D] in boxes
    of [BLOCK, PANEL].
    """
    held, whole, full, empty = _ring(keys, D, SLOTS, 2)
    q_held = gl.allocate_shared_memory(gl.bfloat16, [2, GROUP_QUERIES, D], keys.layout)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    one = gl.full([ONES, SPLIT], 1.0, gl.bfloat16, L)
    ones = gl.allocate_shared_memory(gl.bfloat16, [ONES, SPLIT], keys.layout, one).permute((1, 0))
    begun = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(begun, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (q, whole, q_held.index(0), ones, full, empty, begun, tables, positions, slots, tiles, sinks, out,
                       T, scale, cap, window, count, 0, HEADS, KV, D, G, CAPPED, WINDOW, SINKS, SLOTS)),
            (_attend, (q, whole, q_held.index(1), ones, full, empty, begun, tables, positions, slots, tiles, sinks, out,
                       T, scale, cap, window, count, 1, HEADS, KV, D, G, CAPPED, WINDOW, SINKS, SLOTS)),
            (_bring_tiles, (keys, values, held, full, empty, tables, positions, slots, tiles, T, window, count,
                            KV, D, WINDOW, SLOTS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _first_split(position, window, WINDOW: gl.constexpr):
    """Of what a row sees."""
    return gl.maximum(position - window + 1, 0) // SPLIT if WINDOW else position * 0


@gluon.jit
def _bring_rows(
    keys, values, held, full, empty, tables, positions, slots, T, window, count,
    KV: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """What the rows of this program read."""
    items, turn = count * KV, 0
    row = _item(0) // KV
    position, slot = gl.load(positions + row), gl.load(slots + row)
    for number in range(_count(items)):
        row = gl.minimum(_item(number + 1), items - 1) // KV
        position2, slot2 = gl.load(positions + row), gl.load(slots + row)  # of the next, asked for early
        begin, kv_head = _first_split(position, window, WINDOW), _item(number) % KV
        table = tables + slot.to(gl.int64) * T
        turn = _bring(keys, values, held, full, empty, table, begin, position, turn, kv_head, KV, D, SLOTS)
        position, slot = position2, slot2


@gluon.jit
def _query(q, item, HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, G: gl.constexpr):
    """The queries of a row and KV head, bf16 [16, D]: G of them, the last again and again."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    g = gl.arange(0, 16, layout=gl.SliceLayout(1, L))
    mine = item // KV * HEADS + item % KV * G + gl.minimum(g, G - 1)
    return gl.load(q + mine[:, None] * D + gl.arange(0, D, layout=gl.SliceLayout(0, L))[None, :])


@gluon.jit
def _walk(
    q, held, full, empty, positions, sinks, out, scale, cap, window, count,
    HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, G: gl.constexpr, CAPPED: gl.constexpr,
    WINDOW: gl.constexpr, SINKS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The queries of the rows of this program."""
    C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    LA: gl.constexpr = gl.DotOperandLayout(0, C, 2)
    LB: gl.constexpr = gl.DotOperandLayout(1, C, 2)
    S: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    weights_held = gl.allocate_shared_memory(gl.bfloat16, [16, SPLIT], S)
    ones = gl.full([SPLIT, 32], 1.0, gl.bfloat16, LB)
    g = gl.arange(0, 16, layout=gl.SliceLayout(1, C))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, C))[None, :]
    items, turn = count * KV, 0
    item = _item(0)
    position, asked = gl.load(positions + item // KV), _query(q, item, HEADS, KV, D, G)
    for number in range(_count(items)):
        item = gl.minimum(_item(number + 1), items - 1)
        position2, asked2 = gl.load(positions + item // KV), _query(q, item, HEADS, KV, D, G)  # of the next
        item = _item(number)
        query = gl.convert_layout(asked, LA)
        head = item % KV * G + gl.minimum(g, G - 1)
        most, total, mixed = _begin(sinks, head, 16, D, SINKS, C)
        for split in range(_first_split(position, window, WINDOW), position // SPLIT + 1):
            slot = turn % SLOTS
            mbarrier.wait(full.index(slot), turn // SLOTS & 1)
            key = held.index(slot).permute((1, 0)).load(LB)
            mbarrier.arrive(empty.index(slot))
            score = mma_v2(query, key, gl.zeros([16, SPLIT], gl.float32, C))
            weight, most2 = _scored(score, split, position, position, scale, cap, window, CAPPED, WINDOW, C)
            weights_held.store(weight)
            weight = weights_held.load(LA)
            slot = (turn + 1) % SLOTS
            mbarrier.wait(full.index(slot), (turn + 1) // SLOTS & 1)
            value = held.index(slot).load(LB)
            mbarrier.arrive(empty.index(slot))
            if (split + 1) * SPLIT - 1 > position:  # what was kept behind must not become part of a sum
                token = split * SPLIT + gl.arange(0, SPLIT, layout=gl.SliceLayout(1, LB))[:, None]
                value = gl.where(token <= position, value, gl.zeros_like(value))
            mixed2 = mma_v2(weight, value, gl.zeros([16, D], gl.float32, C))
            total2 = gl.max(mma_v2(weight, ones, gl.zeros([16, 32], gl.float32, C)), axis=1)  # equal columns
            most, total, mixed = _merge(most, total, mixed, most2, total2, mixed2)
            turn += 2
        result = (mixed / total[:, None]).to(gl.bfloat16)
        place = (item // KV * HEADS + head)[:, None] * D + d
        gl.store(out + place, result, mask=(g < G)[:, None] & (d >= 0))
        position, asked = position2, asked2


@gluon.jit
def attend_walk(
    q, keys, values, tables, positions, slots, sinks, out, T, scale, cap, window, count,
    HEADS: gl.constexpr, KV: gl.constexpr, D: gl.constexpr, G: gl.constexpr, CAPPED: gl.constexpr,
    WINDOW: gl.constexpr, SINKS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """`attend_rows` of `count` rows, WALK, with KV in bf16 and D up to 128; see `attend_many`.

    A program walks all splits of a row and KV head. Long rows had better come first.
    """
    held, whole, full, empty = _ring(keys, D, SLOTS, 1)
    gl.warp_specialize(
        [
            (_walk, (q, whole, full, empty, positions, sinks, out, scale, cap, window, count,
                     HEADS, KV, D, G, CAPPED, WINDOW, SINKS, SLOTS)),
            (_bring_rows, (keys, values, held, full, empty, tables, positions, slots, T, window, count,
                           KV, D, WINDOW, SLOTS)),
        ],
        [1],
        [24],
    )  # fmt: skip
