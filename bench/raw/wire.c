/* Rails of our own wire: frames of a header and its bytes, through a ring in shared memory (`local`) or over a TCP
 * connection (`socket`), as aiote_native/streams has them, without what a library needs: checks, several peers, repair.
 *
 * A write is over when the receiver has counted its frame as landed: over `local` in a line of the ring, over `socket`
 * in the next header that goes back. Each side makes the rings that it reads; its peer opens them through /proc, so a
 * killed process leaves nothing behind. */
#include "raw.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    HEADER = 104,        /* bytes, as a header of aiote's streams */
    RING = 2 << 20,
    PIECE = 64 << 10,    /* of a copy before it is told, so that both sides copy at once */
    STAGE = 64 << 10,    /* of small frames that one system call receives */
    GATHER = 64,         /* frames that one system call sends */
    QUEUED = 4096,
    BUDGET = 1 << 20,    /* bytes that one poll receives of a rail */
};

enum op { PUT = 1, GET, DATA, MESSAGE, LANDED };

struct header {
    uint64_t op, size, at, landed;
    int64_t immediate;
    uint64_t back, rest[(HEADER - 48) / 8]; /* of a read: where the reader wants the bytes */
};
_Static_assert(sizeof(struct header) == HEADER, "a header of aiote's streams");

/* What a work request is while it waits: it lies where libfabric would have its context. */
struct frame {
    uint64_t op, size, at, local;
    int64_t immediate;
};
_Static_assert(sizeof(struct frame) <= sizeof(((struct work *)NULL)->context), "work has room for a frame");

struct line {
    _Alignas(64) _Atomic uint64_t value;
};

/* What a writer that sleeps waits for. */
enum { AWAKE, FOR_FRAMES, FOR_ROOM };

struct ring {
    struct line head, tail, landed;            /* bytes put in, bytes taken out, frames that landed */
    struct line reader_sleeps, writer_sleeps;
    uint64_t nonce;                            /* on the card, too: /proc is another machine's there */
    _Alignas(4096) uint8_t data[RING];
};

struct list {
    struct work *first, *last;
};

struct rail {
    struct ring *in, *out;
    int file, listener, wire;
    struct list queue, unacked, reads, receives, spare;
    uint64_t queued, sent, acked;              /* frames that wait; bytes of the first one that are out; landed there */
    uint64_t landed, told;                     /* frames that landed here, and what of that the peer was told */
    struct header headers[GATHER];             /* of the frames at the queue's head; the first may be out in part */
    struct header header;                      /* of the frame that comes in */
    uint64_t got, left;                        /* bytes of it that are here, and bytes that are not */
    uint8_t *to;
    struct work *message;
    size_t stage_from, stage_to;
    uint8_t stage[STAGE];
};

static struct rail rails[MAX_RAILS];
static bool over_tcp;

static struct frame *frame_of(struct work *work) { return (struct frame *)work->context; }

static void append(struct list *list, struct work *work) {
    work->next = NULL;
    if (list->first == NULL) list->first = work;
    else list->last->next = work;
    list->last = work;
}

static struct work *take_first(struct list *list) {
    struct work *work = list->first;
    if (work != NULL) list->first = work->next;
    return work;
}

/* Opening and connecting. */

static void listen_at(struct raw *self, struct rail *rail) {
    struct sockaddr_in at = {.sin_family = AF_INET};
    if (inet_pton(AF_INET, self->host, &at.sin_addr) != 1) fail("%s is no IPv4 address", self->host);
    rail->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (rail->listener < 0 || bind(rail->listener, (struct sockaddr *)&at, sizeof(at)) != 0 ||
        listen(rail->listener, 1) != 0)
        fail("cannot listen at %s: %s", self->host, strerror(errno));
}

static void make_ring(struct rail *rail) {
    rail->file = memfd_create("aiote-bench", MFD_CLOEXEC);
    if (rail->file < 0 || ftruncate(rail->file, sizeof(struct ring)) != 0) fail("no memory for a ring");
    rail->in = mmap(NULL, sizeof(struct ring), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, rail->file, 0);
    if (rail->in == MAP_FAILED) fail("cannot map a ring: %s", strerror(errno));
    if (getrandom(&rail->in->nonce, sizeof(rail->in->nonce), 0) != sizeof(rail->in->nonce)) fail("getrandom");
}

