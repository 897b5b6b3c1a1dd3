/* Prompt lookup: what followed the longest earlier match of a text's end, the latest of equals. */

#include <stdint.h>

/* How many tokens that end at `end` are those that end at `last`, `most` at most. */
static long match_length(const int64_t *row, long end, long last, long most)
{
    long size = 0;
    while (size < most && size <= end && row[end - size] == row[last - size]) size++;
    return size;
}

/* Contract as of `ngram_lookup`. Ends are walked from the last one on, so that the first of equals is the latest. */
void spd_lookup(const int64_t *tokens, const int64_t *length, const uint8_t *active, int64_t *draft,
    int64_t *num_drafts, int64_t *match, long slots, long stride, long draft_stride, long k, long ngram_min,
    long ngram_max, int over)
{
    for (long s = 0; s < slots; s++) {
        const int64_t *row = tokens + s * stride;
        long last = length[s] - 1, best = 0, found = 0;
        for (long end = active[s] ? last - 1 : -1; end >= 0 && best < ngram_max; end--) {
            if (end < best || row[end - best] != row[last - best]) continue; /* no longer than the best */
            long size = match_length(row, end, last, ngram_max);
            if (size > best) best = size, found = end;
        }
        if (best < ngram_min) best = 0;
        if (active[s]) match[s] = best;
        if (over && !best) continue;
        num_drafts[s] = best ? k : 0;
        int64_t *out = draft + s * draft_stride;
        for (long i = 0; i < k; i++) out[i] = best ? row[found + 1 + i % (last - found)] : 0;
    }
}
