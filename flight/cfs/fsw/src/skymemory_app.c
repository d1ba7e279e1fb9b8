/* Satellites of SkyMemory as an app of NASA's core Flight System.
 *
 * A child task owns the sockets, one for each satellite, and gives packets to the core; the app's main task listens on the
 * software bus. A packet of SkyMemory is a Space Packet with cFE's secondary headers, so commands for a satellite come by
 * either way: by a socket, or on the bus, whose answers go back onto the bus. Commands for the app itself and housekeeping on
 * request are as in any app of cFS; a request also has some of the satellites answer a PING on the bus, each in its turn.
 *
 * What it serves is in /cf/skymemory.conf, as `skymemory satellite --write-config FILE` writes it; if that names a key file,
 * the keys are in /cf/skymemory.keys, which is followed when it changes. Commands on the bus need MACs as those on links do.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <netinet/in.h>

#include "cfe.h"

#include "endpoints.h"
#include "key_file.h"
#include "satellite.h"
#include "share.h"
#include "skymemory_msg.h"
#include "skymemory_msgids.h"
#include "wire/auth.h"
#include "wire/packet.h"

#define SKY_APP_CONFIG "/cf/skymemory.conf"
#define SKY_APP_KEYS "/cf/skymemory.keys"
#define SKY_APP_BUS (SKY_BEAM | 0xFFFFFEU) /* the link of what comes by the software bus: no token of endpoints.h */
#define SKY_APP_GROUND 0x5359 /* the app's own number as a ground host, where it asks its satellites */
#define SKY_APP_PIPE_DEPTH 32
#define SKY_APP_LOOK_MS 1000 /* at a changed key file; well below the time that ES waits for an app to end */
#define SKY_APP_STOP_MS 3000
#define SKY_APP_PINGS 4 /* satellites asked at each request for housekeeping: what a telemetry app's pipe takes */
#define SKY_APP_OTHERS 10 /* of OSAL's descriptors: those of other apps */
#define SKY_APP_MOST (OS_MAX_NUM_OPEN_FILES - SKY_APP_OTHERS)
#define SKY_APP_STACK 262144
#define SKY_APP_PRIORITY 60
#define SKY_APP_MOST_WAIT_US 100000
#define SKY_APP_CREDIT_BYTES (128U << 10) /* what a socket of OSAL holds: it has no option for more */
#define SKY_APP_PACKETS_A_TURN 32

enum
{
    SKY_APP_STARTED = 1,
    SKY_APP_FAILED,
    SKY_APP_NOOP,
    SKY_APP_RESET,
    SKY_APP_BAD_CODE,
    SKY_APP_BAD_LENGTH,
    SKY_APP_BAD_PACKET,
    SKY_APP_BAD_MID,
    SKY_APP_NEW_KEYS,
    SKY_APP_BAD_KEYS,
    SKY_APP_PIPE
};

typedef struct {
    sky_satellite *core;
    void *         memory;
    osal_id_t      socket;
} SKY_App_Satellite_t;

static struct {
    share               its;
    endpoints *         endpoints;
    sky_ring            ring;
    sky_authority       authority; /* of our own commands to the satellites */
    file_state          keys_seen;
    SKY_App_Satellite_t all[SKY_APP_MOST];
    unsigned            count;
    unsigned            next; /* satellite to ask for housekeeping */
    CFE_SB_PipeId_t     pipe;
    CFE_ES_TaskId_t     child;
    osal_id_t           mutex; /* the core has one caller at a time: the child task, or the main one */
    osal_id_t           stopped;
    uint8               packet[SKY_MAX_PACKET_BYTES];
    uint8               received[SKY_MAX_PACKET_BYTES];
    uint8               commands, errors;
    uint16              asked;
    uint32              published, unpublished;
    SKYMEMORY_HkTlm_t   housekeeping;
    volatile bool       stop;
} SKY_App;

/* Unix time: the mission's clock must be that. */
static sky_us SKY_App_Now(void)
{
    OS_time_t now;
    OS_GetLocalTime(&now);
    return (sky_us)OS_TimeGetTotalMicroseconds(now);
}

