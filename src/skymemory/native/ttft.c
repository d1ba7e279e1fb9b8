/* The least time to a first token: a router's ranking of servers for one request, in one call. Twin and contract: twin/ttft.py,
 * to the last digit: the same additions in the same order. */
#include "ttft.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CROWDED 2.0
#define SET_BACK_S 1e9
#define HOT 2
enum { CURVE_BYTES = 24, PRICE_BYTES = 48, FIGURES_BYTES = 40 };

typedef struct {
    double fixed_s, per_token_s, bend;
} Curve;

/* What a server's requests cost beside their own prefill. */
typedef struct {
    double token_s; /* per token of the answer: its own time, and what it delays others */
    double stall;   /* delay of answers under way, per second of prefill */
    double evict_s; /* per token that is new there: what computing evicted ones again will take */
    double crowd_s; /* of a prompt that is wholly new there: what its next turns will evict */
    double trust;   /* the part of the tokens believed there that it really has */
    double due_s;   /* when its oldest unanswered request was to be answered */
} Price;

static const Price NO_PRICE = {0.0, 0.0, 0.0, 0.0, 1.0, INFINITY};

/* One server's; ``matched`` in tokens, ``held`` and ``reach`` (with what is under way) in blocks. */
typedef struct {
    double wait_s, work_s, price_s, score;
    double scored_s; /* of computing, without what is hot */
    Price price;
    long long matched;
    uint32_t held, reach;
} Row;

typedef struct {
    PyObject_HEAD
    Queues *queues;
    Guard *guard;
    UnderWay *under_way;
    double min_tokens, min_ratio;
    PyObject **heard; /* by slot: the report that was passed on last, or NULL */
    size_t slots;
} Ranker;

typedef struct {
    PyObject *held, *curves, *prices, *hear;
    Py_buffer blocks;
    long long tokens, hot; /* hot: leading tokens that are asked for so often that each server will have them */
    double block_tokens, now_s, rate, answer_tokens;
} Question;

/* Whether a server's report is new; it counts as passed on from now on. -1: no memory. */
static int is_new(Ranker *self, const Asked *asked)
{
    PyObject *report = asked->reports ? sky_queues_report(self->queues, asked->slot) : NULL;
    if (!report || (asked->slot < self->slots && self->heard[asked->slot] == report))
        return 0;
    if (asked->slot >= self->slots) {
        size_t slots = (asked->slot / 64 + 1) * 64;
        PyObject **heard = sky_realloc(self->heard, slots, sizeof(PyObject *));
        if (!heard) {
            PyErr_NoMemory();
            return -1;
        }
        memset(heard + self->slots, 0, (slots - self->slots) * sizeof(PyObject *));
        self->heard = heard;
        self->slots = slots;
    }
    PyObject *before = self->heard[asked->slot];
    self->heard[asked->slot] = Py_NewRef(report);
    Py_XDECREF(before);
    return 1;
}

/* Reads the servers and calls ``hear`` with those whose report is new. -1: an error. */
static int read_servers(Ranker *self, PyObject *servers, PyObject *hear, Asked *asked)
{
    PyObject *result, *new = NULL;
    if (sky_queues_read(self->queues, servers, asked) < 0)
        return -1;
    for (Py_ssize_t at = 0; at < PyTuple_Size(servers); at++) {
        int comes = is_new(self, &asked[at]);
        if (comes < 0 || (comes && ((!new && !(new = PyList_New(0))) ||
                                    PyList_Append(new, PyTuple_GetItem(servers, at)) < 0))) {
            Py_XDECREF(new);
            return -1;
        }
    }
    if (!new)
        return 0;
    result = PyObject_CallFunctionObjArgs(hear, new, NULL);
    Py_DECREF(new);
    Py_XDECREF(result);
    return result ? sky_queues_read(self->queues, servers, asked) : -1;
}

