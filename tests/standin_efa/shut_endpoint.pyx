"""What an endpoint answers once it is shut: its receives and pieces know that it is gone."""

from libc.stdint cimport uint8_t
from libc.string cimport memset

from aiote_native.engine.structs cimport OP_SEND, OP_WRITE, Completion, Post, WorkRequest
from aiote_native.libfabric.endpoint cimport LibfabricEndpoint


def after_shut(LibfabricEndpoint endpoint):
    """Shut it; return what a message, a write, and a poll are answered."""
    cdef uint8_t[64] memory
    cdef Completion[16] found
    cdef WorkRequest wr
    cdef Post args
    memset(&wr, 0, sizeof(wr))
    memset(&args, 0, sizeof(args))
    args.local = memory
    args.length = sizeof(memory)
    args.parts = 1
    endpoint.ops.shut(endpoint.impl)
    answers = []
    for opcode in (OP_SEND, OP_WRITE):
        args.opcode = opcode
        answers.append(endpoint.ops.post(endpoint.impl, &args, &wr))
    answers.append(endpoint.ops.poll(endpoint.impl, found, 16))
    return answers
