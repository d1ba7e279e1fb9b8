/* A host and a port, of IPv4 or IPv6. Family and port lie at the same place in both. */
#ifndef SKY_POSIX_ENDPOINT_H
#define SKY_POSIX_ENDPOINT_H

#include <netinet/in.h>
#include <sys/socket.h>

typedef union {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
} udp_endpoint;

static inline socklen_t udp_endpoint_bytes(const udp_endpoint *one) {
    return one->any.sa_family == AF_INET6 ? (socklen_t)sizeof one->v6 : (socklen_t)sizeof one->v4;
}

#endif