static void wire_open(struct raw *self) {
    over_tcp = strcmp(self->provider, "socket") == 0;
    snprintf(self->version, sizeof(self->version), "aiote"); /* no library: the engines' own rails say the same */
    self->rail_count = 1;
    for (const char *c = self->rails; *c; c++) self->rail_count += *c == ',';
    if (self->rail_count > MAX_RAILS) fail("at most %d rails", MAX_RAILS);
    for (int i = 0; i < self->rail_count; i++) {
        rails[i].wire = rails[i].listener = rails[i].file = -1;
        if (!over_tcp) make_ring(&rails[i]);
        else if (self->target) listen_at(self, &rails[i]);
    }
}

static void wire_card(struct raw *self, int i, struct card *out) {
    struct sockaddr_in at;
    socklen_t length = sizeof(at);
    memset(out, 0, sizeof(*out));
    snprintf(out->wire, sizeof(out->wire), "%s", self->provider);
    if (!over_tcp) {
        out->length = (uint32_t)snprintf((char *)out->name, NAME_BYTES, "/proc/%d/fd/%d", getpid(), rails[i].file);
        out->key = rails[i].in->nonce;
    } else if (self->target) {
        if (getsockname(rails[i].listener, (struct sockaddr *)&at, &length) != 0) fail("getsockname");
        out->length = sizeof(at);
        memcpy(out->name, &at, sizeof(at));
    }
}

static void connect_tcp(struct raw *self, struct rail *rail, const struct card *peer) {
    struct sockaddr_in at;
    int one = 1;
    if (self->target) {
        rail->wire = accept(rail->listener, NULL, NULL);
    } else {
        memcpy(&at, peer->name, sizeof(at));
        rail->wire = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (rail->wire < 0 || connect(rail->wire, (struct sockaddr *)&at, sizeof(at)) != 0)
            fail("cannot connect: %s", strerror(errno));
    }
    if (rail->wire < 0 || setsockopt(rail->wire, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)) != 0 ||
        fcntl(rail->wire, F_SETFL, O_NONBLOCK) != 0)
        fail("cannot connect: %s", strerror(errno));
}

