#define _GNU_SOURCE
#include "json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char peek(json *text) {
    while (text->at < text->end && (*text->at == ' ' || *text->at == '\n' || *text->at == '\r' || *text->at == '\t'))
        text->at++;
    return text->failed || text->at == text->end ? '\0' : *text->at;
}

bool json_take(json *text, char wanted) {
    const bool found = peek(text) == wanted && wanted != '\0';
    if (found)
        text->at++;
    return found;
}

void json_string(json *text, char *value, size_t room) {
    size_t used = 0;
    value[0] = '\0';
    if (!json_take(text, '"')) {
        text->failed = true;
        return;
    }
    while (text->at < text->end && *text->at != '"' && *text->at != '\\' && (unsigned char)*text->at >= ' ' &&
           used + 1 < room)
        value[used++] = *text->at++;
    value[used] = '\0';
    if (!json_take(text, '"'))
        text->failed = true;
}

double json_number(json *text) {
    char digits[64];
    size_t used = 0;
    const char first = peek(text);
    if (first != '-' && (first < '0' || first > '9')) {
        text->failed = true;
        return 0.0;
    }
    while (text->at < text->end && used + 1 < sizeof digits && strchr("+-.eE0123456789", *text->at) != NULL)
        digits[used++] = *text->at++;
    digits[used] = '\0';
    char *end = NULL;
    const double value = strtod(digits, &end);
    if (*end != '\0')
        text->failed = true;
    return value;
}

long json_whole(json *text, long most) {
    const double value = json_number(text);
    if (!(value >= 0.0 && value <= (double)most) || (double)(long)value != value) {
        text->failed = true;
        return 0;
    }
    return (long)value;
}

bool json_ended(json *text) {
    return peek(text) == '\0' && !text->failed && text->at == text->end;
}

long json_read_file(const char *path, char *data, size_t room, bool private_only) {
    struct stat status;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return -1;
    size_t used = 0;
    ssize_t got = 1;
    int error = 0;
    if (fstat(fd, &status) < 0)
        error = errno;
    else if (!S_ISREG(status.st_mode))
        error = EINVAL;
    else if (private_only && (status.st_mode & 077) != 0)
        error = EPERM;
    while (error == 0 && got > 0 && used < room) {
        got = read(fd, data + used, room - used);
        if (got < 0)
            error = errno;
        else
            used += (size_t)got;
    }
    if (error == 0 && used == room)
        error = EFBIG;
    (void)close(fd);
    errno = error;
    return error != 0 ? -1 : (long)used;
}
