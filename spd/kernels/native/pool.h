/* Threads that share the items of a loop. The caller works too and never waits for a thread that has not begun. */

#ifndef SPD_POOL_H
#define SPD_POOL_H

typedef struct Share Share;

/* Takes items until there are none. `member` is 0 in the calling thread, below `members` in all. */
typedef void (*Body)(const void *work, Share *share, int member);

/* Run `body` in the calling thread and in others until all of `count` items are done: in as many of `threads` as work
   of about so many nanoseconds is worth. */
void share_out(Body body, const void *work, long count, double nanoseconds, long threads);

/* The next item that no thread has taken, or -1. */
long take(Share *share, int member);

#endif
