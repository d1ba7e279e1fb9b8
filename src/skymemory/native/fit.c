/* Curves fitted to the durations of prefills. Twin and contract: twin/ttft.py, to the last digit: the same additions in the same
 * order. */
#include "ttft.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_POINTS = 4096 };

typedef struct {
    double fixed_s, per_token_s, bend;
} Curve;

static const double BENDS[] = {0.0, 5e-6, 1e-5, 2e-5, 4e-5, 8e-5};
enum { BENDS_COUNT = sizeof(BENDS) / sizeof(BENDS[0]) };

static int by_size(const void *one, const void *other)
{
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

/* Most fits are of 32 points, for which this takes half the time of ``qsort``. */
static void sort(double *numbers, size_t count)
{
    if (count > 64) {
        qsort(numbers, count, sizeof(double), by_size);
        return;
    }
    for (size_t at = 1; at < count; at++) {
        double number = numbers[at];
        size_t place = at;
        for (; place && numbers[place - 1] > number; place--)
            numbers[place] = numbers[place - 1];
        numbers[place] = number;
    }
}

/* Of the points of which ``errors`` is at most ``most``. Neither part is negative: prompts of one length show only
 * the seconds per token, none fixed. */
static void least_squares(const double *work, const double *seconds, const double *errors, double most, size_t points,
                          double *fixed_s, double *per_work_s)
{
    double count = 0, works = 0, taken = 0, spread = 0, lean = 0;
    for (size_t at = 0; at < points; at++)
        if (errors[at] <= most) {
            count += 1;
            works += work[at];
            taken += seconds[at];
        }
    double work_mean = works / count, seconds_mean = taken / count;
    for (size_t at = 0; at < points; at++)
        if (errors[at] <= most) {
            spread += (work[at] - work_mean) * (work[at] - work_mean);
            lean += (work[at] - work_mean) * (seconds[at] - seconds_mean);
        }
    spread /= count;
    lean /= count;
    double least = 0.1 * work_mean;
    if (spread >= least * least && spread > 0.0) {
        *per_work_s = lean / spread;
        *fixed_s = seconds_mean - *per_work_s * work_mean;
        if (*fixed_s >= 0.0 && *per_work_s > 0.0)
            return;
    }
    *fixed_s = 0.0;
    *per_work_s = seconds_mean / work_mean > 1e-9 ? seconds_mean / work_mean : 1e-9;
}

/* Least squares, then again without points more than three usual errors off the line. An error is usual for the
 * point's size. */
static void line(const double *work, const double *seconds, double *errors, double *ordered, size_t points,
                 double *fixed_s, double *per_work_s)
{
    memset(errors, 0, points * sizeof(double));
    least_squares(work, seconds, errors, 0.0, points, fixed_s, per_work_s);
    for (int turn = 0; turn < 2; turn++) {
        for (size_t at = 0; at < points; at++) {
            double there = *fixed_s + *per_work_s * work[at];
            ordered[at] = errors[at] = fabs(seconds[at] - there) / there;
        }
        sort(ordered, points);
        double usual = (ordered[points / 2] + ordered[(points - 1) / 2]) / 2.0;
        least_squares(work, seconds, errors, 3.0 * usual + 1e-9, points, fixed_s, per_work_s);
    }
}

/* ``columns``: tokens, cached, seconds, and room for three more. */
static Curve fitted(double *columns, size_t points, int bend)
{
    const double *tokens = columns, *cached = columns + points, *seconds = columns + 2 * points;
    double *work = columns + 3 * points, *errors = columns + 4 * points, *ordered = columns + 5 * points;
    Curve best = {0, 0, 0};
    double least = 0;
    size_t kept = points - points / 16;
    int first = bend ? bend - 1 : 0, last = bend + 1 < BENDS_COUNT ? bend + 1 : bend;
    for (int tried = first; tried <= last; tried++) {
        Curve curve = {0, 0, BENDS[tried]};
        double error = 0;
        for (size_t at = 0; at < points; at++)
            work[at] = (tokens[at] - cached[at]) * (1.0 + curve.bend * (tokens[at] + cached[at]));
        line(work, seconds, errors, ordered, points, &curve.fixed_s, &curve.per_token_s);
        for (size_t at = 0; at < points; at++)
            ordered[at] = fabs(seconds[at] - curve.fixed_s - curve.per_token_s * work[at]);
        sort(ordered, points);
        for (size_t at = 0; at < kept; at++)
            error += ordered[at];
        error /= (double)kept;
        if (tried == first || error < 0.95 * least) {
            least = error;
            best = curve;
        }
    }
    return best;
}

/* Tuples of ``columns`` floats, into columns behind each other and ``room`` more, which the caller frees. How many
 * points; 0: an error. */
static size_t points_from(PyObject *given, int columns, int room, double **into)
{
    static const char *wrong = "points: expected tuples of tokens, fewer cached tokens, and seconds";
    PyObject *points = PySequence_Tuple(given);
    size_t count = points ? (size_t)PyTuple_Size(points) : 0;
    double *numbers = NULL;
    if (points && (count < 1 || count > MOST_POINTS))
        PyErr_Format(PyExc_ValueError, "%zu points: expected 1 to %d", count, MOST_POINTS);
    else if (points && !(numbers = sky_realloc(NULL, count, (size_t)(columns + room) * sizeof(double))))
        PyErr_NoMemory();
    for (size_t at = 0; numbers && at < count && !PyErr_Occurred(); at++) {
        PyObject *point = PyTuple_GetItem(points, (Py_ssize_t)at);
        int there = PyTuple_Check(point) && PyTuple_Size(point) == columns;
        for (int column = 0; there && column < columns; column++) {
            PyObject *object = PyTuple_GetItem(point, column);
            double number = PyFloat_Check(object) ? PyFloat_AsDouble(object) : NAN;
            there = fabs(number) <= 1e15;
            numbers[(size_t)column * count + at] = number;
        }
        if (!there || !(numbers[count + at] >= 0 && numbers[at] - numbers[count + at] >= 1))
            PyErr_SetString(PyExc_ValueError, wrong);
    }
    Py_XDECREF(points);
    if (PyErr_Occurred()) {
        free(numbers);
        return 0;
    }
    *into = numbers;
    return count;
}

PyObject *sky_py_fit_prefills(PyObject *module, PyObject *args)
{
    PyObject *given;
    double bend = 0.0, *columns;
    int which = 0;
    if (!PyArg_ParseTuple(args, "O|d:fit_prefills", &given, &bend))
        return NULL;
    while (which < BENDS_COUNT && BENDS[which] != bend)
        which++;
    if (which == BENDS_COUNT) {
        PyErr_SetString(PyExc_ValueError, "a bend that is never tried");
        return NULL;
    }
    size_t points = points_from(given, 3, 3, &columns);
    if (!points)
        return NULL;
    Curve curve = fitted(columns, points, which);
    free(columns);
    return Py_BuildValue("(ddd)", curve.fixed_s, curve.per_token_s, curve.bend);
}

/* --- prefill and answer together --- */

#define SURE 4.0
enum { ROUNDS = 4 };

/* The ``place``-th smallest, from 0; reorders the numbers. */
static double smallest(double *numbers, size_t count, size_t place)
{
    size_t low = 0, high = count - 1;
    while (low < high) {
        double middle = numbers[low + (high - low) / 2];
        size_t left = low, right = high;
        for (;;) {
            while (numbers[left] < middle)
                left++;
            while (numbers[right] > middle)
                right--;
            if (left >= right)
                break;
            double number = numbers[left];
            numbers[left++] = numbers[right];
            numbers[right--] = number;
        }
        if (right < place)
            low = right + 1;
        else
            high = right;
    }
    return numbers[place];
}

/* Seconds per work and per token of the answer, of the points of which ``errors`` is at most ``most``. 0: they do not
 * distinguish the two. */
static int two_parts(const double *work, const double *output, const double *seconds, const double *errors, double most,
                     size_t points, double *per_work_s, double *per_output_s)
{
    double works = 0, both = 0, outputs = 0, work_seconds = 0, output_seconds = 0;
    for (size_t at = 0; at < points; at++)
        if (errors[at] <= most) {
            works += work[at] * work[at];
            both += work[at] * output[at];
            outputs += output[at] * output[at];
            work_seconds += work[at] * seconds[at];
            output_seconds += output[at] * seconds[at];
        }
    if (outputs == 0.0) {
        *per_work_s = work_seconds / works;
        *per_output_s = 0.0;
        return 1;
    }
    double apart = works * outputs - both * both;
    if (!(apart > 1e-12 * works * outputs))
        return 0;
    *per_work_s = (work_seconds * outputs - output_seconds * both) / apart;
    *per_output_s = (output_seconds * works - work_seconds * both) / apart;
    return 1;
}

/* ``columns``: tokens, cached, output, seconds, and room for three more. Whether the seconds per prompt token are certain. */
static int fitted_whole(double *columns, size_t points, Curve *best)
{
    const double *tokens = columns, *cached = columns + points, *output = columns + 2 * points;
    const double *seconds = columns + 3 * points;
    double *work = columns + 4 * points, *errors = columns + 5 * points, *ordered = columns + 6 * points;
    double least = 0;
    int shown = 0;
    for (int tried = 0; tried < BENDS_COUNT; tried++) {
        double per_work_s = 0, per_output_s = 0, most = 0, off = 0, error = 0;
        double works = 0, both = 0, outputs = 0;
        int separable = 1;
        memset(errors, 0, points * sizeof(double));
        for (size_t at = 0; at < points; at++) {
            work[at] = (tokens[at] - cached[at]) * (1.0 + BENDS[tried] * (tokens[at] + cached[at]));
            works += work[at] * work[at];
            both += work[at] * output[at];
            outputs += output[at] * output[at];
        }
        for (int round = 0; separable && round < ROUNDS; round++) {
            separable = two_parts(work, output, seconds, errors, most, points, &per_work_s, &per_output_s);
            for (size_t at = 0; at < points; at++)
                ordered[at] = errors[at] = fabs(seconds[at] - (work[at] * per_work_s + output[at] * per_output_s));
            double upper = smallest(ordered, points, points / 2);
            most = 3.0 * ((upper + smallest(ordered, points, (points - 1) / 2)) / 2.0) + 1e-9;
        }
        if (!separable)
            continue;
        memcpy(ordered, errors, points * sizeof(double));
        sort(ordered, points);
        for (size_t at = 0; at < points * 3 / 4; at++)
            error += ordered[at];
        error /= (double)(points * 3 / 4);
        for (size_t at = 0; at < points; at++)
            off += errors[at] * errors[at]; /* with the outliers: they are part of the uncertainty */
        off /= (double)(points - 2);
        double sure = per_work_s / SURE;
        int shows = per_work_s > 0 && per_output_s >= 0 && off * outputs <= sure * sure * (works * outputs - both * both);
        if (shows && (!shown || error < 0.95 * least)) {
            least = error;
            *best = (Curve){0.0, per_work_s, BENDS[tried]};
            shown = 1;
        }
    }
    return shown;
}

PyObject *sky_py_fit_whole(PyObject *module, PyObject *given)
{
    double *columns;
    Curve curve = {0, 0, 0};
    size_t points = points_from(given, 4, 3, &columns);
    if (!points)
        return NULL;
    if (points < 3) {
        free(columns);
        PyErr_SetString(PyExc_ValueError, "fewer than 3 points");
        return NULL;
    }
    int shown = fitted_whole(columns, points, &curve);
    free(columns);
    if (!shown)
        Py_RETURN_NONE;
    return Py_BuildValue("(ddd)", curve.fixed_s, curve.per_token_s, curve.bend);
}
