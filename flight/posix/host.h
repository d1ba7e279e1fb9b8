/* One host's satellites over UDP: a socket each, one event loop, links with the delay of light. Twin of
 * skymemory.transport.udp_host; rates and outages of links are not simulated here.
 *
 * The core decides everything. This moves packets between it and the sockets, in memory between satellites of this host, and
 * measures how late it is with its own work.
 */
#ifndef SKY_POSIX_HOST_H
#define SKY_POSIX_HOST_H

#include "share.h"

/* Serves the share until SIGTERM or SIGINT, or until the supervisor's socket (-1: none) closes before it has sent `stay`.
 * Returns the process's exit status. */
int host_serve(share *its, int supervisor_fd);

#endif
