"""Memory that a NIC would have to lock, in a process that may lock little: refused with what to do, and well again.

In a process of its own, because root may lock any amount: it becomes somebody else once its devices are open.
"""

from __future__ import annotations

import pytest

from support.engines.opening import ports, run_script

pytestmark = [pytest.mark.needs_rdma, pytest.mark.blocking_allowed("runs a process, and no engine of its own")]
NOBODY = 65534

REGISTERS = """
    import asyncio, os, resource, sys, aiote

    async def main(device, user):
        async with aiote.open_engine("verbs", [device]) as engine:
            before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            os.setresuid(user, user, 0)
            for limit, size in [(64 << 10, 16 << 20), (before[0], 16 << 20)]:
                resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, before[1]))
                for waits in (False, True):
                    memory = bytearray(size)
                    try:
                        region = await engine.register_async(memory) if waits else engine.register(memory)
                        await region.aclose()
                        print("registered")
                    except aiote.FabricError as error:
                        print(error.operation, error.rail, os.strerror(error.errno), error)
                os.setresuid(0, 0, 0)

    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_memory_that_may_not_be_locked_is_refused_with_the_limit():
    device = next(ports())
    done = run_script(REGISTERS, device, str(NOBODY))
    assert done.returncode == 0, done.stderr
    refused, refused_async, *well = done.stdout.splitlines()
    assert well == ["registered", "registered"]
    for said in (refused, refused_async):
        assert said.startswith(f"register memory {device} Cannot allocate memory"), said
        assert "this process may lock 64 KiB: raise the limit (ulimit -l)" in said