static void wire_connect(struct raw *self, int i, const struct card *peer) {
    struct rail *rail = &rails[i];
    struct stat found;
    uint64_t nonce;
    int file;
    if (strncmp(peer->wire, self->provider, sizeof(peer->wire)) != 0) fail("the other side is over %.16s", peer->wire);
    if (over_tcp) {
        connect_tcp(self, rail, peer);
        return;
    }
    file = open((const char *)peer->name, O_RDWR | O_CLOEXEC);
    if (file < 0) fail("cannot open the other side's ring: %s", strerror(errno));
    if (fstat(file, &found) != 0 || found.st_size != sizeof(struct ring) ||
        pread(file, &nonce, sizeof(nonce), offsetof(struct ring, nonce)) != sizeof(nonce) || nonce != peer->key)
        fail("%s is not the other side's ring: local is between processes of one machine", (const char *)peer->name);
    rail->out = mmap(NULL, sizeof(struct ring), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
    if (rail->out == MAP_FAILED) fail("cannot map the other side's ring: %s", strerror(errno));
    close(file);
}

static void wire_close(struct raw *self) {
    for (int i = 0; i < self->rail_count; i++) {
        close(rails[i].file);
        close(rails[i].listener);
        close(rails[i].wire);
    }
}

/* Posting and sending. */

static void enqueue(struct rail *rail, struct work *work, struct frame frame) {
    *frame_of(work) = frame;
    append(&rail->queue, work);
    rail->queued++;
}

static int wire_post(struct raw *self, int i, struct work *work, uint64_t local, uint64_t remote, size_t size,
                     int64_t immediate) {
    static const enum op ops[] = {[WRITE] = PUT, [READ] = GET, [SEND] = MESSAGE, [CONTROL] = PUT};
    struct rail *rail = &rails[i];
    (void)self;
    if (work->what == RECEIVE) {
        frame_of(work)->local = local;
        append(&rail->receives, work);
        return 0;
    }
    if (rail->queued >= QUEUED) return -EAGAIN;
    enqueue(rail, work, (struct frame){ops[work->what], size, remote, local, immediate});
    return 0;
}

/* Bytes that follow the header of a frame. */
static uint64_t follow(uint64_t op, uint64_t size) { return op == GET || op == LANDED ? 0 : size; }

static void fill(struct rail *rail, struct header *header, const struct frame *frame) {
    *header = (struct header){.op = frame->op, .size = frame->size, .at = frame->at, .immediate = frame->immediate,
                              .back = frame->local, .landed = rail->landed};
    rail->told = rail->landed;
}

/* The first frame is out. Reads are answered in their order. */
static void record_sent(struct rail *rail) {
    struct work *work = take_first(&rail->queue);
    enum op op = frame_of(work)->op;
    rail->queued--;
    rail->sent = 0;
    if (op == PUT || op == MESSAGE) append(&rail->unacked, work);
    else append(op == GET ? &rail->reads : &rail->spare, work);
}

static void wake(int eventfd) {
    uint64_t one = 1;
    if (eventfd >= 0 && write(eventfd, &one, sizeof(one)) < 0 && errno != EAGAIN) fail("eventfd");
}

/* Wake the peer if it sleeps, for at least what `least` says. */
static void wake_if(struct raw *self, struct line *sleeps, uint64_t least) {
    if (atomic_load(&sleeps->value) >= least && atomic_exchange(&sleeps->value, AWAKE)) wake(self->peer_eventfd);
}

static uint64_t put(struct raw *self, struct ring *ring, const void *from, uint64_t bytes) {
    uint64_t head = atomic_load(&ring->head.value), at = head % RING;
    uint64_t room = RING - (head - atomic_load(&ring->tail.value));
    if (bytes > room) bytes = room;
    if (bytes > RING - at) bytes = RING - at;
    if (bytes > PIECE) bytes = PIECE;
    if (bytes == 0) return 0;
    memcpy(ring->data + at, from, bytes);
    atomic_store(&ring->head.value, head + bytes);
    /* Both sides copy at once; of less, `push_ring` tells when all is there. */
    if (bytes == PIECE) wake_if(self, &ring->reader_sleeps, FOR_FRAMES);
    return bytes;
}

static void push_ring(struct raw *self, struct rail *rail) {
    while (rail->queue.first != NULL) {
        const struct frame *frame = frame_of(rail->queue.first);
        struct header *header = &rail->headers[0];
        uint64_t all = HEADER + follow(frame->op, frame->size), part;
        if (rail->sent == 0) fill(rail, header, frame);
        part = rail->sent < HEADER
                   ? put(self, rail->out, (uint8_t *)header + rail->sent, HEADER - rail->sent)
                   : put(self, rail->out, self->arena + frame->local + rail->sent - HEADER, all - rail->sent);
        if (part == 0) break;
        rail->sent += part;
        if (rail->sent == all) record_sent(rail);
    }
    wake_if(self, &rail->out->reader_sleeps, FOR_FRAMES);
}

/* Name the bytes of the frames at the queue's head that are not out, and return how many pieces these are. */
static int gather(struct raw *self, struct rail *rail, struct iovec *pieces) {
    uint64_t skipped = rail->sent;
    struct work *work = rail->queue.first;
    int count = 0;
    for (int i = 0; i < GATHER && work != NULL; i++, work = work->next) {
        const struct frame *frame = frame_of(work);
        uint64_t bytes = follow(frame->op, frame->size);
        if (i > 0 || skipped == 0) fill(rail, &rail->headers[i], frame);
        if (skipped < HEADER) {
            pieces[count++] = (struct iovec){(uint8_t *)&rail->headers[i] + skipped, HEADER - skipped};
            skipped = HEADER;
        }
        if (bytes > skipped - HEADER)
            pieces[count++] = (struct iovec){self->arena + frame->local + skipped - HEADER, bytes - (skipped - HEADER)};
        skipped = 0;
    }
    return count;
}

static void push_tcp(struct raw *self, struct rail *rail) {
    while (rail->queue.first != NULL) {
        struct iovec pieces[2 * GATHER];
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)gather(self, rail, pieces)};
        ssize_t out = sendmsg(rail->wire, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        int done = 0;
        if (out < 0 && errno != EAGAIN) fail("send: %s", strerror(errno));
        for (uint64_t more = out < 0 ? 0 : (uint64_t)out; more > 0;) {
            const struct frame *frame = frame_of(rail->queue.first);
            uint64_t left = HEADER + follow(frame->op, frame->size) - rail->sent;
            if (more < left) {
                rail->sent += more;
                break;
            }
            more -= left;
            record_sent(rail);
            done++;
        }
        /* What of a header is out must not change any more. */
        if (rail->sent && done) rail->headers[0] = rail->headers[done];
        if (out < 0 || rail->sent) return;
    }
}

