/* The pool behind share_out: one a process. A second caller at the same time works alone.

   A loop's items lie in one range a member, so that a thread meets the same part of a weight in every round. A thread
   that has finished its own range takes from the others'. So a thread that the system does not run costs the others
   only the item that it has begun. Waiting threads spin for a short time, since the next loop usually comes within
   microseconds, then sleep until they are woken. Which thread takes an item changes no bit of it.
   A forked child has none of the threads, and works alone. */

#define _GNU_SOURCE
#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifdef __aarch64__
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() __builtin_ia32_pause()
#endif

enum { MOST = 256, STACK = 1 << 20 };
/* Nanoseconds of work: meeting costs each thread one or two thousand. */
enum { WORTH_A_THREAD = 2000 };
/* Nanoseconds spent spinning: for the next loop, and for the others' last items. */
enum { IDLE_SPIN = 200000, LAST_SPIN = 20000 };
/* The gate's bits: threads may join, the caller sleeps until all have left; below them how many are inside. */
enum { OPEN = 1 << 30, WAITING = 1 << 29, INSIDE = WAITING - 1 };

typedef struct {
    _Alignas(64) _Atomic long next;
    long end;
} Range;

struct Share {
    Body body;
    const void *work;
    int members;
    Range *range; /* [members] */
};

static Range ranges[MOST];
static Share current = {.range = ranges};
static pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER;
/* Each on a line of its own: a waiting thread reads one while others write another. */
static _Alignas(64) _Atomic uint32_t epoch;
static _Alignas(64) _Atomic uint32_t gate;
static _Alignas(64) _Atomic uint32_t asleep;
static int started = 1; /* the caller is a member */

static void sleep_while(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
}

static void wake(_Atomic uint32_t *word, int count) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, 0, 0, 0); }

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}

/* Whether `word` is another than `value`, or is `value` where `equal`, within so many nanoseconds. */
static int comes(_Atomic uint32_t *word, int equal, uint32_t value, int64_t patience)
{
    for (int64_t until = 0;;) {
        for (int i = 0; i < 64; i++) {
            if ((atomic_load(word) == value) == equal) return 1;
            PAUSE();
        }
        if (!until) until = now() + patience;
        else if (now() > until) return 0;
    }
}

long take(Share *share, int member)
{
    for (int i = 0, m = member; i < share->members; i++, m = m + 1 < share->members ? m + 1 : 0) {
        if (atomic_load_explicit(&share->range[m].next, memory_order_relaxed) >= share->range[m].end) continue;
        long item = atomic_fetch_add_explicit(&share->range[m].next, 1, memory_order_relaxed);
        if (item < share->range[m].end) return item;
    }
    return -1;
}

static void *serve(void *number)
{
    int member = (int)(intptr_t)number;
    for (uint32_t seen = 0;;) {
        if (!comes(&epoch, 0, seen, IDLE_SPIN)) {
            atomic_fetch_add(&asleep, 1);
            while (atomic_load(&epoch) == seen) sleep_while(&epoch, seen);
            atomic_fetch_sub(&asleep, 1);
        }
        seen = atomic_load(&epoch);
        for (uint32_t g = atomic_load(&gate); g & OPEN;)
            if (atomic_compare_exchange_weak(&gate, &g, g + 1)) {
                if (member < current.members) current.body(current.work, &current, member);
                if (atomic_fetch_sub(&gate, 1) - 1 == WAITING) wake(&gate, 1);
                break;
            }
    }
    return 0;
}

/* Start threads up to so many members; fewer where the system refuses. */
static int grow(int members)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    if (members > MOST) members = MOST;
    if (started >= members) return members;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; started < members; started++)
        if (pthread_create(&thread, &attributes, serve, (void *)(intptr_t)started)) break;
    pthread_sigmask(SIG_SETMASK, &before, 0);
    pthread_attr_destroy(&attributes);
    return started;
}

void share_out(Body body, const void *work, long count, double nanoseconds, long threads)
{
    double most = nanoseconds / WORTH_A_THREAD;
    int members = (int)(most < (double)threads ? (long)most : threads);
    if (members > count) members = (int)count;
    if (members < 2 || pthread_mutex_trylock(&owner)) {
        Range all = {0, count};
        Share alone = {body, work, 1, &all};
        body(work, &alone, 0);
        return;
    }
    current.body = body, current.work = work, current.members = members = grow(members);
    for (int m = 0; m < members; m++) {
        atomic_store_explicit(&ranges[m].next, count * m / members, memory_order_relaxed);
        ranges[m].end = count * (m + 1) / members;
    }
    atomic_store(&gate, OPEN);
    atomic_fetch_add(&epoch, 1);
    if (atomic_load(&asleep)) wake(&epoch, INT_MAX);
    body(work, &current, 0);
    atomic_fetch_and(&gate, ~(uint32_t)OPEN);
    if (!comes(&gate, 1, 0, LAST_SPIN)) {
        atomic_fetch_or(&gate, WAITING);
        for (uint32_t g; (g = atomic_load(&gate)) & INSIDE;) sleep_while(&gate, g);
        atomic_store(&gate, 0);
    }
    pthread_mutex_unlock(&owner);
}
