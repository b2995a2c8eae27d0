/* One side of the baseline, driven by lines on standard input and answering in lines of JSON, as every worker of
 * `aiote bench` is (aiote/bench/worker.py has the protocol). */
#include "raw.h"

#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>

enum { LINE_BYTES = 16384, HUGE_BYTES = 2 << 20 };

_Noreturn void fail(const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    for (char *c = text; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ') *c = '\'';
    printf("{\"error\": \"%s\"}\n", text);
    fflush(stdout);
    exit(1);
}

static const char *value_of(int argc, char **argv, const char *name, const char *otherwise) {
    for (int i = 1; i + 1 < argc; i += 2)
        if (strcmp(argv[i], name) == 0) return argv[i + 1];
    return otherwise;
}

/* Huge pages from the first byte on: with small ones a copy between processes costs twice as much. */
static uint8_t *allocate(size_t bytes) {
    uint8_t *memory = mmap(NULL, bytes + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for an arena of %zu bytes", bytes);
    memory += HUGE_BYTES - (uintptr_t)memory % HUGE_BYTES;
    madvise(memory, bytes, MADV_HUGEPAGE);
    memset(memory, 0, bytes);
    return memory;
}

static void settings(struct raw *self, int argc, char **argv) {
    const char *mode = value_of(argc, argv, "--mode", "spin");
    cpu_set_t set;
    if (argc % 2 == 0) fail("options come in pairs: --name value");
    self->target = strcmp(value_of(argc, argv, "--role", "target"), "target") == 0;
    self->provider = value_of(argc, argv, "--provider", "tcp");
    self->kind = strcmp(self->provider, "verbs") == 0 ? &verbs_kind : &fabric_kind;
    if (strcmp(self->provider, "local") == 0 || strcmp(self->provider, "socket") == 0) self->kind = &wire_kind;
    self->library = value_of(argc, argv, "--library", "");
    self->host = value_of(argc, argv, "--host", "127.0.0.1");
    self->rails = value_of(argc, argv, "--rails", "");
    self->sleeps = strcmp(mode, "spin") != 0;
    self->spin_ns = strcmp(mode, "default") == 0 ? SPIN_NS : 0;
    self->processor = atoi(value_of(argc, argv, "--cpu", "-1"));
    self->own_eventfd = atoi(value_of(argc, argv, "--own-eventfd", "-1"));
    self->peer_eventfd = atoi(value_of(argc, argv, "--peer-eventfd", "-1"));
    self->arena_bytes = strtoull(value_of(argc, argv, "--arena", "67108864"), NULL, 10);
    if (self->processor >= 0) {
        CPU_ZERO(&set);
        CPU_SET(self->processor, &set);
        if (sched_setaffinity(0, sizeof(set), &set) != 0) fail("cannot run on processor %d", self->processor);
    }
    self->arena = allocate(self->arena_bytes);
}

static void say_address(struct raw *self) {
    struct card card;
    printf("{\"library\": \"%s\", \"address\": \"", self->version);
    for (int i = 0; i < self->rail_count; i++) {
        self->kind->card(self, i, &card);
        for (size_t j = 0; j < sizeof(card); j++) printf("%02x", ((uint8_t *)&card)[j]);
    }
    printf("\"}\n");
    fflush(stdout);
}

static void meet(struct raw *self, const char *text) {
    struct card card;
    for (int i = 0; i < self->rail_count; i++) {
        for (size_t j = 0; j < sizeof(card); j++, text += 2) {
            unsigned byte;
            if (sscanf(text, "%2x", &byte) != 1) fail("the peer's address is too short: both sides need as many rails");
            ((uint8_t *)&card)[j] = (uint8_t)byte;
        }
        if (card.length > NAME_BYTES) fail("the peer's address is malformed");
        self->kind->connect(self, i, &card);
    }
    printf("{\"ready\": true}\n");
    fflush(stdout);
}

static void parse(char *text, struct run *run) {
    char *word;
    memset(run, 0, sizeof(*run));
    while ((word = strsep(&text, " \n")) != NULL) {
        char *value = strchr(word, '=');
        if (value == NULL) continue;
        *value++ = 0;
        if (strcmp(word, "op") == 0) snprintf(run->op, sizeof(run->op), "%s", value);
        else if (strcmp(word, "size") == 0) run->size = strtoull(value, NULL, 10);
        else if (strcmp(word, "window") == 0) run->window = strtoull(value, NULL, 10);
        else if (strcmp(word, "count") == 0) run->count = strtoull(value, NULL, 10);
        else if (strcmp(word, "pages") == 0) run->pages = strtoull(value, NULL, 10);
        else if (strcmp(word, "seed") == 0) run->seed = strtoull(value, NULL, 10);
    }
}

static void answer(const struct run *run, const struct result *result) {
    printf("{\"seconds\": %.9f, \"cpu\": %.9f, \"verified\": %s", result->seconds, result->cpu,
           result->verified ? "true" : "false");
    if (strcmp(run->op, "latency") == 0)
        printf(", \"p50_us\": %.3f, \"p99_us\": %.3f, \"max_us\": %.3f", result->p50, result->p99, result->worst);
    printf("}\n");
    fflush(stdout);
}

int main(int argc, char **argv) {
    static char line[LINE_BYTES];
    struct raw self = {0};
    struct run run = {0};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setenv("FI_OFI_RXM_USE_SRX", "0", 0);
    settings(&self, argc, argv);
    self.kind->open(&self);
    say_address(&self);
    while (fgets(line, sizeof(line), stdin) != NULL && strncmp(line, "quit", 4) != 0) {
        struct result result = {0};
        if (strncmp(line, "peer ", 5) == 0) {
            meet(&self, line + 5);
        } else if (strncmp(line, "run ", 4) == 0) {
            parse(line + 4, &run);
            if (!supported(&run)) fail("no such work: %s", run.op);
            prepare(&self, &run);
            printf("{\"prepared\": true}\n");
            fflush(stdout);
        } else if (strncmp(line, "go", 2) == 0) {
            if (self.target) run_target(&self, &run, &result);
            else run_initiator(&self, &run, &result);
            answer(&run, &result);
        }
    }
    self.kind->close(&self);
    return 0;
}
