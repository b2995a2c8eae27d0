"""The entry of a child process: `python -m aiote.demo.worker ROLE`, its job a line of JSON on standard input.

It ends when standard input does: with the run, or with the parent, however that died.
"""

from __future__ import annotations

import signal
import sys
import traceback

import anyio

from aiote.demo import local
from aiote.demo.child import leave_with_parent
from aiote.demo.faults import DemoError, leaves
from aiote.demo.settings import Job
from aiote.errors import AioteError

__all__ = ["main"]


def main(role: str) -> int:
    """Do the job of a role until standard input ends; returns the exit status."""
    job = Job.from_json(sys.stdin.buffer.readline())
    leave_with_parent(sys.stdin.fileno())
    try:
        if role == "local":
            local.main(job)
        else:
            anyio.run(_serve, role, job)
    except BaseException as error:
        return _explain(error)
    return 0


async def _serve(role: str, job: Job) -> None:
    """Run the prefiller or the decoder until SIGTERM; the engine closes on the way out."""
    import aiote
    from aiote.demo.decode import DecodeServer
    from aiote.demo.mail import open_mail
    from aiote.demo.prefill import PrefillServer

    service = PrefillServer if role == "prefill" else DecodeServer
    model = job.settings.model()
    with anyio.open_signal_receiver(signal.SIGTERM) as terms:
        async with anyio.create_task_group() as group:

            async def leave() -> None:
                async for _ in terms:
                    group.cancel_scope.cancel()

            group.start_soon(leave)
            async with open_mail(job.settings.provider) as mail:
                router = await mail.engine.connect(aiote.Address.parse(job.router))
                await service(mail, router, job.settings, model).run()


def _explain(error: BaseException) -> int:
    """Write what ended this process to standard error: a line for what is foreseen, a traceback for what is not."""
    causes = list(leaves(error))
    if all(isinstance(cause, (DemoError, AioteError, BrokenPipeError)) for cause in causes):
        print("; ".join(dict.fromkeys(str(cause) for cause in causes)), file=sys.stderr)
        return 3
    traceback.print_exception(error)
    # The router shows the last line, and that of a group's traceback is a rule.
    print("; ".join(f"{type(cause).__name__}: {cause}" for cause in causes), file=sys.stderr)
    return 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
