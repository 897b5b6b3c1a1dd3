/* What must be asked of the system before tiles may be used. */

#include "tiles.h"

#if SPD_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* 5 for NEON, 4 for AMX, 3 for AVX512-BF16, 2 for AVX512-VNNI, 1 for AVX512, 0 for AVX2, -1 where the system does not
   grant what the processor has. */
int spd_init(void)
{
#if SPD_AMX
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) ? -1 : 4;
#else
    return SPD_NEON ? 5 : SPD_PAIRS ? 3 : SPD_WIDE + SPD_VNNI;
#endif
}
