"""`python tools/guest`: what it would do, how it refuses, and one run where this machine has a kernel for it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from guest import cache, channels, debian, host, job, kernel, network, options, ways

PROGRAM = Path(__file__).parents[2] / "tools" / "guest"
KERNEL = kernel.home(Path(options.default_cache(os.environ)), "linux-source")


def parsed(*arguments: str, **environment: str) -> options.Options:
    return options.parse([*arguments, "--", "true"], {"RDMA_VM_CACHE": "/nowhere", **environment})


def guest(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    if os.uname().machine != "x86_64":
        pytest.skip("guests are for hosts with x86_64 processors")
    known = {name: value for name, value in os.environ.items() if not name.startswith("RDMA_VM_")}
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, cwd=cwd, env={**known, **environment}, capture_output=True, text=True, timeout=100)


# ------------------------------------------------------------------------------------------------------- options


def test_options_that_are_not_given_have_defaults_or_variables():
    plain = parsed()
    assert plain == options.Options(["true"], Path("/nowhere"))
    assert parsed(RDMA_VM_HOW="tcg", RDMA_VM_SOURCE="linux-source-6.12").how == "tcg"


def test_options_that_are_given_are_parsed():
    given = options.parse(
        ["--nics", "4", "--how", "uml", "--rw", "a", "--rw", "b", "-v", "--cache", "here", "--", "sh", "-c", "exit 7"],
        {},
    )
    assert given.command == ["sh", "-c", "exit 7"]
    assert (given.nics, given.how, given.rw, given.verbose) == (4, "uml", ("a", "b"), True)
    assert given.cache == Path("here").absolute()
    assert options.parse(["--build-uml"], {}).command == []


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, os.path.expanduser("~/.cache/rdma-vm")),
        ({"XDG_CACHE_HOME": "/x"}, "/x/rdma-vm"),
        ({"XDG_CACHE_HOME": "/x", "RDMA_VM_CACHE": "/y"}, "/y"),
    ],
)
def test_kernels_are_kept_in_the_users_cache_folder(environment, folder):
    assert options.default_cache(environment) == folder


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "expected a command"),
        (["--nics", "101", "--", "true"], "--nics: from 0 to 100"),
        (["--how", "xen"], "invalid choice"),
    ],
)
def test_a_command_line_without_sense_is_refused(arguments, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        options.parse(arguments, {})
    assert says in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- cache


def test_kernels_that_were_built_are_found_again():
    """A change here makes everybody build the kernel once more: it has to be meant."""
    assert kernel.home(Path("/c"), "linux-source") == Path("/c/linux-source-06b8caed88")
    assert debian.home(Path("/c"), "linux-image-amd64") == Path("/c/linux-image-amd64-dfd074d31a")
    assert kernel.home(Path("/c"), "/tmp/linux.deb") == Path("/c/linux.deb-06b8caed88")


def test_what_is_there_is_not_made_again(tmp_path):
    made = []

    def fill(package: str, folder: Path, scratch: Path) -> None:
        made.append(package)
        (folder / "kernel").write_text(package)
        (scratch / "rubbish").write_text("")

    for _ in range(2):
        cache.make(tmp_path / "cache" / "it", "package", fill)
    assert made == ["package"]
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()] == ["cache/it/kernel"]


def test_what_fails_leaves_nothing_and_can_be_tried_again(tmp_path):
    def fail(package: str, folder: Path, scratch: Path) -> None:
        (folder / "half").write_text("")
        raise host.Problem("no")

    for _ in range(2):
        with pytest.raises(host.Problem, match="no"):
            cache.make(tmp_path / "it", "package", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["it.lock"]


def test_two_at_a_time_do_the_work_once(tmp_path):
    """The second waits for the lock, then finds what the first has made."""
    filling, go_on, made = threading.Event(), threading.Event(), []

    def fill(package: str, folder: Path, scratch: Path) -> None:
        made.append(package)
        filling.set()
        assert go_on.wait(30)

    threads = [threading.Thread(target=cache.make, args=(tmp_path / "it", f"{i}", fill)) for i in range(2)]
    threads[0].start()
    assert filling.wait(30)
    threads[1].start()
    with (tmp_path / "it.lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert made == ["0"]
    assert [p.name for p in tmp_path.iterdir()] == ["it"]


# ------------------------------------------------------------------------------------------------- what the guest does


def script(tmp_path: Path, *arguments: str, shares: dict[str, str] | None = None) -> str:
    asked = parsed("--how", "uml", *arguments)
    asked.command = ["printf", "%s\n", "it's @HERE@"]
    place = job.Place("/my work", {"HOME": "/h", "A": "x y", "BASH_FUNC_f%%": "() {}"}, shares or {})
    return job.script(asked, ways.choose(asked), tmp_path, place, "end-mark")


def test_the_start_script_prepares_folders_network_and_command(tmp_path):
    text = script(tmp_path, shares={"rw0": "/my work"})
    lines = text.splitlines()
    assert "env -i HOME=/h 'A=x y' RDMA_VM=uml printf '%s" in text
    assert "'it'\"'\"'s @HERE@'" in text
    assert "BASH_FUNC" not in text
    assert "mount -t hostfs -o '/my work' rw0 '/my work' || give_up cannot share '/my work'" in lines
    assert "cd '/my work' || give_up \"cannot enter the current directory\"" in lines
    assert f'ip -b {tmp_path}/ip || give_up "cannot set up the network"' in lines
    assert lines.count("printf %s end-mark >$out") == lines.count("printf %s end-mark >$err") == 1
    assert "/dev/ttyS0" in text
    assert "virtio-ports" in script(tmp_path, "--how", "tcg")
    assert "mount -t 9p" in script(tmp_path, "--how", "tcg", shares={"rw0": "/w"})


@pytest.mark.parametrize("how", ["uml", "tcg"])
def test_the_start_script_parses_in_sh(how, tmp_path):
    text = script(tmp_path, "--how", how, shares={"rw0": "/a'b"})
    subprocess.run(["sh", "-n"], input=text, text=True, check=True)


def test_every_nic_is_reached_over_the_switch():
    lines = network.cables(3, 9000)
    for nic, own in enumerate(("10.77.0.1", "10.77.0.2", "10.77.0.3")):
        assert f"link set sw{nic} master switch up" in lines
        assert f"address add {own}/24 dev nic{nic}" in lines
        assert f"rule add pref {200 + nic} iif lo from {own} to 10.77.0.0/24 lookup {1000 + nic}" in lines
        assert sum(line.endswith(f"dev nic{nic} nud permanent") for line in lines) == 2
    assert network.devices(2, "siw") == ["link add siw0 type siw netdev nic0", "link add siw1 type siw netdev nic1"]
    assert network.devices(0, "rxe") == []


def test_only_the_current_and_the_named_folders_are_written_through(tmp_path):
    cwd, other = str(tmp_path), str(tmp_path.parent)
    assert job.shared_folders(cwd, (), False) == {"rw0": cwd}
    assert job.shared_folders(cwd, (other, other, cwd), False) == {"rw0": cwd, "rw1": other}
    assert job.shared_folders(cwd, (), True) == {}


END = b"end-mark"


@given(st.binary() | st.lists(st.sampled_from([b"end-", b"e", b"x"])).map(b"".join), st.binary(), st.randoms())
def test_the_output_ends_at_the_mark(output, behind, random):
    """However the stream is cut, what comes before the mark is handed over, whole, and nothing else."""
    seen: list[bytes] = []
    stream = channels.Output(seen.append, END)
    left = output + END + behind
    whole = left[: left.index(END)]
    while left:
        size = random.randint(1, 5)
        stream.feed(left[:size])
        left = left[size:]
    assert (b"".join(seen), stream.ended) == (whole, True)


def test_a_stream_that_breaks_off_is_handed_over_to_its_last_byte():
    seen: list[bytes] = []
    stream = channels.Output(seen.append, END)
    stream.feed(b"the end-ma")
    assert seen == [b"the "]
    stream.flush()
    assert b"".join(seen) == b"the end-ma"


# ----------------------------------------------------------------------------------------------------- refusals


def test_what_is_missing_is_named_with_one_command():
    missing = host.lacking({"sh": "dash", "no-such-a": "one", "no-such-b": "one", "no-such-c": "two"})
    with pytest.raises(host.Problem) as caught:
        host.require(missing, "run the guest")
    said = "this machine lacks no-such-a, no-such-b, no-such-c, needed to run the guest; as root: "
    assert str(caught.value) == f"{said}apt-get install --no-install-recommends one two"
    host.require({}, "do nothing")


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr.startswith("guest: ")
    assert "Traceback" not in done.stderr
    return done.stderr


def test_building_without_the_tools_says_what_to_install(tmp_path):
    said = refused(guest("--build-uml", "--cache", f"{tmp_path}/cache", cwd=tmp_path, PATH=str(tmp_path)))
    assert "apt-get install --no-install-recommends make gcc flex bison bc xz-utils libc6-dev" in said
    assert list(tmp_path.iterdir()) == []


def test_building_what_is_built_costs_nothing(tmp_path):
    kernel.home(tmp_path, "linux-source").mkdir()
    done = guest("--build-uml", "--cache", str(tmp_path), cwd=tmp_path, PATH="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(bool(host.lacking({"ip": "", "rdma": ""}, host.SYSTEM_PATH)), reason="no ip or rdma (iproute2)")
def test_a_missing_kernel_is_named_with_the_command_that_builds_it(tmp_path):
    said = refused(guest("--how", "uml", "--cache", str(tmp_path), "--", "true", cwd=tmp_path))
    assert f"there is no user-mode kernel in {tmp_path}; to build it: python tools/guest --build-uml" in said


@pytest.mark.skipif(bool(host.lacking({"ip": "", "rdma": ""}, host.SYSTEM_PATH)), reason="no ip or rdma (iproute2)")
def test_folders_that_may_not_be_written_through_are_refused(tmp_path):
    kernel.home(tmp_path, "linux-source").mkdir()
    ask = ["--how", "uml", "--cache", str(tmp_path), "--rw"]
    assert "--rw gone: there is no such folder" in refused(guest(*ask, "gone", "--", "true", cwd=tmp_path))
    assert "would write through to all of /" in refused(guest(*ask, str(tmp_path), "--", "true", cwd=Path("/")))


def test_a_driver_that_the_kernel_has_not_is_refused(tmp_path):
    said = refused(guest("--how", "tcg", "--driver", "siw", "--", "true", cwd=tmp_path))
    assert "--how uml" in said


# --------------------------------------------------------------------------------------------------- a real run

RUN = pytest.mark.skipif(
    "RDMA_VM" in os.environ or not KERNEL.is_dir(),
    reason=f"no guest kernel ({KERNEL}; python tools/guest --build-uml makes it), or in a guest already",
)


@RUN
def test_a_run_has_the_devices_output_status_and_files_of_its_command(tmp_path):
    """Both devices are there, output and status are the command's, and its files stay."""
    shell = 'rdma link; echo "by $RDMA_VM" >&2; echo kept >file; echo lost >/usr/lost; exit 7'
    done = guest("--how", "uml", "--nics", "2", "--", "sh", "-c", shell, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    devices = [line.split()[1:4] for line in done.stdout.splitlines()]
    assert devices == [["rxe0/1", "state", "ACTIVE"], ["rxe1/1", "state", "ACTIVE"]]
    assert done.stderr == "by uml\n"
    assert (tmp_path / "file").read_text() == "kept\n"
    assert not Path("/usr/lost").exists()


@RUN
def test_a_command_that_takes_too_long_is_ended(tmp_path):
    done = guest("--how", "uml", "--timeout", "5", "--", "sh", "-c", "echo first; sleep 100", cwd=tmp_path)
    said = "guest: the command exceeded its limit of 5 s\n"
    assert (done.returncode, done.stdout, done.stderr) == (124, "first\n", said)
