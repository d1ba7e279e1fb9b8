#include "outages.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "json.h"

enum { MOST_BYTES = 1 << 20, MOST_INDEX = 4095 };

static bool read_all(json *text, void (*found)(void *context, sky_link satellite), void *context) {
    char name[16];
    if (!json_take(text, '{'))
        return false;
    json_string(text, name, sizeof name);
    if (strcmp(name, "disabled") != 0 || !json_take(text, ':') || !json_take(text, '['))
        return false;
    if (!json_take(text, ']')) {
        do {
            if (!json_take(text, '['))
                return false;
            const long plane = json_whole(text, MOST_INDEX);
            if (!json_take(text, ','))
                return false;
            const long slot = json_whole(text, MOST_INDEX);
            if (!json_take(text, ']') || text->failed)
                return false;
            if (found != NULL)
                found(context, (sky_link)plane << 12 | (sky_link)slot);
        } while (json_take(text, ','));
        if (!json_take(text, ']'))
            return false;
    }
    return json_take(text, '}') && json_ended(text);
}

bool outages_read(const char *path, void (*found)(void *context, sky_link satellite), void *context, char reason[256]) {
    static char data[MOST_BYTES];
    const long bytes = json_read_file(path, data, sizeof data, false);
    if (bytes < 0 && errno == ENOENT)
        return true;
    if (bytes < 0) {
        (void)snprintf(reason, 256, "cannot read %s: %s", path, strerror(errno));
        return false;
    }
    /* Twice: nothing is applied of a file that is damaged. */
    json text = {data, data + bytes, false};
    if (!read_all(&text, NULL, NULL)) {
        (void)snprintf(reason, 256, "%s: expected {\"disabled\": [[plane, slot], ...]}", path);
        return false;
    }
    text = (json){data, data + bytes, false};
    return read_all(&text, found, context);
}
