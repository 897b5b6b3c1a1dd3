/* Keys and values in a page. */

#ifndef SPD_PAGE_LAYOUT_H
#define SPD_PAGE_LAYOUT_H

#include "tiles.h"

/* How a page keeps one KV head's keys and values [page][size]: as the tiles that attention multiplies, if their size is
   a multiple of 32, else as they are. Keys lie in blocks of 32, [page / 32][size / 32][2] tiles of 32 elements of 16
   keys; values in blocks of 32 elements, [size / 32][page / 32][2] tiles of 32 keys' 16 elements. */
static inline int in_tiles(long size) { return size % DEPTH == 0; }

/* Into its place among the keys of a block [steps][2] of tiles, a key of `size` elements, filled up with zeros. */
static inline void place_key(element *block, long key, const element *from, long size)
{
    element *to = block + key / SIDE * TILE;
    for (long d = 0; d < size; d += DEPTH, to += 2 * TILE)
        for (int i = 0; i < DEPTH; i++) to[tile_place(i, (int)(key % SIDE))] = d + i < size ? from[d + i] : 0;
}

/* Into its place among the values of blocks of elements, which lie `apart`, a value of `size` elements. */
static inline void place_value(element *to, long apart, long key, const element *from, long size)
{
    to += key / DEPTH * 2 * TILE;
    for (long d = 0; d < size; d++)
        to[d / DEPTH * apart + d % DEPTH / SIDE * TILE + tile_place((int)(key % DEPTH), (int)(d % SIDE))] = from[d];
}

#endif