/* Leading blocks that each server holds: from the table, or from a list. -1: an error. */
static int fill_held(const Question *question, const Asked *asked, Row *rows, Py_ssize_t servers)
{
    Table *table = sky_table_of(question->held);
    size_t count = (size_t)question->blocks.len / 8;
    if (table) {
        uint64_t left[MAX_SLOTS / 64];
        memset(left, 0, table->rows.words * sizeof(uint64_t));
        for (Py_ssize_t at = 0; at < servers; at++)
            if (asked[at].slot < table->slots)
                left[asked[at].slot / 64] |= (uint64_t)1 << asked[at].slot % 64;
        if (count)
            sky_table_walk(table, question->blocks.buf, count, left);
        for (Py_ssize_t at = 0; at < servers; at++)
            rows[at].held = count && asked[at].slot < table->slots ? table->depths[asked[at].slot] : 0;
        return 0;
    }
    if (!PyList_Check(question->held) || PyList_Size(question->held) != servers) {
        PyErr_Format(PyExc_ValueError, "held: expected a table or a list with a number for each of %zd servers", servers);
        return -1;
    }
    for (Py_ssize_t at = 0; at < servers; at++) {
        PyObject *number = PyList_GetItem(question->held, at);
        int overflow = 0;
        long long held = PyLong_Check(number) ? PyLong_AsLongLongAndOverflow(number, &overflow) : -1;
        if (overflow || held < 0 || held >= UINT32_MAX) {
            PyErr_SetString(PyExc_ValueError, "held: expected numbers of blocks");
            return -1;
        }
        rows[at].held = (uint32_t)held;
    }
    return 0;
}

/* Tokens that each server holds or will hold when it comes to this request. -1: no memory. */
static int fill_matched(const Ranker *self, const Question *question, const Asked *asked, Row *rows, Py_ssize_t servers)
{
    size_t slots = 0, count = (size_t)question->blocks.len / 8;
    for (Py_ssize_t at = 0; at < servers; at++) {
        rows[at].reach = rows[at].held;
        slots = asked[at].slot >= slots ? asked[at].slot + 1 : slots;
    }
    if (count && sky_under_way_open(self->under_way)) {
        uint32_t few[64] = {0}, *depths = slots <= 64 ? few : calloc(slots, sizeof(uint32_t));
        if (!depths)
            return -1;
        sky_under_way_walk(self->under_way, question->blocks.buf, count < UINT32_MAX ? count : UINT32_MAX - 1, depths,
                           slots);
        for (Py_ssize_t at = 0; at < servers; at++)
            if (depths[asked[at].slot] > rows[at].reach)
                rows[at].reach = depths[asked[at].slot];
        if (depths != few)
            free(depths);
    }
    for (Py_ssize_t at = 0; at < servers; at++) {
        double tokens = (double)rows[at].reach * question->block_tokens * rows[at].price.trust;
        rows[at].matched = tokens < (double)question->tokens ? (long long)tokens : question->tokens;
        if (!rows[at].reach)
            rows[at].matched = 0;
    }
    return 0;
}

/* Leading tokens that the server with the longest match uses at least every ``HOT`` times as many chains as there are
 * servers: half of its share of requests. Computing them once more will pay for many. */
static long long hot_tokens(const Question *question, const Asked *asked, const Row *rows, Py_ssize_t servers)
{
    Table *table = sky_table_of(question->held);
    Py_ssize_t best = 0;
    for (Py_ssize_t at = 1; at < servers; at++)
        best = rows[at].held > rows[best].held ? at : best;
    if (!table || !rows[best].held)
        return 0;
    size_t blocks = sky_table_used_every(table, asked[best].slot, question->blocks.buf, rows[best].held, (uint64_t)servers * HOT);
    double tokens = (double)blocks * question->block_tokens;
    return tokens < (double)question->tokens ? (long long)tokens : question->tokens;
}

/* The price of each server. -1: an error. */
static int fill_prices(const Question *question, const Asked *asked, Row *rows, Py_ssize_t servers)
{
    Py_buffer prices;
    if (PyObject_GetBuffer(question->prices, &prices, PyBUF_SIMPLE) < 0)
        return -1;
    if (prices.len % PRICE_BYTES) {
        PyErr_Format(PyExc_ValueError, "prices: %zd bytes are no rows of %d", prices.len, PRICE_BYTES);
        PyBuffer_Release(&prices);
        return -1;
    }
    for (Py_ssize_t at = 0; at < servers; at++) {
        rows[at].price = NO_PRICE;
        if (asked[at].slot < (size_t)prices.len / PRICE_BYTES)
            memcpy(&rows[at].price, (const char *)prices.buf + asked[at].slot * PRICE_BYTES, PRICE_BYTES);
        if (!(rows[at].price.trust >= 0.0 && rows[at].price.trust <= 1.0)) {
            PyErr_SetString(PyExc_ValueError, "prices: expected a trust of 0 to 1");
            PyBuffer_Release(&prices);
            return -1;
        }
    }
    PyBuffer_Release(&prices);
    return 0;
}

