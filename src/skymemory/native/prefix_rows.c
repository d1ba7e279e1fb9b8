/* From a block to the slots that hold it. */
#include "prefix.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST_ROWS = 64 };

/* Cells for ``size`` rows of ``words`` words and the one behind them, all zero; NULL: no memory. */
static uint64_t *new_cells(size_t size, size_t words)
{
    size_t cells;
    return __builtin_mul_overflow(size + 1, 1 + words, &cells) ? NULL : calloc(cells, sizeof(uint64_t));
}

/* The same rows in new cells of ``size`` rows of ``words`` words. */
static int part_move(Rows *rows, RowPart *part, size_t size, size_t words)
{
    uint64_t *cells = new_cells(size, words);
    if (!cells)
        return -1;
    RowPart old = *part, fresh = {cells, size, old.used, sky_shift(size)};
    size_t row_bytes = (1 + rows->words) * sizeof(uint64_t);
    for (size_t from = 0; old.size && from <= old.size; from++) {
        const uint64_t *row = sky_row(rows, &old, from);
        size_t at = size;
        if (from < old.size) {
            if (!row[0])
                continue;
            for (at = sky_home(rows, &fresh, row[0]); cells[at * (1 + words)]; at = (at + 1) & (size - 1))
                ;
        }
        memcpy(cells + at * (1 + words), row, row_bytes);
    }
    free(old.cells);
    *part = fresh;
    return 0;
}

/* Room for the bits of ``slots`` slots. All new cells are allocated before any old one is freed: the last may fail. */
int sky_rows_widen(Rows *rows, size_t slots)
{
    size_t words = (slots + 63) / 64;
    if (words <= rows->words)
        return 0;
    RowPart wide[ROW_PARTS];
    memcpy(wide, rows->parts, sizeof wide);
    for (int part = 0; part < ROW_PARTS; part++) {
        if (!wide[part].size)
            continue;
        wide[part].cells = new_cells(wide[part].size, words);
        if (!wide[part].cells) {
            while (part--)
                if (wide[part].size)
                    free(wide[part].cells);
            return -1;
        }
        for (size_t at = 0; at <= wide[part].size; at++)
            memcpy(wide[part].cells + at * (1 + words), sky_row(rows, &rows->parts[part], at),
                   (1 + rows->words) * sizeof(uint64_t));
    }
    for (int part = 0; part < ROW_PARTS; part++)
        if (wide[part].size)
            free(rows->parts[part].cells);
    memcpy(rows->parts, wide, sizeof wide);
    rows->words = words;
    return 0;
}

static int none(const Rows *rows, const uint64_t *bits)
{
    for (size_t word = 0; word < rows->words; word++)
        if (bits[word])
            return 0;
    return 1;
}

int sky_rows_add(Rows *rows, uint64_t key, size_t slot)
{
    uint64_t *bits = sky_bits(rows, key);
    if (!bits) {
        RowPart *part = sky_part(rows, key);
        if (!part->size || (key && part->used + 1 > part->size - part->size / 4)) {
            if (part_move(rows, part, part->size ? 2 * part->size : FIRST_ROWS, rows->words) < 0)
                return -1;
        }
        if (key) {
            size_t at = sky_home(rows, part, key);
            while (*sky_row(rows, part, at))
                at = (at + 1) & (part->size - 1);
            part->used++;
            *sky_row(rows, part, at) = key;
            bits = sky_row(rows, part, at) + 1;
        } else {
            bits = sky_row(rows, part, part->size) + 1;
        }
    }
    if (none(rows, bits))
        rows->keys++;
    bits[slot / 64] |= (uint64_t)1 << slot % 64;
    return 0;
}

/* Frees a row and moves those behind it that a search would miss. */
static void part_close(Rows *rows, RowPart *part, size_t hole)
{
    size_t row_bytes = (1 + rows->words) * sizeof(uint64_t), mask = part->size - 1;
    for (size_t at = (hole + 1) & mask; *sky_row(rows, part, at); at = (at + 1) & mask) {
        size_t home = sky_home(rows, part, *sky_row(rows, part, at));
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            memcpy(sky_row(rows, part, hole), sky_row(rows, part, at), row_bytes);
            hole = at;
        }
    }
    memset(sky_row(rows, part, hole), 0, row_bytes);
    part->used--;
}

void sky_rows_take(Rows *rows, uint64_t key, size_t slot)
{
    uint64_t *bits = sky_bits(rows, key);
    if (!bits || slot / 64 >= rows->words || none(rows, bits))
        return;
    bits[slot / 64] &= ~((uint64_t)1 << slot % 64);
    if (!none(rows, bits))
        return;
    rows->keys--;
    RowPart *part = sky_part(rows, key);
    if (!key)
        return;
    part_close(rows, part, (size_t)(bits - 1 - part->cells) / (1 + rows->words));
    if (!part->used && none(rows, sky_row(rows, part, part->size) + 1)) {
        free(part->cells);
        *part = (RowPart){0};
    } else if (part->size > FIRST_ROWS && part->used < part->size / 8) {
        part_move(rows, part, part->size / 2, rows->words); /* if memory is short it keeps its size */
    }
}

void sky_rows_free(Rows *rows)
{
    for (int part = 0; part < ROW_PARTS; part++)
        free(rows->parts[part].cells);
    memset(rows->parts, 0, sizeof rows->parts);
}

size_t sky_rows_bytes(const Rows *rows)
{
    size_t bytes = 0;
    for (int part = 0; part < ROW_PARTS; part++)
        if (rows->parts[part].size)
            bytes += (rows->parts[part].size + 1) * (1 + rows->words) * sizeof(uint64_t);
    return bytes;
}