static void SKY_App_Address(const udp_endpoint *from, OS_SockAddr_t *to)
{
    OS_SocketAddrInit(to, OS_SocketDomain_INET);
    memcpy(&to->AddrData, &from->v4, sizeof(from->v4)); /* where OSAL has BSD sockets */
}

/* --- Out --- */

static void SKY_App_Publish(const uint8 *packet, size_t bytes)
{
    CFE_SB_Buffer_t *buffer = bytes <= CFE_MISSION_SB_MAX_SB_MSG_SIZE ? CFE_SB_AllocateMessageBuffer(bytes) : NULL;
    if (buffer != NULL)
    {
        memcpy(buffer, packet, bytes);
        if (CFE_SB_TransmitBuffer(buffer, false) == CFE_SUCCESS)
        {
            SKY_App.published++;
            return;
        }
        CFE_SB_ReleaseMessageBuffer(buffer);
    }
    SKY_App.unpublished++;
}

/* Writes packet i of a run in one piece. */
static size_t SKY_App_Flatten(const sky_satellite *core, const sky_run *run, uint32 i)
{
    size_t at   = (size_t)i * run->header_bytes;
    size_t used = run->headers_bytes - at < run->header_bytes ? run->headers_bytes - at : run->header_bytes;
    uint32 left = run->payloads != NULL ? run->payloads[i].bytes : 0;
    uint32 cell = run->payloads != NULL ? run->payloads[i].first_cell : 0;
    memcpy(SKY_App.packet, run->headers + at, used);
    while (left > 0)
    {
        uint32         bytes   = 0;
        const uint8_t *payload = sky_payload_cell(core, cell, left, &bytes, &cell);
        memcpy(SKY_App.packet + used, payload, bytes);
        used += bytes;
        left -= bytes;
    }
    return used;
}

static void SKY_App_Flush(SKY_App_Satellite_t *one, sky_us now)
{
    sky_run       run;
    udp_endpoint  there;
    OS_SockAddr_t to;
    uint32        i;
    sky_gather(one->core, now);
    while (sky_next_run(one->core, &run))
    {
        bool known = run.link == SKY_APP_BUS;
        if (!known && (run.link & SKY_BEAM) == SKY_BEAM)
        {
            known = endpoints_ground(SKY_App.endpoints, run.link, &there);
        }
        else if (!known)
        {
            known = endpoints_satellite(SKY_App.endpoints, run.link, &there);
        }
        if (known && run.link != SKY_APP_BUS)
            SKY_App_Address(&there, &to);
        for (i = 0; known && i < run.count; i++)
        {
            size_t bytes = SKY_App_Flatten(one->core, &run, i);
            if (run.link == SKY_APP_BUS)
                SKY_App_Publish(SKY_App.packet, bytes);
            else
                (void)OS_SocketSendTo(one->socket, SKY_App.packet, bytes, &to);
        }
    }
}

/* --- The child task --- */

static void SKY_App_Receive(SKY_App_Satellite_t *one)
{
    OS_SockAddr_t from;
    udp_endpoint  address;
    int           n;
    for (n = 0; n < SKY_APP_PACKETS_A_TURN; n++)
    {
        int32  bytes = OS_SocketRecvFrom(one->socket, SKY_App.received, sizeof(SKY_App.received), &from, OS_CHECK);
        sky_us now   = SKY_App_Now();
        if (bytes <= 0)
            return;
        memcpy(&address.v4, &from.AddrData, sizeof(address.v4));
        sky_receive(one->core, SKY_App.received, (size_t)bytes, (size_t)bytes,
                    endpoints_link(SKY_App.endpoints, &address), now);
        SKY_App_Flush(one, now);
    }
}