static double prefill_s(const Curve *curve, long long tokens, long long cached)
{
    return curve->fixed_s +
           curve->per_token_s * (double)(tokens - cached) * (1.0 + curve->bend * (double)(tokens + cached));
}

static Curve curve_at(const Py_buffer *curves, size_t at)
{
    Curve curve;
    memcpy(&curve, (const char *)curves->buf + at * CURVE_BYTES, CURVE_BYTES);
    return curve;
}

/* What each server would compute, by its curve. The best match if it is too short to follow, else 0; -1: an
 * error. */
static long long fill_works(const Ranker *self, const Question *question, const Asked *asked, Row *rows,
                            Py_ssize_t servers)
{
    long long best = 0;
    Py_buffer curves;
    if (PyObject_GetBuffer(question->curves, &curves, PyBUF_SIMPLE) < 0)
        return -1;
    if (curves.len < CURVE_BYTES || curves.len % CURVE_BYTES) {
        PyErr_Format(PyExc_ValueError, "curves: %zd bytes are none", curves.len);
        PyBuffer_Release(&curves);
        return -1;
    }
    for (Py_ssize_t at = 0; at < servers; at++)
        best = rows[at].matched > best ? rows[at].matched : best;
    if ((double)best > self->min_tokens && (double)best > self->min_ratio * (double)question->tokens)
        best = 0;
    Curve common = curve_at(&curves, 0);
    for (Py_ssize_t at = 0; at < servers; at++) {
        size_t place = asked[at].slot + 1;
        Curve curve = place < (size_t)curves.len / CURVE_BYTES ? curve_at(&curves, place) : common;
        long long cached = best ? 0 : rows[at].matched;
        if (isnan(curve.fixed_s))
            curve = common;
        rows[at].work_s = rows[at].scored_s = prefill_s(&curve, question->tokens, cached);
        if (cached < question->hot && !best)
            rows[at].scored_s = prefill_s(&curve, question->tokens, question->hot);
    }
    PyBuffer_Release(&curves);
    return best;
}

static double price_s(const Price *price, const Question *question, double work_s, double new_tokens)
{
    double share = question->tokens ? new_tokens / (double)question->tokens : 0.0;
    return question->answer_tokens * price->token_s + work_s * price->stall + new_tokens * price->evict_s +
           share * price->crowd_s;
}

/* ``unworthy``: no match is followed, so that all of the prompt is new. */
static void fill_scores(const Ranker *self, const Question *question, int unworthy, Row *rows, Py_ssize_t servers)
{
    double rate = question->rate;
    double shortest_s = rows[0].wait_s, usual_s = sky_queues_usual_s(self->queues);
    for (Py_ssize_t at = 1; at < servers; at++)
        shortest_s = rows[at].wait_s < shortest_s ? rows[at].wait_s : shortest_s;
    double crowded = usual_s != 0.0 ? shortest_s / (shortest_s + usual_s) : 0.0;
    rate *= 1.0 + CROWDED * crowded;
    for (Py_ssize_t at = 0; at < servers; at++) {
        double wait_s = rows[at].wait_s, work_s = rows[at].scored_s;
        double new_tokens = (double)(question->tokens - (unworthy ? 0 : rows[at].matched));
        rows[at].price_s = price_s(&rows[at].price, question, work_s, new_tokens);
        rows[at].score = -(wait_s + work_s) -
                         rate * work_s * (wait_s - crowded * (wait_s - shortest_s) + work_s / 2.0) - rows[at].price_s;
    }
}

static double best_of(const Row *rows, Py_ssize_t servers)
{
    double best = rows[0].score;
    for (Py_ssize_t at = 1; at < servers; at++)
        best = rows[at].score > best ? rows[at].score : best;
    return best;
}

/* Sets back servers that have had their share, from the best down, until the best has not; their positions go into
 * ``places``. How many; -1: no memory. */
