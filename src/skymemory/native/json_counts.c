/* What a JSON text holds: counted without decoding it; and the long texts of a prompt, cut out of it. Twin: twin/backend.py. */
#include "fast.h"

#include <string.h>

typedef struct {
    Py_ssize_t lists, texts, commas, items, first_end;
} Counts;

/* Behind the string that begins at `at`; the end of the text if nothing closes it. */
static Py_ssize_t behind_string(const unsigned char *text, Py_ssize_t at, Py_ssize_t size)
{
    for (Py_ssize_t from = at + 1; from < size;) {
        const unsigned char *quote = memchr(text + from, '"', (size_t)(size - from));
        if (!quote)
            break;
        Py_ssize_t end = quote - text, before = end;
        while (before > from && text[before - 1] == '\\')
            before--;
        if ((end - before) % 2 == 0)
            return end + 1;
        from = end + 1; /* it is escaped */
    }
    return size;
}

static Counts counts_of(const unsigned char *text, Py_ssize_t size)
{
    Counts found = {0};
    Py_ssize_t depth = 0, at = 0;
    while (at < size) {
        switch (text[at]) {
        case '"':
            found.texts++;
            at = behind_string(text, at, size);
            continue;
        case '[':
        case '{':
            found.lists++;
            depth++;
            break;
        case ']':
        case '}':
            if (depth-- == 1 && !found.first_end)
                found.first_end = at;
            break;
        case ',':
            found.commas++;
            if (depth == 1) {
                found.items++;
                if (!found.first_end)
                    found.first_end = at;
            }
            break;
        default:
            break;
        }
        at++;
    }
    return found;
}

PyObject *sky_py_json_counts(PyObject *self, PyObject *text)
{
    Py_buffer given;
    Counts found;
    if (PyObject_GetBuffer(text, &given, PyBUF_SIMPLE) < 0)
        return NULL;
    if (given.len < SKY_RELEASE_BYTES) {
        found = counts_of(given.buf, given.len);
    } else {
        Py_BEGIN_ALLOW_THREADS
        found = counts_of(given.buf, given.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&given);
    return Py_BuildValue("(nnnnn)", found.lists, found.texts, found.commas, found.items, found.first_end);
}

/* --- long texts --- */

enum { LEAST_TEXT_BYTES = 512, MOST_CUTS = 64, OF_PROMPT = -1 };

typedef struct {
    Py_ssize_t message, begin, end; /* of the text, without its quotes */
} Cut;

static Py_ssize_t behind_space(const unsigned char *text, Py_ssize_t at, Py_ssize_t size)
{
    while (at < size && (text[at] == ' ' || text[at] == '\n' || text[at] == '\r' || text[at] == '\t'))
        at++;
    return at;
}

/* Whether its bytes stand for themselves: ASCII, no control characters, no escapes. */
static int is_plain(const unsigned char *text, Py_ssize_t size)
{
    unsigned char odd = 0; /* of one byte, and without branches: a compiler takes 16 bytes at a time */
    for (Py_ssize_t at = 0; at < size; at++) {
        unsigned char byte = text[at];
        odd = (unsigned char)(odd | (byte < 0x20) | (byte >= 0x80) | (byte == '\\'));
    }
    return !odd;
}

static int is_named(const unsigned char *text, Py_ssize_t at, Py_ssize_t end, const char *name)
{
    size_t size = strlen(name);
    return (size_t)(end - at) == size + 2 && !memcmp(text + at + 1, name, size);
}

/* How many; 0 also where a field comes twice, or a name is escaped: only a decoder knows which one counts. */
static int find_texts(const unsigned char *text, Py_ssize_t size, Cut *cuts)
{
    Py_ssize_t depth = 0, at = 0, message = OF_PROMPT;
    int count = 0, in_messages = 0, has_prompt = 0, has_messages = 0, has_content = 0;
    while (at < size) {
        unsigned char mark = text[at];
        if (mark == '[' || mark == '{') {
            if (++depth == 3 && in_messages) {
                message++;
                has_content = 0;
            }
        } else if (mark == ']' || mark == '}') {
            in_messages = --depth > 1 && in_messages;
        }
        if (mark != '"') {
            at++;
            continue;
        }
        Py_ssize_t name = at, end = behind_string(text, at, size), colon = behind_space(text, end, size);
        at = end;
        if (colon == size || text[colon] != ':')
            continue;
        at = behind_space(text, colon + 1, size);
        if (memchr(text + name, '\\', (size_t)(end - name)))
            return 0;
        if (depth == 1 && is_named(text, name, end, "messages")) {
            if (has_messages++)
                return 0;
            in_messages = at < size && text[at] == '[';
            continue;
        }
        int of_prompt = depth == 1 && is_named(text, name, end, "prompt");
        if (!of_prompt && !(depth == 3 && in_messages && is_named(text, name, end, "content")))
            continue;
        if (of_prompt ? has_prompt++ : has_content++)
            return 0;
        if (at == size || text[at] != '"')
            continue;
        Cut cut = {of_prompt ? OF_PROMPT : message, at + 1, behind_string(text, at, size) - 1};
        at = cut.end + 1;
        if (count < MOST_CUTS && cut.end - cut.begin >= LEAST_TEXT_BYTES && text[cut.end] == '"' &&
            is_plain(text + cut.begin, cut.end - cut.begin))
            cuts[count++] = cut;
    }
    return count;
}

/* What is left of the text without its cuts. */
static PyObject *without(const char *text, Py_ssize_t size, const Cut *cuts, int count)
{
    Py_ssize_t left = size, from = 0;
    for (int one = 0; one < count; one++)
        left -= cuts[one].end - cuts[one].begin;
    PyObject *rest = PyBytes_FromStringAndSize(NULL, left);
    char *to = rest ? PyBytes_AsString(rest) : NULL;
    for (int one = 0; to && one <= count; one++) {
        Py_ssize_t until = one < count ? cuts[one].begin : size;
        memcpy(to, text + from, (size_t)(until - from));
        to += until - from;
        from = one < count ? cuts[one].end : size;
    }
    return rest;
}

PyObject *sky_py_cut_texts(PyObject *self, PyObject *given)
{
    char *text;
    Py_ssize_t size;
    Cut cuts[MOST_CUTS];
    int count;
    if (PyBytes_AsStringAndSize(given, &text, &size) < 0)
        return NULL;
    if (size < SKY_RELEASE_BYTES) {
        count = find_texts((const unsigned char *)text, size, cuts);
    } else {
        Py_BEGIN_ALLOW_THREADS
        count = find_texts((const unsigned char *)text, size, cuts);
        Py_END_ALLOW_THREADS
    }
    PyObject *texts = PyDict_New();
    for (int one = 0; texts && one < count; one++) {
        PyObject *key = PyLong_FromSsize_t(cuts[one].message);
        PyObject *value = PyBytes_FromStringAndSize(text + cuts[one].begin, cuts[one].end - cuts[one].begin);
        if (!key || !value || PyDict_SetItem(texts, key, value) < 0)
            Py_CLEAR(texts);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    PyObject *rest = !texts ? NULL : count ? without(text, size, cuts, count) : Py_NewRef(given);
    PyObject *both = rest ? PyTuple_Pack(2, rest, texts) : NULL;
    Py_XDECREF(rest);
    Py_XDECREF(texts);
    return both;
}
