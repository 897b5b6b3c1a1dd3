/* The rows that a round feeds, its end, its times, and prompt lookup: contracts as of their torch forms. */

#include <stdint.h>
#include <string.h>
#include <time.h>

enum { BEGAN, VERIFIED, COMMITTED, ENDED };
enum { GOING_ON, STOPPED, FULL, FAILED };

/* `RoundTensors`, and the sizes of the last dimensions; the ring is [depth, ring_slots, ring_width]. */
typedef struct {
    int64_t *tokens, *length, *length_limit, *draft, *num_drafts, *match, *draft_limit, *draft_cap, *page_table;
    int64_t *stop_ids;
    uint8_t *active;
    int64_t *ring, *times, *counter;
    long slots, token_stride, draft_stride, page_stride, pages, stop_stride, stops, depth, ring_slots, ring_width;
    long num_times;
} Round;

/* Rows of windows of `width`, as they are written. */
typedef struct {
    int64_t *ids, *positions;
    uint8_t *valid;
    int64_t *places;
    long width, page, limit, trash;
} Rows;

void spd_mark_time(int64_t *times, int64_t *counter, long depth, long columns, long column, long advance)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    times[counter[0] % depth * columns + column] = now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
    counter[0] += advance;
}

static int64_t within(int64_t value, int64_t low, int64_t high)
{
    return value < low ? low : value > high ? high : value;
}

static void put_row(const Round *r, const Rows *to, long slot, long row, int64_t id, int64_t position, int valid)
{
    long at = slot * to->width + row, clamped = within(position, 0, to->limit - 1), column = clamped / to->page;
    const int64_t *table = r->page_table + slot * r->page_stride;
    to->ids[at] = id, to->positions[at] = clamped, to->valid[at] = valid;
    to->places[at] = valid ? table[within(column, 0, r->pages - 1)] * to->page + clamped % to->page : to->trash;
}

void spd_round_window(const Round *r, const Rows *to, int64_t *safe, int64_t *num_drafts, long k, long usable_vocab)
{
    spd_mark_time(r->times, r->counter, r->depth, r->num_times, BEGAN, 0);
    for (long s = 0; s < r->slots; s++) {
        const int64_t *draft = r->draft + s * r->draft_stride, length = r->length[s];
        int64_t most = within(r->length_limit[s] - length - 1, 0, k), leading = 0;
        most = within(r->num_drafts[s], 0, within(r->draft_cap[s], 0, most));
        for (long i = 0; i < k; i++) {
            int known = draft[i] >= 0 && draft[i] < usable_vocab;
            leading += known && leading == i;
            safe[s * k + i] = known ? draft[i] : 0;
        }
        num_drafts[s] = leading < most ? leading : most;
        for (long i = 0; i <= k; i++) {
            int64_t id = i ? safe[s * k + i - 1] : r->tokens[s * r->token_stride + length - 1];
            put_row(r, to, s, i, id, length - 1 + i, r->active[s] && i <= num_drafts[s]);
        }
    }
}

void spd_committed_window(const Round *r, const Rows *to, const uint8_t *chosen, const int64_t *first, long ahead)
{
    for (long s = 0; s < r->slots; s++)
        for (long i = 0, own = to->width - ahead; i < to->width; i++) {
            int64_t position = r->length[s] - own + i, least = first && first[s] > 0 ? first[s] : 0;
            const int64_t *tokens = r->tokens + s * r->token_stride, *draft = r->draft + s * r->draft_stride;
            int64_t id = i < own ? tokens[position > 0 ? position : 0] : draft[i - own];
            put_row(r, to, s, i, id, position, chosen[s] && position >= least && position < r->draft_limit[s]);
        }
}

/* Valid rows of `row` bytes, a slot's after a stride, into the ring of their slot, of `depth` rows and one more, and those
   at the last position of a page of places into that page's row. */
void spd_keep_states(const char *hidden, const int64_t *positions, const uint8_t *valid, const int64_t *places,
    char *rings, char *pages, long slots, long width, long row, long slot_stride, long row_stride, long depth, long page)
{
    for (long s = 0; s < slots; s++)
        for (long i = 0; i < width; i++) {
            const char *from = hidden + s * slot_stride + i * row_stride;
            long at = s * width + i;
            if (!valid[at]) continue;
            memcpy(rings + (s * (depth + 1) + positions[at] % depth) * row, from, row);
            if (places[at] % page == page - 1) memcpy(pages + places[at] / page * row, from, row);
        }
}

void spd_draft_step(const Round *r, const Rows *to, const int64_t *sampled, long step, long k)
{
    for (long s = 0; s < r->slots; s++) {
        int64_t position = r->length[s] + step, room = within(r->draft_limit[s] - r->length[s] + 1, 0, k);
        r->draft[s * r->draft_stride + step] = sampled[s];
        if (step == k - 1) r->num_drafts[s] = r->active[s] ? room : 0;
        put_row(r, to, s, 0, sampled[s], position, r->active[s] && position >= 0 && position < r->draft_limit[s]);
    }
}