static void SKY_App_Turn(sky_us *beat)
{
    OS_FdSet ready;
    sky_us   now = SKY_App_Now(), wait = SKY_APP_MOST_WAIT_US;
    unsigned i;
    OS_SelectFdZero(&ready);
    OS_MutSemTake(SKY_App.mutex);
    for (i = 0; i < SKY_App.count; i++)
    {
        sky_us due = sky_next_timer(SKY_App.all[i].core);
        if (due != SKY_NEVER && due - now < wait)
            wait = due - now;
        if (sky_wants_work(SKY_App.all[i].core))
            wait = 0;
        OS_SelectFdAdd(&ready, SKY_App.all[i].socket);
    }
    OS_MutSemGive(SKY_App.mutex);
    if (OS_SelectMultiple(&ready, NULL, wait > 0 ? (int32)((wait + 999) / 1000) : 0) != OS_SUCCESS)
        OS_SelectFdZero(&ready);
    OS_MutSemTake(SKY_App.mutex);
    for (i = 0; i < SKY_App.count; i++)
    {
        SKY_App_Satellite_t *one = &SKY_App.all[i];
        if (OS_SelectFdIsSet(&ready, one->socket))
            SKY_App_Receive(one);
        now = SKY_App_Now();
        if (sky_next_timer(one->core) <= now)
        {
            sky_handle_timer(one->core, now);
            SKY_App_Flush(one, now);
        }
        if (sky_wants_work(one->core))
        {
            sky_work(one->core, now);
            SKY_App_Flush(one, now);
        }
    }
    now = SKY_App_Now();
    if (now >= *beat)
    {
        for (i = 0; i < SKY_App.count; i++)
            sky_host_late(SKY_App.all[i].core, now - *beat, now);
        *beat = now + SKY_APP_MOST_WAIT_US;
    }
    OS_MutSemGive(SKY_App.mutex);
}

static void SKY_App_Child(void)
{
    sky_us beat = SKY_App_Now() + SKY_APP_MOST_WAIT_US;
    while (!SKY_App.stop)
        SKY_App_Turn(&beat);
    OS_BinSemGive(SKY_App.stopped);
    CFE_ES_ExitChildTask();
}

/* --- Commands --- */

/* Packets that satellites rejected, by the number of the figure in their housekeeping. */
static const struct
{
    unsigned    figure;
    const char *why;
} SKY_App_Rejections[] = {
    {5, "malformed"}, {33, "not authentic"}, {34, "a replay"}, {39, "not supported"}, {7, "for no satellite here"}};
#define SKY_APP_REJECTIONS (sizeof(SKY_App_Rejections) / sizeof(SKY_App_Rejections[0]))

/* Gives a packet on the bus to a satellite. Says why it was rejected, or NULL. */
static const char *SKY_App_Deliver(SKY_App_Satellite_t *one, const uint8 *packet, size_t bytes)
{
    int64_t     before[SKY_HOUSEKEEPING_FIELDS], after[SKY_HOUSEKEEPING_FIELDS];
    const char *why = NULL;
    unsigned    i;
    sky_us      now;
    OS_MutSemTake(SKY_App.mutex);
    now = SKY_App_Now();
    sky_housekeeping(one->core, before, now);
    memcpy(SKY_App.received, packet, bytes);
    sky_receive(one->core, SKY_App.received, bytes, bytes, SKY_APP_BUS, now);
    SKY_App_Flush(one, now);
    sky_housekeeping(one->core, after, now);
    OS_MutSemGive(SKY_App.mutex);
    for (i = 0; i < SKY_APP_REJECTIONS && why == NULL; i++)
    {
        if (after[SKY_App_Rejections[i].figure] != before[SKY_App_Rejections[i].figure])
            why = SKY_App_Rejections[i].why;
    }
    return why;
}

/* A packet of SkyMemory on the software bus: for the satellite that it names. */
static void SKY_App_Packet(const CFE_SB_Buffer_t *buffer)
{
    const uint8 *  packet = (const uint8 *)buffer;
    const char *   why    = "too short or too long";
    CFE_MSG_Size_t bytes  = 0;
    unsigned       i      = 0;
    CFE_MSG_GetSize(&buffer->Msg, &bytes);
    if (bytes >= SKY_COMMAND_PREFIX_BYTES && bytes <= sizeof(SKY_App.received))
    {
        const uint32 there = sky_load32(packet + SKY_COMMAND_BYTES + SKY_DESTINATION_AT);
        while (i < SKY_App.count && SKY_App.its.mine[i].address != there)
            i++;
        why = i < SKY_App.count ? SKY_App_Deliver(&SKY_App.all[i], packet, bytes) : "for no satellite here";
    }
    if (why == NULL)
    {
        SKY_App.commands++;
        return;
    }
    SKY_App.errors++;
    CFE_EVS_SendEvent(SKY_APP_BAD_PACKET, CFE_EVS_EventType_ERROR, "SKYMEMORY: packet rejected: %s", why);
}

