#!/bin/sh
# Finds out what this machine lacks to build and run aiote, and installs it from Debian's packages: with root, or with
# sudo. On other systems it names what is needed. It touches nothing where nothing is missing.
#
# usage: system.sh PYTHON [run|test [again]]
#   test: what some tests need as well; without it they are skipped, so nothing fails where it cannot be installed
set -eu
python=$1
purpose=${2:-run}

have_header() {  # a compiler that finds the header, and the C library's headers with it
    # Without quotes: CC may be a command with arguments, such as "ccache gcc".
    echo "#include <$1>" | ${CC:-cc} ${CPPFLAGS:-} ${CFLAGS:-} -E -xc - >/dev/null 2>&1
}

have_library() {  # a name, or a pattern for one
    for folder in /usr/lib/*-linux-gnu /usr/lib64 /usr/lib /usr/local/lib /opt/amazon/efa/lib /opt/amazon/efa/lib64; do
        for file in "$folder"/$1; do
            [ ! -e "$file" ] || return 0
        done
    done
    return 1
}

in_python() {
    "$python" -c "$1" >/dev/null 2>&1
}

missing=
need() {
    missing="$missing $1"
}

command -v ${CC:-cc} >/dev/null || need gcc
have_header stdlib.h || need libc6-dev
have_header rdma/fabric.h || need libfabric-dev
have_header infiniband/verbs.h || need libibverbs-dev
have_library libfabric.so.1 || need libfabric1
have_library libibverbs.so.1 || need libibverbs1
if ! command -v "$python" >/dev/null; then
    [ "$python" = python3 ] || { echo "error: PYTHON=$python was not found; name an installed Python 3.11 or later" >&2; exit 1; }
    need python3 && need python3-dev && need python3-venv
else
    in_python 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "error: $python is $("$python" --version 2>&1), aiote needs Python 3.11 or later;" \
            "name a newer one, for example: make demo PYTHON=python3.12" >&2
        exit 1
    }
    # Only Debian's own interpreter takes these from a package.
    own=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2] if sys.base_prefix == "/usr" else "")')
    in_python 'import sysconfig, os; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' ||
        need "${own:-python3}-dev"
    in_python 'import ensurepip, venv' || need "${own:-python3}-venv"
fi
wished=
wish() {
    wished="$wished $1"
}
if [ "$purpose" = test ]; then
    PATH="$PATH:/usr/sbin:/sbin"
    # network namespaces that are joined, and cut; the guest's network (tools/guest)
    { command -v ip && command -v rdma && command -v tc; } >/dev/null || wish iproute2
    command -v iptables >/dev/null || wish iptables
    # the guest's kernel, and RDMA devices in software
    for program in make flex bison bc; do
        command -v "$program" >/dev/null || wish "$program"
    done
    command -v xz >/dev/null || wish xz-utils
    have_library 'libibverbs/librxe-rdmav*.so' || wish ibverbs-providers
    command -v ib_write_bw >/dev/null || wish perftest
    # the emulation of a GPU
    command -v "${CXX:-g++}" >/dev/null || wish g++
    # a registry of members
    command -v etcd >/dev/null || wish etcd-server
    # metrics and the dashboard, as Prometheus reads them
    command -v promtool >/dev/null || wish prometheus
    # aiote top, as people see it
    command -v tmux >/dev/null || wish tmux
    # the page of examples/kvcache, as people see it
    command -v chromium >/dev/null || wish chromium
fi
[ -n "$missing$wished" ] || exit 0
if [ "${3:-}" = again ]; then
    [ -z "$wished" ] || echo "tests that need one of these will be skipped:$wished" >&2
    [ -n "$missing" ] || exit 0
    echo "error: these packages are still missing after the installation:$missing" >&2
    exit 1
fi
[ -z "$missing" ] || command -v fi_info >/dev/null || need libfabric-bin  # shows what libfabric finds; no need of ours

if [ -z "$missing" ] && { ! command -v apt-get || { [ "$(id -u)" != 0 ] && ! command -v sudo; }; } >/dev/null; then
    exec sh "$0" "$python" "$purpose" again
fi
if ! command -v apt-get >/dev/null; then
    echo "error: this machine lacks the counterparts of these Debian packages:$missing" >&2
    echo "Install them and run make again. On Fedora and similar systems:" \
        "dnf install gcc glibc-devel libfabric libfabric-devel python3-devel; on Arch: pacman -S gcc libfabric python" >&2
    exit 1
fi
as_root=
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || {
        echo "error: these Debian packages are missing:$missing" >&2
        echo "Run this as root, then make again: apt-get install$missing" >&2
        exit 1
    }
    as_root=sudo
fi
echo "installing the Debian packages that are missing:$missing$wished"
[ -n "$as_root" ] && [ ! -t 0 ] && as_root='sudo -n'
$as_root apt-get update -qq || echo "apt-get update failed; continuing with the present package lists" >&2
install="$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends"
[ -z "$missing" ] || $install $missing
[ -z "$wished" ] || $install $wished || echo "could not install (tests that need them are skipped):$wished" >&2
exec sh "$0" "$python" "$purpose" again
