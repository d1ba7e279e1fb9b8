/* Satellites of SkyMemory as an app of NASA's core Flight System.
 *
 * A child task owns the sockets, one for each satellite, and gives packets to the core; the app's main task listens on the
 * software bus. A packet of SkyMemory is a Space Packet with cFE's secondary headers, so commands come by either way: by
 * a socket, or on the bus under message id 0x18C0, whose answers go back onto the bus under 0x08C0. Every ten seconds the app
 * asks its own satellites for housekeeping like this: a telemetry app downlinks their PONGs.
 *
 * What it serves is in /cf/skymemory.conf, as `skymemory satellite --write-config FILE` writes it.
 */
#include <stdlib.h>
#include <string.h>

#include <netinet/in.h>

#include "cfe.h"

#include "endpoints.h"
#include "satellite.h"
#include "share.h"
#include "wire/packet.h"

#define SKY_APP_CONFIG "/cf/skymemory.conf"
#define SKY_APP_COMMAND_MID 0x18C0
#define SKY_APP_TELEMETRY_MID 0x08C0
#define SKY_APP_BUS (SKY_BEAM | 0xFFFFFEU) /* the link of what comes by the software bus: no token of endpoints.h */
#define SKY_APP_PIPE_DEPTH 32
#define SKY_APP_HOUSEKEEPING_MS 10000
#define SKY_APP_MOST 40 /* satellites: OSAL has 50 descriptors by default */
#define SKY_APP_STACK 262144
#define SKY_APP_PRIORITY 60
#define SKY_APP_MOST_WAIT_US 100000
#define SKY_APP_CREDIT_BYTES (128U << 10) /* what a socket of OSAL holds: it has no option for more */
#define SKY_APP_PACKETS_A_TURN 32

enum { SKY_APP_STARTED = 1, SKY_APP_FAILED, SKY_APP_HOUSEKEEPING, SKY_APP_COMMAND };

typedef struct {
    sky_satellite *core;
    osal_id_t      socket;
} SKY_App_Satellite_t;

static struct {
    share               its;
    endpoints *         endpoints;
    SKY_App_Satellite_t all[SKY_APP_MOST];
    unsigned            count;
    CFE_SB_PipeId_t     pipe;
    CFE_ES_TaskId_t     child;
    osal_id_t           mutex; /* the core has one caller at a time: the child task, or the main one */
    uint8               packet[SKY_MAX_PACKET_BYTES];
    uint8               received[SKY_MAX_PACKET_BYTES];
    uint32              commands, rejected, published;
    bool                stop;
} SKY_App;

/* Unix time: the mission's clock must be that. */
static sky_us SKY_App_Now(void)
{
    OS_time_t now;
    OS_GetLocalTime(&now);
    return (sky_us)OS_TimeGetTotalMicroseconds(now);
}

static void SKY_App_Address(const struct sockaddr_in *from, OS_SockAddr_t *to)
{
    OS_SocketAddrInit(to, OS_SocketDomain_INET);
    memcpy(&to->AddrData, from, sizeof(*from)); /* where OSAL has BSD sockets */
}

/* --- Out --- */

