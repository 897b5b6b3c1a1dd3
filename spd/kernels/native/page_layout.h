/* Keys and values in a page. */

#ifndef SPD_PAGE_LAYOUT_H
#define SPD_PAGE_LAYOUT_H

#include "tiles.h"

/* How a page keeps one KV head's keys and values [page][size]: as the tiles that attention multiplies, if their size is
   a multiple of 32, else as they are. Keys lie in blocks of 32, [page / 32][size / 32][2] tiles of 32 elements of 16
   keys; values in blocks of 32 elements, [size / 32][page / 32][2] tiles of 32 keys' 16 elements. */
static inline int in_tiles(long size) { return size % DEPTH == 0; }

/* place_key: into its place among the keys of a block [steps][2] of tiles, a key of `size` elements, filled up with
   zeros. place_value: into its place among the values of blocks of elements, which lie `apart`, a value of `size`
   elements. Codes lie alike, by `code_place`. */
#define PLACE(type, key_name, value_name, place) \
    static inline void key_name(type *block, long key, const type *from, long size) \
    { \
        type *to = block + key / SIDE * TILE; \
        for (long d = 0; d < size; d += DEPTH, to += 2 * TILE) \
            for (int i = 0; i < DEPTH; i++) to[place(i, (int)(key % SIDE))] = d + i < size ? from[d + i] : 0; \
    } \
    static inline void value_name(type *to, long apart, long key, const type *from, long size) \
    { \
        to += key / DEPTH * 2 * TILE; \
        for (long d = 0; d < size; d++) \
            to[d / DEPTH * apart + d % DEPTH / SIDE * TILE + place((int)(key % DEPTH), (int)(d % SIDE))] = from[d]; \
    }
PLACE(element, place_key, place_value, tile_place)
PLACE(int8_t, place_key_codes, place_value_codes, code_place)

#endif
