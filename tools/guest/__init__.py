"""Runs a command under a throw-away kernel that has software RDMA NICs; needs nothing but the standard library.

`options` has what can be asked for, `run` does it. `ways` chooses between two kinds of guest: `uml`, a kernel that is
an ordinary program, and `qemu`, a virtual machine with its processor emulated or not. `job` writes down what the guest
is to do, with its `network`; `channels` hands on what it says; `guard` clears up. A kernel is made once, by `kernel`
for the one kind and `debian` for the other, from what `packages` gets, and kept by `cache`.
"""