static void push(struct raw *self, struct rail *rail) {
    if (over_tcp) push_tcp(self, rail);
    else push_ring(self, rail);
    for (struct work *work; (work = take_first(&rail->spare)) != NULL;) work_give(self, work);
}

/* Tell the peer what has landed, if no frame has told it. */
static void tell(struct raw *self, struct rail *rail) {
    if (!over_tcp || rail->told == rail->landed || rail->queue.first != NULL) return;
    enqueue(rail, work_take(self, CONTROL, 0), (struct frame){.op = LANDED});
    push(self, rail);
}

static void wire_flush(struct raw *self) {
    for (int i = 0; i < self->rail_count; i++) {
        push(self, &rails[i]);
        /* After the run's end nothing is polled that would tell. */
        if (self->ended) tell(self, &rails[i]);
    }
}

/* Receiving. */

static uint64_t take_ring(struct raw *self, struct ring *ring, void *to, uint64_t bytes) {
    uint64_t tail = atomic_load(&ring->tail.value), here = atomic_load(&ring->head.value) - tail, at = tail % RING;
    if (bytes > here) bytes = here;
    if (bytes > RING - at) bytes = RING - at;
    if (bytes > PIECE) bytes = PIECE;
    if (bytes == 0) return 0;
    memcpy(to, ring->data + at, bytes);
    atomic_store(&ring->tail.value, tail + bytes);
    if (here - bytes <= RING / 2) wake_if(self, &ring->writer_sleeps, FOR_ROOM);
    return bytes;
}

static uint64_t receive_tcp(struct rail *rail, void *to, uint64_t bytes) {
    ssize_t in = recv(rail->wire, to, bytes, MSG_DONTWAIT);
    if (in == 0) fail("the other side has gone");
    if (in < 0 && errno != EAGAIN) fail("receive: %s", strerror(errno));
    return in < 0 ? 0 : (uint64_t)in;
}

static uint64_t take_tcp(struct rail *rail, void *to, uint64_t bytes) {
    if (rail->stage_from == rail->stage_to) {
        if (bytes >= STAGE) return receive_tcp(rail, to, bytes);
        rail->stage_from = 0;
        rail->stage_to = receive_tcp(rail, rail->stage, STAGE);
    }
    if (bytes > rail->stage_to - rail->stage_from) bytes = rail->stage_to - rail->stage_from;
    memcpy(to, rail->stage + rail->stage_from, bytes);
    rail->stage_from += bytes;
    return bytes;
}

static uint64_t take(struct raw *self, struct rail *rail, void *to, uint64_t bytes) {
    return over_tcp ? take_tcp(rail, to, bytes) : take_ring(self, rail->in, to, bytes);
}

static int acknowledge(struct raw *self, struct rail *rail, uint64_t landed) {
    int count = 0;
    for (; rail->acked < landed && rail->unacked.first != NULL; rail->acked++, count++)
        completed(self, take_first(&rail->unacked));
    return count;
}

/* A header is here: find out where its bytes go. */
static int begin_frame(struct raw *self, struct rail *rail) {
    const struct header *header = &rail->header;
    uint64_t at = header->at, most = self->arena_bytes;
    rail->left = follow(header->op, header->size);
    if (header->op == DATA && rail->reads.first == NULL) fail("bytes came for no read");
    if (header->op == MESSAGE) {
        rail->message = take_first(&rail->receives);
        if (rail->message == NULL) fail("a message came, and no receive is posted");
        at = frame_of(rail->message)->local;
        most = at + MESSAGE_BYTES;
    }
    if (header->op < PUT || header->op > LANDED) fail("a malformed header came");
    if (at > most || header->size > most - at) fail("a header came whose bytes leave the memory");
    rail->to = self->arena + at;
    return over_tcp ? acknowledge(self, rail, header->landed) : 0;
}

