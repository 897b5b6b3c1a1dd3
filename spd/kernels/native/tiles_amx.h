/* Products of tiles by AMX. */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig;

/* GCC does not know that these instructions read memory: whatever was written before must be there. */
#define WRITTEN() __asm__ volatile("" ::: "memory")

/* Tiles 0, 1, 4 have `first` rows, 2, 3, 5 have `second`: results and left sides; 6 and 7 are right sides. */
static inline void tiles_begin(int first, int second)
{
    TileConfig config = {.palette = 1};
    const int rows[8] = {first, first, second, second, first, second, SIDE, SIDE};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = (uint8_t)rows[i];
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

static inline void tiles_end(void) { _tile_release(); }

/* Nanoseconds that a tile takes. */
static inline double tile_time(long rows) { return 30.0 + 8.0 * (double)parts(rows, SIDE); }

/* Add to c [blocks * 16][32], or write there where `fresh`, one or two blocks of 16 rows a [steps] tiles, `apart`
   elements from each other, times b [steps][2] tiles. Meanwhile `bytes` of each place are asked for in a step. */
static inline void block_product(const bf16 *a, long apart, int blocks, int rows, const bf16 *b, long steps,
    int fresh, Ahead *ahead, long bytes, float *c)
{
    Ahead next = *ahead;
    (void)rows;
    WRITTEN();
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        if (blocks == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, c, 128);
        _tile_loadd(1, c + SIDE, 128);
        if (blocks == 2) {
            _tile_loadd(2, c + SIDE * 32, 128);
            _tile_loadd(3, c + SIDE * 32 + SIDE, 128);
        }
    }
    for (long k = 0; k < steps; k++, b += 2 * TILE) {
        ask(&next, bytes / 2);
        _tile_loadd(4, a + k * TILE, 64);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        ask(&next, bytes / 2);
        _tile_loadd(7, b + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (blocks == 2) {
            _tile_loadd(5, a + apart + k * TILE, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    *ahead = next;
    _tile_stored(0, c, 128);
    _tile_stored(1, c + SIDE, 128);
    if (blocks == 2) {
        _tile_stored(2, c + SIDE * 32, 128);
        _tile_stored(3, c + SIDE * 32 + SIDE, 128);
    }
}
