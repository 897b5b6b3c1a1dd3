/* What must be asked of the system before tiles may be used. */

#include "tiles.h"

#if SPD_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* 4 for NEON, 3 for AMX, 2 for AVX512-BF16, 1 for AVX512, 0 for AVX2, -1 where the system does not grant what the processor has. */
int spd_init(void)
{
#if SPD_AMX
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) ? -1 : 3;
#else
    return SPD_NEON ? 4 : SPD_WIDE + SPD_PAIRS;
#endif
}