static Py_ssize_t hold_back(Ranker *self, const Asked *asked, Row *rows, Py_ssize_t servers, double now_s,
                            uint32_t *places)
{
    Py_ssize_t held_back = 0;
    while (held_back < servers) {
        Py_ssize_t before = held_back;
        double best = best_of(rows, servers);
        if (best < -SET_BACK_S / 2)
            break;
        for (Py_ssize_t at = 0; at < servers && held_back < servers; at++) {
            int over = rows[at].score == best ? sky_guard_over(self->guard, asked[at].slot, servers, now_s) : 0;
            if (over < 0)
                return -1;
            if (over)
                places[held_back++] = (uint32_t)at;
        }
        if (held_back == before)
            break;
        for (Py_ssize_t at = before; at < held_back; at++)
            rows[places[at]].score -= SET_BACK_S;
    }
    return held_back;
}

static PyObject *places_tuple(const uint32_t *places, Py_ssize_t count)
{
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t at = 0; tuple && at < count; at++) {
        PyObject *place = PyLong_FromUnsignedLong(places[at]);
        if (place)
            PyTuple_SetItem(tuple, at, place);
        else
            Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *result_of(const Row *rows, Py_ssize_t servers, uint32_t *places, Py_ssize_t held_back,
                           long long unworthy)
{
    PyObject *back = places_tuple(places, held_back);
    PyObject *scores = sky_new_bytes(servers, 8), *figures = scores ? sky_new_bytes(servers, FIGURES_BYTES) : NULL;
    double best = best_of(rows, servers);
    Py_ssize_t tied = 0;
    for (Py_ssize_t at = 0; scores && figures && at < servers; at++) {
        char *row = PyBytes_AsString(figures) + at * FIGURES_BYTES;
        int64_t matched = rows[at].matched, held = rows[at].held;
        memcpy(PyBytes_AsString(scores) + at * 8, &rows[at].score, 8);
        memcpy(row, &rows[at].wait_s, 8);
        memcpy(row + 8, &rows[at].work_s, 8);
        memcpy(row + 16, &rows[at].price_s, 8);
        memcpy(row + 24, &matched, 8);
        memcpy(row + 32, &held, 8);
        if (rows[at].score == best)
            places[tied++] = (uint32_t)at;
    }
    PyObject *best_ones = places_tuple(places, tied), *all = NULL;
    if (back && scores && figures && best_ones)
        all = Py_BuildValue("(OOLOO)", best_ones, back, unworthy, scores, figures);
    Py_XDECREF(back);
    Py_XDECREF(scores);
    Py_XDECREF(figures);
    Py_XDECREF(best_ones);
    return all;
}

/* Servers are read first: that may run other code, which could change anything read before. */
static PyObject *ranked(Ranker *self, Question *question, PyObject *servers)
{
    Py_ssize_t count = PyTuple_Size(servers), held_back;
    PyObject *result = NULL;
    long long unworthy;
    if (!count) {
        PyErr_SetString(PyExc_ValueError, "no servers to rank");
        return NULL;
    }
    char *memory = sky_realloc(NULL, (size_t)count, sizeof(Row) + sizeof(Asked) + sizeof(uint32_t));
    if (!memory)
        return PyErr_NoMemory();
    Row *rows = (Row *)memory;
    Asked *asked = (Asked *)(rows + count);
    uint32_t *places = (uint32_t *)(asked + count);
    if (read_servers(self, servers, question->hear, asked) < 0 || fill_held(question, asked, rows, count) < 0 ||
        fill_prices(question, asked, rows, count) < 0) {
        free(memory);
        return NULL;
    }
    question->hot = hot_tokens(question, asked, rows, count);
    if (fill_matched(self, question, asked, rows, count) < 0)
        PyErr_NoMemory();
    else if ((unworthy = fill_works(self, question, asked, rows, count)) >= 0) {
        for (Py_ssize_t at = 0; at < count; at++) {
            double late_s = question->now_s - rows[at].price.due_s;
            rows[at].wait_s = sky_queues_wait_s(self->queues, &asked[at], question->now_s) + (late_s > 0.0 ? late_s : 0.0);
        }
        fill_scores(self, question, unworthy > 0, rows, count);
        if ((held_back = hold_back(self, asked, rows, count, question->now_s, places)) < 0)
            PyErr_NoMemory();
        else
            result = result_of(rows, count, places, held_back, unworthy);
    }
    free(memory);
    return result;
}

static int number_from(PyObject *given, double *number)
{
    *number = PyFloat_AsDouble(given);
    return !(*number == -1.0 && PyErr_Occurred());
}

static PyObject *rank(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    Question question;
    PyObject *result = NULL;
    if (given != 11) {
        PyErr_SetString(PyExc_TypeError, "rank: expected held, blocks, tokens, block_tokens, servers, now_s, rate, curves, "
                                         "prices, answer_tokens and hear");
        return NULL;
    }
    question.held = args[0];
    question.tokens = PyLong_AsLongLong(args[2]);
    if ((question.tokens == -1 && PyErr_Occurred()) || !number_from(args[3], &question.block_tokens) ||
        !number_from(args[5], &question.now_s) || !number_from(args[6], &question.rate) ||
        !number_from(args[9], &question.answer_tokens))
        return NULL;
    question.curves = args[7];
    question.prices = args[8];
    question.hear = args[10];
    if (question.tokens < 0 || question.tokens > (long long)1 << 52 ||
        !(question.block_tokens >= 0 && question.block_tokens <= 1e15)) {
        PyErr_Format(PyExc_ValueError, "a prompt of %S tokens in blocks of %S", args[2], args[3]);
        return NULL;
    }
    PyObject *servers = PySequence_Tuple(args[4]);
    if (!servers)
        return NULL;
    if (PyObject_GetBuffer(args[1], &question.blocks, PyBUF_SIMPLE) == 0) {
        if (question.blocks.len % 8)
            PyErr_Format(PyExc_ValueError, "%zd bytes are not a whole number of 8-byte hashes", question.blocks.len);
        else
            result = ranked((Ranker *)object, &question, servers);
        PyBuffer_Release(&question.blocks);
    }
    Py_DECREF(servers);
    return result;
}

static PyObject *forget(PyObject *object, PyObject *number)
{
    Ranker *self = (Ranker *)object;
    size_t slot;
    if (!sky_slot_from(number, &slot))
        return NULL;
    if (slot < self->slots)
        Py_CLEAR(self->heard[slot]);
    Py_RETURN_NONE;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *keys[] = {"queues", "guard", "under_way", "min_tokens", "min_ratio", NULL};
    PyObject *queues, *guard, *under_way;
    double min_tokens, min_ratio;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O!O!O!dd:TtftRanker", keys, sky_prefill_queues_type.object, &queues,
                                     sky_share_guard_type.object, &guard, sky_under_way_type.object, &under_way, &min_tokens,
                                     &min_ratio))
        return NULL;
    PyObject *object = PyType_GenericAlloc(type, 0);
    if (object) {
        Ranker *self = (Ranker *)object;
        self->queues = (Queues *)Py_NewRef(queues);
        self->guard = (Guard *)Py_NewRef(guard);
        self->under_way = (UnderWay *)Py_NewRef(under_way);
        self->min_tokens = min_tokens;
        self->min_ratio = min_ratio;
    }
    return object;
}

static void destroy(PyObject *object)
{
    Ranker *self = (Ranker *)object;
    for (size_t slot = 0; slot < self->slots; slot++)
        Py_CLEAR(self->heard[slot]);
    free(self->heard);
    Py_XDECREF((PyObject *)self->queues);
    Py_XDECREF((PyObject *)self->guard);
    Py_XDECREF((PyObject *)self->under_way);
    sky_free(object);
}

static PyMethodDef methods[] = {
    {"rank", (PyCFunction)(void (*)(void))rank, METH_FASTCALL,
     "rank(held, blocks, tokens, block_tokens, servers, now_s, rate, curves, prices, answer_tokens, hear) -> tuple"},
    {"forget", forget, METH_O, "forget(slot)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, (void *)"TtftRanker(queues, guard, under_way, min_tokens, min_ratio): the least time to a first token"},
    {Py_tp_new, (void *)make},
    {Py_tp_dealloc, (void *)destroy},
    {Py_tp_methods, methods},
    {0, NULL},
};

SkyType sky_ttft_ranker_type = {
    .spec = {
        .name = "skymemory.native._fast.TtftRanker",
        .basicsize = sizeof(Ranker),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = type_slots,
    },
};
