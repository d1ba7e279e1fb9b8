/* Unix time in microseconds that never runs backwards and counts the time in a suspend; beside it the wall clock, which can be
 * set. Twin of unix_clock.UnixClock. */
#ifndef SKY_POSIX_WALL_CLOCK_H
#define SKY_POSIX_WALL_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    int64_t offset_us; /* from the running clock to Unix time */
} wall_clock;

/* Microseconds of CLOCK_BOOTTIME: what timers are set in. */
int64_t running_us(void);
/* Counts from this Unix time at second 0 of the running clock; 0: from what the wall clock says now. */
void wall_clock_begin(wall_clock *clock, int64_t unix_at_boot_us);
int64_t wall_clock_now(const wall_clock *clock);
/* By how much the wall clock is ahead (behind: negative); 0 for less than a second. */
int64_t wall_clock_shift(const wall_clock *clock);
/* Follows a wall clock that was set forward by a second or more (a virtual machine was paused); whether it was. */
bool wall_clock_follow(wall_clock *clock);

#endif
