/* What a JSON text holds, counted without decoding it. Twin: twin/backend.py. */
#include "fast.h"

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