static bool SKY_App_Length(const CFE_SB_Buffer_t *buffer, size_t expected)
{
    CFE_MSG_Size_t bytes = 0;
    CFE_MSG_GetSize(&buffer->Msg, &bytes);
    if (bytes == expected)
        return true;
    SKY_App.errors++;
    CFE_EVS_SendEvent(SKY_APP_BAD_LENGTH, CFE_EVS_EventType_ERROR, "SKYMEMORY: command of %lu bytes, expected %lu",
                      (unsigned long)bytes, (unsigned long)expected);
    return false;
}

static void SKY_App_Command(const CFE_SB_Buffer_t *buffer)
{
    CFE_MSG_FcnCode_t code = 0;
    CFE_MSG_GetFcnCode(&buffer->Msg, &code);
    if (code != SKYMEMORY_NOOP_CC && code != SKYMEMORY_RESET_COUNTERS_CC)
    {
        SKY_App.errors++;
        CFE_EVS_SendEvent(SKY_APP_BAD_CODE, CFE_EVS_EventType_ERROR, "SKYMEMORY: unknown command code %u", (unsigned)code);
    }
    else if (!SKY_App_Length(buffer, sizeof(SKYMEMORY_NoArgsCmd_t)))
    {
        return;
    }
    else if (code == SKYMEMORY_NOOP_CC)
    {
        SKY_App.commands++;
        CFE_EVS_SendEvent(SKY_APP_NOOP, CFE_EVS_EventType_INFORMATION, "SKYMEMORY: NOOP, wire format %d, %u satellites",
                          SKY_WIRE_VERSION, SKY_App.count);
    }
    else
    {
        SKY_App.commands = 0;
        SKY_App.errors   = 0;
        CFE_EVS_SendEvent(SKY_APP_RESET, CFE_EVS_EventType_INFORMATION, "SKYMEMORY: RESET");
    }
}

/* --- Housekeeping --- */

/* As an operator's PING on the bus, which is no command in the app's count. */
static void SKY_App_Ping(unsigned which)
{
    uint8      ping[SKY_COMMAND_PREFIX_BYTES + SKY_MAC_BYTES];
    size_t     bytes = SKY_COMMAND_PREFIX_BYTES;
    sky_header header;
    memset(&header, 0, sizeof(header));
    header.op          = SKY_PING;
    header.destination = SKY_App.its.mine[which].address;
    header.source      = SKY_BEAM | SKY_App.its.mine[which].address;
    header.ground      = SKY_APP_GROUND;
    header.request_id  = ++SKY_App.asked;
    sky_packet_begin(ping, &header, 0, SKY_App.asked & 0x3FFF, 0);
    sky_packet_seal(ping, bytes);
    if (sky_authority_signs(&SKY_App.authority, SKY_PING, header.destination) &&
        sky_authority_sign(&SKY_App.authority, ping, bytes, SKY_App_Now()))
        bytes += SKY_MAC_BYTES;
    (void)SKY_App_Deliver(&SKY_App.all[which], ping, bytes);
}

static void SKY_App_Housekeeping(void)
{
    SKYMEMORY_HkTlm_Payload_t *out = &SKY_App.housekeeping.Payload;
    int64_t                    figures[SKY_HOUSEKEEPING_FIELDS];
    int64_t                    chunks = 0, bytes = 0, packets = 0, rejected = 0;
    sky_us                     now;
    unsigned                   i, j;
    OS_MutSemTake(SKY_App.mutex);
    now = SKY_App_Now();
    for (i = 0; i < SKY_App.count; i++)
    {
        sky_housekeeping(SKY_App.all[i].core, figures, now);
        bytes += figures[0];
        chunks += figures[2];
        packets += figures[4];
        for (j = 0; j < SKY_APP_REJECTIONS; j++)
            rejected += figures[SKY_App_Rejections[j].figure];
    }
    sky_store32(out->PacketsPublished, SKY_App.published);
    sky_store32(out->PacketsUnpublished, SKY_App.unpublished);
    OS_MutSemGive(SKY_App.mutex);
    out->CommandCounter      = SKY_App.commands;
    out->CommandErrorCounter = SKY_App.errors;
    sky_store16(out->Satellites, SKY_App.count);
    sky_store64(out->ChunksHeld, (uint64_t)chunks);
    sky_store64(out->MemoryUsedBytes, (uint64_t)bytes);
    sky_store64(out->PacketsReceived, (uint64_t)packets);
    sky_store64(out->PacketsRejected, (uint64_t)rejected);
    CFE_SB_TransmitMsg(CFE_MSG_PTR(SKY_App.housekeeping.TelemetryHeader), true); /* which stamps it */
    for (i = 0; i < SKY_APP_PINGS && i < SKY_App.count; i++)
    {
        SKY_App_Ping(SKY_App.next);
        SKY_App.next = (SKY_App.next + 1) % SKY_App.count;
    }
}