void spd_round_commit(const Round *r, const int64_t *draft, const int64_t *num_drafts, const int64_t *sampled,
    const uint8_t *finite, const int64_t *accepted, int32_t *generated, long k, long vocab)
{
    spd_mark_time(r->times, r->counter, r->depth, r->num_times, COMMITTED, 0);
    for (long s = 0; s < r->slots; s++, sampled += k + 1, finite += k + 1, draft += k) {
        int64_t taken = 0, count = 0, reason = GOING_ON, before = r->length[s];
        while (!accepted && taken < k && taken < num_drafts[s] && draft[taken] == sampled[taken]) taken++;
        if (accepted) taken = accepted[s];
        while (r->active[s] && count <= taken && reason == GOING_ON) {
            if (!finite[count]) reason = FAILED;
            for (long i = 0; i < r->stops && reason == GOING_ON; i++)
                if (r->stop_ids[s * r->stop_stride + i] == sampled[count]) reason = STOPPED;
            count += reason != FAILED;
        }
        if (r->active[s] && reason == GOING_ON && before + count >= r->length_limit[s]) reason = FULL;
        for (long i = 0; i < count; i++) {
            r->tokens[s * r->token_stride + before + i] = sampled[i];
            if (generated) generated[s * vocab + (sampled[i] > 0 ? sampled[i] : 0)]++;
        }
        r->length[s] = before + count;
        r->active[s] &= reason == GOING_ON;
        int64_t *row = r->ring + (r->counter[0] % r->depth * r->ring_slots + s) * r->ring_width;
        int64_t head[] = { before, num_drafts[s], taken, count, reason, k, r->match[s] };
        for (int i = 0; i < 7; i++) *row++ = head[i];
        for (long i = 0; i <= k; i++) *row++ = sampled[i];
        for (long i = 0; i < k; i++) *row++ = draft[i];
    }
}

/* Ends are walked from the last one on, so that the first of equals is the latest. */
void spd_lookup(const Round *r, long k, long ngram_min, long ngram_max, long over, long behind)
{
    for (long s = 0; s < r->slots; s++) {
        int64_t *row = r->tokens + s * r->token_stride, *out = r->draft + s * r->draft_stride;
        long last = r->length[s] - 1 + behind, best = 0, found = 0;
        if (behind && (!r->active[s] || r->match[s] || r->num_drafts[s] != behind)) continue;
        for (long i = 0; i < behind; i++) row[r->length[s] + i] = out[i];
        for (long end = r->active[s] ? last - 1 : -1; end >= 0 && best < ngram_max; end--) {
            if (end < best || row[end - best] != row[last - best]) continue; /* no longer than the best */
            long size = 0;
            while (size < ngram_max && size <= end && row[end - size] == row[last - size]) size++;
            if (size > best) best = size, found = end;
        }
        if (best < ngram_min) best = 0;
        if (r->active[s]) r->match[s] = best && behind ? -behind : best;
        if ((over || behind) && !best) continue;
        r->num_drafts[s] = best ? k : 0;
        for (long i = 0; i < k - behind; i++) out[behind + i] = best ? row[found + 1 + i % (last - found)] : 0;
    }
}

/* `TextPool`: a ring of `size` tokens, and places of ends of n-grams in `groups` buckets of `entries`. */
typedef struct {
    const int64_t *tokens;
    const int32_t *buckets;
    long size, groups, entries, factor, shift;
} Pool;

void spd_pool_lookup(const Round *r, const Pool *pool, long k, long ngram_min, long ngram_max, long behind)
{
    for (long s = 0; s < r->slots; s++) {
        const int64_t *row = r->tokens + s * r->token_stride;
        int64_t *out = r->draft + s * r->draft_stride;
        long last = r->length[s] - 1 + behind, best = r->match[s], found = -1, count = behind;
        if (!r->active[s] || last + 1 < ngram_min) continue;
        if (behind && (r->match[s] || r->num_drafts[s] != behind)) continue;
        if (best < ngram_min - 1) best = ngram_min - 1;
        uint64_t key = 0;
        for (long back = 0; back < ngram_min; back++) key = key * pool->factor + row[last - back];
        const int32_t *bucket = pool->buckets + (key >> pool->shift & (pool->groups - 1)) * pool->entries;
        for (long i = 0; i < pool->entries; i++) {
            long place = bucket[i], size = 0;
            if (place < 0 || pool->tokens[(place + 1) % pool->size] < 0) continue;
            while (size < ngram_max && size <= last
                && pool->tokens[(place - size + pool->size) % pool->size] == row[last - size]) size++;
            if (size > best) best = size, found = place;
        }
        if (found < 0) continue;
        for (; count < k; count++) {
            int64_t id = pool->tokens[(found + 1 + count - behind) % pool->size];
            if (id < 0) break;
            out[count] = id;
        }
        r->num_drafts[s] = count, r->match[s] = behind ? -behind : best;
    }
}