static void SKY_App_Publish(const uint8 *packet, size_t bytes)
{
    CFE_SB_Buffer_t *buffer = CFE_SB_AllocateMessageBuffer(bytes);
    if (buffer == NULL)
        return;
    memcpy(buffer, packet, bytes);
    if (CFE_SB_TransmitBuffer(buffer, false) == CFE_SUCCESS)
        SKY_App.published++;
    else
        CFE_SB_ReleaseMessageBuffer(buffer);
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
    sky_run            run;
    struct sockaddr_in there;
    OS_SockAddr_t      to;
    uint32             i;
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
    OS_SockAddr_t      from;
    struct sockaddr_in address;
    int                n;
    for (n = 0; n < SKY_APP_PACKETS_A_TURN; n++)
    {
        int32  bytes = OS_SocketRecvFrom(one->socket, SKY_App.received, sizeof(SKY_App.received), &from, OS_CHECK);
        sky_us now   = SKY_App_Now();
        if (bytes <= 0)
            return;
        memcpy(&address, &from.AddrData, sizeof(address));
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
    CFE_ES_ExitChildTask();
}

/* --- The main task --- */

/* A command from the software bus: for the satellite that it names. */
static void SKY_App_Command(const CFE_SB_Buffer_t *buffer)
{
    CFE_MSG_Size_t bytes = 0;
    const uint8 *  packet = (const uint8 *)buffer;
    uint32         i;
    CFE_MSG_GetSize(&buffer->Msg, &bytes);
    if (bytes >= SKY_COMMAND_PREFIX_BYTES && bytes <= sizeof(SKY_App.received))
    {
        uint32 there = sky_load32(packet + SKY_COMMAND_BYTES + SKY_DESTINATION_AT);
        for (i = 0; i < SKY_App.count; i++)
        {
            if (SKY_App.its.mine[i].address != there)
                continue;
            SKY_App.commands++;
            OS_MutSemTake(SKY_App.mutex);
            memcpy(SKY_App.received, packet, bytes);
            sky_receive(SKY_App.all[i].core, SKY_App.received, bytes, bytes, SKY_APP_BUS, SKY_App_Now());
            SKY_App_Flush(&SKY_App.all[i], SKY_App_Now());
            OS_MutSemGive(SKY_App.mutex);
            return;
        }
    }
    SKY_App.rejected++;
    CFE_EVS_SendEvent(SKY_APP_COMMAND, CFE_EVS_EventType_ERROR, "SKYMEMORY: a command for no satellite here");
}

/* Asks all satellites for housekeeping, as a command on the bus would. */
static void SKY_App_Housekeeping(void)
{
    uint8      ping[SKY_COMMAND_PREFIX_BYTES];
    sky_header header;
    int64_t    figures[SKY_HOUSEKEEPING_FIELDS];
    int64_t    chunks = 0, bytes = 0, packets = 0;
    unsigned   i;
    if (SKY_App.its.keys_path[0] == '\0')
    {
        for (i = 0; i < SKY_App.count; i++)
        {
            memset(&header, 0, sizeof(header));
            header.op          = SKY_PING;
            header.destination = SKY_App.its.mine[i].address;
            header.source      = SKY_BEAM | SKY_App.its.mine[i].address;
            header.ground      = 0x5359;
            header.request_id  = SKY_App.published + 1;
            sky_packet_begin(ping, &header, 0, (uint16_t)(SKY_App.published & 0x3FFF), 0);
            sky_packet_seal(ping, sizeof(ping));
            OS_MutSemTake(SKY_App.mutex);
            sky_receive(SKY_App.all[i].core, ping, sizeof(ping), sizeof(ping), SKY_APP_BUS, SKY_App_Now());
            SKY_App_Flush(&SKY_App.all[i], SKY_App_Now());
            OS_MutSemGive(SKY_App.mutex);
        }
    }
    OS_MutSemTake(SKY_App.mutex);
    for (i = 0; i < SKY_App.count; i++)
    {
        sky_housekeeping(SKY_App.all[i].core, figures, SKY_App_Now());
        chunks += figures[2];
        bytes += figures[0];
        packets += figures[4];
    }
    OS_MutSemGive(SKY_App.mutex);
    CFE_EVS_SendEvent(SKY_APP_HOUSEKEEPING, CFE_EVS_EventType_INFORMATION,
                      "SKYMEMORY: %u satellites hold %ld chunks, %ld bytes; %ld packets in, %lu on the bus, %lu commands",
                      SKY_App.count, (long)chunks, (long)bytes, (long)packets, (unsigned long)SKY_App.published,
                      (unsigned long)SKY_App.commands);
}

/* Opens one satellite. */
static bool SKY_App_Launch(unsigned i)
{
    SKY_App_Satellite_t *one    = &SKY_App.all[i];
    sky_config           config = SKY_App.its.config;
    OS_SockAddr_t        here;
    size_t               bytes;
    void *               memory;
    config.address      = SKY_App.its.mine[i].address;
    config.credit_bytes = SKY_APP_CREDIT_BYTES;
    bytes               = sky_satellite_bytes(&config);
    memory              = bytes > 0 ? calloc(1, bytes) : NULL; /* at the start only: nothing is allocated later */
    if (memory == NULL)
        return false;
    SKY_App_Address(&SKY_App.its.mine[i].endpoint, &here);
    if (OS_SocketOpen(&one->socket, OS_SocketDomain_INET, OS_SocketType_DATAGRAM) != OS_SUCCESS ||
        OS_SocketBind(one->socket, &here) != OS_SUCCESS)
        return false;
    one->core = sky_satellite_begin(memory, bytes, &config, SKY_App_Now());
    return one->core != NULL;
}

static bool SKY_App_Init(char reason[512])
{
    char     path[OS_MAX_LOCAL_PATH_LEN];
    unsigned i;
    if (OS_TranslatePath(SKY_APP_CONFIG, path) != OS_SUCCESS || !share_read(path, &SKY_App.its, reason))
        return false;
    strcpy(reason, "expected at most 40 satellites, no simulated links, and no MACs in this release");
    if (SKY_App.its.mine_count > SKY_APP_MOST || SKY_App.its.delayed || SKY_App.its.sky.blocked_m > 0.0 ||
        SKY_App.its.links.given || SKY_App.its.keys_path[0] != '\0')
        return false;
    SKY_App.endpoints = endpoints_new(SKY_App.its.mine_count + SKY_App.its.others_count);
    strcpy(reason, "no memory, socket, pipe or task");
    if (SKY_App.endpoints == NULL || OS_MutSemCreate(&SKY_App.mutex, "SKY_CORE", 0) != OS_SUCCESS)
        return false;
    for (i = 0; i < SKY_App.its.others_count; i++)
        endpoints_add(SKY_App.endpoints, SKY_App.its.others[i].address, &SKY_App.its.others[i].endpoint);
    for (i = 0; i < SKY_App.its.mine_count; i++)
        endpoints_add(SKY_App.endpoints, SKY_App.its.mine[i].address, &SKY_App.its.mine[i].endpoint);
    for (i = 0; i < SKY_App.its.mine_count; i++, SKY_App.count++)
    {
        if (!SKY_App_Launch(i))
            return false;
    }
    for (i = 0; i < SKY_App.count; i++)
    {
        sky_greet(SKY_App.all[i].core, SKY_App_Now());
        SKY_App_Flush(&SKY_App.all[i], SKY_App_Now());
    }
    return CFE_SB_CreatePipe(&SKY_App.pipe, SKY_APP_PIPE_DEPTH, "SKY_PIPE") == CFE_SUCCESS &&
           CFE_SB_Subscribe(CFE_SB_ValueToMsgId(SKY_APP_COMMAND_MID), SKY_App.pipe) == CFE_SUCCESS &&
           CFE_ES_CreateChildTask(&SKY_App.child, "SKY_LINKS", SKY_App_Child, CFE_ES_TASK_STACK_ALLOCATE, SKY_APP_STACK,
                                  SKY_APP_PRIORITY, 0) == CFE_SUCCESS;
}

void SKY_AppMain(void);
void SKY_AppMain(void)
{
    uint32           status      = CFE_ES_RunStatus_APP_RUN;
    static char      reason[512];
    CFE_SB_Buffer_t *buffer = NULL;
    CFE_EVS_Register(NULL, 0, CFE_EVS_EventFilter_BINARY);
    if (!SKY_App_Init(reason))
    {
        CFE_EVS_SendEvent(SKY_APP_FAILED, CFE_EVS_EventType_CRITICAL, "SKYMEMORY: %s: %s", SKY_APP_CONFIG, reason);
        status = CFE_ES_RunStatus_APP_ERROR;
    }
    else
    {
        CFE_EVS_SendEvent(SKY_APP_STARTED, CFE_EVS_EventType_INFORMATION, "SKYMEMORY: %u satellites listen",
                          SKY_App.count);
    }
    while (CFE_ES_RunLoop(&status))
    {
        int32 got = CFE_SB_ReceiveBuffer(&buffer, SKY_App.pipe, SKY_APP_HOUSEKEEPING_MS);
        if (got == CFE_SUCCESS)
            SKY_App_Command(buffer);
        else if (got == CFE_SB_TIME_OUT)
            SKY_App_Housekeeping();
        else
            status = CFE_ES_RunStatus_APP_ERROR;
    }
    SKY_App.stop = true;
    CFE_ES_ExitApp(status);
}