static void SKY_App_Dispatch(const CFE_SB_Buffer_t *buffer)
{
    CFE_SB_MsgId_t id = CFE_SB_INVALID_MSG_ID;
    CFE_MSG_GetMsgId(&buffer->Msg, &id);
    switch (CFE_SB_MsgIdToValue(id))
    {
        case SKYMEMORY_PACKET_MID:
            SKY_App_Packet(buffer);
            break;
        case SKYMEMORY_CMD_MID:
            SKY_App_Command(buffer);
            break;
        case SKYMEMORY_SEND_HK_MID:
            if (SKY_App_Length(buffer, sizeof(SKYMEMORY_NoArgsCmd_t)))
                SKY_App_Housekeeping();
            break;
        default:
            SKY_App.errors++;
            CFE_EVS_SendEvent(SKY_APP_BAD_MID, CFE_EVS_EventType_ERROR, "SKYMEMORY: unknown message id 0x%lX",
                              (unsigned long)CFE_SB_MsgIdToValue(id));
            break;
    }
}

/* --- Keys --- */

static bool SKY_App_Keys(char reason[256])
{
    char     path[OS_MAX_LOCAL_PATH_LEN];
    sky_ring ring;
    unsigned i;
    if (SKY_App.its.keys_path[0] == '\0')
        return true;
    strcpy(reason, "no folder /cf");
    if (OS_TranslatePath(SKY_APP_KEYS, path) != OS_SUCCESS)
        return false;
    if (!file_changed(path, &SKY_App.keys_seen) && SKY_App.ring.count > 0)
        return true;
    if (!key_file_read(path, SKY_App.its.auth, &ring, reason))
        return false;
    SKY_App.ring = ring;
    sky_authority_begin(&SKY_App.authority, &SKY_App.ring);
    OS_MutSemTake(SKY_App.mutex);
    for (i = 0; i < SKY_App.count; i++)
        sky_set_keys(SKY_App.all[i].core, &SKY_App.ring);
    OS_MutSemGive(SKY_App.mutex);
    if (SKY_App.count > 0)
        CFE_EVS_SendEvent(SKY_APP_NEW_KEYS, CFE_EVS_EventType_INFORMATION, "SKYMEMORY: %u keys", (unsigned)ring.count);
    return true;
}

/* The secret seed of a satellite's hashes. cFE, OSAL and PSP have no random numbers: it is an HMAC, by the newest key, of what
 * the system's own source gives if it has one, and of what differs from start to start. Without keys and without that source
 * it is no secret; nor is anything else of satellites that obey everybody. */
static void SKY_App_Seed(uint32 address, uint64_t seed[2])
{
    static const uint8_t NO_SECRET[SKY_SECRET_BYTES];
    static const char    PURPOSE[] = "skymemory hash seed 1";
    uint8_t              fresh[32 + 4 + 8], digest[SKY_SHA_BYTES];
    sky_hmac_key         by_secret;
    sky_sha              inner;
    FILE *               random = fopen("/dev/urandom", "rb");
    memset(fresh, 0, sizeof(fresh));
    if (random != NULL)
    {
        (void)setvbuf(random, NULL, _IONBF, 0);
        (void)!fread(fresh, 1, 32, random);
        fclose(random);
    }
    sky_store32(fresh + 32, address);
    sky_store64(fresh + 36, (uint64_t)SKY_App_Now());
    sky_hmac_begin(&by_secret,
                   SKY_App.ring.count > 0 ? SKY_App.ring.keys[SKY_App.ring.count - 1].secret : NO_SECRET);
    inner = by_secret.inner;
    sky_sha_take(&inner, (const uint8_t *)PURPOSE, sizeof(PURPOSE) - 1);
    sky_sha_take(&inner, fresh, sizeof(fresh));
    sky_hmac_end(&by_secret, &inner, digest);
    memcpy(seed, digest, 2 * sizeof(*seed));
}

