/* Unix time in microseconds that never runs backwards and counts the time in a suspend. Twin of udp_socket.UnixClock. */
#ifndef SKY_POSIX_WALL_CLOCK_H
#define SKY_POSIX_WALL_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    int64_t offset_us; /* from the running clock to Unix time */
} wall_clock;

/* Microseconds of CLOCK_BOOTTIME: what timers are set in. */
int64_t running_us(void);
void wall_clock_begin(wall_clock *clock);
int64_t wall_clock_now(const wall_clock *clock);
/* Follows a wall clock that was set forward by a second or more (a virtual machine was paused); whether it was. */
bool wall_clock_follow(wall_clock *clock);

#endif
