"""Find what a machine lacks for RDMA and for aiote, and the command that mends it (`aiote doctor`).

`facts` reads, `findings` judges and reads nothing. This package must not open engines or change the machine.
"""