/* --- Start and end --- */

/* Opens one satellite. */
static bool SKY_App_Launch(unsigned i)
{
    SKY_App_Satellite_t *one    = &SKY_App.all[i];
    sky_config           config = SKY_App.its.config;
    OS_SockAddr_t        here;
    size_t               bytes;
    config.address      = SKY_App.its.mine[i].address;
    config.credit_bytes = SKY_APP_CREDIT_BYTES;
    config.ring         = SKY_App.ring;
    SKY_App_Seed(config.address, config.hash_seed);
    bytes       = sky_satellite_bytes(&config);
    one->memory = bytes > 0 ? calloc(1, bytes) : NULL; /* at the start only: nothing is allocated later */
    if (one->memory == NULL)
        return false;
    SKY_App_Address(&SKY_App.its.mine[i].endpoint, &here);
    if (OS_SocketOpen(&one->socket, OS_SocketDomain_INET, OS_SocketType_DATAGRAM) != OS_SUCCESS ||
        OS_SocketBind(one->socket, &here) != OS_SUCCESS)
        return false;
    one->core = sky_satellite_begin(one->memory, bytes, &config, SKY_App_Now());
    return one->core != NULL;
}

static bool SKY_App_Subscribe(uint32 id)
{
    return CFE_SB_Subscribe(CFE_SB_ValueToMsgId(id), SKY_App.pipe) == CFE_SUCCESS;
}

static bool SKY_App_Init(char reason[512])
{
    char     path[OS_MAX_LOCAL_PATH_LEN];
    unsigned i;
    strcpy(reason, "no folder /cf");
    if (OS_TranslatePath(SKY_APP_CONFIG, path) != OS_SUCCESS || !share_read(path, &SKY_App.its, reason))
        return false;
    snprintf(reason, 512, "expected no simulated links, and at most %d satellites: OSAL_CONFIG_MAX_NUM_OPEN_FILES less %d",
             SKY_APP_MOST, SKY_APP_OTHERS);
    if (SKY_App.its.mine_count > SKY_APP_MOST || SKY_App.its.delayed || SKY_App.its.sky.blocked_m > 0.0 ||
        SKY_App.its.links.given)
        return false;
    strcpy(reason, "expected IPv4 addresses: OSAL need not have others");
    if (SKY_App.its.mine[0].endpoint.any.sa_family != AF_INET)
        return false;
    SKY_App.endpoints =
        endpoints_new(SKY_App.its.mine_count + SKY_App.its.others_count, SKY_App.its.config.hash_seed);
    strcpy(reason, "no memory, mutex or semaphore");
    if (SKY_App.endpoints == NULL || OS_MutSemCreate(&SKY_App.mutex, "SKY_CORE", 0) != OS_SUCCESS ||
        OS_BinSemCreate(&SKY_App.stopped, "SKY_STOPPED", OS_SEM_EMPTY, 0) != OS_SUCCESS || !SKY_App_Keys(reason))
        return false;
    for (i = 0; i < SKY_App.its.others_count; i++)
        endpoints_add(SKY_App.endpoints, SKY_App.its.others[i].address, &SKY_App.its.others[i].endpoint);
    for (i = 0; i < SKY_App.its.mine_count; i++)
        endpoints_add(SKY_App.endpoints, SKY_App.its.mine[i].address, &SKY_App.its.mine[i].endpoint);
    for (i = 0; i < SKY_App.its.mine_count; i++, SKY_App.count++)
    {
        snprintf(reason, 512, "no memory or socket for satellite %u at port %u", i,
                 (unsigned)ntohs(SKY_App.its.mine[i].endpoint.v4.sin_port));
        if (!SKY_App_Launch(i))
            return false;
    }
    for (i = 0; i < SKY_App.count; i++)
    {
        sky_greet(SKY_App.all[i].core, SKY_App_Now());
        SKY_App_Flush(&SKY_App.all[i], SKY_App_Now());
    }
    CFE_MSG_Init(CFE_MSG_PTR(SKY_App.housekeeping.TelemetryHeader), CFE_SB_ValueToMsgId(SKYMEMORY_HK_TLM_MID),
                 sizeof(SKY_App.housekeeping));
    strcpy(reason, "no pipe or task");
    return CFE_SB_CreatePipe(&SKY_App.pipe, SKY_APP_PIPE_DEPTH, "SKY_PIPE") == CFE_SUCCESS &&
           SKY_App_Subscribe(SKYMEMORY_PACKET_MID) && SKY_App_Subscribe(SKYMEMORY_CMD_MID) &&
           SKY_App_Subscribe(SKYMEMORY_SEND_HK_MID) &&
           CFE_ES_CreateChildTask(&SKY_App.child, "SKY_LINKS", SKY_App_Child, CFE_ES_TASK_STACK_ALLOCATE, SKY_APP_STACK,
                                  SKY_APP_PRIORITY, 0) == CFE_SUCCESS;
}