static int end_frame(struct raw *self, struct rail *rail) {
    const struct header *header = &rail->header;
    rail->got = 0;
    rail->landed += header->op == PUT || header->op == MESSAGE;
    if (header->op == PUT && header->immediate >= 0) arrived(self, (uint64_t)header->immediate);
    if (header->op == MESSAGE) completed(self, rail->message);
    if (header->op == DATA) completed(self, take_first(&rail->reads));
    if (header->op == GET)
        enqueue(rail, work_take(self, CONTROL, 0),
                (struct frame){DATA, header->size, header->back, header->at, -1});
    return header->op != LANDED;
}

/* Receive up to BUDGET bytes of a rail; return how many frames and ends of requests came, and whether any byte did. */
static int receive(struct raw *self, struct rail *rail, bool *moved) {
    uint64_t budget = BUDGET, part;
    int count = 0;
    while (budget > 0) {
        if (rail->got < HEADER) {
            part = take(self, rail, (uint8_t *)&rail->header + rail->got, HEADER - rail->got);
            if ((rail->got += part) == HEADER) count += begin_frame(self, rail);
        } else {
            part = take(self, rail, rail->to, rail->left < budget ? rail->left : budget);
            rail->to += part;
            rail->left -= part;
        }
        if (part == 0) break;
        *moved = true;
        budget -= part < budget ? part : budget;
        if (rail->got == HEADER && rail->left == 0) count += end_frame(self, rail);
    }
    if (!over_tcp && atomic_load(&rail->in->landed.value) != rail->landed) {
        atomic_store(&rail->in->landed.value, rail->landed);
        wake_if(self, &rail->in->writer_sleeps, FOR_FRAMES);
    }
    return count;
}

static int wire_poll(struct raw *self) {
    int count = 0;
    bool moved = false;
    for (int i = 0; i < self->rail_count; i++) {
        struct rail *rail = &rails[i];
        tell(self, rail);
        push(self, rail);
        if (!over_tcp) count += acknowledge(self, rail, atomic_load(&rail->out->landed.value));
        count += receive(self, rail, &moved);
    }
    return count + moved;
}

/* Sleeping. */

static bool ready(struct raw *self) {
    for (int i = 0; i < self->rail_count; i++) {
        struct rail *rail = &rails[i];
        uint64_t used = atomic_load(&rail->out->head.value) - atomic_load(&rail->out->tail.value);
        if (atomic_load(&rail->in->head.value) != atomic_load(&rail->in->tail.value)) return true;
        if (atomic_load(&rail->out->landed.value) > rail->acked) return true;
        if (rail->queue.first != NULL && used <= RING / 2) return true;
    }
    return false;
}

static void set_sleeps(struct raw *self, bool sleeps) {
    for (int i = 0; i < self->rail_count; i++) {
        uint64_t reader = sleeps ? FOR_FRAMES : AWAKE, writer = rails[i].queue.first != NULL ? FOR_ROOM : FOR_FRAMES;
        atomic_store(&rails[i].in->reader_sleeps.value, reader);
        atomic_store(&rails[i].out->writer_sleeps.value, sleeps ? writer : AWAKE);
    }
}

static void sleep_tcp(struct raw *self) {
    struct pollfd set[MAX_RAILS];
    for (int i = 0; i < self->rail_count; i++) {
        tell(self, &rails[i]);
        set[i] = (struct pollfd){rails[i].wire, (short)(POLLIN | (rails[i].queue.first != NULL ? POLLOUT : 0)), 0};
    }
    poll(set, (nfds_t)self->rail_count, 100);
}

static void wire_sleep(struct raw *self) {
    struct pollfd set = {self->own_eventfd, POLLIN, 0};
    uint64_t woken;
    if (over_tcp) {
        sleep_tcp(self);
        return;
    }
    if (self->own_eventfd < 0) return;
    set_sleeps(self, true);
    if (!ready(self)) poll(&set, 1, 100);
    set_sleeps(self, false);
    if (read(self->own_eventfd, &woken, sizeof(woken)) < 0 && errno != EAGAIN) fail("eventfd");
}

const struct kind wire_kind = {
    .open = wire_open, .card = wire_card, .connect = wire_connect, .post = wire_post, .flush = wire_flush,
    .poll = wire_poll, .sleep = wire_sleep, .close = wire_close,
};