/* Ends the child task, and gives back what ES does not know of: memory. It deletes mutex, semaphore, pipe and sockets, as
 * those of any app; sockets are closed here, for they must be free when the app starts again. */
static void SKY_App_End(void)
{
    unsigned i;
    SKY_App.stop = true;
    if (CFE_RESOURCEID_TEST_DEFINED(SKY_App.child) && OS_BinSemTimedWait(SKY_App.stopped, SKY_APP_STOP_MS) != OS_SUCCESS)
        return; /* it still uses all this; ES will end it */
    for (i = 0; i < SKY_APP_MOST; i++)
    {
        if (OS_ObjectIdDefined(SKY_App.all[i].socket))
            OS_close(SKY_App.all[i].socket);
        free(SKY_App.all[i].memory);
    }
    endpoints_free(SKY_App.endpoints);
    share_free(&SKY_App.its);
    memset(&SKY_App, 0, sizeof(SKY_App)); /* and the keys */
}

void SKY_AppMain(void);
void SKY_AppMain(void)
{
    static char      reason[512];
    uint32           status = CFE_ES_RunStatus_APP_RUN;
    CFE_SB_Buffer_t *buffer = NULL;
    memset(&SKY_App, 0, sizeof(SKY_App)); /* where an app is not loaded anew for a restart */
    CFE_EVS_Register(NULL, 0, CFE_EVS_EventFilter_BINARY);
    if (!SKY_App_Init(reason))
    {
        CFE_EVS_SendEvent(SKY_APP_FAILED, CFE_EVS_EventType_CRITICAL, "SKYMEMORY: %s: %s", SKY_APP_CONFIG, reason);
        status = CFE_ES_RunStatus_APP_ERROR;
    }
    else
    {
        CFE_EVS_SendEvent(SKY_APP_STARTED, CFE_EVS_EventType_INFORMATION, "SKYMEMORY: %u satellites listen, %u keys",
                          SKY_App.count, (unsigned)SKY_App.ring.count);
    }
    while (CFE_ES_RunLoop(&status))
    {
        int32 got = CFE_SB_ReceiveBuffer(&buffer, SKY_App.pipe, SKY_APP_LOOK_MS);
        if (got == CFE_SUCCESS)
        {
            SKY_App_Dispatch(buffer);
        }
        else if (got != CFE_SB_TIME_OUT)
        {
            CFE_EVS_SendEvent(SKY_APP_PIPE, CFE_EVS_EventType_CRITICAL, "SKYMEMORY: no software bus: 0x%08lX",
                              (unsigned long)got);
            status = CFE_ES_RunStatus_APP_ERROR;
        }
        if (!SKY_App_Keys(reason))
            CFE_EVS_SendEvent(SKY_APP_BAD_KEYS, CFE_EVS_EventType_ERROR, "SKYMEMORY: %s; the keys stay", reason);
    }
    SKY_App_End();
    CFE_ES_ExitApp(status);
}
